// Which partition owns a pair (splat, pixel): the leaf of the KD-tree that holds the point of the pixel's ray at the
// splat's depth. The same templates serve scalars and vectors of pixels; see blend.h for what T must offer.
#pragma once

#include "scalar.h"

namespace splaxel {

// The pixel rays of a pinhole camera in world space, and the tree that cuts that space.
struct RayCamera {
  float center[3];      // world units
  float rotation[9];    // world to camera, row major
  float inv_fx, inv_fy, cx, cy;  // pixels
  float max_slope;      // largest |x/z| + |y/z| of a pixel
};

// Of a world-to-camera matrix [4, 4] and intrinsics [3, 3].
SPLAXEL_INLINE RayCamera ray_camera(const float* viewmat, const float* intrinsics, int width, int height) {
  RayCamera cam;
  for (int row = 0; row < 3; ++row)
    for (int j = 0; j < 3; ++j) cam.rotation[3 * row + j] = viewmat[4 * row + j];
  for (int j = 0; j < 3; ++j) {
    double center = 0.0;
    for (int row = 0; row < 3; ++row) center -= static_cast<double>(viewmat[4 * row + j]) * viewmat[4 * row + 3];
    cam.center[j] = static_cast<float>(center);
  }
  cam.inv_fx = 1.0f / intrinsics[0];
  cam.inv_fy = 1.0f / intrinsics[4];
  cam.cx = intrinsics[2];
  cam.cy = intrinsics[5];
  cam.max_slope = max(abs(cam.cx), abs(static_cast<float>(width) - cam.cx)) * cam.inv_fx +
                  max(abs(cam.cy), abs(static_cast<float>(height) - cam.cy)) * cam.inv_fy;
  return cam;
}

struct Tree {
  int num_partitions;
  const int32_t* axis;      // [P - 1]
  const float* threshold;   // [P - 1]
  const int32_t* children;  // [P - 1, 2]: a node if >= 0, else ~leaf
  const float* lo;          // [P, 3]
  const float* hi;          // [P, 3]
  SPLAXEL_INLINE int root() const { return num_partitions > 1 ? 0 : ~0; }
};

constexpr int kMaxTreeDepth = 64;

template <class T>
struct Point {
  T at[3];
};

// The point of the ray through image position (px, py) whose depth along the optical axis is `depth`.
template <class T>
SPLAXEL_INLINE Point<T> point_on_ray(const RayCamera& cam, T px, T py, float depth) {
  const T u = (px - T(cam.cx)) * T(cam.inv_fx), v = (py - T(cam.cy)) * T(cam.inv_fy);
  Point<T> point;
  for (int j = 0; j < 3; ++j) {
    const T direction = fma(T(cam.rotation[j]), u, fma(T(cam.rotation[3 + j]), v, T(cam.rotation[6 + j])));
    point.at[j] = fma(T(depth), direction, T(cam.center[j]));
  }
  return point;
}

// A splat's world box: its mean +- what its extents in pixels reach at its depth, enlarged beyond all rounding.
struct WorldBox {
  float lo[3], hi[3];
};

SPLAXEL_INLINE WorldBox pairs_box(
    const RayCamera& cam, const float* mean, const float* reach, float extent_x, float extent_y, float depth) {
  WorldBox box;
  for (int j = 0; j < 3; ++j) {
    const float exact = reach != nullptr
                            ? reach[j]
                            : depth * (std::fabs(cam.rotation[j]) * extent_x * cam.inv_fx +
                                       std::fabs(cam.rotation[3 + j]) * extent_y * cam.inv_fy);
    const float rounding =
        2e-6f * (std::fabs(mean[j]) + std::fabs(cam.center[j]) + std::fabs(depth) * (1.0f + cam.max_slope));
    const float half = 1.001f * exact + rounding;
    box.lo[j] = mean[j] - half;
    box.hi[j] = mean[j] + half;
  }
  return box;
}

SPLAXEL_INLINE bool inside_leaf(const Tree& tree, int leaf, const WorldBox& box) {
  bool inside = true;
  for (int j = 0; j < 3; ++j)
    inside = inside && box.lo[j] >= tree.lo[3 * leaf + j] && box.hi[j] < tree.hi[3 * leaf + j];
  return inside;
}

// Whether for_leaves_touched would visit the leaf: its faces are the tree's thresholds.
SPLAXEL_INLINE bool touches_leaf(const Tree& tree, int leaf, const WorldBox& box) {
  bool touches = true;
  for (int j = 0; j < 3; ++j)
    touches = touches && box.hi[j] >= tree.lo[3 * leaf + j] && box.lo[j] < tree.hi[3 * leaf + j];
  return touches;
}

// Calls visit(leaf) for every leaf that the box touches, in the order of their numbers.
template <class Visit>
inline void for_leaves_touched(const Tree& tree, const WorldBox& box, Visit visit) {
  int stack[kMaxTreeDepth];
  int top = 0;
  stack[top++] = tree.root();
  while (top > 0) {
    const int node = stack[--top];
    if (node < 0) {
      visit(~node);
      continue;
    }
    const int axis = tree.axis[node];
    if (box.hi[axis] >= tree.threshold[node]) stack[top++] = tree.children[2 * node + 1];
    if (box.lo[axis] < tree.threshold[node]) stack[top++] = tree.children[2 * node];
  }
}

SPLAXEL_INLINE int locate(const Tree& tree, const float* point) {
  int node = tree.root();
  while (node >= 0) node = tree.children[2 * node + (point[tree.axis[node]] >= tree.threshold[node] ? 1 : 0)];
  return ~node;
}

// The same without an index into the point, which would put it into a GPU thread's local memory.
SPLAXEL_INLINE int locate(const Tree& tree, const Point<float>& point) {
  int node = tree.root();
  while (node >= 0) {
    const int axis = tree.axis[node];
    const float value = select(axis == 0, point.at[0], select(axis == 1, point.at[1], point.at[2]));
    node = tree.children[2 * node + (value >= tree.threshold[node] ? 1 : 0)];
  }
  return ~node;
}

// Lanes whose point lies in the leaf; the faces are the tree's thresholds, so this is the walk's own answer.
template <class T>
SPLAXEL_INLINE uint32_t lanes_in_leaf(const Tree& tree, int leaf, const Point<T>& point, uint32_t lanes) {
  for (int j = 0; j < 3; ++j) {
    lanes &= bits(ge(point.at[j], T(tree.lo[3 * leaf + j])));
    lanes &= bits(lt(point.at[j], T(tree.hi[3 * leaf + j])));
  }
  return lanes;
}

// Of the lanes given, those whose point lies in a leaf that renders their pixel. region(leaf) -> lanes it renders.
template <class T, class Region>
SPLAXEL_INLINE uint32_t lanes_rendered_elsewhere(
    const Tree& tree, const Point<T>& point, uint32_t lanes, Region region) {
  struct {
    int node;
    uint32_t lanes;
  } stack[kMaxTreeDepth];
  int top = 0;
  uint32_t found = 0;
  stack[top++] = {tree.root(), lanes};
  while (top > 0) {
    const auto item = stack[--top];
    if (item.lanes == 0) continue;
    if (item.node < 0) {
      found |= item.lanes & region(~item.node);
      continue;
    }
    const uint32_t right = item.lanes & bits(ge(point.at[tree.axis[item.node]], T(tree.threshold[item.node])));
    stack[top++] = {tree.children[2 * item.node + 1], right};
    stack[top++] = {tree.children[2 * item.node], item.lanes & ~right};
  }
  return found;
}

}  // namespace splaxel
