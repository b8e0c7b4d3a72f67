// Content boxes of the partitions, and their pixel regions in one view or their presence in many.
#include "region.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cfloat>
#include <vector>

#include "op.h"

namespace splaxel {
namespace {

constexpr int kSlices = 4;
constexpr int kSides = 6;
constexpr int kHuge = kSlices + kSides;
constexpr int kBoxes = kHuge + 1;
// A Gaussian whose radius exceeds this part of the bulk's longest side is huge.
constexpr float kHugePart = 0.25f;
// The radius where alpha = 1/255 at opacity 1, in standard deviations: sqrt(2 ln 255), rounded up.
constexpr float kCutoff = 3.33f;

// What one thread gathers for one box: lower corner, upper corner, largest radius without slope.
struct Gathered {
  float lo[3] = {INFINITY, INFINITY, INFINITY};
  float hi[3] = {-INFINITY, -INFINITY, -INFINITY};
  float radius = 0;

  void add(const float* low, const float* high, float r) {
    for (int i = 0; i < 3; ++i) lo[i] = std::min(lo[i], low[i]), hi[i] = std::max(hi[i], high[i]);
    radius = std::max(radius, r);
  }
};

// The box of a Gaussian: a slice of the bulk, the side of the bulk it sticks out of most, or the huge ones'.
int choose_box(const float* mean, const float* low, const float* high, float reach, const float* bulk, int axis) {
  float most = 0;
  int side = -1;
  for (int i = 0; i < 3; ++i) {
    if (bulk[i] - low[i] > most) most = bulk[i] - low[i], side = 2 * i;
    if (high[i] - bulk[3 + i] > most) most = high[i] - bulk[3 + i], side = 2 * i + 1;
  }
  const float length = bulk[3 + axis] - bulk[axis];
  if (side < 0) {
    if (!(length < INFINITY)) return 0;
    const int slice = static_cast<int>((mean[axis] - bulk[axis]) / length * kSlices);
    return std::min(std::max(slice, 0), kSlices - 1);
  }
  return reach > kHugePart * length ? kHuge : kSlices + side;
}

std::tuple<at::Tensor, at::Tensor> content_bounds(const at::Tensor& means, const at::Tensor& scales,
                                                  const at::Tensor& owner, const at::Tensor& bulk,
                                                  const at::Tensor& slice_axis, double slope) {
  const int64_t num = means.size(0), num_partitions = bulk.size(0);
  const float* mean = means.const_data_ptr<float>();
  const float* scale = scales.const_data_ptr<float>();
  check_owners(owner, bulk.size(0));
  const int* leaf = owner.const_data_ptr<int>();
  const float* bulks = bulk.const_data_ptr<float>();
  const int* axes = slice_axis.const_data_ptr<int>();
  const int threads = at::get_num_threads();
  std::vector<std::vector<Gathered>> gathered(threads);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      std::vector<Gathered> own(num_partitions * kBoxes);
      for (int64_t i = num * part / threads; i < num * (part + 1) / threads; ++i) {
        const float *m = mean + 3 * i, *s = scale + 3 * i;
        const float radius = kCutoff * std::max(s[0], std::max(s[1], s[2]));
        const float reach = radius * static_cast<float>(slope);
        // Neither NaN nor infinity times zero is zero.
        if (!(m[0] * 0.0f == 0.0f && m[1] * 0.0f == 0.0f && m[2] * 0.0f == 0.0f)) continue;
        if (!(s[0] * 0.0f == 0.0f && s[1] * 0.0f == 0.0f && s[2] * 0.0f == 0.0f)) continue;
        float low[3], high[3];
        for (int k = 0; k < 3; ++k) {
          low[k] = std::max(m[k] - reach, -FLT_MAX), high[k] = std::min(m[k] + reach, FLT_MAX);
        }
        const int box = choose_box(m, low, high, reach, bulks + 6 * leaf[i], axes[leaf[i]]);
        own[leaf[i] * kBoxes + box].add(low, high, radius);
      }
      gathered[part] = std::move(own);
    }
  });
  at::Tensor bounds = at::empty({num_partitions, kBoxes, 2, 3}, float_options());
  at::Tensor radii = at::empty({num_partitions, kBoxes}, float_options());
  float *bound = bounds.data_ptr<float>(), *radius = radii.data_ptr<float>();
  for (int64_t b = 0; b < num_partitions * kBoxes; ++b) {
    Gathered all;
    for (const auto& own : gathered) all.add(own[b].lo, own[b].hi, own[b].radius);
    std::copy(all.lo, all.lo + 3, bound + 6 * b), std::copy(all.hi, all.hi + 3, bound + 6 * b + 3);
    radius[b] = all.radius;
  }
  return {bounds, radii};
}

