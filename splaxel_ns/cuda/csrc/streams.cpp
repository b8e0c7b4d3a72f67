// Pixel streams and their composition, and Adam on rows, on the CPU. Mathematics: include/stream.h, composite.h, adam.h.
// Letters: Q layers, H x W pixels, M pixels of a stream, C numbers per pixel.

#include "stream.h"

#include <c10/util/Half.h>

#include <cstring>
#include <tuple>
#include <vector>

#include "adam.h"
#include "composite.h"
#include "op.h"

namespace splaxel {

template <>
struct StreamValue<c10::Half> {
  static float load(c10::Half value) { return static_cast<float>(value); }
  static c10::Half store(float value) { return static_cast<c10::Half>(within_half(value)); }
};

namespace {

using at::Tensor;

StreamRegion region_of(const Tensor& spans, const Tensor& row_starts) {
  return {spans.const_data_ptr<int32_t>(), row_starts.const_data_ptr<int64_t>()};
}

// Calls run(a value of the stream's type).
template <class Run>
void with_value(const Tensor& stream, Run run) {
  stream.scalar_type() == at::kHalf ? run(c10::Half()) : run(0.0f);
}

Tensor pack_pixels(
    const Tensor& colors, const Tensor& depths, const Tensor& transmittances, const Tensor& spans,
    const Tensor& row_starts, int64_t count, bool with_depth, bool half) {
  const int channels = with_depth ? 5 : 4;
  const int64_t width = colors.size(1);
  Tensor stream = at::empty({count, channels}, at::TensorOptions().dtype(half ? at::kHalf : at::kFloat));
  const StreamRegion region = region_of(spans, row_starts);
  const float *color = colors.const_data_ptr<float>(), *depth = depths.const_data_ptr<float>();
  const float* transmittance = transmittances.const_data_ptr<float>();
  with_value(stream, [&](auto value) {
    auto* out = stream.mutable_data_ptr<decltype(value)>();
    at::parallel_for(0, spans.size(0), 16, [&](int64_t begin, int64_t end) {
      for (int64_t y = begin; y < end; ++y)
        for (int x = region.spans[2 * y]; x < region.spans[2 * y + 1]; ++x) {
          const int64_t at = y * width + x;
          write_pixel(
              {color[3 * at], color[3 * at + 1], color[3 * at + 2], transmittance[at], depth[at]}, out, channels,
              region.index(x, static_cast<int>(y)));
        }
    });
  });
  return stream;
}

std::tuple<Tensor, Tensor, Tensor> unpack_pixels(
    const Tensor& stream, const Tensor& spans, const Tensor& row_starts, int64_t width) {
  const int64_t height = spans.size(0);
  const int channels = static_cast<int>(stream.size(1));
  Tensor colors = at::empty({height, width, 3}, float_options()), depths = at::empty({height, width}, float_options());
  Tensor transmittances = at::empty({height, width}, float_options());
  const StreamRegion region = region_of(spans, row_starts);
  float *color = colors.mutable_data_ptr<float>(), *depth = depths.mutable_data_ptr<float>();
  float* transmittance = transmittances.mutable_data_ptr<float>();
  with_value(stream, [&](auto value) {
    const auto* in = stream.const_data_ptr<decltype(value)>();
    at::parallel_for(0, height, 16, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin * width; at < end * width; ++at) {
        const int64_t index = region.index(static_cast<int>(at % width), static_cast<int>(at / width));
        const PartialPixel pixel = index >= 0 ? read_pixel(in, channels, index) : empty_pixel();
        color[3 * at] = pixel.r, color[3 * at + 1] = pixel.g, color[3 * at + 2] = pixel.b;
        depth[at] = pixel.depth, transmittance[at] = pixel.transmittance;
      }
    });
  });
  return {colors, depths, transmittances};
}

