// What the templates ask of their pixel type, for plain float.
#pragma once

#include "common.h"

namespace splaxel {

SPLAXEL_INLINE float fma(float a, float b, float c) { return a * b + c; }
SPLAXEL_INLINE float fnma(float a, float b, float c) { return c - a * b; }
SPLAXEL_INLINE float min(float a, float b) { return a < b ? a : b; }
SPLAXEL_INLINE float max(float a, float b) { return a > b ? a : b; }
SPLAXEL_INLINE float abs(float a) { return a < 0.0f ? -a : a; }
SPLAXEL_INLINE float exp2(float x) {
#if defined(__CUDA_ARCH__)
  // One instruction, to 2 ulp; the compiler's exp2f adds a scaling for results below 2^-126, which touch nothing.
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return std::exp2(x);
#endif
}
SPLAXEL_INLINE bool ge(float a, float b) { return a >= b; }
SPLAXEL_INLINE bool gt(float a, float b) { return a > b; }
SPLAXEL_INLINE bool lt(float a, float b) { return a < b; }
SPLAXEL_INLINE uint32_t bits(bool mask) { return mask ? 1u : 0u; }
SPLAXEL_INLINE float fnma_where(bool mask, float a, float b, float c) { return mask ? c - a * b : c; }
SPLAXEL_INLINE float keep(bool mask, float value) { return mask ? value : 0.0f; }

// 2^r for -1/2 <= r <= 1/2, to 6e-9 before rounding and exactly 1 at 0: (2^r - 1) / r interpolated at Chebyshev's points.
template <class T>
SPLAXEL_INLINE T exp2_fraction(T r) {
  T p = fma(T(1.5453163e-4f), r, T(1.3390863e-3f));
  p = fma(p, r, T(9.6180826e-3f));
  p = fma(p, r, T(5.5503571e-2f));
  p = fma(p, r, T(2.4022651e-1f));
  p = fma(p, r, T(6.9314719e-1f));
  return fma(p, r, T(1.0f));
}

}  // namespace splaxel
