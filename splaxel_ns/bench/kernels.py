"""How long the kernels take: an iteration of training without nerfstudio around it, stage by stage, at four sizes.

Scenes are random frusta: 81 to 89 % of the Gaussians visible, major radii of 6 to 10 pixels (3 sigma), minor axes 0.25
to 1 of that, opacity logits N(-1, 1.5), spherical harmonics of degree 3, one partition.
Shapes: N Gaussians, H x W pixels.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from splaxel_ns import cuda
from splaxel_ns.bench.kernels_reference import forward_backward_ms as reference_forward_backward_ms
from splaxel_ns.bench.results import ResultFile
from splaxel_ns.partition import PartitionTree

SIZES = {
    "a": (20_000, 256, 192),
    "b": (100_000, 400, 300),
    "c": (500_000, 800, 600),
    "d": (1_000_000, 1920, 1080),
}
"""Gaussians, width and height in pixels."""
FEATURES = ("avx2", "fma", "bmi2", "avx512f", "avx512bw", "avx512dq", "avx512vl")
VISIBLE = 0.85
"""About this part of the Gaussians is seen: the frustum that they fill is wider than the image."""
NEAR, FAR = 0.01, 1e10  # world units
CENTER = torch.zeros(3)  # of the camera
BACKGROUND = torch.zeros(3)
SETTINGS = [cuda.AdamSettings(rate, 0.9, 0.999, 1e-15) for rate in (1.6e-4, 1e-3, 5e-3, 5e-2, 2.5e-3, 1.25e-4)]
SSIM_LAMBDA = 0.2
Stages = dict[str, list[float]]


@dataclass(frozen=True)
class Scene:
    """Gaussians as training keeps them, in front of one camera."""

    params: list[Tensor]  # means, quats, log scales, logits, sh0, shN
    viewmat: Tensor  # [4, 4]
    K: Tensor  # [3, 3]
    width: int
    height: int
    photograph: Tensor  # [H, W, 3]

    def activated(self) -> list[Tensor]:
        """means, quats, scales, opacities [N], sh0 [N, 1, 3], shN."""
        means, quats, scales, logits, sh0, shN = self.params
        return [means, quats, scales.exp(), logits.sigmoid()[:, 0], sh0[:, None], shN]


def make_scene(num: int, width: int, height: int, seed: int = 0) -> Scene:
    """A random frustum of `num` Gaussians, 2 to 10 units deep."""
    g = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=g)

    focal = float(width)
    K = torch.tensor([[focal, 0.0, width / 2], [0.0, focal, height / 2], [0.0, 0.0, 1.0]])
    depth = uniform(2.0, 10.0, num)
    reach = 16.0  # pixels, about two radii: so much wider and higher is the area from which something is seen
    margin = math.sqrt((width + reach) * (height + reach) / (width * height * VISIBLE))
    half = torch.tensor([width, height]) * 0.5 * margin / focal
    means = torch.cat([uniform(-1.0, 1.0, num, 2) * half * depth[:, None], depth[:, None]], dim=1)
    major = uniform(6.0, 10.0, num) / 3.0 * depth / focal  # world units
    scales = torch.stack([major, major * uniform(0.25, 1.0, num), major * uniform(0.25, 1.0, num)], dim=1)
    params = [
        means,
        torch.randn(num, 4, generator=g),
        scales.log(),
        torch.randn(num, 1, generator=g) * 1.5 - 1.0,
        torch.randn(num, 3, generator=g) * 0.5,
        torch.randn(num, 15, 3, generator=g) * 0.1,
    ]
    return Scene(params, torch.eye(4), K, width, height, uniform(0.0, 1.0, height, width, 3))


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles of a list of times, to three decimals."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


class Iteration:
    """Forward pass, loss, backward pass and Adam on one scene; `stages` collects milliseconds."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.exp_avgs, self.exp_avg_sqs = ([torch.zeros_like(p) for p in scene.params] for _ in range(2))
        self.tree = PartitionTree.build(scene.params[0], 1)
        self.owner = torch.zeros(len(scene.params[0]), dtype=torch.int32)
        spans = torch.tensor([0, scene.width], dtype=torch.int32)
        self.spans = spans.expand(1, scene.height, 2).contiguous()
        self.stages: Stages = {}
        self.steps = 0
        self.num_visible = self.num_pairs = 0

    def draw(self, splats: list[Tensor], means: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], cuda.RasterStats]:
        """The partial image of splats (means2d, depths, conics, opacities, colors, extents)."""
        scene = self.scene
        means2d, depths, conics, opacities, colors, extents = splats
        view = (scene.viewmat, scene.K, self.tree, [0], self.spans, scene.width)
        *partial, stats = cuda.rasterize_partials(
            means2d, depths, conics, opacities, colors, extents, self.owner, means, *view
        )
        self.num_visible, self.num_pairs = stats.num_splats, stats.num_pairs
        return (partial[0], partial[1], partial[2]), stats

    def train(self) -> None:
        """One step as training takes it."""
        scene, gradients = self.scene, cuda.StepGradients()
        start = time.perf_counter()
        gaussians = scene.activated()
        self._add("activation", start)
        begin = time.perf_counter()
        *splats, extents, colors = cuda.project_and_color(
            gaussians, scene.viewmat, scene.K, CENTER, scene.width, scene.height, NEAR, FAR, 3, False, gradients
        )
        self._add("project_and_sh", begin)
        partial, stats = self.draw([*splats, colors, extents], gaussians[0])
        self.stages.setdefault("sort_and_bin", []).append(stats.binning_ms)
        self.stages.setdefault("raster_forward", []).append(stats.drawing_ms)
        begin = time.perf_counter()
        rgb, _, _ = cuda.composite(*partial, BACKGROUND)
        self._add("composite", begin)
        begin = time.perf_counter()
        loss, _, _ = cuda.l1_ssim(rgb, scene.photograph, SSIM_LAMBDA)
        self._add("loss", begin)
        reached: list[float] = []
        partial[0].register_hook(lambda _: reached.append(time.perf_counter()))
        begin = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        self.stages.setdefault("composite_backward", []).append(1e3 * (reached[0] - begin))
        self.stages.setdefault("raster_backward", []).append(1e3 * (end - reached[0]))
        self.steps += 1
        begin = time.perf_counter()
        cuda.update_gaussians(
            scene.params,
            self.exp_avgs,
            self.exp_avg_sqs,
            SETTINGS,
            scales=gaussians[2],
            opacities=gaussians[3],
            gradients=gradients,
            step=self.steps,
            only_visible=False,
        )
        self._add("gradients_and_adam", begin)
        self._add("iteration", start)

    def forward_backward(self) -> None:
        """Forward and backward pass to the gradients of all parameters, without loss and optimiser, as renderers do."""
        scene = self.scene
        leaves = [tensor.requires_grad_() for tensor in (t.detach() for t in scene.activated())]
        means, quats, scales, opacities, sh0, shN = leaves
        start = time.perf_counter()
        *splats, extents = cuda.project(
            means, quats, scales, opacities, scene.viewmat, scene.K, scene.width, scene.height, NEAR, FAR
        )
        self._add("project", start)
        begin = time.perf_counter()
        colors = cuda.spherical_harmonics(3, means, CENTER, sh0, shN, extents[:, 0] > 0)
        self._add("sh", begin)
        partial, _ = self.draw([*splats, colors, extents], means)
        rgb, _, _ = cuda.composite(*partial, BACKGROUND)
        torch.autograd.backward([rgb], [scene.photograph])
        self._add("forward_backward", start)

    def _add(self, stage: str, begin: float) -> None:
        self.stages.setdefault(stage, []).append(1e3 * (time.perf_counter() - begin))


