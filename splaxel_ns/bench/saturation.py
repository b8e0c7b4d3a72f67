"""What leaving out saturated pixels costs in quality and saves in work: paired runs with and without it.

Two scenes: one on disk, and two textured walls, one behind the other, of which the front one hides most of the other.
Both runs of a pair are the same through the first half, without saturation; then growth ends and one of them begins to
leave pixels out. With growth, runs that differ by rounding alone end with other Gaussians and differ by up to 1 dB.
Time is that of the processor on one model, a view with and without its mask in turns: between two runs, other programs
on the machine change more than masks do.
"""

from __future__ import annotations

import copy
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from nerfstudio.engine.schedulers import ExponentialDecaySchedulerConfig
from nerfstudio.utils.rich_utils import CONSOLE
from PIL import Image
from torch import Tensor

from splaxel_ns.bench.results import ResultFile
from splaxel_ns.render import rasterize

WALL_DISTANCE = 10.0
"""Between the two walls, more than their sides: the first cut of the KD-tree separates them."""
REPEATS = 5


@dataclass
class Saturation:
    """Train with and without saturation: PSNR, pruned share, flip rate, pairs and time per step."""

    json: Path
    """Result file."""
    data: Path | None = None
    """A scene (MatrixCity layout). None: two opaque walls, one behind the other."""
    steps: int = 800
    """Training steps of each run."""
    num_partitions: int = 4
    """Partitions of each run."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One paired comparison per seed."""
    scale: float = 0.5
    """Photographs are made smaller by this factor."""
    max_gaussians: int = 25_000
    """Growth stops there."""

    def main(self) -> None:
        file = ResultFile(self.json)
        runs: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory() as folder:
            data = self.data
            if data is None:
                data = Path(folder) / "walls"
                write_walls(data)
            for seed in self.seeds:
                for saturation in (False, True):
                    runs.append(self._run(data, Path(folder), seed, saturation))
                    CONSOLE.print({key: round(value, 4) for key, value in runs[-1].items()})
        differences = [on["psnr"] - off["psnr"] for off, on in zip(runs[::2], runs[1::2], strict=True)]
        summary = {
            "psnr_difference": statistics.mean(differences),
            "psnr_differences": differences,
            "pruned_share": statistics.mean(run["pruned_share"] for run in runs[1::2]),
            "flip_rate": statistics.mean(run["flip_rate"] for run in runs[1::2]),
            **{name: statistics.mean(run[name] for run in runs[1::2]) for name in COSTS},
        }
        scene = "two walls" if self.data is None else str(self.data)
        settings = {"steps": self.steps, "partitions": self.num_partitions, "scale": self.scale}
        file.write({"scene": scene, **settings, "summary": summary, "runs": runs})
        CONSOLE.print(
            f"{scene}: PSNR with saturation {summary['psnr_difference']:+.3f} dB "
            f"({', '.join(f'{value:+.3f}' for value in differences)}), {summary['pruned_share']:.1%} of the pairs left "
            f"out, flip rate {summary['flip_rate']:.2%}; per view and step {summary['milliseconds_full']:.1f} -> "
            f"{summary['milliseconds_masked']:.1f} ms, {summary['splat_tiles_full']:.0f} -> "
            f"{summary['splat_tiles_masked']:.0f} pairs of splats and tiles"
        )

    def _run(self, data: Path, folder: Path, seed: int, saturation: bool) -> dict[str, Any]:
        trainer = self._trainer(data, folder, seed, saturation)
        model, inner = trainer.pipeline.model, trainer.train_iteration

        def forked(step: int) -> Any:
            model.config.saturation = saturation and step >= self.steps // 2
            return inner(step)

        trainer.train_iteration = forked
        trainer.train()
        counts = model.saturation.last_epoch
        return {
            "seed": seed,
            "saturation": saturation,
            "psnr": trainer.pipeline.get_average_eval_image_metrics()["psnr"],
            "gaussians": model.num_points,
            "pruned_share": counts.pruned_share,
            "flip_rate": counts.flip_rate,
            "mask_bytes": model.saturation.num_bytes,
            **(costs(trainer) if saturation else {}),
        }

    def _trainer(self, data: Path, folder: Path, seed: int, saturation: bool) -> Any:
        from splaxel_ns.config import splaxel

        config: Any = copy.deepcopy(splaxel.config)
        config.max_num_iterations = self.steps
        config.machine.seed = config.pipeline.model.seed = seed
        config.vis = "tensorboard"
        config.output_dir = folder
        config.experiment_name, config.timestamp = "saturation", f"{seed}_{saturation}"
        config.steps_per_eval_image = config.steps_per_eval_batch = config.steps_per_eval_all_images = 10**9
        config.steps_per_save = 10**9
        config.logging.steps_per_log = max(1, self.steps // 4)
        for group in config.optimizers.values():
            rate = group["optimizer"].lr
            group["scheduler"] = ExponentialDecaySchedulerConfig(lr_final=0.01 * rate, max_steps=self.steps)
        manager, model = config.pipeline.datamanager, config.pipeline.model
        if self.data is None:
            manager.dataparser = NerfstudioDataParserConfig(
                orientation_method="none", center_method="none", auto_scale_poses=False, eval_interval=8,
                eval_mode="interval", load_3D_points=True,
            )  # fmt: skip
        manager.data = data
        manager.train_cameras_sampling_seed = seed
        manager.camera_res_scale_factor = self.scale
        model.num_partitions = self.num_partitions
        model.max_gaussians = self.max_gaussians
        model.warmup_length = self.steps // 8
        model.stop_split_at = self.steps // 2
        model.sh_degree_interval = max(1, self.steps // 5)
        model.num_downscales = 0
        model.cull_alpha_thresh = 0.005
        torch.manual_seed(seed)
        np.random.seed(seed)
        trainer = config.setup(local_rank=0, world_size=1)
        trainer.setup()
        return trainer


COSTS = ("milliseconds_full", "milliseconds_masked", "splat_tiles_full", "splat_tiles_masked")


def costs(trainer: Any) -> dict[str, float]:
    """Forward and backward pass of training views with and without their masks, in turns; the fastest of each."""
    pipeline = trainer.pipeline
    pipeline.train()
    model = pipeline.model
    model.saturation.take_snapshot(model.images)
    sums: dict[str, float] = dict.fromkeys(COSTS, 0.0)
    views = [pipeline.datamanager.next_train_batch(0)[0] for _ in range(12)]
    for camera, batch in views:
        best = {"full": float("inf"), "masked": float("inf")}
        for _ in range(REPEATS):
            for name in best:
                model.config.saturation = name == "masked"
                start = time.process_time()
                outputs = model.get_outputs(camera)
                terms = model.get_loss_dict(outputs, batch)
                torch.stack(list(terms.values())).sum().backward()
                best[name] = min(best[name], time.process_time() - start)
                sums[f"splat_tiles_{name}"] += model.info["stats"].num_pairs / REPEATS / len(views)
        for name, seconds in best.items():
            sums[f"milliseconds_{name}"] += 1e3 * seconds / len(views)
    return sums


def wall(distance: float, side: float, seed: int, layers: int = 3) -> tuple[Tensor, Tensor]:
    """Points [N, 3] of a thick wall across the z axis and their colours [N, 3] in 0..1."""
    steps = torch.linspace(-side / 2, side / 2, 64)
    grid = torch.cartesian_prod(steps, steps, torch.arange(layers) * 0.04)
    points = torch.stack([grid[:, 0], grid[:, 1], -distance - grid[:, 2]], dim=1)
    waves = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(seed)) * 3
    phases = torch.einsum("ni,cik->nck", points[:, :2], waves)
    return points, (0.5 + 0.45 * torch.sin(phases).mean(dim=-1) * 1.5).clamp(0, 1)


def write_walls(folder: Path, num_views: int = 40, width: int = 240, height: int = 180) -> None:
    """Photographs of two walls, drawn by our own rasteriser, with poses and seed points in nerfstudio's layout."""
    front, behind = wall(0.0, 4.0, 1), wall(WALL_DISTANCE, 9.0, 2)
    means, colors = torch.cat([front[0], behind[0]]), torch.cat([front[1], behind[1]])
    window = (means[:, 2] > -1) & (means[:, 0] > 0.8) & (means[:, 1].abs() < 0.7)  # through which the other is seen
    means, colors = means[~window], colors[~window]
    num = len(means)
    scales = torch.where(means[:, 2] > -1, 4.0, 9.0) / 64  # neighbours touch
    focal = 0.9 * width
    K = torch.tensor([[focal, 0, width / 2], [0, focal, height / 2], [0, 0, 1.0]])
    (folder / "images").mkdir(parents=True)
    frames = []
    for index in range(num_views):
        angle = 2 * np.pi * index / num_views
        eye = torch.tensor([1.2 * np.cos(angle), 0.8 * np.sin(angle), 3.0], dtype=torch.float32)
        pose = looking_at_origin(eye)
        to_cam = torch.linalg.inv(pose @ torch.diag(torch.tensor([1.0, -1, -1, 1])))
        rgb, *_ = rasterize(
            means, torch.tensor([1.0, 0, 0, 0]).repeat(num, 1), scales[:, None].expand(-1, 3).contiguous(),
            torch.full((num,), 0.95), (colors - 0.5)[:, None] / 0.28209479177387814, to_cam, K, width, height,
            torch.zeros(3),
        )  # fmt: skip
        name = f"images/{index:03d}.png"
        Image.fromarray((rgb.clamp(0, 1) * 255).round().byte().numpy()).save(folder / name)
        frames.append({"file_path": name, "transform_matrix": pose.tolist()})
    # Equal numbers of either wall, so that the median lies between them.
    rng = torch.Generator().manual_seed(0)
    chosen = torch.randperm(num, generator=rng)
    chosen = torch.cat([chosen[(means[chosen, 2] > -1) == is_front][:9000] for is_front in (True, False)])
    write_points(folder / "points.ply", means[chosen], colors[chosen])
    lens = {"fl_x": focal, "fl_y": focal, "cx": width / 2, "cy": height / 2, "w": width, "h": height}
    content = {"camera_model": "OPENCV", **lens, "ply_file_path": "points.ply", "frames": frames}
    (folder / "transforms.json").write_text(json.dumps(content))


def looking_at_origin(eye: Tensor) -> Tensor:  # [3] -> [4, 4]
    """Camera to world, OpenGL axes, y up."""
    back = eye / eye.norm()
    right = torch.linalg.cross(torch.tensor([0.0, 1.0, 0.0]), back)
    right = right / right.norm()
    pose = torch.eye(4)
    pose[:3] = torch.stack([right, torch.linalg.cross(back, right), back, eye], dim=1)
    return pose


def write_points(path: Path, points: Tensor, colors: Tensor) -> None:
    """A PLY file of coloured points."""
    fields = "".join(f"property float {axis}\n" for axis in "xyz")
    fields += "".join(f"property uchar {channel}\n" for channel in ("red", "green", "blue"))
    rows = [
        f"{x:.5f} {y:.5f} {z:.5f} {r} {g} {b}"
        for (x, y, z), (r, g, b) in zip(points.tolist(), (colors * 255).byte().tolist(), strict=True)
    ]
    head = f"ply\nformat ascii 1.0\nelement vertex {len(points)}\n{fields}end_header\n"
    path.write_text(head + "\n".join(rows) + "\n")
