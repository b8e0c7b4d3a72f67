"""What partitions cost in quality: the same scene at several P and boundary modes, paired over seeds.

Runs with one seed share view order, initial orientations and backgrounds, so that differences to P = 1 are paired.
Learning rates fall near the end: at full rate, runs that differ by rounding alone differ in PSNR at any one step by
more than what is measured here.
"""

from __future__ import annotations

import copy
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nerfstudio.engine.schedulers import MultiStepSchedulerConfig
from nerfstudio.utils.rich_utils import CONSOLE
from scipy import stats

from splaxel_ns.bench.results import ResultFile
from splaxel_ns.partition import PartitionTree
from splaxel_ns.render import project_view

BAND = 0.01
"""Half width of the band around the cut planes, as a share of the scene's diagonal."""


@dataclass
class Quality:
    """Train a scene at several partition counts and boundary modes; PSNR against one partition, with intervals."""

    data: Path
    """The scene (MatrixCity layout)."""
    json: Path
    """Result file."""
    steps: int = 1500
    """Training steps of each run."""
    partitions: tuple[int, ...] = (2, 4, 8)
    """Numbers of partitions compared with one."""
    boundaries: tuple[str, ...] = ("filter", "exact", "none")
    """Boundary modes compared."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One paired comparison per seed."""
    grow: bool = True
    """Densify, up to 40,000 Gaussians, in the first half."""

    jobs: int = 1
    """Seeds that are trained side by side, one process and one thread each."""

    def main(self) -> None:
        file = ResultFile(self.json)
        runs: list[dict[str, Any]] = []
        context = multiprocessing.get_context("spawn")  # the ops' threads do not survive a fork
        with ProcessPoolExecutor(self.jobs, mp_context=context) as pool:
            for done in pool.map(self.run_seed, self.seeds):
                runs += done
                file.write({"steps": self.steps, "band": BAND, "rows": summarise(runs), "runs": runs})
        for row in summarise(runs):
            CONSOLE.print(
                f"P {row['partitions']} {row['boundary']:>6}: {row['psnr']:.2f} dB, "
                f"{row['difference']:+.3f} +- {row['interval']:.3f} dB against P = 1; "
                f"band {row['band_difference']:+.3f}, rest {row['rest_difference']:+.3f}; "
                f"{100 * row['straddling_pairs']:.1f} % of pairs straddle"
            )

    def run_seed(self, seed: int) -> list[dict[str, Any]]:
        """All runs of one seed; the one with a single partition is measured in the bands of all trees, so last."""
        torch.set_num_threads(1)
        trees: dict[int, PartitionTree] = {}
        single = self._train(1, "exact", seed)
        runs = []
        for num in self.partitions:
            for boundary in self.boundaries:
                trainer = self._train(num, boundary, seed)
                tree = trees.setdefault(num, trainer.pipeline.model.tree)
                runs.append({"partitions": num, "boundary": boundary, "seed": seed} | measure(trainer, {num: tree}))
                self._say(runs[-1])
        runs.append({"partitions": 1, "boundary": "exact", "seed": seed} | measure(single, trees))
        self._say(runs[-1])
        return runs

    def _train(self, num_partitions: int, boundary: str, seed: int) -> Any:
        """One training run through the method's own trainer, without viewer and files that stay."""
        from splaxel_ns.config import splaxel

        config: Any = copy.deepcopy(splaxel.config)
        config.max_num_iterations = self.steps
        config.machine.seed = config.pipeline.model.seed = seed
        config.pipeline.datamanager.train_cameras_sampling_seed = seed
        config.vis = "tensorboard"
        config.experiment_name, config.timestamp = "quality", f"{num_partitions}_{boundary}_{seed}"
        config.steps_per_eval_image = config.steps_per_eval_batch = config.steps_per_eval_all_images = 10**9
        config.steps_per_save = 10**9
        config.logging.steps_per_log = max(1, self.steps // 4)
        config.pipeline.datamanager.data = self.data
        config.pipeline.model.num_partitions = num_partitions
        config.pipeline.model.boundary = boundary
        config.pipeline.model.max_gaussians = 40_000
        config.pipeline.model.saturation = False  # has a benchmark of its own
        config.pipeline.model.resolution_schedule = max(1, self.steps // 10)
        config.pipeline.model.warmup_length = self.steps // 5
        config.pipeline.model.stop_split_at = self.steps // 2 if self.grow else 0
        config.optimizers["means"]["scheduler"].max_steps = self.steps
        for group in config.optimizers.values():
            group["scheduler"] = group["scheduler"] or MultiStepSchedulerConfig(
                max_steps=self.steps, gamma=0.3, milestones=tuple(self.steps * k // 10 for k in (7, 8, 9))
            )
        with tempfile.TemporaryDirectory() as folder:
            config.output_dir = Path(folder)
            torch.manual_seed(seed)
            np.random.seed(seed)
            trainer = config.setup(local_rank=0, world_size=1)
            trainer.setup()
            start = time.perf_counter()
            trainer.train()
            trainer.train_seconds = time.perf_counter() - start
        return trainer

    def _say(self, run: dict[str, Any]) -> None:
        CONSOLE.print(
            f"P {run['partitions']} {run['boundary']} seed {run['seed']}: {run['psnr']:.3f} dB, "
            f"{run['gaussians']} Gaussians, {run['seconds']:.0f} s"
        )


@torch.no_grad()
def measure(trainer: Any, trees: dict[int, PartitionTree]) -> dict[str, Any]:
    """PSNR, SSIM, and PSNR inside and outside the band around the cut planes of each tree, over the held-out views."""
    metrics = trainer.pipeline.get_average_eval_image_metrics()
    model = trainer.pipeline.eval().model
    squared = {num: np.zeros((2, 2)) for num in trees}  # [outside, inside] x [sum of squares, count]
    pairs = np.zeros(2)  # [straddling, all]
    diagonal = scene_diagonal(model.means)
    for camera, batch in trainer.pipeline.datamanager.fixed_indices_eval_dataloader:
        outputs = model.get_outputs_for_camera(camera)
        pairs += straddling_pairs(model, camera)
        error = (outputs["rgb"] - model.get_gt_img(batch["image"])[..., :3]).double().square().mean(dim=-1).numpy()
        points = surface_points(camera, outputs["depth"][..., 0])
        for num, tree in trees.items():
            inside = near_cuts(points, tree, BAND * diagonal).numpy()
            for k, chosen in enumerate((~inside, inside)):
                squared[num][k] += error[chosen].sum(), chosen.sum()
    return {
        "psnr": metrics["psnr"],
        "ssim": metrics["ssim"],
        "gaussians": model.num_points,
        "seconds": trainer.train_seconds,
        "straddling_pairs": pairs[0] / max(pairs[1], 1),
        "band": {
            str(num): {
                "rest_psnr": float(-10 * np.log10(sums[0, 0] / sums[0, 1])) if sums[0, 1] else None,
                "band_psnr": float(-10 * np.log10(sums[1, 0] / sums[1, 1])) if sums[1, 1] else None,
                "band_share": float(sums[1, 1] / sums[:, 1].sum()),
            }
            for num, sums in squared.items()
        },
    }


def straddling_pairs(model: Any, camera: Any) -> np.ndarray:  # -> [2]: of straddling Gaussians, of all
    """(Gaussian, pixel) pairs of a view, counted as the areas of the ellipses in which alpha is at least 1/255.

    A Gaussian straddles if its mean +- what its extents span at its depth is not inside its partition's box.
    """
    view = model.view_of(camera)
    gaussians = model.activated()
    splats = project_view(gaussians, view, model.render_options())
    seen = splats.extents[:, 0] > 0
    rotation = view.world_to_cam[:3, :3].abs()
    per_pixel = torch.stack([rotation[0] / view.K[0, 0], rotation[1] / view.K[1, 1]])  # [2, 3] world units per pixel
    reach = (splats.extents * splats.depths[:, None]) @ per_pixel  # [N, 3]
    owner = model.tree.locate(gaussians.means).long()
    lowest, highest = gaussians.means - reach, gaussians.means + reach
    straddles = ((lowest < model.tree.lo[owner]) | (highest >= model.tree.hi[owner])).any(dim=-1)
    a, b, c = splats.conics.unbind(dim=-1)
    areas = 2 * torch.pi * torch.log(255 * splats.opacities) / torch.sqrt(a * c - b * b)
    # Of an ellipse that reaches beyond the image, as much as of the box around it lies inside.
    size = torch.tensor([view.width, view.height])
    low, high = splats.means2d - splats.extents, splats.means2d + splats.extents
    inside = (high.minimum(size) - low.clamp_min(0)).clamp_min(0) / (2 * splats.extents).clamp_min(1e-6)
    areas = torch.where(seen, areas * inside.prod(dim=-1), 0.0).double()
    return np.array([float(areas[straddles].sum()), float(areas.sum())])


def scene_diagonal(means: torch.Tensor) -> float:
    """Diagonal of the box that holds the middle 99.8 % of the means on each axis, world units."""
    low, high = np.percentile(means.numpy(force=True), [0.1, 99.9], axis=0)
    return float(np.linalg.norm(high - low))


def surface_points(camera: Any, depth: torch.Tensor) -> torch.Tensor:  # [H, W] -> [H, W, 3]
    """World positions of what the pixels show, from the rendered depth along the optical axis."""
    height, width = depth.shape
    K = camera.get_intrinsics_matrices()[0]
    x, y = torch.meshgrid(torch.arange(width) + 0.5, torch.arange(height) + 0.5, indexing="xy")
    rays = torch.stack([(x - K[0, 2]) / K[0, 0], -(y - K[1, 2]) / K[1, 1], -torch.ones_like(x)], dim=-1)
    pose = camera.camera_to_worlds[0]
    return depth[..., None] * (rays @ pose[:3, :3].T) + pose[:3, 3]


def near_cuts(points: torch.Tensor, tree: PartitionTree, distance: float) -> torch.Tensor:  # [H, W, 3] -> [H, W] bool
    """Whether a step of `distance` along some axis leads from one partition into another."""
    flat = points.reshape(-1, 3)
    near = torch.zeros(len(flat), dtype=torch.bool)
    for axis in range(3):
        step = torch.zeros(3)
        step[axis] = distance
        near |= tree.locate(flat - step) != tree.locate(flat + step)
    return near.reshape(points.shape[:2])


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the seeds, and paired differences to one partition with Student's 95 % interval."""
    single = {run["seed"]: run for run in runs if run["partitions"] == 1}
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["partitions"], run["boundary"]), []).append(run)
    rows = []
    for (num, boundary), group in sorted(groups.items()):
        differences = [run["psnr"] - single[run["seed"]]["psnr"] for run in group]
        parts = {}
        for part in ("band", "rest"):
            pairs = [
                (run["band"][str(num)][f"{part}_psnr"], single[run["seed"]]["band"][str(num)][f"{part}_psnr"])
                for run in group
                if num > 1
            ]
            known = [a - b for a, b in pairs if a is not None and b is not None]
            parts[f"{part}_difference"] = float(np.mean(known)) if known else 0.0
        rows.append(
            {
                "partitions": num,
                "boundary": boundary,
                "seeds": len(group),
                "psnr": float(np.mean([run["psnr"] for run in group])),
                "ssim": float(np.mean([run["ssim"] for run in group])),
                "gaussians": float(np.mean([run["gaussians"] for run in group])),
                "straddling_pairs": float(np.mean([run["straddling_pairs"] for run in group])),
                "difference": float(np.mean(differences)),
                "interval": half_interval(differences),
                **parts,
            }
        )
    return rows


def half_interval(values: list[float]) -> float:
    """Half of Student's 95 % confidence interval of the mean; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    return float(stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))
