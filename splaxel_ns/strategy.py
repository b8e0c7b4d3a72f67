"""Growing and pruning: gsplat's default strategy with statistics per view, and every interval stated in images.

A step at batch size B takes B views, so step s has B s images behind it; batch 4 for N / 4 steps follows the
schedule of batch 1 for N (the intervals of splatfacto's configuration are images).
Shapes: N Gaussians, H x W pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from gsplat.strategy import DefaultStrategy
from gsplat.strategy.ops import duplicate, remove, reset_opa, split
from torch import Tensor

from splaxel_ns import cuda
from splaxel_ns.comm import World

if TYPE_CHECKING:
    from splaxel_ns.model import SplaxelModelConfig

STATISTICS = ("grad2d", "count", "radii")


@dataclass
class RefineReport:
    """What one refinement did, for the log."""

    images: int
    num_duplicated: int = 0
    num_split: int = 0
    num_held_back: int = 0
    """Gaussians that wanted to grow and found the cap reached."""
    pruned: dict[str, int] = field(default_factory=dict)
    """Removed Gaussians by reason."""
    spared: int = 0
    """Gaussians kept although the rules would remove all there are."""
    num_gaussians: int = 0
    shares: list[int] = field(default_factory=list)
    """Gaussians of each rank, where there are several."""
    own: dict[str, int] = field(default_factory=dict)
    """What was done on this rank, for the statistics; all other numbers are those of all ranks."""
    refined: bool = False
    opacities_reset: bool = False

    def __str__(self) -> str:
        parts = []
        if self.refined:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.pruned.items() if count)
            parts.append(
                f"{self.num_duplicated} duplicated, {self.num_split} split, {sum(self.pruned.values())} pruned"
                + (f" ({reasons})" if reasons else "")
            )
        if self.num_held_back:
            parts.append(f"{self.num_held_back} held back by max_gaussians")
        if self.spared:
            parts.append(f"all {self.spared} ought to go and were kept")
        if self.opacities_reset:
            parts.append("opacities reset")
        return f"{self.images} images: {'; '.join(parts)}; {self._now()}"

    def _now(self) -> str:
        shares = f" ({', '.join(map(str, self.shares))} by rank)" if self.shares else ""
        return f"now {self.num_gaussians} Gaussians{shares}"


def crosses(step: int, batch_size: int, interval: int) -> bool:
    """Whether a multiple of `interval` images lies in the images that step `step` (from 0) added to the count."""
    images = step * batch_size
    return images // interval != (images - batch_size) // interval


def derived_seed(*numbers: int) -> int:
    """One 32-bit seed from several numbers, well mixed, the same on every rank and platform."""
    mixed = 0
    for number in numbers:
        mixed = (mixed ^ (number & 0xFFFFFFFFFFFFFFFF)) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 29
    return (mixed ^ mixed >> 32) & 0xFFFFFFFF


@dataclass
class SplaxelStrategy(DefaultStrategy):
    """`DefaultStrategy` whose statistics are taken per view and whose refinement happens once per step.

    Steps of the base class's fields are images here. `pause_refine_after_reset` counts only after a reset that
    has happened.
    """

    max_gaussians: int = 0
    """Growth stops at this many Gaussians, the largest gradients first; 0: no limit."""
    seed: int = 0
    """Splitting draws from a generator seeded with this and the step, so a resumed run draws the same."""
    world: World = field(default_factory=World)

    @classmethod
    def of(cls, config: SplaxelModelConfig, num_views: int, world: World) -> SplaxelStrategy:
        """The strategy a model's configuration asks for.

        Args:
            config: The model's.
            num_views: Training views, the images of an epoch.
            world: The ranks, of which this one keeps the statistics of its own Gaussians.
        """
        reset_every = config.reset_alpha_every * config.refine_every
        return cls(
            prune_opa=config.cull_alpha_thresh,
            grow_grad2d=config.densify_grad_thresh,
            grow_scale3d=config.densify_size_thresh,
            grow_scale2d=config.split_screen_size,
            prune_scale3d=config.cull_scale_thresh,
            prune_scale2d=config.cull_screen_size,
            refine_scale2d_stop_iter=config.stop_screen_size_at,
            refine_start_iter=config.warmup_length,
            refine_stop_iter=config.stop_split_at,
            reset_every=reset_every,
            refine_every=config.refine_every,
            # splatfacto's rule (an epoch, however long) ends densification for good where an epoch is longer than the
            # interval between two resets.
            pause_refine_after_reset=min(num_views, reset_every // 2),
            absgrad=config.use_absgrad,
            max_gaussians=config.max_gaussians,
            seed=config.seed,
            world=world,
        )

    @property
    def uses_grad(self) -> bool:
        """Whether `update` asks for the gradient of means2d itself rather than its absolute sums."""
        return not self.absgrad

    def step_post_backward(
        self, params: Any, optimizers: Any, state: dict[str, Any], step: int, info: dict[str, Any], packed: bool = False
    ) -> None:
        """gsplat's call for batch size 1: statistics of the one view, then refinement."""
        assert not packed, "Splats of a view are never packed here"
        self.update(state, info, step)
        self.refine(params, optimizers, state, step)

    @torch.no_grad()
    def update(self, state: dict[str, Any], info: dict[str, Any], images: int, mask: Tensor | None = None) -> None:
        """Add one view's image-plane gradients to the statistics, after its backward pass.

        Args:
            state: Statistics, changed in place.
            info: Of the render: means2d with `absgrad` (or `grad`) [N, 2], conics [N, 3], extents [N, 2], width,
                height and n_cameras, the batch size that divided the loss.
            images: Images seen before this step.
            mask: True where a pixel counts.  # [H, W, 1] or None
        """
        if images >= self.refine_stop_iter:
            return
        means2d, extents = info["means2d"].detach(), info["extents"]
        grads = getattr(info["means2d"], "absgrad", None) if self.absgrad else info["means2d"].grad
        for key in STATISTICS:
            if state.get(key) is None and key in state:
                state[key] = torch.zeros(len(means2d), device=means2d.device)
        if grads is None:  # nothing was drawn, so nothing was differentiated
            return
        if mask is not None:
            extents = torch.where(covers_any(means2d, extents, mask)[:, None], extents, 0.0)
        # In units of half the image, so that the threshold is the same at every resolution; the loss of a step is
        # the mean over its views, hence the factor n_cameras.
        half_width, half_height = (info[side] / 2.0 * info["n_cameras"] for side in ("width", "height"))
        radii = state.get("radii") if images < self.refine_scale2d_stop_iter else None
        cuda.add_statistics(
            grads,
            extents,
            info["conics"],
            (half_width, half_height),
            max(info["width"], info["height"]),
            state["grad2d"],
            state["count"],
            radii,
        )

    def refine(
        self, params: Any, optimizers: Any, state: dict[str, Any], step: int, batch_size: int = 1
    ) -> RefineReport | None:
        """Grow, prune and reset where the schedule says so; parameters and optimiser state move together.

        Args:
            params: The Gaussians' parameters by name.
            optimizers: Their optimisers by the same names.
            state: Statistics, changed in place.
            step: Step whose backward passes are done, from 0.
            batch_size: Views per step.

        Returns:
            What was done, or None if nothing was due.
        """
        images = step * batch_size
        if step == 0 or images >= self.refine_stop_iter:
            return None
        report = RefineReport(images)
        last_reset = images // self.reset_every * self.reset_every
        paused = last_reset > 0 and images - last_reset < self.pause_refine_after_reset
        if images > self.refine_start_iter and crosses(step, batch_size, self.refine_every) and not paused:
            report.refined = True
            if state["count"] is None and self.world.size > 1:  # this rank has seen nothing; others may have
                for key in (key for key in STATISTICS if key in state):
                    state[key] = torch.zeros(len(params["means"]), device=params["means"].device)
            if state["count"] is not None:
                self._grow(params, optimizers, state, report)
                self._prune(params, optimizers, state, report)
                for key in STATISTICS:
                    if key in state:
                        state[key].zero_()
        if crosses(step, batch_size, self.reset_every):
            reset_opa(params=params, optimizers=optimizers, state=state, value=self.prune_opa * 2.0)
            report.opacities_reset = True
        report.num_gaussians = len(params["means"])
        if not report.refined and not report.opacities_reset:
            return None
        if report.refined:
            report.own = {"duplicated": report.num_duplicated, "split": report.num_split}
            report.own |= {f"pruned {reason}": count for reason, count in report.pruned.items()}
        return self._of_all_ranks(report)

    def _of_all_ranks(self, report: RefineReport) -> RefineReport:
        """The report with the numbers of all ranks."""
        if self.world.size == 1:
            return report
        reasons = ("not finite", "transparent", "too large", "too large on screen")
        names = ("num_gaussians", "num_duplicated", "num_split", "num_held_back", "spared")
        own = [getattr(report, name) for name in names] + [report.pruned.get(reason, 0) for reason in reasons]
        of_ranks = self.world.gather(torch.tensor(own), "strategy")
        report.shares, sums = of_ranks[:, 0].tolist(), of_ranks.sum(dim=0).tolist()
        for name, value in zip(names, sums, strict=False):
            setattr(report, name, value)
        report.pruned = dict(zip(reasons, sums[len(names) :], strict=True))
        return report

    @torch.no_grad()
    def _grow(self, params: Any, optimizers: Any, state: dict[str, Any], report: RefineReport) -> None:
        grads = state["grad2d"] / state["count"].clamp_min(1)  # [N]
        high = grads > self.grow_grad2d
        small = torch.exp(params["scales"]).amax(dim=-1) <= self.grow_scale3d * state["scene_scale"]
        is_dupli = high & small
        is_split = high & ~small
        if report.images < self.refine_scale2d_stop_iter:
            is_split |= state["radii"] > self.grow_scale2d
        if self.max_gaussians > 0:
            allowed = self._within_room(grads, is_dupli.int() + is_split.int())
            report.num_held_back = int(((is_dupli | is_split) & ~allowed).sum())
            is_dupli &= allowed
            is_split &= allowed
        report.num_duplicated, report.num_split = int(is_dupli.sum()), int(is_split.sum())
        if report.num_duplicated:
            duplicate(params=params, optimizers=optimizers, state=state, mask=is_dupli)
        if report.num_split:
            is_split = torch.cat([is_split, is_split.new_zeros(report.num_duplicated)])
            device = params["means"].device
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(
                    derived_seed(self.seed, report.images, *([self.world.rank] if self.world.rank else []))
                )
                split(
                    params=params,
                    optimizers=optimizers,
                    state=state,
                    mask=is_split,
                    revised_opacity=self.revised_opacity,
                )

    def _within_room(self, grads: Tensor, growth: Tensor) -> Tensor:
        """`within_room` over the Gaussians of all ranks: grads [N], growth [N] int -> [N] bool."""
        if self.world.size == 1:
            return within_room(grads, growth, self.max_gaussians - len(grads))
        total = int(self.world.gather(torch.tensor(len(grads)), "strategy").sum())
        candidates = growth.nonzero().flatten()
        own = torch.stack([grads[candidates], growth[candidates].float()], dim=1)
        parts = self.world.gather_uneven(own, "strategy")
        ranked = torch.cat(parts)
        chosen = within_room(ranked[:, 0], ranked[:, 1].int(), self.max_gaussians - total)
        first = sum(len(part) for part in parts[: self.world.rank])
        allowed = torch.zeros_like(growth, dtype=torch.bool)
        allowed[candidates] = chosen[first : first + len(candidates)]
        return allowed

    @torch.no_grad()
    def _prune(self, params: Any, optimizers: Any, state: dict[str, Any], report: RefineReport) -> None:
        finite = torch.stack([torch.isfinite(p).flatten(1).all(dim=1) for p in params.values()])
        rules = {
            "not finite": ~finite.all(dim=0),
            "transparent": torch.sigmoid(params["opacities"].flatten()) < self.prune_opa,
        }
        if report.images > self.reset_every:
            largest = torch.exp(params["scales"]).amax(dim=-1)
            rules["too large"] = largest > self.prune_scale3d * state["scene_scale"]
            if report.images < self.refine_scale2d_stop_iter:
                rules["too large on screen"] = state["radii"] > self.prune_scale2d
        doomed = torch.zeros(len(params["means"]), dtype=torch.bool, device=params["means"].device)
        counts = {}
        for reason, rule in rules.items():
            counts[reason] = int((rule & ~doomed).sum())
            doomed |= rule
        if int(self.world.sum((~doomed).sum(), "strategy")) == 0:
            # A model without Gaussians cannot grow any again, while these may become visible or opaque later. A rank
            # may lose its last ones: others have some, and balancing shares them out.
            report.spared = len(doomed)
            return
        report.pruned = counts
        if bool(doomed.any()):
            remove(params=params, optimizers=optimizers, state=state, mask=doomed)