// The boxes of every partition in one view. Without leaves: its own. With leaves (boundary `exact`): the leaf met by
// the boxes of all partitions, each with its blur.
void boxes_of_view(const RegionCamera& camera, const std::vector<WorldBox>& boxes, const std::vector<WorldBox>& leaves,
                   int64_t num_partitions, std::vector<std::vector<WorldBox>>& result) {
  const int64_t per_partition = num_partitions ? boxes.size() / num_partitions : 0;
  for (auto& list : result) list.clear();
  for (int64_t b = 0; b < static_cast<int64_t>(boxes.size()); ++b) {
    WorldBox box = boxes[b];
    if (box.empty()) continue;
    const double far = depth_range_end(camera, box);
    if (far < camera.near) continue;
    if (leaves.empty()) {
      result[b / per_partition].push_back(box);
      continue;
    }
    box = with_blur(camera, box, far);
    for (int64_t p = 0; p < num_partitions; ++p) {
      const WorldBox part = intersection(box, leaves[p]);
      auto& list = result[p];
      if (part.empty()) continue;
      if (std::any_of(list.begin(), list.end(), [&](const WorldBox& other) { return other.contains(part); })) continue;
      list.erase(std::remove_if(list.begin(), list.end(), [&](const WorldBox& other) { return part.contains(other); }),
                 list.end());
      list.push_back(part);
    }
  }
}

std::vector<WorldBox> read_boxes(const at::Tensor& data) {
  std::vector<WorldBox> boxes(data.numel() / 6);
  for (size_t i = 0; i < boxes.size(); ++i) boxes[i] = world_box(data.const_data_ptr<float>() + 6 * i);
  return boxes;
}

at::Tensor region_spans(const at::Tensor& boxes, const std::optional<at::Tensor>& leaves, const at::Tensor& viewmat,
                        const at::Tensor& K, int64_t width, int64_t height, double near) {
  const int64_t num_partitions = boxes.size(0);
  const RegionCamera camera = region_camera(viewmat.const_data_ptr<float>(), K.const_data_ptr<float>(), width, height, near);
  std::vector<std::vector<WorldBox>> parts(num_partitions);
  boxes_of_view(camera, read_boxes(boxes), leaves ? read_boxes(*leaves) : std::vector<WorldBox>(), num_partitions, parts);
  at::Tensor spans = at::zeros({num_partitions, height, 2}, int_options());
  at::parallel_for(0, num_partitions, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      int* span = spans.data_ptr<int>() + p * height * 2;
      for (const WorldBox& box : parts[p]) {
        const Outline outline = project_box(camera, box);
        int top, bottom;
        row_range(camera, outline, &top, &bottom);
        for (int y = top; y < bottom; ++y) {
          int first, last, *row = span + 2 * y;
          row_span(camera, outline, y, &first, &last);
          if (first == last) continue;
          const bool fresh = row[0] == row[1];
          row[0] = fresh ? first : std::min(row[0], first);
          row[1] = fresh ? last : std::max(row[1], last);
        }
      }
    }
  });
  return spans;
}

bool is_present(const RegionCamera& camera, const WorldBox& box) {
  const Outline outline = project_box(camera, box);
  int top, bottom;
  row_range(camera, outline, &top, &bottom);
  for (int y = top; y < bottom; ++y) {
    int first, last;
    row_span(camera, outline, y, &first, &last);
    if (first < last) return true;
  }
  return false;
}

at::Tensor regions_present(const at::Tensor& boxes, const std::optional<at::Tensor>& leaves, const at::Tensor& viewmats,
                           const at::Tensor& Ks, const at::Tensor& sizes, double near) {
  const int64_t num_partitions = boxes.size(0), num_views = viewmats.size(0);
  const std::vector<WorldBox> own = read_boxes(boxes);
  const std::vector<WorldBox> leaf_boxes = leaves ? read_boxes(*leaves) : std::vector<WorldBox>();
  at::Tensor present = at::zeros({num_views, num_partitions}, at::TensorOptions().dtype(at::kBool));
  bool* flag = present.data_ptr<bool>();
  at::parallel_for(0, num_views, 16, [&](int64_t begin, int64_t end) {
    std::vector<std::vector<WorldBox>> parts(num_partitions);
    for (int64_t v = begin; v < end; ++v) {
      const int* size = sizes.const_data_ptr<int>() + 2 * v;
      const RegionCamera camera =
          region_camera(viewmats.const_data_ptr<float>() + 16 * v, Ks.const_data_ptr<float>() + 9 * v, size[0], size[1], near);
      boxes_of_view(camera, own, leaf_boxes, num_partitions, parts);
      for (int64_t p = 0; p < num_partitions; ++p) {
        flag[v * num_partitions + p] = std::any_of(
            parts[p].begin(), parts[p].end(), [&](const WorldBox& box) { return is_present(camera, box); });
      }
    }
  });
  return present;
}

}  // namespace
}  // namespace splaxel

TORCH_LIBRARY_IMPL(splaxel, CPU, m) {
  m.impl("content_bounds", splaxel::content_bounds);
  m.impl("region_spans", splaxel::region_spans);
  m.impl("regions_present", splaxel::regions_present);
}
