// One step of Adam on the Gaussians from the gradients of a step's views with respect to their splats. The gradients of
// the parameters exist for one block of Gaussians at a time, in the first caches.
#pragma once

#include <cstdint>
#include <vector>

#include "project.h"

namespace splaxel {

// In the order of the parameters: means, quats, logarithms of the scales, logits of the opacities, sh0, shN.
constexpr size_t kNumParams = 6;

struct AdamGroup {
  float *param, *exp_avg, *exp_avg_sq;
  const float* grad;     // what autograd found beside the views' part, or null
  float rate;            // learning rate / (1 - beta1^step)
  float one_less_beta1, beta2, one_less_beta2;
  float root_correction;  // 1 / sqrt(1 - beta2^step)
  float eps;
};

struct ViewGradients {
  Camera<float> camera;
  const float* center;   // [3]
  const float* extents;  // [N, 2]; zero: not seen
  const float *v_means2d, *v_depths, *v_conics, *v_opacities, *v_colors;
  int degree;
  bool antialiased;
};

struct Update {
  int64_t count;   // N
  int64_t stored;  // K - 1
  AdamGroup groups[kNumParams];
  const float *scales, *opacities;  // activated
  std::vector<ViewGradients> views;
  bool all;  // also the Gaussians that no view saw
};

}  // namespace splaxel
