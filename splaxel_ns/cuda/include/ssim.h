// SSIM of one window and its derivatives with respect to the window's filtered moments (Wang et al. 2004).
#pragma once

#include "common.h"

namespace splaxel {

template <class T>
struct SsimPoint {
  T value;
  T v_mean, v_square, v_product;  // derivatives with respect to E[x'], E[x'^2] and E[x' y']
};

// Moments of x' = x - shift and y' = y - shift under the window: variances do not depend on the shift, and lose fewer
// digits the nearer it is to the pixels' values. `squares` is E[x'^2 + y'^2]: SSIM asks for the sum only.
template <class T>
SPLAXEL_INLINE SsimPoint<T> ssim_point(T mean_x, T mean_y, T squares, T xy, T shift) {
  const T mu_x = mean_x + shift, mu_y = mean_y + shift;
  const T a1 = T(2) * mu_x * mu_y + T(kSsimC1);
  const T a2 = T(2) * (xy - mean_x * mean_y) + T(kSsimC2);
  const T b1 = mu_x * mu_x + mu_y * mu_y + T(kSsimC1);
  const T b2 = squares - (mean_x * mean_x + mean_y * mean_y) + T(kSsimC2);
  const T inv = T(1) / (b1 * b2);
  SsimPoint<T> s;
  s.value = a1 * a2 * inv;
  s.v_square = -s.value * b1 * inv;
  s.v_product = T(2) * a1 * inv;
  const T v_mu = T(2) * (mu_y * a2 - mu_x * s.value * b2) * inv;
  s.v_mean = v_mu - T(2) * mean_x * s.v_square - mean_y * s.v_product;
  return s;
}

}  // namespace splaxel
