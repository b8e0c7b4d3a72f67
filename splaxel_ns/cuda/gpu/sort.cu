// The sort of (job, depth) keys: CUB's radix sort, over the bits that the keys use.

#include <cub/device/device_radix_sort.cuh>

#include "raster.h"

namespace splaxel::gpu {

void sort_pairs(
    void* temp, size_t& temp_bytes, const uint64_t* keys_in, uint64_t* keys_out, const int32_t* items_in,
    int32_t* items_out, int64_t count, int bits, cudaStream_t stream) {
  // Errors stay with the runtime, where the check after every launch finds them.
  (void)cub::DeviceRadixSort::SortPairs(
      temp, temp_bytes, keys_in, keys_out, items_in, items_out, static_cast<int>(count), 0, bits, stream);
}

}  // namespace splaxel::gpu