def timed(call: Callable[[], None], seconds: float, least: int, most: int = 100) -> int:
    """Calls until the time is used up, at least and at most so many times; returns how many."""
    end = time.perf_counter() + seconds
    done = 0
    while done < least or (done < most and time.perf_counter() < end):
        call()
        done += 1
    return done


@dataclass
class Kernels:
    """Time the kernels at the four sizes of the targets: stages, iterations, and a vectorised torch renderer beside."""

    json: Path
    """Result file."""
    sizes: tuple[str, ...] = tuple(SIZES)
    """Which of a (20k Gaussians, 256x192), b (100k, 400x300), c (500k, 800x600), d (1M, 1920x1080)."""
    seconds: float = 5.0
    """Time for each measurement; at least seven repetitions."""
    threads: int = 2
    """Threads of the kernels and of torch."""
    levels: tuple[str, ...] = ("avx512", "avx2")
    """Levels of instructions; those the processor lacks are left out. The first one present has all stages timed."""
    reference: bool = True
    """Also time the torch renderer, to compare with."""
    reference_pairs: int = 60_000
    """The torch renderer draws tiles with about so many (splat, tile) pairs; its time is scaled to all pairs."""
    rows: list[dict[str, Any]] = field(default_factory=list, init=False)

    def main(self) -> None:
        unknown = set(self.sizes) - set(SIZES)
        if unknown:
            raise ValueError(f"sizes are {', '.join(SIZES)}; there is no {', '.join(sorted(unknown))}")
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        file = ResultFile(self.json)
        try:
            levels = [level for level in self.levels if is_available(level)] or ["portable"]
            for name in self.sizes:
                self.rows.append({"size": name, **self.measure(make_scene(*SIZES[name]), levels)})
                self._say(self.rows[-1])
                file.write(
                    {
                        "cpu_features": cpu_features(),
                        "levels": levels,
                        "times": "milliseconds of wall time: median and quartiles",
                        "ratio_to_reference": "forward_backward of torch / ours; no loss, no optimiser",
                        "rows": self.rows,
                    },
                )
        finally:
            cuda.set_cpu_level("best")
            torch.set_num_threads(before)

    def measure(self, scene: Scene, levels: list[str]) -> dict[str, Any]:
        """One size on every level."""
        row: dict[str, Any] = {"gaussians": len(scene.params[0]), "image": [scene.width, scene.height], "levels": {}}
        for level in levels:
            cuda.set_cpu_level(level)
            iteration = Iteration(scene)
            for call in (iteration.forward_backward, iteration.train):
                timed(call, 0.0, 2)
            iteration.stages = {}
            repetitions = [timed(call, self.seconds, 7) for call in (iteration.forward_backward, iteration.train)]
            stages = {stage: spread(values) for stage, values in iteration.stages.items()}
            row["levels"][level] = {"repetitions": repetitions, "stages": stages}
            if level == levels[0]:
                row |= {"visible": iteration.num_visible, "pairs": iteration.num_pairs}
                row["iteration_ms"] = stages["iteration"]["median"]
                row["forward_backward_ms"] = stages["forward_backward"]["median"]
        if self.reference:
            drawn, milliseconds = reference_forward_backward_ms(
                scene.activated(), scene.viewmat, scene.K, scene.photograph, self.reference_pairs
            )
            row["reference_ms"] = round(milliseconds, 1)
            row["reference_share"] = round(drawn, 4)
            row["ratio_to_reference"] = round(milliseconds / row["forward_backward_ms"], 1)
        return row

    def _say(self, row: dict[str, Any]) -> None:
        width, height = row["image"]
        ratio = f", {row['ratio_to_reference']}x the torch renderer" if self.reference else ""
        CONSOLE.print(
            f"{row['size']}: {row['gaussians']} Gaussians, {width}x{height}, {row['pairs']} pairs: iteration "
            f"{row['iteration_ms']:.1f} ms, forward + backward {row['forward_backward_ms']:.1f} ms{ratio}"
        )


def is_available(level: str) -> bool:
    """Whether the processor has a level of instructions."""
    try:
        cuda.set_cpu_level(level)
    except ValueError:
        return False
    return True


def cpu_features() -> list[str]:
    """Those of the processor that the kernels use."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    return [name for name in FEATURES if name in flags]
