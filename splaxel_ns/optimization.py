"""Optimisers and learning-rate schedules that follow the same course at any batch size B."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from nerfstudio.engine.optimizers import Optimizers
from torch.nn import Parameter

from splaxel_ns import cuda

if TYPE_CHECKING:
    from splaxel_ns.scene import PartitionedGaussians

GAUSSIANS = ("means", "quats", "scales", "opacities", "features_dc", "features_rest")
"""The Gaussians' parameter groups in the order of `cuda.update_gaussians`."""
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
        self._gaussians: GaussianUpdate | RowUpdate | None = None
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                if "betas" in group:
                    group["betas"] = tuple(beta**batch_size for beta in group["betas"])
                if type(optimizer) is torch.optim.Adam:
                    group["fused"] = True  # one pass over the parameters instead of ten

    def fuse(self, model: PartitionedGaussians, only_visible: bool) -> str | None:
        """Move the Gaussians by kernels of our own, if that is possible: on the CPU from the gradients of their splats,
        without gradients of parameters; on a GPU from autograd's.

        Args:
            model: Whose views wait for the step from now on.
            only_visible: Leave Gaussians alone that no view of a step saw.

        Returns:
            None, or why autograd's gradients and torch's Adam are used, which moves every Gaussian at each step.
        """
        update = RowUpdate if cuda.on_gpu(model.means) else GaussianUpdate
        if model.config.sh_degree == 0 and update is GaussianUpdate:
            return "colours without spherical harmonics have a parameter of another kind"
        for name in GAUSSIANS:
            optimizer, max_norm = self.optimizers[name], self.config[name]["optimizer"].max_norm
            numbers = optimizer.param_groups[0]
            if type(optimizer) is not torch.optim.Adam or max_norm is not None:
                return f"the optimiser of {name} is not plain Adam"
            if numbers["weight_decay"] or numbers["amsgrad"] or numbers["maximize"]:
                return f"the optimiser of {name} is Adam with weight decay, amsgrad or maximize"
        self._gaussians = update(model, {name: self.optimizers[name] for name in GAUSSIANS}, only_visible)
        return None

    def zero_grad_all(self) -> None:
        """Forget all gradients."""
        super().zero_grad_all()
        if self._gaussians is not None:
            self._gaussians.clear()

    def optimizer_step_all(self) -> None:
        """One step of every optimiser."""
        if self._gaussians is None:
            super().optimizer_step_all()
            return
        first = self._gaussians.step() == 1
        for name, optimizer in self.optimizers.items():
            max_norm = self.config[name]["optimizer"].max_norm
            if name not in GAUSSIANS and max_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.parameters[name], max_norm)
            # Of the Gaussians no gradients are left, so those do nothing; but schedules want to have seen a first step.
            if name not in GAUSSIANS or first:
                optimizer.step()

    def scheduler_step_all(self, step: int) -> None:
        """Advance every schedule by one step; the rates are logged by the trainer, not at each step."""
        for scheduler in self.schedulers.values():
            scheduler.step()

    def learning_rates(self) -> dict[str, float]:
        """The current learning rate of each parameter group."""
        return {name: float(optimizer.param_groups[0]["lr"]) for name, optimizer in self.optimizers.items()}


class GaussianUpdate:
    """Steps the six Adams of the Gaussians' parameters at once. Their state stays where torch's Adam keeps it.

    Args:
        model: The Gaussians; its views leave their gradients in `gradients` from now on.
        optimizers: torch's Adam for each of `GAUSSIANS`.
        only_visible: Leave Gaussians alone that no view of the step saw.
    """

    def __init__(
        self, model: PartitionedGaussians, optimizers: dict[str, torch.optim.Optimizer], only_visible: bool
    ) -> None:
        self.model = model
        self.optimizers = optimizers
        self.only_visible = only_visible
        self.gradients = model.step_gradients = cuda.StepGradients()
        self._calls = 0

    def clear(self) -> None:
        """Forget the views of the step."""
        self.gradients.clear()

    def step(self) -> int:
        """Move the Gaussians, and forget the gradients.

        Returns:
            How many times it was called: in a resumed run not Adam's count.
        """
        params = [self.model.gauss_params[name] for name in GAUSSIANS]
        states = [_adam_state(self.optimizers[name], param) for name, param in zip(GAUSSIANS, params, strict=True)]
        gaussians = self.model.detached(self.gradients)
        steps = int(states[0]["step"]) + 1
        cuda.update_gaussians(
            params,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [_adam_settings(self.optimizers[name]) for name in GAUSSIANS],
            gaussians.scales,
            gaussians.opacities,
            self.gradients,
            steps,
            self.only_visible,
        )
        self.gradients.clear()
        for param, state in zip(params, states, strict=True):
            state["step"].fill_(steps)
            param.grad = None
        self._calls += 1
        return self._calls


class RowUpdate:
    """Steps the six Adams of the Gaussians' parameters on a GPU, from the gradients that autograd has left.

    Args: as of `GaussianUpdate`.
    """

    def __init__(
        self, model: PartitionedGaussians, optimizers: dict[str, torch.optim.Optimizer], only_visible: bool
    ) -> None:
        self.model = model
        self.optimizers = optimizers
        model.notes_shown = only_visible
        self._steps: int | None = None  # Adam's own count is on the GPU
        self._calls = 0

    def clear(self) -> None:
        """Forget the views of the step."""
        self.model.shown = None

    @torch.no_grad()
    def step(self) -> int:
        """Move the Gaussians; as `GaussianUpdate.step`."""
        visible = self.model.shown
        if self.model.notes_shown and visible is None:  # no view of the step was this rank's
            visible = torch.zeros(self.model.num_points, dtype=torch.bool, device=self.model.device)
        if self._steps is None:
            self._steps = int(_adam_state(self.optimizers["means"], self.model.gauss_params["means"])["step"])
        self._steps += 1
        for name in GAUSSIANS:
            param = self.model.gauss_params[name]
            state = _adam_state(self.optimizers[name], param)
            # Without a gradient the moments go on moving, as those of the other ranks' Gaussians do.
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            settings = _adam_settings(self.optimizers[name])
            cuda.adam_rows(param, state["exp_avg"], state["exp_avg_sq"], grad, settings, self._steps, visible)
            state["step"].fill_(self._steps)
            param.grad = None
        self.model.shown = None
        self._calls += 1
        return self._calls


def _adam_settings(optimizer: torch.optim.Optimizer) -> cuda.AdamSettings:
    numbers = optimizer.param_groups[0]
    return cuda.AdamSettings(float(numbers["lr"]), numbers["betas"][0], numbers["betas"][1], numbers["eps"])


def _adam_state(optimizer: torch.optim.Optimizer, param: Parameter) -> dict[str, torch.Tensor]:
    """The state of torch's Adam, as it makes it at its first step."""
    state = optimizer.state[param]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)  # where torch's fused Adam has it
        state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
    return state


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
