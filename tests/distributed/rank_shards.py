"""What the ranks of a test do with checkpoints: of Gaussians made up for it, and of short real runs."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from splaxel_ns import comm, shards
from splaxel_ns.checkpoint import generator_states
from splaxel_ns.gaussian_rows import GAUSSIANS, join_rows, split_rows
from splaxel_ns.partition import PartitionTree
from splaxel_ns.resume import load_newest
from splaxel_ns.shards import own_state, write_sharded

NUM = 503
SCENE = Path(__file__).parents[1] / "data" / "matrixcity_caliterra" / "small_city" / "aerial"
WIDTHS = {"means": (3,), "quats": (4,), "features_rest": (15, 3), "opacities": (1,)}


def whole_state(step: int, num: int = NUM, num_partitions: int = 4, away: float = 0.0) -> dict[str, Any]:
    """The state of one process, like `resume.run_state`; boxes so far away that the first holds everything."""
    generator = torch.Generator().manual_seed(step)
    parameters = {name: torch.randn(num, *row, generator=generator) for name, row in WIDTHS.items()}
    tree = PartitionTree.build(parameters["means"] + away, num_partitions)
    optimizers: dict[str, Any] = {
        name: {
            "state": {
                0: {
                    "step": torch.tensor(float(step)),
                    "exp_avg": torch.randn(value.shape, generator=generator),
                    "exp_avg_sq": torch.rand(value.shape, generator=generator),
                }
            },
            "param_groups": [{"lr": 0.1, "params": [0]}],
        }
        for name, value in parameters.items()
    }
    poses = torch.randn(7, 6, generator=generator)
    optimizers["camera_opt"] = {"state": {0: {"exp_avg": poses + 1}}, "param_groups": [{"lr": 0.2, "params": [0]}]}
    statistics = {"grad2d": torch.rand(num, generator=generator), "radii": None}
    return {
        "step": step,
        "pipeline": {GAUSSIANS + name: value for name, value in parameters.items()}
        | {f"_model.tree_{name}": value for name, value in tree.state_dict().items()}
        | {"_model.near_plane": torch.tensor(0.2), "_model.camera_optimizer.pose_adjustment": poses},
        "optimizers": optimizers,
        "schedulers": {"means": {"last_epoch": step}},
        "scalers": {},
        "batch_size": 2,
        "datamanager": {"rest": [3, 1]},
        "model": {"step": step, "strategy": statistics},
        "generators": generator_states(),
    }


@dataclass
class Boxes:
    """Of a model, what decides who owns what."""

    world: comm.World
    tree: Any = None
    by_gaussians: bool = False

    def take_tree(self, tree: PartitionTree) -> None:
        self.tree = tree

    def rank_of(self, means: Tensor) -> Tensor:
        ranks = [torch.full((len(run),), rank) for rank, run in enumerate(self.tree.runs_of(self.world.size))]
        return torch.cat(ranks)[self.tree.locate(means).long()]


def part_of(state: dict[str, Any], world: comm.World) -> dict[str, Any]:
    """This rank's state of a run of which `state` is the whole."""
    rest, tables = split_rows(state)
    boxes = Boxes(
        world,
        PartitionTree.from_state_dict(
            {name: state["pipeline"][f"_model.tree_{name}"] for name in ("axis", "threshold", "children")}
        ),
    )
    mine = boxes.rank_of(tables[GAUSSIANS + "means"]) == world.rank
    return join_rows(rest, {name: value[mine] for name, value in tables.items()})


