// From projected Gaussians to what each (participant, tile) draws: items, and one sortable key for each of their tiles.
//
// A thread takes one Gaussian, twice: once to count, and once, when running sums say where, to write. After sorting by
// (job, depth), equal keys are put in the order of the CPU.

#include "raster.h"

namespace splaxel::gpu {
namespace {

constexpr int kBinThreads = 256;

__global__ void camera_kernel(
    const float* viewmat, const float* intrinsics, int width, int height, RayCamera* camera) {
  if (threadIdx.x == 0) *camera = ray_camera(viewmat, intrinsics, width, height);
}

// A tile that is all masked or outside the region gets no pairs at all.
__global__ void __launch_bounds__(kThreads) renders_kernel(RasterView view, uint8_t* job_renders) {
  const int tile_x = static_cast<int>(blockIdx.x), tile_y = static_cast<int>(blockIdx.y);
  const int q = static_cast<int>(blockIdx.z), thread = static_cast<int>(threadIdx.x);
  const bool drawn = view.draws(q, tile_x * kTile + thread % kTile, tile_y * kTile + thread / kTile);
  const bool any = __syncthreads_or(drawn) != 0;
  if (thread == 0) job_renders[(static_cast<int64_t>(q) * view.tiles_y + tile_y) * view.tiles_x + tile_x] = any;
}

// Calls visit(job) for the tiles of a rectangle in which participant q draws something.
template <class Visit>
__device__ __forceinline__ void for_jobs(
    const RasterView& view, const uint8_t* job_renders, int q, const TileRect& rect, Visit visit) {
  for (int y = rect.y0; y < rect.y1; ++y) {
    const int64_t row = (static_cast<int64_t>(q) * view.tiles_y + y) * view.tiles_x;
    for (int x = rect.x0; x < rect.x1; ++x)
      if (job_renders[row + x] != 0) visit(row + x);
  }
}

// Calls emit(q, tested) for the participants that may draw Gaussian i. Returns whether it straddles. Participants are
// few, so all are tried: a walk down the tree would need a stack in local memory.
template <class Emit>
__device__ __forceinline__ bool for_candidates(
    const RasterView& view, Boundary boundary, const SplatArrays& in, int64_t i, Emit emit) {
  WorldBox box;
  const bool crosses = view.tree.num_partitions > 1 && straddles(in, *view.camera, view.tree, i, &box);
  for (int q = 0; q < view.num_participants; ++q) {
    if (crosses && boundary == Boundary::kExact) {
      if (touches_leaf(view.tree, view.order[q], box)) emit(q, true);
    } else if (view.order[q] == in.owner[i]) {
      emit(q, crosses && boundary == Boundary::kFilter);
    }
  }
  return crosses;
}

__device__ __forceinline__ void add_to(int64_t* counter, int value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(value));
}

__global__ void __launch_bounds__(kBinThreads)
    count_kernel(RasterView view, Boundary boundary, SplatArrays in, int64_t num_gaussians, Bins bins) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kBinThreads + threadIdx.x;
  const bool exists = i < num_gaussians;
  const bool owned = exists && in.owner[i] >= 0 && in.owner[i] < view.tree.num_partitions;
  TileRect rect;
  int items = 0, pairs = 0;
  bool crosses = false;
  if (owned && visible(in, i) && tile_rect(in, view.width, view.height, kTile, i, &rect))
    crosses = for_candidates(view, boundary, in, i, [&](int q, bool) {
      ++items;
      for_jobs(view, bins.job_renders, q, rect, [&](int64_t) { ++pairs; });
    });
  if (exists) bins.item_counts[i] = items, bins.pair_counts[i] = pairs;
  // One atomic per warp and counter.
  const uint32_t drawn = __ballot_sync(kFullWarp, items > 0);
  const uint32_t crossing = __ballot_sync(kFullWarp, items > 0 && crosses);
  const uint32_t lost = __ballot_sync(kFullWarp, exists && !owned);
  if (threadIdx.x % 32 == 0) {
    if (drawn != 0) add_to(bins.counters + kSplats, __popc(drawn));
    if (crossing != 0) add_to(bins.counters + kStraddling, __popc(crossing));
    if (lost != 0) add_to(bins.counters + kBadOwner, __popc(lost));
  }
}

__global__ void __launch_bounds__(kBinThreads)
    list_kernel(RasterView view, Boundary boundary, SplatArrays in, int64_t num_gaussians, Bins bins) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kBinThreads + threadIdx.x;
  if (i >= num_gaussians || bins.item_counts[i] == 0) return;
  TileRect rect;
  tile_rect(in, view.width, view.height, kTile, i, &rect);
  int64_t item = bins.item_ends[i] - bins.item_counts[i], pair = bins.pair_ends[i] - bins.pair_counts[i];
  const uint64_t depth = float_key(in.depths[i]);
  for_candidates(view, boundary, in, i, [&](int q, bool tested) {
    bins.records[item] = pack_record(in, i, tested);
    for_jobs(view, bins.job_renders, q, rect, [&](int64_t job) {
      bins.keys[pair] = static_cast<uint64_t>(job) << 32 | depth;
      bins.items[pair] = static_cast<int32_t>(item);
      ++pair;
    });
    ++item;
  });
}

