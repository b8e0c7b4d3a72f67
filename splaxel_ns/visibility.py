"""Which partitions take part in a view, and which pixels each of them renders.

Paper section 4.3: a partition's pixels are those where the camera's frustum meets its box. The boxes here hold the
Gaussians' supports, not the leaves, which reach to infinity.
Shapes: N Gaussians, P partitions, S content boxes of a partition, V views, H x W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from splaxel_ns import cuda
from splaxel_ns.partition import PartitionTree
from splaxel_ns.types import Boundary, ContentBoxes, Splats, View, ViewPlan

CLAMP_MARGIN = 0.3
"""The projection's Jacobian is taken at most this part of the half field of view outside the image, as in gsplat."""

SAMPLE = 4096
"""Gaussians looked at to find where the bulk of a partition lies. It decides how tight the boxes are, never whether
they hold everything."""
BULK_QUANTILE = 0.01
BULK_MARGIN = 0.1
EVERYTHING = 1e30
"""World units: where a box this large ends, nobody looks; it fills every image."""


def view_slope(K: Tensor, width: int, height: int) -> float:
    """By how much the steepest ray lengthens a Gaussian's projected radius: sqrt(1 + a^2 + b^2).

    a and b are |x / z| and |y / z| where the projection clamps its Jacobian (design: content box).

    Args:
        K: [3, 3], pixels.
    """
    return _steepest(K[None], torch.tensor([[width, height]]))


def check_pinhole(view: View) -> None:
    """Refuse what the regions and the order of partitions do not hold for.

    Raises:
        ValueError: skew, a focal length that is not positive, a last row of K that is not (0, 0, 1), values that are
            not finite, a world-to-camera matrix that is no rigid motion, or an image without pixels.
    """
    _check_pinholes(view.world_to_cam[None], view.K[None], torch.tensor([[view.width, view.height]]))


