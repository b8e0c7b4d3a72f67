// The ops from Gaussians to the splats of one view: project, spherical_harmonics, their backward passes, and
// update_gaussians, which does without those. Letters: N Gaussians, K bases stored per Gaussian.

#include <tuple>
#include <vector>

#include "gaussians.h"
#include "op.h"
#include "pooled.h"
#include "project_block.h"

namespace splaxel {
namespace {

SPLAXEL_INLINE void project_of_body(
    const Camera<float>& camera, bool antialiased, int64_t first, int count, const ProjectPointers& p) {
  antialiased ? project_block<true>(camera, first, count, p) : project_block<false>(camera, first, count, p);
}

SPLAXEL_DISPATCH(
    void, project_of,
    (const Camera<float>& camera, bool antialiased, int64_t first, int count, const ProjectPointers& p),
    (camera, antialiased, first, count, p))

SPLAXEL_INLINE void project_vjp_of_body(
    const Camera<float>& camera, bool antialiased, int64_t first, int count, const ProjectGradPointers& p,
    double* v_pose) {
  antialiased ? project_block_vjp<true>(camera, first, count, p, v_pose)
              : project_block_vjp<false>(camera, first, count, p, v_pose);
}

SPLAXEL_DISPATCH(
    void, project_vjp_of,
    (const Camera<float>& camera, bool antialiased, int64_t first, int count, const ProjectGradPointers& p,
     double* v_pose),
    (camera, antialiased, first, count, p, v_pose))

using Tensors5 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Tensors5 project(
    const at::Tensor& means, const at::Tensor& quats, const at::Tensor& scales, const at::Tensor& opacities,
    const at::Tensor& viewmat, const at::Tensor& K, int64_t width, int64_t height, double near, double far,
    bool antialiased) {
  const int64_t n = means.size(0);
  at::Tensor means2d = pooled_floats({n, 2}), depths = pooled_floats({n});
  at::Tensor conics = pooled_floats({n, 3}), out_opacities = pooled_floats({n});
  at::Tensor extents = pooled_floats({n, 2});
  const auto camera =
      make_camera<float>(viewmat.const_data_ptr<float>(), K.const_data_ptr<float>(), width, height, near, far);
  const ProjectPointers p = {
      means.const_data_ptr<float>(), quats.const_data_ptr<float>(), scales.const_data_ptr<float>(),
      opacities.const_data_ptr<float>(), means2d.data_ptr<float>(), depths.data_ptr<float>(),
      conics.data_ptr<float>(), out_opacities.data_ptr<float>(), extents.data_ptr<float>()};
  at::parallel_for(0, num_blocks(n), 16, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = b * kBlock;
      project_of(camera, antialiased, first, static_cast<int>(std::min<int64_t>(kBlock, n - first)), p);
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
  at::Tensor v_means = pooled_floats(means.sizes()), v_quats = pooled_floats(quats.sizes());
  at::Tensor v_scales = pooled_floats(scales.sizes());
  at::Tensor v_opacities = pooled_floats(opacities.sizes()), v_viewmat = at::zeros({4, 4}, viewmat.options());
  const auto camera =
      make_camera<float>(viewmat.const_data_ptr<float>(), K.const_data_ptr<float>(), width, height, 0.0, 0.0);
  const ProjectGradPointers p = {
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
      project_vjp_of(camera, antialiased, first, count, p, v_pose.data() + 12 * b);
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

const GaussianKernels& kernels() {
  switch (cpu_level()) {
    case CpuLevel::kAvx512:
      return kGaussiansAvx512;
    case CpuLevel::kAvx2:
      return kGaussiansAvx2;
    default:
      return kGaussiansPortable;
  }
}

ShInputs sh_inputs(
    const at::Tensor& means, const at::Tensor& cam_center, const at::Tensor& sh0, const at::Tensor& shN,
    const at::Tensor& visible) {
  return {means.const_data_ptr<float>(), cam_center.const_data_ptr<float>(), sh0.const_data_ptr<float>(),
          shN.const_data_ptr<float>(), visible.const_data_ptr<bool>(), shN.size(1)};
}

at::Tensor spherical_harmonics(
    int64_t degree, const at::Tensor& means, const at::Tensor& cam_center, const at::Tensor& sh0,
    const at::Tensor& shN, const at::Tensor& visible) {
  const int64_t n = means.size(0);
  at::Tensor colors = pooled_floats({n, 3});
  const ShInputs in = sh_inputs(means, cam_center, sh0, shN, visible);
  float* out = colors.data_ptr<float>();
  at::parallel_for(0, num_blocks(n), 8, [&](int64_t begin, int64_t end) {
    kernels().colors(degree, in, n, begin, end, out);
  });
  return colors;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> spherical_harmonics_backward(
    int64_t degree, const at::Tensor& means, const at::Tensor& cam_center, const at::Tensor& sh0,
    const at::Tensor& shN, const at::Tensor& visible, const at::Tensor& v_colors) {
  const int64_t n = means.size(0);
  at::Tensor v_means = pooled_floats(means.sizes()), v_center = pooled_floats({3});
  at::Tensor v_sh0 = pooled_floats(sh0.sizes()), v_shN = pooled_floats(shN.sizes());
  const ShInputs in = sh_inputs(means, cam_center, sh0, shN, visible);
  const ShGradients out = {v_colors.const_data_ptr<float>(), v_means.data_ptr<float>(), v_sh0.data_ptr<float>(),
                         v_shN.data_ptr<float>()};
  std::vector<double> partial(static_cast<size_t>(3 * num_blocks(n)));
  at::parallel_for(0, num_blocks(n), 8, [&](int64_t begin, int64_t end) {
    kernels().colors_vjp(degree, in, out, n, begin, end, partial.data());
  });
  for (int c = 0; c < 3; ++c) {
    double sum = 0.0;
    for (int64_t b = 0; b < num_blocks(n); ++b) sum += partial[static_cast<size_t>(3 * b + c)];
    v_center.data_ptr<float>()[c] = static_cast<float>(sum);
  }
  return {v_means, v_center, v_sh0, v_shN};
}

// Parameters, and likewise moments and gradients, in this order: means, quats, scales, opacities, sh0, shN.
void update_gaussians(
    at::TensorList params, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
    const c10::List<std::optional<at::Tensor>>& grads, const at::Tensor& scales, const at::Tensor& opacities,
    at::TensorList views, at::IntArrayRef view_settings, at::ArrayRef<double> adam, double step, bool all) {
  Update u;
  u.count = params[0].size(0);
  u.stored = params[5].numel() == 0 ? 0 : params[5].size(1);
  u.scales = scales.const_data_ptr<float>(), u.opacities = opacities.const_data_ptr<float>();
  u.all = all;
  std::vector<at::Tensor> kept;
  for (size_t k = 0; k < kNumParams; ++k) {
    const double rate = adam[4 * k], beta1 = adam[4 * k + 1], beta2 = adam[4 * k + 2], eps = adam[4 * k + 3];
    const std::optional<at::Tensor> grad = grads.get(k);
    if (grad.has_value()) kept.push_back(grad->contiguous());
    u.groups[k] = {
        params[k].data_ptr<float>(), exp_avgs[k].data_ptr<float>(), exp_avg_sqs[k].data_ptr<float>(),
        grad.has_value() ? kept.back().const_data_ptr<float>() : nullptr,
        static_cast<float>(rate / (1.0 - std::pow(beta1, step))), static_cast<float>(1.0 - beta1),
        static_cast<float>(beta2), static_cast<float>(1.0 - beta2),
        static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, step))), static_cast<float>(eps)};
  }
  for (size_t v = 0; 9 * v < views.size(); ++v) {
    const at::Tensor* t = views.data() + 9 * v;
    const int64_t* setting = view_settings.data() + 4 * v;
    ViewGradients view;
    view.camera = make_camera<float>(
        t[0].const_data_ptr<float>(), t[1].const_data_ptr<float>(), setting[0], setting[1], 0.0, 0.0);
    view.degree = static_cast<int>(setting[2]);
    view.antialiased = setting[3] != 0;
    view.center = t[2].const_data_ptr<float>();
    view.extents = t[3].const_data_ptr<float>();
    view.v_means2d = t[4].const_data_ptr<float>();
    view.v_depths = t[5].const_data_ptr<float>();
    view.v_conics = t[6].const_data_ptr<float>();
    view.v_opacities = t[7].const_data_ptr<float>();
    view.v_colors = t[8].const_data_ptr<float>();
    u.views.push_back(view);
  }
  at::parallel_for(0, num_blocks(u.count), 8, [&](int64_t begin, int64_t end) { kernels().update(u, begin, end); });
  for (const at::Tensor& param : params) param.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

TORCH_LIBRARY_IMPL(splaxel, CPU, m) {
  m.impl("project", &project);
  m.impl("project_backward", &project_backward);
  m.impl("spherical_harmonics", &spherical_harmonics);
  m.impl("spherical_harmonics_backward", &spherical_harmonics_backward);
  m.impl("update_gaussians", &update_gaussians);
}

}  // namespace splaxel
