// l1_ssim: L1 and SSIM of two images with the gradient, in one pass over the rows. Mathematics: include/ssim.h.
// Letters: H x W pixels; windows are 11x11 and lie inside the image, so there are (H - 10) x (W - 10) of them.
//
// Image rows are cut into bands; a task is one band of one channel. It walks down the rows it needs and keeps two
// rings of 11 rows: moments filtered along the row, and the windows' derivatives spread along the row. A window's
// value exists once its last row is filtered, a pixel's gradient once the last window that holds it is.

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "block.h"
#include "op.h"
#include "ssim.h"

namespace splaxel {
namespace {

constexpr int kTaps = kSsimWindow;
constexpr int kReach = kTaps - 1;
constexpr int64_t kBandRows = 64;

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

struct Job {
  const float *pred, *gt;  // [H, W, 3]
  float* v_pred;           // [H, W, 3], or null when only the values are wanted
  int64_t height, width;
  Weights weights;
  float v_l1, v_ssim;  // derivative of the loss with respect to one |difference| and one window's SSIM
};

struct Sums {
  double l1, ssim;
};

// Rows of one task. `pitch` leaves kReach zeros on both sides of the derivative rows.
struct Scratch {
  explicit Scratch(int64_t width) : pitch((width + 2 * kReach + 15) / 16 * 16 + 16) {
    storage.assign(static_cast<size_t>(pitch * kRows), 0.0f);
  }
  float* row(int64_t index) { return storage.data() + pitch * index; }
  float* pixel(int image, int64_t y) { return row(image * kTaps + y % kTaps); }
  float* moment(int which, int64_t y) { return row((2 + which) * kTaps + y % kTaps); }  // of 5
  float* spread(int which, int64_t y) { return row((7 + which) * kTaps + y % kTaps); }  // of 3
  float* derivative(int which) { return row(10 * kTaps + which); }                      // of 3
  float* products(int which) { return row(10 * kTaps + 3 + which); }                    // of 3
  float* filtered(int which) { return row(10 * kTaps + 6 + which); }                    // of 5
  static constexpr int64_t kRows = 10 * kTaps + 11;
  int64_t pitch;
  std::vector<float> storage;
};

SPLAXEL_INLINE float filter(const float* __restrict row, const Weights& weights) {
  float sum = weights.w[0] * row[0];
  sum += weights.w[1] * row[1];
  sum += weights.w[2] * row[2];
  sum += weights.w[3] * row[3];
  sum += weights.w[4] * row[4];
  sum += weights.w[5] * row[5];
  sum += weights.w[6] * row[6];
  sum += weights.w[7] * row[7];
  sum += weights.w[8] * row[8];
  sum += weights.w[9] * row[9];
  sum += weights.w[10] * row[10];
  return sum;
}

SPLAXEL_INLINE float filter_down(const float* const* rows, int64_t x, const Weights& weights) {
  float sum = weights.w[0] * rows[0][x];
  sum += weights.w[1] * rows[1][x];
  sum += weights.w[2] * rows[2][x];
  sum += weights.w[3] * rows[3][x];
  sum += weights.w[4] * rows[4][x];
  sum += weights.w[5] * rows[5][x];
  sum += weights.w[6] * rows[6][x];
  sum += weights.w[7] * rows[7][x];
  sum += weights.w[8] * rows[8][x];
  sum += weights.w[9] * rows[9][x];
  sum += weights.w[10] * rows[10][x];
  return sum;
}

// What is subtracted from all pixels of a task, see ssim_point: about the mean of the photograph there.
inline float shift_of(const Job& job, int channel, int64_t begin, int64_t end) {
  float sum = 0.0f;
  int64_t count = 0;
  for (int64_t y = begin; y < end; y += 4)
    for (int64_t x = 0; x < job.width; x += 4, ++count) sum += job.gt[3 * (y * job.width + x) + channel];
  return sum / static_cast<float>(count);
}

// Reads row y of one channel and filters its five moments along the row.
SPLAXEL_INLINE void read_row(const Job& job, int channel, float shift, int64_t y, Scratch& s) {
  const float* pred = job.pred + 3 * y * job.width + channel;
  const float* gt = job.gt + 3 * y * job.width + channel;
  float *px = s.pixel(0, y), *py = s.pixel(1, y), *xx = s.products(0), *yy = s.products(1), *xy = s.products(2);
#pragma omp simd
  for (int64_t x = 0; x < job.width; ++x) {
    const float a = pred[3 * x] - shift, b = gt[3 * x] - shift;
    px[x] = a, py[x] = b, xx[x] = a * a, yy[x] = b * b, xy[x] = a * b;
  }
  const Weights w = job.weights;
  float *m0 = s.moment(0, y), *m1 = s.moment(1, y), *m2 = s.moment(2, y), *m3 = s.moment(3, y), *m4 = s.moment(4, y);
  const int64_t windows = job.width - kReach;
#pragma omp simd
  for (int64_t x = 0; x < windows; ++x) {
    m0[x] = filter(px + x, w);
    m1[x] = filter(py + x, w);
    m2[x] = filter(xx + x, w);
    m3[x] = filter(yy + x, w);
    m4[x] = filter(xy + x, w);
  }
}

// The windows whose first row is y: their SSIM, and their derivatives spread along the row.
SPLAXEL_INLINE double window_row(const Job& job, float shift, int64_t y, Scratch& s) {
  const Weights w = job.weights;
  const int64_t windows = job.width - kReach;
  // One moment at a time: eleven row pointers stay in registers, five times as many would not.
  for (int m = 0; m < 5; ++m) {
    const float* rows[kTaps];
    for (int k = 0; k < kTaps; ++k) rows[k] = s.moment(m, y + k);
    float* out = s.filtered(m);
#pragma omp simd
    for (int64_t x = 0; x < windows; ++x) out[x] = filter_down(rows, x, w);
  }
  const float *m0 = s.filtered(0), *m1 = s.filtered(1), *m2 = s.filtered(2), *m3 = s.filtered(3), *m4 = s.filtered(4);
  float *d0 = s.derivative(0) + kReach, *d1 = s.derivative(1) + kReach, *d2 = s.derivative(2) + kReach;
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (int64_t x = 0; x < windows; ++x) {
    const SsimPoint<float> p = ssim_point(m0[x], m1[x], m2[x], m3[x], m4[x], shift);
    d0[x] = p.v_mean, d1[x] = p.v_square, d2[x] = p.v_product;
    sum += static_cast<double>(p.value);
  }
  if (job.v_pred == nullptr) return sum;
  // The filter is symmetric, so its transpose is itself on rows with zeros on both sides.
  float *s0 = s.spread(0, y), *s1 = s.spread(1, y), *s2 = s.spread(2, y);
  d0 -= kReach, d1 -= kReach, d2 -= kReach;
#pragma omp simd
  for (int64_t x = 0; x < job.width; ++x) {
    s0[x] = filter(d0 + x, w);
    s1[x] = filter(d1 + x, w);
    s2[x] = filter(d2 + x, w);
  }
  return sum;
}

SPLAXEL_INLINE float sign_of(float x) { return select(x > 0.0f, 1.0f, select(x < 0.0f, -1.0f, 0.0f)); }

// Gradient of row y: windows y - 10 .. y hold it, those inside the image.
SPLAXEL_INLINE void gradient_row(const Job& job, int channel, int64_t y, const float* zeros, Scratch& s) {
  const Weights w = job.weights;
  for (int m = 0; m < 3; ++m) {
    const float* rows[kTaps];
    for (int k = 0; k < kTaps; ++k) {
      const int64_t window = y - kReach + k;
      rows[k] = window >= 0 && window <= job.height - kTaps ? s.spread(m, window) : zeros;
    }
    float* out = s.filtered(m);
#pragma omp simd
    for (int64_t x = 0; x < job.width; ++x) out[x] = filter_down(rows, x, w);
  }
  const float *g0 = s.filtered(0), *g1 = s.filtered(1), *g2 = s.filtered(2);
  const float *px = s.pixel(0, y), *py = s.pixel(1, y);
  float* out = job.v_pred + 3 * y * job.width + channel;
  const float v_l1 = job.v_l1, v_ssim = job.v_ssim;
#pragma omp simd
  for (int64_t x = 0; x < job.width; ++x) {
    const float v = g0[x] + 2.0f * px[x] * g1[x] + py[x] * g2[x];
    out[3 * x] = v_l1 * sign_of(px[x] - py[x]) + v_ssim * v;
  }
}

SPLAXEL_CLONES
Sums band(const Job& job, int channel, int64_t begin, int64_t end, Scratch& s, const float* zeros) {
  Sums sums = {0.0, 0.0};
  const float shift = shift_of(job, channel, begin, end);
  const int64_t last_window = job.height - kTaps;
  const int64_t top = std::max<int64_t>(begin - kReach, 0), bottom = std::min(end + kReach, job.height);
  for (int64_t y = top; y < bottom; ++y) {
    read_row(job, channel, shift, y, s);
    if (y >= begin && y < end) {
      const float *px = s.pixel(0, y), *py = s.pixel(1, y);
      double sum = 0.0;
#pragma omp simd reduction(+ : sum)
      for (int64_t x = 0; x < job.width; ++x) sum += static_cast<double>(std::abs(px[x] - py[x]));
      sums.l1 += sum;
    }
    const int64_t window = y - kReach;
    if (window < top) continue;
    const double value = window_row(job, shift, window, s);
    if (window >= begin && window < end) sums.ssim += value;
    if (job.v_pred == nullptr) continue;
    if (window >= begin && window < end) gradient_row(job, channel, window, zeros, s);
    if (window != last_window) continue;
    // The last ten rows begin no window.
    for (int64_t rest = std::max(window + 1, begin); rest < end; ++rest) gradient_row(job, channel, rest, zeros, s);
  }
  return sums;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> l1_ssim(
    const at::Tensor& pred, const at::Tensor& gt, double ssim_lambda, bool need_grad) {
  const int64_t height = pred.size(0), width = pred.size(1);
  const double values = 3.0 * static_cast<double>(height) * static_cast<double>(width);
  const double windows = 3.0 * static_cast<double>(height - kReach) * static_cast<double>(width - kReach);
  at::Tensor v_pred = need_grad ? at::empty_like(pred) : at::empty({0}, pred.options());
  const Job job = {pred.const_data_ptr<float>(), gt.const_data_ptr<float>(),
                   need_grad ? v_pred.data_ptr<float>() : nullptr, height, width, make_weights(),
                   static_cast<float>((1.0 - ssim_lambda) / values), static_cast<float>(-ssim_lambda / windows)};
  // Bands have a fixed height, and their sums are added in order: the result does not depend on the threads.
  const int64_t bands = (height + kBandRows - 1) / kBandRows;
  std::vector<Sums> sums(static_cast<size_t>(3 * bands));
  at::parallel_for(0, 3 * bands, 1, [&](int64_t first, int64_t last) {
    Scratch scratch(width);
    const std::vector<float> zeros(static_cast<size_t>(width), 0.0f);
    for (int64_t task = first; task < last; ++task) {
      const int64_t begin = task / 3 * kBandRows, end = std::min(begin + kBandRows, height);
      sums[static_cast<size_t>(task)] = band(job, static_cast<int>(task % 3), begin, end, scratch, zeros.data());
    }
  });
  Sums total = {0.0, 0.0};
  for (const Sums& s : sums) total.l1 += s.l1, total.ssim += s.ssim;
  const double l1 = total.l1 / values, ssim = total.ssim / windows;
  const double result[3] = {(1.0 - ssim_lambda) * l1 + ssim_lambda * (1.0 - ssim), l1, ssim};
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
