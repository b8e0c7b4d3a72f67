#include "update.h"

#include <algorithm>
#include <cstring>

#include "project_block.h"
#include "sh_block.h"

namespace splaxel {
namespace {

// Gradients of a block's Gaussians, and which of them some view saw.
struct BlockGradients {
  float mean[3][kBlock], quat[4][kBlock], scale[3][kBlock], opacity[1][kBlock], sh0[3][kBlock];
  alignas(64) float rest[3 * (kMaxShBases - 1) * kBlock];  // as the parameter: one row per Gaussian
  bool seen[kBlock];
};

SPLAXEL_INLINE bool any_of(const bool* flags) {
  int sum = 0;
  for (int i = 0; i < kBlock; ++i) sum += flags[i];
  return sum != 0;
}

template <bool antialiased>
SPLAXEL_INLINE void add_projection(
    const ViewGradients& view, const GaussianArrays& in, const float (*extent)[kBlock], int64_t first, int count,
    BlockGradients& g) {
  float v_mean2d[2][kBlock], v_depth[1][kBlock], v_conic[3][kBlock], v_opacity[1][kBlock];
  load_block<2>(view.v_means2d + 2 * first, count, v_mean2d);
  load_block<1>(view.v_depths + first, count, v_depth);
  load_block<3>(view.v_conics + 3 * first, count, v_conic);
  load_block<1>(view.v_opacities + first, count, v_opacity);
  const Camera<float> cam = view.camera;
#pragma omp simd
  for (int i = 0; i < kBlock; ++i) {
    const SplatGrad<float> v = {v_mean2d[0][i], v_mean2d[1][i], v_depth[0][i],  v_conic[0][i],
                                v_conic[1][i],  v_conic[2][i],  v_opacity[0][i]};
    const GaussianGrad<float> d = project_gaussian_vjp<antialiased>(cam, in.at(i), extent[0][i] > 0.0f, v);
    g.mean[0][i] += d.x, g.mean[1][i] += d.y, g.mean[2][i] += d.z;
    g.quat[0][i] += d.qw, g.quat[1][i] += d.qx, g.quat[2][i] += d.qy, g.quat[3][i] += d.qz;
    g.scale[0][i] += d.sx, g.scale[1][i] += d.sy, g.scale[2][i] += d.sz;
    g.opacity[0][i] += d.opacity;
  }
}

template <int degree>
SPLAXEL_INLINE void add_harmonics(
    const Update& u, const ViewGradients& view, const bool* seen, int64_t first, int count, BlockGradients& g) {
  constexpr int bases = (degree + 1) * (degree + 1);
  const ShInputs in = {u.groups[0].param, view.center, u.groups[4].param, u.groups[5].param, nullptr, u.stored};
  ShDirections d;
  directions_of<degree>(in, first, count, d);
  float v_bases[kMaxShBases][kBlock] = {};
  for (int i = 0; i < count; ++i) {
    if (!seen[i]) continue;
    float color[3], v[3];
    raw_color<degree>(in, d, first, i, color);
    for (int c = 0; c < 3; ++c) v[c] = color_has_gradient(color[c]) ? view.v_colors[3 * (first + i) + c] : 0.0f;
    const float* rest = in.rest + 3 * in.stored * (first + i);
    float* v_rest = g.rest + 3 * in.stored * i;
    for (int c = 0; c < 3; ++c) g.sh0[c][i] += d.bases[0][i] * v[c];
    for (int k = 1; k < bases; ++k) {
      const float* coefficient = rest + 3 * (k - 1);
      v_bases[k][i] = coefficient[0] * v[0] + coefficient[1] * v[1] + coefficient[2] * v[2];
      for (int c = 0; c < 3; ++c) v_rest[3 * (k - 1) + c] += d.bases[k][i] * v[c];
    }
  }
  if constexpr (degree == 0) return;
#pragma omp simd
  for (int i = 0; i < kBlock; ++i) {
    float vx, vy, vz;
    sh_bases_vjp<degree>(d.x[i], d.y[i], d.z[i], &v_bases[0][i], kBlock, vx, vy, vz);
    unit_direction_vjp(Direction<float>{d.x[i], d.y[i], d.z[i], d.inv_length[i]}, vx, vy, vz);
    // Where nothing arrived nothing leaves, even if the mean is not finite.
    g.mean[0][i] += select(seen[i], vx, 0.0f);
    g.mean[1][i] += select(seen[i], vy, 0.0f);
    g.mean[2][i] += select(seen[i], vz, 0.0f);
  }
}

SPLAXEL_INLINE void adam(const AdamGroup& a, float g, float& p, float& m, float& v) {
  m += a.one_less_beta1 * (g - m);
  v = a.beta2 * v + a.one_less_beta2 * g * g;
  p -= a.rate * m / (std::sqrt(v) * a.root_correction + a.eps);
}

// A parameter of few channels: all of the block, each Gaussian kept as it is unless `moves`.
template <int channels>
SPLAXEL_INLINE void step_arrays(
    const AdamGroup& group, const float (*gradient)[kBlock], const bool* moves, int64_t first, int count) {
  float p[channels][kBlock], m[channels][kBlock], v[channels][kBlock], more[channels][kBlock] = {};
  const int64_t start = channels * first;
  load_block<channels>(group.param + start, count, p);
  load_block<channels>(group.exp_avg + start, count, m);
  load_block<channels>(group.exp_avg_sq + start, count, v);
  if (group.grad != nullptr) load_block<channels>(group.grad + start, count, more);
  const AdamGroup a = group;
  for (int c = 0; c < channels; ++c)
#pragma omp simd
    for (int i = 0; i < kBlock; ++i) {
      float new_p = p[c][i], new_m = m[c][i], new_v = v[c][i];
      adam(a, gradient[c][i] + more[c][i], new_p, new_m, new_v);
      p[c][i] = select(moves[i], new_p, p[c][i]);
      m[c][i] = select(moves[i], new_m, m[c][i]);
      v[c][i] = select(moves[i], new_v, v[c][i]);
    }
  store_block<channels>(p, count, group.param + start);
  store_block<channels>(m, count, group.exp_avg + start);
  store_block<channels>(v, count, group.exp_avg_sq + start);
}

// A parameter of many channels: run by run of Gaussians that move.
SPLAXEL_INLINE void step_rows(
    const AdamGroup& group, int64_t channels, const float* gradient, const bool* moves, int64_t first, int count) {
  const AdamGroup a = group;
  for (int begin = 0; begin < count;) {
    if (!moves[begin]) {
      ++begin;
      continue;
    }
    int end = begin + 1;
    while (end < count && moves[end]) ++end;
    const int64_t start = channels * (first + begin), length = channels * (end - begin);
    float *p = a.param + start, *m = a.exp_avg + start, *v = a.exp_avg_sq + start;
    const float* g = gradient + channels * begin;
    if (a.grad != nullptr) {
      const float* more = a.grad + start;
#pragma omp simd
      for (int64_t j = 0; j < length; ++j) adam(a, g[j] + more[j], p[j], m[j], v[j]);
    } else {
#pragma omp simd
      for (int64_t j = 0; j < length; ++j) adam(a, g[j], p[j], m[j], v[j]);
    }
    begin = end;
  }
}

SPLAXEL_INLINE void add_view(
    const Update& u, const ViewGradients& view, const GaussianArrays& in, int64_t first, int count,
    BlockGradients& g) {
  float extent[2][kBlock];
  load_block<2>(view.extents + 2 * first, count, extent);
  bool seen[kBlock];
  for (int i = 0; i < kBlock; ++i) seen[i] = extent[0][i] > 0.0f, g.seen[i] |= seen[i];
  if (!any_of(seen)) return;
  view.antialiased ? add_projection<true>(view, in, extent, first, count, g)
                   : add_projection<false>(view, in, extent, first, count, g);
  switch (view.degree) {
    case 0: return add_harmonics<0>(u, view, seen, first, count, g);
    case 1: return add_harmonics<1>(u, view, seen, first, count, g);
    case 2: return add_harmonics<2>(u, view, seen, first, count, g);
    default: return add_harmonics<3>(u, view, seen, first, count, g);
  }
}

SPLAXEL_INLINE bool seen_by_any(const Update& u, int64_t first, int count) {
  for (const ViewGradients& view : u.views) {
    float largest = 0.0f;
    for (int i = 0; i < 2 * count; ++i) largest = std::max(largest, view.extents[2 * first + i]);
    if (largest > 0.0f) return true;
  }
  return false;
}

SPLAXEL_INLINE void update_range_body(const Update& u, int64_t begin, int64_t end) {
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * kBlock;
    const int count = static_cast<int>(std::min<int64_t>(kBlock, u.count - first));
    if (!u.all && !seen_by_any(u, first, count)) continue;
    BlockGradients g;
    std::memset(&g, 0, sizeof g);
    GaussianArrays in;
    load_gaussians(u.groups[0].param, u.groups[1].param, u.scales, u.opacities, first, count, in);
    for (const ViewGradients& view : u.views) add_view(u, view, in, first, count, g);
    // The parameters are logarithms of the scales and logits of the opacities.
#pragma omp simd
    for (int i = 0; i < kBlock; ++i) {
      for (int c = 0; c < 3; ++c) g.scale[c][i] *= in.scale[c][i];
      g.opacity[0][i] *= in.opacity[0][i] * (1.0f - in.opacity[0][i]);
    }
    if (u.all) std::fill(g.seen, g.seen + count, true);
    step_arrays<3>(u.groups[0], g.mean, g.seen, first, count);
    step_arrays<4>(u.groups[1], g.quat, g.seen, first, count);
    step_arrays<3>(u.groups[2], g.scale, g.seen, first, count);
    step_arrays<1>(u.groups[3], g.opacity, g.seen, first, count);
    step_arrays<3>(u.groups[4], g.sh0, g.seen, first, count);
    step_rows(u.groups[5], 3 * u.stored, g.rest, g.seen, first, count);
  }
}

SPLAXEL_DISPATCH(void, update_range, (const Update& u, int64_t begin, int64_t end), (u, begin, end))

}  // namespace

void update_blocks(const Update& update, int64_t begin, int64_t end) { update_range(update, begin, end); }

}  // namespace splaxel
