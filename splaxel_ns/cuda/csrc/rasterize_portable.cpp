// The tile loops for any processor: 16 pixels are a plain array, which the compiler vectorises as it can.

#include <algorithm>

#include "scalar.h"

namespace splaxel {
namespace {

constexpr int kWidth = 16;

struct LaneMask {
  uint32_t m;  // bit l is lane l
};

struct Vec {
  using Mask = LaneMask;
  alignas(64) float v[kWidth];

  Vec() = default;
  SPLAXEL_INLINE explicit Vec(float value) {
    for (float& lane : v) lane = value;
  }
  SPLAXEL_INLINE static Vec load(const float* p) {
    Vec r;
    for (int i = 0; i < kWidth; ++i) r.v[i] = p[i];
    return r;
  }
  SPLAXEL_INLINE void store(float* p) const {
    for (int i = 0; i < kWidth; ++i) p[i] = v[i];
  }
  SPLAXEL_INLINE static Mask mask(uint32_t lanes) { return {lanes}; }

  SPLAXEL_INLINE static uint64_t bitmap(const uint16_t* masks, int block) {
    uint64_t found = 0;
    for (int i = 0; i < 64; ++i) found |= static_cast<uint64_t>(masks[i] >> block & 1) << i;
    return found;
  }

  SPLAXEL_INLINE static void reduce(const Vec* sums, float* row) {
    for (int i = 0; i < 12; ++i) {
      float half[8];
      for (int l = 0; l < 8; ++l) half[l] = sums[i].v[l] + sums[i].v[l + 8];
      row[i] = ((half[0] + half[4]) + (half[2] + half[6])) + ((half[1] + half[5]) + (half[3] + half[7]));
    }
  }
};

template <class F>
SPLAXEL_INLINE Vec each(F f) {
  Vec r;
  for (int i = 0; i < kWidth; ++i) r.v[i] = f(i);
  return r;
}

template <class F>
SPLAXEL_INLINE LaneMask each_bit(F f) {
  uint32_t m = 0;
  for (int i = 0; i < kWidth; ++i) m |= static_cast<uint32_t>(f(i)) << i;
  return {m};
}

SPLAXEL_INLINE Vec operator+(Vec a, Vec b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
SPLAXEL_INLINE Vec operator-(Vec a, Vec b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
SPLAXEL_INLINE Vec operator*(Vec a, Vec b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
SPLAXEL_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
SPLAXEL_INLINE Vec fnma(Vec a, Vec b, Vec c) {
  return each([&](int i) { return c.v[i] - a.v[i] * b.v[i]; });
}
SPLAXEL_INLINE Vec min(Vec a, Vec b) {
  return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
SPLAXEL_INLINE Vec max(Vec a, Vec b) {
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
SPLAXEL_INLINE Vec abs(Vec a) {
  return each([&](int i) { return a.v[i] < 0.0f ? -a.v[i] : a.v[i]; });
}
SPLAXEL_INLINE LaneMask ge(Vec a, Vec b) {
  return each_bit([&](int i) { return a.v[i] >= b.v[i]; });
}
SPLAXEL_INLINE LaneMask lt(Vec a, Vec b) {
  return each_bit([&](int i) { return a.v[i] < b.v[i]; });
}
SPLAXEL_INLINE LaneMask gt_where(LaneMask w, Vec a, Vec b) { return {w.m & lt(b, a).m}; }
SPLAXEL_INLINE uint32_t bits(LaneMask m) { return m.m; }
SPLAXEL_INLINE bool any(LaneMask m) { return m.m != 0; }
SPLAXEL_INLINE Vec keep(LaneMask m, Vec a) {
  return each([&](int i) { return m.m >> i & 1 ? a.v[i] : 0.0f; });
}
SPLAXEL_INLINE Vec fnma_where(LaneMask m, Vec a, Vec b, Vec c) { return fnma(keep(m, a), b, c); }

SPLAXEL_INLINE Vec exp2(Vec x) {
  Vec r, scale;
  for (int i = 0; i < kWidth; ++i) {
    // Below 2^-126 the exponent's bits would wrap; such an alpha touches nothing anyway.
    const float bounded = x.v[i] > -126.0f ? x.v[i] : -126.0f;
    const int32_t whole = static_cast<int32_t>(bounded < 0.0f ? bounded - 0.5f : bounded + 0.5f);
    const int32_t exponent = (whole + 127) << 23;
    std::memcpy(&scale.v[i], &exponent, sizeof exponent);
    r.v[i] = bounded - static_cast<float>(whole);
  }
  return exp2_fraction(r) * scale;
}

}  // namespace
}  // namespace splaxel

#include "rasterize_tile.h"

namespace splaxel {

const RasterKernels kRasterPortable = {&forward_tile<Vec>, &backward_tile<Vec>};

}  // namespace splaxel
