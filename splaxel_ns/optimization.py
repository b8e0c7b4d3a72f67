"""Optimisers and learning-rate schedules that follow the same course at any batch size B."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from nerfstudio.engine.optimizers import Optimizers
from torch.nn import Parameter

RATES = ("lr_final", "lr_pre_warmup")
INTERVALS = ("max_steps", "warmup_steps", "warm_up_end")


class BatchOptimizers(Optimizers):
    """nerfstudio's optimisers, with the configured values taken as those of batch size 1.

    A step averages B views: learning rate x sqrt(B), epsilon / sqrt(B), betas ** B (the rule of Grendel),
    and the schedules' intervals, which are stated in images, become steps.

    Args:
        config: nerfstudio's mapping of parameter groups to `optimizer` and `scheduler` configurations; not changed.
        param_groups: Parameters by group.
        batch_size: B, views per step.
    """

    def __init__(self, config: dict[str, Any], param_groups: dict[str, list[Parameter]], batch_size: int) -> None:
        super().__init__({name: _for_batch(group, batch_size) for name, group in config.items()}, param_groups)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                if "betas" in group:
                    group["betas"] = tuple(beta**batch_size for beta in group["betas"])
                if type(optimizer) is torch.optim.Adam:
                    group["fused"] = True  # one pass over the parameters instead of ten

    def scheduler_step_all(self, step: int) -> None:
        """Advance every schedule by one step; the rates are logged by the trainer, not at each step."""
        for scheduler in self.schedulers.values():
            scheduler.step()

    def learning_rates(self) -> dict[str, float]:
        """The current learning rate of each parameter group."""
        return {name: float(optimizer.param_groups[0]["lr"]) for name, optimizer in self.optimizers.items()}


def _for_batch(group: dict[str, Any], batch_size: int) -> dict[str, Any]:
    """The `optimizer` and `scheduler` configurations of one parameter group, for batch size B instead of 1."""
    root = math.sqrt(batch_size)
    optimizer, scheduler = group["optimizer"], group.get("scheduler")
    scaled = {"optimizer": dataclasses.replace(optimizer, lr=optimizer.lr * root, eps=optimizer.eps / root)}
    if scheduler is None:
        return scaled | {"scheduler": None}
    changes: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(scheduler)):
        value: Any = getattr(scheduler, name)
        if value is None:
            continue
        if name in RATES:
            changes[name] = value * root
        elif name in INTERVALS:
            changes[name] = value / batch_size
        elif name == "milestones":
            changes[name] = tuple(math.ceil(milestone / batch_size) for milestone in value)
    return scaled | {"scheduler": dataclasses.replace(scheduler, **changes)}