def within_room(grads: Tensor, growth: Tensor, room: int) -> Tensor:
    """The Gaussians that may grow when only `room` new ones fit: those with the largest gradients.

    Args:
        grads: What they are ranked by; ties go to the lower index.  # [N]
        growth: New Gaussians that each would make.  # [N] int
        room: How many fit; may be negative.

    Returns:
        [N] bool.
    """
    ranked = torch.argsort(torch.where(growth > 0, grads, -1.0), descending=True, stable=True)
    allowed = torch.zeros_like(growth, dtype=torch.bool)
    allowed[ranked] = growth[ranked].cumsum(0) <= room
    return allowed


def covers_any(means2d: Tensor, extents: Tensor, mask: Tensor) -> Tensor:
    """Whether the box means2d +- extents holds the centre of a pixel that counts.

    Args:
        means2d: Centres in pixels.  # [N, 2]
        extents: Half sizes in pixels.  # [N, 2]
        mask: True where a pixel counts.  # [H, W, 1]

    Returns:
        [N] bool.
    """
    height, width = mask.shape[:2]
    area = torch.zeros(height + 1, width + 1, dtype=torch.int32, device=mask.device)
    area[1:, 1:] = mask[..., 0].int().cumsum(0).cumsum(1)
    size = cuda.upload(torch.tensor([width, height]), mask.device)
    low = torch.ceil(torch.nan_to_num(means2d - extents) - 0.5).clamp_min(0).minimum(size).long()  # [N, 2]
    high = (torch.floor(torch.nan_to_num(means2d + extents) - 0.5) + 1).clamp_min(0).minimum(size).long()
    high = torch.maximum(high, low)
    inside = (
        area[high[:, 1], high[:, 0]]
        - area[low[:, 1], high[:, 0]]
        - area[high[:, 1], low[:, 0]]
        + area[low[:, 1], low[:, 0]]
    )
    return inside > 0
