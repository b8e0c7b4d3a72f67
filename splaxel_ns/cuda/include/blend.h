// One splat at one pixel, or at a vector of pixels: opacity, blending, and their derivatives.
//
// T is a scalar or a vector of pixels, M its mask; splats are scalars that widen to T. A T needs +, -, *, and the free
// functions fma(a, b, c) = a b + c, fnma(a, b, c) = c - a b, min, abs, exp2, ge, gt, lt, keep(mask, value), which is
// zero where the mask is not set, and fnma_where(mask, a, b, c), which is c there.
//
// With conic [[a, b], [b, c]] and offset (dx, dy) = pixel centre - mean,
//   sigma = (a dx^2 + c dy^2) / 2 + b dx dy = (a (dx + k dy)^2 + d dy^2) / 2,  k = b / a,  d = c - b^2 / a.
// The second form is a sum of positive terms: long thin splats lose no digits, and sigma is never negative.
#pragma once

#include "scalar.h"

namespace splaxel {

constexpr float kLog2E = 1.4426950408889634f;

// What one splat brings to its pixels; the pass that packs visible splats writes it, 64 bytes each.
struct SplatRecord {
  float x, y;          // mean, pixels
  float k, h;          // b / a and -b / c
  float a2, d2;        // a and d times log2(e) / 2: exponents are to base 2
  float log2_opacity;
  float limit;         // log2(opacity / kAlphaMin), slightly enlarged: the ellipse within which alpha >= kAlphaMin
  float r, g, b;
  float depth;         // world units along the optical axis
  float a, c;          // diagonal of the conic
  int32_t tested;      // 1: pairs need the ownership test
  int32_t index;       // among the N Gaussians
};
static_assert(sizeof(SplatRecord) == 64, "one cache line");

// opacity exp(-sigma), not yet clamped.
template <class T>
SPLAXEL_INLINE T unclamped_alpha(const SplatRecord& s, T dx, T dy) {
  const T u = fma(T(s.k), dy, dx);
  const T power = fnma(T(s.d2) * dy, dy, T(s.log2_opacity));
  return exp2(fnma(T(s.a2) * u, u, power));
}

// Smallest exponent sigma log2(e) of the splat in the rectangle [x0, x1] x [y0, y1], relative to its mean. The minimum
// over a rectangle that does not hold the mean lies on an edge that faces the mean: one vertical, one horizontal.
template <class T>
SPLAXEL_INLINE T smallest_exponent(const SplatRecord& s, T x0, T x1, T y0, T y1) {
  const T zero(0.0f);
  const T edge_x = min(max(zero, x0), x1), edge_y = min(max(zero, y0), y1);
  const T y = min(max(T(s.h) * edge_x, y0), y1);
  const T x = min(max(T(-s.k) * edge_y, x0), x1);
  const T u = fma(T(s.k), y, edge_x), v = fma(T(s.k), edge_y, x);
  const T vertical = fma(T(s.a2) * u, u, T(s.d2) * y * y);
  const T horizontal = fma(T(s.a2) * v, v, T(s.d2) * edge_y * edge_y);
  return min(vertical, horizontal);
}

template <class T>
struct BlendState {
  T r, g, b, depth, transmittance;
};

// Blends the splat where the mask says.
template <class T, class M>
SPLAXEL_INLINE void blend_where(const SplatRecord& s, T alpha, M where, BlendState<T>& state) {
  const T weight = keep(where, alpha * state.transmittance);
  state.r = fma(weight, T(s.r), state.r);
  state.g = fma(weight, T(s.g), state.g);
  state.b = fma(weight, T(s.b), state.b);
  state.depth = fma(weight, T(s.depth), state.depth);
  state.transmittance = fnma_where(where, alpha, state.transmittance, state.transmittance);
}

// dL/d(colour, depth) of a pixel, and what a unit of light from behind the current splat is worth.
template <class T>
struct PixelGrad {
  T r, g, b, depth;
  T behind;
};

// Sums over the pixels of one splat; with v = dL/dsigma.
enum Moment { kR, kG, kB, kDepth, kV, kVx, kVy, kVxx, kVxy, kVyy, kAbsX, kAbsY, kNumMoments };

// One step of the walk from the farthest splat to the nearest. alpha and weight = alpha T are those of the forward pass.
// dL/dalpha = T (s - behind) with s = <colour, g> + depth g_D: nothing is divided by 1 - alpha or by T, so opaque
// splats and vanished transmittances are exact.
// Without depth, p.depth is taken for zero.
template <bool depth, class T>
SPLAXEL_INLINE T blend_backward(const SplatRecord& s, T alpha, T weight, PixelGrad<T>& p, T* sums) {
  T light = T(s.b) * p.b;
  if constexpr (depth) light = fma(T(s.b), p.b, T(s.depth) * p.depth);
  light = fma(T(s.r), p.r, fma(T(s.g), p.g, light));
  const T gain = light - p.behind;
  p.behind = fma(alpha, gain, p.behind);
  sums[kR] = fma(weight, p.r, sums[kR]);
  sums[kG] = fma(weight, p.g, sums[kG]);
  sums[kB] = fma(weight, p.b, sums[kB]);
  if constexpr (depth) sums[kDepth] = fma(weight, p.depth, sums[kDepth]);
  // No gradient through a clamped alpha.
  return keep(lt(alpha, T(static_cast<float>(kAlphaMax))), T(0.0f) - weight * gain);
}

template <class T>
SPLAXEL_INLINE void add_moments(T v, T dx, T dy, T* sums) {
  const T vx = v * dx, vy = v * dy;
  sums[kV] = sums[kV] + v;
  sums[kVx] = sums[kVx] + vx;
  sums[kVy] = sums[kVy] + vy;
  sums[kVxx] = fma(vx, dx, sums[kVxx]);
  sums[kVxy] = fma(vx, dy, sums[kVxy]);
  sums[kVyy] = fma(vy, dy, sums[kVyy]);
}

// |dL/dmean2d| of each pixel, summed: the criterion of AbsGS (as gsplat's absgrad).
template <class T>
SPLAXEL_INLINE void add_absolute(const SplatRecord& s, T v, T dx, T dy, T* sums) {
  const T size = abs(v);
  sums[kAbsX] = fma(abs(T(s.a) * fma(T(s.k), dy, dx)), size, sums[kAbsX]);
  sums[kAbsY] = fma(abs(T(s.c) * fnma(T(s.h), dx, dy)), size, sums[kAbsY]);
}

// Gradients of one splat from the sums over its pixels; conic = (a, b, c).
struct SplatPixelsGrad {
  float x, y, a, b, c, opacity;
};

SPLAXEL_INLINE SplatPixelsGrad splat_gradient(const float* sums, const float* conic, float opacity) {
  SplatPixelsGrad grad;
  grad.x = -(conic[0] * sums[kVx] + conic[1] * sums[kVy]);
  grad.y = -(conic[1] * sums[kVx] + conic[2] * sums[kVy]);
  grad.a = 0.5f * sums[kVxx];
  grad.b = sums[kVxy];
  grad.c = 0.5f * sums[kVyy];
  grad.opacity = -sums[kV] / opacity;
  return grad;
}

}  // namespace splaxel
