"""Gaussians + camera + partitions -> partial images -> image. Training, evaluation and `rasterize` share this path.

Shapes: N Gaussians, P partitions, Q participants of a view, K SH coefficients, H x W pixels.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from splaxel_ns import cuda
from splaxel_ns.compositing import check_background, check_tensor, compose, expected_depth
from splaxel_ns.partition import PartitionTree
from splaxel_ns.saturation import ViewMask
from splaxel_ns.types import MAX_PARTITIONS, Boundary, ContentBoxes, PartialImages, Splats, View, ViewPlan
from splaxel_ns.visibility import content_boxes, plan_view, tightened, view_slope

STOP = 1e-4
"""A pixel is finished, after the blend that gets it there, once its transmittance is at most this."""
MAX_SIDE = 2**15
"""Pixels along one side of an image that `rasterize` draws, and their number in all."""
MAX_PIXELS = 2**28


@dataclass(frozen=True)
class Gaussians:
    """Gaussians with activated parameters."""

    means: Tensor  # [N, 3], world units
    quats: Tensor  # [N, 4], wxyz, of any length
    scales: Tensor  # [N, 3], world units
    opacities: Tensor  # [N]
    sh0: Tensor  # [N, 1, 3]
    shN: Tensor  # [N, K - 1, 3]
    gradients: cuda.StepGradients | None = None
    """Where backward passes leave the gradients of splats; the tensors above then get none. None: autograd's way."""

    def __len__(self) -> int:
        return len(self.means)

    def tensors(self) -> tuple[Tensor, ...]:
        """The six tensors, in the order of the fields."""
        return self.means, self.quats, self.scales, self.opacities, self.sh0, self.shN


@dataclass(frozen=True)
class RenderOptions:
    """How a view is drawn, whatever is drawn."""

    sh_degree: int = 3
    near: float = 0.01  # world units
    far: float = 1e10  # world units
    antialiased: bool = False
    boundary: Boundary = "filter"
    stop: float = STOP  # 0: no pixel is ever finished early
    absgrad: bool = False
    count_clipped: bool = False


@dataclass(frozen=True)
class Partitions:
    """Boxes, what they hold and where that can reach, for the Gaussians of one moment."""

    tree: PartitionTree
    owner: Tensor  # [N] int32, the leaf that holds each mean
    boxes: ContentBoxes


@dataclass(frozen=True)
class Rendered:
    """One view, and what is known about how it came about."""

    rgb: Tensor  # [H, W, 3]
    alpha: Tensor  # [H, W]
    depth: Tensor  # [H, W], sum of weight times depth, undivided, world units
    splats: Splats
    plan: ViewPlan
    partials: PartialImages
    stats: cuda.RasterStats


@torch.no_grad()
def partitions_of(
    gaussians: Gaussians, tree: PartitionTree, boundary: Boundary, view: View, within: range | None = None
) -> Partitions:
    """Who owns which Gaussian and each partition's content boxes (design 3), good for `view` and any other lens.

    Args:
        within: The partitions of this rank, one of which owns each Gaussian wherever it has moved; None: all.
    """
    owner = tree.locate(gaussians.means, within)
    slope = view_slope(view.K, view.width, view.height)
    return Partitions(tree, owner, content_boxes(gaussians.means, gaussians.scales, tree, boundary, slope, owner))


def project_view(gaussians: Gaussians, view: View, options: RenderOptions) -> Splats:
    """Project the Gaussians and evaluate the colours of those the view sees (paper, Eq. 1-3)."""
    if gaussians.gradients is not None:
        means2d, depths, conics, opacities, extents, colors = cuda.project_and_color(
            gaussians.tensors(),
            view.world_to_cam,
            view.K,
            view.cam_center,
            view.width,
            view.height,
            options.near,
            options.far,
            options.sh_degree,
            options.antialiased,
            gaussians.gradients,
        )
        return Splats(means2d, depths, conics, opacities, colors, extents)
    means2d, depths, conics, opacities, extents = cuda.project(
        gaussians.means,
        gaussians.quats,
        gaussians.scales,
        gaussians.opacities,
        view.world_to_cam,
        view.K,
        view.width,
        view.height,
        options.near,
        options.far,
        options.antialiased,
    )
    visible = extents[:, 0] > 0  # [N]
    colors = cuda.spherical_harmonics(
        options.sh_degree, gaussians.means, view.cam_center, gaussians.sh0, gaussians.shN, visible
    )
    return Splats(means2d, depths, conics, opacities, colors, extents)


