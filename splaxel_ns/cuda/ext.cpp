// The schemas of all ops. Implementations register themselves in csrc/<op>.cpp with TORCH_LIBRARY_IMPL(splaxel, CPU, m).
//
// Letters: N Gaussians, M of them visible, P partitions, Q participants, H x W pixels.

#include <torch/library.h>

#include <stdexcept>
#include <string>

#include "common.h"
#include "cpu_level.h"

namespace {

c10::Dict<std::string, double> thresholds() {
  c10::Dict<std::string, double> values;
  values.insert("alpha_min", splaxel::kAlphaMin);
  values.insert("alpha_max", splaxel::kAlphaMax);
  values.insert("stop", splaxel::kStop);
  values.insert("blur", splaxel::kBlur);
  values.insert("clamp_margin", splaxel::kClampMargin);
  values.insert("extent_slack", splaxel::kExtentSlack);
  return values;
}

std::string set_cpu_level(const std::string& name) {
  try {
    return splaxel::set_cpu_level(name);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

}  // namespace

TORCH_LIBRARY(splaxel, m) {
  // "best", "portable", "avx2" or "avx512"; returns the level now in use.
  m.def("set_cpu_level(str level) -> str", &set_cpu_level);
  // Partial images of the participants `order`; see cuda/rasterize.py. The results after `transmittances` are what
  // the backward pass needs again: the packed records of the visible splats and their (participant, tile) lists.
  m.def(
      "rasterize_partials(Tensor means2d, Tensor depths, Tensor conics, Tensor opacities, Tensor colors, "
      "Tensor extents, Tensor owner, Tensor means, Tensor? reach, Tensor viewmat, Tensor K, Tensor axis, "
      "Tensor threshold, Tensor children, Tensor lo, Tensor hi, Tensor order, Tensor spans, Tensor? saturated, "
      "int width, int boundary, float stop, bool count_clipped) -> (Tensor colors, Tensor depths, Tensor transmittances, "
      "Tensor records, Tensor pairs, Tensor pair_masks, Tensor checkpoints, Tensor item_offsets, "
      "Tensor tile_offsets, Tensor stats)");
  m.def(
      "rasterize_partials_backward(Tensor conics, Tensor opacities, Tensor viewmat, Tensor K, Tensor axis, "
      "Tensor threshold, Tensor children, Tensor lo, Tensor hi, Tensor order, Tensor spans, Tensor? saturated, int width, "
      "int boundary, float stop, Tensor records, Tensor pairs, Tensor pair_masks, Tensor checkpoints, Tensor item_offsets, "
      "Tensor tile_offsets, Tensor v_colors, Tensor? v_depths, Tensor v_transmittances, bool absgrad) -> "
      "(Tensor v_means2d, Tensor v_depths, Tensor v_conics, Tensor v_opacities, Tensor v_colors, Tensor absgrad)");
  // Leaves of points, content boxes and pixel regions of the partitions; see cuda/region.py.
  m.def("locate(Tensor points, Tensor axis, Tensor threshold, Tensor children) -> Tensor");
  m.def(
      "bulk_boxes(Tensor means, Tensor owner, int num_partitions, int stride, float quantile, float margin) -> "
      "(Tensor bulk, Tensor axis)");
  m.def(
      "content_bounds(Tensor means, Tensor scales, Tensor owner, Tensor bulk, Tensor slice_axis, float slope) -> "
      "(Tensor bounds, Tensor radii)");
  m.def(
      "splat_spans(Tensor means2d, Tensor extents, Tensor owner, int num_partitions, int width, int height) -> Tensor");
  m.def(
      "region_spans(Tensor boxes, Tensor? leaves, Tensor viewmat, Tensor K, int width, int height, float near) -> "
      "Tensor");
  m.def(
      "regions_present(Tensor boxes, Tensor? leaves, Tensor viewmats, Tensor Ks, Tensor sizes, float near) -> Tensor");
  // Gaussians to one view; see cuda/splats.py. Extents of zero mark what the view does not see.
  m.def(
      "project(Tensor means, Tensor quats, Tensor scales, Tensor opacities, Tensor viewmat, Tensor K, int width, "
      "int height, float near, float far, bool antialiased) -> (Tensor means2d, Tensor depths, Tensor conics, "
      "Tensor opacities, Tensor extents)");
  m.def(
      "project_backward(Tensor means, Tensor quats, Tensor scales, Tensor opacities, Tensor viewmat, Tensor K, "
      "Tensor extents, int width, int height, bool antialiased, Tensor v_means2d, Tensor v_depths, Tensor v_conics, "
      "Tensor v_opacities) -> (Tensor v_means, Tensor v_quats, Tensor v_scales, Tensor v_opacities, "
      "Tensor v_viewmat)");
  m.def(
      "spherical_harmonics(int degree, Tensor means, Tensor cam_center, Tensor sh0, Tensor shN, Tensor visible) -> "
      "Tensor");
  m.def(
      "spherical_harmonics_backward(int degree, Tensor means, Tensor cam_center, Tensor sh0, Tensor shN, "
      "Tensor visible, Tensor v_colors) -> (Tensor v_means, Tensor v_cam_center, Tensor v_sh0, Tensor v_shN)");
  // One step of Adam on the parameters and moments, in place; see cuda/update.py for the order of the lists.
  m.def(
      "update_gaussians(Tensor(a!)[] params, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor?[] grads, "
      "Tensor scales, Tensor opacities, Tensor[] views, int[] view_settings, float[] adam, float step, bool all) -> ()");
  // One view's part of the densification statistics, in place; see cuda/update.py.
  m.def(
      "add_statistics(Tensor grads, Tensor extents, Tensor conics, float half_width, float half_height, "
      "float longest_side, Tensor(a!) grad2d, Tensor(b!) count, Tensor(c!)? radii) -> ()");
  // Partial images to one image, and its loss; see cuda/splats.py.
  m.def(
      "composite(Tensor colors, Tensor depths, Tensor transmittances, Tensor background) -> (Tensor rgb, "
      "Tensor depth, Tensor alpha)");
  m.def(
      "composite_backward(Tensor colors, Tensor depths, Tensor transmittances, Tensor background, Tensor v_rgb, "
      "Tensor? v_depth, Tensor? v_alpha) -> (Tensor v_colors, Tensor v_depths, Tensor v_transmittances, "
      "Tensor v_background)");
  m.def(
      "l1_ssim(Tensor pred, Tensor gt, float ssim_lambda, bool need_grad, Tensor? counts, Tensor? window_counts, "
      "int full_height, int full_width) -> (Tensor loss, Tensor l1, Tensor ssim, "
      "Tensor v_pred)");
  // Which (pixel, partition) pairs of a view to leave out from now on; see cuda/saturation.py.
  m.def(
      "update_saturation(Tensor transmittances, Tensor slots, Tensor spans, Tensor bits, Tensor budgets, float eps) -> "
      "(Tensor bits, Tensor budgets, Tensor counts)");
  // Pixels of a region as flat streams, and what composes them; see cuda/streams.py.
  m.def(
      "pack_pixels(Tensor colors, Tensor depths, Tensor transmittances, Tensor spans, Tensor row_starts, int count, "
      "bool with_depth, bool half) -> Tensor");
  m.def(
      "unpack_pixels(Tensor stream, Tensor spans, Tensor row_starts, int width) -> (Tensor colors, Tensor depths, "
      "Tensor transmittances)");
  m.def("pack_active(Tensor stream) -> (Tensor bits, Tensor values, Tensor count)");
  m.def("unpack_active(Tensor bits, Tensor values, int count) -> Tensor");
  m.def(
      "composite_streams(Tensor stream, Tensor spans, Tensor row_starts, Tensor background, int width) -> (Tensor rgb, "
      "Tensor depth, Tensor alpha)");
  m.def(
      "composite_streams_backward(Tensor stream, Tensor spans, Tensor row_starts, Tensor background, int width, "
      "Tensor v_rgb, Tensor v_depth, Tensor v_alpha) -> (Tensor v_stream, Tensor v_background)");
  // One step of Adam on the rows that are visible, in place; see cuda/update.py.
  m.def(
      "adam_rows(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor grad, Tensor? visible, float lr, "
      "float beta1, float beta2, float eps, float step) -> ()");
  // The constants of include/common.h, under their names there.
  m.def("thresholds() -> Dict(str, float)", &thresholds);
}
