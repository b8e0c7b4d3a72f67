// The two tile loops, over a vector type V of 16 pixels. Included once by each file that defines a V; everything is in
// an unnamed namespace, because the files are compiled for different processors.
//
// V offers what blend.h asks for, and: V::Mask, V::load, V::store, V::mask(uint32_t), mask & mask, any(mask),
// V::bitmap(masks, block) -> which of 64 pairs touch a block, V::reduce(sums, row) -> the sums over the lanes.
#pragma once

#include <algorithm>
#include <cstring>

#include "blend.h"
#include "ownership.h"
#include "rasterize.h"

namespace splaxel {
namespace {

constexpr int kChunk = 256;  // pairs whose records fit the first-level cache together with the pixels of a tile
constexpr int kAhead = 32;   // pairs between the prefetch of a record and its use: each is a miss in the caches

// Positions of a tile's pixels and blocks, pixels.
template <class V>
struct TileGrid {
  float x0, y0;             // centre of the first pixel
  V px[kTile / kBlock];     // centres of a block column's lanes
  V py[kTile / kBlock];     // centres of a block row's lanes
  V block_x, block_y;       // centres of the first pixel of each of the 16 blocks

  TileGrid(const RasterArgs& args, int tile) {
    x0 = static_cast<float>(tile % args.tiles_x * kTile) + 0.5f;
    y0 = static_cast<float>(tile / args.tiles_x * kTile) + 0.5f;
    alignas(64) float x[kLanes], y[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      x[i] = static_cast<float>(i % kBlock);
      y[i] = static_cast<float>(i / kBlock);
    }
    const V lane_x = V::load(x), lane_y = V::load(y);
    for (int b = 0; b < kTile / kBlock; ++b) {
      px[b] = lane_x + V(x0 + static_cast<float>(kBlock * b));
      py[b] = lane_y + V(y0 + static_cast<float>(kBlock * b));
    }
    block_x = V(4.0f) * lane_x + V(x0);
    block_y = V(4.0f) * lane_y + V(y0);
  }
};

// Blocks in which some pixel centre may have alpha >= kAlphaMin: the exact ellipse against the exact squares.
template <class V>
SPLAXEL_INLINE uint32_t blocks_touched(const SplatRecord& s, const TileGrid<V>& grid) {
  const V x0 = grid.block_x - V(s.x), y0 = grid.block_y - V(s.y);
  const V side(static_cast<float>(kBlock - 1));
  return bits(lt(smallest_exponent(s, x0, x0 + side, y0, y0 + side), V(s.limit)));
}

// Of the lanes given, those whose pair the participant draws (see "Ownership" in cuda/rasterize.py).
template <class V>
__attribute__((noinline)) uint32_t lanes_owned(
    const RasterArgs& args, int partition, int tile, int block, const SplatRecord& s, V px, V py, uint32_t lanes,
    int64_t* dropped) {
  const Point<V> point = point_on_ray(args.camera, px, py, s.depth);
  const uint32_t own = lanes_in_leaf(args.tree, partition, point, lanes);
  if (args.boundary == Boundary::kExact || own == lanes) return own;
  const int64_t tiles = static_cast<int64_t>(args.tiles_x) * args.tiles_y;
  const uint32_t lost = lanes_rendered_elsewhere(args.tree, point, lanes & ~own, [&](int leaf) -> uint32_t {
    return args.region[leaf * tiles + tile].block[block];
  });
  *dropped += __builtin_popcount(lost);
  return lanes & ~lost;
}

// alpha of the pair, zero where it touches nothing or is not the participant's. Lanes that are not alive may hold
// anything: what the pair before decides must not be waited for here, or the latencies of a block's pairs add up.
// kTested: the pair may need the ownership test; without the call the loop keeps its vectors in registers.
template <class V, bool kTested>
SPLAXEL_INLINE V pair_alpha(
    const RasterArgs& args, int partition, int tile, int block, const SplatRecord& s, V px, V py,
    typename V::Mask alive, int64_t* dropped) {
  const V raw = unclamped_alpha(s, px - V(s.x), py - V(s.y));
  typename V::Mask touched = ge(raw, V(static_cast<float>(kAlphaMin)));
  if (kTested && s.tested) {
    uint32_t lanes = bits(touched) & bits(alive);
    if (lanes != 0) lanes = lanes_owned(args, partition, tile, block, s, px, py, lanes, dropped);
    touched = V::mask(lanes);
  }
  return keep(touched, min(raw, V(static_cast<float>(kAlphaMax))));
}

// Calls visit(lane's offset in an [H, W] image, lane) for the lanes of a block inside the image.
template <class Visit>
SPLAXEL_INLINE void for_pixels(const RasterArgs& args, int tile, int block, Visit visit) {
  const int x0 = tile % args.tiles_x * kTile + block % (kTile / kBlock) * kBlock;
  const int y0 = tile / args.tiles_x * kTile + block / (kTile / kBlock) * kBlock;
  const int columns = std::min(kBlock, args.width - x0), rows = std::min(kBlock, args.height - y0);
  for (int y = 0; y < rows; ++y)
    for (int x = 0; x < columns; ++x)
      visit(static_cast<int64_t>(y0 + y) * args.width + x0 + x, y * kBlock + x);
}

template <class V>
struct ForwardTile {
  alignas(64) SplatRecord records[kChunk];
  alignas(64) uint16_t masks[kChunk];
  BlendState<V> state[kBlocks];
  uint16_t alive[kBlocks];  // lanes that have not stopped
  int64_t job;
  int32_t done;  // pairs of the job before this chunk
};

// No pair of the chunk after `last` touches the block any more.
SPLAXEL_INLINE void clear_block(uint16_t* masks, int last, int count, int block) {
  const auto others = static_cast<uint16_t>(~(1u << block));
  for (int i = last + 1; i < count; ++i) masks[i] = static_cast<uint16_t>(masks[i] & others);
}

template <class V, bool kTested>
void forward_block(
    const RasterArgs& args, int partition, int tile, int block, int count, const TileGrid<V>& grid,
    ForwardTile<V>& t, int64_t* dropped) {
  const V px = grid.px[block % (kTile / kBlock)], py = grid.py[block / (kTile / kBlock)];
  const V stop(args.stop);
  BlendState<V> state = t.state[block];
  typename V::Mask alive = V::mask(t.alive[block]);
  static_assert(kReplay == 64, "a checkpoint before every bitmap");
  for (int first = 0; first < count; first += 64) {
    if (t.done + first > 0)
      state.transmittance.store(args.checkpoint(t.job, (t.done + first) / kReplay) + kLanes * block);
    uint64_t pairs = V::bitmap(t.masks + first, block);
    for (; pairs != 0; pairs &= pairs - 1) {
      const int at = first + __builtin_ctzll(pairs);
      const SplatRecord& s = t.records[at];
      blend_where(s, pair_alpha<V, kTested>(args, partition, tile, block, s, px, py, alive, dropped), alive, state);
      alive = gt_where(alive, state.transmittance, stop);
      if (!any(alive)) {
        clear_block(t.masks, at, count, block);
        first = count;
        break;
      }
    }
  }
  t.state[block] = state;
  t.alive[block] = static_cast<uint16_t>(bits(alive));
}

template <class V>
void write_tile(const RasterArgs& args, int participant, int tile, const BlendState<V>* state) {
  const int64_t image = static_cast<int64_t>(participant) * args.width * args.height;
  for (int b = 0; b < kBlocks; ++b) {
    alignas(64) float r[kLanes], g[kLanes], blue[kLanes], depth[kLanes], transmittance[kLanes];
    state[b].r.store(r), state[b].g.store(g), state[b].b.store(blue);
    state[b].depth.store(depth), state[b].transmittance.store(transmittance);
    for_pixels(args, tile, b, [&](int64_t pixel, int lane) {
      const int64_t at = image + pixel;
      args.colors[3 * at] = r[lane];
      args.colors[3 * at + 1] = g[lane];
      args.colors[3 * at + 2] = blue[lane];
      args.depths[at] = depth[lane];
      args.transmittances[at] = transmittance[lane];
    });
  }
}

template <class V>
void forward_tile(const RasterArgs& args, int participant, int tile, RasterScratch& scratch) {
  const int tiles = args.tiles_x * args.tiles_y;
  const int partition = args.order[participant];
  const int64_t job = static_cast<int64_t>(participant) * tiles + tile;
  const TileRegion& region = args.drawn_by(participant, tile);
  const TileGrid<V> grid(args, tile);
  ForwardTile<V> t;
  t.job = job;
  t.done = 0;
  uint32_t live_blocks = 0;
  for (int b = 0; b < kBlocks; ++b) {
    t.state[b] = {V(0.0f), V(0.0f), V(0.0f), V(0.0f), V(1.0f)};
    t.alive[b] = region.block[b];
    if (region.block[b] != 0) live_blocks |= 1u << b;
  }
  const int32_t end = args.tile_offsets[job + 1], all = args.tile_offsets[args.num_jobs()];
  int32_t begin = args.tile_offsets[job];
  for (; begin < end && live_blocks != 0; begin += kChunk, t.done += kChunk) {
    const int count = std::min<int32_t>(kChunk, end - begin);
    uint32_t any_mask = 0;
    int32_t tested = 0;
    for (int i = 0; i < count; ++i) {
      const SplatRecord& s = args.records[args.pairs[begin + i].record];
      if (begin + i + kAhead < all) __builtin_prefetch(&args.records[args.pairs[begin + i + kAhead].record]);
      const uint32_t mask = blocks_touched(s, grid) & live_blocks;
      t.masks[i] = static_cast<uint16_t>(mask);
      if (mask != 0) t.records[i] = s;
      any_mask |= mask;
      tested |= s.tested;
    }
    for (int i = count; i % 64 != 0; ++i) t.masks[i] = 0;
    for (; any_mask != 0; any_mask &= any_mask - 1) {
      const int b = __builtin_ctz(any_mask);
      if (tested != 0)
        forward_block<V, true>(args, partition, tile, b, count, grid, t, &scratch.dropped);
      else
        forward_block<V, false>(args, partition, tile, b, count, grid, t, &scratch.dropped);
      if (t.alive[b] == 0) live_blocks &= ~(1u << b);
    }
    std::copy(t.masks, t.masks + count, args.pair_masks + begin);
  }
  if (begin < end) std::fill(args.pair_masks + begin, args.pair_masks + end, static_cast<uint16_t>(0));
  write_tile(args, participant, tile, t.state);
}

template <class V>
void read_pixel_grads(const RasterArgs& args, int participant, int tile, PixelGrad<V>* grads) {
  const int64_t image = static_cast<int64_t>(participant) * args.width * args.height;
  for (int b = 0; b < kBlocks; ++b) {
    alignas(64) float r[kLanes] = {}, g[kLanes] = {}, blue[kLanes] = {}, depth[kLanes] = {}, behind[kLanes] = {};
    for_pixels(args, tile, b, [&](int64_t pixel, int lane) {
      const int64_t at = image + pixel;
      r[lane] = args.colors[3 * at];
      g[lane] = args.colors[3 * at + 1];
      blue[lane] = args.colors[3 * at + 2];
      if (args.depths != nullptr) depth[lane] = args.depths[at];
      behind[lane] = args.transmittances[at];
    });
    grads[b] = {V::load(r), V::load(g), V::load(blue), V::load(depth), V::load(behind)};
  }
}

// kReplay pairs of a tile: what the backward pass needs of them.
template <class V>
struct Replay {
  alignas(64) SplatRecord records[kReplay];
  alignas(64) uint16_t masks[kReplay];
  uint32_t starts[kReplay];  // which of the kept (pair, block)s is a pair's first one
  alignas(64) float kept[kReplay * kBlocks][2 * kLanes];  // alpha and weight of each (pair, block), pair by pair
};

template <class V, bool kTested>
void replay_block(
    const RasterArgs& args, int partition, int tile, int block, uint32_t lanes, V transmittance,
    const TileGrid<V>& grid, Replay<V>& t) {
  const V px = grid.px[block % (kTile / kBlock)], py = grid.py[block / (kTile / kBlock)];
  const V stop(args.stop);
  const uint32_t before = (1u << block) - 1;
  typename V::Mask alive = gt_where(V::mask(lanes), transmittance, stop);
  int64_t ignored = 0;
  for (uint64_t pairs = V::bitmap(t.masks, block); pairs != 0; pairs &= pairs - 1) {
    const int i = __builtin_ctzll(pairs);
    const V drawn = pair_alpha<V, kTested>(args, partition, tile, block, t.records[i], px, py, alive, &ignored);
    const V alpha = keep(alive, drawn);
    float* kept = t.kept[t.starts[i] + static_cast<uint32_t>(__builtin_popcount(t.masks[i] & before))];
    alpha.store(kept);
    (alpha * transmittance).store(kept + kLanes);
    transmittance = fnma(alpha, transmittance, transmittance);
    alive = gt_where(alive, transmittance, stop);
  }
}

// Repeats pairs [begin, begin + count) of the forward pass of a job, its k-th kReplay, with the same arithmetic.
// Returns how many (pair, block)s are kept.
template <class V>
uint32_t replay(
    const RasterArgs& args, int participant, int tile, int32_t begin, int count, int32_t k, const TileGrid<V>& grid,
    Replay<V>& t) {
  const int partition = args.order[participant];
  const int64_t job = static_cast<int64_t>(participant) * args.tiles_x * args.tiles_y + tile;
  const TileRegion& region = args.drawn_by(participant, tile);
  uint32_t any_mask = 0, kept = 0;
  int32_t tested = 0;
  // Whole vectors, as they are read below: the processor does not put together what was written piece by piece.
  if (count == kReplay) {
    std::memcpy(t.masks, args.pair_masks + begin, sizeof t.masks);
  } else {
    std::memset(t.masks, 0, sizeof t.masks);
    std::copy(args.pair_masks + begin, args.pair_masks + begin + count, t.masks);
  }
  for (int i = 0; i < count; ++i) {
    __builtin_prefetch(args.pair_grads + static_cast<int64_t>(kGradRow) * args.pairs[begin + i].row, 1);
    const uint32_t mask = t.masks[i];
    t.starts[i] = kept;
    kept += static_cast<uint32_t>(__builtin_popcount(mask));
    any_mask |= mask;
    if (mask == 0) continue;
    t.records[i] = args.records[args.pairs[begin + i].record];
    tested |= t.records[i].tested;
  }
  for (; any_mask != 0; any_mask &= any_mask - 1) {
    const int b = __builtin_ctz(any_mask);
    const V transmittance = k > 0 ? V::load(args.checkpoint(job, k) + kLanes * b) : V(1.0f);
    if (tested != 0)
      replay_block<V, true>(args, partition, tile, b, region.block[b], transmittance, grid, t);
    else
      replay_block<V, false>(args, partition, tile, b, region.block[b], transmittance, grid, t);
  }
  return kept;
}

template <class V, bool kAbsolute, bool kWithDepth>
void backward_tile_as(const RasterArgs& args, int participant, int tile) {
  const int64_t job = static_cast<int64_t>(participant) * args.tiles_x * args.tiles_y + tile;
  const int32_t first = args.tile_offsets[job], end = args.tile_offsets[job + 1];
  if (first == end) return;
  const int32_t next_end = job + 1 < args.num_jobs() ? args.tile_offsets[job + 2] : end;
  const TileGrid<V> grid(args, tile);
  Replay<V> t;
  PixelGrad<V> pixels[kBlocks];
  read_pixel_grads(args, participant, tile, pixels);
  for (int32_t k = (end - first - 1) / kReplay; k >= 0; --k) {
    const int32_t begin = first + k * kReplay;
    const int count = std::min(kReplay, end - begin);
    uint32_t kept = replay(args, participant, tile, begin, count, k, grid, t);
    // What is replayed next, here or by the next job.
    const Pair* next = args.pairs + (k > 0 ? begin - kReplay : next_end - kReplay);
    for (int i = count - 1; i >= 0; --i) {
      if (next + i >= args.pairs) __builtin_prefetch(&args.records[next[i].record]);
      float* row = args.pair_grads + static_cast<int64_t>(kGradRow) * args.pairs[begin + i].row;
      uint32_t rest = t.masks[i];
      if (rest == 0) {
        std::fill(row, row + kGradRow, 0.0f);
        continue;
      }
      const SplatRecord& s = t.records[i];
      V sums[kNumMoments];
      for (V& sum : sums) sum = V(0.0f);
      while (rest != 0) {
        const int b = 31 - __builtin_clz(rest);
        rest ^= 1u << b;
        const float* saved = t.kept[--kept];
        const V dx = grid.px[b % (kTile / kBlock)] - V(s.x), dy = grid.py[b / (kTile / kBlock)] - V(s.y);
        const V v = blend_backward<kWithDepth>(s, V::load(saved), V::load(saved + kLanes), pixels[b], sums);
        add_moments(v, dx, dy, sums);
        if (kAbsolute) add_absolute(s, v, dx, dy, sums);
      }
      V::reduce(sums, row);
    }
  }
}

template <class V>
void backward_tile(const RasterArgs& args, int participant, int tile, RasterScratch&) {
  if (args.absgrad)
    args.depths != nullptr ? backward_tile_as<V, true, true>(args, participant, tile)
                           : backward_tile_as<V, true, false>(args, participant, tile);
  else
    args.depths != nullptr ? backward_tile_as<V, false, true>(args, participant, tile)
                           : backward_tile_as<V, false, false>(args, participant, tile);
}

static_assert(static_cast<int>(kNumMoments) <= kGradRow, "one float per moment");

}  // namespace
}  // namespace splaxel
