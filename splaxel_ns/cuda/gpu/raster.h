// Partial rasterisation on the GPU: what the kernels read and write, and the functions that launch them. No torch here.
//
// All pointers are the device's. Letters as in csrc/rasterize.h; an item is one visible splat as drawn by one
// participant, a job one (participant, tile), a pair one (item, tile). Nothing here waits for the device.
#pragma once

#include "item.h"
#include "launch.h"
#include "rasterize.h"

namespace splaxel::gpu {

constexpr int kThreads = kTile * kTile;  // of a job: one per pixel
// A warp draws 8 x 4 pixels: of the shapes of 32 pixels the one that the fewest splats reach.
constexpr int kWarpWidth = 8, kWarpHeight = 4;
// Below this a transmittance changes no sum in float32, and dividing it by 1 - alpha would not restore it.
constexpr float kLeastStop = 1e-30f;

struct RasterView {
  int width, height, tiles_x, tiles_y, num_participants;
  float stop;
  const RayCamera* camera;     // in the device's memory: a pose that lives there need not come to the host
  Tree tree;
  const int32_t* order;        // [Q]
  const int32_t* spans;        // [P, H, 2]
  const uint8_t* saturated;    // [Q, H, ceil(W / 8)], or null

  SPLAXEL_INLINE int64_t num_jobs() const { return static_cast<int64_t>(num_participants) * tiles_x * tiles_y; }
  SPLAXEL_INLINE bool renders(int partition, int x, int y) const {
    const int32_t* span = spans + 2 * (static_cast<int64_t>(partition) * height + y);
    return x >= span[0] && x < span[1];
  }
  // Whether participant q draws pixel (x, y): in the image, in its region, and not saturated.
  SPLAXEL_INLINE bool draws(int q, int x, int y) const {
    if (x >= width || y >= height || !renders(order[q], x, y)) return false;
    if (saturated == nullptr) return true;
    return (saturated[(static_cast<int64_t>(q) * height + y) * ((width + 7) / 8) + x / 8] >> (x % 8) & 1) == 0;
  }
};

// Counters of a view, on the device; the first seven are the op's statistics (there are no times on a GPU).
enum Counter { kSplats, kPairs, kDropped, kStraddling, kClipped, kNoTime, kNoTimeEither, kItems, kBadOwner, kNumCounters };
constexpr int kNumStatistics = kItems;

struct Bins {
  uint8_t* job_renders;    // [jobs]: the participant draws some pixel of the tile
  int32_t* item_counts;    // [N] items of each Gaussian
  int32_t* pair_counts;    // [N]
  const int64_t* item_ends;  // [N] running sums of the counts
  const int64_t* pair_ends;  // [N]
  int64_t* counters;       // [kNumCounters], zero before
  SplatRecord* records;    // [M]
  uint64_t* keys;          // [pairs] job << 32 | depth
  int32_t* items;          // [pairs]
};

// What the passes share with one another: the result of binning, and where every pixel stopped.
struct Lists {
  const SplatRecord* records;   // [M]
  const int32_t* items;         // [pairs], job by job and nearest first
  const int32_t* tile_offsets;  // [jobs + 1]
  int2* ends;                   // [Q, H, W]: behind the last pair that was blended, and the bits of the transmittance
};

struct Images {
  float* colors;          // [Q, H, W, 3]
  float* depths;          // [Q, H, W]; as gradients also null, for zero
  float* transmittances;  // [Q, H, W]
};

struct SplatGradients {
  float* means2d;    // [N, 2]
  float* depths;     // [N]
  float* conics;     // [N, 3]
  float* opacities;  // [N]
  float* colors;     // [N, 3]
  float* absolute;   // [N, 2], or null
};

void make_camera(const float* viewmat, const float* intrinsics, int width, int height, RayCamera* camera, cudaStream_t);
// Fills job_renders, the counts, and the counters of splats; kItems and kPairs are for the caller to sum up.
void count_items(
    const RasterView& view, Boundary boundary, const SplatArrays& in, int64_t num_gaussians, const Bins& bins,
    cudaStream_t);
// Fills records, keys and items; the counts must be summed up.
void list_items(
    const RasterView& view, Boundary boundary, const SplatArrays& in, int64_t num_gaussians, const Bins& bins,
    cudaStream_t);
// Counts the (splat, pixel) pairs whose partition does not render the pixel.
void count_clipped(
    const RasterView& view, Boundary boundary, const SplatArrays& in, int64_t num_gaussians, int64_t* counters,
    cudaStream_t);
// Puts pairs of equal keys, sorted, in the order of `before`.
void order_ties(const uint64_t* keys, int64_t num_pairs, const SplatRecord* records, int32_t* items, cudaStream_t);
// tile_offsets [jobs + 1] of sorted keys.
void find_tiles(const uint64_t* keys, int64_t num_pairs, int64_t num_jobs, int32_t* tile_offsets, cudaStream_t);

void draw(
    const RasterView& view, Boundary boundary, const Lists& lists, const Images& images, int64_t* counters,
    cudaStream_t);
// sums [M, kGradRow] must be zero before.
void draw_backward(
    const RasterView& view, Boundary boundary, const Lists& lists, const Images& gradients, bool absgrad, float* sums,
    cudaStream_t);
// The sums of each Gaussian's items to its gradients; those without items are not touched.
void finish_gradients(
    const SplatRecord* records, int64_t num_items, const float* sums, const float* conics, const float* opacities,
    const SplatGradients& out, cudaStream_t);

// Sorts by the lowest `bits` of the keys; equal keys keep their order. temp null: says how many bytes it must have.
void sort_pairs(
    void* temp, size_t& temp_bytes, const uint64_t* keys_in, uint64_t* keys_out, const int32_t* items_in,
    int32_t* items_out, int64_t count, int bits, cudaStream_t);

}  // namespace splaxel::gpu
