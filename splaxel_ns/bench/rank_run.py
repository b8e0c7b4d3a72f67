"""A training run of the method as one rank of a benchmark sees it: given Gaussians, a few steps, its counters.

Shapes: N Gaussians of all ranks, R ranks, B views of a step.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from splaxel_ns import comm
from splaxel_ns.bench.rank_job import bytes_sent_by
from splaxel_ns.bench.traffic import blocks_of_many
from splaxel_ns.partition import PartitionTree
from splaxel_ns.rank_saturation import KIND as SNAPSHOT
from splaxel_ns.scene import GAUSS_PARAMS, TREE

NEAR = "near_plane"


@dataclass(frozen=True)
class RunSettings:
    """What is trained, and how its ranks talk."""

    data: Path
    mode: str
    """An exchange, or one with "+saturation"."""
    batch_size: int
    scale: float = 1.0
    """Photographs are made smaller by this factor."""
    boundary: str = "filter"
    in_flight: int = 2
    rows: Path | None = None
    """Gaussians, as `torch.save` wrote them. None: the scene's seed points."""
    seed: int = 0

    @property
    def exchange(self) -> str:
        """Of the model's options."""
        return self.mode.removesuffix("+saturation")

    @property
    def saturation(self) -> bool:
        """Whether saturated pixels are left out."""
        return self.mode.endswith("+saturation")


class RankRun:
    """Pipeline and optimisers of one rank, without growth, files and viewer.

    Args:
        settings: The same on all ranks.
        max_seeds: At most so many of the scene's seed points are used. None: all.

    Raises:
        ValueError: The scene cannot be read.
    """

    def __init__(self, settings: RunSettings, max_seeds: int | None = None) -> None:
        from splaxel_ns.config import splaxel
        from splaxel_ns.optimization import BatchOptimizers

        CONSOLE.quiet = True
        torch.set_num_threads(1)
        torch.manual_seed(settings.seed)
        self.settings = settings
        rows = None if settings.rows is None else torch.load(settings.rows, weights_only=True, mmap=True)
        config: Any = copy.deepcopy(splaxel.config)
        manager, model = config.pipeline.datamanager, config.pipeline.model
        manager.data, manager.batch_size = settings.data, settings.batch_size
        manager.camera_res_scale_factor = settings.scale
        manager.train_cameras_sampling_seed = settings.seed
        model.exchange, model.saturation = settings.exchange, settings.saturation
        if settings.exchange != "gaussian":
            model.boundary = settings.boundary
        model.in_flight, model.seed = settings.in_flight, settings.seed
        model.num_downscales, model.stop_split_at = 0, 0
        if rows is not None:  # they are put in place below; the seed points need not be looked at
            model.near_plane = float(rows[NEAR])
            model.random_init, model.num_random = True, 64
            model.sh_degree_interval = 1  # the work of a late step
        self.pipeline = config.pipeline.setup(device="cpu", test_mode="val", world_size=1, local_rank=0)
        self.model = self.pipeline.model
        self.world = comm.world()
        CONSOLE.quiet = True
        if rows is None and max_seeds is not None:
            rows = resized(dict(self.model.gauss_params), min(max_seeds, self.model.num_points), settings.seed)
        if rows is not None:
            self._put_in_place({name: rows[name] for name in GAUSS_PARAMS})
        self.optimizers = BatchOptimizers(config.optimizers, self.pipeline.get_param_groups(), manager.batch_size)
        self.optimizers.fuse(self.model, only_visible=False)
        self.pipeline.train()
        self.steps_done = 0

    def _put_in_place(self, rows: dict[str, Tensor]) -> None:
        """Have the ranks train these Gaussians, each its share."""
        tree = PartitionTree.build(rows["means"], self.model.partitions_wanted())
        state = self.model.state_dict()
        state |= {f"gauss_params.{name}": value for name, value in rows.items()}
        state |= {f"tree_{name}": getattr(tree, name) for name in TREE}
        self.model.load_state_dict(state)
        self.model.keep_own_share()

    def step(self) -> float:
        """One training step; returns the seconds of the optimisers."""
        self.model.step_cb(self.optimizers, self.steps_done)
        self.optimizers.zero_grad_all()
        self.pipeline.train_step(self.steps_done)
        start = time.perf_counter()
        self.optimizers.optimizer_step_all()
        self.optimizers.scheduler_step_all(self.steps_done)
        seconds = time.perf_counter() - start
        self.model.refine(self.steps_done)
        self.steps_done += 1
        return seconds

    @torch.no_grad()
    def find_saturation(self, num_views: int) -> None:
        """Look at the views that come next, so that what is saturated in them is left out when they are trained.

        Raises:
            ValueError: The epoch has fewer views left.
        """
        manager = self.pipeline.datamanager
        views = manager.scheduler.peek(num_views)
        if len(views) < num_views:
            raise ValueError(
                f"{self.settings.data} has {manager.scheduler.num_views} training views; with saturation, one more "
                f"step than is measured must fit into an epoch: it takes {self.settings.batch_size + num_views}."
            )
        cameras = manager.train_dataset.cameras
        for index in views:
            camera = cameras[index : index + 1]
            camera.metadata = {**(camera.metadata or {}), "cam_idx": index}
            self.model.finish(camera, self.model.begin(camera))
            self.model.flight = None
        self.model.take_saturation_snapshot(True)

    @torch.no_grad()
    def blocks_of_many(self, num_views: int) -> dict[str, float]:
        """`traffic.blocks_of_many` over the views that come next, of exchange `owner`."""
        manager, total = self.pipeline.datamanager, {}
        cameras = manager.train_dataset.cameras
        for index in manager.scheduler.peek(num_views):
            flight = self.model.begin(cameras[index : index + 1])
            for name, value in blocks_of_many(flight.regions).items():
                total[name] = total.get(name, 0.0) + value
            self.model.finish(cameras[index : index + 1], flight)
            self.model.flight = None
        total["ratio"] = total["owner_bytes"] / total["selective_bytes"] if total["selective_bytes"] else None
        return total

    def measure(self, steps: int, interface: str | None = None) -> dict[str, Any]:
        """Do some steps and say what this rank did in them, summed over the steps.

        Args:
            steps: How many.
            interface: Also read the bytes that leave this network interface.
        """
        renderer = self.model.renderer
        assert renderer is not None
        self.world.barrier()
        self.world.take_counters()
        renderer.take_numbers()
        before = None if interface is None else bytes_sent_by(interface)
        start = time.perf_counter()
        optimizer_s = sum(self.step() for _ in range(steps))
        step_s = time.perf_counter() - start
        counters = self.world.take_counters()
        self.world.barrier()
        partitions = self.model.tree.num_partitions
        return {
            **renderer.take_numbers(),
            "optimizer_s": optimizer_s,
            "wait_s": counters.wait_s,
            "step_s": step_s,
            "bytes": counters.bytes_sent,
            "messages": counters.messages,
            "gaussians": self.model.num_points,
            "interface_bytes": None if before is None or interface is None else bytes_sent_by(interface) - before,
            "consolidated": self.pipeline.datamanager.scheduler.utilisation(partitions)[1],
            "size": self._size(),
        }

    def _size(self) -> tuple[int, int]:
        cameras = self.pipeline.datamanager.train_dataset.cameras
        return int(cameras.width.flatten()[0]), int(cameras.height.flatten()[0])


