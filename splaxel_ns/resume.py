"""Which checkpoint a run starts from, what a run puts into one, and how it goes on from there."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nerfstudio.utils.rich_utils import CONSOLE

from splaxel_ns import shards
from splaxel_ns.checkpoint import (
    checkpoint_steps,
    generator_states,
    load_checkpoint,
    load_newest_checkpoint,
    plain,
    write_checkpoint,
)
from splaxel_ns.comm import World
from splaxel_ns.optimization import BatchOptimizers

if TYPE_CHECKING:
    from splaxel_ns.pipeline import SplaxelPipeline
    from splaxel_ns.trainer import SplaxelTrainerConfig

PER_VIEW = {"camera_opt", "bilateral_grid"}
"""Parameter groups with one part for each training view."""


SHARED = "the run's folder must lie on a file system that all machines share"
_END = 1 << 16


def find_checkpoint(config: SplaxelTrainerConfig, world: World | None = None) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint a run starts from and its content, None for a fresh start; all ranks call this and agree.

    Args:
        config: The run's.
        world: The ranks; None: there is one.

    Returns:
        The file, and its content as `load_model` takes it: what belongs to single Gaussians may still be in shards.

    Raises:
        ValueError: A checkpoint was asked for and none of those there can be read; or those of an earlier
            run would be lost.
        LostRank: A peer is gone.
    """
    world = world or World()
    folder = config.get_checkpoint_dir()
    own = _steps(world, folder)
    if config.resume == "auto" and own:
        return load_newest(world, folder)
    if own:
        raise ValueError(
            f"{folder} holds the checkpoints of an earlier run, which this run's would replace: continue that run with "
            "--resume auto, or choose another --timestamp."
        )
    if config.load_dir is not None:
        if config.load_step is None:
            return load_newest(world, config.load_dir)
        return _load_or_raise(world, config.load_dir / f"step-{config.load_step:09d}.ckpt")
    if config.load_checkpoint is not None:
        return _load_or_raise(world, config.load_checkpoint)
    if config.resume == "auto":
        CONSOLE.print(f"{folder} holds no checkpoint yet: training starts from scratch.", markup=False)
    return None


def load_newest(world: World, directory: Path) -> tuple[Path, dict[str, Any]]:
    """`load_newest_checkpoint` of all ranks together: one that some rank cannot read is reported, and the one before
    is tried.

    Raises:
        ValueError: There is none, or none can be read; on all ranks.
        LostRank: A peer is gone.
    """
    if world.size == 1:
        return load_newest_checkpoint(directory)
    steps = _steps(world, directory)
    if not steps:
        raise ValueError(f"There is no checkpoint (step-XXXXXXXXX.ckpt) in {directory}.")
    for step in reversed(steps[1:]):
        try:
            return _load_or_raise(world, directory / f"step-{step:09d}.ckpt")
        except ValueError as error:
            CONSOLE.print(f"{error} Trying the one before.", style="bold yellow", markup=False)
    return _load_or_raise(world, directory / f"step-{steps[0]:09d}.ckpt")


def _steps(world: World, directory: Path) -> list[int]:
    """The checkpoints that rank 0 sees."""
    if world.size == 1:
        return checkpoint_steps(directory)
    seen = json.dumps(checkpoint_steps(directory)) if world.is_main else ""
    return json.loads(world.text_from_main(seen))


def _load_or_raise(world: World, path: Path) -> tuple[Path, dict[str, Any]]:
    """Read one checkpoint on all ranks, which share the work of verifying it."""
    if world.size == 1:
        return path, load_checkpoint(path)
    content: dict[str, Any] = {}
    error = None
    try:
        content = load_checkpoint(path, part=(world.rank, world.size))
    except ValueError as failure:
        error = str(failure) if world.is_main or path.is_file() else f"{path} does not exist here: {SHARED}."
    failures = world.failures(error)
    if failures:
        raise ValueError(" ".join(failures))
    with open(path, "rb") as file:  # the end of the archive lists the checksums of all that is in it
        size = file.seek(0, 2)
        file.seek(max(0, size - _END))
        fingerprint = zlib.crc32(file.read())
    seen = world.gather(torch.tensor([size, fingerprint]))
    if bool((seen != seen[0]).any()):
        raise ValueError(f"{path} is not the same file for all ranks: {SHARED}.")
    return path, content


def save_run(world: World, directory: Path, step: int, pipeline: SplaxelPipeline, optimizers: BatchOptimizers) -> Path:
    """Write the run's state after `step`, whole or not at all; all ranks call this at once.

    One rank writes one file; several write shards and a file that lists them.

    Returns:
        The .ckpt.

    Raises:
        OSError: It could not be written; raised on all ranks. What was there before is as it was.
        FloatingPointError: The model has diverged; on all ranks, and before anything is written or replaced.
        LostRank: A peer is gone.
    """
    require_finite(world, step, pipeline)
    state = plain(run_state(step, pipeline, optimizers))
    if world.size == 1:
        return write_checkpoint(directory, step, state)
    return shards.write_sharded(world, directory, step, state)


