// The torch headers an op needs and no more: <torch/extension.h> would take 20 seconds to compile in every file.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>

namespace splaxel {

// Refuses owners [N] int32 that are none of P partitions, since they become places in memory.
inline void check_owners(const at::Tensor& owner, int64_t num_partitions) {
  const int* leaf = owner.const_data_ptr<int>();
  unsigned largest = 0;  // negative ones are larger than any partition
  for (int64_t i = 0; i < owner.size(0); ++i) largest = std::max(largest, static_cast<unsigned>(leaf[i]));
  TORCH_CHECK_VALUE(largest < static_cast<unsigned>(num_partitions) || owner.size(0) == 0, "owner names partition ",
                    static_cast<int>(largest), " of ", num_partitions, ".");
}

inline at::TensorOptions float_options() { return at::TensorOptions().dtype(at::kFloat); }
inline at::TensorOptions int_options() { return at::TensorOptions().dtype(at::kInt); }

}  // namespace splaxel
