// Adam (Kingma and Ba 2015) on one number, as torch.optim.Adam without weight decay.
#pragma once

#include "common.h"

namespace splaxel {

struct AdamRates {
  float rate;  // learning rate / (1 - beta1^step)
  float one_less_beta1, beta2, one_less_beta2;
  float root_correction;  // 1 / sqrt(1 - beta2^step)
  float eps;
};

inline AdamRates adam_rates(double lr, double beta1, double beta2, double eps, double step) {
  return {static_cast<float>(lr / (1.0 - std::pow(beta1, step))),
          static_cast<float>(1.0 - beta1),
          static_cast<float>(beta2),
          static_cast<float>(1.0 - beta2),
          static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, step))),
          static_cast<float>(eps)};
}

SPLAXEL_INLINE void adam_step(const AdamRates& a, float grad, float& param, float& exp_avg, float& exp_avg_sq) {
  exp_avg += a.one_less_beta1 * (grad - exp_avg);
  exp_avg_sq = a.beta2 * exp_avg_sq + a.one_less_beta2 * grad * grad;
  param -= a.rate * exp_avg / (std::sqrt(exp_avg_sq) * a.root_correction + a.eps);
}

}  // namespace splaxel
