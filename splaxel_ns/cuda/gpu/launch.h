// What the kernels are written with beyond CUDA itself: a few macros, so that the same files also run on the CPU, in tests.
#pragma once

#if defined(SPLAXEL_EMULATED)
#include "cuda_emulator.h"
#define SPLAXEL_UNROLL
#else
#include <cuda_fp16.h>
#include <cuda_runtime.h>
// Calls kernel(arguments) in a grid of blocks. Template arguments with commas: put the kernel's name in parentheses.
#define SPLAXEL_LAUNCH(kernel, grid, threads, stream, ...) kernel<<<grid, threads, 0, stream>>>(__VA_ARGS__)
// An array of shared memory of the block.
#define SPLAXEL_SHARED(type, name, count) __shared__ type name[count]
// Before a loop whose arrays must stay in registers.
#define SPLAXEL_UNROLL _Pragma("unroll")
#endif

#include <cstdint>

namespace splaxel::gpu {

constexpr uint32_t kFullWarp = 0xffffffffu;

// Blocks of `threads` threads for `count` pieces of work, at least one: kernels test their index.
inline unsigned blocks_for(int64_t count, int threads) {
  return static_cast<unsigned>(count > threads ? (count + threads - 1) / threads : 1);
}

}  // namespace splaxel::gpu
