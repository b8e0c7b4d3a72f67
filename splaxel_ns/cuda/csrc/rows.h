// Loops over rows of floats as the parameters are stored, for the instructions of the file that includes this, which
// defines SPLAXEL_AVX512 if it may: the compiler's own macros do not follow its pragmas. In an unnamed namespace, because
// files are compiled for different processors.
//
// A row of spherical harmonics holds up to 15 coefficients of three channels. With AVX-512 it is three vectors of five
// coefficients each, so that a lane has the same channel in all of them, and the last lane is not used.
#pragma once

#include <algorithm>
#include <cstring>

#if defined(SPLAXEL_AVX512)
#include <immintrin.h>
#endif

#include "sh_block.h"
#include "update.h"

namespace splaxel {
namespace {

#if defined(SPLAXEL_AVX512)

// Floats between a prefetch and its use. With it, and for writing where something is written, one core moves twice as
// many bytes.
constexpr int64_t kAhead = 512;

struct RowMasks {
  __mmask16 used[3];  // lanes of the coefficients that are used
  explicit RowMasks(int64_t coefficients) {
    for (int q = 0; q < 3; ++q) {
      const auto lanes = static_cast<int>(std::clamp<int64_t>(3 * coefficients - 15 * q, 0, 15));
      used[q] = static_cast<__mmask16>((1u << lanes) - 1);
    }
  }
};

// 16 rows of a structure of arrays, `stride` apart, become the columns of `out`, and back with the strides exchanged.
SPLAXEL_INLINE void transpose16(const float* in, int64_t stride, float* out, int64_t out_stride) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(in + stride * i);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int k = 0; k < 2; ++k) {
      a[i + 2 * k] = _mm512_shuffle_ps(b[i + k], b[i + 2 + k], 0x44);
      a[i + 2 * k + 1] = _mm512_shuffle_ps(b[i + k], b[i + 2 + k], 0xee);
    }
  for (int k = 0; k < 4; ++k) {
    b[k] = _mm512_shuffle_f32x4(a[k], a[4 + k], 0x88);
    b[4 + k] = _mm512_shuffle_f32x4(a[k], a[4 + k], 0xdd);
    b[8 + k] = _mm512_shuffle_f32x4(a[8 + k], a[12 + k], 0x88);
    b[12 + k] = _mm512_shuffle_f32x4(a[8 + k], a[12 + k], 0xdd);
  }
  for (int k = 0; k < 4; ++k) {
    _mm512_storeu_ps(out + out_stride * k, _mm512_shuffle_f32x4(b[k], b[8 + k], 0x88));
    _mm512_storeu_ps(out + out_stride * (8 + k), _mm512_shuffle_f32x4(b[k], b[8 + k], 0xdd));
    _mm512_storeu_ps(out + out_stride * (4 + k), _mm512_shuffle_f32x4(b[4 + k], b[12 + k], 0x88));
    _mm512_storeu_ps(out + out_stride * (12 + k), _mm512_shuffle_f32x4(b[4 + k], b[12 + k], 0xdd));
  }
}

// Lane l of part q: base 5 q + l / 3 + 1 of the Gaussian.
SPLAXEL_INLINE __m512 spread_bases(__m512 bases, int q) {
  const __m512i lane = _mm512_setr_epi32(1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5, 5);
  return _mm512_permutexvar_ps(_mm512_add_epi32(lane, _mm512_set1_epi32(5 * q)), bases);
}

// Lane l: channel l % 3.
SPLAXEL_INLINE __m512 spread_channels(__m128 v) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0);
  return _mm512_permutexvar_ps(lane, _mm512_castps128_ps512(v));
}

// Before the clamp, in three lanes.
SPLAXEL_INLINE __m128 row_color(const RowMasks& masks, __m512 bases, const float* sh0, const float* rest) {
  __m512 sum = _mm512_setzero_ps();
  for (int q = 0; q < 3; ++q)
    sum = _mm512_mask3_fmadd_ps(
        _mm512_maskz_loadu_ps(masks.used[q], rest + 15 * q), spread_bases(bases, q), sum, masks.used[q]);
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const auto from = [&](__m512 x, int first) {
    return _mm512_permutexvar_ps(_mm512_add_epi32(lane, _mm512_set1_epi32(first)), x);
  };
  const __m512 last = from(sum, 12);
  sum = _mm512_add_ps(sum, from(sum, 6));
  sum = _mm512_add_ps(_mm512_add_ps(sum, from(sum, 3)), last);
  const __m128 base = _mm_broadcastss_ps(_mm512_castps512_ps128(bases));
  const __m128 flat = _mm_fmadd_ps(base, _mm_maskz_loadu_ps(7, sh0), _mm_set1_ps(0.5f));
  return _mm_maskz_add_ps(7, flat, _mm512_castps512_ps128(sum));
}

