"""Growing by sampling: "3D Gaussian Splatting as Markov Chain Monte Carlo" (Kheradmand et al., 2024).

Gaussians that have become transparent are moved to where opaque ones are, the number grows by 5 % at a time up to a
cap, and every step adds noise to the means of the transparent ones. gsplat's strategy with a relocation that needs no
CUDA, with draws that depend on seed and step alone, and with every interval stated in images.
Shapes: N Gaussians, M of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from gsplat.strategy import MCMCStrategy
from gsplat.strategy.ops import _update_param_with_optimizer, remove
from gsplat.utils import normalized_quat_to_rotmat
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import normalize

from splaxel_ns import cuda
from splaxel_ns.comm import World
from splaxel_ns.strategy import RefineReport, crosses, derived_seed

if TYPE_CHECKING:
    from splaxel_ns.model import SplaxelModelConfig

MAX_COPIES = 51
"""More Gaussians than this in one place get the share of this many, as in the paper's code."""
GATE_SLOPE, GATE_OPACITY = 100.0, 0.005
"""Noise is scaled by sigmoid(slope (opacity' - opacity)): only Gaussians that hardly show are moved."""
GATE_CLOSED = 2.0**-24
"""A factor below which the noise is lost in the rounding of the mean; it is not drawn."""
GROWTH = 1.05


@dataclass
class McmcReport(RefineReport):
    """What one refinement by sampling did."""

    num_relocated: int = 0
    num_added: int = 0

    def __str__(self) -> str:
        done = f"{self.num_relocated} relocated, {self.num_added} added"
        return f"{self.images} images: {done}; {self._now()}"


