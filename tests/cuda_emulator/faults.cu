// Kernels with one fault each, and some without, for the test of the emulator: `faults <name> <seed>` runs one and prints
// what came of it.

#include <cstdio>

#include "launch.h"
#include "warp.h"

namespace {

constexpr int kThreads = 64;

// Reverses the block's numbers through shared memory.
template <bool with_barrier>
__global__ void reverse_kernel(int* out) {
  SPLAXEL_SHARED(int, numbers, kThreads);
  const int thread = static_cast<int>(threadIdx.x);
  numbers[thread] = thread;
  if (with_barrier) __syncthreads();
  out[thread] = numbers[kThreads - 1 - thread];
}

__global__ void one_half_only_kernel(int* out) {
  if (threadIdx.x < 32) __syncthreads();
  out[threadIdx.x] = 0;
}

__global__ void two_barriers_kernel(int* out) {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
  out[threadIdx.x] = 0;
}

__global__ void overflow_kernel(int* out) {
  SPLAXEL_SHARED(int, numbers, kThreads);
  numbers[threadIdx.x + 1] = 0;
  out[threadIdx.x] = 0;
}

__global__ void global_overflow_kernel(int* out) { out[threadIdx.x + 1] = 0; }

__global__ void never_written_kernel(float* out) {
  SPLAXEL_SHARED(float, numbers, kThreads);
  if (threadIdx.x > 0) numbers[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = numbers[threadIdx.x];
}

__global__ void absent_lane_kernel(int* out) {
  if (threadIdx.x % 32 == 5) return;
  out[threadIdx.x] = static_cast<int>(__ballot_sync(splaxel::gpu::kFullWarp, 1));
}

__global__ void split_warp_kernel(int* out) {
  if (threadIdx.x % 2 == 0)
    out[threadIdx.x] = static_cast<int>(__ballot_sync(splaxel::gpu::kFullWarp, 1));
  else
    out[threadIdx.x] = __any_sync(splaxel::gpu::kFullWarp, 1);
}

// Sums of N values over the lanes, and where they end up.
template <int N>
__global__ void fold_kernel(float* out) {
  const int lane = static_cast<int>(threadIdx.x);
  float values[N];
  for (int i = 0; i < N; ++i) values[i] = static_cast<float>((lane + 1) * (i + 1));
  splaxel::gpu::fold_sums<N>(values, lane);
  const int slot = splaxel::gpu::fold_slot<N>(lane);
  if (slot >= 0) out[slot] += values[0];  // twice, should two lanes own a sum
}

template <int N>
bool folds() {
  std::vector<float> out(N, 0.0f);
  SPLAXEL_LAUNCH(fold_kernel<N>, dim3(1), dim3(32), nullptr, out.data());
  for (int i = 0; i < N; ++i)
    if (out[static_cast<size_t>(i)] != 528.0f * static_cast<float>(i + 1)) return false;
  return true;
}

__global__ void votes_kernel(int* out) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const uint32_t odd = __ballot_sync(splaxel::gpu::kFullWarp, lane % 2);
  const int most = __reduce_max_sync(splaxel::gpu::kFullWarp, thread);
  const int sum = __reduce_add_sync(splaxel::gpu::kFullWarp, 1);
  const int from = __shfl_sync(splaxel::gpu::kFullWarp, thread, 7);
  const int partner = __shfl_xor_sync(splaxel::gpu::kFullWarp, thread, 1);
  const bool any = __syncthreads_or(thread == 3) != 0;
  const int count = __syncthreads_count(thread < 5);
  const int first = thread / 32 * 32;
  const bool right = odd == 0xaaaaaaaau && most == first + 31 && sum == 32 && from == first + 7 &&
                     partner == (thread ^ 1) && any && count == 5 && !__any_sync(splaxel::gpu::kFullWarp, 0) &&
                     __all_sync(splaxel::gpu::kFullWarp, 1);
  atomicAdd(out, right ? 1 : 0);
}

bool reversed(const std::vector<int>& out) {
  for (int i = 0; i < kThreads; ++i)
    if (out[static_cast<size_t>(i)] != kThreads - 1 - i) return false;
  return true;
}

std::string outcome(const std::string& name) {
  std::vector<int> out(kThreads, 0);
  std::vector<float> numbers(kThreads, 0.0f);
  const dim3 one(1), threads(kThreads);
  int* data = out.data();
  if (name == "reverse") {
    SPLAXEL_LAUNCH(reverse_kernel<true>, one, threads, nullptr, data);
    return reversed(out) ? "right" : "wrong";
  }
  if (name == "missing_barrier") {
    SPLAXEL_LAUNCH(reverse_kernel<false>, one, threads, nullptr, data);
    return reversed(out) ? "right" : "wrong";
  }
  if (name == "votes") {
    SPLAXEL_LAUNCH(votes_kernel, one, threads, nullptr, data);
    return out[0] == kThreads ? "right" : "wrong";
  }
  if (name == "fold") return folds<1>() && folds<3>() && folds<10>() && folds<12>() && folds<32>() ? "right" : "wrong";
  if (name == "never_written") {
    SPLAXEL_LAUNCH(never_written_kernel, one, threads, nullptr, numbers.data());
    return numbers[0] == numbers[0] && numbers[1] == 1.0f ? "right" : "not a number";
  }
  if (name == "one_half_only") SPLAXEL_LAUNCH(one_half_only_kernel, one, threads, nullptr, data);
  if (name == "two_barriers") SPLAXEL_LAUNCH(two_barriers_kernel, one, threads, nullptr, data);
  if (name == "overflow") SPLAXEL_LAUNCH(overflow_kernel, one, threads, nullptr, data);
  if (name == "global_overflow") SPLAXEL_LAUNCH(global_overflow_kernel, one, threads, nullptr, data);
  if (name == "absent_lane") SPLAXEL_LAUNCH(absent_lane_kernel, one, threads, nullptr, data);
  if (name == "split_warp") SPLAXEL_LAUNCH(split_warp_kernel, one, threads, nullptr, data);
  if (name == "odd_block") SPLAXEL_LAUNCH(votes_kernel, one, dim3(33), nullptr, data);
  return "nothing found";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2) emulator::random_state += static_cast<uint64_t>(std::atoi(argv[2]));
  try {
    std::puts(outcome(argc > 1 ? argv[1] : "").c_str());
    // The emulator is as good as new after an error.
    std::puts(outcome("reverse").c_str());
  } catch (const std::runtime_error& error) {
    std::puts(error.what());
    std::puts(outcome("reverse").c_str());
  }
}