__global__ void __launch_bounds__(kBinThreads)
    clipped_kernel(RasterView view, Boundary boundary, SplatArrays in, int64_t num_gaussians, int64_t* counters) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kBinThreads + threadIdx.x;
  int x0, x1, y0, y1;
  if (i >= num_gaussians || !visible(in, i) || !covered(in.means2d[2 * i], in.extents[2 * i], view.width, &x0, &x1) ||
      !covered(in.means2d[2 * i + 1], in.extents[2 * i + 1], view.height, &y0, &y1))
    return;
  WorldBox box;
  const bool moves = boundary == Boundary::kExact && straddles(in, *view.camera, view.tree, i, &box);
  const SplatRecord s = pack_record(in, i, moves);
  int clipped = 0;
  for (int y = y0; y <= y1; ++y)
    for (int x = x0; x <= x1; ++x) {
      const float px = static_cast<float>(x) + 0.5f, py = static_cast<float>(y) + 0.5f;
      if (unclamped_alpha(s, px - s.x, py - s.y) < static_cast<float>(kAlphaMin)) continue;
      const int leaf =
          moves ? locate(view.tree, point_on_ray(*view.camera, px, py, s.depth)) : in.owner[i];
      clipped += !view.renders(leaf, x, y);
    }
  if (clipped != 0) add_to(counters + kClipped, clipped);
}

// Thread p orders the pairs of equal keys that begin at p: few and rare, but a wall that faces the camera may be one.
__global__ void __launch_bounds__(kBinThreads)
    ties_kernel(const uint64_t* keys, int64_t num_pairs, const SplatRecord* records, int32_t* items) {
  const int64_t p = static_cast<int64_t>(blockIdx.x) * kBinThreads + threadIdx.x;
  if (p + 1 >= num_pairs || keys[p] != keys[p + 1] || (p > 0 && keys[p - 1] == keys[p])) return;
  int64_t end = p + 2;
  while (end < num_pairs && keys[end] == keys[p]) ++end;
  int64_t gap = 1;
  while (gap < (end - p) / 3) gap = 3 * gap + 1;
  for (; gap > 0; gap /= 3)  // Shell sort
    for (int64_t i = p + gap; i < end; ++i) {
      const int32_t item = items[i];
      int64_t to = i;
      for (; to >= p + gap && before(records[item], records[items[to - gap]]); to -= gap) items[to] = items[to - gap];
      items[to] = item;
    }
}

// Thread p writes the offsets of the jobs after its predecessor's and up to its own; one more thread those behind.
__global__ void __launch_bounds__(kBinThreads)
    tiles_kernel(const uint64_t* keys, int64_t num_pairs, int64_t num_jobs, int32_t* tile_offsets) {
  const int64_t p = static_cast<int64_t>(blockIdx.x) * kBinThreads + threadIdx.x;
  if (p > num_pairs) return;
  const int64_t before = p > 0 ? static_cast<int64_t>(keys[p - 1] >> 32) : -1;
  const int64_t job = p < num_pairs ? static_cast<int64_t>(keys[p] >> 32) : num_jobs;
  for (int64_t at = before + 1; at <= job; ++at) tile_offsets[at] = static_cast<int32_t>(p);
}

}  // namespace

void make_camera(
    const float* viewmat, const float* intrinsics, int width, int height, RayCamera* camera, cudaStream_t stream) {
  SPLAXEL_LAUNCH(camera_kernel, dim3(1), dim3(32), stream, viewmat, intrinsics, width, height, camera);
}

void count_items(
    const RasterView& view, Boundary boundary, const SplatArrays& in, int64_t num_gaussians, const Bins& bins,
    cudaStream_t stream) {
  if (view.num_participants > 0) {
    const dim3 jobs(view.tiles_x, view.tiles_y, view.num_participants);
    SPLAXEL_LAUNCH(renders_kernel, jobs, dim3(kThreads), stream, view, bins.job_renders);
  }
  const dim3 blocks(blocks_for(num_gaussians, kBinThreads));
  SPLAXEL_LAUNCH(count_kernel, blocks, dim3(kBinThreads), stream, view, boundary, in, num_gaussians, bins);
}

void list_items(
    const RasterView& view, Boundary boundary, const SplatArrays& in, int64_t num_gaussians, const Bins& bins,
    cudaStream_t stream) {
  const dim3 blocks(blocks_for(num_gaussians, kBinThreads));
  SPLAXEL_LAUNCH(list_kernel, blocks, dim3(kBinThreads), stream, view, boundary, in, num_gaussians, bins);
}

void count_clipped(
    const RasterView& view, Boundary boundary, const SplatArrays& in, int64_t num_gaussians, int64_t* counters,
    cudaStream_t stream) {
  const dim3 blocks(blocks_for(num_gaussians, kBinThreads));
  SPLAXEL_LAUNCH(clipped_kernel, blocks, dim3(kBinThreads), stream, view, boundary, in, num_gaussians, counters);
}

void order_ties(
    const uint64_t* keys, int64_t num_pairs, const SplatRecord* records, int32_t* items, cudaStream_t stream) {
  const dim3 blocks(blocks_for(num_pairs, kBinThreads));
  SPLAXEL_LAUNCH(ties_kernel, blocks, dim3(kBinThreads), stream, keys, num_pairs, records, items);
}

void find_tiles(
    const uint64_t* keys, int64_t num_pairs, int64_t num_jobs, int32_t* tile_offsets, cudaStream_t stream) {
  const dim3 blocks(blocks_for(num_pairs + 1, kBinThreads));
  SPLAXEL_LAUNCH(tiles_kernel, blocks, dim3(kBinThreads), stream, keys, num_pairs, num_jobs, tile_offsets);
}

}  // namespace splaxel::gpu
