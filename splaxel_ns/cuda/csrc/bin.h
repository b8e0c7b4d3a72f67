// From projected Gaussians to what each (participant, tile) draws, in order of depth.
//
// An item is one visible splat as drawn by one participant. Only under the boundary `exact` does a splat that straddles
// make several. Letters: N Gaussians, M items, P partitions, Q participants; a job is one (participant, tile).
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "blend.h"
#include "buffer.h"
#include "item.h"
#include "ownership.h"
#include "rasterize.h"

namespace splaxel {

struct BinInput {
  int64_t num_gaussians;
  const float* means2d;     // [N, 2] pixels
  const float* depths;      // [N]
  const float* conics;      // [N, 3]
  const float* opacities;   // [N]
  const float* colors;      // [N, 3]
  const float* extents;     // [N, 2] pixels
  const int32_t* owner;     // [N]
  const float* means;       // [N, 3] world
  const float* reach;       // [N, 3] world, or null: computed here
  std::vector<int32_t> participant_of;  // [P], -1 where a partition renders nothing
  int threads;

  SplatArrays splats() const { return {means2d, depths, conics, opacities, colors, extents, owner, means, reach}; }
};

// 16 bytes: binning visits items in order of depth, each a miss in the caches.
struct Item {
  TileRect rect;
  int32_t participant;
  int32_t pairs;  // how many; once they are counted, where the item's pairs start
};

struct Items {
  int64_t count = 0;                   // M
  int64_t splats = 0, straddling = 0;  // visible ones that some participant draws; of them, those that straddle
  bool owner_out_of_range = false;
  Block<Item> list;        // [M]
};

struct Pairs {
  int64_t count = 0;
  Block<int32_t> tile_counts;  // [chunks, jobs], then where each chunk's pairs of each job start
  Block<uint8_t> job_renders;  // [jobs]: the participant draws pixels of the tile
  int chunks = 1;
};

// The pixels that each partition renders, by tile. spans [P, H, 2].
Block<TileRegion> tile_regions(const int32_t* spans, int num_partitions, const RasterArgs& args, int threads);

// Of those, what the participants draw: all but the pixels set in saturated [Q, H, bytes of a row], bit x % 8 of byte
// x / 8. args.region and args.order are filled in.
Block<TileRegion> unsaturated_regions(const uint8_t* saturated, const RasterArgs& args);

// Lists the items in order of their Gaussians. allocate(M) says where their records go.
Items list_items(
    const BinInput& in, const RasterArgs& args, const std::function<SplatRecord*(int64_t)>& allocate);

// Items in order of depth; equal depths as `before` says.
Block<uint32_t> sort_by_depth(const SplatRecord* records, int64_t count, int threads);

// Counts pairs: tile_offsets [jobs + 1] and item_offsets [M + 1] are written.
Pairs count_pairs(
    const BinInput& in, const RasterArgs& args, Items& items, const uint32_t* order, int32_t* tile_offsets,
    int32_t* item_offsets);

// Lists pairs, job by job and nearest first.
void list_pairs(
    const RasterArgs& args, const Items& items, const uint32_t* order, Pairs& pairs, Pair* list);

// (splat, pixel) pairs inside the image that the design wants drawn, but whose partition does not render the pixel.
int64_t count_clipped(const BinInput& in, const RasterArgs& args);

}  // namespace splaxel
