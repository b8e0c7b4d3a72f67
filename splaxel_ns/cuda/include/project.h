// One Gaussian to one view: mean, inverse 2D covariance, opacity and extents, and their derivatives.
// EWA splatting with the conventions of gsplat 1.4.0: pixel centres at +0.5, 0.3 px^2 blur, clamped Jacobian.
//
// The covariance is kept as its factor A = J W R S (two rows, a0 and a1): its determinant is then |a0 x a1|^2, and
// with the blur a sum of positive terms, so that thin splats lose no digits.
#pragma once

#include "common.h"

namespace splaxel {

template <class T>
struct Camera {
  T r00, r01, r02, r10, r11, r12, r20, r21, r22;  // world to camera
  T tx, ty, tz;
  T fx, fy, cx, cy;              // pixels
  T u_min, u_max, v_min, v_max;  // clamp of x/z and y/z inside the Jacobian
  T width, height;               // pixels
  T near, far;                   // world units
};

// viewmat [4, 4] and intrinsics [3, 3], row major.
template <class T, class S>
SPLAXEL_HD inline Camera<T> make_camera(
    const S* viewmat, const S* intrinsics, int64_t width, int64_t height, double near, double far) {
  Camera<T> c;
  c.r00 = T(viewmat[0]), c.r01 = T(viewmat[1]), c.r02 = T(viewmat[2]), c.tx = T(viewmat[3]);
  c.r10 = T(viewmat[4]), c.r11 = T(viewmat[5]), c.r12 = T(viewmat[6]), c.ty = T(viewmat[7]);
  c.r20 = T(viewmat[8]), c.r21 = T(viewmat[9]), c.r22 = T(viewmat[10]), c.tz = T(viewmat[11]);
  const double fx = intrinsics[0], cx = intrinsics[2], fy = intrinsics[4], cy = intrinsics[5];
  c.fx = T(fx), c.fy = T(fy), c.cx = T(cx), c.cy = T(cy);
  const double margin_x = kClampMargin * 0.5 * static_cast<double>(width) / fx;
  const double margin_y = kClampMargin * 0.5 * static_cast<double>(height) / fy;
  c.u_min = T(-(cx / fx + margin_x)), c.u_max = T((static_cast<double>(width) - cx) / fx + margin_x);
  c.v_min = T(-(cy / fy + margin_y)), c.v_max = T((static_cast<double>(height) - cy) / fy + margin_y);
  c.width = T(width), c.height = T(height);
  c.near = T(near), c.far = T(far);
  return c;
}

template <class T>
struct Gaussian {
  T x, y, z;         // mean, world
  T qw, qx, qy, qz;  // rotation, any length
  T sx, sy, sz;      // scales, world units
  T opacity;
};

template <class T>
struct Splat {
  T x, y;     // pixels
  T depth;    // world units along the optical axis
  T a, b, c;  // inverse covariance [[a, b], [b, c]]
  T opacity;
  T extent_x, extent_y;  // pixels; zero: culled
};

template <class T>
struct SplatGrad {
  T x, y, depth, a, b, c, opacity;
};

template <class T>
struct GaussianGrad {
  T x, y, z, qw, qx, qy, qz, sx, sy, sz, opacity;
  T r00, r01, r02, r10, r11, r12, r20, r21, r22, tx, ty, tz;  // of the world-to-camera matrix
};

template <class T>
struct Vec3 {
  T x, y, z;
};

template <class T>
SPLAXEL_INLINE T dot(Vec3<T> a, Vec3<T> b) {
  return a.x * b.x + a.y * b.y + a.z * b.z;
}

template <class T>
SPLAXEL_INLINE Vec3<T> cross_product(Vec3<T> a, Vec3<T> b) {
  return {a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x};
}

// k a + l b
template <class T>
SPLAXEL_INLINE Vec3<T> combine(T k, Vec3<T> a, T l, Vec3<T> b) {
  return {k * a.x + l * b.x, k * a.y + l * b.y, k * a.z + l * b.z};
}

// Everything forward and backward both need.
template <class T>
struct Footprint {
  T x, y, z, inv_z;              // mean in the camera
  T u, v;                        // clamped x/z, y/z
  bool free_u, free_v;           // the clamp does not act
  T inv_norm, qw, qx, qy, qz;    // unit rotation
  Vec3<T> rot0, rot1, rot2;      // rows of R
  Vec3<T> n0, n1, n2;            // rows of R S
  Vec3<T> m0, m1, m2;            // rows of W R S
  Vec3<T> a0, a1;                // rows of J W R S
  T xx, xy, yy;                  // covariance with the blur, pixels^2
  Vec3<T> cross;                 // a0 x a1
  T det_sharp, inv_det;          // without and with the blur
  T norm2;                       // squared length of the quaternion as given
};

template <class T>
SPLAXEL_INLINE Footprint<T> footprint(const Camera<T>& cam, const Gaussian<T>& g) {
  Footprint<T> f;
  f.x = cam.r00 * g.x + cam.r01 * g.y + cam.r02 * g.z + cam.tx;
  f.y = cam.r10 * g.x + cam.r11 * g.y + cam.r12 * g.z + cam.ty;
  f.z = cam.r20 * g.x + cam.r21 * g.y + cam.r22 * g.z + cam.tz;
  f.inv_z = T(1) / f.z;
  const T u = f.x * f.inv_z, v = f.y * f.inv_z;
  f.free_u = (u >= cam.u_min) & (u <= cam.u_max);
  f.free_v = (v >= cam.v_min) & (v <= cam.v_max);
  f.u = select(u < cam.u_min, cam.u_min, select(u > cam.u_max, cam.u_max, u));
  f.v = select(v < cam.v_min, cam.v_min, select(v > cam.v_max, cam.v_max, v));

  f.norm2 = g.qw * g.qw + g.qx * g.qx + g.qy * g.qy + g.qz * g.qz;
  f.inv_norm = T(1) / std::sqrt(f.norm2);
  const T w = f.qw = g.qw * f.inv_norm, x = f.qx = g.qx * f.inv_norm;
  const T y = f.qy = g.qy * f.inv_norm, z = f.qz = g.qz * f.inv_norm;
  f.rot0 = {T(1) - T(2) * (y * y + z * z), T(2) * (x * y - w * z), T(2) * (x * z + w * y)};
  f.rot1 = {T(2) * (x * y + w * z), T(1) - T(2) * (x * x + z * z), T(2) * (y * z - w * x)};
  f.rot2 = {T(2) * (x * z - w * y), T(2) * (y * z + w * x), T(1) - T(2) * (x * x + y * y)};
  f.n0 = {f.rot0.x * g.sx, f.rot0.y * g.sy, f.rot0.z * g.sz};
  f.n1 = {f.rot1.x * g.sx, f.rot1.y * g.sy, f.rot1.z * g.sz};
  f.n2 = {f.rot2.x * g.sx, f.rot2.y * g.sy, f.rot2.z * g.sz};
  f.m0 = {cam.r00 * f.n0.x + cam.r01 * f.n1.x + cam.r02 * f.n2.x,
          cam.r00 * f.n0.y + cam.r01 * f.n1.y + cam.r02 * f.n2.y,
          cam.r00 * f.n0.z + cam.r01 * f.n1.z + cam.r02 * f.n2.z};
  f.m1 = {cam.r10 * f.n0.x + cam.r11 * f.n1.x + cam.r12 * f.n2.x,
          cam.r10 * f.n0.y + cam.r11 * f.n1.y + cam.r12 * f.n2.y,
          cam.r10 * f.n0.z + cam.r11 * f.n1.z + cam.r12 * f.n2.z};
  f.m2 = {cam.r20 * f.n0.x + cam.r21 * f.n1.x + cam.r22 * f.n2.x,
          cam.r20 * f.n0.y + cam.r21 * f.n1.y + cam.r22 * f.n2.y,
          cam.r20 * f.n0.z + cam.r21 * f.n1.z + cam.r22 * f.n2.z};

  const T jx = cam.fx * f.inv_z, jy = cam.fy * f.inv_z;
  f.a0 = {jx * (f.m0.x - f.u * f.m2.x), jx * (f.m0.y - f.u * f.m2.y), jx * (f.m0.z - f.u * f.m2.z)};
  f.a1 = {jy * (f.m1.x - f.v * f.m2.x), jy * (f.m1.y - f.v * f.m2.y), jy * (f.m1.z - f.v * f.m2.z)};
  const T xx = dot(f.a0, f.a0), yy = dot(f.a1, f.a1);
  f.cross = cross_product(f.a0, f.a1);
  f.det_sharp = dot(f.cross, f.cross);
  f.xx = xx + T(kBlur);
  f.yy = yy + T(kBlur);
  f.xy = dot(f.a0, f.a1);
  f.inv_det = T(1) / (f.det_sharp + T(kBlur) * (xx + yy) + T(kBlur * kBlur));
  return f;
}

// A splat whose extents are zero, as are all its other values, where the view does not see the Gaussian: outside
// near..far, alpha below kAlphaMin everywhere, box outside the image, zero quaternion, anything not finite.
template <bool antialiased, class T>
SPLAXEL_INLINE Splat<T> project_gaussian(const Camera<T>& cam, const Gaussian<T>& g) {
  constexpr T smallest = T(1.1754944e-38), largest = T(3.4028234e38);
  const Footprint<T> f = footprint(cam, g);
  Splat<T> s;
  s.x = cam.fx * f.x * f.inv_z + cam.cx;
  s.y = cam.fy * f.y * f.inv_z + cam.cy;
  s.depth = f.z;
  s.a = f.yy * f.inv_det;
  s.b = -f.xy * f.inv_det;
  s.c = f.xx * f.inv_det;
  s.opacity = g.opacity;
  if constexpr (antialiased) s.opacity *= std::sqrt(f.det_sharp * f.inv_det);

  const T ratio = s.opacity * T(1.0 / kAlphaMin);
  bool seen = (s.depth >= cam.near) & (s.depth <= cam.far) & (ratio >= T(1)) & (ratio <= largest);
  seen = seen & (f.norm2 >= smallest) & (f.norm2 <= largest);
  const T reach = T(2) * natural_log(select(seen, ratio, T(1)));
  s.extent_x = T(1 + kExtentSlack) * std::sqrt(reach * f.xx);
  s.extent_y = T(1 + kExtentSlack) * std::sqrt(reach * f.yy);
  seen = seen & (s.x + s.extent_x > T(0)) & (s.x - s.extent_x < cam.width);
  seen = seen & (s.y + s.extent_y > T(0)) & (s.y - s.extent_y < cam.height);
  // A NaN or an infinity anywhere makes this sum NaN or infinite, and the comparison false.
  const T sum = std::abs(s.x) + std::abs(s.y) + std::abs(s.a) + std::abs(s.b) + std::abs(s.c) + s.extent_x + s.extent_y;
  seen = seen & (sum <= largest) & (s.extent_x > T(0)) & (s.extent_y > T(0));

  s.x = select(seen, s.x, T(0)), s.y = select(seen, s.y, T(0)), s.depth = select(seen, s.depth, T(0));
  s.a = select(seen, s.a, T(0)), s.b = select(seen, s.b, T(0)), s.c = select(seen, s.c, T(0));
  s.opacity = select(seen, s.opacity, T(0));
  s.extent_x = select(seen, s.extent_x, T(0)), s.extent_y = select(seen, s.extent_y, T(0));
  return s;
}

// Derivatives of a loss with respect to the Gaussian and the world-to-camera matrix, given those with respect to the
// splat. `seen` is whether the forward pass kept the Gaussian; all derivatives are zero where it did not.
template <bool antialiased, class T>
SPLAXEL_INLINE GaussianGrad<T> project_gaussian_vjp(
    const Camera<T>& cam, const Gaussian<T>& g, bool seen, const SplatGrad<T>& in) {
  const Footprint<T> f = footprint(cam, g);
  GaussianGrad<T> out;

  // Q = inverse of the covariance A A^T + blur, G = gradient with respect to Q: A's gradient is -2 Q G (Q A). The rows
  // of adj(A A^T) A are a1 x (a0 x a1) and (a0 x a1) x a0; written so, Q A loses no digits on needles.
  const T qa = f.yy * f.inv_det, qb = -f.xy * f.inv_det, qc = f.xx * f.inv_det;
  const Vec3<T> p0 = cross_product(f.a1, f.cross), p1 = cross_product(f.cross, f.a0);
  const Vec3<T> b0 = combine(T(kBlur) * f.inv_det, f.a0, f.inv_det, p0);
  const Vec3<T> b1 = combine(T(kBlur) * f.inv_det, f.a1, f.inv_det, p1);
  Vec3<T> w0 = combine(T(-2) * in.a, b0, -in.b, b1), w1 = combine(-in.b, b0, T(-2) * in.c, b1);
  out.opacity = in.opacity;
  if constexpr (antialiased) {
    // Compensation rho = sqrt(det_sharp / det): with S = A A^T, d log rho / dS = (S^-1 - Q) / 2, written as
    // blur / 2 Q S^-1 to avoid the cancellation. A Gaussian that was kept has rho > 0.
    const T rho = std::sqrt(f.det_sharp * f.inv_det);
    out.opacity *= rho;
    const T weight = in.opacity * g.opacity * rho * T(kBlur) / f.det_sharp;
    w0 = combine(T(1), w0, weight, p0), w1 = combine(T(1), w1, weight, p1);
  }
  const Vec3<T> va0 = combine(qa, w0, qb, w1), va1 = combine(qb, w0, qc, w1);

  const T jx = cam.fx * f.inv_z, jy = cam.fy * f.inv_z;
  const T ju = jx * f.u, jv = jy * f.v;
  const Vec3<T> vm0 = {jx * va0.x, jx * va0.y, jx * va0.z};
  const Vec3<T> vm1 = {jy * va1.x, jy * va1.y, jy * va1.z};
  const Vec3<T> vm2 = {-(ju * va0.x + jv * va1.x), -(ju * va0.y + jv * va1.y), -(ju * va0.z + jv * va1.z)};

  // Mean in the camera: through the position of the splat, and through J.
  const T vu = cam.fx * in.x - select(f.free_u, jx * dot(f.m2, va0), T(0));
  const T vv = cam.fy * in.y - select(f.free_v, jy * dot(f.m2, va1), T(0));
  const T cx = vu * f.inv_z;
  const T cy = vv * f.inv_z;
  const T cz = in.depth - (cx * f.x + cy * f.y + dot(f.a0, va0) + dot(f.a1, va1)) * f.inv_z;

  out.x = cam.r00 * cx + cam.r10 * cy + cam.r20 * cz;
  out.y = cam.r01 * cx + cam.r11 * cy + cam.r21 * cz;
  out.z = cam.r02 * cx + cam.r12 * cy + cam.r22 * cz;

  // World-to-camera matrix: W N (N = R S) and W mean + t.
  out.r00 = dot(vm0, f.n0) + cx * g.x, out.r01 = dot(vm0, f.n1) + cx * g.y, out.r02 = dot(vm0, f.n2) + cx * g.z;
  out.r10 = dot(vm1, f.n0) + cy * g.x, out.r11 = dot(vm1, f.n1) + cy * g.y, out.r12 = dot(vm1, f.n2) + cy * g.z;
  out.r20 = dot(vm2, f.n0) + cz * g.x, out.r21 = dot(vm2, f.n1) + cz * g.y, out.r22 = dot(vm2, f.n2) + cz * g.z;
  out.tx = cx, out.ty = cy, out.tz = cz;

  // N = R S.
  const Vec3<T> vn0 = {cam.r00 * vm0.x + cam.r10 * vm1.x + cam.r20 * vm2.x,
                       cam.r00 * vm0.y + cam.r10 * vm1.y + cam.r20 * vm2.y,
                       cam.r00 * vm0.z + cam.r10 * vm1.z + cam.r20 * vm2.z};
  const Vec3<T> vn1 = {cam.r01 * vm0.x + cam.r11 * vm1.x + cam.r21 * vm2.x,
                       cam.r01 * vm0.y + cam.r11 * vm1.y + cam.r21 * vm2.y,
                       cam.r01 * vm0.z + cam.r11 * vm1.z + cam.r21 * vm2.z};
  const Vec3<T> vn2 = {cam.r02 * vm0.x + cam.r12 * vm1.x + cam.r22 * vm2.x,
                       cam.r02 * vm0.y + cam.r12 * vm1.y + cam.r22 * vm2.y,
                       cam.r02 * vm0.z + cam.r12 * vm1.z + cam.r22 * vm2.z};
  out.sx = f.rot0.x * vn0.x + f.rot1.x * vn1.x + f.rot2.x * vn2.x;
  out.sy = f.rot0.y * vn0.y + f.rot1.y * vn1.y + f.rot2.y * vn2.y;
  out.sz = f.rot0.z * vn0.z + f.rot1.z * vn1.z + f.rot2.z * vn2.z;

  // R of a unit quaternion, then the normalisation.
  const Vec3<T> v0 = {vn0.x * g.sx, vn0.y * g.sy, vn0.z * g.sz};
  const Vec3<T> v1 = {vn1.x * g.sx, vn1.y * g.sy, vn1.z * g.sz};
  const Vec3<T> v2 = {vn2.x * g.sx, vn2.y * g.sy, vn2.z * g.sz};
  const T w = f.qw, x = f.qx, y = f.qy, z = f.qz;
  const T uw = T(2) * (x * (v2.y - v1.z) + y * (v0.z - v2.x) + z * (v1.x - v0.y));
  const T ux = T(2) * (y * (v0.y + v1.x) + z * (v0.z + v2.x) + w * (v2.y - v1.z) - T(2) * x * (v1.y + v2.z));
  const T uy = T(2) * (x * (v0.y + v1.x) + z * (v1.z + v2.y) + w * (v0.z - v2.x) - T(2) * y * (v0.x + v2.z));
  const T uz = T(2) * (x * (v0.z + v2.x) + y * (v1.z + v2.y) + w * (v1.x - v0.y) - T(2) * z * (v0.x + v1.y));
  const T along = w * uw + x * ux + y * uy + z * uz;
  out.qw = (uw - w * along) * f.inv_norm, out.qx = (ux - x * along) * f.inv_norm;
  out.qy = (uy - y * along) * f.inv_norm, out.qz = (uz - z * along) * f.inv_norm;

#define SPLAXEL_ZERO_UNLESS_SEEN(field) out.field = select(seen, out.field, T(0))
  SPLAXEL_ZERO_UNLESS_SEEN(x), SPLAXEL_ZERO_UNLESS_SEEN(y), SPLAXEL_ZERO_UNLESS_SEEN(z);
  SPLAXEL_ZERO_UNLESS_SEEN(qw), SPLAXEL_ZERO_UNLESS_SEEN(qx), SPLAXEL_ZERO_UNLESS_SEEN(qy), SPLAXEL_ZERO_UNLESS_SEEN(qz);
  SPLAXEL_ZERO_UNLESS_SEEN(sx), SPLAXEL_ZERO_UNLESS_SEEN(sy), SPLAXEL_ZERO_UNLESS_SEEN(sz);
  SPLAXEL_ZERO_UNLESS_SEEN(opacity);
  SPLAXEL_ZERO_UNLESS_SEEN(r00), SPLAXEL_ZERO_UNLESS_SEEN(r01), SPLAXEL_ZERO_UNLESS_SEEN(r02);
  SPLAXEL_ZERO_UNLESS_SEEN(r10), SPLAXEL_ZERO_UNLESS_SEEN(r11), SPLAXEL_ZERO_UNLESS_SEEN(r12);
  SPLAXEL_ZERO_UNLESS_SEEN(r20), SPLAXEL_ZERO_UNLESS_SEEN(r21), SPLAXEL_ZERO_UNLESS_SEEN(r22);
  SPLAXEL_ZERO_UNLESS_SEEN(tx), SPLAXEL_ZERO_UNLESS_SEEN(ty), SPLAXEL_ZERO_UNLESS_SEEN(tz);
#undef SPLAXEL_ZERO_UNLESS_SEEN
  return out;
}

}  // namespace splaxel
