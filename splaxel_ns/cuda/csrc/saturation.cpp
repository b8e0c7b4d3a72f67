// The op update_saturation: after a view was drawn, which of its (pixel, partition) pairs to leave out next time.
// Rule: include/saturation.h. Letters: K partitions whose region has pixels, front to back, Q of them drawn, M pruned
// pairs, H x W pixels, B bytes in a row of bits.

#include "saturation.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "buffer.h"
#include "op.h"
#include "parallel.h"

namespace splaxel {
namespace {

using at::Tensor;

enum Count { kPairs, kPruned, kFlipped, kLeft, kNumCounts };

struct View {
  int count, height, width, row_bytes;
  float eps;
  const float* transmittances;  // [Q, H, W]
  const int32_t* slots;         // [K] into Q, -1: not drawn
  const int32_t* spans;         // [K, H, 2]
  const uint8_t* bits;          // [K, H, B] of the pairs that were left out
  const uint8_t* budgets;       // [M] of those, partition by partition, row by row
  const int64_t* row_starts;    // [K, H] into the budgets
};

struct Result {
  uint8_t* bits;     // [K, H, B]
  uint8_t* budgets;  // [K, H, W], set where a bit is
};

// Of eight pixels.
bool any_below(const float* w, float eps) {
  int found = 0;
  for (int i = 0; i < 8; ++i) found |= w[i] < eps;
  return found != 0;
}

bool none_above(const float* w, float eps) {
  int found = 0;
  for (int i = 0; i < 8; ++i) found |= w[i] > eps;
  return found == 0;
}

int count_bits(const uint8_t* row, int bytes) {
  int count = 0;
  for (int i = 0; i < bytes; ++i) count += __builtin_popcount(row[i]);
  return count;
}

// Work memory of one thread, for one row.
struct Row {
  std::vector<float> in_front;   // [K + 1, W]: the transmittance in front of each partition, and behind the last
  std::vector<float> residual;   // [W]
  Row(int count, int width)
      : in_front(static_cast<size_t>(count + 1) * width), residual(static_cast<size_t>(width)) {}
};

// Transmittances of row y. Returns whether some pair with pixels behind it is saturated.
bool light_of_row(const View& view, int y, Row& row) {
  const int width = view.width;
  float* w = row.in_front.data();
  std::fill(w, w + width, 1.0f);
  bool dark = false;
  for (int k = 0; k < view.count; ++k, w += width) {
    float* behind = w + width;
    if (view.slots[k] < 0) {
      std::copy(w, w + width, behind);
      continue;
    }
    const float* t = view.transmittances + (static_cast<int64_t>(view.slots[k]) * view.height + y) * width;
    int below = 0;
#pragma omp simd reduction(| : below)
    for (int x = 0; x < width; ++x) {
      below |= w[x] < view.eps;
      behind[x] = w[x] * t[x];
    }
    dark |= below != 0;
  }
  return dark;
}

void update_row(const View& view, int y, Row& row, Result& result, int64_t (*counts)[kNumCounts]) {
  const int width = view.width, bytes = view.row_bytes;
  const bool dark = light_of_row(view, y, row);
  const float* last = row.in_front.data() + static_cast<int64_t>(view.count) * width;
  std::copy(last, last + width, row.residual.data());
  for (int k = 0; k < view.count; ++k) {
    const int64_t at = static_cast<int64_t>(k) * view.height + y;
    const uint8_t* old_bits = view.bits + at * bytes;
    uint8_t* bits = result.bits + at * bytes;
    std::memset(bits, 0, static_cast<size_t>(bytes));
    const int begin = std::max(view.spans[2 * at], 0), end = std::min(view.spans[2 * at + 1], width);
    if (begin >= end) continue;
    counts[k][kPairs] += end - begin;
    const int num_old = count_bits(old_bits, bytes);
    if (!dark && num_old == 0) {
      counts[k][kLeft] += end - begin;
      continue;
    }
    const uint8_t* old_budget = view.budgets + view.row_starts[at];
    uint8_t* budgets = result.budgets + at * width;
    const float* w = row.in_front.data() + static_cast<int64_t>(k) * width;
    const bool drawn = view.slots[k] >= 0;
    // Most bytes lie all in the light or all in the dark, and stay there.
    for (int byte = 0; byte < bytes; ++byte) {
      const int first = std::max(8 * byte, begin), past = std::min(8 * byte + 8, end);
      const uint8_t old = old_bits[byte];
      if (first >= past) {  // bits outside the region are forgotten
        old_budget += __builtin_popcount(old);
      } else if (past - first == 8 && old == 0 && !(drawn && any_below(w + first, view.eps))) {
        counts[k][kLeft] += 8;
      } else if (past - first == 8 && old == 0xff && none_above(&row.residual[static_cast<size_t>(first)], view.eps)) {
        std::memcpy(budgets + first, old_budget, 8);
        old_budget += 8;
        bits[byte] = 0xff;
        counts[k][kPruned] += 8;
      } else {
        for (int x = 8 * byte; x < 8 * byte + 8; ++x) {
          const bool pruned = old >> x % 8 & 1;
          const uint8_t budget = pruned ? *old_budget++ : 0;
          if (x < first || x >= past) continue;
          bool prune = false;
          if (pruned) {
            budgets[x] = budget;
            counts[k][kPruned] += 1;
            prune = !takes_residual(unpack_budget(budget, view.eps), view.eps, row.residual[static_cast<size_t>(x)]);
            counts[k][kFlipped] += !prune;
          } else if (drawn && w[x] < view.eps) {
            budgets[x] = pack_budget(w[x] - w[width + x], view.eps);  // W (1 - T)
            prune = true;
          }
          bits[byte] |= static_cast<uint8_t>(prune << x % 8);
          counts[k][kLeft] += !prune;
        }
      }
    }
  }
}

// The budgets of the pairs whose bit is set, in order.
Tensor compact(const View& view, const Result& result) {
  const int64_t rows = static_cast<int64_t>(view.count) * view.height;
  int64_t total = 0;
  for (int64_t at = 0; at < rows; ++at) total += count_bits(result.bits + at * view.row_bytes, view.row_bytes);
  Tensor budgets = at::empty({total}, at::TensorOptions().dtype(at::kByte));
  uint8_t* out = budgets.mutable_data_ptr<uint8_t>();
  for (int64_t at = 0; at < rows; ++at) {
    const uint8_t* bits = result.bits + at * view.row_bytes;
    const uint8_t* row = result.budgets + at * view.width;
    for (int byte = 0; byte < view.row_bytes; ++byte) {
      if (bits[byte] == 0xff) {
        std::memcpy(out, row + 8 * byte, 8);
        out += 8;
        continue;
      }
      for (uint32_t rest = bits[byte]; rest != 0; rest &= rest - 1) *out++ = row[8 * byte + __builtin_ctz(rest)];
    }
  }
  return budgets;
}

std::tuple<Tensor, Tensor, Tensor> update_saturation(
    const Tensor& transmittances, const Tensor& slots, const Tensor& spans, const Tensor& bits, const Tensor& budgets,
    double eps) {
  View view;
  view.count = static_cast<int>(spans.size(0));
  view.height = static_cast<int>(transmittances.size(1));
  view.width = static_cast<int>(transmittances.size(2));
  view.row_bytes = static_cast<int>(bits.size(2));
  view.eps = static_cast<float>(eps);
  view.transmittances = transmittances.const_data_ptr<float>();
  view.slots = slots.const_data_ptr<int32_t>();
  view.spans = spans.const_data_ptr<int32_t>();
  view.bits = bits.const_data_ptr<uint8_t>();
  view.budgets = budgets.const_data_ptr<uint8_t>();
  const int64_t rows = static_cast<int64_t>(view.count) * view.height;
  std::vector<int64_t> row_starts(static_cast<size_t>(rows));
  int64_t start = 0;
  for (int64_t at = 0; at < rows; ++at) {
    row_starts[static_cast<size_t>(at)] = start;
    start += count_bits(view.bits + at * view.row_bytes, view.row_bytes);
  }
  TORCH_CHECK_VALUE(start == budgets.size(0), "There are ", budgets.size(0), " budgets for ", start, " pruned pairs.");
  view.row_starts = row_starts.data();

  Tensor new_bits = at::empty(bits.sizes(), bits.options());
  Tensor counts = at::zeros({view.count, kNumCounts}, at::TensorOptions().dtype(at::kLong));
  const auto dense = uninitialised<uint8_t>(rows * view.width);
  Result result{new_bits.mutable_data_ptr<uint8_t>(), dense.get()};
  const int chunks = chunks_for(view.height, std::max(at::get_num_threads(), 1), 16);
  std::vector<std::vector<int64_t>> partial(
      static_cast<size_t>(chunks), std::vector<int64_t>(static_cast<size_t>(view.count) * kNumCounts, 0));
  for_chunks(chunks, [&](int chunk) {
    const Chunk part(view.height, chunk, chunks);
    Row row(view.count, view.width);
    auto* own = reinterpret_cast<int64_t(*)[kNumCounts]>(partial[static_cast<size_t>(chunk)].data());
    for (int64_t y = part.begin; y < part.end; ++y) update_row(view, static_cast<int>(y), row, result, own);
  });
  int64_t* count = counts.mutable_data_ptr<int64_t>();
  for (const auto& own : partial)
    for (size_t i = 0; i < own.size(); ++i) count[i] += own[i];
  return {new_bits, compact(view, result), counts};
}

}  // namespace
}  // namespace splaxel

TORCH_LIBRARY_IMPL(splaxel, CPU, m) { m.impl("update_saturation", &splaxel::update_saturation); }