def content_boxes(
    means: Tensor,
    scales: Tensor,
    tree: PartitionTree,
    boundary: Boundary,
    slope: float,
    owner: Tensor | None = None,
) -> ContentBoxes:
    """Boxes that hold, for each partition, the supports of its Gaussians: means +- 3.33 s_max slope.

    3.33 = sqrt(2 ln 255) reaches alpha = 1/255 at opacity 1. The bulk of a partition gets four slices along its
    longest side; what sticks out of the bulk gets a box per side it sticks out of, and huge Gaussians one of their
    own, so that a few of them do not spread the region over every image. Gaussians that are not finite are ignored.
    Under `exact` a partition also draws what its neighbours' Gaussians put into its leaf: `plan_view` intersects
    the leaf with the boxes of all.

    Args:
        means: [N, 3], world units.
        scales: [N, 3], activated, world units.
        slope: the largest `view_slope` of the views to come; wider views are served with looser boxes.
        owner: [N] int32, `tree.locate(means)` where it is at hand.
    """
    means, scales = means.detach(), scales.detach()
    if cuda.on_gpu(means) and tree.num_partitions == 1:  # finding out would wait for the GPU, and nobody else draws
        everything = torch.tensor([-EVERYTHING, EVERYTHING])[:, None].expand(1, 1, 2, 3).contiguous()
        return ContentBoxes(everything, torch.zeros(1, 1), math.inf, boundary)
    if owner is None:
        owner = tree.locate(means)
    stride = max(1, len(means) // SAMPLE)
    bulk, slice_axis = cuda.bulk_boxes(means, owner, tree.num_partitions, stride, BULK_QUANTILE, BULK_MARGIN)
    bounds, radii = cuda.content_bounds(means, scales, owner, bulk, slice_axis, slope)
    # Views are planned on the CPU. From a GPU these few numbers are waited for, once per step.
    return ContentBoxes(bounds.cpu(), radii.cpu(), slope, boundary)


def plan_view(view: View, tree: PartitionTree, boxes: ContentBoxes, near: float) -> ViewPlan:
    """The participants of a view, front to back, and every partition's pixel region.

    A pixel that a Gaussian of the partition touches (alpha >= 1/255) is inside the region; under `exact`, one that
    any Gaussian touches at a point inside the partition's leaf.

    Args:
        near: depth in world units below which Gaussians are culled.

    Raises:
        ValueError: the view is not a pinhole view.
    """
    check_pinhole(view)
    bounds = _bounds_for(boxes, view_slope(view.K, view.width, view.height))
    spans = cuda.region_spans(
        bounds, view.world_to_cam, view.K, view.width, view.height, near, _leaves(tree, boxes.boundary)
    )
    taking_part = (spans[..., 1] > spans[..., 0]).any(dim=1).tolist()
    return ViewPlan(tuple(leaf for leaf in tree.order(view.cam_center) if taking_part[leaf]), spans)


def tightened(plan: ViewPlan, splats: Splats, owner: Tensor, boundary: Boundary, width: int) -> ViewPlan:
    """The plan with regions that end where the splats of this view do.

    Boxes cannot tell that what they hold lies behind the camera or outside the frustum; one huge Gaussian spreads
    them over every view. Under `exact` a partition draws others' Gaussians too, and its region stays that of boxes.

    Args:
        splats: N Gaussians in view.
        owner: Their partitions.  # [N] int32
    """
    if boundary == "exact" or len(plan.spans) == 1:
        return plan
    return met_by(plan, spans_of(splats, owner, plan, width))


def spans_of(splats: Splats, owner: Tensor, plan: ViewPlan, width: int) -> Tensor:
    """[P, H, 2] int32: what each partition's splats can touch. On the CPU: a GPU's projection is waited for."""
    num_partitions, height = plan.spans.shape[:2]
    return cuda.splat_spans(splats.means2d, splats.extents, owner, num_partitions, width, height).cpu()


def met_by(plan: ViewPlan, spans: Tensor) -> ViewPlan:
    """The plan with its regions cut down to `spans` [P, H, 2]; partitions without pixels take no part."""
    start, stop = torch.maximum(plan.spans[..., 0], spans[..., 0]), torch.minimum(plan.spans[..., 1], spans[..., 1])
    some = stop > start
    met = torch.stack([torch.where(some, start, 0), torch.where(some, stop, 0)], dim=-1)
    taking_part = some.any(dim=1).tolist()
    return ViewPlan(tuple(leaf for leaf in plan.order if taking_part[leaf]), met)


def participants(views: Sequence[View], tree: PartitionTree, boxes: ContentBoxes, near: float) -> list[set[int]]:
    """The partitions with a non-empty region in each of many views: those `plan_view` would list.

    Raises:
        ValueError: a view is not a pinhole view.
    """
    if not views:
        return []
    world_to_cams, Ks = torch.stack([view.world_to_cam for view in views]), torch.stack([view.K for view in views])
    sizes = torch.tensor([(view.width, view.height) for view in views], dtype=torch.int32)
    _check_pinholes(world_to_cams, Ks, sizes)
    present = cuda.regions_present(
        _bounds_for(boxes, _steepest(Ks, sizes)), world_to_cams, Ks, sizes, near, _leaves(tree, boxes.boundary)
    )
    return [{leaf for leaf, is_present in enumerate(row) if is_present} for row in present.tolist()]


def _steepest(Ks: Tensor, sizes: Tensor) -> float:
    """The largest `view_slope` of many views; Ks [V, 3, 3], sizes [V, 2] width and height in pixels."""
    Ks, sizes = Ks.detach().double(), sizes.double()
    focal, center = torch.stack([Ks[:, 0, 0], Ks[:, 1, 1]], dim=1), Ks[:, :2, 2]
    steepest = (torch.maximum((sizes - center).abs(), center.abs()) + CLAMP_MARGIN * 0.5 * sizes) / focal  # [V, 2]
    return math.sqrt(1.0 + float((steepest**2).sum(dim=1).max()))


def _check_pinholes(world_to_cams: Tensor, Ks: Tensor, sizes: Tensor) -> None:
    """`check_pinhole` for many views: world_to_cams [V, 4, 4], Ks [V, 3, 3], sizes [V, 2]."""
    Ks, world_to_cams = Ks.detach().double(), world_to_cams.detach().double()
    rotations = world_to_cams[:, :3, :3]
    last_row = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    focal = torch.stack([Ks[:, 0, 0], Ks[:, 1, 1]], dim=1)
    skewed = (Ks[:, 0, 1] != 0) | (Ks[:, 1, 0] != 0) | (Ks[:, 2] != last_row).any(dim=1)
    finite = Ks.isfinite().all(dim=2).all(dim=1) & world_to_cams.isfinite().all(dim=2).all(dim=1)
    unit = (rotations @ rotations.transpose(1, 2) - torch.eye(3, dtype=torch.float64)).abs().amax(dim=(1, 2)) <= 1e-3
    remedy = "Splaxel renders undistorted pinhole views only; undistort the photographs first."
    for wrong, values, words in (
        ((sizes < 1).any(dim=1), sizes, "is the size of an image; it needs at least one pixel."),
        (~finite, Ks, "are intrinsics, or the pose beside them, that are not finite numbers."),
        ((focal <= 0).any(dim=1), focal, f"are focal lengths in pixels that are not positive. {remedy}"),
        (skewed, Ks, f"are intrinsics with skew or a projective part. {remedy}"),
        (~unit, rotations, "is a world-to-camera rotation that scales or shears; it must be a pure rotation."),
    ):
        if wrong.any():
            index = int(wrong.int().argmax())
            raise ValueError(f"View {index} of {len(wrong)}: {values[index].tolist()} {words}")


def _bounds_for(boxes: ContentBoxes, slope: float) -> Tensor:
    """[P, S, 2, 3]: the boxes, enlarged if the view is wider than those they were made for."""
    if slope <= boxes.slope:
        return boxes.bounds
    growth = (boxes.radii * (slope - boxes.slope))[..., None]
    return torch.stack([boxes.bounds[:, :, 0] - growth, boxes.bounds[:, :, 1] + growth], dim=2)


def _leaves(tree: PartitionTree, boundary: Boundary) -> Tensor | None:
    """[P, 2, 3] under `exact`, where regions end at the leaf's faces."""
    return torch.stack([tree.lo, tree.hi], dim=1) if boundary == "exact" else None
