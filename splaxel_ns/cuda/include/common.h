// Macros and thresholds that every kernel shares. Plain C++: no torch, no threads.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define SPLAXEL_HD __host__ __device__
#define SPLAXEL_INLINE SPLAXEL_HD __forceinline__
#elif defined(__GNUC__)
// always_inline: a loop over Gaussians or pixels vectorises only when its whole body is inlined.
#define SPLAXEL_HD
#define SPLAXEL_INLINE inline __attribute__((always_inline))
#else
#define SPLAXEL_HD
#define SPLAXEL_INLINE inline
#endif

namespace splaxel {

// A Gaussian touches a pixel if and only if its alpha there reaches kAlphaMin: nothing else decides it, so that the
// picture depends on no tile grid, number of partitions or device.
constexpr double kAlphaMin = 1.0 / 255.0;
constexpr double kAlphaMax = 0.999;
// The compositing loop stops after the Gaussian that brings the transmittance to this or below.
constexpr double kStop = 1e-4;
// Added to the diagonal of the projected covariance, pixels squared.
constexpr double kBlur = 0.3;
// The Jacobian of the projection is taken at most this part of the half field of view outside the image.
constexpr double kClampMargin = 0.3;
// Extents are enlarged by this part, so that rounding in the rasteriser never finds a pixel outside the box.
constexpr double kExtentSlack = 1e-5;
// SSIM (Wang et al. 2004): side of the window, its standard deviation in pixels, and the two stabilising constants.
constexpr int kSsimWindow = 11;
constexpr double kSsimSigma = 1.5;
constexpr double kSsimC1 = 0.01 * 0.01;
constexpr double kSsimC2 = 0.03 * 0.03;

template <class T>
SPLAXEL_INLINE T select(bool condition, T if_true, T if_false) {
  return condition ? if_true : if_false;
}

SPLAXEL_INLINE double natural_log(double x) { return std::log(x); }

// Natural logarithm of a positive normal float to 2 ulp, without branches or a library call, so that loops vectorise.
// The mantissa is brought to [sqrt(1/2), sqrt(2)); the polynomial is that of the Cephes library.
SPLAXEL_INLINE float natural_log(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const int32_t shifted = bits - 0x3f3504f3;  // 0x3f3504f3 is sqrt(1/2)
  const float exponent = static_cast<float>(shifted >> 23);
  bits = (shifted & 0x007fffff) + 0x3f3504f3;
  float m;
  std::memcpy(&m, &bits, sizeof m);
  const float f = m - 1.0f;
  const float f2 = f * f;
  float p = 7.0376836292e-2f;
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  return exponent * 0.693147180559945f + (f - 0.5f * f2 + f * f2 * p);
}

}  // namespace splaxel
