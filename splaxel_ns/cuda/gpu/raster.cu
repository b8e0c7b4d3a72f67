// The tile loops of partial rasterisation, forward and backward.
//
// A block of 256 threads draws one tile of one participant, one thread per pixel; a warp owns 8 x 4 of them. Splats come
// in batches of 256, which the block copies to shared memory together. Each warp then asks, one splat per lane, which of
// them reach its own 32 pixels (the exact ellipse against the rectangle, as the CPU's blocks), and visits those only:
// most splats of a tile miss most of its warps. A warp rests once all its pixels have stopped or were never drawn, and
// the block ends with its last warp.
//
// The backward pass walks from the last blended splat to the first, so that what lies behind is known. It restores
// transmittances by multiplying with 1 / (1 - alpha), alpha <= 0.999, from the final one, which the forward pass leaves
// beside the images; pixels stop at 1e-30 at the latest, so that nothing underflows. Sums over a warp's pixels are taken
// in registers (fold_sums) and leave as one atomic instruction whose 10 or 12 lanes write to one 64-byte row.

#include "raster.h"
#include "warp.h"

namespace splaxel::gpu {
namespace {

// The 32 pixels of a warp, and the pixel of a thread.
struct Place {
  int lane;
  int warp_x, warp_y;  // first pixel of the warp
  int x, y;
  __device__ __forceinline__ Place() {
    constexpr int kAcross = kTile / kWarpWidth;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    lane = static_cast<int>(threadIdx.x) % 32;
    warp_x = static_cast<int>(blockIdx.x) * kTile + warp % kAcross * kWarpWidth;
    warp_y = static_cast<int>(blockIdx.y) * kTile + warp / kAcross * kWarpHeight;
    x = warp_x + lane % kWarpWidth;
    y = warp_y + lane / kWarpWidth;
  }
};

// A batch of records in shared memory, as arrays of 16 bytes: the lanes that read one each meet no bank twice.
struct Batch {
  float4* shape;   // x, y, k, h
  float4* fall;    // a2, d2, log2_opacity, limit
  float4* light;   // r, g, b, depth
  float4* rest;    // a, c, tested, index

