// Loops over Gaussians and pixels run in blocks held as structure of arrays on the stack, compiled once per level of
// instructions.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common.h"
#include "cpu_level.h"

// Defines `name`, which runs the SPLAXEL_INLINE function `name_body` compiled for the level of instructions in use.
#define SPLAXEL_DISPATCH(result, name, parameters, arguments)                                                      \
  result name##_portable parameters { return name##_body arguments; }                                              \
  __attribute__((target("avx2,fma,bmi,bmi2"))) result name##_avx2 parameters { return name##_body arguments; }     \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi,bmi2"))) result name##_avx512 parameters { \
    return name##_body arguments;                                                                                  \
  }                                                                                                                \
  result name parameters {                                                                                         \
    switch (cpu_level()) {                                                                                         \
      case CpuLevel::kAvx512:                                                                                      \
        return name##_avx512 arguments;                                                                            \
      case CpuLevel::kAvx2:                                                                                        \
        return name##_avx2 arguments;                                                                              \
      default:                                                                                                     \
        return name##_portable arguments;                                                                          \
    }                                                                                                              \
  }

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