def measure(settings: RunSettings, steps: int) -> dict[str, Any]:
    """On a rank: a run's first step, which sets up connections and moments, and then some that count."""
    run = RankRun(settings)
    run.step()
    found = {}
    if settings.saturation:
        num_views = steps * settings.batch_size
        run.world.take_counters()
        run.find_saturation(num_views)
        sent = run.world.take_counters().bytes_sent.get(SNAPSHOT, 0)
        held = run.model.saturation.num_bytes  # the same on all ranks: each has the masks of all
        found["snapshot"] = {"bytes": sent, "views": num_views, "steps": steps, "held_bytes_per_rank": held}
    found |= run.measure(steps)
    if settings.exchange == "owner":
        found["blocks_of_many"] = run.blocks_of_many(settings.batch_size)
    return found


def measure_in_turns(
    all_settings: list[RunSettings], rounds: int, steps: int, interface: str
) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """On a rank, by mode and views in flight: several runs, a few steps of each in turns, so that all meet the same."""
    runs = {(settings.mode, settings.in_flight): RankRun(settings) for settings in all_settings}
    for run in runs.values():
        run.step()
        if run.settings.saturation:
            run.find_saturation(rounds * steps * run.settings.batch_size)
    results: dict[tuple[str, int], list[dict[str, Any]]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, run in runs.items():
            results[key].append(run.measure(steps, interface))
    return results


def train(settings: RunSettings, num_gaussians: int, steps: int, path: Path) -> None:
    """In one process: write Gaussians as they are after some training, and the near plane.

    Args:
        settings: With the scene's seed points.
        num_gaussians: So many of the seed points are trained; all if there are fewer.
        steps: How long.
        path: The file.
    """
    run = RankRun(settings, num_gaussians)
    for _ in range(steps):
        run.step()
    rows = {name: run.model.gauss_params[name].detach().clone() for name in GAUSS_PARAMS}
    torch.save(rows | {NEAR: run.model.near_plane.clone()}, path)


def resized(rows: dict[str, Tensor], num: int, seed: int) -> dict[str, Tensor]:
    """Another number of Gaussians that cover the same surfaces.

    Fewer: a random choice. More: copies, moved at random within the Gaussian they are copied from. Sizes follow the
    square root of the number, since Gaussians lie on surfaces.

    Args:
        rows: The model's parameters, N each.
        num: Wanted.
        seed: Of the choice.

    Returns:
        The parameters, `num` each.
    """
    count = len(rows["means"])
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=generator)
    chosen = order.repeat(-(-num // count))[:num]
    result = {name: rows[name].detach()[chosen].clone() for name in GAUSS_PARAMS}
    if num > count:
        quats = torch.nn.functional.normalize(result["quats"], dim=-1)
        local = torch.randn(num, 3, generator=generator) * result["scales"].exp()
        axis = quats[:, 1:]
        twice = 2.0 * torch.linalg.cross(axis, local)
        result["means"] += local + quats[:, :1] * twice + torch.linalg.cross(axis, twice)
    result["scales"] += 0.5 * torch.log(torch.tensor(count / num))
    return result