@dataclass
class SplaxelMCMCStrategy(MCMCStrategy):
    """`MCMCStrategy` with a relocation of its own, once per step after the optimisers; its steps are images here.

    A cap below the number of Gaussians removes none.
    """

    seed: int = 0
    """Every draw is a function of this, the step and the Gaussian's index, so a resumed run draws the same."""
    absgrad: bool = False
    """Image-plane gradients are not used."""
    uses_grad: bool = False
    world: World = field(default_factory=World)

    @classmethod
    def of(cls, config: SplaxelModelConfig, world: World) -> SplaxelMCMCStrategy:
        """The strategy a model's configuration asks for, for one of the ranks of `world`."""
        caps = [cap for cap in (config.max_gs_num, config.max_gaussians) if cap > 0]
        return cls(
            cap_max=min(caps, default=2**62),
            noise_lr=config.noise_lr,
            refine_start_iter=config.warmup_length,
            refine_stop_iter=config.stop_split_at,
            refine_every=config.refine_every,
            min_opacity=config.mcmc_min_opacity,
            seed=config.seed,
            world=world,
        )

    def initialize_state(self, scene_scale: float = 1.0) -> dict[str, Any]:
        """Empty: nothing is gathered between two steps."""
        return {}

    def update(self, state: dict[str, Any], info: dict[str, Any], images: int, mask: Tensor | None = None) -> None:
        """What a view's backward pass left is not needed."""

    def step_post_backward(
        self, params: Any, optimizers: Any, state: dict[str, Any], step: int, info: dict[str, Any], lr: float = 0.0
    ) -> None:
        """gsplat's call for batch size 1; the learning rate is that of the optimiser of the means."""
        self.refine(params, optimizers, state, step)

    @torch.no_grad()
    def refine(
        self, params: Any, optimizers: Any, state: dict[str, Any], step: int, batch_size: int = 1
    ) -> McmcReport | None:
        """Relocate and add where the schedule says so, then add the step's noise to the means.

        Args:
            params: The Gaussians' parameters by name.
            optimizers: Their optimisers by the same names; new and moved Gaussians start with zero moments.
            state: Not used.
            step: Step whose update is done, from 0.
            batch_size: Views per step. The learning rate grows with its root, and so the noise of a step has the
                variance of that many steps at batch size 1.

        Returns:
            What was done, or None if nothing but noise was due.
        """
        images = step * batch_size
        report = None
        due = crosses(step, batch_size, self.refine_every)
        if step > 0 and self.refine_start_iter < images < self.refine_stop_iter and due:
            report = McmcReport(images, refined=True)
            if self.world.size > 1:
                self._refine_together(params, optimizers, report)
            else:
                generator = torch.Generator().manual_seed(derived_seed(self.seed, images))
                report.num_relocated = self._relocate_gs(params, optimizers, generator)
                report.num_added = self._add_new_gs(params, optimizers, generator)
                report.num_gaussians = len(params["means"])
                report.own = {"relocated": report.num_relocated, "added": report.num_added}
        scale = optimizers["means"].param_groups[0]["lr"] * self.noise_lr
        seed = self.seed if self.world.size == 1 else derived_seed(self.seed, self.world.rank)
        add_position_noise(params, scale, seed, step)
        return report

    def _refine_together(self, params: Any, optimizers: Any, report: McmcReport) -> None:
        """Share relocations and additions out among the ranks by their opacity mass; the total is that of one rank.

        A transparent Gaussian whose new place is on another rank is removed here and added there.
        """
        rank, images = self.world.rank, report.images
        opacities, sound = _opacities(params)
        alive = sound & (opacities > self.min_opacity)
        mass = [float(torch.where(which, opacities, 0.0).double().sum()) for which in (alive, sound)]
        own = torch.tensor([float((~alive).sum()), *mass, float(len(alive))], dtype=torch.float64)
        dead, alive_mass, all_mass, nums = self.world.gather(own, "strategy").unbind(dim=1)  # each [R]
        shared = torch.Generator().manual_seed(derived_seed(self.seed, images))  # the same draws on all ranks
        total, num_dead = int(nums.sum()), int(dead.sum()) if bool((alive_mass > 0).any()) else 0
        num_new = max(0, min(self.cap_max, int(GROWTH * total)) - total) if bool((all_mass > 0).any()) else 0
        places, additions = (
            torch.bincount(draw(weights, num, shared), minlength=self.world.size).tolist() if num else [0] * len(nums)
            for weights, num in ((alive_mass, num_dead), (all_mass, num_new))
        )
        generator = torch.Generator().manual_seed(derived_seed(self.seed, images, rank))
        here = min(int(dead[rank]), places[rank])
        if num_dead:
            self._relocate_gs(params, optimizers, generator, here)
            surplus = int(dead[rank]) - here
            if surplus:
                opacities, sound = _opacities(params)
                gone = torch.zeros_like(sound)
                gone[(~(sound & (opacities > self.min_opacity))).nonzero()[:surplus, 0]] = True
                remove(params=params, optimizers=optimizers, state={}, mask=gone)
            self._add_new_gs(params, optimizers, generator, places[rank] - here)
        self._add_new_gs(params, optimizers, generator, additions[rank])
        report.num_relocated, report.num_added = num_dead, num_new
        report.num_gaussians = total + num_new
        report.own = {"relocated": int(dead[rank]) if num_dead else 0, "added": additions[rank]}
        moved = torch.tensor(places) - dead.long() if num_dead else 0
        report.shares = (nums.long() + moved + torch.tensor(additions)).tolist()

    def _relocate_gs(self, params: Any, optimizers: Any, generator: torch.Generator, num: int | None = None) -> int:
        """Move what is transparent or not finite (the first `num`) onto others, drawn by opacity, if there are any."""
        opacities, sound = _opacities(params)
        alive = sound & (opacities > self.min_opacity)
        dead = (~alive).nonzero()[:num, 0]  # [M]
        if len(dead) == 0 or not bool(alive.any()):
            return 0
        sources = draw(torch.where(alive, opacities, 0.0), len(dead), generator)  # [M]

        def moved(name: str, p: Tensor, shares: dict[str, Tensor]) -> Tensor:
            changed = p.detach().clone()
            if name in shares:
                changed[sources] = shares[name]
            changed[dead] = changed[sources]
            return changed

        def without_moments(_: str, moments: Tensor) -> Tensor:
            # Those of a relocated Gaussian belong to the place it left; gsplat leaves them to it.
            moments[sources] = 0
            moments[dead] = 0
            return moments

        self._replace(params, optimizers, sources, moved, without_moments)
        return len(dead)

    def _add_new_gs(self, params: Any, optimizers: Any, generator: torch.Generator, num_new: int | None = None) -> int:
        """Add so many (None: 5 %, up to the cap) on Gaussians drawn by opacity."""
        num = len(params["means"])
        if num_new is None:
            num_new = max(0, min(self.cap_max, int(GROWTH * num)) - num)
        opacities, sound = _opacities(params)
        weights = torch.where(sound, opacities, 0.0)
        if num_new == 0 or not bool((weights > 0).any()):
            return 0
        sources = draw(weights, num_new, generator)  # [M]

        def grown(name: str, p: Tensor, shares: dict[str, Tensor]) -> Tensor:
            changed = p.detach().clone()
            if name in shares:
                changed[sources] = shares[name]
            return torch.cat([changed, changed[sources]])

        def with_new(_: str, moments: Tensor) -> Tensor:
            # The source's moments stay, as in gsplat: it is still where they were gathered.
            return torch.cat([moments, moments.new_zeros(num_new, *moments.shape[1:])])

        self._replace(params, optimizers, sources, grown, with_new)
        return num_new

    def _replace(self, params: Any, optimizers: Any, sources: Tensor, changed: Any, moments: Any) -> None:
        """Share each source out among itself and its copies, and swap parameters and moments for changed ones."""
        copies = torch.bincount(sources, minlength=len(params["means"]))[sources] + 1  # [M]
        opacities, scales = shared_out(
            torch.sigmoid(params["opacities"].detach()[sources].flatten()),
            torch.exp(params["scales"].detach()[sources]),
            copies,
        )
        opacities = opacities.clamp(self.min_opacity, 1.0 - torch.finfo(torch.float32).eps)
        shares = {"opacities": torch.logit(opacities)[:, None], "scales": torch.log(scales)}
        _update_param_with_optimizer(lambda name, p: Parameter(changed(name, p, shares)), moments, params, optimizers)