std::tuple<Tensor, Tensor, Tensor> pack_active(const Tensor& stream) {
  const int64_t count = stream.size(0), channels = stream.size(1);
  Tensor bits = at::zeros({(count + 31) / 32}, int_options()), values = at::empty(stream.sizes(), stream.options());
  Tensor kept = at::zeros({1}, at::TensorOptions().dtype(at::kLong));
  auto* words = reinterpret_cast<uint32_t*>(bits.mutable_data_ptr<int32_t>());
  int64_t to = 0;
  with_value(stream, [&](auto value) {
    using Value = decltype(value);
    const Value* in = stream.const_data_ptr<Value>();
    Value* out = values.mutable_data_ptr<Value>();
    for (int64_t at = 0; at < count; ++at) {
      if (!is_active(StreamValue<Value>::load(in[channels * at + 3]))) continue;
      words[at / 32] |= 1u << (at % 32);
      std::memcpy(out + channels * to++, in + channels * at, static_cast<size_t>(channels) * sizeof(Value));
    }
  });
  *kept.mutable_data_ptr<int64_t>() = to;
  return {bits, values, kept};
}

Tensor unpack_active(const Tensor& bits, const Tensor& values, int64_t count) {
  const int channels = static_cast<int>(values.size(1));
  Tensor stream = at::empty({count, channels}, values.options());
  const auto* words = reinterpret_cast<const uint32_t*>(bits.const_data_ptr<int32_t>());
  with_value(values, [&](auto value) {
    using Value = decltype(value);
    const Value* in = values.const_data_ptr<Value>();
    Value* out = stream.mutable_data_ptr<Value>();
    for (int64_t at = 0; at < count; ++at) {
      if (words[at / 32] >> (at % 32) & 1) {
        std::memcpy(out + channels * at, in, static_cast<size_t>(channels) * sizeof(Value));
        in += channels;
      } else {
        write_pixel(empty_pixel(), out, channels, at);
      }
    }
  });
  return stream;
}

// The layers of one pixel, from streams one behind the other.
struct Layers {
  const float* stream;
  int channels;
  int64_t count, height, width;
  const int32_t* spans;
  const int64_t* row_starts;
  int64_t index(int64_t q, int64_t x, int64_t y) const {
    const StreamRegion region = {spans + 2 * q * height, row_starts + q * height};
    return region.index(static_cast<int>(x), static_cast<int>(y));
  }
};

Layers layers_of(const Tensor& stream, const Tensor& spans, const Tensor& row_starts, int64_t width) {
  return {stream.const_data_ptr<float>(), static_cast<int>(stream.size(1)), spans.size(0), spans.size(1), width,
          spans.const_data_ptr<int32_t>(), row_starts.const_data_ptr<int64_t>()};
}

std::tuple<Tensor, Tensor, Tensor> composite_streams(
    const Tensor& stream, const Tensor& spans, const Tensor& row_starts, const Tensor& background, int64_t width) {
  const Layers in = layers_of(stream, spans, row_starts, width);
  const float* back = background.const_data_ptr<float>();
  Tensor rgb = at::empty({in.height, width, 3}, float_options());
  Tensor depth = at::empty({in.height, width}, float_options()), alpha = at::empty({in.height, width}, float_options());
  float *color = rgb.mutable_data_ptr<float>(), *d = depth.mutable_data_ptr<float>();
  float* a = alpha.mutable_data_ptr<float>();
  at::parallel_for(0, in.height, 16, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin * width; at < end * width; ++at) {
      float r = 0.0f, g = 0.0f, b = 0.0f, z = 0.0f, w = 1.0f;
      for (int64_t q = 0; q < in.count; ++q) {
        const int64_t index = in.index(q, at % width, at / width);
        const PartialPixel p = index >= 0 ? read_pixel(in.stream, in.channels, index) : empty_pixel();
        blend_partial(p.r, p.g, p.b, p.depth, p.transmittance, r, g, b, z, w);
      }
      color[3 * at] = r + w * back[0], color[3 * at + 1] = g + w * back[1], color[3 * at + 2] = b + w * back[2];
      d[at] = z, a[at] = 1.0f - w;
    }
  });
  return {rgb, depth, alpha};
}

