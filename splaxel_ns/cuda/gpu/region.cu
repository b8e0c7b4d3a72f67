// Rasterisation of content boxes to row spans: a block takes one box of one partition, a thread every 128th of its rows.
//
// The outline is a few hundred operations on 20 points, so each thread finds it for itself rather than wait for another;
// it lies in local memory, which is no matter for a kernel of a few thousand threads per view. Rows of several boxes meet
// in atomic minima and maxima, which no order can change: the spans are the CPU's to the pixel.

#include "region.h"
#include "spans.h"

namespace splaxel::gpu {
namespace {

constexpr int kSpanThreads = 128;

__global__ void __launch_bounds__(kSpanThreads) spans_kernel(
    SpansView view, const float* boxes, const float* leaves, int boxes_each, int32_t* spans) {
  const int partition = static_cast<int>(blockIdx.y), at = static_cast<int>(blockIdx.x);
  // With leaves, a leaf is met by the boxes of all partitions.
  const RegionCamera camera = region_camera(view.viewmat, view.intrinsics, view.width, view.height, view.near);
  WorldBox box = world_box(boxes + 6 * (leaves != nullptr ? at : partition * boxes_each + at));
  if (box.empty()) return;
  const double far = depth_range_end(camera, box);
  if (far < camera.near) return;
  if (leaves != nullptr) {
    box = intersection(with_blur(camera, box, far), world_box(leaves + 6 * partition));
    if (box.empty()) return;
  }
  const Outline outline = project_box(camera, box);
  int top, bottom;
  row_range(camera, outline, &top, &bottom);
  for (int y = top + static_cast<int>(threadIdx.x); y < bottom; y += kSpanThreads) {
    int first, last;
    row_span(camera, outline, y, &first, &last);
    if (first == last) continue;
    int32_t* row = spans + 2 * (static_cast<int64_t>(partition) * view.height + y);
    atomicMin(row, first);
    atomicMax(row + 1, last);
  }
}

__global__ void __launch_bounds__(kSpanThreads) fill_kernel(int64_t num_rows, int first, int32_t* spans) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kSpanThreads + threadIdx.x;
  if (row < num_rows) spans[2 * row] = first, spans[2 * row + 1] = 0;
}

// Rows that no box reached become 0, 0.
__global__ void __launch_bounds__(kSpanThreads) empty_kernel(int64_t num_rows, int32_t* spans) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kSpanThreads + threadIdx.x;
  if (row < num_rows && spans[2 * row + 1] == 0) spans[2 * row] = 0;
}

}  // namespace

void region_spans(
    const SpansView& view, const float* boxes, const float* leaves, int num_partitions, int boxes_each, int32_t* spans,
    cudaStream_t stream) {
  const int64_t num_rows = static_cast<int64_t>(num_partitions) * view.height;
  const dim3 rows(blocks_for(num_rows, kSpanThreads)), threads(kSpanThreads);
  SPLAXEL_LAUNCH(fill_kernel, rows, threads, stream, num_rows, view.width, spans);
  const int per_partition = leaves != nullptr ? num_partitions * boxes_each : boxes_each;
  if (per_partition > 0) {
    const dim3 blocks(per_partition, num_partitions);
    SPLAXEL_LAUNCH(spans_kernel, blocks, threads, stream, view, boxes, leaves, boxes_each, spans);
  }
  SPLAXEL_LAUNCH(empty_kernel, rows, threads, stream, num_rows, spans);
}

}  // namespace splaxel::gpu
