// The tile loops for processors with AVX-512 (F, BW, DQ, VL).

#include <immintrin.h>

#include <algorithm>

#include "common.h"

// Everything below, and nothing of the headers above, is compiled for AVX-512.
#pragma GCC push_options
#pragma GCC target("prfchw,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi,bmi2,popcnt,lzcnt")

#include "scalar.h"

namespace splaxel {
namespace {

struct LaneMask {
  __mmask16 m;
};

struct Vec {
  using Mask = LaneMask;
  __m512 v;

  Vec() = default;
  SPLAXEL_INLINE Vec(__m512 value) : v(value) {}
  SPLAXEL_INLINE explicit Vec(float value) : v(_mm512_set1_ps(value)) {}
  SPLAXEL_INLINE static Vec load(const float* p) { return _mm512_load_ps(p); }
  SPLAXEL_INLINE void store(float* p) const { _mm512_store_ps(p, v); }
  SPLAXEL_INLINE static Mask mask(uint32_t lanes) { return {static_cast<__mmask16>(lanes)}; }

  SPLAXEL_INLINE static uint64_t bitmap(const uint16_t* masks, int block) {
    const __m512i bit = _mm512_set1_epi16(static_cast<short>(1 << block));
    const uint64_t low = _mm512_test_epi16_mask(_mm512_load_si512(masks), bit);
    const uint64_t high = _mm512_test_epi16_mask(_mm512_load_si512(masks + 32), bit);
    return low | high << 32;
  }

  SPLAXEL_INLINE static void reduce(const Vec* sums, float* row) {
    const __m512 x = quads(sums), y = quads(sums + 4), z = quads(sums + 8);
    // Each 128-bit lane of x holds partial sums of sums[0..3]; likewise y and z.
    const __m512 xy = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
    const __m512 zz = _mm512_add_ps(_mm512_shuffle_f32x4(z, z, 0x44), _mm512_shuffle_f32x4(z, z, 0xee));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(xy, zz, 0x88), _mm512_shuffle_f32x4(xy, zz, 0xdd));
    _mm512_store_ps(row, all);
  }

  SPLAXEL_INLINE static __m512 quads(const Vec* s) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(s[0].v, s[1].v), _mm512_unpackhi_ps(s[0].v, s[1].v));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(s[2].v, s[3].v), _mm512_unpackhi_ps(s[2].v, s[3].v));
    return _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  }
};

SPLAXEL_INLINE Vec operator+(Vec a, Vec b) { return _mm512_add_ps(a.v, b.v); }
SPLAXEL_INLINE Vec operator-(Vec a, Vec b) { return _mm512_sub_ps(a.v, b.v); }
SPLAXEL_INLINE Vec operator*(Vec a, Vec b) { return _mm512_mul_ps(a.v, b.v); }
SPLAXEL_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a.v, b.v, c.v); }
SPLAXEL_INLINE Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a.v, b.v, c.v); }
SPLAXEL_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a.v, b.v); }
SPLAXEL_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a.v, b.v); }
SPLAXEL_INLINE Vec abs(Vec a) { return _mm512_abs_ps(a.v); }
SPLAXEL_INLINE LaneMask ge(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
SPLAXEL_INLINE LaneMask lt(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
SPLAXEL_INLINE LaneMask gt_where(LaneMask w, Vec a, Vec b) {
  return {_mm512_mask_cmp_ps_mask(w.m, a.v, b.v, _CMP_GT_OQ)};
}
SPLAXEL_INLINE uint32_t bits(LaneMask m) { return m.m; }
SPLAXEL_INLINE bool any(LaneMask m) { return m.m != 0; }
SPLAXEL_INLINE Vec keep(LaneMask m, Vec a) { return _mm512_maskz_mov_ps(m.m, a.v); }
SPLAXEL_INLINE Vec fnma_where(LaneMask m, Vec a, Vec b, Vec c) { return _mm512_mask3_fnmadd_ps(a.v, b.v, c.v, m.m); }

SPLAXEL_INLINE Vec exp2(Vec x) {
  const __m512 whole = _mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec r = _mm512_sub_ps(x.v, whole);
  return _mm512_scalef_ps(exp2_fraction(r).v, whole);
}

}  // namespace
}  // namespace splaxel

#include "rasterize_tile.h"

namespace splaxel {

const RasterKernels kRasterAvx512 = {&forward_tile<Vec>, &backward_tile<Vec>};

}  // namespace splaxel

#pragma GCC pop_options