def render_view(
    gaussians: Gaussians,
    view: View,
    partitions: Partitions,
    background: Tensor,
    options: RenderOptions,
    mask: ViewMask | None = None,
) -> Rendered:
    """Draw one view: project, find the regions, rasterise every participant's partial image, compose.

    Args:
        gaussians: N Gaussians of this process.
        view: The camera.
        partitions: Boxes and owners of these Gaussians.
        background: Colour behind everything.  # [3]
        options: How to draw.
        mask: Saturated pixels to leave out.

    Returns:
        The view. Where no Gaussian is seen it is the background, with zero gradients for all of them.
    """
    plan = plan_view(view, partitions.tree, partitions.boxes, options.near)
    splats = project_view(gaussians, view, options)
    plan = tightened(plan, splats, partitions.owner, options.boundary, view.width)
    if mask is not None:
        plan = mask.applied_to(plan)
    partials, stats = draw_partials(splats, gaussians.means, partitions.owner, view, partitions.tree, plan, options)
    rgb, depth, alpha = compose(partials, background)
    return Rendered(rgb, alpha, depth, splats, plan, partials, stats)


def draw_partials(
    splats: Splats,
    means: Tensor,
    owner: Tensor,
    view: View,
    tree: PartitionTree,
    plan: ViewPlan,
    options: RenderOptions,
) -> tuple[PartialImages, cuda.RasterStats]:
    """The partial images of the partitions in `plan.order`.

    Args:
        splats: N Gaussians as the view sees them.
        means: Where they are, world units.  # [N, 3]
        owner: Their leaves.  # [N] int32
    """
    colors, depths, transmittances, stats = cuda.rasterize_partials(
        splats.means2d,
        splats.depths,
        splats.conics,
        splats.opacities,
        splats.colors,
        splats.extents,
        owner,
        means,
        view.world_to_cam,
        view.K,
        tree,
        plan.order,
        plan.spans,
        view.width,
        boundary=options.boundary,
        stop=options.stop,
        saturated=plan.saturated,
        absgrad=options.absgrad,
        count_clipped=options.count_clipped,
    )
    return PartialImages(colors, depths, transmittances), stats


def view_info(splats: Splats, view: View, stats: cuda.RasterStats | None) -> dict[str, Any]:
    """What densification needs to know of a view, under gsplat's names where it has them."""
    return {
        "means2d": splats.means2d,
        "depths": splats.depths,
        "conics": splats.conics,
        "opacities": splats.opacities,
        "extents": splats.extents,
        "width": view.width,
        "height": view.height,
        "n_cameras": 1,
        "stats": stats,
    }


