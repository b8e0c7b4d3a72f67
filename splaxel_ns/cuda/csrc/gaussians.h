// Loops over blocks of Gaussians that read rows of spherical harmonics, and the instruction sets they are compiled for.
#pragma once

#include "sh_block.h"
#include "update.h"

namespace splaxel {

// Each works on the blocks [begin, end) of kBlock Gaussians of `count`.
struct GaussianKernels {
  void (*colors)(int64_t degree, const ShInputs& in, int64_t count, int64_t begin, int64_t end, float* colors);
  // v_center: three sums per block.
  void (*colors_vjp)(
      int64_t degree, const ShInputs& in, const ShGradients& out, int64_t count, int64_t begin, int64_t end,
      double* v_center);
  void (*update)(const Update& update, int64_t begin, int64_t end);
};

extern const GaussianKernels kGaussiansAvx512;
extern const GaussianKernels kGaussiansAvx2;
extern const GaussianKernels kGaussiansPortable;

}  // namespace splaxel
