"""Projected Gaussians that travel between ranks, and the gradients that come back for them.

`boundary exact` sends the splats that straddle a rank's box to the ranks whose box they reach into; the Gaussian-level
baseline (Grendel) sends every visible splat to each rank whose image strip it touches. Both use what is here: a splat
is 10 numbers one way and as many gradients the other, 2 more with absolute gradients (design 4, 5).

Shapes: R ranks, N Gaussians of this rank, M splats received.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from splaxel_ns import cuda
from splaxel_ns.comm import World
from splaxel_ns.partition import PartitionTree
from splaxel_ns.types import Splats, View

FIELDS = (("means2d", 2), ("depths", 1), ("conics", 3), ("opacities", 1), ("colors", 3))
WIDTH = sum(size for _, size in FIELDS)
SLACK = 1e-4
"""Extents are worked out again from conics and opacities as they were sent; rounding must not make them too small."""


@dataclass
class Visitors:
    """Splats of other ranks that this one draws beside its own, and who gets their gradients."""

    splats: Splats  # M, by source; leaves of the graph
    means: Tensor  # [M, 3], world units, where they are drawn from
    source: Tensor  # [M] int64, rank
    counts: list[int]  # by source
    sent: list[Tensor]  # by destination, the rows [m] int64 of this rank's splats that went there

    def send_back(self, world: World, absgrad: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Return the gradients of the visitors; get those of this rank's splats from where they were drawn.

        Args:
            absgrad: Sums of absolute gradients of means2d of the visitors, if they are wanted.  # [M, 2]

        Returns:
            Per destination, rows [m] and gradients [m, 10 or 12] of this rank's splats.

        Raises:
            LostRank: A peer is gone.
        """
        parts = []
        for name, size in FIELDS:
            value = getattr(self.splats, name)
            grad = torch.zeros_like(value) if value.grad is None else value.grad
            parts.append(grad.reshape(-1, size))
        if absgrad is not None:
            parts.append(absgrad)
        gradients = torch.cat(parts, dim=1)  # [M, 10 or 12]
        width = gradients.shape[1]
        sends, receives, first = {}, {}, 0
        for source, count in enumerate(self.counts):
            if count:
                sends[source] = gradients[first : first + count]
                first += count
        for target, rows in enumerate(self.sent):
            if len(rows):
                receives[target] = torch.empty(len(rows), width, device=gradients.device)
        received = world.start(sends, receives, "splat gradients").wait()
        return [(self.sent[target], grads) for target, grads in sorted(received.items())]


def swap_splats(world: World, splats: Splats, wanted: Tensor, view: View) -> Visitors:
    """Send each rank the splats it wants; every rank calls this for every view.

    Args:
        splats: N of this rank, without graph.
        wanted: Which of them each rank gets; nothing for this one.  # [R, N] bool
        view: The camera.

    Raises:
        LostRank: A peer is gone.
    """
    table = torch.cat([getattr(splats, name).detach().reshape(-1, size) for name, size in FIELDS], dim=1)  # [N, 10]
    sent = [row.nonzero().flatten() for row in wanted]
    received = world.to_each([table.index_select(0, rows) for rows in sent], "splats")
    counts = [0 if rank == world.rank else len(part) for rank, part in enumerate(received)]
    got = torch.cat([part for rank, part in enumerate(received) if rank != world.rank] or [table[:0]])
    columns = dict(zip((name for name, _ in FIELDS), got.split([size for _, size in FIELDS], dim=1), strict=True))
    means2d, depths, conics, opacities, colors = (
        columns[name].reshape(-1, size).squeeze(1) if size == 1 else columns[name].contiguous() for name, size in FIELDS
    )
    for leaf in (means2d, depths, conics, opacities, colors):
        leaf.requires_grad_(torch.is_grad_enabled())
    return Visitors(
        Splats(means2d, depths, conics, opacities, colors, cuda.extents_of(conics.detach(), opacities.detach(), SLACK)),
        back_projected(means2d.detach(), depths.detach(), view),
        cuda.upload(torch.repeat_interleave(torch.arange(world.size), torch.tensor(counts)), table.device),
        counts,
        sent,
    )


def back_projected(means2d: Tensor, depths: Tensor, view: View) -> Tensor:
    """World points [N, 3] at these pixels [N, 2] and depths [N]."""
    K = view.K
    x = (means2d[:, 0] - K[0, 2]) / K[0, 0] * depths
    y = (means2d[:, 1] - K[1, 2]) / K[1, 1] * depths
    world_to_cam = cuda.upload(view.world_to_cam.detach(), depths.device)
    return (torch.stack([x, y, depths], dim=-1) - world_to_cam[:3, 3]) @ world_to_cam[:3, :3]


def straddlers(splats: Splats, means: Tensor, view: View, tree: PartitionTree, runs: list[range]) -> Tensor:
    """Which visible splats [N] may own pairs in which rank's box: [R, N] bool.

    All pairs of a splat lie in the world box mean +- what its extents span at its depth (`cuda/rasterize.py`).
    """
    rotation = view.world_to_cam.detach()[:3, :3].abs()
    per_pixel = torch.stack([rotation[0] / view.K[0, 0], rotation[1] / view.K[1, 1]])  # [2, 3]
    per_pixel = cuda.upload(per_pixel, means.device) * (1.0 + SLACK)
    reach = (splats.extents * splats.depths.detach()[:, None]) @ per_pixel  # [N, 3]
    # Rounding of the pixel's world point is relative to the coordinates' size.
    reach = reach + 1e-6 * (means.abs() + splats.depths.detach().abs()[:, None])
    seen = splats.extents[:, 0] > 0
    boxes = [[cuda.upload(side, means.device) for side in tree.box_of(run)] for run in runs]
    inside = [((means + reach >= lo) & (means - reach < hi)).all(dim=-1) & seen for lo, hi in boxes]
    return torch.stack(inside)


def strip_of(rank: int, num_ranks: int, height: int) -> tuple[int, int]:
    """The rows [first, last) of an image that a rank draws in the Gaussian-level baseline."""
    return rank * height // num_ranks, (rank + 1) * height // num_ranks


def touching_strips(splats: Splats, num_ranks: int, height: int, halo: int) -> Tensor:
    """Which visible splats [N] touch which rank's strip with `halo` rows around it: [R, N] bool."""
    y, reach = splats.means2d.detach()[:, 1], splats.extents[:, 1]
    strips = torch.tensor([strip_of(rank, num_ranks, height) for rank in range(num_ranks)])  # [R, 2]
    strips = cuda.upload(strips, y.device)
    low, high = strips[:, :1] - halo, strips[:, 1:] + halo
    some = strips[:, 1:] > strips[:, :1]
    return (y + reach >= low) & (y - reach <= high) & (splats.extents[:, 0] > 0) & some


def concatenated(own: Splats, visitors: Splats) -> Splats:
    """Own splats and visitors in one, gradients to both."""
    names = [name for name, _ in FIELDS]
    parts = {name: torch.cat([getattr(own, name), getattr(visitors, name)]) for name in names}
    return Splats(**parts, extents=torch.cat([own.extents, visitors.extents]))


def cut_off(splats: Splats) -> Splats:
    """Copies that end the graph: what the pixels' gradients reach before those of other ranks are added."""
    grad = torch.is_grad_enabled()
    leaves = {name: getattr(splats, name).detach().requires_grad_(grad) for name, _ in FIELDS}
    return Splats(**leaves, extents=splats.extents)
