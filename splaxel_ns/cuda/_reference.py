"""The slow, obvious form of partial rasterisation: every Gaussian at every pixel, in plain torch, for tests.

It follows the definitions in `cuda/rasterize.py` and shares nothing with the kernels; autograd differentiates it. Use
float64 and small images: memory grows with N x H x W.

Shapes: N Gaussians, P partitions (leaves of the KD-tree), Q participants of the view, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from splaxel_ns.cuda.rasterize import Tree

ALPHA_MIN = 1.0 / 255.0
ALPHA_MAX = 0.999


def rasterize_partials(
    means2d: Tensor,  # [N, 2] or, to differentiate per pixel, [N, H, W, 2]
    depths: Tensor,  # [N]
    conics: Tensor,  # [N, 3]
    opacities: Tensor,  # [N]
    colors: Tensor,  # [N, 3]
    extents: Tensor,  # [N, 2]; zero: not visible
    owner: Tensor,  # [N]
    viewmat: Tensor,  # [4, 4]
    K: Tensor,  # [3, 3]
    tree: Tree,
    order: Sequence[int],
    spans: Tensor,  # [P, H, 2]
    width: int,
    boundary: str = "filter",
    stop: float = 1e-4,
    saturated: Tensor | None = None,  # [Q, H, W] bool
    tolerance: float = 1e-4,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Partial images as `splaxel_ns.cuda.rasterize_partials` defines them, in the type of `means2d`.

    Args:
        saturated: pixels that a participant leaves out, unpacked here.
        tolerance: relative distance from a threshold below which a pixel is reported as doubtful.

    Returns:
        colors [Q, H, W, 3], depths [Q, H, W], transmittances [Q, H, W], and doubtful [Q, H, W] bool: pixels where a
        float32 kernel may rightly decide otherwise, because an alpha, a transmittance or a point on a ray lies within
        rounding of a threshold.
    """
    height = spans.shape[1]
    sequence = nearest_first(depths.detach(), (means2d if means2d.ndim == 2 else means2d[:, 0, 0]).detach())
    sequence = sequence[(extents[sequence] > 0).all(dim=1)]
    means2d, depths, conics = means2d[sequence], depths[sequence], conics[sequence]
    opacities, colors, owner = opacities[sequence], colors[sequence], owner[sequence]

    pixels = _pixel_centres(height, width, means2d.dtype)  # [H, W, 2]
    if means2d.ndim == 2:
        means2d = means2d[:, None, None, :]
    dx, dy = (pixels - means2d).unbind(dim=-1)  # [n, H, W]
    a, b, c = conics[:, :, None, None].unbind(dim=1)
    sigma = 0.5 * (a * dx**2 + c * dy**2) + b * dx * dy
    raw = opacities[:, None, None] * torch.exp(-sigma)
    touches = (sigma >= 0) & (raw >= ALPHA_MIN)  # [n, H, W]
    points = _points_on_rays(pixels, depths.detach(), viewmat.to(pixels), K.to(pixels))  # [n, H, W, 3]
    leaves = _walk(tree, points)  # [n, H, W]
    near_threshold = (raw / ALPHA_MIN - 1).abs() < tolerance
    near_threshold |= (raw / ALPHA_MAX - 1).abs() < 1e-2 * tolerance
    near_threshold |= touches & _near_a_face(tree, points, viewmat.to(pixels), tolerance)

    results = []
    regions = _regions(spans, width)  # [P, H, W]
    for index, partition in enumerate(order):
        own = (owner == partition)[:, None, None]
        if boundary == "exact":
            drawn = leaves == partition
        elif boundary == "filter":
            elsewhere = regions[leaves, torch.arange(height)[:, None], torch.arange(width)]
            drawn = own & ~((leaves != partition) & elsewhere)
        else:
            drawn = own.expand_as(touches)
        rendered = regions[partition] if saturated is None else regions[partition] & ~saturated[index]
        results.append(_blend(raw, touches & drawn & rendered, depths, colors, stop, near_threshold, tolerance))
    if not results:
        empty = pixels.new_zeros(0, height, width)
        return pixels.new_zeros(0, height, width, 3), empty, empty, empty.bool()
    out_colors, out_depths, transmittances, doubtful = zip(*results, strict=True)
    return torch.stack(out_colors), torch.stack(out_depths), torch.stack(transmittances), torch.stack(doubtful)


