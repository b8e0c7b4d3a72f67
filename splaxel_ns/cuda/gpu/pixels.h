// Composition and pixel streams on the GPU, and Adam: the functions that launch the kernels. All pointers are the
// device's. Letters: Q layers, H x W pixels, M pixels of a stream, C numbers per pixel.
#pragma once

#include "adam.h"
#include "launch.h"
#include "stream.h"

namespace splaxel {

template <>
struct StreamValue<__half> {
  __device__ __forceinline__ static float load(__half value) { return __half2float(value); }
  __device__ __forceinline__ static __half store(float value) { return __float2half_rn(within_half(value)); }
};

}  // namespace splaxel

namespace splaxel::gpu {

struct ImageSize {
  int width, height;
  SPLAXEL_INLINE int64_t pixels() const { return static_cast<int64_t>(width) * height; }
};

// Partial images as whole images.
struct DenseLayers {
  const float* colors;          // [Q, H, W, 3]
  const float* depths;          // [Q, H, W]
  const float* transmittances;  // [Q, H, W]
  float *v_colors, *v_depths, *v_transmittances;  // backward only; v_depths null: not wanted
};

// Partial images as streams, one behind the other in one array.
struct StreamLayers {
  const float* stream;        // [M, C]
  int channels;
  const int32_t* spans;       // [Q, H, 2]
  const int64_t* row_starts;  // [Q, H] into the stream
  float* v_stream;            // [M, C], backward only
};

struct Composed {
  float* rgb;    // [H, W, 3]
  float* depth;  // [H, W]; this and the next as gradients also null, for zero
  float* alpha;  // [H, W]
};

constexpr int kCompositeThreads = 128;
constexpr int kMostLayers = 64;  // what the backward pass keeps in shared memory

void composite(
    const DenseLayers& layers, int num_layers, ImageSize size, const float* background, const Composed& out,
    cudaStream_t);
void composite(
    const StreamLayers& layers, int num_layers, ImageSize size, const float* background, const Composed& out,
    cudaStream_t);
// v_background [composite_blocks, 3]: each block's part.
unsigned composite_blocks(ImageSize size);
void composite_backward(
    const DenseLayers& layers, int num_layers, ImageSize size, const float* background, const Composed& gradients,
    float* v_background, cudaStream_t);
void composite_backward(
    const StreamLayers& layers, int num_layers, ImageSize size, const float* background, const Composed& gradients,
    float* v_background, cudaStream_t);

// Images to a stream and back. half: the stream holds float16, else float.
void pack_pixels(
    const float* colors, const float* depths, const float* transmittances, ImageSize size, const StreamRegion& region,
    int channels, bool half, void* stream_out, cudaStream_t);
void unpack_pixels(
    const void* stream_in, ImageSize size, const StreamRegion& region, int channels, bool half, float* colors,
    float* depths, float* transmittances, cudaStream_t);
// One bit per pixel that is active, 32 to a word, and how many bits each word has.
void mark_active(const void* stream_in, int64_t count, int channels, bool half, int32_t* bits, int32_t* counts, cudaStream_t);
void count_active(const int32_t* bits, int64_t num_words, int32_t* counts, cudaStream_t);
// The active pixels of a stream one behind the other, and back; ends [words]: running sums of the counts.
void gather_active(
    const void* stream_in, int64_t count, int channels, bool half, const int32_t* bits, const int64_t* ends,
    void* values, cudaStream_t);
void spread_active(
    const void* values, int64_t count, int channels, bool half, const int32_t* bits, const int64_t* ends,
    void* stream_out, cudaStream_t);

// One step of Adam on rows [N, channels]; visible [N] null: all of them.
void adam_rows(
    const AdamRates& rates, int64_t num_rows, int64_t channels, const bool* visible, const float* grad, float* param,
    float* exp_avg, float* exp_avg_sq, cudaStream_t);

}  // namespace splaxel::gpu
