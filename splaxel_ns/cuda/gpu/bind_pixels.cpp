// The ops of composition, pixel streams and Adam for tensors on a GPU. None waits for the device.

#include <ATen/ops/cumsum.h>
#include <ATen/ops/sum.h>

#include <tuple>

#include "device.h"
#include "pixels.h"

namespace splaxel::gpu {
namespace {

using at::Tensor;

ImageSize size_of(int64_t width, int64_t height) { return {static_cast<int>(width), static_cast<int>(height)}; }

DenseLayers dense_layers(const Tensor& colors, const Tensor& depths, const Tensor& transmittances) {
  return {floats(colors), floats(depths), floats(transmittances), nullptr, nullptr, nullptr};
}

StreamLayers stream_layers(const Tensor& stream, const Tensor& spans, const Tensor& row_starts) {
  return {floats(stream), static_cast<int>(stream.size(1)), ints(spans), row_starts.const_data_ptr<int64_t>(),
          nullptr};
}

void check_layers(int64_t count) {
  TORCH_CHECK_VALUE(count <= kMostLayers, "At most ", kMostLayers, " partial images are composed on a GPU, not ", count);
}

template <class Layers>
std::tuple<Tensor, Tensor, Tensor> compose(
    const Layers& layers, int64_t num_layers, ImageSize size, const Tensor& background) {
  const DeviceScope scope(background);
  const auto options = background.options();
  check_layers(num_layers);
  Tensor rgb = at::empty({size.height, size.width, 3}, options);
  Tensor depth = at::empty({size.height, size.width}, options), alpha = at::empty({size.height, size.width}, options);
  composite(
      layers, static_cast<int>(num_layers), size, floats(background),
      {floats_of(rgb), floats_of(depth), floats_of(alpha)}, scope.stream());
  scope.check();
  return {rgb, depth, alpha};
}

// Gradients of the layers go where `layers` says; returns that of the background.
template <class Layers>
Tensor compose_backward(
    const Layers& layers, int64_t num_layers, ImageSize size, const Tensor& background, const Tensor& v_rgb,
    const std::optional<Tensor>& v_depth, const std::optional<Tensor>& v_alpha) {
  const DeviceScope scope(background);
  check_layers(num_layers);
  const Tensor parts = at::empty({static_cast<int64_t>(composite_blocks(size)), 3}, background.options());
  const auto or_null = [](const std::optional<Tensor>& v) { return v.has_value() ? const_cast<float*>(floats(*v)) : nullptr; };
  const Composed gradients = {const_cast<float*>(floats(v_rgb)), or_null(v_depth), or_null(v_alpha)};
  composite_backward(
      layers, static_cast<int>(num_layers), size, floats(background), gradients, floats_of(parts), scope.stream());
  scope.check();
  return at::sum(parts, at::IntArrayRef{0}, false, at::kDouble).to(at::kFloat);
}

std::tuple<Tensor, Tensor, Tensor> composite_images(
    const Tensor& colors, const Tensor& depths, const Tensor& transmittances, const Tensor& background) {
  return compose(
      dense_layers(colors, depths, transmittances), colors.size(0), size_of(colors.size(2), colors.size(1)),
      background);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> composite_images_backward(
    const Tensor& colors, const Tensor& depths, const Tensor& transmittances, const Tensor& background,
    const Tensor& v_rgb, const std::optional<Tensor>& v_depth, const std::optional<Tensor>& v_alpha) {
  Tensor v_colors = at::empty(colors.sizes(), colors.options());
  Tensor v_depths;  // None where depth has no gradient
  if (v_depth.has_value()) v_depths = at::empty(depths.sizes(), depths.options());
  Tensor v_transmittances = at::empty(transmittances.sizes(), transmittances.options());
  DenseLayers layers = dense_layers(colors, depths, transmittances);
  layers.v_colors = floats_of(v_colors), layers.v_depths = v_depth.has_value() ? floats_of(v_depths) : nullptr;
  layers.v_transmittances = floats_of(v_transmittances);
  Tensor v_background = compose_backward(
      layers, colors.size(0), size_of(colors.size(2), colors.size(1)), background, v_rgb, v_depth, v_alpha);
  return {v_colors, v_depths, v_transmittances, v_background};
}

std::tuple<Tensor, Tensor, Tensor> composite_streams(
    const Tensor& stream, const Tensor& spans, const Tensor& row_starts, const Tensor& background, int64_t width) {
  return compose(stream_layers(stream, spans, row_starts), spans.size(0), size_of(width, spans.size(1)), background);
}

std::tuple<Tensor, Tensor> composite_streams_backward(
    const Tensor& stream, const Tensor& spans, const Tensor& row_starts, const Tensor& background, int64_t width,
    const Tensor& v_rgb, const Tensor& v_depth, const Tensor& v_alpha) {
  Tensor v_stream = at::empty(stream.sizes(), stream.options());
  StreamLayers layers = stream_layers(stream, spans, row_starts);
  layers.v_stream = floats_of(v_stream);
  Tensor v_background = compose_backward(
      layers, spans.size(0), size_of(width, spans.size(1)), background, v_rgb, v_depth, v_alpha);
  return {v_stream, v_background};
}

StreamRegion region_of(const Tensor& spans, const Tensor& row_starts) {
  return {ints(spans), row_starts.const_data_ptr<int64_t>()};
}

bool is_half(const Tensor& stream) { return stream.scalar_type() == at::kHalf; }

Tensor pack_pixels_of(
    const Tensor& colors, const Tensor& depths, const Tensor& transmittances, const Tensor& spans,
    const Tensor& row_starts, int64_t count, bool with_depth, bool half) {
  const DeviceScope scope(colors);
  const int channels = with_depth ? 5 : 4;
  Tensor stream = at::empty({count, channels}, colors.options().dtype(half ? at::kHalf : at::kFloat));
  pack_pixels(
      floats(colors), floats(depths), floats(transmittances), size_of(colors.size(1), colors.size(0)),
      region_of(spans, row_starts), channels, half, stream.mutable_data_ptr(), scope.stream());
  scope.check();
  return stream;
}

std::tuple<Tensor, Tensor, Tensor> unpack_pixels_of(
    const Tensor& stream, const Tensor& spans, const Tensor& row_starts, int64_t width) {
  const DeviceScope scope(stream);
  const int64_t height = spans.size(0);
  const auto options = stream.options().dtype(at::kFloat);
  Tensor colors = at::empty({height, width, 3}, options), depths = at::empty({height, width}, options);
  Tensor transmittances = at::empty({height, width}, options);
  unpack_pixels(
      stream.const_data_ptr(), size_of(width, height), region_of(spans, row_starts), static_cast<int>(stream.size(1)),
      is_half(stream), floats_of(colors), floats_of(depths), floats_of(transmittances), scope.stream());
  scope.check();
  return {colors, depths, transmittances};
}

std::tuple<Tensor, Tensor, Tensor> pack_active(const Tensor& stream) {
  const DeviceScope scope(stream);
  const int64_t count = stream.size(0), num_words = (count + 31) / 32;
  const int channels = static_cast<int>(stream.size(1));
  const auto integers = stream.options().dtype(at::kInt);
  Tensor bits = at::empty({num_words}, integers), values = at::empty(stream.sizes(), stream.options());
  if (num_words == 0) return {bits, values, at::zeros({1}, integers.dtype(at::kLong))};
  const Tensor counts = at::empty({num_words}, integers);
  int32_t* words = bits.mutable_data_ptr<int32_t>();
  mark_active(
      stream.const_data_ptr(), count, channels, is_half(stream), words, counts.mutable_data_ptr<int32_t>(),
      scope.stream());
  const Tensor ends = at::cumsum(counts, 0);
  gather_active(
      stream.const_data_ptr(), count, channels, is_half(stream), words, ends.const_data_ptr<int64_t>(),
      values.mutable_data_ptr(), scope.stream());
  scope.check();
  return {bits, values, ends.narrow(0, num_words - 1, 1).clone()};
}

Tensor unpack_active(const Tensor& bits, const Tensor& values, int64_t count) {
  const DeviceScope scope(values);
  const int channels = static_cast<int>(values.size(1));
  Tensor stream = at::empty({count, channels}, values.options());
  if (count == 0) return stream;
  const Tensor counts = at::empty(bits.sizes(), bits.options());
  count_active(ints(bits), bits.size(0), counts.mutable_data_ptr<int32_t>(), scope.stream());
  const Tensor ends = at::cumsum(counts, 0);
  spread_active(
      values.const_data_ptr(), count, channels, is_half(values), ints(bits), ends.const_data_ptr<int64_t>(),
      stream.mutable_data_ptr(), scope.stream());
  scope.check();
  return stream;
}

void adam_rows_of(
    const Tensor& param, const Tensor& exp_avg, const Tensor& exp_avg_sq, const Tensor& grad,
    const std::optional<Tensor>& visible, double lr, double beta1, double beta2, double eps, double step) {
  if (param.numel() == 0) return;
  const DeviceScope scope(param);
  adam_rows(
      adam_rates(lr, beta1, beta2, eps, step), param.size(0), param.numel() / param.size(0),
      visible.has_value() ? visible->const_data_ptr<bool>() : nullptr, floats(grad), floats_of(param),
      floats_of(exp_avg), floats_of(exp_avg_sq), scope.stream());
  scope.check();
}

}  // namespace
}  // namespace splaxel::gpu

SPLAXEL_GPU_OPS(m) {
  m.impl("composite", &splaxel::gpu::composite_images);
  m.impl("composite_backward", &splaxel::gpu::composite_images_backward);
  m.impl("composite_streams", &splaxel::gpu::composite_streams);
  m.impl("composite_streams_backward", &splaxel::gpu::composite_streams_backward);
  m.impl("pack_pixels", &splaxel::gpu::pack_pixels_of);
  m.impl("unpack_pixels", &splaxel::gpu::unpack_pixels_of);
  m.impl("pack_active", &splaxel::gpu::pack_active);
  m.impl("unpack_active", &splaxel::gpu::unpack_active);
  m.impl("adam_rows", &splaxel::gpu::adam_rows_of);
}
