// The tile loops of the rasteriser: what they read and write, and the instruction sets they are compiled for.
//
// A job is one (participant, tile). Jobs write disjoint memory and depend on nothing but their arguments, so the
// result does not depend on the number of threads. Letters: M visible splats, P partitions, Q participants.
#pragma once

#include <cstdint>

#include "ownership.h"

namespace splaxel {

constexpr int kTile = 16;                                   // pixels, both ways
constexpr int kBlock = 4;                                   // pixels, both ways: the 16 lanes of a vector
constexpr int kBlocks = (kTile / kBlock) * (kTile / kBlock);  // blocks of a tile, row by row
constexpr int kLanes = kBlock * kBlock;                     // pixels of a block, row by row
constexpr int kGradRow = 16;                                // floats per pair that the backward pass leaves: a cache line

constexpr int kReplay = 64;                                 // pairs that the backward pass holds at once, in the first cache

enum class Boundary : int { kFilter = 0, kExact = 1, kNone = 2 };

struct SplatRecord;

// One splat in one tile.
struct Pair {
  int32_t record;  // index into records
  int32_t row;     // of pair_grads: those of an item stand together
};

// The pixels a partition renders in one tile: bit l of word b is lane l of block b.
struct TileRegion {
  uint16_t block[kBlocks];
};

struct RasterArgs {
  int width, height, tiles_x, tiles_y, num_participants;
  Boundary boundary;
  float stop;
  RayCamera camera;
  Tree tree;
  const int32_t* order;          // [Q] partitions
  const TileRegion* region;      // [P, tiles]: which pixels a partition renders, as far as the boxes say
  const TileRegion* drawn;       // [Q, tiles]: what a participant draws of it; null: all
  const SplatRecord* records;    // [M]
  const int32_t* tile_offsets;   // [Q * tiles + 1] into the pairs
  const Pair* pairs;             // [pairs], nearest first within a job
  uint16_t* pair_masks;          // [pairs] blocks of the tile that the pair may touch and that still have lanes; the forward pass writes it
  // Transmittances of a tile's pixels, block by block, before every kReplay-th pair but the first; the forward pass
  // writes those of the blocks that are touched later on. [checkpoints_of(pairs), kBlocks, kLanes]
  float* checkpoints;
  // Forward: written. Backward: the gradients, read.
  float* colors;                 // [Q, H, W, 3]
  float* depths;                 // [Q, H, W]; backward: null if depth has no gradient
  float* transmittances;         // [Q, H, W]
  float* pair_grads;             // [pairs, kGradRow], backward only
  bool absgrad;

  // Those before pair k * kReplay of a job, k > 0; jobs have room for one more than they need.
  SPLAXEL_INLINE float* checkpoint(int64_t job, int32_t k) const {
    return checkpoints + (static_cast<int64_t>(tile_offsets[job] / kReplay) + k - 1) * (kBlocks * kLanes);
  }
  SPLAXEL_INLINE int64_t num_jobs() const { return static_cast<int64_t>(num_participants) * tiles_x * tiles_y; }
  SPLAXEL_INLINE const TileRegion& drawn_by(int participant, int64_t tile) const {
    const int64_t tiles = static_cast<int64_t>(tiles_x) * tiles_y;
    return drawn != nullptr ? drawn[participant * tiles + tile] : region[order[participant] * tiles + tile];
  }
};

inline int64_t checkpoints_of(int64_t pairs) { return pairs / kReplay + 1; }

// What one thread of a pass counts; aligned so that threads share no cache line.
struct alignas(64) RasterScratch {
  int64_t dropped = 0;  // forward: (splat, pixel) pairs that the filter dropped
};

struct RasterKernels {
  void (*forward)(const RasterArgs& args, int participant, int tile, RasterScratch& scratch);
  void (*backward)(const RasterArgs& args, int participant, int tile, RasterScratch& scratch);
};

extern const RasterKernels kRasterAvx512;
extern const RasterKernels kRasterAvx2;
extern const RasterKernels kRasterPortable;

}  // namespace splaxel
