// Composition of partial images, forward and backward (include/composite.h), from whole images or from streams where they
// arrived. One thread per pixel; neighbouring threads read neighbouring memory of every layer. The work is bound by
// memory, so the backward pass reads transmittances twice rather than keep anything from the forward pass: what is in
// front of each layer waits in shared memory for the walk back.

#include "composite.h"
#include "pixels.h"
#include "warp.h"

namespace splaxel::gpu {
namespace {

__device__ __forceinline__ PartialPixel load(const DenseLayers& in, ImageSize size, int q, int64_t pixel) {
  const int64_t at = q * size.pixels() + pixel;
  return {in.colors[3 * at], in.colors[3 * at + 1], in.colors[3 * at + 2], in.transmittances[at], in.depths[at]};
}

__device__ __forceinline__ float load_transmittance(const DenseLayers& in, ImageSize size, int q, int64_t pixel) {
  return in.transmittances[q * size.pixels() + pixel];
}

__device__ __forceinline__ void store(
    const DenseLayers& in, ImageSize size, int q, int64_t pixel, const PartialPixel& gradient) {
  const int64_t at = q * size.pixels() + pixel;
  in.v_colors[3 * at] = gradient.r;
  in.v_colors[3 * at + 1] = gradient.g;
  in.v_colors[3 * at + 2] = gradient.b;
  in.v_transmittances[at] = gradient.transmittance;
  if (in.v_depths != nullptr) in.v_depths[at] = gradient.depth;
}

__device__ __forceinline__ int64_t stream_index(const StreamLayers& in, ImageSize size, int q, int64_t pixel) {
  const int64_t first = static_cast<int64_t>(q) * size.height;
  const StreamRegion region = {in.spans + 2 * first, in.row_starts + first};
  const int y = static_cast<int>(pixel / size.width);
  return region.index(static_cast<int>(pixel - static_cast<int64_t>(y) * size.width), y);
}

__device__ __forceinline__ PartialPixel load(const StreamLayers& in, ImageSize size, int q, int64_t pixel) {
  const int64_t at = stream_index(in, size, q, pixel);
  return at >= 0 ? read_pixel(in.stream, in.channels, at) : empty_pixel();
}

__device__ __forceinline__ float load_transmittance(const StreamLayers& in, ImageSize size, int q, int64_t pixel) {
  const int64_t at = stream_index(in, size, q, pixel);
  return at >= 0 ? in.stream[in.channels * at + 3] : 1.0f;
}

__device__ __forceinline__ void store(
    const StreamLayers& in, ImageSize size, int q, int64_t pixel, const PartialPixel& gradient) {
  const int64_t at = stream_index(in, size, q, pixel);
  if (at >= 0) write_pixel(gradient, in.v_stream, in.channels, at);
}

template <class Layers>
__global__ void __launch_bounds__(kCompositeThreads)
    composite_kernel(Layers layers, int num_layers, ImageSize size, const float* background, Composed out) {
  const int64_t pixel = static_cast<int64_t>(blockIdx.x) * kCompositeThreads + threadIdx.x;
  if (pixel >= size.pixels()) return;
  float r = 0.0f, g = 0.0f, b = 0.0f, depth = 0.0f, w = 1.0f;
  for (int q = 0; q < num_layers; ++q) {
    const PartialPixel p = load(layers, size, q, pixel);
    blend_partial(p.r, p.g, p.b, p.depth, p.transmittance, r, g, b, depth, w);
  }
  out.rgb[3 * pixel] = r + w * background[0];
  out.rgb[3 * pixel + 1] = g + w * background[1];
  out.rgb[3 * pixel + 2] = b + w * background[2];
  out.depth[pixel] = depth;
  out.alpha[pixel] = 1.0f - w;
}

// At most kLayers layers.
template <class Layers, int kLayers>
__global__ void __launch_bounds__(kCompositeThreads) composite_backward_kernel(
    Layers layers, int num_layers, ImageSize size, const float* background, Composed gradients, float* v_background) {
  constexpr int kWarps = kCompositeThreads / 32;
  SPLAXEL_SHARED(float, front, kLayers * kCompositeThreads);
  SPLAXEL_SHARED(float, warp_sums, 3 * kWarps);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int64_t pixel = static_cast<int64_t>(blockIdx.x) * kCompositeThreads + thread;
  float v_back[3] = {0.0f, 0.0f, 0.0f};
  if (pixel < size.pixels()) {
    float w = 1.0f;
    for (int q = 0; q < num_layers; ++q) {
      front[q * kCompositeThreads + thread] = w;
      w *= load_transmittance(layers, size, q, pixel);
    }
    const float v_r = gradients.rgb[3 * pixel], v_g = gradients.rgb[3 * pixel + 1], v_b = gradients.rgb[3 * pixel + 2];
    const float v_d = gradients.depth != nullptr ? gradients.depth[pixel] : 0.0f;
    const float v_alpha = gradients.alpha != nullptr ? gradients.alpha[pixel] : 0.0f;
    v_back[0] = w * v_r, v_back[1] = w * v_g, v_back[2] = w * v_b;
    float rest = background[0] * v_r + background[1] * v_g + background[2] * v_b - v_alpha;
    for (int q = num_layers - 1; q >= 0; --q) {
      const PartialPixel p = load(layers, size, q, pixel);
      const float before = front[q * kCompositeThreads + thread];
      float v_t;
      rest = blend_partial_vjp(p.r, p.g, p.b, p.depth, p.transmittance, before, v_r, v_g, v_b, v_d, rest, v_t);
      store(layers, size, q, pixel, {before * v_r, before * v_g, before * v_b, v_t, before * v_d});
    }
  }
  fold_sums<3>(v_back, lane);
  const int slot = fold_slot<3>(lane);
  if (slot >= 0) warp_sums[thread / 32 * 3 + slot] = v_back[0];
  __syncthreads();
  if (thread < 3) {
    float sum = 0.0f;
    for (int warp = 0; warp < kWarps; ++warp) sum += warp_sums[3 * warp + thread];
    v_background[3 * static_cast<int64_t>(blockIdx.x) + thread] = sum;
  }
}

template <class Layers>
void forward_as(
    const Layers& layers, int num_layers, ImageSize size, const float* background, const Composed& out,
    cudaStream_t stream) {
  const dim3 blocks(composite_blocks(size)), threads(kCompositeThreads);
  SPLAXEL_LAUNCH(composite_kernel<Layers>, blocks, threads, stream, layers, num_layers, size, background, out);
}

template <class Layers>
void backward_as(
    const Layers& layers, int num_layers, ImageSize size, const float* background, const Composed& gradients,
    float* v_background, cudaStream_t stream) {
  const dim3 blocks(composite_blocks(size)), threads(kCompositeThreads);
  // Fewer layers take less shared memory, and more blocks fit a multiprocessor.
  if (num_layers <= 8)
    SPLAXEL_LAUNCH(
        (composite_backward_kernel<Layers, 8>), blocks, threads, stream, layers, num_layers, size, background,
        gradients, v_background);
  else
    SPLAXEL_LAUNCH(
        (composite_backward_kernel<Layers, kMostLayers>), blocks, threads, stream, layers, num_layers, size,
        background, gradients, v_background);
}

}  // namespace

unsigned composite_blocks(ImageSize size) { return blocks_for(size.pixels(), kCompositeThreads); }

void composite(
    const DenseLayers& layers, int num_layers, ImageSize size, const float* background, const Composed& out,
    cudaStream_t stream) {
  forward_as(layers, num_layers, size, background, out, stream);
}

void composite(
    const StreamLayers& layers, int num_layers, ImageSize size, const float* background, const Composed& out,
    cudaStream_t stream) {
  forward_as(layers, num_layers, size, background, out, stream);
}

void composite_backward(
    const DenseLayers& layers, int num_layers, ImageSize size, const float* background, const Composed& gradients,
    float* v_background, cudaStream_t stream) {
  backward_as(layers, num_layers, size, background, gradients, v_background, stream);
}

void composite_backward(
    const StreamLayers& layers, int num_layers, ImageSize size, const float* background, const Composed& gradients,
    float* v_background, cudaStream_t stream) {
  backward_as(layers, num_layers, size, background, gradients, v_background, stream);
}

}  // namespace splaxel::gpu
