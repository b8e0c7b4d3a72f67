// project, one block of Gaussians: memory layout around the mathematics of include/project.h.
#pragma once

#include "block.h"
#include "project.h"

namespace splaxel {

struct ProjectPointers {
  const float *means, *quats, *scales, *opacities;
  float *means2d, *depths, *conics, *out_opacities, *extents;
};

struct ProjectGradPointers {
  const float *means, *quats, *scales, *opacities, *extents;
  const float *v_means2d, *v_depths, *v_conics, *v_out_opacities;
  float *v_means, *v_quats, *v_scales, *v_opacities;
};

struct GaussianArrays {
  float mean[3][kBlock], quat[4][kBlock], scale[3][kBlock], opacity[1][kBlock];

  SPLAXEL_INLINE Gaussian<float> at(int i) const {
    return {mean[0][i], mean[1][i], mean[2][i], quat[0][i], quat[1][i], quat[2][i], quat[3][i],
            scale[0][i], scale[1][i], scale[2][i], opacity[0][i]};
  }
};

SPLAXEL_INLINE void load_gaussians(
    const float* means, const float* quats, const float* scales, const float* opacities, int64_t first, int count,
    GaussianArrays& in) {
  load_block<3>(means + 3 * first, count, in.mean);
  load_block<4>(quats + 4 * first, count, in.quat);
  load_block<3>(scales + 3 * first, count, in.scale);
  load_block<1>(opacities + first, count, in.opacity);
}

template <bool antialiased>
SPLAXEL_INLINE void project_block(const Camera<float>& camera, int64_t first, int count, const ProjectPointers& p) {
  GaussianArrays in;
  float mean2d[2][kBlock], depth[1][kBlock], conic[3][kBlock], opacity[1][kBlock], extent[2][kBlock];
  load_gaussians(p.means, p.quats, p.scales, p.opacities, first, count, in);
  const Camera<float> cam = camera;
#pragma omp simd
  for (int i = 0; i < kBlock; ++i) {
    const Splat<float> s = project_gaussian<antialiased>(cam, in.at(i));
    mean2d[0][i] = s.x, mean2d[1][i] = s.y;
    depth[0][i] = s.depth;
    conic[0][i] = s.a, conic[1][i] = s.b, conic[2][i] = s.c;
    opacity[0][i] = s.opacity;
    extent[0][i] = s.extent_x, extent[1][i] = s.extent_y;
  }
  store_block<2>(mean2d, count, p.means2d + 2 * first);
  store_block<1>(depth, count, p.depths + first);
  store_block<3>(conic, count, p.conics + 3 * first);
  store_block<1>(opacity, count, p.out_opacities + first);
  store_block<2>(extent, count, p.extents + 2 * first);
}

// `v_pose`: 12 sums, the gradient of the top three rows of the world-to-camera matrix.
template <bool antialiased>
SPLAXEL_INLINE void project_block_vjp(
    const Camera<float>& camera, int64_t first, int count, const ProjectGradPointers& p, double* v_pose) {
  GaussianArrays in;
  float v_mean2d[2][kBlock], v_depth[1][kBlock], v_conic[3][kBlock], v_out_opacity[1][kBlock], extent[2][kBlock];
  float v_mean[3][kBlock], v_quat[4][kBlock], v_scale[3][kBlock], v_opacity[1][kBlock], pose[12][kBlock];
  load_gaussians(p.means, p.quats, p.scales, p.opacities, first, count, in);
  load_block<2>(p.extents + 2 * first, count, extent);
  load_block<2>(p.v_means2d + 2 * first, count, v_mean2d);
  load_block<1>(p.v_depths + first, count, v_depth);
  load_block<3>(p.v_conics + 3 * first, count, v_conic);
  load_block<1>(p.v_out_opacities + first, count, v_out_opacity);
  const Camera<float> cam = camera;
#pragma omp simd
  for (int i = 0; i < kBlock; ++i) {
    const SplatGrad<float> v = {v_mean2d[0][i], v_mean2d[1][i], v_depth[0][i],      v_conic[0][i],
                                v_conic[1][i],  v_conic[2][i],  v_out_opacity[0][i]};
    const GaussianGrad<float> g = project_gaussian_vjp<antialiased>(cam, in.at(i), extent[0][i] > 0.0f, v);
    v_mean[0][i] = g.x, v_mean[1][i] = g.y, v_mean[2][i] = g.z;
    v_quat[0][i] = g.qw, v_quat[1][i] = g.qx, v_quat[2][i] = g.qy, v_quat[3][i] = g.qz;
    v_scale[0][i] = g.sx, v_scale[1][i] = g.sy, v_scale[2][i] = g.sz;
    v_opacity[0][i] = g.opacity;
    pose[0][i] = g.r00, pose[1][i] = g.r01, pose[2][i] = g.r02, pose[3][i] = g.tx;
    pose[4][i] = g.r10, pose[5][i] = g.r11, pose[6][i] = g.r12, pose[7][i] = g.ty;
    pose[8][i] = g.r20, pose[9][i] = g.r21, pose[10][i] = g.r22, pose[11][i] = g.tz;
  }
  store_block<3>(v_mean, count, p.v_means + 3 * first);
  store_block<4>(v_quat, count, p.v_quats + 4 * first);
  store_block<3>(v_scale, count, p.v_scales + 3 * first);
  store_block<1>(v_opacity, count, p.v_opacities + first);
  for (int k = 0; k < 12; ++k) v_pose[k] = sum_block(pose[k]);
}

}  // namespace splaxel
