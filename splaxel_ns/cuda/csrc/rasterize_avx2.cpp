// The tile loops for processors with AVX2 and FMA: 16 pixels are two vectors of 8.

#include <immintrin.h>

#include <algorithm>

#include "common.h"

// Everything below, and nothing of the headers above, is compiled for AVX2.
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi,bmi2,popcnt,lzcnt")

#include "scalar.h"

namespace splaxel {
namespace {

struct LaneMask {
  __m256 lo, hi;  // all ones or all zeros
};

struct Vec {
  using Mask = LaneMask;
  __m256 lo, hi;

  Vec() = default;
  SPLAXEL_INLINE Vec(__m256 low, __m256 high) : lo(low), hi(high) {}
  SPLAXEL_INLINE explicit Vec(float value) : lo(_mm256_set1_ps(value)), hi(_mm256_set1_ps(value)) {}
  SPLAXEL_INLINE static Vec load(const float* p) { return {_mm256_load_ps(p), _mm256_load_ps(p + 8)}; }
  SPLAXEL_INLINE void store(float* p) const {
    _mm256_store_ps(p, lo);
    _mm256_store_ps(p + 8, hi);
  }
  SPLAXEL_INLINE static Mask mask(uint32_t lanes) {
    const __m256i all = _mm256_set1_epi32(static_cast<int>(lanes));
    const __m256i low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), high = _mm256_slli_epi32(low, 8);
    return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, low), low)),
            _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, high), high))};
  }

  SPLAXEL_INLINE static uint64_t bitmap(const uint16_t* masks, int block) {
    uint64_t found = 0;
    for (int i = 0; i < 64; i += 32) {
      const __m256i a = touched(masks + i, block), b = touched(masks + i + 16, block);
      // Packing works within 128-bit halves, hence the permutation.
      const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xd8);
      found |= static_cast<uint64_t>(static_cast<uint32_t>(_mm256_movemask_epi8(packed))) << i;
    }
    return found;
  }
  SPLAXEL_INLINE static __m256i touched(const uint16_t* masks, int block) {
    const __m256i bit = _mm256_set1_epi16(static_cast<short>(1 << block));
    const __m256i m = _mm256_load_si256(reinterpret_cast<const __m256i*>(masks));
    return _mm256_cmpeq_epi16(_mm256_and_si256(m, bit), bit);
  }

  SPLAXEL_INLINE static void reduce(const Vec* sums, float* row) {
    for (int i = 0; i < 12; i += 4) _mm_storeu_ps(row + i, quad(sums + i));
  }
  SPLAXEL_INLINE static __m128 quad(const Vec* s) {
    const __m256 a = _mm256_add_ps(s[0].lo, s[0].hi), b = _mm256_add_ps(s[1].lo, s[1].hi);
    const __m256 c = _mm256_add_ps(s[2].lo, s[2].hi), d = _mm256_add_ps(s[3].lo, s[3].hi);
    const __m256 abcd = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
  }
};

SPLAXEL_INLINE Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
SPLAXEL_INLINE Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
SPLAXEL_INLINE Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
SPLAXEL_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
SPLAXEL_INLINE Vec fnma(Vec a, Vec b, Vec c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
SPLAXEL_INLINE Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
SPLAXEL_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
SPLAXEL_INLINE Vec abs(Vec a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
SPLAXEL_INLINE LaneMask ge(Vec a, Vec b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ)};
}
SPLAXEL_INLINE LaneMask lt(Vec a, Vec b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
SPLAXEL_INLINE LaneMask gt(Vec a, Vec b) { return lt(b, a); }
SPLAXEL_INLINE LaneMask both(LaneMask a, LaneMask b) { return {_mm256_and_ps(a.lo, b.lo), _mm256_and_ps(a.hi, b.hi)}; }
SPLAXEL_INLINE LaneMask gt_where(LaneMask w, Vec a, Vec b) { return both(w, gt(a, b)); }
SPLAXEL_INLINE uint32_t bits(LaneMask m) {
  return static_cast<uint32_t>(_mm256_movemask_ps(m.lo)) | static_cast<uint32_t>(_mm256_movemask_ps(m.hi)) << 8;
}
SPLAXEL_INLINE bool any(LaneMask m) { return _mm256_movemask_ps(_mm256_or_ps(m.lo, m.hi)) != 0; }
SPLAXEL_INLINE Vec keep(LaneMask m, Vec a) { return {_mm256_and_ps(m.lo, a.lo), _mm256_and_ps(m.hi, a.hi)}; }
SPLAXEL_INLINE Vec fnma_where(LaneMask m, Vec a, Vec b, Vec c) { return fnma(keep(m, a), b, c); }

SPLAXEL_INLINE __m256 power_of_two(__m256 whole) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}

SPLAXEL_INLINE Vec exp2(Vec x) {
  // Below 2^-126 the exponent's bits would wrap; such an alpha touches nothing anyway.
  const Vec bounded = max(x, Vec(-126.0f));
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const Vec whole(_mm256_round_ps(bounded.lo, kMode), _mm256_round_ps(bounded.hi, kMode));
  return exp2_fraction(bounded - whole) * Vec(power_of_two(whole.lo), power_of_two(whole.hi));
}

}  // namespace
}  // namespace splaxel

#include "rasterize_tile.h"

namespace splaxel {

const RasterKernels kRasterAvx2 = {&forward_tile<Vec>, &backward_tile<Vec>};

}  // namespace splaxel

#pragma GCC pop_options
