"""Training runs of any number of ranks, through the method's own trainer."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

SCENE = Path(__file__).parents[1] / "data" / "matrixcity_caliterra" / "small_city" / "aerial"


def config_of(folder: Path, steps: int, batch_size: int = 4, num_partitions: int | None = 4, **model: Any) -> Any:
    """A short run on the committed scene at a quarter of its size, without growth unless `model` says so."""
    from splaxel_ns.config import splaxel

    config: Any = copy.deepcopy(splaxel.config)
    config.output_dir, config.experiment_name, config.timestamp = folder, "ranks", "run"
    config.max_num_iterations = steps
    config.vis = "tensorboard"
    config.steps_per_eval_image = config.steps_per_eval_batch = config.steps_per_eval_all_images = 10**9
    config.steps_per_save = 10**9
    config.pipeline.datamanager.data = SCENE
    config.pipeline.datamanager.camera_res_scale_factor = 0.25
    config.pipeline.datamanager.batch_size = batch_size
    config.pipeline.model.num_partitions = num_partitions
    config.pipeline.model.num_downscales = 0
    config.pipeline.model.stop_split_at = 0
    config.pipeline.model.saturation = False
    for name, value in model.items():
        setattr(config.pipeline.model, name, value)
    return config


def train_and_watch(config: Any) -> dict[str, Any]:
    """`train`, while rank 0 has a thread that behaves as the viewer's: it holds the lock while it draws."""
    pictures: list[torch.Tensor] = []

    def watch(trainer: Any) -> None:
        if not trainer.world.is_main:
            return
        model = trainer.pipeline.model
        model.live_view = trainer._live_view
        camera = trainer.pipeline.datamanager.eval_dataset.cameras[0:1]

        def draw() -> None:
            for _ in range(3):
                with trainer.train_lock:
                    model.eval()
                    pictures.append(model.get_outputs_for_camera(camera)["rgb"])
                    model.train()
                time.sleep(0.1)

        threading.Thread(target=draw, daemon=True).start()

    return train(config, watch) | {"pictures": pictures}


def train_and_miss(config: Any, step: int) -> dict[str, Any]:
    """`train`, where rank 1 cannot read its photographs from a step on; what the rank said, and what is left."""
    trainers: list[Any] = []

    def spoil(trainer: Any) -> None:
        trainers.append(trainer)
        data = trainer.pipeline.datamanager
        inner = data._train_views

        def vanish(indices: list[int], wanted: Any = None) -> Any:
            views = inner(indices, wanted)
            if trainer.world.rank == 1 and trainer.step + 1 == step and any("image" in batch for _, batch in views):
                raise ValueError("photo.png: there is no such photograph")
            return views

        data._train_views = vanish

    try:
        train(config, spoil)
    except ValueError as error:
        data = trainers[0].pipeline.datamanager
        return {"said": str(error), "kind": type(error).__name__, "saved": trainers[0]._saved_step} | {
            "next": [int(camera.metadata["cam_idx"]) for camera, _ in data.next_train_batch(step, lambda _: False)]
        }
    raise AssertionError("no photograph was missed")


def train_and_diverge(config: Any, what: str, step: int) -> dict[str, Any]:
    """`train`, where on the last rank something is not finite from a step on; how the rank ended.

    Args:
        what: "loss"; or "all" or "one" of its Gaussians.
    """
    trainers: list[Any] = []

    def spoil(trainer: Any) -> None:
        trainers.append(trainer)
        model, inner = trainer.pipeline.model, trainer.pipeline.model.get_loss_dict
        run, last = trainer.pipeline.train_step, trainer.world.rank == trainer.world.size - 1

        def lose(*args: Any) -> Any:
            return {name: value * float("nan") for name, value in inner(*args).items()}

        def spoiled(now: int) -> Any:
            if now == step and last:
                if what == "loss":
                    model.get_loss_dict = lose
                else:
                    with torch.no_grad():
                        model.means[: None if what == "all" else 1] = float("nan")
            return run(now)

        trainer.pipeline.train_step = spoiled

    said = kind = ""
    try:
        train(config, spoil)
    except Exception as error:
        said, kind = str(error), type(error).__name__
    return {"said": said, "kind": kind, "step": trainers[0].step, "num": trainers[0].pipeline.model.num_total}


def report(same: bool) -> str:
    """What a rank prints when it ends with an error: all ranks with the same, or each with its own."""
    import io
    import sys
    from contextlib import redirect_stderr

    from splaxel_ns import comm
    from splaxel_ns.reporting import report_once

    world, before = comm.world(), sys.excepthook
    said = io.StringIO()
    report_once(world)
    try:
        raise ValueError("no such folder" if same else f"no such folder on rank {world.rank}")
    except ValueError as error:
        with redirect_stderr(said):
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.excepthook = before
    return said.getvalue()


def train_scarce(config: Any, kind: str) -> dict[str, Any]:
    """`train`, where Gaussians or what is seen of them are scarce; also what the parameters were at first.

    Args:
        kind: "one holder": boxes of which the first holds everything; "turned": every other camera sees nothing;
            "all turned": no camera sees anything; "faint half": what the second of two boxes holds is transparent;
            "untouched".
    """
    first: dict[str, torch.Tensor] = {}

    def change(trainer: Any) -> None:
        model, cameras = trainer.pipeline.model, trainer.pipeline.datamanager.train_dataset.cameras
        if kind == "one holder":
            from splaxel_ns import migration
            from splaxel_ns.partition import PartitionTree

            far = 100.0 + torch.arange(8.0)[:, None].expand(-1, 3)
            model.take_tree(PartitionTree.build(far, model.tree.num_partitions))
            if model.is_shared:
                migration.migrate(model, {name: trainer.optimizers.optimizers[name] for name in model.gauss_params})
        elif "turned" in kind:
            turned = torch.arange(len(cameras)) % 2 == 1 if kind == "turned" else torch.ones(len(cameras)).bool()
            cameras.camera_to_worlds[turned] *= torch.tensor([-1.0, 1.0, -1.0, 1.0])
        elif kind == "faint half":
            with torch.no_grad():
                model.gauss_params["opacities"][model.tree.locate(model.means) == 1] = -9.0
        first.update({name: value.detach().clone() for name, value in model.gauss_params.items()})

    return train(config, change) | {"first": first}


def train(config: Any, before: Callable[[Any], None] | None = None) -> dict[str, Any]:
    """Run it; what this rank has at the end."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    trainer = config.setup(local_rank=0, world_size=1)
    trainer.setup()
    losses: list[float] = []
    totals: list[int] = []
    inner = trainer.train_iteration

    def noting(step: int) -> Any:
        result = inner(step)
        losses.append(float(result[0]))
        totals.append(trainer.pipeline.model.num_total or trainer.pipeline.model.num_points)
        return result

    trainer.train_iteration = noting
    if before is not None:
        before(trainer)
    trainer.train()
    model = trainer.pipeline.model
    others = {name: value for name, value in model.named_parameters() if "gauss_params" not in name and value.numel()}
    views = {name: value.detach().clone() for name, value in others.items()}
    box = model.tree.box_of(model.tree.runs_of(model.world.size)[model.world.rank]) if not model.by_gaussians else None
    return {
        "losses": losses,
        "totals": totals,
        "num": model.num_points,
        "last": {name: value.detach().clone() for name, value in model.gauss_params.items()},
        "means": model.means.detach().clone(),
        "views": views,
        "box": box,
    }
