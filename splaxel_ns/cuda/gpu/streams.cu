// Packing and unpacking of pixel streams (include/stream.h). One thread per pixel: a row of a region is contiguous in
// the image and in the stream, so both sides' accesses are coalesced.

#include "pixels.h"

namespace splaxel::gpu {
namespace {

constexpr int kStreamThreads = 256;

struct StreamPlace {
  int64_t pixel;
  int x, y;
  __device__ __forceinline__ explicit StreamPlace(ImageSize size) {
    pixel = static_cast<int64_t>(blockIdx.x) * kStreamThreads + threadIdx.x;
    y = static_cast<int>(pixel / size.width);
    x = static_cast<int>(pixel - static_cast<int64_t>(y) * size.width);
  }
};

template <class Value>
__global__ void __launch_bounds__(kStreamThreads) pack_kernel(
    const float* colors, const float* depths, const float* transmittances, ImageSize size, StreamRegion region,
    int channels, Value* stream) {
  const StreamPlace place(size);
  if (place.pixel >= size.pixels()) return;
  const int64_t at = region.index(place.x, place.y);
  if (at < 0) return;
  const float* color = colors + 3 * place.pixel;
  const PartialPixel pixel = {
      color[0], color[1], color[2], transmittances[place.pixel], channels > 4 ? depths[place.pixel] : 0.0f};
  write_pixel(pixel, stream, channels, at);
}

template <class Value>
__global__ void __launch_bounds__(kStreamThreads) unpack_kernel(
    const Value* stream, ImageSize size, StreamRegion region, int channels, float* colors, float* depths,
    float* transmittances) {
  const StreamPlace place(size);
  if (place.pixel >= size.pixels()) return;
  const int64_t at = region.index(place.x, place.y);
  const PartialPixel pixel = at >= 0 ? read_pixel(stream, channels, at) : empty_pixel();
  colors[3 * place.pixel] = pixel.r;
  colors[3 * place.pixel + 1] = pixel.g;
  colors[3 * place.pixel + 2] = pixel.b;
  depths[place.pixel] = pixel.depth;
  transmittances[place.pixel] = pixel.transmittance;
}

// A warp makes one word.
template <class Value>
__global__ void __launch_bounds__(kStreamThreads)
    mark_kernel(const Value* stream, int64_t count, int channels, int32_t* bits, int32_t* counts) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kStreamThreads + threadIdx.x;
  const bool active = at < count && is_active(StreamValue<Value>::load(stream[channels * at + 3]));
  const uint32_t word = __ballot_sync(kFullWarp, active);
  if (at < count && threadIdx.x % 32 == 0) {
    bits[at / 32] = static_cast<int32_t>(word);
    counts[at / 32] = __popc(word);
  }
}

__global__ void __launch_bounds__(kStreamThreads) count_kernel(const int32_t* bits, int64_t num_words, int32_t* counts) {
  const int64_t word = static_cast<int64_t>(blockIdx.x) * kStreamThreads + threadIdx.x;
  if (word < num_words) counts[word] = __popc(static_cast<uint32_t>(bits[word]));
}

// Which of the active pixels the stream's pixel `at` is; -1 if it is none.
__device__ __forceinline__ int64_t active_index(const int32_t* bits, const int64_t* ends, int64_t at) {
  const uint32_t word = static_cast<uint32_t>(bits[at / 32]), bit = 1u << (at % 32);
  if (!(word & bit)) return -1;
  return ends[at / 32] - __popc(word & ~(bit - 1u));
}

template <class Value>
__global__ void __launch_bounds__(kStreamThreads) gather_kernel(
    const Value* stream, int64_t count, int channels, const int32_t* bits, const int64_t* ends, Value* values) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kStreamThreads + threadIdx.x;
  if (at >= count) return;
  const int64_t to = active_index(bits, ends, at);
  if (to < 0) return;
  for (int c = 0; c < channels; ++c) values[channels * to + c] = stream[channels * at + c];
}

