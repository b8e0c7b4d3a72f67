// One pixel of a view: which partitions' pixels are saturated, and which come back (paper, sections 4.3 and 8.2).
// W is the transmittance in front of a partition. A pair (pixel, partition) with W < eps is pruned; its budget, W (1 - T),
// is what it took of the light when it was drawn last.
#pragma once

#include "common.h"

namespace splaxel {

// Budgets are below eps and kept in 8 bits.
template <class T>
SPLAXEL_INLINE uint8_t pack_budget(T budget, T eps) {
  const T steps = budget / eps * T(255) + T(0.5);
  return static_cast<uint8_t>(steps < T(255) ? steps : T(255));
}

template <class T>
SPLAXEL_INLINE T unpack_budget(uint8_t steps, T eps) {
  return static_cast<T>(steps) * (eps / T(255));
}

// Whether a pruned pair comes back, given the transmittance behind everything that was drawn, less the budgets of the
// pruned pairs in front of it; takes its budget off that residual.
template <class T>
SPLAXEL_INLINE bool takes_residual(T budget, T eps, T& residual) {
  if (!(residual > eps) || residual < budget) {
    residual = T(0);  // nothing is left for those behind
    return false;
  }
  residual -= budget;
  return true;
}

}  // namespace splaxel
