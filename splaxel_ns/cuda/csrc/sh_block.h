// spherical_harmonics, one block of Gaussians: memory layout around the mathematics of include/sh.h. The rows of
// coefficients are the subject of rows.h.
#pragma once

#include "block.h"
#include "sh.h"

namespace splaxel {

struct ShInputs {
  const float *means, *center, *sh0, *rest;
  const bool* visible;
  int64_t stored;  // K - 1 coefficients per Gaussian in `rest`
};

struct ShGradients {
  const float* v_colors;
  float *v_means, *v_sh0, *v_rest;
};

struct ShDirections {
  float x[kBlock], y[kBlock], z[kBlock], inv_length[kBlock];
  float bases[kMaxShBases][kBlock];
};

template <int degree>
SPLAXEL_INLINE void directions_of(const ShInputs& in, int64_t first, int count, ShDirections& d) {
  float mean[3][kBlock];
  load_block<3>(in.means + 3 * first, count, mean);
  const float cx = in.center[0], cy = in.center[1], cz = in.center[2];
#pragma omp simd
  for (int i = 0; i < kBlock; ++i) {
    const Direction<float> u = unit_direction(mean[0][i] - cx, mean[1][i] - cy, mean[2][i] - cz);
    d.x[i] = u.x, d.y[i] = u.y, d.z[i] = u.z, d.inv_length[i] = u.inv_length;
    sh_bases<degree>(u.x, u.y, u.z, &d.bases[0][i], kBlock);
  }
}

// Before the clamp; the forward and the backward pass must round alike, since the clamp's gradient depends on it.
template <int degree>
SPLAXEL_INLINE void raw_color(const ShInputs& in, const ShDirections& d, int64_t first, int i, float* color) {
  const float* sh0 = in.sh0 + 3 * (first + i);
  const float* rest = in.rest + 3 * in.stored * (first + i);
  for (int c = 0; c < 3; ++c) color[c] = 0.5f + d.bases[0][i] * sh0[c];
  for (int k = 1; k < (degree + 1) * (degree + 1); ++k)
    for (int c = 0; c < 3; ++c) color[c] += d.bases[k][i] * rest[3 * (k - 1) + c];
}

}  // namespace splaxel
