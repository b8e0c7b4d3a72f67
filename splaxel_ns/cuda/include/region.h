// Which pixels a world box can reach: clip at the near plane, project, hull, dilate, row spans. Plain C++, double, for
// CPU and GPU: what both must decide alike.
//
// Design section 3; paper section 4.3. A Gaussian's pixel lies within sqrt(0.3 * 2 ln 255) = 1.823 pixels of the
// projection of a point of its content box (the rest of its support is in the box's padding): hence the dilation by 2.
#pragma once

#include <cmath>

#include "common.h"

namespace splaxel {

constexpr double kDilation = 2.0;
// Radius in pixels that the blur of the projection adds at opacity 1: sqrt(kBlur * 2 ln 255), rounded up.
constexpr double kBlurRadius = 1.8234;
// A box this many near distances large defeats the arithmetic of the hull; it counts as filling the image.
constexpr double kLargestBox = 1e9;
// 8 corners and a crossing of the near plane on each of the 12 edges.
constexpr int kMaxHull = 20;

SPLAXEL_HD inline double lesser(double a, double b) { return b < a ? b : a; }
SPLAXEL_HD inline double greater(double a, double b) { return a < b ? b : a; }

struct RegionCamera {
  double rotation[9], translation[3];  // world to camera, OpenCV axes
  double fx, fy, cx, cy;
  double near;
  int width, height;
};

struct WorldBox {
  double lo[3], hi[3];

