// One pixel of one partial image, laid over or under the others (paper, ordered composition of partial images).
// W is the transmittance in front of a partition, R the loss's derivative with respect to what lies behind it; neither
// recurrence divides, so opaque partitions need no special case.
#pragma once

#include "common.h"

namespace splaxel {

template <class T>
SPLAXEL_INLINE void blend_partial(
    T color_r, T color_g, T color_b, T depth, T transmittance, T& r, T& g, T& b, T& d, T& w) {
  r += w * color_r;
  g += w * color_g;
  b += w * color_b;
  d += w * depth;
  w *= transmittance;
}

// Back to front: given R behind this partition, returns R in front of it and writes dL/dT = W R.
template <class T>
SPLAXEL_INLINE T blend_partial_vjp(
    T color_r, T color_g, T color_b, T depth, T transmittance, T w, T v_r, T v_g, T v_b, T v_d, T rest, T& v_t) {
  v_t = w * rest;
  return color_r * v_r + color_g * v_g + color_b * v_b + depth * v_d + transmittance * rest;
}

}  // namespace splaxel