@contextmanager
def fault_of(kind: str) -> Iterator[None]:
    """Something goes wrong with the files of this rank."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    kept = (shards._write_shard, shards.Path, shards.write_checkpoint)

    def unwritable(folder: Path, rank: int, *rest: Any) -> Any:
        (folder / shards.shard_name(rank)).mkdir()  # permissions do not stop root
        return kept[0](folder, rank, *rest)

    def late(*args: Any) -> Any:
        kept[2](*args)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    try:
        if kind == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
        elif kind == "unwritable":
            shards._write_shard = unwritable
        elif kind == "other machine":
            shards.Path = lambda place: kept[1](f"{place}-of-another-machine")  # type: ignore[misc,assignment]
        elif kind == "no commit":
            shards.write_checkpoint = full
        elif kind == "late":
            shards.write_checkpoint = late
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        shards._write_shard, shards.Path, shards.write_checkpoint = kept  # type: ignore[misc]


def save(
    directory: Path, step: int, fault: str = "", faulty_rank: int = 0, bare_rank: int | None = None, away: float = 0.0
) -> str:
    """Save `whole_state(step)`; the error, if there is one. The bare rank has no moments or statistics yet."""
    world = comm.world()
    state = part_of(whole_state(step, away=away), world)
    if world.rank == bare_rank:
        for name in WIDTHS:
            state["optimizers"][name]["state"] = {}
        state["model"]["strategy"]["grad2d"] = None
    with fault_of(fault if world.rank == faulty_rank else ""):
        try:
            assert write_sharded(world, directory, step, state) == directory / f"step-{step:09d}.ckpt"
        except OSError as error:
            return str(error)
    return ""


def load(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]] | str:
    """The rest and the tables of this rank, from the newest readable checkpoint; or the error."""
    try:
        content = load_newest(comm.world(), directory)[1]
        rest, tables = split_rows(own_state(content, Boxes(comm.world())))  # type: ignore[arg-type]
        tree = {name: rest["pipeline"][f"_model.tree_{name}"] for name in ("axis", "threshold", "children")}
        boxes = Boxes(comm.world(), PartitionTree.from_state_dict(tree))
        assert bool((boxes.rank_of(tables[GAUSSIANS + "means"]) == comm.world().rank).all())
    except ValueError as error:
        return str(error)
    return rest, {name: value.clone() for name, value in tables.items()}


# Real runs


@dataclass
class Sizes:
    """Of one rank: rows of all that belongs to its Gaussians, what the statistics add up to, and the rates."""

    rows: set[int]
    seen: float
    rates: dict[str, float]

    @classmethod
    def of(cls, model: Any, optimizers: Any) -> Sizes:
        by_name = {name: optimizers.optimizers[name].state for name in model.gauss_params}
        moments = [
            m for name, state in by_name.items() for s in state.values() for m in (s["exp_avg"], s["exp_avg_sq"])
        ]
        statistics = [value for value in model.strategy_state.values() if isinstance(value, Tensor)]
        rows = {len(value) for value in (*model.gauss_params.values(), *moments, *statistics)}
        counted = model.strategy_state["count"]
        return cls(rows, 0.0 if counted is None else float(counted.sum()), optimizers.learning_rates())


def run_config(output_dir: Path) -> Any:
    import copy

    from splaxel_ns.config import splaxel

    config: Any = copy.deepcopy(splaxel.config)
    config.output_dir, config.experiment_name, config.timestamp = output_dir, "toy", "run"
    config.data = config.pipeline.datamanager.data = SCENE
    config.pipeline.datamanager.camera_res_scale_factor = 0.15
    config.pipeline.datamanager.batch_size = 2
    model = config.pipeline.model
    model.num_partitions, model.boundary, model.transmittance_stop = 3, "exact", 0.0
    model.refine_every, model.warmup_length, model.densify_grad_thresh = 8, 4, 2e-4  # after steps 4 and 8
    model.camera_optimizer.mode = "SO3xR3"
    return config


def train(output_dir: Path, steps: range, resumed: bool, saved_after: int = -1) -> tuple[list[float], int, Sizes]:
    """Losses of some steps, how many Gaussians this rank holds at the end, and what it began with."""
    from splaxel_ns.checkpoint import restore_generators
    from splaxel_ns.optimization import BatchOptimizers
    from splaxel_ns.resume import find_checkpoint, load_model, load_run_state, save_run

    config, world = run_config(output_dir), comm.world()
    config.resume = "auto" if resumed else "off"
    torch.manual_seed(3)
    _, loaded = find_checkpoint(config, world) or (None, None)
    pipeline = config.pipeline.setup(device="cpu", test_mode="val")
    assert resumed == (loaded is not None)
    if loaded is not None:
        load_model(loaded, pipeline)
    optimizers = BatchOptimizers(config.optimizers, pipeline.get_param_groups(), 2)
    optimizers.fuse(pipeline.model, only_visible=False)
    if loaded is not None:
        load_run_state(loaded, pipeline, optimizers, load_scheduler=True)
        restore_generators(loaded["generators"])
    begun = Sizes.of(pipeline.model, optimizers)
    pipeline.train()
    losses = []
    for step in steps:
        pipeline.model.step_cb(optimizers, step)
        optimizers.zero_grad_all()
        losses.append(float(pipeline.train_step(step)[0]))
        optimizers.optimizer_step_all()
        optimizers.scheduler_step_all(step)
        pipeline.model.refine(step)
        if step == saved_after:
            save_run(world, config.get_checkpoint_dir(), step, pipeline, optimizers)
    return losses, pipeline.model.num_points, begun
