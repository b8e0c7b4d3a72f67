// spherical_harmonics, one block of Gaussians: memory layout around the mathematics of include/sh.h.
#pragma once

#include <cstring>

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

template <int degree>
SPLAXEL_INLINE void sh_block(const ShInputs& in, int64_t first, int count, float* colors) {
  ShDirections d;
  directions_of<degree>(in, first, count, d);
  for (int i = 0; i < count; ++i) {
    float color[3] = {0.0f, 0.0f, 0.0f};
    if (in.visible[first + i]) raw_color<degree>(in, d, first, i, color);
    for (int c = 0; c < 3; ++c) colors[3 * (first + i) + c] = std::max(color[c], 0.0f);
  }
}

template <int degree>
SPLAXEL_INLINE void sh_block_vjp(
    const ShInputs& in, const ShGradients& out, int64_t first, int count, double* v_center) {
  constexpr int bases = (degree + 1) * (degree + 1);
  ShDirections d;
  directions_of<degree>(in, first, count, d);
  float v_bases[kMaxShBases][kBlock] = {};
  for (int i = 0; i < count; ++i) {
    float* v_sh0 = out.v_sh0 + 3 * (first + i);
    float* v_rest = out.v_rest + 3 * in.stored * (first + i);
    if (!in.visible[first + i]) {
      std::memset(v_sh0, 0, 3 * sizeof(float));
      std::memset(v_rest, 0, static_cast<size_t>(3 * in.stored) * sizeof(float));
      continue;
    }
    float color[3], v[3];
    raw_color<degree>(in, d, first, i, color);
    for (int c = 0; c < 3; ++c) v[c] = color_has_gradient(color[c]) ? out.v_colors[3 * (first + i) + c] : 0.0f;
    const float* rest = in.rest + 3 * in.stored * (first + i);
    for (int c = 0; c < 3; ++c) v_sh0[c] = d.bases[0][i] * v[c];
    for (int k = 1; k < bases; ++k) {
      const float* coefficient = rest + 3 * (k - 1);
      v_bases[k][i] = coefficient[0] * v[0] + coefficient[1] * v[1] + coefficient[2] * v[2];
      for (int c = 0; c < 3; ++c) v_rest[3 * (k - 1) + c] = d.bases[k][i] * v[c];
    }
    std::memset(v_rest + 3 * (bases - 1), 0, static_cast<size_t>(3 * (in.stored - (bases - 1))) * sizeof(float));
  }
  float v_mean[3][kBlock];
#pragma omp simd
  for (int i = 0; i < kBlock; ++i) {
    float vx, vy, vz;
    sh_bases_vjp<degree>(d.x[i], d.y[i], d.z[i], &v_bases[0][i], kBlock, vx, vy, vz);
    unit_direction_vjp(Direction<float>{d.x[i], d.y[i], d.z[i], d.inv_length[i]}, vx, vy, vz);
    // Where nothing arrived nothing leaves, even if the mean is not finite.
    const bool seen = i < count && in.visible[first + (i < count ? i : 0)];
    v_mean[0][i] = select(seen, vx, 0.0f), v_mean[1][i] = select(seen, vy, 0.0f), v_mean[2][i] = select(seen, vz, 0.0f);
  }
  store_block<3>(v_mean, count, out.v_means + 3 * first);
  for (int c = 0; c < 3; ++c) v_center[c] = -sum_block(v_mean[c]);
}

}  // namespace splaxel