def _opacities(params: Any) -> tuple[Tensor, Tensor]:
    """Opacities [N] in 0..1, and whether all values of a Gaussian are finite [N]."""
    finite = torch.stack([torch.isfinite(p).flatten(1).all(dim=1) for p in params.values()])
    return torch.sigmoid(params["opacities"].detach().flatten()), finite.all(dim=0)


def draw(weights: Tensor, num: int, generator: torch.Generator) -> Tensor:
    """Indices drawn with probabilities proportional to weights, with replacement.

    Args:
        weights: Not negative, at least one positive.  # [N]
        num: M, how many.
        generator: Where the draws come from.

    Returns:
        [M] int64. Weights of zero are never drawn.
    """
    sums = weights.double().cumsum(0)
    points = torch.rand(num, generator=generator, dtype=torch.float64).to(sums.device) * sums[-1]
    last = int((weights > 0).nonzero()[-1])  # where rounding puts a point at the very end
    return torch.searchsorted(sums, points, right=True).clamp_max(last)


def shared_out(opacities: Tensor, scales: Tensor, copies: Tensor) -> tuple[Tensor, Tensor]:
    """What `copies` coinciding Gaussians must each be to look together as the one did (paper, Eq. 9).

    o' = 1 - (1 - o)^(1/n) keeps the opacity at the centre. Along a ray through the centre the n together have the
    alpha 1 - (1 - o' g)^n = sum_k (-1)^(k-1) C(n, k) o'^k g^k; scaling by o / sum_k (-1)^(k-1) C(n, k) o'^k / sqrt(k)
    keeps its integral. (The paper sums the binomials of all i <= n, which add up to this one.)

    Args:
        opacities: In 0..1.  # [M]
        scales: World units.  # [M, 3]
        copies: n, the Gaussian itself among them; more than `MAX_COPIES` count as that many.  # [M] int

    Returns:
        opacities [M] and scales [M, 3]. The terms of the sum cancel: it is taken in float64.
    """
    before = opacities.double().clamp(1e-12, 1.0 - torch.finfo(torch.float32).eps)
    n = copies.clamp(1, MAX_COPIES)
    after = -torch.expm1(torch.log1p(-before) / n)
    coefficients = _coefficients().to(copies.device)
    total = torch.zeros_like(before)
    for k in range(int(n.max()) if len(n) else 0, 0, -1):
        total = (total + coefficients[n, k]) * after
    return after.to(opacities.dtype), (scales.double() * (before / total)[:, None]).to(scales.dtype)