// Those beyond the degree stay undefined.
SPLAXEL_INLINE void bases_by_row(const ShDirections& d, float (*rows)[16]) {
  static_assert(kMaxShBases == 16, "a row of bases is a vector");
  for (int i = 0; i < kBlock; i += 16) transpose16(&d.bases[0][i], kBlock, rows[i], 16);
}

template <int degree>
SPLAXEL_INLINE void colors_of_block(
    const ShInputs& in, const ShDirections& d, const bool* visible, int64_t first, int count, float* colors) {
  alignas(64) float bases[kBlock][16];
  bases_by_row(d, bases);
  const RowMasks masks((degree + 1) * (degree + 1) - 1);
  for (int i = 0; i < count; ++i) {
    __m128 color = _mm_setzero_ps();
    if (visible[i]) {
      const float* rest = in.rest + 3 * in.stored * (first + i);
      for (int q = 0; q < 3; ++q) __builtin_prefetch(rest + 16 * q + kAhead);
      color = row_color(masks, _mm512_load_ps(bases[i]), in.sh0 + 3 * (first + i), rest);
    }
    // In this order NaN stays NaN, so that the loss tells.
    _mm_mask_storeu_ps(colors + 3 * i, 7, _mm_max_ps(_mm_setzero_ps(), color));
  }
}

// Writes v_sh0 and v_rest, rows of 3 and of 3 * in.stored floats, or adds to them, and writes v_bases, all for the
// Gaussians seen: other rows, and coefficients beyond the degree, are left as they are.
template <int degree, bool add>
SPLAXEL_INLINE void rows_vjp(
    const ShInputs& in, const ShDirections& d, const bool* seen, const float* v_colors, int64_t first, int count,
    float* v_sh0, float* v_rest, float (*v_bases)[kBlock]) {
  alignas(64) float bases[kBlock][16], v_rows[kBlock][16];
  bases_by_row(d, bases);
  const RowMasks masks((degree + 1) * (degree + 1) - 1);
  // Base k of channel c: lane 3 (k - 1) + c of the three vectors of 15 lanes after one another.
  const __m512i low = _mm512_setr_epi32(0, 0, 3, 6, 9, 12, 16, 19, 22, 25, 28, 0, 0, 0, 0, 0);
  const __m512i high = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 6, 9, 12);
  for (int i = 0; i < count; ++i) {
    if (!seen[i]) {
      _mm512_store_ps(v_rows[i], _mm512_setzero_ps());
      continue;
    }
    const __m512 row = _mm512_load_ps(bases[i]);
    const float* rest = in.rest + 3 * in.stored * (first + i);
    const __m128 color = row_color(masks, row, in.sh0 + 3 * (first + i), rest);
    const __mmask8 drawn = _mm_mask_cmp_ps_mask(7, color, _mm_set1_ps(kLeastColor), _CMP_GE_OQ);
    const __m128 v = _mm_maskz_loadu_ps(drawn, v_colors + 3 * (first + i));
    const __m128 base = _mm_broadcastss_ps(_mm512_castps512_ps128(row));
    const __m128 before = add ? _mm_maskz_loadu_ps(7, v_sh0 + 3 * i) : _mm_setzero_ps();
    _mm_mask_storeu_ps(v_sh0 + 3 * i, 7, _mm_fmadd_ps(base, v, before));
    const __m512 channels = spread_channels(v);
    float* out = v_rest + 3 * in.stored * i;
    __m512 products[3];
    for (int q = 0; q < 3; ++q) {
      products[q] = _mm512_mul_ps(_mm512_maskz_loadu_ps(masks.used[q], rest + 15 * q), channels);
      const __m512 earlier = add ? _mm512_maskz_loadu_ps(masks.used[q], out + 15 * q) : _mm512_setzero_ps();
      const __m512 sum = _mm512_fmadd_ps(spread_bases(row, q), channels, earlier);
      _mm512_mask_storeu_ps(out + 15 * q, masks.used[q], sum);
      __builtin_prefetch(rest + 16 * q + kAhead, add);  // what is added up here moves the coefficients next
      if (!add) __builtin_prefetch(out + 16 * q + kAhead, 1);
    }
    __m512 sum = _mm512_setzero_ps();
    for (int c = 0; c < 3; ++c) {
      const __m512i channel = _mm512_set1_epi32(c);
      const __m512 term =
          _mm512_permutex2var_ps(products[0], _mm512_add_epi32(low, channel), products[1]);
      sum = _mm512_add_ps(
          sum, _mm512_mask_permutexvar_ps(term, 0xf800, _mm512_add_epi32(high, channel), products[2]));
    }
    _mm512_store_ps(v_rows[i], sum);
  }
  std::memset(v_rows[count], 0, sizeof(v_rows[0]) * static_cast<size_t>(kBlock - count));
  for (int i = 0; i < kBlock; i += 16) transpose16(v_rows[i], 16, &v_bases[0][i], kBlock);
}

