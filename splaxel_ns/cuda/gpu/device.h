// What the bindings need of torch, and of the device: its stream, and a check after the launches of an op.
#pragma once

#include "launch.h"
#include "op.h"

#if defined(SPLAXEL_EMULATED)
// The tests' build: the same ops for tensors on the CPU, under a name of their own.
#define SPLAXEL_GPU_OPS(m) TORCH_LIBRARY_IMPL(splaxel_emulated, CPU, m)
#else
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#define SPLAXEL_GPU_OPS(m) TORCH_LIBRARY_IMPL(splaxel, CUDA, m)
#endif

namespace splaxel::gpu {

// For the time of one op: the device of a tensor, and the stream that torch uses there.
class DeviceScope {
 public:
#if defined(SPLAXEL_EMULATED)
  explicit DeviceScope(const at::Tensor&) {}
  cudaStream_t stream() const { return nullptr; }
  void check() const {}
#else
  explicit DeviceScope(const at::Tensor& tensor)
      : guard_(tensor.device()), stream_(c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream()) {}
  cudaStream_t stream() const { return stream_; }
  void check() const { C10_CUDA_KERNEL_LAUNCH_CHECK(); }

 private:
  c10::cuda::CUDAGuard guard_;
  cudaStream_t stream_;
#endif
};

inline const float* floats(const at::Tensor& t) { return t.const_data_ptr<float>(); }
inline float* floats_of(const at::Tensor& t) { return t.mutable_data_ptr<float>(); }
inline const int32_t* ints(const at::Tensor& t) { return t.const_data_ptr<int32_t>(); }

}  // namespace splaxel::gpu
