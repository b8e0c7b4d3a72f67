// The ops rasterize_partials and rasterize_partials_backward for tensors on a GPU: memory, and the order of launches.
//
// The forward pass waits for the device once, for the numbers of items and pairs: they size what comes next. The backward
// pass waits for nothing. Of the lists that the ops hand from one to the other (csrc has its own use of them) the GPU
// fills: records [M, 16], the item of each pair [pairs], where each pixel stopped [Q, H, W, 2], and tile_offsets.

#include <ATen/ops/cumsum.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "device.h"
#include "raster.h"

namespace splaxel::gpu {
namespace {

using at::Tensor;

// The view as the kernels see it. Holds the camera's memory, which outlives the launches: torch's allocator gives memory
// back in the order of the stream.
struct Setup {
  RasterView view{};
  Boundary boundary;
  Tensor camera;

  Setup(
      const DeviceScope& scope, const Tensor& viewmat, const Tensor& intrinsics, const Tensor& axis,
      const Tensor& threshold, const Tensor& children, const Tensor& lo, const Tensor& hi, const Tensor& order,
      const Tensor& spans, const std::optional<Tensor>& saturated, int64_t width, int64_t boundary_number,
      double stop)
      : boundary(static_cast<Boundary>(boundary_number)) {
    static_assert(sizeof(RayCamera) % sizeof(float) == 0);
    view.width = static_cast<int>(width);
    view.height = static_cast<int>(spans.size(1));
    view.tiles_x = (view.width + kTile - 1) / kTile;
    view.tiles_y = (view.height + kTile - 1) / kTile;
    view.num_participants = static_cast<int>(order.size(0));
    view.stop = std::max(static_cast<float>(stop), kLeastStop);
    camera = at::empty({static_cast<int64_t>(sizeof(RayCamera) / sizeof(float))}, viewmat.options());
    auto* memory = reinterpret_cast<RayCamera*>(floats_of(camera));
    make_camera(floats(viewmat), floats(intrinsics), view.width, view.height, memory, scope.stream());
    view.camera = memory;
    view.tree = {static_cast<int>(lo.size(0)), ints(axis), floats(threshold), ints(children), floats(lo), floats(hi)};
    view.order = ints(order);
    view.spans = ints(spans);
    view.saturated = saturated.has_value() ? saturated->const_data_ptr<uint8_t>() : nullptr;
  }
};

// What binning leaves for drawing.
struct Binned {
  Tensor records, items, tile_offsets, counters;
};

Binned bin(
    const DeviceScope& scope, const Setup& setup, const SplatArrays& in, int64_t num_gaussians,
    const at::TensorOptions& floating, bool count_clipped_pairs) {
  const RasterView& view = setup.view;
  const int64_t num_jobs = view.num_jobs();
  const auto integers = floating.dtype(at::kInt), longs = floating.dtype(at::kLong);
  Binned binned;
  binned.counters = at::zeros({kNumCounters}, longs);
  binned.tile_offsets = at::empty({num_jobs + 1}, integers);
  const Tensor job_renders = at::empty({num_jobs}, floating.dtype(at::kByte));
  const Tensor counts = at::empty({2, num_gaussians}, integers);
  Bins bins{};
  bins.job_renders = job_renders.mutable_data_ptr<uint8_t>();
  bins.item_counts = counts.mutable_data_ptr<int32_t>();
  bins.pair_counts = bins.item_counts + num_gaussians;
  bins.counters = binned.counters.mutable_data_ptr<int64_t>();
  count_items(view, setup.boundary, in, num_gaussians, bins, scope.stream());
  if (count_clipped_pairs) count_clipped(view, setup.boundary, in, num_gaussians, bins.counters, scope.stream());
  const Tensor ends = at::cumsum(counts, 1);
  if (num_gaussians > 0) {
    binned.counters[kItems].copy_(ends[0][num_gaussians - 1]);
    binned.counters[kPairs].copy_(ends[1][num_gaussians - 1]);
  }
  bins.item_ends = ends.const_data_ptr<int64_t>();
  bins.pair_ends = bins.item_ends + num_gaussians;

  const Tensor host = binned.counters.cpu();
  const int64_t* counter = host.const_data_ptr<int64_t>();
  TORCH_CHECK_VALUE(
      counter[kBadOwner] == 0, "owner holds numbers outside the ", view.tree.num_partitions, " partitions.");
  const int64_t num_pairs = counter[kPairs];
  TORCH_CHECK(
      num_pairs <= std::numeric_limits<int32_t>::max(), "A view of ", view.width, "x", view.height, " pixels has ",
      num_pairs, " pairs of splats and tiles, more than 2^31: the splats are far too large.");

  binned.records = at::empty({counter[kItems], 16}, floating);
  binned.items = at::empty({num_pairs}, integers);
  const Tensor keys = at::empty({num_pairs}, longs), sorted_keys = at::empty({num_pairs}, longs);
  const Tensor items = at::empty({num_pairs}, integers);
  bins.records = reinterpret_cast<SplatRecord*>(floats_of(binned.records));
  bins.keys = reinterpret_cast<uint64_t*>(keys.mutable_data_ptr<int64_t>());
  bins.items = items.mutable_data_ptr<int32_t>();
  auto* sorted = reinterpret_cast<uint64_t*>(sorted_keys.mutable_data_ptr<int64_t>());
  if (num_pairs > 0) {
    list_items(view, setup.boundary, in, num_gaussians, bins, scope.stream());
    int bits = 32;
    while (num_jobs > int64_t{1} << (bits - 32)) ++bits;
    int32_t* items_out = binned.items.mutable_data_ptr<int32_t>();
    size_t bytes = 0;
    sort_pairs(nullptr, bytes, bins.keys, sorted, bins.items, items_out, num_pairs, bits, scope.stream());
    const Tensor temp = at::empty({static_cast<int64_t>(bytes)}, floating.dtype(at::kByte));
    sort_pairs(
        temp.mutable_data_ptr<uint8_t>(), bytes, bins.keys, sorted, bins.items, items_out, num_pairs, bits,
        scope.stream());
    order_ties(sorted, num_pairs, bins.records, items_out, scope.stream());
  } else {
    binned.records = at::empty({0, 16}, floating);
  }
  find_tiles(sorted, num_pairs, num_jobs, binned.tile_offsets.mutable_data_ptr<int32_t>(), scope.stream());
  return binned;
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Forward rasterize_partials(
    const Tensor& means2d, const Tensor& depths, const Tensor& conics, const Tensor& opacities, const Tensor& colors,
    const Tensor& extents, const Tensor& owner, const Tensor& means, const std::optional<Tensor>& reach,
    const Tensor& viewmat, const Tensor& intrinsics, const Tensor& axis, const Tensor& threshold,
    const Tensor& children, const Tensor& lo, const Tensor& hi, const Tensor& order, const Tensor& spans,
    const std::optional<Tensor>& saturated, int64_t width, int64_t boundary, double stop, bool count_clipped_pairs) {
  const DeviceScope scope(means2d);
  const Setup setup(
      scope, viewmat, intrinsics, axis, threshold, children, lo, hi, order, spans, saturated, width, boundary, stop);
  const RasterView& view = setup.view;
  const SplatArrays in = {
      floats(means2d), floats(depths), floats(conics), floats(opacities), floats(colors), floats(extents),
      ints(owner), floats(means), reach.has_value() ? floats(*reach) : nullptr};
  const auto floating = means2d.options();
  const Binned binned = bin(scope, setup, in, means2d.size(0), floating, count_clipped_pairs);

  const int64_t q = view.num_participants, h = view.height, w = view.width;
  const Tensor out_colors = at::empty({q, h, w, 3}, floating), out_depths = at::empty({q, h, w}, floating);
  const Tensor out_transmittances = at::empty({q, h, w}, floating);
  const Tensor stopped = at::empty({q, h, w, 2}, floating.dtype(at::kInt));
  const Lists lists = {
      reinterpret_cast<const SplatRecord*>(floats(binned.records)), ints(binned.items), ints(binned.tile_offsets),
      reinterpret_cast<int2*>(stopped.mutable_data_ptr<int32_t>())};
  const Images images = {floats_of(out_colors), floats_of(out_depths), floats_of(out_transmittances)};
  draw(view, setup.boundary, lists, images, binned.counters.mutable_data_ptr<int64_t>(), scope.stream());
  scope.check();
  const Tensor none = at::empty({0}, floating.dtype(at::kInt));
  return {out_colors, out_depths, out_transmittances, binned.records, binned.items, none, stopped, none.clone(),
          binned.tile_offsets, binned.counters.narrow(0, 0, kNumStatistics).clone()};
}

using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Backward rasterize_partials_backward(
    const Tensor& conics, const Tensor& opacities, const Tensor& viewmat, const Tensor& intrinsics, const Tensor& axis,
    const Tensor& threshold, const Tensor& children, const Tensor& lo, const Tensor& hi, const Tensor& order,
    const Tensor& spans, const std::optional<Tensor>& saturated, int64_t width, int64_t boundary, double stop,
    const Tensor& records, const Tensor& items, const Tensor&, const Tensor& stopped, const Tensor&,
    const Tensor& tile_offsets, const Tensor& v_colors, const std::optional<Tensor>& v_depths,
    const Tensor& v_transmittances, bool absgrad) {
  const DeviceScope scope(conics);
  const Setup setup(
      scope, viewmat, intrinsics, axis, threshold, children, lo, hi, order, spans, saturated, width, boundary, stop);
  const int64_t n = conics.size(0), num_items = records.size(0);
  const auto floating = conics.options();
  const Tensor means2d = at::zeros({n, 2}, floating), depths = at::zeros({n}, floating);
  const Tensor v_conics = at::zeros({n, 3}, floating), v_opacities = at::zeros({n}, floating);
  const Tensor colors = at::zeros({n, 3}, floating), absolute = at::zeros({absgrad ? n : 0, 2}, floating);
  if (num_items > 0) {
    const auto* packed = reinterpret_cast<const SplatRecord*>(floats(records));
    // The kernels share their structs between the directions; backward only reads these.
    const Lists lists = {
        packed, ints(items), ints(tile_offsets),
        reinterpret_cast<int2*>(const_cast<int32_t*>(stopped.const_data_ptr<int32_t>()))};
    const Images gradients = {
        const_cast<float*>(floats(v_colors)), v_depths.has_value() ? const_cast<float*>(floats(*v_depths)) : nullptr,
        const_cast<float*>(floats(v_transmittances))};
    const Tensor sums = at::zeros({num_items, kGradRow}, floating);
    draw_backward(setup.view, setup.boundary, lists, gradients, absgrad, floats_of(sums), scope.stream());
    const SplatGradients out = {
        floats_of(means2d), floats_of(depths), floats_of(v_conics), floats_of(v_opacities), floats_of(colors),
        absgrad ? floats_of(absolute) : nullptr};
    finish_gradients(packed, num_items, floats(sums), floats(conics), floats(opacities), out, scope.stream());
  }
  scope.check();
  return {means2d, depths, v_conics, v_opacities, colors, absolute};
}

}  // namespace
}  // namespace splaxel::gpu

SPLAXEL_GPU_OPS(m) {
  m.impl("rasterize_partials", &splaxel::gpu::rasterize_partials);
  m.impl("rasterize_partials_backward", &splaxel::gpu::rasterize_partials_backward);
}