// 1 / sqrt(x) and 1 / x to about one unit in the last place: the divider takes four times as long as all the rest.
SPLAXEL_INLINE __m512 inverse_root(__m512 x) {
  const __m512 y = _mm512_rsqrt14_ps(x), half = _mm512_mul_ps(_mm512_set1_ps(0.5f), y);
  return _mm512_fmadd_ps(_mm512_fnmadd_ps(_mm512_mul_ps(x, y), y, _mm512_set1_ps(1.0f)), half, y);
}

SPLAXEL_INLINE __m512 inverse(__m512 x) {
  const __m512 y = _mm512_rcp14_ps(x);
  return _mm512_fmadd_ps(_mm512_fnmadd_ps(x, y, _mm512_set1_ps(1.0f)), y, y);
}

// One step of Adam on `length` floats at p, m and v; where `moves` is zero nothing changes (null: everywhere it does).
SPLAXEL_INLINE void adam_run(
    const AdamGroup& a, const float* gradient, const float* more, const int32_t* moves, int64_t length, float* p,
    float* m, float* v) {
  const __m512 least = _mm512_set1_ps(1.2e-38f);  // of v: what is smaller has no root that Adam's eps would not hide
  for (int64_t j = 0; j < length; j += 16) {
    __mmask16 lanes = static_cast<__mmask16>((1u << std::min<int64_t>(length - j, 16)) - 1);
    __builtin_prefetch(p + j + kAhead, 1);
    __builtin_prefetch(m + j + kAhead, 1);
    __builtin_prefetch(v + j + kAhead, 1);
    __m512 g = _mm512_maskz_loadu_ps(lanes, gradient + j);
    if (more != nullptr) g = _mm512_add_ps(g, _mm512_maskz_loadu_ps(lanes, more + j));
    const __m512 old_m = _mm512_maskz_loadu_ps(lanes, m + j), old_v = _mm512_maskz_loadu_ps(lanes, v + j);
    const __m512 new_m = _mm512_fmadd_ps(_mm512_set1_ps(a.one_less_beta1), _mm512_sub_ps(g, old_m), old_m);
    const __m512 new_v = _mm512_fmadd_ps(
        _mm512_mul_ps(_mm512_set1_ps(a.one_less_beta2), g), g, _mm512_mul_ps(_mm512_set1_ps(a.beta2), old_v));
    const __m512 root = _mm512_mul_ps(new_v, inverse_root(_mm512_max_ps(new_v, least)));
    const __m512 size = _mm512_fmadd_ps(root, _mm512_set1_ps(a.root_correction), _mm512_set1_ps(a.eps));
    const __m512 step = _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(a.rate), new_m), inverse(size));
    if (moves != nullptr) {
      const __m512i moved = _mm512_maskz_loadu_epi32(lanes, moves + j);
      lanes = _mm512_test_epi32_mask(moved, moved);
    }
    _mm512_mask_storeu_ps(p + j, lanes, _mm512_sub_ps(_mm512_maskz_loadu_ps(lanes, p + j), step));
    _mm512_mask_storeu_ps(m + j, lanes, new_m);
    _mm512_mask_storeu_ps(v + j, lanes, new_v);
  }
}