def require_finite(world: World, step: int, pipeline: SplaxelPipeline, mended: float = 0.0) -> None:
    """See to it that the model has not diverged; all ranks call this at once.

    Gaussians that are not finite are drawn by nobody, so that no loss tells; a checkpoint of them is of no use.

    Args:
        mended: So large a part of a rank's Gaussians is left for the next refinement to prune.

    Raises:
        FloatingPointError: Parameters are not finite; on all ranks.
    """
    bad = []
    for name, parameter in pipeline.model.named_parameters():
        value = parameter.detach()
        if bool(value.sum().isfinite()):  # one pass over memory; it may overflow, hence a second look
            continue
        broken = ~value.isfinite().reshape(len(value), -1).all(dim=1)
        if float(broken.float().mean()) > (mended if name.startswith("gauss_params.") else 0.0):
            bad.append(name.removeprefix("gauss_params."))
    failures = world.failures(", ".join(bad) or None)
    if failures:
        raise FloatingPointError(
            f"After step {step} these parameters are not finite: {'; '.join(failures)}. Training stops and nothing is "
            "saved; checkpoints written before are untouched. Lower their learning rates "
            "(--optimizers.NAME.optimizer.lr)."
        )


def run_state(step: int, pipeline: SplaxelPipeline, optimizers: BatchOptimizers) -> dict[str, Any]:
    """All that a run needs to go on after `step`, as `write_checkpoint` takes it."""
    return {
        "step": step,
        "pipeline": dict(pipeline.state_dict()),
        "optimizers": {name: optimizer.state_dict() for name, optimizer in optimizers.optimizers.items()},
        "schedulers": {name: scheduler.state_dict() for name, scheduler in optimizers.schedulers.items()},
        "scalers": {},
        "batch_size": pipeline.datamanager.config.batch_size,
        "datamanager": pipeline.datamanager.state_dict(),
        "model": pipeline.model.training_state(),
        "generators": generator_states(),
    }


def load_model(loaded: dict[str, Any], pipeline: SplaxelPipeline) -> None:
    """Fill the model from a checkpoint; the optimisers are made after it, for this replaces the parameters.

    Args:
        loaded: The checkpoint's content; afterwards it holds what belongs to the Gaussians of this rank.
        pipeline: This run's.

    Raises:
        ValueError: The checkpoint does not belong to this configuration, or to so many ranks.
        LostRank: A peer is gone.
    """
    batch_size = pipeline.datamanager.config.batch_size
    if loaded["batch_size"] != batch_size:
        raise ValueError(
            f"The checkpoint was trained with batches of {loaded['batch_size']}, this run has {batch_size}; schedules "
            f"count images: continue with --pipeline.datamanager.batch-size {loaded['batch_size']}."
        )
    try:
        loaded |= shards.own_state(loaded, pipeline.model)
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"The checkpoint is damaged: it lacks {error}, or it is of another kind.") from error
    loaded.pop("shards", None)
    pipeline.load_pipeline(loaded["pipeline"], loaded["step"])
    if getattr(pipeline.model, "is_shared", False):
        pipeline.model.changed()
        pipeline.model.count()
        assert len(pipeline.model.runs) == pipeline.model.world.size  # raises where boxes are fewer


def load_run_state(
    loaded: dict[str, Any], pipeline: SplaxelPipeline, optimizers: BatchOptimizers, load_scheduler: bool
) -> None:
    """Continue optimisers, schedules, datamanager and densification where the checkpoint left them.

    Args:
        loaded: The checkpoint's content; its model is in the pipeline already.
        pipeline: This run's.
        optimizers: This run's.
        load_scheduler: Whether schedules continue too; otherwise they start anew.

    Raises:
        ValueError: The checkpoint does not belong to this configuration or this data.
    """
    names = set(optimizers.optimizers)
    if names != set(loaded["optimizers"]):
        raise ValueError(
            f"The checkpoint has optimisers for {', '.join(sorted(loaded['optimizers']))}, this configuration for "
            f"{', '.join(sorted(names))}: continue with the flags of the run that wrote it."
        )
    per_view = sorted(names & PER_VIEW)
    if per_view and loaded["datamanager"].get("views") != pipeline.datamanager.state_dict().get("views"):
        raise ValueError(
            f"The training views are not those of the checkpoint, and each of them has its own part of "
            f"{' and '.join(per_view)}: continue with the data of the run that wrote it."
        )
    try:
        optimizers.load_optimizers(loaded["optimizers"])
        if load_scheduler:
            optimizers.load_schedulers(loaded["schedulers"])
        pipeline.datamanager.load_state_dict(loaded["datamanager"])
        pipeline.model.load_training_state(loaded["model"])
    except (AttributeError, KeyError, TypeError, IndexError, RuntimeError) as error:
        raise ValueError(
            f"The checkpoint's state does not fit this configuration ({type(error).__name__}: {error}): continue "
            "with the flags and the data of the run that wrote it."
        ) from error