def _coefficients() -> Tensor:
    """(-1)^(k-1) C(n, k) / sqrt(k), 0 for k = 0: [n, k], both 0..MAX_COPIES, float64."""
    counts = range(MAX_COPIES + 1)
    rows = [[(-1) ** (k - 1) * math.comb(n, k) / math.sqrt(k) if k else 0.0 for k in counts] for n in counts]
    return torch.tensor(rows, dtype=torch.float64)


@torch.no_grad()
def add_position_noise(params: Any, scale: float, seed: int, step: int) -> None:
    """Add the step's noise to the means: covariance times normal noise, where a Gaussian hardly shows.

    Args:
        params: The Gaussians' parameters by name; the means change in place.
        scale: Learning rate of the means times `noise_lr`.
        seed: With the step and the Gaussian's index it gives the noise.
        step: From 0.
    """
    if scale == 0:
        return
    opacities = torch.sigmoid(params["opacities"].flatten())
    gate = torch.sigmoid(GATE_SLOPE * (GATE_OPACITY - opacities))
    if cuda.on_gpu(gate):  # which ones they are would be waited for
        moving = torch.arange(len(gate), device=gate.device)
        gate = torch.where(gate > GATE_CLOSED, gate, 0.0)
    else:
        moving = (gate > GATE_CLOSED).nonzero()[:, 0]  # [M]
    if len(moving) == 0:
        return
    noise = normal_noise(seed, step, moving) * (gate[moving] * scale)[:, None]
    rotations = normalized_quat_to_rotmat(normalize(params["quats"][moving], dim=-1))  # [M, 3, 3]
    variances = torch.exp(2.0 * params["scales"][moving])
    noise = torch.einsum("mij,mj,mkj,mk->mi", rotations, variances, rotations, noise)
    params["means"].index_add_(0, moving, noise)


def normal_noise(seed: int, step: int, indices: Tensor) -> Tensor:
    """Standard normal numbers, each a function of seed, step and Gaussian alone, whichever others are asked for.

    Args:
        indices: The Gaussians.  # [M] int64

    Returns:
        [M, 3] float32.
    """
    key = derived_seed(seed, step, 1) << 32 | derived_seed(seed, step, 2)
    counters = 3 * indices[:, None] + torch.arange(1, 4, device=indices.device)  # [M, 3]
    bits = mixed(counters * _signed(0x9E3779B97F4A7C15) + _signed(key))
    low, high = bits & 0xFFFFFFFF, (bits >> 32) & 0xFFFFFFFF
    radius = torch.sqrt(-2.0 * torch.log((high.double() + 0.5) / 2**32))  # Box and Muller
    return (radius * torch.cos(2.0 * math.pi / 2**32 * low.double())).float()


def mixed(bits: Tensor) -> Tensor:
    """splitmix64's output function on int64, whose products wrap around; shifts are made logical by masks."""
    bits = (bits ^ (bits >> 30 & 2**34 - 1)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> 27 & 2**37 - 1)) * _signed(0x94D049BB133111EB)
    return bits ^ (bits >> 31 & 2**33 - 1)


def _signed(word: int) -> int:
    """A 64-bit word as the int64 of the same bits."""
    return word - 2**64 if word >= 2**63 else word
