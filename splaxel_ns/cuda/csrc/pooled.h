// Tensors in memory of the pool: ops of a training step fill the same large tensors at every step, and the system would
// clear their pages each time, which costs more than many of the loops that fill them.
#pragma once

#include <ATen/ops/from_blob.h>

#include <cstring>

#include "buffer.h"
#include "op.h"

namespace splaxel {

// Below this many bytes the C library reuses memory by itself.
constexpr int64_t kLeastPooled = 1 << 16;

// Uninitialised.
inline at::Tensor pooled(at::IntArrayRef sizes, at::ScalarType type) {
  int64_t bytes = static_cast<int64_t>(c10::elementSize(type));
  for (const int64_t size : sizes) bytes *= size;
  const auto options = at::TensorOptions().dtype(type);
  if (bytes < kLeastPooled) return at::empty(sizes, options);
  return at::from_blob(take_block(static_cast<size_t>(bytes)), sizes, give_block, options);
}

inline at::Tensor pooled_floats(at::IntArrayRef sizes) { return pooled(sizes, at::kFloat); }

inline at::Tensor pooled_zeros(at::IntArrayRef sizes) {
  at::Tensor tensor = pooled(sizes, at::kFloat);
  char* start = reinterpret_cast<char*>(tensor.data_ptr<float>());
  at::parallel_for(0, tensor.numel(), 1 << 16, [&](int64_t begin, int64_t end) {
    std::memset(start + begin * 4, 0, static_cast<size_t>(4 * (end - begin)));
  });
  return tensor;
}

}  // namespace splaxel
