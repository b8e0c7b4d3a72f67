// Sums over the lanes of a warp.
#pragma once

#include "launch.h"

namespace splaxel::gpu {

// Adds up N values over the 32 lanes. At each of five steps a lane hands half of its values to a partner and keeps the
// other half's sums: 12 shuffles for 10 values, where adding up one value after the other takes 50. The result is in
// values[0] of the lane that owns it; see fold_slot.
template <int N, int offset = 16>
__device__ __forceinline__ void fold_sums(float* values, int lane) {
  if constexpr (N == 1) {
    values[0] += __shfl_xor_sync(kFullWarp, values[0], offset);
    if constexpr (offset > 1) fold_sums<1, offset / 2>(values, lane);
  } else {
    constexpr int kHalf = (N + 1) / 2;
    const bool upper = (lane & offset) != 0;
SPLAXEL_UNROLL
    for (int i = 0; i < kHalf; ++i) {
      const float low = values[i], high = i + kHalf < N ? values[i + kHalf] : 0.0f;
      values[i] = (upper ? high : low) + __shfl_xor_sync(kFullWarp, upper ? low : high, offset);
    }
    static_assert(offset > 1 || kHalf == 1, "at most 32 values");
    if constexpr (offset > 1) fold_sums<kHalf, offset / 2>(values, lane);
  }
}

// Which of the N sums this lane owns after fold_sums, -1 if none.
template <int N>
__device__ __forceinline__ int fold_slot(int lane) {
  int first = 0, padded = N, owned = N;
  for (int offset = 16; offset > 0; offset /= 2) {
    const bool upper = (lane & offset) != 0;
    if (padded == 1) {
      if (upper) owned = 0;  // the lower lane has the same sum
      continue;
    }
    const int half = (padded + 1) / 2;
    if (upper) first += half;
    owned = upper ? owned - half : (owned < half ? owned : half);
    padded = half;
  }
  return owned > 0 ? first : -1;
}

}  // namespace splaxel::gpu
