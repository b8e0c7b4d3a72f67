// The two tile loops, over a vector type V of 16 pixels. Included once by each file that defines a V; everything is in
// an unnamed namespace, because the files are compiled for different processors.
//
// V offers what blend.h asks for, and: V::Mask, V::load, V::store, V::mask(uint32_t), mask & mask, any(mask),
// V::bitmap(masks, block) -> which of 64 pairs touch a block, V::reduce(sums, row) -> the sums over the lanes.
#pragma once

#include <algorithm>

#include "blend.h"
#include "ownership.h"
#include "rasterize.h"

namespace splaxel {
namespace {

constexpr int kChunk = 256;  // pairs whose records fit the first-level cache together with the pixels of a tile

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

// alpha of the pair in the lanes that are alive, zero where it touches nothing or is not the participant's.
template <class V>
SPLAXEL_INLINE V pair_alpha(
    const RasterArgs& args, int partition, int tile, int block, const SplatRecord& s, V px, V py,
    typename V::Mask alive, int64_t* dropped) {
  const V raw = unclamped_alpha(s, px - V(s.x), py - V(s.y));
  typename V::Mask touched = ge_where(alive, raw, V(static_cast<float>(kAlphaMin)));
  if (__builtin_expect(s.tested, 0)) {
    const uint32_t lanes = bits(touched);
    if (lanes != 0) touched = V::mask(lanes_owned(args, partition, tile, block, s, px, py, lanes, dropped));
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
};

template <class V>
SPLAXEL_INLINE void forward_block(
    const RasterArgs& args, int partition, int tile, int block, int count, const TileGrid<V>& grid,
    ForwardTile<V>& t, int64_t* dropped) {
  const V px = grid.px[block % (kTile / kBlock)], py = grid.py[block / (kTile / kBlock)];
  const V stop(args.stop);
  BlendState<V> state = t.state[block];
  typename V::Mask alive = V::mask(t.alive[block]);
  for (int first = 0; first < count; first += 64) {
    uint64_t pairs = V::bitmap(t.masks + first, block);
    for (; pairs != 0; pairs &= pairs - 1) {
      const SplatRecord& s = t.records[first + __builtin_ctzll(pairs)];
      blend(s, pair_alpha(args, partition, tile, block, s, px, py, alive, dropped), state);
      alive = gt_where(alive, state.transmittance, stop);
      if (!any(alive)) {
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
  uint32_t live_blocks = 0;
  for (int b = 0; b < kBlocks; ++b) {
    t.state[b] = {V(0.0f), V(0.0f), V(0.0f), V(0.0f), V(1.0f)};
    t.alive[b] = region.block[b];
    if (region.block[b] != 0) live_blocks |= 1u << b;
  }
  const int32_t end = args.tile_offsets[job + 1];
  int32_t begin = args.tile_offsets[job];
  for (; begin < end && live_blocks != 0; begin += kChunk) {
    const int count = std::min<int32_t>(kChunk, end - begin);
    uint32_t any_mask = 0;
    for (int i = 0; i < count; ++i) {
      const SplatRecord& s = args.records[args.pair_records[begin + i]];
      if (i + 8 < count) __builtin_prefetch(&args.records[args.pair_records[begin + i + 8]]);
      const uint32_t mask = blocks_touched(s, grid) & live_blocks;
      args.pair_masks[begin + i] = t.masks[i] = static_cast<uint16_t>(mask);
      if (mask != 0) t.records[i] = s;
      any_mask |= mask;
    }
    for (int i = count; i % 64 != 0; ++i) t.masks[i] = 0;
    for (; any_mask != 0; any_mask &= any_mask - 1) {
      const int b = __builtin_ctz(any_mask);
      forward_block(args, partition, tile, b, count, grid, t, &scratch.dropped);
      if (t.alive[b] == 0) live_blocks &= ~(1u << b);
    }
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
      depth[lane] = args.depths[at];
      behind[lane] = args.transmittances[at];
    });
    grads[b] = {V::load(r), V::load(g), V::load(blue), V::load(depth), V::load(behind)};
  }
}

// Repeats the forward pass of one tile with the same arithmetic and keeps every (pair, block)'s alpha and weight.
// Returns where they end.
template <class V>
float* replay_tile(const RasterArgs& args, int participant, int tile, const TileGrid<V>& grid, RasterScratch& scratch) {
  const int tiles = args.tiles_x * args.tiles_y;
  const int partition = args.order[participant];
  const int64_t job = static_cast<int64_t>(participant) * tiles + tile;
  const TileRegion& region = args.drawn_by(participant, tile);
  const int32_t begin = args.tile_offsets[job], count = args.tile_offsets[job + 1] - begin;
  const V stop(args.stop);
  V transmittance[kBlocks];
  typename V::Mask alive[kBlocks];
  uint32_t live_blocks = 0;
  for (int b = 0; b < kBlocks; ++b) {
    transmittance[b] = V(1.0f);
    alive[b] = V::mask(region.block[b]);
    if (region.block[b] != 0) live_blocks |= 1u << b;
  }
  int64_t ignored = 0;
  float* out = scratch.alphas;
  for (int32_t i = 0; i < count; ++i) {
    const uint32_t mask = args.pair_masks[begin + i] & live_blocks;
    scratch.masks[i] = static_cast<uint16_t>(mask);
    const SplatRecord& s = args.records[args.pair_records[begin + i]];
    if (i + 8 < count) __builtin_prefetch(&args.records[args.pair_records[begin + i + 8]]);
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
      const int b = __builtin_ctz(rest);
      const V px = grid.px[b % (kTile / kBlock)], py = grid.py[b / (kTile / kBlock)];
      const V alpha = pair_alpha(args, partition, tile, b, s, px, py, alive[b], &ignored);
      const V before = transmittance[b];
      const V after = fnma(alpha, before, before);
      alpha.store(out);
      (alpha * before).store(out + kLanes);
      out += 2 * kLanes;
      transmittance[b] = after;
      alive[b] = gt_where(alive[b], after, stop);
      if (!any(alive[b])) live_blocks &= ~(1u << b);
    }
  }
  return out;
}

template <class V, bool kAbsolute>
void backward_tile_as(const RasterArgs& args, int participant, int tile, RasterScratch& scratch) {
  const int64_t job = static_cast<int64_t>(participant) * args.tiles_x * args.tiles_y + tile;
  const int32_t begin = args.tile_offsets[job], end = args.tile_offsets[job + 1];
  if (begin == end) return;
  const TileGrid<V> grid(args, tile);
  const float* saved = replay_tile(args, participant, tile, grid, scratch);
  PixelGrad<V> pixels[kBlocks];
  read_pixel_grads(args, participant, tile, pixels);
  for (int32_t i = end - 1; i >= begin; --i) {
    float* row = args.pair_grads + static_cast<int64_t>(kGradRow) * i;
    uint32_t rest = scratch.masks[i - begin];
    if (rest == 0) {
      std::fill(row, row + kGradRow, 0.0f);
      continue;
    }
    const SplatRecord& s = args.records[args.pair_records[i]];
    V sums[kNumMoments];
    for (V& sum : sums) sum = V(0.0f);
    while (rest != 0) {
      const int b = 31 - __builtin_clz(rest);
      rest ^= 1u << b;
      saved -= 2 * kLanes;
      const V dx = grid.px[b % (kTile / kBlock)] - V(s.x), dy = grid.py[b / (kTile / kBlock)] - V(s.y);
      const V v = blend_backward(s, V::load(saved), V::load(saved + kLanes), pixels[b], sums);
      add_moments(v, dx, dy, sums);
      if (kAbsolute) add_absolute(s, v, dx, dy, sums);
    }
    V::reduce(sums, row);
  }
}

template <class V>
void backward_tile(const RasterArgs& args, int participant, int tile, RasterScratch& scratch) {
  if (args.absgrad)
    backward_tile_as<V, true>(args, participant, tile, scratch);
  else
    backward_tile_as<V, false>(args, participant, tile, scratch);
}

static_assert(static_cast<int>(kNumMoments) <= kGradRow, "one float per moment");

}  // namespace
}  // namespace splaxel