  SPLAXEL_HD bool empty() const { return !(lo[0] <= hi[0] && lo[1] <= hi[1] && lo[2] <= hi[2]); }
  SPLAXEL_HD bool contains(const WorldBox& other) const {
    for (int i = 0; i < 3; ++i)
      if (other.lo[i] < lo[i] || other.hi[i] > hi[i]) return false;
    return true;
  }
};

// Of a world-to-camera matrix [4, 4] and intrinsics [3, 3].
SPLAXEL_HD inline RegionCamera region_camera(
    const float* viewmat, const float* intrinsics, int width, int height, double near) {
  RegionCamera camera;
  for (int i = 0; i < 3; ++i) {
    for (int j = 0; j < 3; ++j) camera.rotation[3 * i + j] = viewmat[4 * i + j];
    camera.translation[i] = viewmat[4 * i + 3];
  }
  camera.fx = intrinsics[0], camera.fy = intrinsics[4], camera.cx = intrinsics[2], camera.cy = intrinsics[5];
  camera.near = near, camera.width = width, camera.height = height;
  return camera;
}

// Of lower and upper corner.
SPLAXEL_HD inline WorldBox world_box(const float* corners) {
  WorldBox box;
  for (int i = 0; i < 3; ++i) box.lo[i] = corners[i], box.hi[i] = corners[3 + i];
  return box;
}

struct Pixel {
  double x, y;
};

// The convex outline of a box in the image; rows are bounded by scanning its edges.
struct Outline {
  Pixel points[2 * kMaxHull];
  int count = 0;             // 0: nothing of the box lies beyond the near plane
  bool whole_image = false;  // then `points` is not used
};

SPLAXEL_HD inline double depth_range_end(const RegionCamera& camera, const WorldBox& box) {
  double end = camera.translation[2];
  for (int i = 0; i < 3; ++i) end += camera.rotation[6 + i] * (camera.rotation[6 + i] > 0 ? box.hi[i] : box.lo[i]);
  return end;
}

// The box enlarged by the blur's radius at its far end: a pixel is drawn by the leaf that holds its own point, which the
// blur can put just outside the Gaussian's box.
SPLAXEL_HD inline WorldBox with_blur(const RegionCamera& camera, WorldBox box, double far) {
  const double radius = kBlurRadius * far / lesser(camera.fx, camera.fy);
  for (int i = 0; i < 3; ++i) box.lo[i] -= radius, box.hi[i] += radius;
  return box;
}

SPLAXEL_HD inline WorldBox intersection(const WorldBox& a, const WorldBox& b) {
  WorldBox part;
  for (int i = 0; i < 3; ++i) part.lo[i] = greater(a.lo[i], b.lo[i]), part.hi[i] = lesser(a.hi[i], b.hi[i]);
  return part;
}

SPLAXEL_HD inline double cross(const Pixel& o, const Pixel& a, const Pixel& b) {
  return (a.x - o.x) * (b.y - o.y) - (a.y - o.y) * (b.x - o.x);
}

// Andrew's monotone chain; `points` is sorted in place. Returns the number of corners written to `hull`.
SPLAXEL_HD inline int convex_hull(Pixel* points, int count, Pixel* hull) {
  for (int i = 1; i < count; ++i) {
    const Pixel point = points[i];
    int at = i;
    for (; at > 0 && (point.x < points[at - 1].x || (point.x == points[at - 1].x && point.y < points[at - 1].y)); --at)
      points[at] = points[at - 1];
    points[at] = point;
  }
  int size = 0;
  for (int i = 0; i < count; ++i) {
    while (size >= 2 && cross(hull[size - 2], hull[size - 1], points[i]) <= 0) --size;
    hull[size++] = points[i];
  }
  const int lower = size + 1;
  for (int i = count - 2; i >= 0; --i) {
    while (size >= lower && cross(hull[size - 2], hull[size - 1], points[i]) <= 0) --size;
    hull[size++] = points[i];
  }
  return count > 1 && size > 2 ? size - 1 : 1;
}

SPLAXEL_HD inline Outline project_box(const RegionCamera& camera, const WorldBox& box) {
  Outline outline;
  double corner[8][3];
  double largest = 0;
  bool in_front = false;
  for (int c = 0; c < 8; ++c) {
    const double world[3] = {c & 1 ? box.hi[0] : box.lo[0], c & 2 ? box.hi[1] : box.lo[1], c & 4 ? box.hi[2] : box.lo[2]};
    for (int i = 0; i < 3; ++i) {
      const double* row = camera.rotation + 3 * i;
      corner[c][i] = row[0] * world[0] + row[1] * world[1] + row[2] * world[2] + camera.translation[i];
      largest = greater(largest, std::abs(corner[c][i]));
    }
    in_front |= corner[c][2] >= camera.near;
  }
  if (!in_front) return outline;
  if (!(largest <= kLargestBox * camera.near)) {
    outline.whole_image = true;
    return outline;
  }
  Pixel points[kMaxHull];
  int count = 0;
  const auto add = [&](double x, double y, double z) {
    points[count++] = {camera.fx * x / z + camera.cx, camera.fy * y / z + camera.cy};
  };
  for (int c = 0; c < 8; ++c) {
    if (corner[c][2] >= camera.near) add(corner[c][0], corner[c][1], corner[c][2]);
    for (int bit = 1; bit < 8; bit <<= 1) {
      if (c & bit) continue;
      const double *a = corner[c], *b = corner[c | bit];
      if ((a[2] >= camera.near) == (b[2] >= camera.near)) continue;
      const double t = (camera.near - a[2]) / (b[2] - a[2]);
      add(a[0] + t * (b[0] - a[0]), a[1] + t * (b[1] - a[1]), camera.near);
    }
  }
  outline.count = convex_hull(points, count, outline.points);
  return outline;
}

// Rows the dilated outline can reach: [first, last), clipped to the image.
SPLAXEL_HD inline void row_range(const RegionCamera& camera, const Outline& outline, int* first, int* last) {
  if (outline.whole_image) {
    *first = 0, *last = camera.height;
    return;
  }
  double top = INFINITY, bottom = -INFINITY, left = INFINITY, right = -INFINITY;
  for (int i = 0; i < outline.count; ++i) {
    top = lesser(top, outline.points[i].y), bottom = greater(bottom, outline.points[i].y);
    left = lesser(left, outline.points[i].x), right = greater(right, outline.points[i].x);
  }
  *first = *last = 0;
  if (outline.count == 0 || right + kDilation < 0.5 || left - kDilation > camera.width - 0.5) return;
  const double begin = greater(0.0, std::ceil(top - kDilation - 0.5));
  const double end = lesser(camera.height, std::floor(bottom + kDilation - 0.5) + 1);
  if (begin < end) *first = static_cast<int>(begin), *last = static_cast<int>(end);
}

// Columns [first, last) of row y whose centres lie within kDilation of the outline (in the larger of dx and dy).
SPLAXEL_HD inline void row_span(const RegionCamera& camera, const Outline& outline, int y, int* first, int* last) {
  *first = 0, *last = camera.width;
  if (outline.whole_image) return;
  const double top = y + 0.5 - kDilation, bottom = y + 0.5 + kDilation;
  double left = INFINITY, right = -INFINITY;
  for (int i = 0; i < outline.count; ++i) {
    const Pixel from = outline.points[i], to = outline.points[i + 1 < outline.count ? i + 1 : 0];
    const Pixel a = from.y > to.y ? to : from, b = from.y > to.y ? from : to;
    if (b.y < top || a.y > bottom) continue;
    // The part of the edge inside the strip of rows; its ends are the extremes of x there.
    const double slope = b.y > a.y ? (b.x - a.x) / (b.y - a.y) : 0.0;
    const double start = a.y < top ? a.x + (top - a.y) * slope : a.x;
    const double stop = b.y > bottom ? a.x + (bottom - a.y) * slope : b.x;
    left = lesser(left, lesser(start, stop));
    right = greater(right, greater(start, stop));
  }
  const double begin = greater(0.0, std::ceil(left - kDilation - 0.5));
  const double end = lesser(camera.width, std::floor(right + kDilation - 0.5) + 1);
  *first = *last = 0;
  if (begin < end) *first = static_cast<int>(begin), *last = static_cast<int>(end);
}

}  // namespace splaxel
