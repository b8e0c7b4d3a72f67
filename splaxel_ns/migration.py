"""Gaussians that move from rank to rank: those that have left their rank's boxes, and all that new boxes assign anew.

Paper, section 8.1. A Gaussian moves with everything that belongs to it: parameters, Adam's moments, statistics.

Shapes: R ranks, N Gaussians of this rank before, M after.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from splaxel_ns.comm import World
from splaxel_ns.partition import PartitionTree, imbalance
from splaxel_ns.strategy import STATISTICS

if TYPE_CHECKING:
    from splaxel_ns.distributed import DistributedGaussians

SAMPLE = 2**17
"""Means, of all ranks together, that new boxes are cut from."""
MOMENTS = ("exp_avg", "exp_avg_sq")


def move_rows(world: World, destination: Tensor, tables: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Send each row to its rank. Every rank calls this with tables of the same names and widths.

    Args:
        destination: The rank of each row.  # [N] int64
        tables: float32, one row per Gaussian.  # each [N, ...]

    Returns:
        Each [M, ...]: the rows that stay, then those that came, by source.

    Raises:
        LostRank: A peer is gone.
    """
    order = sorted(tables)
    widths = [math.prod(tables[name].shape[1:]) for name in order]  # reshape cannot find them where there is no row
    num = len(destination)
    flat = torch.cat(
        [tables[name].detach().reshape(num, width) for name, width in zip(order, widths, strict=True)], dim=1
    )  # [N, F]
    stay = flat[destination == world.rank]
    parts = [flat[destination == rank] if rank != world.rank else flat[:0] for rank in range(world.size)]
    received = world.to_each(parts, "migration")
    held = torch.cat([stay, *(part for rank, part in enumerate(received) if rank != world.rank)])
    return {
        # Copied, also where there is no row: as views of one tensor they would count each other's changes as their own.
        name: part.reshape(len(held), *tables[name].shape[1:]).clone(memory_format=torch.contiguous_format)
        for name, part in zip(order, held.split(widths, dim=1), strict=True)
    }


def tables_of(model: DistributedGaussians, optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, Tensor]:
    """All that belongs to the Gaussians of this rank, by name."""
    tables: dict[str, Tensor] = {}
    for name, parameter in model.gauss_params.items():
        tables[f"parameter {name}"] = parameter.detach()
        state = optimizers[name].state.get(parameter, {})
        for moment in MOMENTS:
            tables[f"{moment} {name}"] = state[moment] if moment in state else torch.zeros_like(parameter)
    for name in STATISTICS:
        if name in model.strategy_state:
            value = model.strategy_state[name]
            nothing = torch.zeros(model.num_points, device=model.device)
            tables[f"statistics {name}"] = nothing if value is None else value
    return tables


def take_over(
    model: DistributedGaussians, optimizers: Mapping[str, torch.optim.Optimizer], tables: Mapping[str, Tensor]
) -> None:
    """Put other rows in the place of this rank's Gaussians; `tables` as from `tables_of`."""
    for name in list(model.gauss_params):
        old, optimizer = model.gauss_params[name], optimizers[name]
        new = Parameter(tables[f"parameter {name}"])
        state: dict[str, Any] = optimizer.state.pop(old, {})
        if state:
            optimizer.state[new] = state | {moment: tables[f"{moment} {name}"] for moment in MOMENTS}
        optimizer.param_groups[0]["params"] = [new]
        model.gauss_params[name] = new
    for name in STATISTICS:
        if name in model.strategy_state:
            model.strategy_state[name] = tables[f"statistics {name}"]


def migrate(model: DistributedGaussians, optimizers: Mapping[str, torch.optim.Optimizer]) -> int:
    """Move every Gaussian that has left its rank's boxes to the rank it is in; every rank calls this at once.

    Returns:
        How many moved, of all ranks.

    Raises:
        RuntimeError: Gaussians were lost or doubled on the way.
    """
    world = model.world
    destination = model.rank_of(model.means.detach())
    leaving = int((destination != world.rank).sum())
    before = world.gather(torch.tensor([model.num_points, leaving])).sum(dim=0).tolist()
    if before[1]:
        take_over(model, optimizers, move_rows(world, destination, tables_of(model, optimizers)))
    model.changed()
    counts = model.count()
    if sum(counts) != before[0]:
        raise RuntimeError(
            f"{before[0]} Gaussians set out and {sum(counts)} arrived: report this, and use --resume auto."
        )
    return before[1]


def rebalance(
    model: DistributedGaussians, optimizers: Mapping[str, torch.optim.Optimizer], tree: PartitionTree | None = None
) -> str | None:
    """Cut space anew if a rank holds too many Gaussians, and move them to their boxes.

    Args:
        tree: New boxes whatever the balance; None: boxes at the medians, if the ranks are out of balance.

    Returns:
        What was done, or None.
    """
    counts = model.count()
    before = imbalance(counts)
    if tree is None:
        if before <= model.config.max_imbalance:
            return None
        tree = cut_anew(model)
    model.take_tree(tree)
    moved = migrate(model, optimizers)
    after = imbalance(model.count())
    return f"new boxes: {moved} Gaussians moved, imbalance {before:.0%} before and {after:.0%} after"


def cut_anew(model: DistributedGaussians) -> PartitionTree:
    """Boxes at the medians of a sample of all ranks' means, the same on all ranks."""
    share = max(1, -(-model.num_total // SAMPLE))
    sample = torch.cat(model.world.gather_uneven(model.means.detach()[::share].contiguous(), "migration"))
    return PartitionTree.build(sample, model.tree.num_partitions)


def uneven_tree(means: Tensor, num_partitions: int, wanted: float) -> PartitionTree:
    """Boxes of which the last holds more than its share: imbalance about `wanted`, to try what balancing does.

    Args:
        means: [N, 3].
        num_partitions: P.
        wanted: N_max / mean - 1, at most P - 1.
    """
    if num_partitions == 1:
        return PartitionTree.build(means, 1)
    means = means.cpu()
    heavy = min((1.0 + wanted) / num_partitions, 0.95)  # share of the last box
    extent = means.quantile(torch.tensor([0.01, 0.99]), dim=0)
    axis = int((extent[1] - extent[0]).argmax())
    # Medians of a cloud from which the last box's surplus is missing leave that surplus to the last box.
    last = torch.argsort(means[:, axis], descending=True)
    keep = torch.ones(len(means), dtype=torch.bool)
    surplus = heavy - (1.0 - heavy) / (num_partitions - 1)
    keep[last[: int(max(surplus, 0.0) * len(means))]] = False
    return PartitionTree.build(means[keep], num_partitions)
