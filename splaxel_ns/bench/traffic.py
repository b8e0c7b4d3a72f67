"""Which bytes a view takes at which pixels, from what its ranks draw: what `owner` saves, and where."""

from __future__ import annotations

import torch
from torch import Tensor

from splaxel_ns.exchange import HALO, RankRegions, dilated
from splaxel_ns.owner_exchange import BLOCK, OwnerRegions, block_sums

MANY = 4
"""Ranks that share a block."""


def traffic(regions: RankRegions) -> Tensor:
    """Bytes of all ranks together, at the pixels they are for, float32: partial pixels, gradients, composed halos.

    Returns:
        [H, W] int64.
    """
    taken = torch.zeros(regions.height * regions.width, dtype=torch.int64)
    for source in regions.order:
        for target in range(len(regions.spans)):
            if source == target:
                continue
            pixels = regions.stream(source, target)
            taken[pixels] += 16
            if isinstance(regions, OwnerRegions):
                taken[pixels[regions.one_way(source, pixels)]] += 16
                taken[regions.halo_stream(source, target)] += 12
    return taken.view(regions.height, regions.width)


def as_selective(regions: OwnerRegions) -> RankRegions:
    """The same ranks' regions for exchange `selective`."""
    needs = dilated(regions.spans, HALO, regions.width)
    return RankRegions(regions.order, regions.spans, needs, regions.width, regions.saturated)


def blocks_of_many(regions: OwnerRegions) -> dict[str, float]:
    """Bytes on the blocks that `MANY` or more ranks share, with owners and as in `selective`."""
    drawn_in = torch.stack([block_sums(regions.drawn_by(rank).float()) > 0 for rank in regions.order])  # [Q, Y, X]
    many = drawn_in.sum(dim=0) >= MANY
    pixels = many.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: regions.height, : regions.width]
    return {
        "blocks": float(many.sum()),
        "owner_bytes": float(traffic(regions)[pixels].sum()),
        "selective_bytes": float(traffic(as_selective(regions))[pixels].sum()),
    }