  __device__ __forceinline__ void stage(int at, const SplatRecord& record) const {
    const float4* words = reinterpret_cast<const float4*>(&record);
    shape[at] = words[0], fall[at] = words[1], light[at] = words[2], rest[at] = words[3];
  }
  // Fields that are not used cost nothing: they are never read.
  __device__ __forceinline__ SplatRecord at(int i) const {
    const float4 s = shape[i], f = fall[i], l = light[i], r = rest[i];
    return {s.x, s.y, s.z, s.w, f.x, f.y, f.z, f.w, l.x, l.y, l.z, l.w, r.x, r.y, __float_as_int(r.z),
            __float_as_int(r.w)};
  }
  // Whether the splat can reach alpha >= kAlphaMin at a pixel of the warp.
  __device__ __forceinline__ bool reaches(int i, const Place& place) const {
    const SplatRecord s = at(i);
    const float x0 = static_cast<float>(place.warp_x) + 0.5f - s.x, y0 = static_cast<float>(place.warp_y) + 0.5f - s.y;
    return smallest_exponent(s, x0, x0 + (kWarpWidth - 1), y0, y0 + (kWarpHeight - 1)) < s.limit;
  }
};

// Ownership of a pair that touches the pixel (cuda/rasterize.py).
template <Boundary boundary>
__device__ __forceinline__ bool owns(const RasterView& view, int partition, const SplatRecord& s, const Place& place) {
  if (boundary == Boundary::kNone || s.tested == 0) return true;
  const float px = static_cast<float>(place.x) + 0.5f, py = static_cast<float>(place.y) + 0.5f;
  const Point<float> point = point_on_ray(*view.camera, px, py, s.depth);
  if (lanes_in_leaf(view.tree, partition, point, 1u) != 0) return true;
  if (boundary == Boundary::kExact) return false;
  return !view.renders(locate(view.tree, point), place.x, place.y);
}

__device__ __forceinline__ int64_t job_of_block(const RasterView& view) {
  return (static_cast<int64_t>(blockIdx.z) * view.tiles_y + blockIdx.y) * view.tiles_x + blockIdx.x;
}

template <Boundary boundary>
__global__ void __launch_bounds__(kThreads)
    draw_kernel(RasterView view, Lists lists, Images images, int64_t* counters) {
  SPLAXEL_SHARED(float4, shape, kThreads);
  SPLAXEL_SHARED(float4, fall, kThreads);
  SPLAXEL_SHARED(float4, light, kThreads);
  SPLAXEL_SHARED(float4, rest, kThreads);
  const Batch batch = {shape, fall, light, rest};
  const Place place;
  const int thread = static_cast<int>(threadIdx.x), q = static_cast<int>(blockIdx.z);
  const int partition = view.order[q];
  const int64_t job = job_of_block(view);
  const int end = lists.tile_offsets[job + 1];
  BlendState<float> state = {0.0f, 0.0f, 0.0f, 0.0f, 1.0f};
  bool alive = view.draws(q, place.x, place.y);
  int last = 0, dropped = 0;
  for (int start = lists.tile_offsets[job]; start < end; start += kThreads) {
    // Also keeps the batch until the slowest warp has drawn it.
    if (__syncthreads_or(alive) == 0) break;
    const int count = end - start < kThreads ? end - start : kThreads;
    if (thread < count) batch.stage(thread, lists.records[lists.items[start + thread]]);
    __syncthreads();
    for (int group = 0; group < count && __any_sync(kFullWarp, alive); group += 32) {
      const int own = group + place.lane;
      uint32_t todo = __ballot_sync(kFullWarp, own < count && batch.reaches(own, place));
      for (; todo != 0; todo &= todo - 1) {
        const int i = group + __ffs(todo) - 1;
        const SplatRecord s = batch.at(i);
        const float dx = static_cast<float>(place.x) + 0.5f - s.x, dy = static_cast<float>(place.y) + 0.5f - s.y;
        const float raw = unclamped_alpha(s, dx, dy);
        if (!alive || !(raw >= static_cast<float>(kAlphaMin))) continue;
        if (!owns<boundary>(view, partition, s, place)) {
          ++dropped;
          continue;
        }
        blend_where(s, min(raw, static_cast<float>(kAlphaMax)), true, state);
        last = start + i + 1;
        alive = state.transmittance > view.stop;
      }
    }
  }
  if (boundary == Boundary::kFilter) {
    dropped = __reduce_add_sync(kFullWarp, dropped);
    if (place.lane == 0 && dropped != 0)
      atomicAdd(
          reinterpret_cast<unsigned long long*>(counters + kDropped), static_cast<unsigned long long>(dropped));
  }
  if (place.x >= view.width || place.y >= view.height) return;
  const int64_t at = (static_cast<int64_t>(q) * view.height + place.y) * view.width + place.x;
  images.colors[3 * at] = state.r;
  images.colors[3 * at + 1] = state.g;
  images.colors[3 * at + 2] = state.b;
  images.depths[at] = state.depth;
  images.transmittances[at] = state.transmittance;
  lists.ends[at] = make_int2(last, __float_as_int(state.transmittance));
}

// 1 / x to half an ulp or so, without the branches of a division that serves every x.
__device__ __forceinline__ float inverse(float x) {
#if defined(__CUDA_ARCH__)
  float estimate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(x));
  return fmaf(fmaf(-x, estimate, 1.0f), estimate, estimate);
#else
  return 1.0f / x;
#endif
}

template <Boundary boundary, bool absgrad>
__global__ void __launch_bounds__(kThreads)
    draw_backward_kernel(RasterView view, Lists lists, Images gradients, float* sums) {
  constexpr int kSums = absgrad ? kNumMoments : kAbsX;
  SPLAXEL_SHARED(float4, shape, kThreads);
  SPLAXEL_SHARED(float4, fall, kThreads);
  SPLAXEL_SHARED(float4, light, kThreads);
  SPLAXEL_SHARED(float4, rest, kThreads);
  SPLAXEL_SHARED(int, items, kThreads);
  SPLAXEL_SHARED(int, block_last, 1);
  const Batch batch = {shape, fall, light, rest};
  const Place place;
  const int thread = static_cast<int>(threadIdx.x), q = static_cast<int>(blockIdx.z);
  const int partition = view.order[q];
  const int64_t job = job_of_block(view);
  const int begin = lists.tile_offsets[job];
  if (begin == lists.tile_offsets[job + 1]) return;  // the whole block

  int last = 0;
  float transmittance = 1.0f;
  PixelGrad<float> pixel = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
  if (place.x < view.width && place.y < view.height) {
    const int64_t at = (static_cast<int64_t>(q) * view.height + place.y) * view.width + place.x;
    const int2 stopped = lists.ends[at];
    last = stopped.x;
    transmittance = __int_as_float(stopped.y);
    pixel = {gradients.colors[3 * at], gradients.colors[3 * at + 1], gradients.colors[3 * at + 2],
             gradients.depths != nullptr ? gradients.depths[at] : 0.0f, gradients.transmittances[at]};
  }
  const int warp_last = __reduce_max_sync(kFullWarp, last);
  if (thread == 0) *block_last = 0;
  __syncthreads();
  if (place.lane == 0) atomicMax(block_last, warp_last);
  __syncthreads();
  const int slot = fold_slot<kSums>(place.lane);
  for (int stop = *block_last; stop > begin; stop -= kThreads) {
    const int start = stop - kThreads > begin ? stop - kThreads : begin, count = stop - start;
    __syncthreads();  // the slowest warp has used the batch before
    if (thread < count) {
      const int item = lists.items[start + thread];
      items[thread] = item;
      batch.stage(thread, lists.records[item]);
    }
    __syncthreads();
    for (int group = (count - 1) / 32 * 32; group >= 0; group -= 32) {
      const int own = group + place.lane;
      uint32_t todo = __ballot_sync(
          kFullWarp, own < count && start + own < warp_last && batch.reaches(own, place));
      while (todo != 0) {
        const int bit = 31 - __clz(todo), i = group + bit;
        todo ^= 1u << bit;
        const SplatRecord s = batch.at(i);
        const float dx = static_cast<float>(place.x) + 0.5f - s.x, dy = static_cast<float>(place.y) + 0.5f - s.y;
        const float raw = unclamped_alpha(s, dx, dy);
        const bool blended = start + i < last && raw >= static_cast<float>(kAlphaMin) &&
                             owns<boundary>(view, partition, s, place);
        if (!__any_sync(kFullWarp, blended)) continue;
        const float alpha = keep(blended, min(raw, static_cast<float>(kAlphaMax)));
        transmittance *= inverse(1.0f - alpha);
        float moments[kNumMoments] = {};
        const float v = blend_backward<true>(s, alpha, alpha * transmittance, pixel, moments);
        add_moments(v, dx, dy, moments);
        if (absgrad) add_absolute(s, v, dx, dy, moments);
        fold_sums<kSums>(moments, place.lane);
        if (slot >= 0) atomicAdd(sums + static_cast<int64_t>(kGradRow) * items[i] + slot, moments[0]);
      }
    }
  }
}

// One thread per item; the first item of a Gaussian adds up the others, which stand behind it.
__global__ void __launch_bounds__(kThreads) finish_kernel(
    const SplatRecord* records, int64_t num_items, const float* sums, const float* conics, const float* opacities,
    SplatGradients out) {
  int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= num_items) return;
  const int64_t i = records[item].index;
  if (item > 0 && records[item - 1].index == i) return;
  float total[kNumMoments] = {};
  for (; item < num_items && records[item].index == i; ++item)
SPLAXEL_UNROLL
    for (int m = 0; m < kNumMoments; ++m) total[m] += sums[kGradRow * item + m];
  const SplatPixelsGrad grad = splat_gradient(total, conics + 3 * i, opacities[i]);
  out.means2d[2 * i] = grad.x;
  out.means2d[2 * i + 1] = grad.y;
  out.conics[3 * i] = grad.a;
  out.conics[3 * i + 1] = grad.b;
  out.conics[3 * i + 2] = grad.c;
  out.opacities[i] = grad.opacity;
  out.colors[3 * i] = total[kR];
  out.colors[3 * i + 1] = total[kG];
  out.colors[3 * i + 2] = total[kB];
  out.depths[i] = total[kDepth];
  if (out.absolute != nullptr) {
    out.absolute[2 * i] = total[kAbsX];
    out.absolute[2 * i + 1] = total[kAbsY];
  }
}

