// The op region_spans for tensors on a GPU.

#include "device.h"
#include "spans.h"

namespace splaxel::gpu {
namespace {

at::Tensor region_spans_of(
    const at::Tensor& boxes, const std::optional<at::Tensor>& leaves, const at::Tensor& viewmat,
    const at::Tensor& intrinsics, int64_t width, int64_t height, double near) {
  const DeviceScope scope(boxes);
  at::Tensor spans = at::empty({boxes.size(0), height, 2}, boxes.options().dtype(at::kInt));
  if (boxes.size(0) == 0) return spans;
  const SpansView view = {
      floats(viewmat), floats(intrinsics), static_cast<int>(width), static_cast<int>(height), near};
  region_spans(
      view, floats(boxes), leaves.has_value() ? floats(*leaves) : nullptr, static_cast<int>(boxes.size(0)),
      static_cast<int>(boxes.size(1)), spans.mutable_data_ptr<int32_t>(), scope.stream());
  scope.check();
  return spans;
}

}  // namespace
}  // namespace splaxel::gpu

SPLAXEL_GPU_OPS(m) { m.impl("region_spans", &splaxel::gpu::region_spans_of); }