template <class Value>
__global__ void __launch_bounds__(kStreamThreads) spread_kernel(
    const Value* values, int64_t count, int channels, const int32_t* bits, const int64_t* ends, Value* stream) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kStreamThreads + threadIdx.x;
  if (at >= count) return;
  const int64_t from = active_index(bits, ends, at);
  if (from < 0)
    write_pixel(empty_pixel(), stream, channels, at);
  else
    for (int c = 0; c < channels; ++c) stream[channels * at + c] = values[channels * from + c];
}

}  // namespace

void pack_pixels(
    const float* colors, const float* depths, const float* transmittances, ImageSize size, const StreamRegion& region,
    int channels, bool half, void* stream_out, cudaStream_t stream) {
  const dim3 blocks(blocks_for(size.pixels(), kStreamThreads)), threads(kStreamThreads);
  if (half)
    SPLAXEL_LAUNCH(
        pack_kernel<__half>, blocks, threads, stream, colors, depths, transmittances, size, region, channels,
        static_cast<__half*>(stream_out));
  else
    SPLAXEL_LAUNCH(
        pack_kernel<float>, blocks, threads, stream, colors, depths, transmittances, size, region, channels,
        static_cast<float*>(stream_out));
}

void unpack_pixels(
    const void* stream_in, ImageSize size, const StreamRegion& region, int channels, bool half, float* colors,
    float* depths, float* transmittances, cudaStream_t stream) {
  const dim3 blocks(blocks_for(size.pixels(), kStreamThreads)), threads(kStreamThreads);
  if (half)
    SPLAXEL_LAUNCH(
        unpack_kernel<__half>, blocks, threads, stream, static_cast<const __half*>(stream_in), size, region, channels,
        colors, depths, transmittances);
  else
    SPLAXEL_LAUNCH(
        unpack_kernel<float>, blocks, threads, stream, static_cast<const float*>(stream_in), size, region, channels,
        colors, depths, transmittances);
}

void mark_active(
    const void* stream_in, int64_t count, int channels, bool half, int32_t* bits, int32_t* counts,
    cudaStream_t stream) {
  const dim3 blocks(blocks_for(count, kStreamThreads)), threads(kStreamThreads);
  if (half)
    SPLAXEL_LAUNCH(
        mark_kernel<__half>, blocks, threads, stream, static_cast<const __half*>(stream_in), count, channels, bits,
        counts);
  else
    SPLAXEL_LAUNCH(
        mark_kernel<float>, blocks, threads, stream, static_cast<const float*>(stream_in), count, channels, bits,
        counts);
}

void count_active(const int32_t* bits, int64_t num_words, int32_t* counts, cudaStream_t stream) {
  const dim3 blocks(blocks_for(num_words, kStreamThreads));
  SPLAXEL_LAUNCH(count_kernel, blocks, dim3(kStreamThreads), stream, bits, num_words, counts);
}

void gather_active(
    const void* stream_in, int64_t count, int channels, bool half, const int32_t* bits, const int64_t* ends,
    void* values, cudaStream_t stream) {
  const dim3 blocks(blocks_for(count, kStreamThreads)), threads(kStreamThreads);
  if (half)
    SPLAXEL_LAUNCH(
        gather_kernel<__half>, blocks, threads, stream, static_cast<const __half*>(stream_in), count, channels, bits,
        ends, static_cast<__half*>(values));
  else
    SPLAXEL_LAUNCH(
        gather_kernel<float>, blocks, threads, stream, static_cast<const float*>(stream_in), count, channels, bits,
        ends, static_cast<float*>(values));
}

void spread_active(
    const void* values, int64_t count, int channels, bool half, const int32_t* bits, const int64_t* ends,
    void* stream_out, cudaStream_t stream) {
  const dim3 blocks(blocks_for(count, kStreamThreads)), threads(kStreamThreads);
  if (half)
    SPLAXEL_LAUNCH(
        spread_kernel<__half>, blocks, threads, stream, static_cast<const __half*>(values), count, channels, bits,
        ends, static_cast<__half*>(stream_out));
  else
    SPLAXEL_LAUNCH(
        spread_kernel<float>, blocks, threads, stream, static_cast<const float*>(values), count, channels, bits, ends,
        static_cast<float*>(stream_out));
}

}  // namespace splaxel::gpu
