"""What a run logs, handed to nerfstudio's writers; a full disk ends those, not the training."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.utils import profiler, writer
from nerfstudio.utils.rich_utils import CONSOLE
from nerfstudio.utils.writer import EventName, TensorboardWriter

TIMES = {event.value for event in (EventName.ITER_TRAIN_TIME, EventName.TRAIN_RAYS_PER_SEC, EventName.ETA)}
"""Running means that nerfstudio makes at every step. An event file of every step would take a tenth of its time."""


class EventFiles:
    """The event files of one run. nerfstudio's list of writers outlives a run; `close` takes this run's out of it.

    Args:
        config: Which writers are wanted, and what is logged as the run's configuration.
        base_dir: The run's folder.
        banner: What the viewer wants to be printed, or None.
    """

    def __init__(self, config: TrainerConfig, base_dir: Path, banner: list[str] | None) -> None:
        log_dir = base_dir / config.logging.relative_log_dir
        others = list(writer.EVENT_WRITERS)
        writer.setup_event_writer(
            config.is_wandb_enabled(),
            config.is_tensorboard_enabled(),
            config.is_comet_enabled(),
            log_dir=log_dir,
            experiment_name=config.experiment_name or "unnamed",
            project_name=config.project_name or "nerfstudio-project",
        )
        writer.setup_local_writer(config.logging, max_iter=config.max_num_iterations, banner_messages=banner)
        self._writers: list[Any] = [item for item in writer.EVENT_WRITERS if item not in others]
        for message in banner or []:
            CONSOLE.print(message)
        writer.put_config(name="config", config_dict=dataclasses.asdict(config), step=0)
        profiler.setup_profiler(config.logging, log_dir)

    def write(self, flush: bool = False) -> None:
        """Hand over what was logged since the last call.

        Args:
            flush: Also make the files complete, for the process may end here.
        """
        if not flush and all(event["name"] in TIMES for event in writer.EVENT_STORAGE):
            writer.EVENT_STORAGE.clear()  # their means are kept elsewhere, and come with the next losses
        try:
            writer.write_out_storage()
            for event_writer in writer.EVENT_WRITERS if flush else ():
                if isinstance(event_writer, TensorboardWriter):
                    event_writer.tb_writer.flush()
        except OSError as error:
            writer.EVENT_STORAGE.clear()
            # Its thread has ended with this error and would raise it again at every step.
            writer.EVENT_WRITERS[:] = [item for item in writer.EVENT_WRITERS if not isinstance(item, TensorboardWriter)]
            CONSOLE.print(
                f"The event files cannot be written any more ({error}); training goes on.",
                style="bold red",
                markup=False,
            )

    def close(self) -> None:
        """Finish the files; the next run of this process must not write into them."""
        self.write(flush=True)
        for item in self._writers:
            if item in writer.EVENT_WRITERS:
                writer.EVENT_WRITERS.remove(item)
                if isinstance(item, TensorboardWriter):
                    item.tb_writer.close()
