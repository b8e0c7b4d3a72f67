// Pixel regions of partitions on the GPU. All pointers are the device's. Letters: P partitions, S boxes of each.
#pragma once

#include <cstdint>

#include "launch.h"

namespace splaxel::gpu {

struct SpansView {
  const float* viewmat;     // [4, 4]
  const float* intrinsics;  // [3, 3]
  int width, height;
  double near;
};

// spans [P, H, 2]; leaves [P, 2, 3] null: each partition's own boxes [P, S, 2, 3] make its region.
void region_spans(
    const SpansView& view, const float* boxes, const float* leaves, int num_partitions, int boxes_each, int32_t* spans,
    cudaStream_t);

}  // namespace splaxel::gpu