def nearest_first(depths: Tensor, means2d: Tensor) -> Tensor:
    """The Gaussians [N] int64 in order of depth [N], equal depths from left to right and from the top [N, 2]."""
    sequence = torch.argsort(means2d[:, 1], stable=True)
    for values in (means2d[:, 0], depths):
        sequence = sequence[torch.argsort(values[sequence], stable=True)]
    return sequence


def _blend(
    raw: Tensor,  # [n, H, W], nearest first
    drawn: Tensor,  # [n, H, W] bool
    depths: Tensor,  # [n]
    colors: Tensor,  # [n, 3]
    stop: float,
    near_threshold: Tensor,  # [n, H, W] bool
    tolerance: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One participant's colour [H, W, 3], depth, transmittance and doubtful pixels, each [H, W]."""
    alpha = torch.where(drawn, raw.clamp(max=ALPHA_MAX), 0.0)
    passed = torch.cumprod(1.0 - alpha, dim=0)  # [n, H, W], behind each splat
    before = torch.cat([torch.ones_like(passed[:1]), passed[:-1]])
    # The stop is inclusive: the splat that brings the transmittance to the threshold is still blended.
    alpha = torch.where(before.detach() > stop, alpha, 0.0)
    passed = torch.cumprod(1.0 - alpha, dim=0)
    before = torch.cat([torch.ones_like(passed[:1]), passed[:-1]])
    weights = alpha * before
    transmittance = torch.prod(1.0 - alpha, dim=0)
    doubtful = near_threshold.any(dim=0)
    if stop > 0:
        doubtful = doubtful | ((passed / stop - 1).abs() < tolerance).any(dim=0)
    return (
        torch.einsum("nhw,nc->hwc", weights, colors),
        torch.einsum("nhw,n->hw", weights, depths),
        transmittance,
        doubtful,
    )


def _pixel_centres(height: int, width: int, dtype: torch.dtype) -> Tensor:
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([x, y], dim=-1).to(dtype) + 0.5  # [H, W, 2]


def _points_on_rays(pixels: Tensor, depths: Tensor, viewmat: Tensor, K: Tensor) -> Tensor:
    """The points of all pixels' rays at the depths [n]: [n, H, W, 3], world units."""
    rotation = viewmat[:3, :3]
    center = -(rotation.T @ viewmat[:3, 3])
    slopes = (pixels - K[:2, 2]) / torch.stack([K[0, 0], K[1, 1]])
    directions = torch.cat([slopes, torch.ones_like(slopes[..., :1])], dim=-1) @ rotation  # [H, W, 3], R^T d
    return center + depths[:, None, None, None].to(pixels) * directions


def _walk(tree: Tree, points: Tensor) -> Tensor:
    """The leaf that holds each point [..., 3]: [...] int64."""
    if len(tree.axis) == 0:
        return torch.zeros(points.shape[:-1], dtype=torch.int64)
    node = torch.zeros(points.shape[:-1], dtype=torch.int64)
    axis, threshold, children = tree.axis.long(), tree.threshold.to(points), tree.children.long()
    while bool((node >= 0).any()):
        inner = node.clamp(min=0)
        value = points.gather(-1, axis[inner][..., None])[..., 0]
        next_node = torch.where(value >= threshold[inner], children[inner, 1], children[inner, 0])
        node = torch.where(node >= 0, next_node, node)
    return ~node


def _near_a_face(tree: Tree, points: Tensor, viewmat: Tensor, tolerance: float) -> Tensor:
    """Where a point's coordinate lies within rounding of a cut, whether or not the cut is in its box."""
    near = torch.zeros(points.shape[:-1], dtype=torch.bool)
    scale = points.abs().amax(dim=-1) + viewmat[:3, 3].abs().max() + 1.0
    for axis, threshold in zip(tree.axis.tolist(), tree.threshold.tolist(), strict=True):
        near |= (points[..., axis] - threshold).abs() < 0.1 * tolerance * scale
    return near


def _regions(spans: Tensor, width: int) -> Tensor:
    """[P, H, W] bool."""
    columns = torch.arange(width)
    return (columns >= spans[..., :1]) & (columns < spans[..., 1:])
