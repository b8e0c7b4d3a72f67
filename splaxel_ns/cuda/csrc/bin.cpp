#include "bin.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "parallel.h"

namespace splaxel {
namespace {

constexpr int64_t kLeastItems = 2048;  // per thread
constexpr int64_t kAhead = 16;         // items between a prefetch and its use

bool visible(const BinInput& in, int64_t i) { return splaxel::visible(in.splats(), i); }

bool tile_rect(const BinInput& in, const RasterArgs& args, int64_t i, TileRect* rect) {
  return splaxel::tile_rect(in.splats(), args.width, args.height, kTile, i, rect);
}

bool splat_straddles(const BinInput& in, const RasterArgs& args, int64_t i, WorldBox* box) {
  return splaxel::straddles(in.splats(), args.camera, args.tree, i, box);
}

// Calls emit(participant, tested) for those that may draw Gaussian i. Returns whether it straddles.
template <class Emit>
bool for_candidates(const BinInput& in, const RasterArgs& args, int64_t i, Emit emit) {
  WorldBox box;
  const bool straddles = args.tree.num_partitions > 1 && splat_straddles(in, args, i, &box);
  if (straddles && args.boundary == Boundary::kExact) {
    for_leaves_touched(args.tree, box, [&](int leaf) {
      if (in.participant_of[leaf] >= 0) emit(in.participant_of[leaf], true);
    });
  } else if (in.participant_of[in.owner[i]] >= 0) {
    emit(in.participant_of[in.owner[i]], straddles && args.boundary == Boundary::kFilter);
  }
  return straddles;
}

// Calls visit(job) for the tiles of an item in which its participant renders something.
template <class Visit>
inline void for_jobs(const RasterArgs& args, const uint8_t* job_renders, const Item& item, Visit visit) {
  const TileRect rect = item.rect;
  const int64_t first = static_cast<int64_t>(item.participant) * args.tiles_x * args.tiles_y;
  for (int y = rect.y0; y < rect.y1; ++y) {
    const int64_t row = first + static_cast<int64_t>(y) * args.tiles_x;
    for (int x = rect.x0; x < rect.x1; ++x)
      if (job_renders[row + x] != 0) visit(row + x);
  }
}

}  // namespace

Block<TileRegion> tile_regions(
    const int32_t* spans, int num_partitions, const RasterArgs& args, int threads) {
  const int64_t tiles = static_cast<int64_t>(args.tiles_x) * args.tiles_y;
  auto regions = uninitialised<TileRegion>(num_partitions * tiles);
  // A chunk is one row of tiles of one partition.
  const int64_t rows = static_cast<int64_t>(num_partitions) * args.tiles_y;
  const int chunks = chunks_for(rows, threads, 32);
  for_chunks(chunks, [&](int chunk) {
    const Chunk part(rows, chunk, chunks);
    for (int64_t row = part.begin; row < part.end; ++row) {
      const int64_t partition = row / args.tiles_y;
      const int tile_y = static_cast<int>(row % args.tiles_y);
      TileRegion* line = regions.get() + row * args.tiles_x;
      std::memset(line, 0, sizeof(TileRegion) * static_cast<size_t>(args.tiles_x));
      for (int y = 0; y < kTile && tile_y * kTile + y < args.height; ++y) {
        const int32_t* span = spans + 2 * (partition * args.height + tile_y * kTile + y);
        const int begin = std::max(span[0], 0), end = std::min(span[1], args.width);
        for (int x = begin / kTile; x * kTile < end; ++x) {
          const int low = std::max(begin - x * kTile, 0), high = std::min(end - x * kTile, kTile);
          if (low >= high) continue;
          const uint32_t pixels = ((1u << high) - 1) & ~((1u << low) - 1);
          for (int b = 0; b < kTile / kBlock; ++b)
            line[x].block[y / kBlock * (kTile / kBlock) + b] |=
                static_cast<uint16_t>((pixels >> (kBlock * b) & 15u) << (kBlock * (y % kBlock)));
        }
      }
    }
  });
  return regions;
}

Block<TileRegion> unsaturated_regions(const uint8_t* saturated, const RasterArgs& args) {
  const int64_t tiles = static_cast<int64_t>(args.tiles_x) * args.tiles_y;
  const int row_bytes = (args.width + 7) / 8;
  auto regions = uninitialised<TileRegion>(args.num_participants * tiles);
  for (int q = 0; q < args.num_participants; ++q) {
    TileRegion* drawn = regions.get() + q * tiles;
    std::copy(args.region + args.order[q] * tiles, args.region + (args.order[q] + 1) * tiles, drawn);
    for (int y = 0; y < args.height; ++y) {
      const uint8_t* row = saturated + (static_cast<int64_t>(q) * args.height + y) * row_bytes;
      const int line = y % kTile / kBlock * (kTile / kBlock), shift = y % kBlock * kBlock;
      for (int byte = 0; byte < row_bytes; ++byte) {
        if (row[byte] == 0) continue;
        // Eight pixels are the rows of two blocks of one tile.
        static_assert(kTile % 8 == 0 && kBlock == 4);
        const int x = 8 * byte;
        uint16_t* blocks = drawn[static_cast<int64_t>(y / kTile) * args.tiles_x + x / kTile].block;
        blocks[line + x % kTile / kBlock] &= static_cast<uint16_t>(~((row[byte] & 15u) << shift));
        blocks[line + x % kTile / kBlock + 1] &= static_cast<uint16_t>(~((row[byte] >> 4 & 15u) << shift));
      }
    }
  }
  return regions;
}

Items list_items(
    const BinInput& in, const RasterArgs& args, const std::function<SplatRecord*(int64_t)>& allocate) {
  const int chunks = chunks_for(in.num_gaussians, in.threads, kLeastItems);
  struct alignas(64) Count {
    int64_t items = 0, splats = 0, straddling = 0, drawn = 0;
    bool owner_out_of_range = false;
  };
  std::vector<Count> counts(static_cast<size_t>(chunks));
  struct Drawn {
    int32_t gaussian;
    TileRect rect;
  };
  const auto drawn = uninitialised<Drawn>(in.num_gaussians);
  for_chunks(chunks, [&](int chunk) {
    const Chunk part(in.num_gaussians, chunk, chunks);
    Count count;
    Drawn* next = drawn.get() + part.begin;
    for (int64_t i = part.begin; i < part.end; ++i) {
      TileRect rect;
      if (in.owner[i] < 0 || in.owner[i] >= args.tree.num_partitions) {
        count.owner_out_of_range = true;
      } else if (visible(in, i) && tile_rect(in, args, i, &rect)) {
        int64_t found = 0;
        const bool straddles = for_candidates(in, args, i, [&](int, bool) { ++found; });
        count.items += found;
        count.splats += found > 0;
        count.straddling += found > 0 && straddles;
        if (found > 0) *next++ = {static_cast<int32_t>(i), rect};
      }
    }
    count.drawn = next - drawn.get() - part.begin;
    counts[static_cast<size_t>(chunk)] = count;
  });
  Items items;
  std::vector<int64_t> first(static_cast<size_t>(chunks));
  for (size_t chunk = 0; chunk < counts.size(); ++chunk) {
    first[chunk] = items.count;
    items.count += counts[chunk].items;
    items.splats += counts[chunk].splats;
    items.straddling += counts[chunk].straddling;
    items.owner_out_of_range |= counts[chunk].owner_out_of_range;
  }
  if (items.owner_out_of_range) return items;
  SplatRecord* records = allocate(items.count);
  items.list = uninitialised<Item>(items.count);
  for_chunks(chunks, [&](int chunk) {
    const Chunk part(in.num_gaussians, chunk, chunks);
    int64_t item = first[static_cast<size_t>(chunk)];
    const Drawn *from = drawn.get() + part.begin, *end = from + counts[static_cast<size_t>(chunk)].drawn;
    for (; from < end; ++from) {
      const int64_t i = from->gaussian;
      for_candidates(in, args, i, [&](int participant, bool tested) {
        records[item] = pack_record(in.splats(), i, tested);
        items.list[item] = {from->rect, participant, 0};
        ++item;
      });
    }
  });
  return items;
}

Block<uint32_t> sort_by_depth(const SplatRecord* records, int64_t count, int threads) {
  constexpr int kMostBits = 13;  // of a digit: its histogram and the ends of its buckets still fit the second cache
  struct Entry {
    uint32_t key, item;
  };
  const auto first = uninitialised<Entry>(count), second = uninitialised<Entry>(count);
  Entry *from = first.get(), *to = second.get();
  const int chunks = chunks_for(count, threads, kLeastItems);
  std::vector<uint32_t> lowest(static_cast<size_t>(chunks), 0xffffffffu), highest(static_cast<size_t>(chunks), 0);
  for_chunks(chunks, [&](int chunk) {
    const Chunk part(count, chunk, chunks);
    uint32_t low = 0xffffffffu, high = 0;
    for (int64_t i = part.begin; i < part.end; ++i) {
      const uint32_t key = float_key(records[i].depth);
      from[i] = {key, static_cast<uint32_t>(i)};
      low = std::min(low, key);
      high = std::max(high, key);
    }
    lowest[static_cast<size_t>(chunk)] = low;
    highest[static_cast<size_t>(chunk)] = high;
  });
  const uint32_t low = *std::min_element(lowest.begin(), lowest.end());
  const uint32_t range = count > 0 ? *std::max_element(highest.begin(), highest.end()) - low : 0;
  const int key_bits = range == 0 ? 0 : 32 - __builtin_clz(range), passes = (key_bits + kMostBits - 1) / kMostBits;
  const int bits = passes == 0 ? 0 : (key_bits + passes - 1) / passes;
  const uint32_t buckets = 1u << bits, digit = buckets - 1;
  auto starts = uninitialised<uint32_t>(static_cast<int64_t>(chunks) * buckets);
  // Each pass is stable, and the first one sees the items in order of their Gaussians.
  for (int shift = 0; shift < key_bits; shift += bits) {
    for_chunks(chunks, [&](int chunk) {
      const Chunk part(count, chunk, chunks);
      uint32_t* histogram = starts.get() + static_cast<int64_t>(chunk) * buckets;
      std::fill(histogram, histogram + buckets, 0u);
      for (int64_t i = part.begin; i < part.end; ++i) ++histogram[(from[i].key - low) >> shift & digit];
    });
    uint32_t total = 0;
    for (uint32_t bucket = 0; bucket < buckets; ++bucket)
      for (int chunk = 0; chunk < chunks; ++chunk) {
        uint32_t& start = starts[static_cast<int64_t>(chunk) * buckets + bucket];
        const uint32_t here = start;
        start = total;
        total += here;
      }
    for_chunks(chunks, [&](int chunk) {
      const Chunk part(count, chunk, chunks);
      uint32_t* next = starts.get() + static_cast<int64_t>(chunk) * buckets;
      for (int64_t i = part.begin; i < part.end; ++i)
        to[next[(from[i].key - low) >> shift & digit]++] = from[i];
    });
    std::swap(from, to);
  }
  auto order = uninitialised<uint32_t>(count);
  for_chunks(chunks, [&](int chunk) {
    const Chunk part(count, chunk, chunks);
    for (int64_t i = part.begin; i < part.end; ++i) order[i] = from[i].item;
  });
  for_chunks(chunks, [&](int chunk) {  // equal depths: a chunk takes those that begin in it
    const Chunk part(count, chunk, chunks);
    for (int64_t i = part.begin, end; i < part.end; i = end) {
      for (end = i + 1; end < count && from[end].key == from[i].key;) ++end;
      if (end == i + 1 || (i > 0 && from[i - 1].key == from[i].key)) continue;
      std::sort(order.get() + i, order.get() + end, [&](uint32_t a, uint32_t b) {
        return before(records[a], records[b]);
      });
    }
  });
  return order;
}

Pairs count_pairs(
    const BinInput& in, const RasterArgs& args, Items& items, const uint32_t* order, int32_t* tile_offsets,
    int32_t* item_offsets) {
  const int64_t tiles = static_cast<int64_t>(args.tiles_x) * args.tiles_y, jobs = args.num_participants * tiles;
  Pairs pairs;
  pairs.chunks = chunks_for(items.count, in.threads, kLeastItems);
  pairs.job_renders = uninitialised<uint8_t>(jobs);
  for (int q = 0; q < args.num_participants; ++q)
    for (int64_t tile = 0; tile < tiles; ++tile) {
      uint32_t any = 0;
      for (const uint16_t block : args.drawn_by(q, tile).block) any |= block;
      pairs.job_renders[q * tiles + tile] = any != 0;
    }
  pairs.tile_counts = uninitialised<int32_t>(pairs.chunks * jobs);
  for_chunks(pairs.chunks, [&](int chunk) {
    const Chunk part(items.count, chunk, pairs.chunks);
    int32_t* counts = pairs.tile_counts.get() + chunk * jobs;
    std::fill(counts, counts + jobs, 0);
    for (int64_t at = part.begin; at < part.end; ++at) {
      if (at + kAhead < part.end) __builtin_prefetch(&items.list[order[at + kAhead]], 1);
      Item& item = items.list[order[at]];
      int32_t found = 0;
      for_jobs(args, pairs.job_renders.get(), item, [&](int64_t job) {
        ++counts[job];
        ++found;
      });
      item.pairs = found;
    }
  });
  for (int64_t job = 0; job < jobs; ++job) {
    tile_offsets[job] = static_cast<int32_t>(pairs.count);
    for (int chunk = 0; chunk < pairs.chunks; ++chunk) {
      int32_t& start = pairs.tile_counts[chunk * jobs + job];
      const int32_t here = start;
      start = static_cast<int32_t>(pairs.count);
      pairs.count += here;
    }
  }
  tile_offsets[jobs] = static_cast<int32_t>(pairs.count);
  item_offsets[0] = 0;
  for (int64_t i = 0; i < items.count; ++i) {
    item_offsets[i + 1] = item_offsets[i] + items.list[i].pairs;
    items.list[i].pairs = item_offsets[i];
  }
  return pairs;
}

void list_pairs(
    const RasterArgs& args, const Items& items, const uint32_t* order, Pairs& pairs, Pair* list) {
  const int64_t jobs = args.num_jobs();
  for_chunks(pairs.chunks, [&](int chunk) {
    const Chunk part(items.count, chunk, pairs.chunks);
    int32_t* next = pairs.tile_counts.get() + chunk * jobs;
    for (int64_t at = part.begin; at < part.end; ++at) {
      if (at + kAhead < part.end) __builtin_prefetch(&items.list[order[at + kAhead]]);
      const Item& item = items.list[order[at]];
      int32_t slot = item.pairs;
      for_jobs(args, pairs.job_renders.get(), item, [&](int64_t job) {
        list[next[job]++] = {static_cast<int32_t>(order[at]), slot++};
      });
    }
  });
}

int64_t count_clipped(const BinInput& in, const RasterArgs& args) {
  const int64_t tiles = static_cast<int64_t>(args.tiles_x) * args.tiles_y;
  const int chunks = chunks_for(in.num_gaussians, in.threads, 64);
  std::vector<int64_t> clipped(static_cast<size_t>(chunks), 0);
  for_chunks(chunks, [&](int chunk) {
    const Chunk part(in.num_gaussians, chunk, chunks);
    int64_t count = 0;
    for (int64_t i = part.begin; i < part.end; ++i) {
      int x0, x1, y0, y1;
      if (!visible(in, i) || !covered(in.means2d[2 * i], in.extents[2 * i], args.width, &x0, &x1) ||
          !covered(in.means2d[2 * i + 1], in.extents[2 * i + 1], args.height, &y0, &y1))
        continue;
      WorldBox box;
      const bool moves = args.boundary == Boundary::kExact && splat_straddles(in, args, i, &box);
      const SplatRecord s = pack_record(in.splats(), i, moves);
      for (int y = y0; y <= y1; ++y)
        for (int x = x0; x <= x1; ++x) {
          const float px = static_cast<float>(x) + 0.5f, py = static_cast<float>(y) + 0.5f;
          if (unclamped_alpha(s, px - s.x, py - s.y) < static_cast<float>(kAlphaMin)) continue;
          const int leaf = moves ? locate(args.tree, point_on_ray(args.camera, px, py, s.depth).at) : in.owner[i];
          const int block = y % kTile / kBlock * (kTile / kBlock) + x % kTile / kBlock;
          const int lane = y % kBlock * kBlock + x % kBlock;
          const int64_t tile = static_cast<int64_t>(y / kTile) * args.tiles_x + x / kTile;
          count += (args.region[leaf * tiles + tile].block[block] >> lane & 1) == 0;
        }
    }
    clipped[static_cast<size_t>(chunk)] = count;
  });
  int64_t total = 0;
  for (const int64_t count : clipped) total += count;
  return total;
}

}  // namespace splaxel
