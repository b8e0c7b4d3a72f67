"""Content boxes of the partitions and their pixel regions; see `splaxel_ns.visibility` for what they mean.

Shapes: N Gaussians, P partitions, S content boxes of a partition, V views, H x W pixels. None is differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splaxel_ns.cuda import _backend, _device, _scene


def locate(points: Tensor, axis: Tensor, threshold: Tensor, children: Tensor) -> Tensor:
    """The leaf of a KD-tree that holds each point; a coordinate equal to the threshold, or greater, goes right.

    Args:
        points: [N, 3], world units.
        axis: [P - 1] int32, of each node; node 0 is the root.
        threshold: [P - 1] float32.
        children: [P - 1, 2] int32: a node if >= 0, otherwise ~leaf.

    Returns:
        [N] int32.
    """
    _check("points", points, (len(points), 3))
    return _backend.load().locate(_float(points), _int(axis), _float(threshold), _int(children))


def bulk_boxes(
    means: Tensor, owner: Tensor, num_partitions: int, stride: int, quantile: float, margin: float
) -> tuple[Tensor, Tensor]:
    """Per partition a box around the bulk of its finite means, of which every `stride`-th is looked at.

    Args:
        means: [N, 3], world units.
        owner: [N] int32, 0 to P - 1.
        quantile: This part of the means is left out at either end of every axis.
        margin: Added on all sides, in parts of the longest.

    Returns:
        bulk [P, 2, 3] float32, infinite where nothing of a partition was looked at, and its longest axis [P] int32.

    Raises:
        ValueError: a tensor has the wrong shape, or an owner is no partition.
    """
    _check("means", means, (len(means), 3))
    _check("owner", owner, (len(means),))
    if _device.on_gpu(means):  # what is looked at comes to the CPU
        means, owner, stride = means[::stride], owner[::stride], 1
    return _backend.load().bulk_boxes(_float(means), _int(owner), num_partitions, stride, quantile, margin)


def content_bounds(
    means: Tensor, scales: Tensor, owner: Tensor, bulk: Tensor, slice_axis: Tensor, slope: float
) -> tuple[Tensor, Tensor]:
    """Boxes around the supports of each partition's Gaussians.

    Args:
        means: [N, 3], world units.
        scales: [N, 3], activated.
        owner: [N] int32, the partition of each Gaussian.
        bulk: [P, 2, 3] float32, lower and upper corner of where most of a partition's means lie.
        slice_axis: [P] int32, the axis along which the bulk is cut in slices.
        slope: factor on the cut-off radius 3.33 s_max.

    Returns:
        bounds [P, S, 2, 3] float32 (lower > upper where a box holds nothing) and radii [P, S], the largest cut-off
        radius in each, without slope.
    """
    num, num_partitions = len(means), len(bulk)
    _check("means", means, (num, 3))
    _check("scales", scales, (num, 3))
    _check("owner", owner, (num,))
    _check("bulk", bulk, (num_partitions, 2, 3))
    _check("slice_axis", slice_axis, (num_partitions,))
    if _device.on_gpu(means):
        return _scene.content_bounds(means.detach(), scales.detach(), owner, bulk, slice_axis, float(slope))
    return _backend.load().content_bounds(
        _float(means), _float(scales), _int(owner), _float(bulk), _int(slice_axis), float(slope)
    )


def region_spans(
    boxes: Tensor, viewmat: Tensor, K: Tensor, width: int, height: int, near: float, leaves: Tensor | None = None
) -> Tensor:
    """The row spans of every partition in one view: its boxes beyond the near plane, projected and dilated by 2 px.

    Args:
        boxes: [P, S, 2, 3], world units; boxes with lower > upper are skipped. On a GPU the work is done there.
        viewmat: [4, 4], world to camera, OpenCV axes.
        K: [3, 3], pixels.
        near: world units, > 0.
        leaves: [P, 2, 3]; if given, a partition's region is that of its leaf met by the boxes of all partitions.

    Returns:
        [P, H, 2] int32: partition p renders columns spans[p, y, 0] <= x < spans[p, y, 1] of row y; (0, 0) if none.
    """
    _check_boxes(boxes, leaves, near)
    _check("viewmat", viewmat, (4, 4))
    _check("K", K, (3, 3))
    if width < 1 or height < 1:
        raise ValueError(f"The view is {width} x {height} pixels; it needs at least one.")
    device = boxes.device if boxes.device.type == "cuda" else torch.device("cpu")
    leaves = None if leaves is None else _float(leaves, device)
    return _backend.load(device).region_spans(
        _float(boxes, device), leaves, _float(viewmat, device), _float(K, device), width, height, near
    )


def splat_spans(
    means2d: Tensor, extents: Tensor, owner: Tensor, num_partitions: int, width: int, height: int
) -> Tensor:
    """The row spans that each partition's projected Gaussians can touch.

    Args:
        means2d: [N, 2], pixels.
        extents: [N, 2], pixels: half sizes of the box that holds every pixel with alpha >= 1/255; 0: not seen.
        owner: [N] int32, the partition of each, 0 to P - 1.

    Returns:
        [P, H, 2] int32, as `region_spans`.

    Raises:
        ValueError: a tensor has the wrong shape, or an owner is no partition.
    """
    num = len(means2d)
    _check("means2d", means2d, (num, 2))
    _check("extents", extents, (num, 2))
    _check("owner", owner, (num,))
    if _device.on_gpu(means2d):
        return _scene.splat_spans(means2d.detach(), extents, owner, num_partitions, width, height)
    return _backend.load().splat_spans(_float(means2d), _float(extents), _int(owner), num_partitions, width, height)


def regions_present(
    boxes: Tensor, viewmats: Tensor, Ks: Tensor, sizes: Tensor, near: float, leaves: Tensor | None = None
) -> Tensor:
    """Whether each partition's region in each of many views holds a pixel; agrees with `region_spans`.

    Args:
        viewmats: [V, 4, 4].
        Ks: [V, 3, 3].
        sizes: [V, 2] int32, width and height in pixels.

    Returns:
        [V, P] bool.
    """
    _check_boxes(boxes, leaves, near)
    num_views = len(viewmats)
    _check("viewmats", viewmats, (num_views, 4, 4))
    _check("Ks", Ks, (num_views, 3, 3))
    _check("sizes", sizes, (num_views, 2))
    leaves = None if leaves is None else _float(leaves)
    return _backend.load().regions_present(_float(boxes), leaves, _float(viewmats), _float(Ks), _int(sizes), near)


def _check_boxes(boxes: Tensor, leaves: Tensor | None, near: float) -> None:
    if boxes.ndim != 4 or tuple(boxes.shape[2:]) != (2, 3):
        raise ValueError(f"boxes must have the shape [P, S, 2, 3], not {list(boxes.shape)}.")
    if leaves is not None:
        _check("leaves", leaves, (len(boxes), 2, 3))
    if not near > 0:
        raise ValueError(f"The near plane must lie in front of the camera, not at {near}.")


def _check(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} must have the shape {list(shape)}, not {list(value.shape)}.")


def _float(value: Tensor, device: torch.device | str = "cpu") -> Tensor:
    return value.detach().to(device, torch.float32).contiguous()


def _int(value: Tensor) -> Tensor:
    return value.detach().to("cpu", torch.int32).contiguous()
