// spherical_harmonics: colours of the visible Gaussians seen from one camera, forward and backward.
// Mathematics: include/sh.h. Letters: N Gaussians, K bases stored per Gaussian.

#include <ATen/ops/empty_like.h>

#include <cstring>
#include <tuple>
#include <vector>

#include "block.h"
#include "op.h"
#include "sh.h"

namespace splaxel {
namespace {

struct Inputs {
  const float *means, *center, *sh0, *rest;
  const bool* visible;
  int64_t stored;  // K - 1 coefficients per Gaussian in `rest`
};

struct Gradients {
  const float* v_colors;
  float *v_means, *v_sh0, *v_rest;
};

struct Directions {
  float x[kBlock], y[kBlock], z[kBlock], inv_length[kBlock];
  float bases[kMaxShBases][kBlock];
};

template <int degree>
SPLAXEL_INLINE void directions_of(const Inputs& in, int64_t first, int count, Directions& d) {
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
SPLAXEL_INLINE void raw_color(const Inputs& in, const Directions& d, int64_t first, int i, float* color) {
  const float* sh0 = in.sh0 + 3 * (first + i);
  const float* rest = in.rest + 3 * in.stored * (first + i);
  for (int c = 0; c < 3; ++c) color[c] = 0.5f + d.bases[0][i] * sh0[c];
  for (int k = 1; k < (degree + 1) * (degree + 1); ++k)
    for (int c = 0; c < 3; ++c) color[c] += d.bases[k][i] * rest[3 * (k - 1) + c];
}

template <int degree>
SPLAXEL_INLINE void forward_block(const Inputs& in, int64_t first, int count, float* colors) {
  Directions d;
  directions_of<degree>(in, first, count, d);
  for (int i = 0; i < count; ++i) {
    float color[3] = {0.0f, 0.0f, 0.0f};
    if (in.visible[first + i]) raw_color<degree>(in, d, first, i, color);
    for (int c = 0; c < 3; ++c) colors[3 * (first + i) + c] = std::max(color[c], 0.0f);
  }
}

template <int degree>
SPLAXEL_INLINE void backward_block(
    const Inputs& in, const Gradients& out, int64_t first, int count, double* v_center) {
  constexpr int bases = (degree + 1) * (degree + 1);
  Directions d;
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
    // As torch.clamp_min: a colour of exactly zero still has a gradient, so that black Gaussians can brighten.
    for (int c = 0; c < 3; ++c) v[c] = color[c] >= 0.0f ? out.v_colors[3 * (first + i) + c] : 0.0f;
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

SPLAXEL_CLONES
void sh_block(int64_t degree, const Inputs& in, int64_t first, int count, float* colors) {
  switch (degree) {
    case 0: return forward_block<0>(in, first, count, colors);
    case 1: return forward_block<1>(in, first, count, colors);
    case 2: return forward_block<2>(in, first, count, colors);
    default: return forward_block<3>(in, first, count, colors);
  }
}

SPLAXEL_CLONES
void sh_block_vjp(
    int64_t degree, const Inputs& in, const Gradients& out, int64_t first, int count, double* v_center) {
  switch (degree) {
    case 0: return backward_block<0>(in, out, first, count, v_center);
    case 1: return backward_block<1>(in, out, first, count, v_center);
    case 2: return backward_block<2>(in, out, first, count, v_center);
    default: return backward_block<3>(in, out, first, count, v_center);
  }
}

Inputs inputs_of(
    const at::Tensor& means, const at::Tensor& cam_center, const at::Tensor& sh0, const at::Tensor& shN,
    const at::Tensor& visible) {
  return {means.const_data_ptr<float>(), cam_center.const_data_ptr<float>(), sh0.const_data_ptr<float>(),
          shN.const_data_ptr<float>(), visible.const_data_ptr<bool>(), shN.size(1)};
}

at::Tensor spherical_harmonics(
    int64_t degree, const at::Tensor& means, const at::Tensor& cam_center, const at::Tensor& sh0,
    const at::Tensor& shN, const at::Tensor& visible) {
  const int64_t n = means.size(0);
  at::Tensor colors = at::empty({n, 3}, means.options());
  const Inputs in = inputs_of(means, cam_center, sh0, shN, visible);
  float* out = colors.data_ptr<float>();
  at::parallel_for(0, num_blocks(n), 8, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b)
      sh_block(degree, in, b * kBlock, static_cast<int>(std::min<int64_t>(kBlock, n - b * kBlock)), out);
  });
  return colors;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> spherical_harmonics_backward(
    int64_t degree, const at::Tensor& means, const at::Tensor& cam_center, const at::Tensor& sh0,
    const at::Tensor& shN, const at::Tensor& visible, const at::Tensor& v_colors) {
  const int64_t n = means.size(0);
  at::Tensor v_means = at::empty_like(means), v_center = at::empty({3}, means.options());
  at::Tensor v_sh0 = at::empty_like(sh0), v_shN = at::empty_like(shN);
  const Inputs in = inputs_of(means, cam_center, sh0, shN, visible);
  const Gradients out = {v_colors.const_data_ptr<float>(), v_means.data_ptr<float>(), v_sh0.data_ptr<float>(),
                         v_shN.data_ptr<float>()};
  std::vector<double> partial(static_cast<size_t>(3 * num_blocks(n)));
  at::parallel_for(0, num_blocks(n), 8, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, n - b * kBlock));
      sh_block_vjp(degree, in, out, b * kBlock, count, partial.data() + 3 * b);
    }
  });
  for (int c = 0; c < 3; ++c) {
    double sum = 0.0;
    for (int64_t b = 0; b < num_blocks(n); ++b) sum += partial[static_cast<size_t>(3 * b + c)];
    v_center.data_ptr<float>()[c] = static_cast<float>(sum);
  }
  return {v_means, v_center, v_sh0, v_shN};
}

}  // namespace

TORCH_LIBRARY_IMPL(splaxel, CPU, m) {
  m.impl("spherical_harmonics", &spherical_harmonics);
  m.impl("spherical_harmonics_backward", &spherical_harmonics_backward);
}

}  // namespace splaxel