template <Boundary boundary>
void draw_backward_as(
    const RasterView& view, const Lists& lists, const Images& gradients, bool absgrad, float* sums,
    cudaStream_t stream) {
  const dim3 jobs(view.tiles_x, view.tiles_y, view.num_participants), threads(kThreads);
  if (absgrad)
    SPLAXEL_LAUNCH((draw_backward_kernel<boundary, true>), jobs, threads, stream, view, lists, gradients, sums);
  else
    SPLAXEL_LAUNCH((draw_backward_kernel<boundary, false>), jobs, threads, stream, view, lists, gradients, sums);
}

}  // namespace

void draw(
    const RasterView& view, Boundary boundary, const Lists& lists, const Images& images, int64_t* counters,
    cudaStream_t stream) {
  if (view.num_participants == 0) return;
  const dim3 jobs(view.tiles_x, view.tiles_y, view.num_participants), threads(kThreads);
  // One partition owns everything: then nothing is tested.
  if (boundary == Boundary::kNone || view.tree.num_partitions == 1)
    SPLAXEL_LAUNCH(draw_kernel<Boundary::kNone>, jobs, threads, stream, view, lists, images, counters);
  else if (boundary == Boundary::kExact)
    SPLAXEL_LAUNCH(draw_kernel<Boundary::kExact>, jobs, threads, stream, view, lists, images, counters);
  else
    SPLAXEL_LAUNCH(draw_kernel<Boundary::kFilter>, jobs, threads, stream, view, lists, images, counters);
}

void draw_backward(
    const RasterView& view, Boundary boundary, const Lists& lists, const Images& gradients, bool absgrad, float* sums,
    cudaStream_t stream) {
  if (view.num_participants == 0) return;
  if (boundary == Boundary::kNone || view.tree.num_partitions == 1)
    draw_backward_as<Boundary::kNone>(view, lists, gradients, absgrad, sums, stream);
  else if (boundary == Boundary::kExact)
    draw_backward_as<Boundary::kExact>(view, lists, gradients, absgrad, sums, stream);
  else
    draw_backward_as<Boundary::kFilter>(view, lists, gradients, absgrad, sums, stream);
}

void finish_gradients(
    const SplatRecord* records, int64_t num_items, const float* sums, const float* conics, const float* opacities,
    const SplatGradients& out, cudaStream_t stream) {
  const dim3 blocks(blocks_for(num_items, kThreads));
  SPLAXEL_LAUNCH(finish_kernel, blocks, dim3(kThreads), stream, records, num_items, sums, conics, opacities, out);
}

}  // namespace splaxel::gpu
