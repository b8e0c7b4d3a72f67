"""Which checkpoint a run starts from, what a run puts into one, and how it goes on from there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nerfstudio.utils.rich_utils import CONSOLE

from splaxel_ns.checkpoint import checkpoint_steps, generator_states, load_checkpoint, load_newest_checkpoint
from splaxel_ns.optimization import BatchOptimizers

if TYPE_CHECKING:
    from splaxel_ns.pipeline import SplaxelPipeline
    from splaxel_ns.trainer import SplaxelTrainerConfig

PER_VIEW = {"camera_opt", "bilateral_grid"}
"""Parameter groups with one part for each training view."""


def find_checkpoint(config: SplaxelTrainerConfig) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint a run starts from and its content, None for a fresh start.

    Raises:
        ValueError: A checkpoint was asked for and none of those there can be read; or those of an earlier
            run would be lost.
    """
    folder = config.get_checkpoint_dir()
    own = checkpoint_steps(folder)
    if config.resume == "auto" and own:
        return load_newest_checkpoint(folder)
    if own:
        raise ValueError(
            f"{folder} holds the checkpoints of an earlier run, which this run's would replace: continue that run with "
            "--resume auto, or choose another --timestamp."
        )
    if config.load_dir is not None:
        if config.load_step is None:
            return load_newest_checkpoint(config.load_dir)
        path = config.load_dir / f"step-{config.load_step:09d}.ckpt"
        return path, load_checkpoint(path)
    if config.load_checkpoint is not None:
        return config.load_checkpoint, load_checkpoint(config.load_checkpoint)
    if config.resume == "auto":
        CONSOLE.print(f"{folder} holds no checkpoint yet: training starts from scratch.", markup=False)
    return None


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

    Raises:
        ValueError: The checkpoint does not belong to this configuration.
    """
    batch_size = pipeline.datamanager.config.batch_size
    if loaded["batch_size"] != batch_size:
        raise ValueError(
            f"The checkpoint was trained with batches of {loaded['batch_size']}, this run has {batch_size}; schedules "
            f"count images: continue with --pipeline.datamanager.batch-size {loaded['batch_size']}."
        )
    pipeline.load_pipeline(loaded["pipeline"], loaded["step"])


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
