"""What a GPU needs of all Gaussians beside their drawing, in torch's operations.

As csrc/region.cpp and splat_spans.cpp on the CPU. Nothing here waits for the device.

Shapes: N Gaussians, P partitions, S = 11 content boxes of a partition, H rows of the image.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from splaxel_ns.cuda._device import upload

# kSlices, kSides, kHugePart and kCutoff of csrc/region.cpp
SLICES, SIDES = 4, 6
HUGE = SLICES + SIDES
BOXES = HUGE + 1
HUGE_PART, CUTOFF = 0.25, 3.33


def content_bounds(
    means: Tensor, scales: Tensor, owner: Tensor, bulk: Tensor, slice_axis: Tensor, slope: float
) -> tuple[Tensor, Tensor]:
    """As `region.content_bounds`, on the Gaussians' device; bulk [P, 2, 3] and slice_axis [P] come from the CPU."""
    device, num_partitions = means.device, len(bulk)
    bulk, axis, leaf = upload(bulk, device), upload(slice_axis, device).long(), owner.long()
    radius = CUTOFF * scales.amax(dim=1)  # [N]
    reach = radius * slope
    largest = torch.finfo(torch.float32).max
    low = (means - reach[:, None]).clamp_min(-largest)
    high = (means + reach[:, None]).clamp_max(largest)
    inner, outer = bulk[leaf, 0], bulk[leaf, 1]  # [N, 3]
    beyond, side = torch.stack([inner - low, high - outer], dim=2).flatten(1).max(dim=1)  # [N], side 2 axis + (0 | 1)
    along = axis[leaf]
    first = inner.gather(1, along[:, None])[:, 0]
    length = outer.gather(1, along[:, None])[:, 0] - first
    part = ((means.gather(1, along[:, None])[:, 0] - first) / length * SLICES).nan_to_num(0.0, 0.0, 0.0)
    slices = torch.where(length < math.inf, part.clamp(0, SLICES - 1).long(), 0)
    box = torch.where(beyond > 0, torch.where(reach > HUGE_PART * length, HUGE, SLICES + side), slices)
    finite = means.isfinite().all(dim=1) & scales.isfinite().all(dim=1)
    # Those that are not finite go to a box of their own, which is dropped.
    place = torch.where(finite, leaf * BOXES + box, num_partitions * BOXES)
    count = num_partitions * BOXES + 1
    places = place[:, None].expand(-1, 3)
    lo = torch.full((count, 3), math.inf, device=device).scatter_reduce_(0, places, low, "amin")
    hi = torch.full((count, 3), -math.inf, device=device).scatter_reduce_(0, places, high, "amax")
    radii = torch.zeros(count, device=device).scatter_reduce_(0, place, radius, "amax")
    bounds = torch.stack([lo, hi], dim=1)[:-1].view(num_partitions, BOXES, 2, 3)
    return bounds, radii[:-1].view(num_partitions, BOXES)


def splat_spans(
    means2d: Tensor, extents: Tensor, owner: Tensor, num_partitions: int, width: int, height: int
) -> Tensor:
    """As `region.splat_spans`, on the splats' device.

    A splat covers a run of rows. Its columns are noted at two places of a table of minima over runs of 2^k rows (the
    overlapping halves of its run), and the table is then folded from the longest runs down to single rows: the work
    does not grow with the splats' heights.
    """
    device = means2d.device
    size = upload(torch.tensor([width, height], dtype=torch.float32), device)
    begin = (means2d - extents - 0.5).clamp_min(0.0).floor()
    end = torch.minimum(means2d + extents + 0.5, size).ceil()
    seen = (extents[:, 0] > 0) & (end > begin).all(dim=1)
    begin, end = (torch.where(seen[:, None], side, 0.0).int() for side in (begin, end))
    (left, top), (right, bottom) = begin.unbind(1), end.unbind(1)
    levels = max(height - 1, 1).bit_length() + 1
    powers = upload(torch.tensor([2**k for k in range(levels)], dtype=torch.int32), device)
    level = torch.searchsorted(powers, bottom - top, right=True).sub(1).clamp_min(0)  # floor(log2(rows))
    run = powers[level]
    leaf = owner.long()
    # One place more takes what is not seen.
    rows = torch.stack([top, bottom - run]).long()  # [2, N]
    nowhere = levels * num_partitions * height
    place = torch.where(seen, (level * num_partitions + leaf) * height + rows, nowhere).flatten()
    table = torch.full((2, nowhere + 1), width, dtype=torch.int32, device=device)
    # The right end as its distance from the image's: both columns are minima then.
    values = torch.stack([left, width - right]).repeat(1, 2)  # [2, 2 N]
    table.scatter_reduce_(1, place.expand(2, -1), values, "amin")
    table = table[:, :-1].view(2, levels, num_partitions, height)
    folded = table[:, -1]
    for k in range(levels - 2, -1, -1):
        step = 2**k
        shifted = torch.full_like(folded, width)
        shifted[..., step:] = folded[..., : height - step]
        folded = torch.minimum(torch.minimum(folded, shifted), table[:, k])
    start, stop = folded[0], width - folded[1]  # [P, H]
    some = stop > start
    return torch.stack([torch.where(some, start, 0), torch.where(some, stop, 0)], dim=-1)
