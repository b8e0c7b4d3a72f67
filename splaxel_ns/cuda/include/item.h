// One projected Gaussian on its way to the rasteriser: whether and where the image shows it, and its packed record.
#pragma once

#include "blend.h"
#include "ownership.h"

namespace splaxel {

// Projected Gaussians of one view, as the ops get them.
struct SplatArrays {
  const float* means2d;    // [N, 2] pixels
  const float* depths;     // [N]
  const float* conics;     // [N, 3]
  const float* opacities;  // [N]
  const float* colors;     // [N, 3]
  const float* extents;    // [N, 2] pixels
  const int32_t* owner;    // [N]
  const float* means;      // [N, 3] world
  const float* reach;      // [N, 3] world, or null: computed here
};

// Tiles [x0, x1) x [y0, y1).
struct TileRect {
  uint16_t x0, y0, x1, y1;
};

// The columns (or rows) [first, last] whose centres lie within `extent` of `center`, enlarged beyond rounding.
SPLAXEL_INLINE bool covered(float center, float extent, int size, int* first, int* last) {
  const float half = extent * 1.0001f + 1e-3f;
  const float low = center - half - 0.5f, high = center + half - 0.5f, end = static_cast<float>(size - 1);
  if (!(high >= 0.0f && low <= end)) return false;
  // Rounded up and down: a library call would cost more than all the rest.
  const int whole = low > 0.0f ? static_cast<int>(low) : 0;
  *first = whole + (low > static_cast<float>(whole) ? 1 : 0);
  *last = high < end ? static_cast<int>(high) : size - 1;
  if (*first > *last) return false;
  return true;
}

SPLAXEL_INLINE bool visible(const SplatArrays& in, int64_t i) {
  const float* conic = in.conics + 3 * i;
  return in.extents[2 * i] > 0.0f && in.extents[2 * i + 1] > 0.0f && in.opacities[i] >= static_cast<float>(kAlphaMin) &&
         conic[0] > 0.0f && conic[2] > 0.0f;
}

// The tiles of `tile` x `tile` pixels that Gaussian i may touch; false if none.
SPLAXEL_INLINE bool tile_rect(const SplatArrays& in, int width, int height, int tile, int64_t i, TileRect* rect) {
  int x0, x1, y0, y1;
  if (!covered(in.means2d[2 * i], in.extents[2 * i], width, &x0, &x1) ||
      !covered(in.means2d[2 * i + 1], in.extents[2 * i + 1], height, &y0, &y1))
    return false;
  *rect = {static_cast<uint16_t>(x0 / tile), static_cast<uint16_t>(y0 / tile), static_cast<uint16_t>(x1 / tile + 1),
           static_cast<uint16_t>(y1 / tile + 1)};
  return true;
}

// Whether pairs of Gaussian i may belong to another leaf than its owner; `box` holds all its pairs.
SPLAXEL_INLINE bool straddles(
    const SplatArrays& in, const RayCamera& camera, const Tree& tree, int64_t i, WorldBox* box) {
  *box = pairs_box(
      camera, in.means + 3 * i, in.reach != nullptr ? in.reach + 3 * i : nullptr, in.extents[2 * i],
      in.extents[2 * i + 1], in.depths[i]);
  return !inside_leaf(tree, in.owner[i], *box);
}

SPLAXEL_INLINE SplatRecord pack_record(const SplatArrays& in, int64_t i, bool tested) {
  const float* conic = in.conics + 3 * i;
  const double a = conic[0], b = conic[1], c = conic[2];
  const double d = c - b * b / a;
  SplatRecord s;
  s.x = in.means2d[2 * i];
  s.y = in.means2d[2 * i + 1];
  s.k = static_cast<float>(b / a);
  s.h = static_cast<float>(-b / c);
  s.a2 = 0.5f * kLog2E * conic[0];
  // Of a very long splat the rounded conic may not be positive definite; it is then drawn as infinitely long.
  s.d2 = static_cast<float>(0.5 * static_cast<double>(kLog2E) * (d > 0.0 ? d : 0.0));
  s.log2_opacity = std::log2(in.opacities[i]);
  s.limit = (s.log2_opacity + std::log2(255.0f)) * 1.0001f + 1e-3f;
  s.r = in.colors[3 * i];
  s.g = in.colors[3 * i + 1];
  s.b = in.colors[3 * i + 2];
  s.depth = in.depths[i];
  s.a = conic[0];
  s.c = conic[2];
  s.tested = tested ? 1 : 0;
  s.index = static_cast<int32_t>(i);
  return s;
}

// Unsigned keys in the order of the floats.
SPLAXEL_INLINE uint32_t float_key(float value) {
  uint32_t key;
  std::memcpy(&key, &value, sizeof key);
  return key >> 31 ? ~key : key | 0x80000000u;
}

// Which of two splats of equal depth is blended first. By what they look like, not by their numbers: those differ from
// rank to rank, and with the history of growth and moves. Splats that look the same may change places.
SPLAXEL_INLINE bool before(const SplatRecord& s, const SplatRecord& t) {
  const float looks[] = {s.x, s.y, s.a, s.c, s.k, s.log2_opacity, s.r, s.g, s.b};
  const float other[] = {t.x, t.y, t.a, t.c, t.k, t.log2_opacity, t.r, t.g, t.b};
  for (int i = 0; i < 9; ++i) {
    const uint32_t first = float_key(looks[i]), second = float_key(other[i]);
    if (first != second) return first < second;
  }
  return s.index < t.index;
}

}  // namespace splaxel
