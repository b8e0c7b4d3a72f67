// Selective Adam: rows of Gaussians that no view of the step saw keep their parameters and moments, and cost a byte each.

#include "pixels.h"

namespace splaxel::gpu {
namespace {

constexpr int kAdamThreads = 256;

__global__ void __launch_bounds__(kAdamThreads) adam_kernel(
    AdamRates rates, int64_t count, int64_t channels, const bool* visible, const float* grad, float* param,
    float* exp_avg, float* exp_avg_sq) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kAdamThreads + threadIdx.x;
  if (at >= count || (visible != nullptr && !visible[at / channels])) return;
  float p = param[at], m = exp_avg[at], v = exp_avg_sq[at];
  adam_step(rates, grad[at], p, m, v);
  param[at] = p;
  exp_avg[at] = m;
  exp_avg_sq[at] = v;
}

}  // namespace

void adam_rows(
    const AdamRates& rates, int64_t num_rows, int64_t channels, const bool* visible, const float* grad, float* param,
    float* exp_avg, float* exp_avg_sq, cudaStream_t stream) {
  const int64_t count = num_rows * channels;
  const dim3 blocks(blocks_for(count, kAdamThreads));
  SPLAXEL_LAUNCH(
      adam_kernel, blocks, dim3(kAdamThreads), stream, rates, count, channels, visible, grad, param, exp_avg,
      exp_avg_sq);
}

}  // namespace splaxel::gpu
