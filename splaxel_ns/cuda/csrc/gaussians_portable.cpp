// The loops over Gaussians for any processor.

#include "gaussians_block.h"

namespace splaxel {

const GaussianKernels kGaussiansPortable = {&colors, &colors_vjp, &update_range};

}  // namespace splaxel