#else

template <int degree>
SPLAXEL_INLINE void colors_of_block(
    const ShInputs& in, const ShDirections& d, const bool* visible, int64_t first, int count, float* colors) {
  for (int i = 0; i < count; ++i) {
    float color[3] = {0.0f, 0.0f, 0.0f};
    if (visible[i]) raw_color<degree>(in, d, first, i, color);
    for (int c = 0; c < 3; ++c) colors[3 * i + c] = std::max(color[c], 0.0f);
  }
}

// Writes v_sh0 and v_rest, rows of 3 and of 3 * in.stored floats, or adds to them, and writes v_bases, all for the
// Gaussians seen: other rows, and coefficients beyond the degree, are left as they are.
template <int degree, bool add>
SPLAXEL_INLINE void rows_vjp(
    const ShInputs& in, const ShDirections& d, const bool* seen, const float* v_colors, int64_t first, int count,
    float* v_sh0, float* v_rest, float (*v_bases)[kBlock]) {
  std::memset(v_bases, 0, sizeof(float) * kMaxShBases * kBlock);
  for (int i = 0; i < count; ++i) {
    if (!seen[i]) continue;
    float color[3], v[3];
    raw_color<degree>(in, d, first, i, color);
    for (int c = 0; c < 3; ++c) v[c] = color_has_gradient(color[c]) ? v_colors[3 * (first + i) + c] : 0.0f;
    const float* rest = in.rest + 3 * in.stored * (first + i);
    float* out = v_rest + 3 * in.stored * i;
    for (int c = 0; c < 3; ++c) v_sh0[3 * i + c] = (add ? v_sh0[3 * i + c] : 0.0f) + d.bases[0][i] * v[c];
    for (int k = 1; k < (degree + 1) * (degree + 1); ++k) {
      const float* coefficient = rest + 3 * (k - 1);
      v_bases[k][i] = coefficient[0] * v[0] + coefficient[1] * v[1] + coefficient[2] * v[2];
      float* sum = out + 3 * (k - 1);
      for (int c = 0; c < 3; ++c) sum[c] = (add ? sum[c] : 0.0f) + d.bases[k][i] * v[c];
    }
  }
}

// Bit by bit: a branch around the root and the division would keep the loop from vectorising.
SPLAXEL_INLINE float chosen(int32_t mask, float if_set, float if_not) {
  int32_t a, b;
  std::memcpy(&a, &if_set, sizeof a);
  std::memcpy(&b, &if_not, sizeof b);
  a = (a & mask) | (b & ~mask);
  std::memcpy(&if_set, &a, sizeof a);
  return if_set;
}

// One step of Adam on `length` floats at p, m and v; where `moves` is zero nothing changes (null: everywhere it does).
SPLAXEL_INLINE void adam_run(
    const AdamGroup& group, const float* gradient, const float* more, const int32_t* moves, int64_t length, float* p,
    float* m, float* v) {
  const AdamGroup a = group;
  const auto step = [&](float g, int32_t mask, int64_t j) __attribute__((always_inline)) {
    const float new_m = m[j] + a.one_less_beta1 * (g - m[j]);
    const float new_v = a.beta2 * v[j] + a.one_less_beta2 * g * g;
    const float new_p = p[j] - a.rate * new_m / (std::sqrt(new_v) * a.root_correction + a.eps);
    p[j] = chosen(mask, new_p, p[j]), m[j] = chosen(mask, new_m, m[j]), v[j] = chosen(mask, new_v, v[j]);
  };
  if (more == nullptr && moves == nullptr) {
#pragma omp simd
    for (int64_t j = 0; j < length; ++j) step(gradient[j], -1, j);
  } else if (more == nullptr) {
#pragma omp simd
    for (int64_t j = 0; j < length; ++j) step(gradient[j], moves[j], j);
  } else if (moves == nullptr) {
#pragma omp simd
    for (int64_t j = 0; j < length; ++j) step(gradient[j] + more[j], -1, j);
  } else {
#pragma omp simd
    for (int64_t j = 0; j < length; ++j) step(gradient[j] + more[j], moves[j], j);
  }
}

#endif

}  // namespace
}  // namespace splaxel
