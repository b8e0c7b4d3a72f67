// The ops rasterize_partials and its backward on the CPU: buffers, threads, and the sums over each splat's pairs.

#include "rasterize.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "bin.h"
#include "blend.h"
#include "cpu_level.h"
#include "op.h"
#include "parallel.h"
#include "pooled.h"

namespace splaxel {
namespace {

using at::Tensor;

const RasterKernels& kernels() {
  switch (cpu_level()) {
    case CpuLevel::kAvx512:
      return kRasterAvx512;
    case CpuLevel::kAvx2:
      return kRasterAvx2;
    default:
      return kRasterPortable;
  }
}

const float* floats(const Tensor& t) { return t.const_data_ptr<float>(); }
const int32_t* ints(const Tensor& t) { return t.const_data_ptr<int32_t>(); }

// What forward and backward both derive from the view and the partition.
struct Setup {
  RasterArgs args{};
  Block<TileRegion> regions, drawn;
  int threads;

  Setup(
      const Tensor& viewmat, const Tensor& intrinsics, const Tensor& axis, const Tensor& threshold,
      const Tensor& children, const Tensor& lo, const Tensor& hi, const Tensor& order, const Tensor& spans,
      const std::optional<Tensor>& saturated, int64_t width, int64_t boundary, double stop)
      : threads(std::max(at::get_num_threads(), 1)) {
    args.width = static_cast<int>(width);
    args.height = static_cast<int>(spans.size(1));
    args.tiles_x = (args.width + kTile - 1) / kTile;
    args.tiles_y = (args.height + kTile - 1) / kTile;
    args.num_participants = static_cast<int>(order.size(0));
    args.boundary = static_cast<Boundary>(boundary);
    args.stop = static_cast<float>(stop);
    args.camera = ray_camera(floats(viewmat), floats(intrinsics), args.width, args.height);
    args.tree = {static_cast<int>(lo.size(0)), ints(axis), floats(threshold), ints(children), floats(lo), floats(hi)};
    args.order = ints(order);
    regions = tile_regions(ints(spans), args.tree.num_partitions, args, threads);
    args.region = regions.get();
    if (saturated.has_value()) {
      drawn = unsaturated_regions(saturated->const_data_ptr<uint8_t>(), args);
      args.drawn = drawn.get();
    }
  }
};

// Runs every job on the threads; scratch has one entry per thread. Which thread runs a job changes no result.
template <class Job>
void for_jobs_in_parallel(const RasterArgs& args, std::vector<RasterScratch>& scratch, Job job) {
  const int tiles = args.tiles_x * args.tiles_y;
  const int64_t jobs = args.num_jobs();
#pragma omp parallel for schedule(dynamic, 2) num_threads(static_cast<int>(scratch.size()))
  for (int64_t at = 0; at < jobs; ++at)
    job(args, static_cast<int>(at / tiles), static_cast<int>(at % tiles),
        scratch[static_cast<size_t>(omp_get_thread_num())]);
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Pair* pairs_of(const Tensor& pairs) { return reinterpret_cast<Pair*>(pairs.mutable_data_ptr<int32_t>()); }

Forward rasterize_partials(
    const Tensor& means2d, const Tensor& depths, const Tensor& conics, const Tensor& opacities, const Tensor& colors,
    const Tensor& extents, const Tensor& owner, const Tensor& means, const std::optional<Tensor>& reach,
    const Tensor& viewmat, const Tensor& intrinsics, const Tensor& axis, const Tensor& threshold,
    const Tensor& children, const Tensor& lo, const Tensor& hi, const Tensor& order, const Tensor& spans,
    const std::optional<Tensor>& saturated, int64_t width, int64_t boundary, double stop, bool count_clipped_pairs) {
  const auto start = std::chrono::steady_clock::now();
  Setup setup(viewmat, intrinsics, axis, threshold, children, lo, hi, order, spans, saturated, width, boundary, stop);
  RasterArgs& args = setup.args;
  BinInput in;
  in.num_gaussians = means2d.size(0);
  in.means2d = floats(means2d);
  in.depths = floats(depths);
  in.conics = floats(conics);
  in.opacities = floats(opacities);
  in.colors = floats(colors);
  in.extents = floats(extents);
  in.owner = ints(owner);
  in.means = floats(means);
  in.reach = reach.has_value() ? floats(*reach) : nullptr;
  in.threads = setup.threads;
  in.participant_of.assign(static_cast<size_t>(args.tree.num_partitions), -1);
  for (int q = 0; q < args.num_participants; ++q) in.participant_of[static_cast<size_t>(args.order[q])] = q;

  Tensor records;
  Items items = list_items(in, args, [&](int64_t count) {
    records = pooled({count, 16}, at::kFloat);
    return reinterpret_cast<SplatRecord*>(records.mutable_data_ptr<float>());
  });
  TORCH_CHECK_VALUE(
      !items.owner_out_of_range, "owner holds numbers outside the ", args.tree.num_partitions, " partitions.");
  args.records = reinterpret_cast<const SplatRecord*>(floats(records));
  const auto sorted = sort_by_depth(args.records, items.count, setup.threads);
  Tensor tile_offsets = at::empty({args.num_jobs() + 1}, int_options());
  Tensor item_offsets = pooled({items.count + 1}, at::kInt);
  Pairs pairs = count_pairs(
      in, args, items, sorted.get(), tile_offsets.mutable_data_ptr<int32_t>(),
      item_offsets.mutable_data_ptr<int32_t>());
  TORCH_CHECK(
      pairs.count <= std::numeric_limits<int32_t>::max(), "A view of ", args.width, "x", args.height, " pixels has ",
      pairs.count, " pairs of splats and tiles, more than 2^31: the splats are far too large.");
  Tensor listed = pooled({pairs.count, 2}, at::kInt);
  Tensor pair_masks = pooled({pairs.count}, at::kShort);
  Tensor checkpoints = pooled_floats({checkpoints_of(pairs.count), kBlocks, kLanes});
  list_pairs(args, items, sorted.get(), pairs, pairs_of(listed));

  Tensor out_colors = pooled_floats({args.num_participants, args.height, args.width, 3});
  Tensor out_depths = pooled_floats({args.num_participants, args.height, args.width});
  Tensor out_transmittances = pooled_floats(out_depths.sizes());
  args.tile_offsets = ints(tile_offsets);
  args.pairs = pairs_of(listed);
  args.checkpoints = checkpoints.mutable_data_ptr<float>();
  args.pair_masks = reinterpret_cast<uint16_t*>(pair_masks.mutable_data_ptr<int16_t>());
  args.colors = out_colors.mutable_data_ptr<float>();
  args.depths = out_depths.mutable_data_ptr<float>();
  args.transmittances = out_transmittances.mutable_data_ptr<float>();
  std::vector<RasterScratch> scratch(static_cast<size_t>(setup.threads));
  const auto binned = std::chrono::steady_clock::now();
  for_jobs_in_parallel(args, scratch, kernels().forward);
  const auto drawn = std::chrono::steady_clock::now();

  Tensor stats = at::empty({7}, at::TensorOptions().dtype(at::kLong));
  int64_t* stat = stats.mutable_data_ptr<int64_t>();
  stat[0] = items.splats;
  stat[1] = pairs.count;
  stat[2] = 0;
  for (const RasterScratch& part : scratch) stat[2] += part.dropped;
  stat[3] = items.straddling;
  stat[4] = count_clipped_pairs ? count_clipped(in, args) : -1;
  stat[5] = std::chrono::nanoseconds(binned - start).count();
  stat[6] = std::chrono::nanoseconds(drawn - binned).count();
  return {out_colors, out_depths, out_transmittances, records, listed, pair_masks, checkpoints, item_offsets,
          tile_offsets, stats};
}

struct SplatGrads {
  Tensor means2d, depths, conics, opacities, colors, absolute;
};

// Adds up the pairs of each Gaussian, in a fixed order, and turns the sums into gradients.
void sum_pairs(
    const RasterArgs& args, const Tensor& conics, const Tensor& opacities, const Tensor& item_offsets, int threads,
    SplatGrads& grads) {
  const int64_t count = item_offsets.size(0) - 1;
  const int32_t* offsets = ints(item_offsets);
  const float *conic = floats(conics), *opacity = floats(opacities);
  float* means2d = grads.means2d.mutable_data_ptr<float>();
  float* depths = grads.depths.mutable_data_ptr<float>();
  float* v_conics = grads.conics.mutable_data_ptr<float>();
  float* v_opacities = grads.opacities.mutable_data_ptr<float>();
  float* colors = grads.colors.mutable_data_ptr<float>();
  float* absolute = args.absgrad ? grads.absolute.mutable_data_ptr<float>() : nullptr;
  // The items of one Gaussian stand together and must not be split between threads.
  const auto whole = [&](int64_t item) {
    while (item > 0 && item < count && args.records[item].index == args.records[item - 1].index) ++item;
    return item;
  };
  const int chunks = chunks_for(count, threads);
  for_chunks(chunks, [&](int chunk) {
    const Chunk part(count, chunk, chunks);
    const int64_t end = whole(part.end);
    int64_t item = whole(part.begin);
    while (item < end) {
      const int64_t i = args.records[item].index;
      double wide[kNumMoments] = {};  // large splats have hundreds of pairs, whose gradients cancel
      for (; item < end && args.records[item].index == i; ++item)
        for (int64_t at = offsets[item]; at < offsets[item + 1]; ++at) {
          const float* row = args.pair_grads + kGradRow * at;
          for (int m = 0; m < kNumMoments; ++m) wide[m] += row[m];
        }
      float sums[kGradRow] = {};
      for (int m = 0; m < kNumMoments; ++m) sums[m] = static_cast<float>(wide[m]);
      const SplatPixelsGrad grad = splat_gradient(sums, conic + 3 * i, opacity[i]);
      means2d[2 * i] = grad.x;
      means2d[2 * i + 1] = grad.y;
      v_conics[3 * i] = grad.a;
      v_conics[3 * i + 1] = grad.b;
      v_conics[3 * i + 2] = grad.c;
      v_opacities[i] = grad.opacity;
      colors[3 * i] = sums[kR];
      colors[3 * i + 1] = sums[kG];
      colors[3 * i + 2] = sums[kB];
      depths[i] = sums[kDepth];
      if (absolute != nullptr) {
        absolute[2 * i] = sums[kAbsX];
        absolute[2 * i + 1] = sums[kAbsY];
      }
    }
  });
}

using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Backward rasterize_partials_backward(
    const Tensor& conics, const Tensor& opacities, const Tensor& viewmat, const Tensor& intrinsics, const Tensor& axis,
    const Tensor& threshold, const Tensor& children, const Tensor& lo, const Tensor& hi, const Tensor& order,
    const Tensor& spans, const std::optional<Tensor>& saturated, int64_t width, int64_t boundary, double stop,
    const Tensor& records,
    const Tensor& pairs, const Tensor& pair_masks, const Tensor& checkpoints, const Tensor& item_offsets,
    const Tensor& tile_offsets, const Tensor& v_colors, const std::optional<Tensor>& v_depths, const Tensor& v_transmittances,
    bool absgrad) {
  Setup setup(viewmat, intrinsics, axis, threshold, children, lo, hi, order, spans, saturated, width, boundary, stop);
  RasterArgs& args = setup.args;
  args.records = reinterpret_cast<const SplatRecord*>(floats(records));
  args.tile_offsets = ints(tile_offsets);
  args.pairs = reinterpret_cast<const Pair*>(ints(pairs));
  // The kernels share one struct for both directions; backward only reads these.
  args.pair_masks = reinterpret_cast<uint16_t*>(const_cast<int16_t*>(pair_masks.const_data_ptr<int16_t>()));
  args.checkpoints = const_cast<float*>(floats(checkpoints));
  args.colors = const_cast<float*>(floats(v_colors));
  args.depths = v_depths.has_value() ? const_cast<float*>(floats(*v_depths)) : nullptr;
  args.transmittances = const_cast<float*>(floats(v_transmittances));
  args.absgrad = absgrad;
  const auto pair_grads = uninitialised<float>(pairs.size(0) * kGradRow);
  args.pair_grads = pair_grads.get();

  std::vector<RasterScratch> scratch(static_cast<size_t>(setup.threads));
  for_jobs_in_parallel(args, scratch, kernels().backward);

  const int64_t n = conics.size(0);
  SplatGrads grads{
      pooled_zeros({n, 2}), pooled_zeros({n}),    pooled_zeros({n, 3}),
      pooled_zeros({n}),    pooled_zeros({n, 3}), pooled_zeros({absgrad ? n : 0, 2})};
  sum_pairs(args, conics, opacities, item_offsets, setup.threads, grads);
  return {grads.means2d, grads.depths, grads.conics, grads.opacities, grads.colors, grads.absolute};
}

}  // namespace
}  // namespace splaxel

TORCH_LIBRARY_IMPL(splaxel, CPU, m) {
  m.impl("rasterize_partials", &splaxel::rasterize_partials);
  m.impl("rasterize_partials_backward", &splaxel::rasterize_partials_backward);
}
