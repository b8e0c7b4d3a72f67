// The torch headers an op needs and no more: <torch/extension.h> would take 20 seconds to compile in every file.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace splaxel {

inline at::TensorOptions float_options() { return at::TensorOptions().dtype(at::kFloat); }
inline at::TensorOptions int_options() { return at::TensorOptions().dtype(at::kInt); }

}  // namespace splaxel
