// splat_spans: the rows and columns that the projected Gaussians of each partition can touch. A splat's pixels lie in the
// box means2d +- extents; a partition's row runs from the first to the last column of such boxes.

#include <algorithm>
#include <cmath>
#include <mutex>
#include <vector>

#include "op.h"

namespace splaxel {
namespace {

struct Rows {
  Rows(int64_t count, int width) : first(static_cast<size_t>(count), width), last(static_cast<size_t>(count), 0) {}
  std::vector<int> first, last;  // [P, H]
};

// Pixels whose centres lie in [middle - reach, middle + reach], half open, clipped to 0..size.
void pixel_range(float middle, float reach, int size, int* begin, int* end) {
  *begin = static_cast<int>(std::floor(std::max(middle - reach - 0.5f, 0.0f)));
  *end = static_cast<int>(std::ceil(std::min(middle + reach + 0.5f, static_cast<float>(size))));
}

at::Tensor splat_spans(const at::Tensor& means2d, const at::Tensor& extents, const at::Tensor& owner,
                       int64_t num_partitions, int64_t width, int64_t height) {
  const float *mean = means2d.const_data_ptr<float>(), *extent = extents.const_data_ptr<float>();
  const int* leaf = owner.const_data_ptr<int>();
  check_owners(owner, num_partitions);
  const int64_t count = num_partitions * height;
  Rows all(count, static_cast<int>(width));
  std::mutex merging;
  at::parallel_for(0, means2d.size(0), 16384, [&](int64_t begin, int64_t end) {
    Rows own(count, static_cast<int>(width));
    for (int64_t i = begin; i < end; ++i) {
      if (!(extent[2 * i] > 0.0f)) continue;
      int left, right, top, bottom;
      pixel_range(mean[2 * i], extent[2 * i], static_cast<int>(width), &left, &right);
      pixel_range(mean[2 * i + 1], extent[2 * i + 1], static_cast<int>(height), &top, &bottom);
      if (left >= right) continue;
      const int64_t row = leaf[i] * height;
      for (int64_t y = row + top; y < row + bottom; ++y) {
        own.first[static_cast<size_t>(y)] = std::min(own.first[static_cast<size_t>(y)], left);
        own.last[static_cast<size_t>(y)] = std::max(own.last[static_cast<size_t>(y)], right);
      }
    }
    const std::lock_guard<std::mutex> guard(merging);  // minima and maxima: the order does not matter
    for (size_t k = 0; k < own.first.size(); ++k) {
      all.first[k] = std::min(all.first[k], own.first[k]);
      all.last[k] = std::max(all.last[k], own.last[k]);
    }
  });
  at::Tensor spans = at::zeros({num_partitions, height, 2}, owner.options());
  int* span = spans.data_ptr<int>();
  for (int64_t k = 0; k < count; ++k) {
    const int first = all.first[static_cast<size_t>(k)], last = all.last[static_cast<size_t>(k)];
    if (first < last) span[2 * k] = first, span[2 * k + 1] = last;
  }
  return spans;
}

}  // namespace

TORCH_LIBRARY_IMPL(splaxel, CPU, m) { m.impl("splat_spans", &splat_spans); }

}  // namespace splaxel
