// The loops over Gaussians for processors with AVX2 and FMA.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "common.h"

// Everything below, and nothing of the headers above, is compiled for AVX2.
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi,bmi2")

#include "gaussians_block.h"

namespace splaxel {

const GaussianKernels kGaussiansAvx2 = {&colors, &colors_vjp, &update_range};

}  // namespace splaxel

#pragma GCC pop_options
