// composite: partial images, front to back, and a background to one image, forward and backward.
// Mathematics: include/composite.h. Letters: Q participants, H x W pixels.

#include <immintrin.h>

#include <cstring>
#include <tuple>
#include <vector>

#include "block.h"
#include "composite.h"
#include "op.h"
#include "pooled.h"

namespace splaxel {
namespace {

struct Layers {
  const float *colors, *depths, *transmittances, *background;
  int64_t count, pixels;
};

struct Image {
  float *rgb, *depth, *alpha;
};

struct Gradients {
  const float *v_rgb, *v_depth, *v_alpha;  // the last two may be null: nobody asks for depth or alpha
  float *v_colors, *v_depths, *v_transmittances;
  bool past_caches;  // they are too large to be found there again
};

// Results of more bytes than this are written past the caches, which spares reading what is overwritten.
constexpr int64_t kPastCaches = int64_t{32} << 20;

SPLAXEL_INLINE void write_out(const float* from, int count, float* to, bool past_caches) {
  if (!past_caches || reinterpret_cast<uintptr_t>(to) % 16 != 0) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  int i = 0;
  for (; i + 4 <= count; i += 4) _mm_stream_ps(to + i, _mm_load_ps(from + i));
  for (; i < count; ++i) to[i] = from[i];
}

SPLAXEL_INLINE void composite_block_body(const Layers& in, int64_t first, int count, const Image& out) {
  float rgb[3][kBlock] = {}, depth[kBlock] = {}, w[kBlock];
  for (int i = 0; i < kBlock; ++i) w[i] = 1.0f;
  for (int64_t q = 0; q < in.count; ++q) {
    const int64_t start = q * in.pixels + first;
    const float* color = in.colors + 3 * start;
    const float *d = in.depths + start, *t = in.transmittances + start;
#pragma omp simd
    for (int i = 0; i < count; ++i)
      blend_partial(color[3 * i], color[3 * i + 1], color[3 * i + 2], d[i], t[i], rgb[0][i], rgb[1][i], rgb[2][i],
                    depth[i], w[i]);
  }
  const float r = in.background[0], g = in.background[1], b = in.background[2];
  float* pixel = out.rgb + 3 * first;
#pragma omp simd
  for (int i = 0; i < count; ++i) {
    pixel[3 * i] = rgb[0][i] + w[i] * r;
    pixel[3 * i + 1] = rgb[1][i] + w[i] * g;
    pixel[3 * i + 2] = rgb[2][i] + w[i] * b;
    out.depth[first + i] = depth[i];
    out.alpha[first + i] = 1.0f - w[i];
  }
}

SPLAXEL_DISPATCH(
    void, composite_block, (const Layers& in, int64_t first, int count, const Image& out), (in, first, count, out))

// `front`: room for kBlock transmittances per layer. `v_background`: 3 sums.
SPLAXEL_INLINE void composite_block_vjp_body(
    const Layers& in, int64_t first, int count, const Gradients& out, float* front, double* v_background) {
  float v[3][kBlock], rest[kBlock], w[kBlock], v_back[3][kBlock] = {};
  for (int i = 0; i < kBlock; ++i) w[i] = 1.0f;
  for (int64_t q = 0; q < in.count; ++q) {
    const float* t = in.transmittances + q * in.pixels + first;
    float* kept = front + q * kBlock;
#pragma omp simd
    for (int i = 0; i < count; ++i) {
      kept[i] = w[i];
      w[i] *= t[i];
    }
  }
  const float zeros[kBlock] = {};
  const float* v_rgb = out.v_rgb + 3 * first;
  const float* v_depth = out.v_depth != nullptr ? out.v_depth + first : zeros;
  const float* v_alpha = out.v_alpha != nullptr ? out.v_alpha + first : zeros;
  const float r = in.background[0], g = in.background[1], b = in.background[2];
#pragma omp simd
  for (int i = 0; i < count; ++i) {
    v[0][i] = v_rgb[3 * i], v[1][i] = v_rgb[3 * i + 1], v[2][i] = v_rgb[3 * i + 2];
    rest[i] = r * v[0][i] + g * v[1][i] + b * v[2][i] - v_alpha[i];
    v_back[0][i] = w[i] * v[0][i], v_back[1][i] = w[i] * v[1][i], v_back[2][i] = w[i] * v[2][i];
  }
  for (int64_t q = in.count - 1; q >= 0; --q) {
    const int64_t start = q * in.pixels + first;
    const float* color = in.colors + 3 * start;
    const float *d = in.depths + start, *t = in.transmittances + start, *kept = front + q * kBlock;
    alignas(64) float v_color[3 * kBlock], v_d[kBlock], v_t[kBlock];
#pragma omp simd
    for (int i = 0; i < count; ++i) {
      v_color[3 * i] = kept[i] * v[0][i];
      v_color[3 * i + 1] = kept[i] * v[1][i];
      v_color[3 * i + 2] = kept[i] * v[2][i];
      v_d[i] = kept[i] * v_depth[i];
      float v_transmittance;
      rest[i] = blend_partial_vjp(color[3 * i], color[3 * i + 1], color[3 * i + 2], d[i], t[i], kept[i], v[0][i],
                                  v[1][i], v[2][i], v_depth[i], rest[i], v_transmittance);
      v_t[i] = v_transmittance;
    }
    write_out(v_color, 3 * count, out.v_colors + 3 * start, out.past_caches);
    if (out.v_depth != nullptr) write_out(v_d, count, out.v_depths + start, out.past_caches);
    write_out(v_t, count, out.v_transmittances + start, out.past_caches);
  }
  for (int c = 0; c < 3; ++c) v_background[c] = sum_block(v_back[c]);
}

SPLAXEL_DISPATCH(
    void, composite_block_vjp,
    (const Layers& in, int64_t first, int count, const Gradients& out, float* front, double* v_background),
    (in, first, count, out, front, v_background))

Layers layers_of(
    const at::Tensor& colors, const at::Tensor& depths, const at::Tensor& transmittances,
    const at::Tensor& background) {
  return {colors.const_data_ptr<float>(), depths.const_data_ptr<float>(), transmittances.const_data_ptr<float>(),
          background.const_data_ptr<float>(), colors.size(0), colors.size(1) * colors.size(2)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> composite(
    const at::Tensor& colors, const at::Tensor& depths, const at::Tensor& transmittances,
    const at::Tensor& background) {
  const Layers in = layers_of(colors, depths, transmittances, background);
  const int64_t height = colors.size(1), width = colors.size(2);
  at::Tensor rgb = pooled_floats({height, width, 3});
  at::Tensor depth = pooled_floats({height, width}), alpha = pooled_floats(depth.sizes());
  const Image out = {rgb.data_ptr<float>(), depth.data_ptr<float>(), alpha.data_ptr<float>()};
  at::parallel_for(0, num_blocks(in.pixels), 16, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k)
      composite_block(in, k * kBlock, static_cast<int>(std::min<int64_t>(kBlock, in.pixels - k * kBlock)), out);
  });
  return {rgb, depth, alpha};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> composite_backward(
    const at::Tensor& colors, const at::Tensor& depths, const at::Tensor& transmittances,
    const at::Tensor& background, const at::Tensor& v_rgb, const std::optional<at::Tensor>& v_depth,
    const std::optional<at::Tensor>& v_alpha) {
  const Layers in = layers_of(colors, depths, transmittances, background);
  at::Tensor v_colors = pooled_floats(colors.sizes());
  at::Tensor v_depths;  // None where depth has no gradient
  if (v_depth.has_value()) v_depths = pooled_floats(depths.sizes());
  at::Tensor v_transmittances = pooled_floats(transmittances.sizes());
  at::Tensor v_background = pooled_floats(background.sizes());
  const Gradients out = {v_rgb.const_data_ptr<float>(),
                         v_depth.has_value() ? v_depth->const_data_ptr<float>() : nullptr,
                         v_alpha.has_value() ? v_alpha->const_data_ptr<float>() : nullptr,
                         v_colors.data_ptr<float>(), v_depth.has_value() ? v_depths.data_ptr<float>() : nullptr,
                         v_transmittances.data_ptr<float>(), 20 * in.count * in.pixels > kPastCaches};
  std::vector<double> partial(static_cast<size_t>(3 * num_blocks(in.pixels)));
  at::parallel_for(0, num_blocks(in.pixels), 16, [&](int64_t begin, int64_t end) {
    std::vector<float> front(static_cast<size_t>(in.count * kBlock));
    for (int64_t k = begin; k < end; ++k) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, in.pixels - k * kBlock));
      composite_block_vjp(in, k * kBlock, count, out, front.data(), partial.data() + 3 * k);
    }
    _mm_sfence();
  });
  for (int c = 0; c < 3; ++c) {
    double sum = 0.0;
    for (int64_t k = 0; k < num_blocks(in.pixels); ++k) sum += partial[static_cast<size_t>(3 * k + c)];
    v_background.data_ptr<float>()[c] = static_cast<float>(sum);
  }
  return {v_colors, v_depths, v_transmittances, v_background};
}

}  // namespace

TORCH_LIBRARY_IMPL(splaxel, CPU, m) {
  m.impl("composite", &composite);
  m.impl("composite_backward", &composite_backward);
}

}  // namespace splaxel
