// The loops of gaussians.h. Included once by each file that is compiled for a level of instructions; everything is in an
// unnamed namespace, because those files are compiled for different processors.
#pragma once

#include <algorithm>
#include <cstring>

#include "gaussians.h"
#include "project_block.h"
#include "rows.h"

namespace splaxel {
namespace {

template <int degree>
SPLAXEL_INLINE void add_directions_vjp(
    const ShDirections& d, const float (*v_bases)[kBlock], const bool* seen, float (*v_mean)[kBlock]) {
#pragma omp simd
  for (int i = 0; i < kBlock; ++i) {
    float vx, vy, vz;
    sh_bases_vjp<degree>(d.x[i], d.y[i], d.z[i], &v_bases[0][i], kBlock, vx, vy, vz);
    unit_direction_vjp(Direction<float>{d.x[i], d.y[i], d.z[i], d.inv_length[i]}, vx, vy, vz);
    // Where nothing arrived nothing leaves, even if the mean is not finite.
    v_mean[0][i] += select(seen[i], vx, 0.0f);
    v_mean[1][i] += select(seen[i], vy, 0.0f);
    v_mean[2][i] += select(seen[i], vz, 0.0f);
  }
}

template <int degree>
void colors_as(const ShInputs& in, int64_t count, int64_t begin, int64_t end, float* colors) {
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * kBlock;
    const int size = static_cast<int>(std::min<int64_t>(kBlock, count - first));
    ShDirections d;
    directions_of<degree>(in, first, size, d);
    colors_of_block<degree>(in, d, in.visible + first, first, size, colors + 3 * first);
  }
}

void colors(int64_t degree, const ShInputs& in, int64_t count, int64_t begin, int64_t end, float* out) {
  switch (degree) {
    case 0: return colors_as<0>(in, count, begin, end, out);
    case 1: return colors_as<1>(in, count, begin, end, out);
    case 2: return colors_as<2>(in, count, begin, end, out);
    default: return colors_as<3>(in, count, begin, end, out);
  }
}

template <int degree>
void colors_vjp_as(
    const ShInputs& in, const ShGradients& out, int64_t count, int64_t begin, int64_t end, double* v_center) {
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * kBlock;
    const int size = static_cast<int>(std::min<int64_t>(kBlock, count - first));
    float *v_sh0 = out.v_sh0 + 3 * first, *v_rest = out.v_rest + 3 * in.stored * first;
    bool seen[kBlock] = {};
    std::copy(in.visible + first, in.visible + first + size, seen);
    const bool every_coefficient = in.stored == (degree + 1) * (degree + 1) - 1;
    for (int i = 0; i < size; ++i) {
      if (!seen[i]) std::fill_n(v_sh0 + 3 * i, 3, 0.0f);
      if (!seen[i] || !every_coefficient) std::fill_n(v_rest + 3 * in.stored * i, 3 * in.stored, 0.0f);
    }
    ShDirections d;
    directions_of<degree>(in, first, size, d);
    float v_bases[kMaxShBases][kBlock], v_mean[3][kBlock] = {};
    rows_vjp<degree, false>(in, d, seen, out.v_colors, first, size, v_sh0, v_rest, v_bases);
    if constexpr (degree > 0) add_directions_vjp<degree>(d, v_bases, seen, v_mean);
    store_block<3>(v_mean, size, out.v_means + 3 * first);
    for (int c = 0; c < 3; ++c) v_center[3 * block + c] = -sum_block(v_mean[c]);
  }
}

void colors_vjp(
    int64_t degree, const ShInputs& in, const ShGradients& out, int64_t count, int64_t begin, int64_t end,
    double* v_center) {
  switch (degree) {
    case 0: return colors_vjp_as<0>(in, out, count, begin, end, v_center);
    case 1: return colors_vjp_as<1>(in, out, count, begin, end, v_center);
    case 2: return colors_vjp_as<2>(in, out, count, begin, end, v_center);
    default: return colors_vjp_as<3>(in, out, count, begin, end, v_center);
  }
}

// Gradients of a block's Gaussians, and which of them some view saw.
struct BlockGradients {
  float mean[3][kBlock], quat[4][kBlock], scale[3][kBlock], opacity[1][kBlock];
  // As the parameters: one row per Gaussian.
  alignas(64) float sh0[3 * kBlock], rest[3 * (kMaxShBases - 1) * kBlock];
  bool seen[kBlock];
};

SPLAXEL_INLINE bool any_of(const bool* flags) {
  int sum = 0;
  for (int i = 0; i < kBlock; ++i) sum += flags[i];
  return sum != 0;
}

SPLAXEL_INLINE bool all_of(const bool* flags, int count) {
  int sum = 0;
  for (int i = 0; i < count; ++i) sum += flags[i];
  return sum == count;
}

template <bool antialiased>
void add_projection(
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
void add_harmonics(
    const Update& u, const ViewGradients& view, const bool* seen, int64_t first, int count, BlockGradients& g) {
  const ShInputs in = {u.groups[0].param, view.center, u.groups[4].param, u.groups[5].param, nullptr, u.stored};
  ShDirections d;
  directions_of<degree>(in, first, count, d);
  float v_bases[kMaxShBases][kBlock];
  rows_vjp<degree, true>(in, d, seen, view.v_colors, first, count, g.sh0, g.rest, v_bases);
  if constexpr (degree > 0) add_directions_vjp<degree>(d, v_bases, seen, g.mean);
}

// A parameter of few channels: all of the block, each Gaussian kept as it is unless it moves.
template <int channels>
void step_arrays(
    const AdamGroup& group, const float (*gradient)[kBlock], const bool* moves, bool everyone, int64_t first,
    int count) {
  alignas(64) float rows[channels * kBlock];
  alignas(64) int32_t moving[channels * kBlock];
  store_block<channels>(gradient, kBlock, rows);
  if (!everyone)
    for (int i = 0; i < kBlock; ++i)
      for (int c = 0; c < channels; ++c) moving[channels * i + c] = moves[i] ? -1 : 0;
  const int64_t start = channels * first;
  adam_run(group, rows, group.grad != nullptr ? group.grad + start : nullptr, everyone ? nullptr : moving,
           channels * count, group.param + start, group.exp_avg + start, group.exp_avg_sq + start);
}

// A parameter whose gradient is stored alike: run by run of Gaussians that move.
void step_rows(
    const AdamGroup& group, int64_t channels, const float* gradient, const bool* moves, int64_t first, int count) {
  for (int begin = 0; begin < count;) {
    if (!moves[begin]) {
      ++begin;
      continue;
    }
    int end = begin + 1;
    while (end < count && moves[end]) ++end;
    const int64_t start = channels * (first + begin);
    adam_run(group, gradient + channels * begin, group.grad != nullptr ? group.grad + start : nullptr, nullptr,
             channels * (end - begin), group.param + start, group.exp_avg + start, group.exp_avg_sq + start);
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

void update_range(const Update& u, int64_t begin, int64_t end) {
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
    const bool everyone = all_of(g.seen, count);
    step_arrays<3>(u.groups[0], g.mean, g.seen, everyone, first, count);
    step_arrays<4>(u.groups[1], g.quat, g.seen, everyone, first, count);
    step_arrays<3>(u.groups[2], g.scale, g.seen, everyone, first, count);
    step_arrays<1>(u.groups[3], g.opacity, g.seen, everyone, first, count);
    step_rows(u.groups[4], 3, g.sh0, g.seen, first, count);
    step_rows(u.groups[5], 3 * u.stored, g.rest, g.seen, first, count);
  }
}

}  // namespace
}  // namespace splaxel
