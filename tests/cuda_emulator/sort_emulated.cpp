// gpu/sort.cu calls CUB, which is not ours to test; this stands in for it.

#include <algorithm>
#include <numeric>
#include <vector>

#include "raster.h"

namespace splaxel::gpu {

void sort_pairs(
    void* temp, size_t& temp_bytes, const uint64_t* keys_in, uint64_t* keys_out, const int32_t* items_in,
    int32_t* items_out, int64_t count, int bits, cudaStream_t) {
  if (temp == nullptr) {
    temp_bytes = 1;
    return;
  }
  const uint64_t used = bits >= 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
  std::vector<int64_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(
      order.begin(), order.end(), [&](int64_t a, int64_t b) { return (keys_in[a] & used) < (keys_in[b] & used); });
  for (int64_t i = 0; i < count; ++i)
    keys_out[i] = keys_in[order[static_cast<size_t>(i)]], items_out[i] = items_in[order[static_cast<size_t>(i)]];
}

}  // namespace splaxel::gpu
