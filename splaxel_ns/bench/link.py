"""Exchanges side by side over links of a given speed, and what is counted as sent against what the links carried."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nerfstudio.utils.rich_utils import CONSOLE

from splaxel_ns.bench.comm import check_common, check_numbers, known_modes, prepare, summary
from splaxel_ns.bench.namespaces import INTERFACE, MAX_RANKS, Network
from splaxel_ns.bench.rank_job import RankJob
from splaxel_ns.bench.rank_run import RunSettings, measure_in_turns
from splaxel_ns.bench.results import ResultFile
from splaxel_ns.types import Boundary

WANTED = ("selective", "owner", "gaussian")


@dataclass
class Link:
    """Images per second of every exchange over slow links between ranks, each in a network namespace of its own.

    Needs Linux, root and iproute2."""

    data: tuple[Path, ...]
    """Scenes (MatrixCity layout), each with a seed point cloud."""
    json: Path
    """Result file."""
    rate: str = "1gbit"
    """Of every rank's link, in either direction, as `tc` writes it; "none": as fast as the machine."""
    ranks: tuple[int, ...] = (2,)
    """Numbers of ranks."""
    gaussians: tuple[int, ...] = (100_000,)
    """Numbers of Gaussians of all ranks together."""
    modes: tuple[str, ...] = tuple(mode for mode in WANTED if mode in known_modes())
    """Exchanges; "+saturation" leaves saturated pixels out."""
    boundary: Boundary = "filter"
    """Of the exchanges of pixels."""
    rounds: int = 5
    """Turns of each exchange; the median is what counts."""
    steps: int = 2
    """Steps in each turn."""
    in_flight: tuple[int, ...] = (2,)
    """Views that are drawn before the first of them must be composed; several are compared."""
    images_per_rank: int = 2
    """Images of a step, in parts of the number of ranks."""
    scale: float = 1.0
    """Photographs are made smaller by this factor."""
    train_steps: int = 300
    """Steps of training by one process before, at half that scale."""
    train_gaussians: int = 30_000
    """Seed points that are trained."""

    def main(self) -> None:
        """Measure, print and write.

        Raises:
            RuntimeError: Namespaces are not possible here, or a rank failed.
            ValueError: An argument is out of range, or a scene cannot be read.
        """
        check_common(self.data, self.modes, self.scale)
        check_numbers("--ranks", self.ranks, 2, min(16, MAX_RANKS))
        check_numbers("--gaussians", self.gaussians, max(self.ranks), 100_000_000)
        for name in ("rounds", "steps", "images_per_rank"):
            check_numbers(f"--{name.replace('_', '-')}", (getattr(self, name),), 1, 1024)
        check_numbers("--in-flight", self.in_flight, 1, 1024)
        check_numbers("--train-steps", (self.train_steps,), 0, 1_000_000)
        check_numbers("--train-gaussians", (self.train_gaussians,), 100, 100_000_000)
        rate = None if self.rate == "none" else self.rate
        Network(2, rate)  # says at once whether it is possible
        file, rows = ResultFile(self.json), []
        with tempfile.TemporaryDirectory() as folder:
            for number, path in enumerate(self.data):
                files = prepare(
                    path, Path(folder, str(number)), self.gaussians, self.train_gaussians, self.train_steps, self.scale
                )
                for size in self.ranks:
                    with Network(size, rate) as homes, RankJob(size, homes) as job:
                        for num in self.gaussians:
                            rows += self._side_by_side(job, path, files[num], num)
                            file.write({"rate": self.rate, "rounds": self.rounds, "steps": self.steps, "rows": rows})

    def _side_by_side(self, job: RankJob, path: Path, file: Path, num: int) -> list[dict[str, Any]]:
        """The rows of all exchanges on the same Gaussians, measured in turns."""
        settings = [
            RunSettings(path, mode, self.images_per_rank * job.size, self.scale, self.boundary, depth, file)
            for mode in self.modes
            for depth in self.in_flight
        ]
        with CONSOLE.status(f"{path.name}: {job.size} ranks, {num:,} Gaussians"):
            parts = job.run(measure_in_turns, settings, self.rounds, self.steps, INTERFACE)
        rows = []
        for one in settings:
            turns = [[part[one.mode, one.in_flight][turn] for part in parts] for turn in range(self.rounds)]
            each = [summary(one, turn, self.steps) for turn in turns]
            row = {"scene": str(path), "ranks": job.size, "mode": one.mode, "in_flight": one.in_flight}
            rows.append(row | {"rate": self.rate} | medians(each))
            rows[-1]["images_per_second_of_turns"] = [row["images_per_second"] for row in each]
            rows[-1]["wire"] = wire([part for turn in turns for part in turn])
            CONSOLE.print(say_row(rows[-1]), markup=False, soft_wrap=True)
        return rows


def medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row from several of the same run: the median of every number."""
    first = rows[0]
    result: dict[str, Any] = {}
    for name, value in first.items():
        if isinstance(value, dict):
            kinds = dict.fromkeys(kind for row in rows for kind in row[name])
            result[name] = {kind: statistics.median(row[name].get(kind, 0.0) for row in rows) for kind in kinds}
        elif isinstance(value, (int, float)):
            result[name] = statistics.median(row[name] for row in rows)
        else:
            result[name] = value
    return result


def wire(parts: list[dict[str, Any]]) -> dict[str, float]:
    """What ranks counted as sent, and what left their interfaces meanwhile, headers of Ethernet, IP and TCP included.

    Args:
        parts: As `RankRun.measure` returns them.
    """
    counted = sum(sum(part["bytes"].values()) for part in parts)
    carried = sum(part["interface_bytes"] for part in parts)
    return {"counted_bytes": counted, "interface_bytes": carried, "interface_over_counted": carried / max(counted, 1)}


def say_row(row: dict[str, Any]) -> str:
    """A row as one line."""
    return (
        f"{Path(row['scene']).name}, {row['ranks']} ranks, {row['gaussians']:,.0f} Gaussians, {row['rate']}, "
        f"{row['mode']}, {row['in_flight']} in flight: {row['images_per_second']:.2f} images/s, "
        f"{row['bytes_per_image'] / 1e6:.3f} MB per image, "
        f"wait {1e3 * row['wait_s']:.0f} of {1e3 * row['step_s']:.0f} ms; interface / counted "
        f"{row['wire']['interface_over_counted']:.4f}"
    )