def rasterize(
    means: Tensor,
    quats: Tensor,
    scales: Tensor,
    opacities: Tensor,
    sh: Tensor,
    viewmat: Tensor,
    K: Tensor,
    width: int,
    height: int,
    background: Tensor,
    num_partitions: int = 1,
    boundary: Boundary = "filter",
    *,
    sh_degree: int | None = None,
    near_plane: float = 0.01,
    far_plane: float = 1e10,
    rasterize_mode: Literal["classic", "antialiased"] = "classic",
    absgrad: bool = False,
    stop: float = STOP,
    tree: PartitionTree | None = None,
    count_clipped: bool = False,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Render Gaussians in convex partitions: partial images, composed front to back (paper, section 4).

    All tensors are float32, on the CPU or all on one GPU (where viewmat and K are better left on the CPU: views are
    planned there); parameters are activated, as for `gsplat.rasterization`. Differentiable in means, quats, scales,
    opacities, sh, viewmat and background. Gaussians with a value that is not finite, in sh too, are not drawn.

    Args:
        means: Centres, world units.  # [N, 3]
        quats: Rotations, wxyz, of any non-zero length.  # [N, 4]
        scales: Axes, world units.  # [N, 3]
        opacities: 0 to 1.  # [N]
        sh: Spherical harmonics coefficients, K = 1, 4, 9 or 16.  # [N, K, 3]
        viewmat: World to camera, OpenCV axes.  # [4, 4]
        K: Intrinsics, pixels.  # [3, 3]
        width: Pixels, 1 to 32768.
        height: Pixels, 1 to 32768.
        background: Colour behind everything, finite.  # [3]
        num_partitions: Boxes that space is cut into by a KD-tree over the means, 1 to 16; ignored if `tree` is given.
        boundary: What happens to Gaussians that straddle a box: "filter" (the paper), "exact" or "none".
        sh_degree: Degree that is evaluated, 0 to 3; None: all that `sh` holds.
        near_plane: Gaussians nearer than this are not drawn, world units.
        far_plane: Nor are those farther than this.
        rasterize_mode: "antialiased" compensates opacities for the 0.3 px blur.
        absgrad: Leave the sums of absolute gradients in `info["means2d"].absgrad` after backward.
        stop: Transmittance at which a pixel is finished; 0 turns this off.
        tree: Boxes to use instead of new ones.
        count_clipped: Count in the statistics the pairs that regions cut off (there must be none; slow).

    Returns:
        rgb [H, W, 3], alpha [H, W], expected depth [H, W] (world units, gsplat's ED; 0 where alpha is 0), and info:
        means2d [N, 2], depths [N], conics [N, 3], opacities [N], radii [N] (pixels, 3 sigma, 0 if not seen),
        extents [N, 2], width, height, n_cameras, plan, tree, owner [N], partials, stats.

    Raises:
        ValueError: A shape, type or option is wrong; camera or background are not finite. The argument is named.
        RuntimeError: The ops cannot be compiled here.
    """
    _check_tensors(means, quats, scales, opacities, sh, viewmat, K, background)
    view = View(viewmat.cpu(), K.cpu(), _whole("width", width), _whole("height", height))
    if not (1 <= view.width <= MAX_SIDE and 1 <= view.height <= MAX_SIDE and view.width * view.height <= MAX_PIXELS):
        raise ValueError(
            f"width and height are {width} and {height}; each must be from 1 to {MAX_SIDE}, and the image have at most "
            f"{MAX_PIXELS} pixels"
        )
    if tree is None:
        num_partitions = _whole("num_partitions", num_partitions)
        if not 1 <= num_partitions <= MAX_PARTITIONS:
            raise ValueError(f"num_partitions is {num_partitions}; it must be from 1 to {MAX_PARTITIONS}")
    elif not isinstance(tree, PartitionTree):
        raise ValueError(f"tree must be a PartitionTree, not {type(tree).__name__}")
    coefficients = sh.shape[1]
    degree = {1: 0, 4: 1, 9: 2, 16: 3}[coefficients] if sh_degree is None else _whole("sh_degree", sh_degree)
    if not 0 <= degree <= 3 or (degree + 1) ** 2 > coefficients:
        raise ValueError(f"sh_degree is {degree}, but sh holds {coefficients} coefficients per Gaussian")
    if boundary not in get_args(Boundary):
        raise ValueError(f"boundary is {boundary!r}; it must be one of {', '.join(get_args(Boundary))}")
    if rasterize_mode not in ("classic", "antialiased"):
        raise ValueError(f"rasterize_mode is {rasterize_mode!r}; it must be classic or antialiased")
    if not 0 <= near_plane < far_plane:
        raise ValueError(f"near_plane {near_plane} and far_plane {far_plane} must satisfy 0 <= near < far")
    if not 0 <= stop < 1:
        raise ValueError(f"stop is {stop}; it must be at least 0 (off) and below 1")
    options = RenderOptions(
        degree, near_plane, far_plane, rasterize_mode == "antialiased", boundary, stop, absgrad, count_clipped
    )
    finite = sh.detach().isfinite().flatten(1).all(dim=1)  # [N]
    if not bool(finite.all()):  # the projection leaves out what is transparent, as it does what it cannot place
        sh, opacities = torch.where(finite[:, None, None], sh, 0.0), torch.where(finite, opacities, 0.0)
    gaussians = Gaussians(means, quats, scales, opacities, sh[:, :1].contiguous(), sh[:, 1:].contiguous())
    tree = PartitionTree.build(means, num_partitions) if tree is None else tree
    partitions = partitions_of(gaussians, tree, boundary, view)
    rendered = render_view(gaussians, view, partitions, background, options)
    info = view_info(rendered.splats, view, rendered.stats)
    info |= {"tree": tree, "owner": partitions.owner, "plan": rendered.plan, "partials": rendered.partials}
    seen = rendered.splats.extents[:, 0] > 0
    info["radii"] = torch.where(seen, cuda.screen_radii(rendered.splats.conics.detach()), 0.0)
    return rendered.rgb, rendered.alpha, expected_depth(rendered.depth, rendered.alpha), info


def _whole(name: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} is {value!r}; it must be a whole number") from None


def _check_tensors(
    means: Tensor,
    quats: Tensor,
    scales: Tensor,
    opacities: Tensor,
    sh: Tensor,
    viewmat: Tensor,
    K: Tensor,
    background: Tensor,
) -> None:
    tensors = {
        "means": means,
        "quats": quats,
        "scales": scales,
        "opacities": opacities,
        "sh": sh,
        "viewmat": viewmat,
        "K": K,
        "background": background,
    }
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    if means.dim() != 2:
        raise ValueError(f"means must be [N, 3], not {list(means.shape)}")
    num = len(means)
    shapes = ((num, 3), (num, 4), (num, 3), (num,), None, (4, 4), (3, 3), (3,))
    for (name, tensor), shape in zip(tensors.items(), shapes, strict=True):
        if shape is not None and tensor.shape != shape:
            raise ValueError(f"{name} must be {list(shape)}, not {list(tensor.shape)}")
    if sh.dim() != 3 or sh.shape[0] != num or sh.shape[1] not in (1, 4, 9, 16) or sh.shape[2] != 3:
        raise ValueError(f"sh must be [{num}, K, 3] with K = 1, 4, 9 or 16, not {list(sh.shape)}")
    for name, tensor in (("viewmat", viewmat), ("K", K)):
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} must be finite, not {tensor.tolist()}")
    check_background(background)
