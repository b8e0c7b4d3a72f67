// The schemas of all ops. Implementations register themselves in csrc/<op>.cpp with TORCH_LIBRARY_IMPL(splaxel, CPU, m).
//
// Letters: N Gaussians, M of them visible, P partitions, Q participants, H x W pixels.

#include <torch/library.h>

TORCH_LIBRARY(splaxel, m) {
  // Partial images of the participants `order`; see cuda/rasterize.py. The results after `transmittances` are what
  // the backward pass needs again: the packed records of the visible splats and their (participant, tile) lists.
  m.def(
      "rasterize_partials(Tensor means2d, Tensor depths, Tensor conics, Tensor opacities, Tensor colors, "
      "Tensor extents, Tensor owner, Tensor means, Tensor? reach, Tensor viewmat, Tensor K, Tensor axis, "
      "Tensor threshold, Tensor children, Tensor lo, Tensor hi, Tensor order, Tensor spans, int width, "
      "int boundary, float stop, bool count_clipped) -> (Tensor colors, Tensor depths, Tensor transmittances, "
      "Tensor records, Tensor pair_records, Tensor pair_masks, Tensor pair_slots, Tensor slot_offsets, "
      "Tensor tile_offsets, Tensor stats)");
  m.def(
      "rasterize_partials_backward(Tensor conics, Tensor opacities, Tensor viewmat, Tensor K, Tensor axis, "
      "Tensor threshold, Tensor children, Tensor lo, Tensor hi, Tensor order, Tensor spans, int width, int boundary, "
      "float stop, Tensor records, Tensor pair_records, Tensor pair_masks, Tensor pair_slots, Tensor slot_offsets, "
      "Tensor tile_offsets, Tensor v_colors, Tensor v_depths, Tensor v_transmittances, bool absgrad) -> "
      "(Tensor v_means2d, Tensor v_depths, Tensor v_conics, Tensor v_opacities, Tensor v_colors, Tensor absgrad)");
  // Content boxes and pixel regions of the partitions; see cuda/region.py.
  m.def(
      "content_bounds(Tensor means, Tensor scales, Tensor owner, Tensor bulk, Tensor slice_axis, float slope) -> "
      "(Tensor bounds, Tensor radii)");
  m.def(
      "region_spans(Tensor boxes, Tensor? leaves, Tensor viewmat, Tensor K, int width, int height, float near) -> "
      "Tensor");
  m.def(
      "regions_present(Tensor boxes, Tensor? leaves, Tensor viewmats, Tensor Ks, Tensor sizes, float near) -> Tensor");
}
