"""Partial images of one view: each participant's own Gaussians, in its own pixels, without background.

Shapes: N Gaussians, P partitions (leaves of the KD-tree), Q participants of the view, H x W pixels. Everything is
float32, on the CPU or all on one GPU; pixel centres lie at +0.5; world_to_cam matrices and cameras are OpenCV's.

A splat touches a pixel if and only if its alpha there is at least 1/255; each participant blends what touches a pixel
in order of depth. Equal depths are ordered by what the splats look like: their column, then their row, conic, opacity
and colour. Their numbers would not do, for ranks number Gaussians by what they own and got from others. What a
participant draws beyond that depends on the pixel and on ownership.

Ownership. A pair (Gaussian i, pixel p) belongs to the leaf that holds the point of p's ray at depth_i. A Gaussian
straddles if some of its pairs may belong to another leaf than its owner: if the world box mean +- reach is not inside
the owner's leaf, where reach is what its extents in pixels span at its depth. Boundaries (paper, section 8.1):

- "filter" (the paper): a participant draws its own Gaussians, but not the pairs of straddling ones that belong to
  another leaf whose partition renders the pixel.
- "exact": each pair is drawn by the partition it belongs to, whoever owns the Gaussian.
- "none": a participant draws its own Gaussians.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from splaxel_ns.cuda import _backend, _device

_BOUNDARIES = {"filter": 0, "exact": 1, "none": 2}  # enum class Boundary in csrc/rasterize.h


class Tree(Protocol):
    """What the ops need of a KD-tree of P leaves (`splaxel_ns.partition.PartitionTree`)."""

    @property
    def axis(self) -> Tensor: ...  # [P - 1] int32
    @property
    def threshold(self) -> Tensor: ...  # [P - 1] float32
    @property
    def children(self) -> Tensor: ...  # [P - 1, 2] int32
    @property
    def lo(self) -> Tensor: ...  # [P, 3] float32
    @property
    def hi(self) -> Tensor: ...  # [P, 3] float32


@dataclass(frozen=True)
class RasterStats:
    """Counts of one call, and its time."""

    num_splats: int  # visible Gaussians that some participant may draw
    num_pairs: int  # (splat, tile of 16 x 16 pixels) over all participants
    dropped_pairs: int  # (splat, pixel) pairs that the boundary "filter" dropped
    straddling: int  # of num_splats, those that straddle
    clipped_pairs: int | None
    """(splat, pixel) pairs in the image whose partition does not render the pixel; None unless asked for."""
    binning_ms: float = field(default=0.0, compare=False)
    """Milliseconds of sorting by depth and listing what each tile draws."""
    drawing_ms: float = field(default=0.0, compare=False)
    """Milliseconds of the tiles."""


def set_cpu_level(level: str = "best") -> str:
    """Chooses the instructions that the ops use: "best", "avx512", "avx2" or "portable"; SPLAXEL_CPU does at start.

    Returns:
        The level now in use.

    Raises:
        ValueError: no such level, or the processor lacks it.
    """
    return _backend.load().set_cpu_level(level)


def rasterize_partials(
    means2d: Tensor,  # [N, 2], pixels
    depths: Tensor,  # [N], world units along the optical axis
    conics: Tensor,  # [N, 3], upper triangle of the inverse 2D covariance, positive definite
    opacities: Tensor,  # [N]
    colors: Tensor,  # [N, 3]
    extents: Tensor,  # [N, 2], pixels; zero: not visible
    owner: Tensor,  # [N] int32, the partition of each Gaussian
    means: Tensor,  # [N, 3], world units
    viewmat: Tensor,  # [4, 4], world to camera
    K: Tensor,  # [3, 3], pixels
    tree: Tree,
    order: Sequence[int],  # Q participants
    spans: Tensor,  # [P, H, 2] int32: partition p renders columns spans[p, y, 0] <= x < spans[p, y, 1]
    width: int,
    *,
    boundary: Literal["filter", "exact", "none"] = "filter",
    stop: float = 1e-4,
    reach: Tensor | None = None,  # [N, 3], world units
    saturated: Tensor | None = None,  # [Q, H, ceil(W / 8)] uint8: bit x % 8 of byte x // 8
    absgrad: bool = False,
    count_clipped: bool = False,
) -> tuple[Tensor, Tensor, Tensor, RasterStats]:
    """Renders the partial images of the participants of one view.

    Args:
        extents: half sizes of a box around means2d that holds every pixel with alpha >= 1/255.
        tree: the boxes of all partitions.
        order: the partitions to render; the results come in this order.
        stop: a pixel of a partial image is complete once its transmittance is at most this; 0 switches it off.
        reach: half sizes of the world box around each mean within which its pairs lie; by default derived from the
            extents as |R_0j| extent_x depth / fx + |R_1j| extent_y depth / fy.
        saturated: pixels that a participant leaves out although its region holds them, in the order of `order`; they
            cost nothing. "filter" goes by the regions alone: it drops the same pairs with and without this.
        absgrad: leave sum over pixels of |dL/dmeans2d| as `means2d.absgrad` [N, 2] in the backward pass, as gsplat.
        count_clipped: fill `RasterStats.clipped_pairs`; slow.

    Returns:
        colors [Q, H, W, 3] premultiplied, depths [Q, H, W] (sum of weight times depth), transmittances [Q, H, W], and
        counts. Outside a participant's region and where it is saturated: 0, 0 and
        1. Gradients flow to means2d, depths, conics, opacities and
        colors; which pairs are drawn is taken as given.

    Raises:
        ValueError: a tensor has the wrong shape, type or device, or the camera, boundary, order or stop is invalid.
    """
    splats = _checked_splats(means2d, depths, conics, opacities, colors, extents)
    count = len(means2d)
    device = means2d.device
    owner = _checked("owner", owner, (count,), torch.int32, device)
    means = _checked("means", means.detach(), (count, 3), device=device)
    if reach is not None:
        reach = _checked("reach", reach.detach(), (count, 3), device=device)
    view = _checked_view(viewmat, K, tree, order, spans, width, device)
    if boundary not in _BOUNDARIES:
        raise ValueError(f"boundary is {boundary!r}; it must be one of {', '.join(_BOUNDARIES)}.")
    if not 0.0 <= stop < 1.0:
        raise ValueError(f"stop is {stop}; it must be a transmittance in [0, 1), 0 for none.")
    if saturated is not None:
        shape = (len(order), spans.shape[1], (width + 7) // 8)
        saturated = _device.upload(_checked("saturated", saturated, shape, torch.uint8, saturated.device), device)
    settings = (width, _BOUNDARIES[boundary], float(stop))
    out_colors, out_depths, transmittances, stats = _RasterizePartials.apply(
        *splats, owner, means, reach, view, saturated, settings, absgrad, count_clipped
    )
    counts = DeferredStats(stats, count_clipped) if _device.on_gpu(stats) else _stats(stats, count_clipped)
    return out_colors, out_depths, transmittances, cast(RasterStats, counts)


def _stats(stats: Tensor, count_clipped: bool) -> RasterStats:
    num_splats, num_pairs, dropped, straddling, clipped, *nanoseconds = stats.tolist()
    binning_ms, drawing_ms = (1e-6 * value for value in nanoseconds)
    return RasterStats(
        num_splats, num_pairs, dropped, straddling, clipped if count_clipped else None, binning_ms, drawing_ms
    )


class DeferredStats:
    """A `RasterStats` on its way from a GPU: whoever asks waits until the view has been drawn. Times are 0 there."""

    def __init__(self, stats: Tensor, count_clipped: bool) -> None:
        self._later = _device.Later(stats)
        self._count_clipped = count_clipped

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = getattr(_stats(self._later.get(), self._count_clipped), name)
        setattr(self, name, value)
        return value


class _RasterizePartials(Function):
    @staticmethod
    def forward(
        ctx: Any,
        means2d,
        depths,
        conics,
        opacities,
        colors,
        extents,
        owner,
        means,
        reach,
        view,
        saturated,
        settings,
        absgrad,
        clip,
    ):
        out_colors, out_depths, transmittances, *lists, stats = _backend.load(means2d.device).rasterize_partials(
            means2d, depths, conics, opacities, colors, extents, owner, means, reach, *view, saturated, *settings, clip
        )
        ctx.save_for_backward(means2d, conics, opacities, saturated, *view, *lists)
        ctx.set_materialize_grads(False)
        ctx.num_view = len(view)
        ctx.settings = settings
        ctx.absgrad = absgrad
        ctx.mark_non_differentiable(stats)
        return out_colors, out_depths, transmittances, stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v_colors, v_depths, v_transmittances, _):
        means2d, conics, opacities, saturated, *rest = ctx.saved_tensors
        view, lists = rest[: ctx.num_view], rest[ctx.num_view :]
        shape = (len(view[7]), view[8].shape[1], ctx.settings[0])  # Q, H, W
        v_colors = conics.new_zeros(*shape, 3) if v_colors is None else v_colors.contiguous()
        v_transmittances = conics.new_zeros(shape) if v_transmittances is None else v_transmittances.contiguous()
        v_depths = None if v_depths is None else v_depths.contiguous()
        v_means2d, v_splat_depths, v_conics, v_opacities, v_splat_colors, absolute = _backend.load(
            means2d.device
        ).rasterize_partials_backward(
            conics,
            opacities,
            *view,
            saturated,
            *ctx.settings,
            *lists,
            v_colors,
            v_depths,
            v_transmittances,
            ctx.absgrad,
        )
        if ctx.absgrad:
            means2d.absgrad = absolute
        return v_means2d, v_splat_depths, v_conics, v_opacities, v_splat_colors, *[None] * 9


def _checked_splats(
    means2d: Tensor, depths: Tensor, conics: Tensor, opacities: Tensor, colors: Tensor, extents: Tensor
) -> tuple[Tensor, ...]:
    count = len(means2d) if isinstance(means2d, Tensor) and means2d.ndim == 2 else -1
    if count < 0:
        raise ValueError(f"means2d must be a tensor of shape [N, 2], got {_describe(means2d)}.")
    device = means2d.device
    return (
        _checked("means2d", means2d, (count, 2), device=device),
        _checked("depths", depths, (count,), device=device),
        _checked("conics", conics, (count, 3), device=device),
        _checked("opacities", opacities, (count,), device=device),
        _checked("colors", colors, (count, 3), device=device),
        _checked("extents", extents.detach(), (count, 2), device=device),
    )


def _checked_view(
    viewmat: Tensor, K: Tensor, tree: Tree, order: Sequence[int], spans: Tensor, width: int, device: torch.device
) -> tuple[Tensor, ...]:
    """viewmat, K, the tree's axis, threshold, children, lo, hi, the order and the spans, as the ops take them.

    Those that a CPU holds may come from there, whatever the device.
    """
    parts = len(tree.lo)
    height = spans.shape[1] if isinstance(spans, Tensor) and spans.ndim == 3 else 0
    if not 0 < width < 2**20 or not 0 < height < 2**20:
        raise ValueError(f"The image is {width} x {height} pixels (height from spans [P, H, 2]); it must have some.")
    viewmat = _checked("viewmat", viewmat.detach(), (4, 4), device=viewmat.device)
    K = _checked("K", K.detach(), (3, 3), device=K.device)
    # Where K is on a GPU its values stay there: looking at them would wait for the device.
    if K.device.type == "cpu" and not (K[0, 0] > 0 and K[1, 1] > 0):
        raise ValueError(f"K's focal lengths are {K[0, 0].item()} and {K[1, 1].item()}; they must be positive.")
    order = [int(partition) for partition in order]
    if len(set(order)) != len(order) or any(not 0 <= partition < parts for partition in order):
        raise ValueError(f"order is {order}; it must name partitions of 0..{parts - 1}, each once.")
    tensors = (
        viewmat,
        K,
        _checked("tree.axis", tree.axis, (parts - 1,), torch.int32, tree.axis.device),
        _checked("tree.threshold", tree.threshold, (parts - 1,), device=tree.threshold.device),
        _checked("tree.children", tree.children, (parts - 1, 2), torch.int32, tree.children.device),
        _checked("tree.lo", tree.lo, (parts, 3), device=tree.lo.device),
        _checked("tree.hi", tree.hi, (parts, 3), device=tree.hi.device),
        torch.tensor(order, dtype=torch.int32),
        _checked("spans", spans, (parts, height, 2), torch.int32, spans.device),
    )
    return tuple(_device.upload(tensor, device) for tensor in tensors)


def _checked(
    name: str,
    value: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:
    """The tensor, contiguous, if it is what the op reads: nothing is converted silently."""
    if not isinstance(value, Tensor) or tuple(value.shape) != shape or value.dtype != dtype:
        raise ValueError(f"{name} must be a {str(dtype)[6:]} tensor of shape {list(shape)}, got {_describe(value)}.")
    if value.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {value.device}; the kernels run on the CPU and on CUDA GPUs.")
    if device is not None and value.device != device:
        raise ValueError(f"{name} is on {value.device}, but means2d is on {device}: pass {name}.to({str(device)!r}).")
    return value.contiguous()


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype)[6:]} {list(value.shape)} on {value.device}"
    return type(value).__name__
