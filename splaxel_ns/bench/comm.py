"""What ranks send each other: every exchange on the same Gaussians, over their number and that of the ranks.

A scene is trained for a while by one process, so that opacities and sizes are those of a model; its Gaussians, made
fewer or more, are then what the ranks train for a few steps with each exchange. Bytes are exact; times are those of
this machine, whose cores the ranks may have to share.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from nerfstudio.utils.rich_utils import CONSOLE

from splaxel_ns.bench.poses import utilisation_of_folder
from splaxel_ns.bench.rank_job import RankJob
from splaxel_ns.bench.rank_run import NEAR, RunSettings, measure, resized, train
from splaxel_ns.bench.results import ResultFile
from splaxel_ns.types import MAX_PARTITIONS, Boundary, Exchange

MODES = ("dense", "selective", "selective+saturation", "owner", "gaussian")


def known_modes() -> tuple[str, ...]:
    """`MODES` whose exchange exists."""
    return tuple(mode for mode in MODES if mode.removesuffix("+saturation") in get_args(Exchange))


@dataclass
class Comm:
    """Bytes, messages and times per step of every exchange, at several numbers of ranks and of Gaussians."""

    data: tuple[Path, ...]
    """Scenes (MatrixCity layout), each with a seed point cloud."""
    json: Path
    """Result file; written after every row."""
    ranks: tuple[int, ...] = (2, 4, 8)
    """Numbers of ranks."""
    gaussians: tuple[int, ...] = (10_000, 30_000, 100_000, 300_000)
    """Numbers of Gaussians of all ranks together."""
    modes: tuple[str, ...] = known_modes()
    """Exchanges; "+saturation" leaves saturated pixels out."""
    boundary: Boundary = "filter"
    """Of the exchanges of pixels."""
    steps: int = 2
    """Steps that are measured in each row, of as many images as there are ranks, after one that is not."""
    scale: float = 1.0
    """Photographs are made smaller by this factor."""
    train_steps: int = 300
    """Steps of training by one process before, at half that scale."""
    train_gaussians: int = 30_000
    """Seed points that are trained."""
    poses: Path | None = None
    """Folder with camera files of MatrixCity (transforms_train.json below it): how many partitions have work at a time
    with and without consolidation."""
    pose_partitions: int = 8
    """Partitions for `poses`."""

    def main(self) -> None:
        """Measure, print and write.

        Raises:
            RuntimeError: A rank failed.
            ValueError: An argument is out of range, or a scene cannot be read.
        """
        self._check()
        file = ResultFile(self.json)
        result: dict[str, Any] = {
            "boundary": self.boundary,
            "steps": self.steps,
            "scale": self.scale,
            "train_steps": self.train_steps,
            "rows": [],
            "crossover": [],
        }
        if self.poses is not None:
            result["utilisation"] = utilisation_of_folder(self.poses, self.pose_partitions)
            for entry in result["utilisation"]:
                CONSOLE.print(_say_utilisation(entry), markup=False, soft_wrap=True)
            file.write(result)
        total = len(self.data) * len(self.ranks) * len(self.gaussians) * len(self.modes)
        with tempfile.TemporaryDirectory() as folder:
            for row in self._rows(Path(folder)):
                result["rows"].append(row)
                file.write(result)
                CONSOLE.print(f"{len(result['rows'])}/{total} {say_row(row)}", markup=False, soft_wrap=True)
        result["crossover"] = crossovers(result["rows"])
        for found in result["crossover"]:
            CONSOLE.print(found["text"], markup=False, soft_wrap=True)
        result["ratios"] = ratios(result["rows"])
        file.write(result)

    def _check(self) -> None:
        check_common(self.data, self.modes, self.scale)
        if self.poses is not None and not self.poses.is_dir():
            raise ValueError(f"--poses {self.poses}: there is no such folder.")
        check_numbers("--ranks", self.ranks, 2, MAX_PARTITIONS)
        check_numbers("--gaussians", self.gaussians, max(self.ranks), 100_000_000)
        check_numbers("--steps", (self.steps,), 1, 10_000)
        check_numbers("--train-steps", (self.train_steps,), 0, 1_000_000)
        check_numbers("--train-gaussians", (self.train_gaussians,), 100, 100_000_000)
        check_numbers("--pose-partitions", (self.pose_partitions,), 2, MAX_PARTITIONS)

    def _rows(self, folder: Path) -> Iterator[dict[str, Any]]:
        files = {
            path: prepare(path, folder / str(k), self.gaussians, self.train_gaussians, self.train_steps, self.scale)
            for k, path in enumerate(self.data)
        }
        for size in self.ranks:
            with RankJob(size) as job:
                for path in self.data:
                    for num in self.gaussians:
                        for mode in self.modes:
                            settings = RunSettings(path, mode, size, self.scale, self.boundary, rows=files[path][num])
                            parts = job.run(measure, settings, self.steps)
                            yield {"scene": str(path), "ranks": size, "mode": mode} | summary(
                                settings, parts, self.steps
                            )


def check_common(data: Sequence[Path], modes: Sequence[str], scale: float) -> None:
    """Refuse scenes that are not there, unknown modes and a scale that is none.

    Raises:
        ValueError: Naming option and value.
    """
    for path in data:
        if not path.exists():
            raise ValueError(f"--data {path}: there is no such file or folder.")
    if not data or not modes:
        raise ValueError("At least one scene (--data) and one of --modes are needed.")
    wrong = [mode for mode in modes if mode not in known_modes()]
    if wrong:
        raise ValueError(f"--modes {wrong[0]}: it must be one of {', '.join(known_modes())}.")
    if not 0 < scale <= 1:
        raise ValueError(f"--scale is {scale}; it must lie in (0, 1].")


def check_numbers(option: str, values: Sequence[int], low: int, high: int) -> None:
    """Refuse none, or one that is out of range.

    Raises:
        ValueError: Naming option and value.
    """
    if not values:
        raise ValueError(f"{option}: at least one number is needed.")
    for value in values:
        if not low <= value <= high:
            raise ValueError(f"{option} is {value}; it must be from {low} to {high}.")


def prepare(
    data: Path, folder: Path, sizes: Sequence[int], num_trained: int, steps: int, scale: float
) -> dict[int, Path]:
    """Train a scene's seed points for a while, and write the result in several sizes.

    Args:
        data: The scene.
        folder: For the files; it is made.
        sizes: Numbers of Gaussians.
        num_trained: Seed points that are trained.
        steps: Of training.
        scale: Of the photographs of the benchmark; half of it is trained.

    Returns:
        The files, by size.

    Raises:
        RuntimeError: Training failed, for example because there is no such scene.
    """
    folder.mkdir(parents=True)
    with RankJob(1) as job, CONSOLE.status(f"Training {data} for {steps} steps"):
        job.run(train, RunSettings(data, "selective", 1, 0.5 * scale), num_trained, steps, folder / "trained.pt")
    trained = torch.load(folder / "trained.pt", weights_only=True)
    files = {}
    for num in sizes:
        files[num] = folder / f"{num}.pt"
        torch.save(resized(trained, num, seed=1) | {NEAR: trained[NEAR]}, files[num])
    return files


def summary(settings: RunSettings, parts: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """A row from what each rank says: bytes, messages and pixels of all ranks, times of their mean, per step.

    Args:
        settings: Of the run.
        parts: Of each rank, as `RankRun.measure` returns them.
        steps: That they counted.
    """
    size, images = len(parts), settings.batch_size
    kinds = sorted({kind for part in parts for kind in part["bytes"]})
    by_kind = {kind: sum(part["bytes"].get(kind, 0) for part in parts) / steps for kind in kinds}
    sent = sum(by_kind.values())
    step_s = max(part["step_s"] for part in parts) / steps
    participants = sum(part["participants"] for part in parts) / (steps * images)
    row: dict[str, Any] = {
        "gaussians": sum(part["gaussians"] for part in parts),
        "largest_rank": max(part["gaussians"] for part in parts),
        "boundary": "none" if settings.exchange == "gaussian" else settings.boundary,
        "width": parts[0]["size"][0],
        "height": parts[0]["size"][1],
        "images_per_step": images,
        "bytes_per_step": sent,
        "bytes_per_image": sent / images,
        "bytes": by_kind,
        "messages_per_step": sum(part["messages"] for part in parts) / steps,
        "step_s": step_s,
        "images_per_second": images / step_s,
        "active_pixels": sum(part["active_pixels"] for part in parts) / (steps * images),
        "participants": participants,
        "utilisation": participants / size,
        "utilisation_consolidated": None if settings.exchange == "gaussian" else parts[0]["consolidated"],
    }
    for name in ("wait_s", "render_s", "compose_s", "backward_s", "optimizer_s"):
        row[name] = sum(part[name] for part in parts) / (steps * size)
    if "snapshot" in parts[0]:  # what the steps that one serves cost beside, as bits and budgets of their views
        row["snapshot"] = parts[0]["snapshot"] | {"bytes": sum(part["snapshot"]["bytes"] for part in parts)}
        row["snapshot_bytes_per_image"] = row["snapshot"]["bytes"] / row["snapshot"]["views"]
    if "blocks_of_many" in parts[0]:
        row["blocks_of_4_or_more"] = parts[0]["blocks_of_many"]
    row["wait_s_longest"] = max(part["wait_s"] for part in parts) / steps
    return row


def say_row(row: dict[str, Any]) -> str:
    """A row as one line."""
    return (
        f"{Path(row['scene']).name}, {row['ranks']} ranks, {row['gaussians']:,} Gaussians, {row['mode']}: "
        f"{row['bytes_per_image'] / 1e6:.3f} MB per image, {row['images_per_second']:.2f} images/s, "
        f"{row['participants']:.2f} participants"
    )


def crossovers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """From how many Gaussians on the baseline, which sends Gaussians, sends more than each exchange of pixels.

    Between two measured numbers both are taken as powers of the number.

    Returns:
        Per scene, number of ranks and exchange: `gaussians`, None where one of the two sends less throughout, and
        `cheaper`, the one that sends less at the largest number measured.
    """
    found = []
    for scene, ranks in dict.fromkeys((row["scene"], row["ranks"]) for row in rows):
        here = [row for row in rows if (row["scene"], row["ranks"]) == (scene, ranks)]
        bytes_of = {(row["mode"], row["gaussians"]): row["bytes_per_step"] for row in here}
        baseline = {num: size for (mode, num), size in bytes_of.items() if mode == "gaussian"}
        for mode in dict.fromkeys(row["mode"] for row in here if row["mode"] != "gaussian"):
            points = sorted(
                (num, baseline[num] / max(size, 1.0))
                for (other, num), size in bytes_of.items()
                if other == mode and num in baseline
            )
            if points:
                found.append({"scene": scene, "ranks": ranks, "mode": mode} | crossover(mode, points))
                found[-1]["text"] = f"{Path(scene).name}, {ranks} ranks: {found[-1]['text']}"
    return found


def crossover(mode: str, points: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Where the ratio of the baseline's bytes to those of `mode` passes 1.

    Args:
        mode: The exchange of pixels.
        points: Number of Gaussians, rising, and that ratio.
    """
    ratio_at = {str(num): ratio for num, ratio in points}
    cheaper = mode if points[-1][1] > 1 else "gaussian"
    for (low, before), (high, after) in zip(points, points[1:], strict=False):
        if before <= 1 < after:
            part = math.log(1 / before) / math.log(after / before) if before > 0 else 1.0
            num = round(low * (high / low) ** part)
            text = f"gaussian sends less than {mode} up to about {num:,} Gaussians, more beyond"
            return {"gaussians": num, "cheaper": cheaper, "gaussian_over_mode": ratio_at, "text": text}
    ends = " to ".join(f"{num:,}" for num in dict.fromkeys((points[0][0], points[-1][0])))
    extremes = f"{min(r for _, r in points):.2f} to {max(r for _, r in points):.2f}"
    if all(ratio > 1 for _, ratio in points):
        text = f"{mode} sends less than gaussian at all {ends} Gaussians (gaussian sends {extremes} of it)"
    elif all(ratio <= 1 for _, ratio in points):
        text = f"gaussian sends less than {mode} at all {ends} Gaussians ({extremes} of it)"
    else:
        text = f"gaussian sends {extremes} of {mode} at {ends} Gaussians, falling below it as they grow in number"
    return {"gaussians": None, "cheaper": cheaper, "gaussian_over_mode": ratio_at, "text": text}


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bytes of every mode in parts of those of `selective`, on the same scene, ranks and Gaussians."""
    key = ("scene", "ranks", "gaussians")
    base = {tuple(row[name] for name in key): row["bytes_per_step"] for row in rows if row["mode"] == "selective"}
    return [
        {name: row[name] for name in (*key, "mode")} | {"of_selective": row["bytes_per_step"] / size}
        for row in rows
        if (size := base.get(tuple(row[name] for name in key)))
    ]


def _say_utilisation(entry: dict[str, Any]) -> str:
    regions, visible = (f"{entry[name]:.2f} -> {entry[name + '_consolidated']:.2f}" for name in ("frustum", "visible"))
    return (
        f"{entry['poses']}: {entry['views']} poses, {entry['partitions']} partitions; utilisation without and with "
        f"consolidation by regions {regions}, by visible surfaces {visible}"
    )
