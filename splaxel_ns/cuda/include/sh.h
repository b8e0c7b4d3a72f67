// Real spherical harmonics to degree 3 in the order and with the signs of gsplat 1.4.0 (Sloan, JCGT 2013).
#pragma once

#include "common.h"

namespace splaxel {

constexpr int kMaxShDegree = 3;
constexpr int kMaxShBases = (kMaxShDegree + 1) * (kMaxShDegree + 1);

// Writes the (degree + 1)^2 bases in the unit direction (x, y, z), `stride` apart.
template <int degree, class T>
SPLAXEL_INLINE void sh_bases(T x, T y, T z, T* b, int64_t stride) {
  b[0] = T(0.2820947917738781);
  if constexpr (degree >= 1) {
    b[1 * stride] = T(-0.48860251190292) * y;
    b[2 * stride] = T(0.48860251190292) * z;
    b[3 * stride] = T(-0.48860251190292) * x;
  }
  const T xx = x * x, yy = y * y, zz = z * z, xy = x * y;
  if constexpr (degree >= 2) {
    b[4 * stride] = T(1.092548430592079) * xy;
    b[5 * stride] = T(-1.092548430592079) * y * z;
    b[6 * stride] = T(0.9461746957575601) * zz - T(0.3153915652525201);
    b[7 * stride] = T(-1.092548430592079) * x * z;
    b[8 * stride] = T(0.5462742152960395) * (xx - yy);
  }
  if constexpr (degree >= 3) {
    const T ring = T(0.4570457994644658) - T(2.285228997322329) * zz;
    b[9 * stride] = T(-0.5900435899266435) * y * (T(3) * xx - yy);
    b[10 * stride] = T(2.890611442640554) * xy * z;
    b[11 * stride] = ring * y;
    b[12 * stride] = z * (T(1.865881662950577) * zz - T(1.119528997770346));
    b[13 * stride] = ring * x;
    b[14 * stride] = T(1.445305721320277) * z * (xx - yy);
    b[15 * stride] = T(-0.5900435899266435) * x * (xx - T(3) * yy);
  }
}

// Gradient with respect to the direction (x, y, z), taken as free coordinates, given the gradient `v` with respect to
// the bases, `stride` apart.
template <int degree, class T>
SPLAXEL_INLINE void sh_bases_vjp(T x, T y, T z, const T* v, int64_t stride, T& vx, T& vy, T& vz) {
  vx = vy = vz = T(0);
  if constexpr (degree >= 1) {
    vx += T(-0.48860251190292) * v[3 * stride];
    vy += T(-0.48860251190292) * v[1 * stride];
    vz += T(0.48860251190292) * v[2 * stride];
  }
  if constexpr (degree >= 2) {
    const T k = T(1.092548430592079);
    const T v4 = v[4 * stride], v5 = v[5 * stride], v6 = v[6 * stride], v7 = v[7 * stride], v8 = v[8 * stride];
    vx += k * (y * v4 - z * v7 + x * v8);
    vy += k * (x * v4 - z * v5 - y * v8);
    vz += T(1.8923493915151202) * z * v6 - k * (y * v5 + x * v7);
  }
  if constexpr (degree >= 3) {
    const T xx = x * x, yy = y * y, zz = z * z, xy = x * y;
    const T v9 = v[9 * stride], v10 = v[10 * stride], v11 = v[11 * stride], v12 = v[12 * stride];
    const T v13 = v[13 * stride], v14 = v[14 * stride], v15 = v[15 * stride];
    const T ring = T(0.4570457994644658) - T(2.285228997322329) * zz;
    const T cubic = T(-1.7701307697799304), mixed = T(2.890611442640554);
    vx += cubic * (T(2) * xy * v9 + (xx - yy) * v15) + mixed * z * (y * v10 + x * v14) + ring * v13;
    vy += cubic * ((xx - yy) * v9 - T(2) * xy * v15) + mixed * z * (x * v10 - y * v14) + ring * v11;
    vz += mixed * (xy * v10 + T(0.5) * (xx - yy) * v14) - T(4.570457994644658) * z * (y * v11 + x * v13) +
          (T(5.597645988851731) * zz - T(1.119528997770346)) * v12;
  }
}

// Whether a colour before the clamp at zero still gets a gradient. As torch.clamp_min, one of exactly zero does, so that
// black Gaussians can brighten; what is zero must not depend on how the instructions round the sum.
constexpr float kLeastColor = -3e-7f;

template <class T>
SPLAXEL_INLINE bool color_has_gradient(T color) {
  return color >= T(kLeastColor);
}

template <class T>
struct Direction {
  T x, y, z, inv_length;  // zero where the two points coincide
};

template <class T>
SPLAXEL_INLINE Direction<T> unit_direction(T x, T y, T z) {
  const T norm2 = x * x + y * y + z * z;
  const T inv = select(norm2 > T(0), T(1) / std::sqrt(norm2), T(0));
  return {x * inv, y * inv, z * inv, inv};
}

// From the gradient with respect to a unit direction to that with respect to the vector it was made from.
template <class T>
SPLAXEL_INLINE void unit_direction_vjp(const Direction<T>& d, T& vx, T& vy, T& vz) {
  const T along = d.x * vx + d.y * vy + d.z * vz;
  vx = (vx - d.x * along) * d.inv_length;
  vy = (vy - d.y * along) * d.inv_length;
  vz = (vz - d.z * along) * d.inv_length;
}

}  // namespace splaxel
