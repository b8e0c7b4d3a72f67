// What a step needs of all Gaussians beside their drawing: their leaves, the bulk of each partition, and the
// densification statistics of one view.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "op.h"

namespace splaxel {
namespace {

constexpr int64_t kGrain = 8192;

at::Tensor locate(const at::Tensor& points, const at::Tensor& axis, const at::Tensor& threshold,
                  const at::Tensor& children) {
  at::Tensor leaves = at::empty({points.size(0)}, int_options());
  const float *point = points.const_data_ptr<float>(), *cut = threshold.const_data_ptr<float>();
  const int *along = axis.const_data_ptr<int>(), *child = children.const_data_ptr<int>();
  int* leaf = leaves.data_ptr<int>();
  const int root = axis.size(0) > 0 ? 0 : ~0;
  at::parallel_for(0, points.size(0), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int node = root;
      while (node >= 0) node = child[2 * node + (point[3 * i + along[node]] >= cut[node])];
      leaf[i] = ~node;
    }
  });
  return leaves;
}

// The values that `skip` smaller and `skip` larger ones of the column enclose.
std::pair<float, float> without_ends(std::vector<float>& column, size_t skip) {
  const auto low = column.begin() + static_cast<std::ptrdiff_t>(skip);
  std::nth_element(column.begin(), low, column.end());
  const auto high = column.end() - 1 - static_cast<std::ptrdiff_t>(skip);
  if (high > low) std::nth_element(low + 1, high, column.end());
  return {*low, *high};
}

std::tuple<at::Tensor, at::Tensor> bulk_boxes(const at::Tensor& means, const at::Tensor& owner, int64_t num_partitions,
                                              int64_t stride, double quantile, double margin) {
  at::Tensor bulk = at::empty({num_partitions, 2, 3}, float_options()), axis = at::zeros({num_partitions}, int_options());
  check_owners(owner, num_partitions);
  const float* mean = means.const_data_ptr<float>();
  const int* leaf = owner.const_data_ptr<int>();
  std::vector<std::vector<float>> columns(static_cast<size_t>(3 * num_partitions));
  for (int64_t i = 0; i < means.size(0); i += stride) {
    const float* at = mean + 3 * i;
    if (!std::isfinite(at[0]) || !std::isfinite(at[1]) || !std::isfinite(at[2])) continue;
    for (int j = 0; j < 3; ++j) columns[static_cast<size_t>(3 * leaf[i] + j)].push_back(at[j]);
  }
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (int64_t p = 0; p < num_partitions; ++p) {
    float* box = bulk.data_ptr<float>() + 6 * p;
    std::fill(box, box + 3, -kInfinity);
    std::fill(box + 3, box + 6, kInfinity);
    const size_t count = columns[static_cast<size_t>(3 * p)].size();
    if (count == 0) continue;
    const size_t skip = static_cast<size_t>(quantile * static_cast<double>(count - 1));
    float longest = -1.0f;
    for (int j = 0; j < 3; ++j) {
      std::tie(box[j], box[3 + j]) = without_ends(columns[static_cast<size_t>(3 * p + j)], skip);
      if (box[3 + j] - box[j] > longest) longest = box[3 + j] - box[j], axis.data_ptr<int>()[p] = j;
    }
    for (int j = 0; j < 3; ++j) {
      box[j] -= static_cast<float>(margin) * longest;
      box[3 + j] += static_cast<float>(margin) * longest;
    }
  }
  return {bulk, axis};
}

void add_statistics(const at::Tensor& grads, const at::Tensor& extents, const at::Tensor& conics, double half_width,
                    double half_height, double longest_side, at::Tensor& grad2d, at::Tensor& count,
                    const std::optional<at::Tensor>& radii) {
  const float *grad = grads.const_data_ptr<float>(), *extent = extents.const_data_ptr<float>();
  const float* conic = conics.const_data_ptr<float>();
  float *sum = grad2d.data_ptr<float>(), *views = count.data_ptr<float>();
  float* radius = radii.has_value() ? radii->data_ptr<float>() : nullptr;
  const float x = static_cast<float>(half_width), y = static_cast<float>(half_height);
  const float side = static_cast<float>(longest_side);
  at::parallel_for(0, extents.size(0), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (!(extent[2 * i] > 0.0f && extent[2 * i + 1] > 0.0f)) continue;
      const float gx = grad[2 * i] * x, gy = grad[2 * i + 1] * y;
      sum[i] += std::sqrt(gx * gx + gy * gy);
      views[i] += 1.0f;
      if (radius == nullptr) continue;
      const float a = conic[3 * i], b = conic[3 * i + 1], c = conic[3 * i + 2], half = 0.5f * (a - c);
      const float largest = 0.5f * (a + c) + std::sqrt(half * half + b * b);
      // The smaller eigenvalue as determinant over the larger one: the difference would cancel for needles.
      const float smallest = std::max((a * c - b * b) / largest, 1e-12f);
      radius[i] = std::max(radius[i], std::ceil(3.0f / std::sqrt(smallest)) / side);
    }
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(splaxel, CPU, m) {
  m.impl("locate", &locate);
  m.impl("bulk_boxes", &bulk_boxes);
  m.impl("add_statistics", &add_statistics);
}

}  // namespace splaxel
