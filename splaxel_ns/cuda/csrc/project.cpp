// project: all Gaussians of the process to one view, forward and backward. Mathematics: include/project.h.
// Letters: N Gaussians.

#include <ATen/ops/empty_like.h>

#include <tuple>
#include <vector>

#include "block.h"
#include "op.h"
#include "project.h"

namespace splaxel {
namespace {

struct ForwardPointers {
  const float *means, *quats, *scales, *opacities;
  float *means2d, *depths, *conics, *out_opacities, *extents;
};

struct BackwardPointers {
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
SPLAXEL_INLINE void forward_block(const Camera<float>& camera, int64_t first, int count, const ForwardPointers& p) {
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
SPLAXEL_INLINE void backward_block(
    const Camera<float>& camera, int64_t first, int count, const BackwardPointers& p, double* v_pose) {
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

SPLAXEL_CLONES
void project_block(const Camera<float>& camera, bool antialiased, int64_t first, int count, const ForwardPointers& p) {
  antialiased ? forward_block<true>(camera, first, count, p) : forward_block<false>(camera, first, count, p);
}

SPLAXEL_CLONES
void project_block_vjp(
    const Camera<float>& camera, bool antialiased, int64_t first, int count, const BackwardPointers& p,
    double* v_pose) {
  antialiased ? backward_block<true>(camera, first, count, p, v_pose)
              : backward_block<false>(camera, first, count, p, v_pose);
}

using Tensors5 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Tensors5 project(
    const at::Tensor& means, const at::Tensor& quats, const at::Tensor& scales, const at::Tensor& opacities,
    const at::Tensor& viewmat, const at::Tensor& K, int64_t width, int64_t height, double near, double far,
    bool antialiased) {
  const int64_t n = means.size(0);
  const auto options = means.options();
  at::Tensor means2d = at::empty({n, 2}, options), depths = at::empty({n}, options);
  at::Tensor conics = at::empty({n, 3}, options), out_opacities = at::empty({n}, options);
  at::Tensor extents = at::empty({n, 2}, options);
  const auto camera =
      make_camera<float>(viewmat.const_data_ptr<float>(), K.const_data_ptr<float>(), width, height, near, far);
  const ForwardPointers p = {
      means.const_data_ptr<float>(), quats.const_data_ptr<float>(), scales.const_data_ptr<float>(),
      opacities.const_data_ptr<float>(), means2d.data_ptr<float>(), depths.data_ptr<float>(),
      conics.data_ptr<float>(), out_opacities.data_ptr<float>(), extents.data_ptr<float>()};
  at::parallel_for(0, num_blocks(n), 16, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = b * kBlock;
      project_block(camera, antialiased, first, static_cast<int>(std::min<int64_t>(kBlock, n - first)), p);
    }
  });
  return {means2d, depths, conics, out_opacities, extents};
}

Tensors5 project_backward(
    const at::Tensor& means, const at::Tensor& quats, const at::Tensor& scales, const at::Tensor& opacities,
    const at::Tensor& viewmat, const at::Tensor& K, const at::Tensor& extents, int64_t width, int64_t height,
    bool antialiased, const at::Tensor& v_means2d, const at::Tensor& v_depths, const at::Tensor& v_conics,
    const at::Tensor& v_out_opacities) {
  const int64_t n = means.size(0);
  at::Tensor v_means = at::empty_like(means), v_quats = at::empty_like(quats), v_scales = at::empty_like(scales);
  at::Tensor v_opacities = at::empty_like(opacities), v_viewmat = at::zeros({4, 4}, viewmat.options());
  const auto camera =
      make_camera<float>(viewmat.const_data_ptr<float>(), K.const_data_ptr<float>(), width, height, 0.0, 0.0);
  const BackwardPointers p = {
      means.const_data_ptr<float>(), quats.const_data_ptr<float>(), scales.const_data_ptr<float>(),
      opacities.const_data_ptr<float>(), extents.const_data_ptr<float>(), v_means2d.const_data_ptr<float>(),
      v_depths.const_data_ptr<float>(), v_conics.const_data_ptr<float>(), v_out_opacities.const_data_ptr<float>(),
      v_means.data_ptr<float>(), v_quats.data_ptr<float>(), v_scales.data_ptr<float>(),
      v_opacities.data_ptr<float>()};
  // One partial sum per block, added in order: the pose gradient does not depend on the number of threads.
  std::vector<double> v_pose(static_cast<size_t>(12 * num_blocks(n)));
  at::parallel_for(0, num_blocks(n), 16, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = b * kBlock;
      const int count = static_cast<int>(std::min<int64_t>(kBlock, n - first));
      project_block_vjp(camera, antialiased, first, count, p, v_pose.data() + 12 * b);
    }
  });
  float* v_matrix = v_viewmat.data_ptr<float>();
  for (int k = 0; k < 12; ++k) {
    double sum = 0.0;
    for (int64_t b = 0; b < num_blocks(n); ++b) sum += v_pose[static_cast<size_t>(12 * b + k)];
    v_matrix[k] = static_cast<float>(sum);
  }
  return {v_means, v_quats, v_scales, v_opacities, v_viewmat};
}

}  // namespace

TORCH_LIBRARY_IMPL(splaxel, CPU, m) {
  m.impl("project", &project);
  m.impl("project_backward", &project_backward);
}

}  // namespace splaxel
