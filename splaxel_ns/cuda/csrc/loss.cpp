// l1_ssim: L1 and SSIM of two images with the gradient, in one pass over the rows. Mathematics: include/ssim.h.
// Letters: H x W pixels; windows are 11x11 and lie inside the image, so there are (H - 10) x (W - 10) of them.
//
// Rows stay as they are, three interleaved channels: a window's next column is 3 floats away, and every loop runs over
// contiguous memory. The image is cut into bands of rows, and where it is wide into strips of columns, so that what a
// task keeps stays in the second cache; strips overlap by the reach of a window. A task walks down the rows it needs and keeps two
// rings of 11 rows: moments filtered along the row, and the windows' derivatives spread along the row. A window's value
// exists once its last row is filtered, a pixel's gradient once the last window that holds it is.

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "block.h"
#include "op.h"
#include "pooled.h"
#include "ssim.h"

namespace splaxel {
namespace {

constexpr int kChannels = 3;
constexpr int kTaps = kSsimWindow;
constexpr int kReach = kTaps - 1;               // rows and columns that hold no first pixel of a window
constexpr int64_t kMargin = kChannels * kReach;  // the same, in floats

struct Weights {
  float w[kTaps];
};

// The outermost weights, whose rounding is finest, are chosen so that the float32 weights sum to 1: otherwise
// E[x^2] - E[x]^2 would be wrong by the excess times E[x]^2, which is not small against C2 in flat regions.
Weights make_weights() {
  Weights weights;
  double sum = 0.0, values[kTaps], inner = 0.0;
  for (int k = 0; k < kTaps; ++k) {
    const double x = k - kTaps / 2;
    sum += values[k] = std::exp(-x * x / (2 * kSsimSigma * kSsimSigma));
  }
  for (int k = 0; k < kTaps; ++k) weights.w[k] = static_cast<float>(values[k] / sum);
  for (int k = 1; k < kTaps - 1; ++k) inner += static_cast<double>(weights.w[k]);
  weights.w[0] = weights.w[kTaps - 1] = static_cast<float>((1.0 - inner) / 2);
  return weights;
}

constexpr int64_t kStripColumns = 1024;

// One strip of the image.
struct Job {
  const float *pred, *gt;  // first pixels of the strip's rows, `stride` floats apart
  float* v_pred;           // likewise, or null when only the values are wanted
  int64_t height, width;   // of the strip, overlap included
  int64_t stride;
  int64_t own_begin, own_end;  // floats of a row that are this strip's: its pixels, and the windows that begin there
  Weights weights;
  float v_l1, v_ssim;  // derivative of the loss with respect to one |difference| and one window's SSIM
  // What the values count of each |difference| [H, W, 3] and of each window [H - 10, W - 10, 3], or null: all. The
  // gradient is that of the whole loss either way.
  const float *counts, *window_counts;
};

struct Sums {
  double l1, ssim;
};

// Rows of one task. `pitch` leaves kMargin zeros on both sides of the derivative rows.
struct Scratch {
  explicit Scratch(int64_t width) : pitch((kChannels * width + 2 * kMargin + 31) / 16 * 16) {
    storage.assign(static_cast<size_t>(pitch * kRows), 0.0f);
  }
  float* row(int64_t index) { return storage.data() + pitch * index; }
  float* pixel(int image, int64_t y) { return row(image * kTaps + y % kTaps); }         // of 2
  float* moment(int which, int64_t y) { return row((2 + which) * kTaps + y % kTaps); }  // of 4
  float* spread(int which, int64_t y) { return row((6 + which) * kTaps + y % kTaps); }  // of 3
  float* derivative(int which) { return row(9 * kTaps + which); }                       // of 3
  float* products(int which) { return row(9 * kTaps + 3 + which); }                     // of 2
  float* filtered(int which) { return row(9 * kTaps + 5 + which); }                     // of 4
  float* shift() { return row(9 * kTaps + 9); }
  float* zeros() { return row(9 * kTaps + 10); }
  float* own() { return row(9 * kTaps + 11); }  // 1 where the strip counts, else 0
  static constexpr int64_t kRows = 9 * kTaps + 12;
  int64_t pitch;
  std::vector<float> storage;
};

SPLAXEL_INLINE float filter_along(const float* row, const Weights& weights) {
  float sum = weights.w[0] * row[0];
#pragma GCC unroll 10
  for (int k = 1; k < kTaps; ++k) sum += weights.w[k] * row[kChannels * k];
  return sum;
}

SPLAXEL_INLINE void filter_down(const float* const* rows, int64_t count, const Weights& weights, float* out) {
  const float *r0 = rows[0], *r1 = rows[1], *r2 = rows[2], *r3 = rows[3], *r4 = rows[4], *r5 = rows[5];
  const float *r6 = rows[6], *r7 = rows[7], *r8 = rows[8], *r9 = rows[9], *r10 = rows[10];
  const float w0 = weights.w[0], w1 = weights.w[1], w2 = weights.w[2], w3 = weights.w[3], w4 = weights.w[4];
  const float w5 = weights.w[5];  // the window is symmetric
#pragma omp simd
  for (int64_t x = 0; x < count; ++x)
    out[x] = w5 * r5[x] + w4 * (r4[x] + r6[x]) + w3 * (r3[x] + r7[x]) + w2 * (r2[x] + r8[x]) +
             (w1 * (r1[x] + r9[x]) + w0 * (r0[x] + r10[x]));
}

// What is subtracted from all pixels of a task, see ssim_point: about the channel's mean in the photograph there.
SPLAXEL_INLINE void choose_shift(const Job& job, int64_t begin, int64_t end, float* shift) {
  for (int c = 0; c < kChannels; ++c) {
    float sum = 0.0f;
    int64_t count = 0;
    for (int64_t y = begin; y < end; y += 4)
      for (int64_t x = 0; x < job.width; x += 4, ++count) sum += job.gt[y * job.stride + kChannels * x + c];
    for (int64_t x = 0; x < job.width; ++x) shift[kChannels * x + c] = sum / static_cast<float>(count);
  }
}

// Reads row y and filters its moments along the row. Returns the row's sum of |pred - gt|.
SPLAXEL_INLINE double read_row(const Job& job, int64_t y, Scratch& s) {
  const int64_t length = kChannels * job.width;
  const float *pred = job.pred + y * job.stride, *gt = job.gt + y * job.stride;
  const float *shift = s.shift(), *own = s.own();
  float *px = s.pixel(0, y), *py = s.pixel(1, y), *squares = s.products(0), *xy = s.products(1);
  double l1 = 0.0;
#pragma omp simd reduction(+ : l1)
  for (int64_t x = 0; x < length; ++x) {
    const float a = pred[x] - shift[x], b = gt[x] - shift[x];
    px[x] = a, py[x] = b, squares[x] = a * a + b * b, xy[x] = a * b;
    l1 += static_cast<double>(own[x] * std::abs(pred[x] - gt[x]));
  }
  if (job.counts != nullptr) {
    const float* counts = job.counts + y * job.stride;
    l1 = 0.0;
#pragma omp simd reduction(+ : l1)
    for (int64_t x = 0; x < length; ++x) l1 += static_cast<double>(own[x] * counts[x] * std::abs(pred[x] - gt[x]));
  }
  const Weights w = job.weights;
  const float* sources[4] = {px, py, squares, xy};
  for (int m = 0; m < 4; ++m) {
    const float* source = sources[m];
    float* out = s.moment(m, y);
#pragma omp simd
    for (int64_t x = 0; x < length - kMargin; ++x) out[x] = filter_along(source + x, w);
  }
  return l1;
}

// The windows whose first row is y: the sum of their SSIM, and their derivatives spread along the row.
SPLAXEL_INLINE double window_row(const Job& job, int64_t y, Scratch& s) {
  const int64_t length = kChannels * job.width;
  const Weights w = job.weights;
  for (int m = 0; m < 4; ++m) {
    const float* rows[kTaps];
    for (int k = 0; k < kTaps; ++k) rows[k] = s.moment(m, y + k);
    filter_down(rows, length - kMargin, w, s.filtered(m));
  }
  const float *m0 = s.filtered(0), *m1 = s.filtered(1), *m2 = s.filtered(2), *m3 = s.filtered(3);
  const float *shift = s.shift(), *own = s.own();
  float *d0 = s.derivative(0) + kMargin, *d1 = s.derivative(1) + kMargin, *d2 = s.derivative(2) + kMargin;
  double sum = 0.0;
  if (job.window_counts == nullptr) {
#pragma omp simd reduction(+ : sum)
    for (int64_t x = 0; x < length - kMargin; ++x) {
      const SsimPoint<float> p = ssim_point(m0[x], m1[x], m2[x], m3[x], shift[x]);
      d0[x] = p.v_mean, d1[x] = p.v_square, d2[x] = p.v_product;
      sum += static_cast<double>(own[x] * p.value);
    }
  } else {
    const float* counts = job.window_counts + y * (job.stride - kMargin);
#pragma omp simd reduction(+ : sum)
    for (int64_t x = 0; x < length - kMargin; ++x) {
      const SsimPoint<float> p = ssim_point(m0[x], m1[x], m2[x], m3[x], shift[x]);
      d0[x] = p.v_mean, d1[x] = p.v_square, d2[x] = p.v_product;
      sum += static_cast<double>(own[x] * counts[x] * p.value);
    }
  }
  if (job.v_pred == nullptr) return sum;
  // The filter is symmetric, so its transpose is itself on rows with zeros on both sides.
  for (int m = 0; m < 3; ++m) {
    const float* source = s.derivative(m);
    float* out = s.spread(m, y);
#pragma omp simd
    for (int64_t x = 0; x < length; ++x) out[x] = filter_along(source + x, w);
  }
  return sum;
}

SPLAXEL_INLINE float sign_of(float x) { return select(x > 0.0f, 1.0f, select(x < 0.0f, -1.0f, 0.0f)); }

// Gradient of row y: windows y - 10 .. y hold it, those inside the image.
SPLAXEL_INLINE void gradient_row(const Job& job, int64_t y, Scratch& s) {
  const int64_t length = kChannels * job.width;
  for (int m = 0; m < 3; ++m) {
    const float* rows[kTaps];
    for (int k = 0; k < kTaps; ++k) {
      const int64_t window = y - kReach + k;
      rows[k] = window >= 0 && window <= job.height - kTaps ? s.spread(m, window) : s.zeros();
    }
    filter_down(rows, length, job.weights, s.filtered(m));
  }
  const float *g0 = s.filtered(0), *g1 = s.filtered(1), *g2 = s.filtered(2);
  const float *px = s.pixel(0, y), *py = s.pixel(1, y);
  const float *pred = job.pred + y * job.stride, *gt = job.gt + y * job.stride;
  float* out = job.v_pred + y * job.stride;
  const float v_l1 = job.v_l1, v_ssim = job.v_ssim;
  const int64_t first = job.own_begin, last = job.own_end;
#pragma omp simd
  for (int64_t x = first; x < last; ++x)
    out[x] = v_l1 * sign_of(pred[x] - gt[x]) + v_ssim * (g0[x] + 2.0f * px[x] * g1[x] + py[x] * g2[x]);
}

SPLAXEL_INLINE Sums band_body(const Job& job, int64_t begin, int64_t end, Scratch& s) {
  Sums sums = {0.0, 0.0};
  choose_shift(job, begin, end, s.shift());
  std::fill(s.own(), s.own() + s.pitch, 0.0f);
  std::fill(s.own() + job.own_begin, s.own() + job.own_end, 1.0f);
  // The strip before may have been wider.
  for (int m = 0; m < 3; ++m) std::fill(s.derivative(m) + kChannels * job.width, s.derivative(m) + s.pitch, 0.0f);
  const int64_t last_window = job.height - kTaps;
  const int64_t top = std::max<int64_t>(begin - kReach, 0), bottom = std::min(end + kReach, job.height);
  for (int64_t y = top; y < bottom; ++y) {
    const double l1 = read_row(job, y, s);
    if (y >= begin && y < end) sums.l1 += l1;
    const int64_t window = y - kReach;
    if (window < top) continue;
    const double value = window_row(job, window, s);
    if (window >= begin && window < end) sums.ssim += value;
    if (job.v_pred == nullptr) continue;
    if (window >= begin && window < end) gradient_row(job, window, s);
    if (window != last_window) continue;
    // The last ten rows begin no window.
    for (int64_t rest = std::max(window + 1, begin); rest < end; ++rest) gradient_row(job, rest, s);
  }
  return sums;
}

SPLAXEL_DISPATCH(
    Sums, band, (const Job& job, int64_t begin, int64_t end, Scratch& s), (job, begin, end, s))

// Columns [begin, begin + columns) of an image, with those around that windows over them reach.
Job strip_of(const Job& image, int64_t begin, int64_t columns) {
  const int64_t end = std::min(begin + columns, image.width);
  const int64_t left = std::max<int64_t>(begin - kReach, 0), right = std::min(end + kReach, image.width);
  Job job = image;
  job.pred += kChannels * left;
  job.gt += kChannels * left;
  if (job.v_pred != nullptr) job.v_pred += kChannels * left;
  if (job.counts != nullptr) job.counts += kChannels * left;
  if (job.window_counts != nullptr) job.window_counts += kChannels * left;
  job.width = right - left;
  job.own_begin = kChannels * (begin - left);
  job.own_end = kChannels * (end - left);
  return job;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> l1_ssim(
    const at::Tensor& pred, const at::Tensor& gt, double ssim_lambda, bool need_grad,
    const std::optional<at::Tensor>& counts, const std::optional<at::Tensor>& window_counts, int64_t full_height,
    int64_t full_width) {
  const int64_t height = pred.size(0), width = pred.size(1);
  const double values = 3.0 * static_cast<double>(full_height) * static_cast<double>(full_width);
  const double windows = 3.0 * static_cast<double>(full_height - kReach) * static_cast<double>(full_width - kReach);
  at::Tensor v_pred = pooled_floats(need_grad ? pred.sizes() : at::IntArrayRef({0}));
  const Job image = {pred.const_data_ptr<float>(), gt.const_data_ptr<float>(),
                     need_grad ? v_pred.data_ptr<float>() : nullptr, height, width, kChannels * width, 0,
                     kChannels * width, make_weights(), static_cast<float>((1.0 - ssim_lambda) / values),
                     static_cast<float>(-ssim_lambda / windows),
                     counts.has_value() ? counts->const_data_ptr<float>() : nullptr,
                     window_counts.has_value() ? window_counts->const_data_ptr<float>() : nullptr};
  // The bands and strips depend on the image alone, and their sums are added in order: the result does not depend on
  // the threads.
  // Their number is even, which suits two threads; below 64 rows the ten above and below cost too much.
  const int64_t bands = 2 * ((height + 127) / 128), rows = (height + bands - 1) / bands;
  const int64_t strips = (width + kStripColumns - 1) / kStripColumns, columns = (width + strips - 1) / strips;
  std::vector<Sums> sums(static_cast<size_t>(bands * strips), Sums{0.0, 0.0});
  at::parallel_for(0, bands * strips, 1, [&](int64_t first, int64_t last) {
    Scratch scratch(std::min(columns + 2 * kReach, width));
    for (int64_t k = first; k < last; ++k) {
      const int64_t begin = std::min(k / strips * rows, height), end = std::min(begin + rows, height);
      const Job job = strip_of(image, k % strips * columns, columns);
      if (begin < end) sums[static_cast<size_t>(k)] = band(job, begin, end, scratch);
    }
  });
  Sums total = {0.0, 0.0};
  for (const Sums& s : sums) total.l1 += s.l1, total.ssim += s.ssim;
  // A share counts 1 - SSIM over its own windows only, so that shares add up.
  double counted = windows;
  if (window_counts.has_value()) counted = window_counts->sum(at::kDouble).item<double>();
  const double l1 = total.l1 / values, ssim = total.ssim / windows;
  const double result[3] = {(1.0 - ssim_lambda) * l1 + ssim_lambda * (counted / windows - ssim), l1, ssim};
  at::Tensor out[3];
  for (int k = 0; k < 3; ++k) {
    out[k] = at::empty({}, pred.options());
    *out[k].data_ptr<float>() = static_cast<float>(result[k]);
  }
  return {out[0], out[1], out[2], v_pred};
}

}  // namespace

TORCH_LIBRARY_IMPL(splaxel, CPU, m) { m.impl("l1_ssim", &l1_ssim); }

}  // namespace splaxel
