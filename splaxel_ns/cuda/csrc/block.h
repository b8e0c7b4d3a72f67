// Loops over Gaussians run in blocks held as structure of arrays on the stack, compiled once per instruction set and
// chosen by the processor at load time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SPLAXEL_CLONES __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define SPLAXEL_CLONES
#endif

namespace splaxel {

constexpr int kBlock = 128;  // Gaussians; every array of a block then fits the first cache at once

inline int64_t num_blocks(int64_t count) { return (count + kBlock - 1) / kBlock; }

// Rows of `channels` floats to arrays; the rest of a short block is zero, which every op treats as "not seen".
template <int channels>
SPLAXEL_INLINE void load_block(const float* rows, int count, float (*arrays)[kBlock]) {
  if (count == kBlock) {
    for (int i = 0; i < kBlock; ++i)
      for (int c = 0; c < channels; ++c) arrays[c][i] = rows[i * channels + c];
    return;
  }
  for (int c = 0; c < channels; ++c) {
    for (int i = 0; i < count; ++i) arrays[c][i] = rows[i * channels + c];
    for (int i = count; i < kBlock; ++i) arrays[c][i] = 0.0f;
  }
}

template <int channels>
SPLAXEL_INLINE void store_block(const float (*arrays)[kBlock], int count, float* rows) {
  if (count == kBlock) {
    for (int i = 0; i < kBlock; ++i)
      for (int c = 0; c < channels; ++c) rows[i * channels + c] = arrays[c][i];
    return;
  }
  for (int i = 0; i < count; ++i)
    for (int c = 0; c < channels; ++c) rows[i * channels + c] = arrays[c][i];
}

// Sums in float64, lane by lane: the order depends on neither threads nor the block's neighbours.
SPLAXEL_INLINE double sum_block(const float* array) {
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < kBlock; ++i) sum += static_cast<double>(array[i]);
  return sum;
}

}  // namespace splaxel
