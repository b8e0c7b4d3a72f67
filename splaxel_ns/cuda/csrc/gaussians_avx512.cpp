// The loops over Gaussians for processors with AVX-512 (F, BW, DQ, VL).

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "common.h"

// Everything below, and nothing of the headers above, is compiled for AVX-512.
#pragma GCC push_options
#pragma GCC target("prfchw,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi,bmi2")

#define SPLAXEL_AVX512
#include "gaussians_block.h"

namespace splaxel {

const GaussianKernels kGaussiansAvx512 = {&colors, &colors_vjp, &update_range};

}  // namespace splaxel

#pragma GCC pop_options