std::tuple<Tensor, Tensor> composite_streams_backward(
    const Tensor& stream, const Tensor& spans, const Tensor& row_starts, const Tensor& background, int64_t width,
    const Tensor& v_rgb, const Tensor& v_depth, const Tensor& v_alpha) {
  const Layers in = layers_of(stream, spans, row_starts, width);
  const float *back = background.const_data_ptr<float>(), *v_color = v_rgb.const_data_ptr<float>();
  const float *v_d = v_depth.const_data_ptr<float>(), *v_a = v_alpha.const_data_ptr<float>();
  Tensor v_stream = at::empty(stream.sizes(), stream.options()), v_background = at::empty({3}, float_options());
  float* out = v_stream.mutable_data_ptr<float>();
  std::vector<double> rows(static_cast<size_t>(3 * in.height), 0.0);
  at::parallel_for(0, in.height, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> front(static_cast<size_t>(in.count));
    for (int64_t at = begin * width; at < end * width; ++at) {
      const float *v = v_color + 3 * at;
      float w = 1.0f;
      for (int64_t q = 0; q < in.count; ++q) {
        front[static_cast<size_t>(q)] = w;
        const int64_t index = in.index(q, at % width, at / width);
        if (index >= 0) w *= in.stream[in.channels * index + 3];
      }
      for (int c = 0; c < 3; ++c) rows[static_cast<size_t>(at / width * 3 + c)] += w * v[c];
      float rest = back[0] * v[0] + back[1] * v[1] + back[2] * v[2] - v_a[at];
      for (int64_t q = in.count - 1; q >= 0; --q) {
        const int64_t index = in.index(q, at % width, at / width);
        if (index < 0) continue;
        const PartialPixel p = read_pixel(in.stream, in.channels, index);
        const float before = front[static_cast<size_t>(q)];
        float v_t;
        rest = blend_partial_vjp(
            p.r, p.g, p.b, p.depth, p.transmittance, before, v[0], v[1], v[2], v_d[at], rest, v_t);
        write_pixel({before * v[0], before * v[1], before * v[2], v_t, before * v_d[at]}, out, in.channels, index);
      }
    }
  });
  for (int c = 0; c < 3; ++c) {
    double sum = 0.0;
    for (int64_t y = 0; y < in.height; ++y) sum += rows[static_cast<size_t>(3 * y + c)];
    v_background.mutable_data_ptr<float>()[c] = static_cast<float>(sum);
  }
  return {v_stream, v_background};
}

void adam_rows(
    const Tensor& param, const Tensor& exp_avg, const Tensor& exp_avg_sq, const Tensor& grad,
    const std::optional<Tensor>& visible, double lr, double beta1, double beta2, double eps, double step) {
  if (param.numel() == 0) return;
  const int64_t channels = param.numel() / param.size(0);
  const bool* seen = visible.has_value() ? visible->const_data_ptr<bool>() : nullptr;
  const AdamRates rates = adam_rates(lr, beta1, beta2, eps, step);
  const float* g = grad.const_data_ptr<float>();
  float *p = param.mutable_data_ptr<float>(), *m = exp_avg.mutable_data_ptr<float>();
  float* v = exp_avg_sq.mutable_data_ptr<float>();
  at::parallel_for(0, param.size(0), 1024, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (seen != nullptr && !seen[row]) continue;
      for (int64_t i = row * channels; i < (row + 1) * channels; ++i) adam_step(rates, g[i], p[i], m[i], v[i]);
    }
  });
}

}  // namespace
}  // namespace splaxel

TORCH_LIBRARY_IMPL(splaxel, CPU, m) {
  m.impl("pack_pixels", &splaxel::pack_pixels);
  m.impl("unpack_pixels", &splaxel::unpack_pixels);
  m.impl("pack_active", &splaxel::pack_active);
  m.impl("unpack_active", &splaxel::unpack_active);
  m.impl("composite_streams", &splaxel::composite_streams);
  m.impl("composite_streams_backward", &splaxel::composite_streams_backward);
  m.impl("adam_rows", &splaxel::adam_rows);
}
