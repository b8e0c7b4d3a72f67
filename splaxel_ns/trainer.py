"""The training run: where it starts, each step, what it saves and how it ends.

Shapes: B views of a step. A step is one update of the parameters; images = steps x B.
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from nerfstudio.configs.base_config import LocalWriterConfig, LoggingConfig
from nerfstudio.engine.callbacks import TrainingCallbackAttributes, TrainingCallbackLocation
from nerfstudio.engine.trainer import Trainer, TrainerConfig
from nerfstudio.utils import writer
from nerfstudio.utils.misc import step_check
from nerfstudio.utils.rich_utils import CONSOLE
from nerfstudio.utils.writer import EventName, TimeWriter
from torch import Tensor

from splaxel_ns import comm
from splaxel_ns.agreement import Agreed, LiveView, agree
from splaxel_ns.checkpoint import checkpoint_steps, remove_others, restore_generators
from splaxel_ns.event_files import EventFiles
from splaxel_ns.interrupts import StopSignals
from splaxel_ns.optimization import GAUSSIANS, BatchOptimizers
from splaxel_ns.pipeline import SplaxelPipeline, SplaxelPipelineConfig
from splaxel_ns.progress import ProgressLine, has_terminal
from splaxel_ns.reporting import report_once
from splaxel_ns.resume import find_checkpoint, load_model, load_run_state, require_finite, save_run
from splaxel_ns.run_lock import RunLock
from splaxel_ns.trainer_checks import check_run

MENDED = 0.01
"""So large a part of the Gaussians may have become something that is not finite as long as refinements prune them."""
EXIT_LOST = 75
"""Exit status when another rank is gone: try again (EX_TEMPFAIL), with --resume auto."""


@dataclass
class SplaxelTrainerConfig(TrainerConfig):
    """nerfstudio's training configuration with a way to continue a run.

    New fields get plain defaults, never default factories: an older run's config.yml lacks them, and only a plain
    default is found on the class.
    """

    _target: type = field(default_factory=lambda: SplaxelTrainer)
    vis: Literal[
        "viewer", "wandb", "tensorboard", "comet", "viewer+wandb", "viewer+tensorboard", "viewer+comet", "viewer_legacy"
    ] = "viewer+tensorboard"
    """Which visualizer to use. The plain viewer would turn off evaluation and event files."""
    logging: LoggingConfig = field(
        default_factory=lambda: LoggingConfig(local_writer=LocalWriterConfig(enable=False), profiler="none")
    )
    """Logging configuration. The line of progress replaces nerfstudio's table (local-writer)."""
    updates: Literal["all", "visible"] = "all"
    """Which Gaussians a step moves: all (Adam as in splatfacto, whose moments go on moving what no view sees), or
    visible (those that a view of the step saw): faster where views see a small part of the scene, but 0.3 to 0.8 dB
    worse after 900 steps of the committed one."""
    resume: Literal["off", "auto"] = "off"
    """Continue the run named by --timestamp (same --output-dir, --experiment-name and data) from its newest readable
    checkpoint; a run that has none yet starts afresh."""

    def set_timestamp(self) -> None:
        """Name a new run after the time.

        Raises:
            ValueError: The run to be continued is not named.
        """
        shared = comm.launched()[1] > 1
        if shared:
            report_once(comm.world())
        if self.resume == "auto" and self.timestamp == "{timestamp}":
            raise ValueError(
                "--resume auto needs --timestamp NAME, the folder of the run to continue below "
                f"{self.output_dir}/EXPERIMENT/{self.method_name}/: a new time stamp has nothing to resume."
            )
        super().set_timestamp()
        if shared:  # the clocks of the ranks differ, and one of them speaks
            world = comm.world()
            self.timestamp = world.text_from_main(self.timestamp)
            CONSOLE.quiet = not world.is_main

    def print_to_terminal(self) -> None:
        """Print the configuration, once per job."""
        if comm.launched()[0] == 0:
            super().print_to_terminal()

    def save_config(self) -> None:
        """Write config.yml, unless one stands there that belongs to an earlier run: `SplaxelTrainer.setup` replaces
        that once it is certain that this run starts."""
        if comm.launched()[0] == 0 and not self.has_earlier_run():
            self.write_config()

    def get_checkpoint_dir(self) -> Path:
        """The folder of the run's checkpoints. nerfstudio's `eval_setup` loads from it after building the pipeline,
        which is told here so that it can look at the checkpoint first."""
        folder = super().get_checkpoint_dir()
        if isinstance(self.pipeline, SplaxelPipelineConfig):
            self.pipeline.expect_checkpoint(folder, self.load_step)
        return folder

    def has_earlier_run(self) -> bool:
        """Whether the run's folder holds a configuration or checkpoints already."""
        return (self.get_base_dir() / "config.yml").exists() or bool(checkpoint_steps(self.get_checkpoint_dir()))

    def write_config(self) -> None:
        """Write config.yml, whatever stands there."""
        super().save_config()


class SplaxelTrainer(Trainer):
    """Trains B views per step; `max_num_iterations` is the run's total number of steps, resumed or not.

    Several ranks run the same steps at once; rank 0 writes files, shows the viewer and speaks.

    Args:
        config: The configuration.
        local_rank: This process on its machine.
        world_size: Number of processes that nerfstudio started; 1 under torchrun, whose environment says how many.

    Raises:
        ValueError: The configuration asks for mixed precision or gradient accumulation.
    """

    config: SplaxelTrainerConfig
    pipeline: SplaxelPipeline
    optimizers: BatchOptimizers

    def __init__(self, config: SplaxelTrainerConfig, local_rank: int = 0, world_size: int = 1) -> None:
        check_run(config, world_size)
        self.world = comm.world()
        CONSOLE.quiet = not self.world.is_main
        super().__init__(config, local_rank, world_size)
        self.stop_training = False
        self._complete = False
        self._saved_step: int | None = None
        self._loaded_generators: dict[str, Tensor] | None = None
        self._signals = StopSignals()
        self._lock: RunLock | None = None
        self._live_view = LiveView()
        self._has_lock = False
        self._events: EventFiles | None = None
        self._between_steps = True  # the state is that after a whole step

    def setup(self, test_mode: Literal["test", "val", "inference"] = "val") -> None:
        """Build pipeline, optimisers, viewer and writers; the checkpoint's model is loaded before the optimisers exist.

        Loading replaces the model's parameters, and optimisers made earlier would go on moving the old ones.

        Raises:
            ValueError: Another run trains in this folder, or configuration, data and checkpoint do not go together.
            SystemExit: SIGINT came; 130.
        """
        if self.world.is_main:
            self._lock = RunLock(self.base_dir)
        try:
            self._set_up(test_mode)
            if not self._complete and self.world.is_main:
                # Also where it stands already: this run's flags are those that its checkpoints fit.
                self.config.write_config()
        except KeyboardInterrupt:
            self._release_lock()
            raise SystemExit(128 + signal.SIGINT) from None
        except comm.LostRank as error:
            self._end_without(error)
        except BaseException:
            self._release_lock()
            raise

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _end_without(self, error: comm.LostRank) -> NoReturn:
        """A rank is gone: what the others hold is no whole model, so nothing is saved."""
        self._release_lock()
        print(f"{error} {self._how_to_continue()}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_LOST) from None

    def _set_up(self, test_mode: Literal["test", "val", "inference"]) -> None:
        path, loaded = find_checkpoint(self.config, self.world) or (None, None)
        if loaded is not None and loaded["step"] + 1 >= self.config.max_num_iterations:
            self._complete = True
            self.step = loaded["step"]
            return
        self.pipeline = self.config.pipeline.setup(
            device=self.device,
            test_mode=test_mode,
            world_size=self.world_size,
            local_rank=self.local_rank,
            grad_scaler=self.grad_scaler,
        )
        self.device = str(self.pipeline.device)
        self.batch_size: int = self.pipeline.datamanager.config.batch_size
        try:
            if loaded is not None:
                load_model(loaded, self.pipeline)
            self.optimizers = self.setup_optimizers()
            if loaded is not None:
                self._start_step = loaded["step"] + 1
                CONSOLE.print(f"Continuing at step {self._start_step}.")
                load_run_state(loaded, self.pipeline, self.optimizers, self.config.load_scheduler)
                self._loaded_generators = loaded["generators"]
        except ValueError as error:
            if path is None:
                raise
            raise ValueError(f"{path}: {error}") from error
        if self.world.size > 1:
            self.pipeline.model.say_shares()
        banner = self._start_viewer() if self.world.is_main else None
        self._check_viewer_warnings()
        self.callbacks = self.pipeline.get_training_callbacks(
            TrainingCallbackAttributes(
                optimizers=self.optimizers, grad_scaler=self.grad_scaler, pipeline=self.pipeline, trainer=self
            )
        )
        self._events = EventFiles(self.config, self.base_dir, banner) if self.world.is_main else None

    def setup_optimizers(self) -> BatchOptimizers:
        """Optimisers and schedules for this run's batch size."""
        optimizers = BatchOptimizers(self.config.optimizers, self.pipeline.get_param_groups(), self.batch_size)
        if set(GAUSSIANS) <= set(optimizers.optimizers):
            reason = "gradients are logged"
            if not self.config.log_gradients:
                reason = optimizers.fuse(self.pipeline.model, only_visible=self.config.updates == "visible")
            if reason is not None:
                CONSOLE.print(f"Every step writes all gradients and moves all Gaussians, which is slower: {reason}.")
        return optimizers

    def _start_viewer(self) -> list[str] | None:
        """nerfstudio's viewer where it is wanted; returns what it wants to be printed."""
        if not self.config.is_viewer_enabled() and not self.config.is_viewer_legacy_enabled():
            return None
        if self.config.is_viewer_legacy_enabled():
            raise ValueError("--vis viewer_legacy does not know Gaussians: use --vis viewer+tensorboard.")
        from nerfstudio.viewer.viewer import Viewer

        if self.world.size > 1:
            self._live_view = self.pipeline.model.live_view = LiveView()
        self.viewer_state = Viewer(
            self.config.viewer,
            log_filename=self.base_dir / self.config.viewer.relative_log_filename,
            datapath=self.config.data or self.base_dir,
            pipeline=self.pipeline,
            trainer=self,
            train_lock=self.train_lock,  # type: ignore[arg-type]
            share=self.config.viewer.make_share_url,
        )
        return self.viewer_state.viewer_info

    def train(self) -> None:
        """Run the steps that are left, save, and leave the viewer open where somebody watches.

        Raises:
            SystemExit: SIGINT or SIGTERM ended the run after its step; 128 plus the signal's number.
            FloatingPointError: A loss or a parameter was not finite; on all ranks.
            RuntimeError: The final checkpoint could not be written.
        """
        try:
            if self._complete:
                CONSOLE.print(
                    f"Nothing to train: {self.step + 1} steps are done and --max-num-iterations, the total, is "
                    f"{self.config.max_num_iterations}."
                )
                return
            self._train()
        except KeyboardInterrupt:
            CONSOLE.print(f"Interrupted in step {self.step + 1}. {self._how_to_continue()}", markup=False)
            raise SystemExit(128 + signal.SIGINT) from None
        except comm.LostRank as error:
            self._end_without(error)
        finally:
            self._release_lock()
        comm.leave()

    def _train(self) -> None:
        total = self.config.max_num_iterations
        self._save_dataparser_transform()
        self._init_viewer_state()
        if self._loaded_generators is not None:
            restore_generators(self._loaded_generators)
        self.step = self._start_step - 1  # the last finished step
        try:
            with self._signals as signals:
                with (
                    TimeWriter(writer, EventName.TOTAL_TRAIN_TIME),
                    ProgressLine(total, self.config.logging.steps_per_log, has_terminal()) as progress,
                ):
                    agreed = self._take_turn(signals)
                    for step in range(self._start_step, total):
                        if agreed.stop or agreed.signal is not None:
                            self._end_turn()
                            break
                        try:
                            self._run_or_save(step, progress)
                        finally:
                            self._end_turn()
                        agreed = self._take_turn(signals)
                    else:
                        self._end_turn()
                if agreed.signal is not None and self.step + 1 < total:
                    self._end_on_signal(agreed.signal)
                self._save_last()
            self._after_train()
        finally:
            self._live_view.close()
            self.pipeline.stats.close()
            if self._events is not None:
                self._events.close()
            self._close_viewer()

    def _take_turn(self, signals: StopSignals) -> Agreed:
        """Agree with the other ranks on what comes next, drawing what the viewer asks for meanwhile.

        With several ranks, either this one holds the lock that keeps the viewer's thread from rendering afterwards, or
        that thread holds it and waits for a picture, which is not due yet.
        """
        if self.world.size == 1:  # the lock changes hands several times in a step
            while self.training_state == "paused" and not self.stop_training and signals.received is None:
                time.sleep(0.05)
            return Agreed(signals.received, self.stop_training, False, False)
        while True:
            # The viewer's thread holds the lock while it waits for a picture.
            while not (locked := self.train_lock.acquire(timeout=0.005)) and not self._live_view.pending:
                pass
            paused = self.training_state == "paused" and not self.stop_training and signals.received is None
            picture = not locked and (self._live_view.pending if paused else self._live_view.due)
            try:
                agreed = agree(self.world, signals.received, self.stop_training, paused, picture)
            except BaseException:
                if locked:
                    self.train_lock.release()
                raise
            if agreed.picture:
                self._live_view.serve(self.pipeline.model)
            elif not agreed.paused or agreed.signal is not None:
                self._has_lock = locked
                return agreed
            if locked:
                self.train_lock.release()
            if agreed.paused and not agreed.picture:
                time.sleep(0.05)

    def _end_turn(self) -> None:
        """Let the viewer's thread have the lock."""
        if self.world.size > 1 and self._has_lock:
            self.train_lock.release()
            if self.viewer_state is not None:
                time.sleep(0.0005)  # a thread that takes a lock again at once is never overtaken

    @property
    def _alone(self) -> AbstractContextManager[Any]:
        """With one rank, the lock that keeps the viewer's thread from rendering; with several it is held already."""
        return self.train_lock if self.world.size == 1 else nullcontext()

    def _run_or_save(self, step: int, progress: ProgressLine) -> None:
        """One step; photographs that have vanished cost no more than the step that missed them."""
        try:
            self._run_step(step, progress)
        except (OSError, ValueError) as error:
            together = self.world.size == 1 or isinstance(error, comm.FailedTogether)  # saving takes all ranks
            if self._between_steps and together and self.step >= 0:
                self.save_checkpoint(self.step)
                if self._saved_step == self.step:
                    CONSOLE.print(
                        f"Step {step} failed; the state after step {self.step} is saved. {self._how_to_continue()}",
                        style="bold red",
                        markup=False,
                    )
            raise

    def _run_step(self, step: int, progress: ProgressLine) -> None:
        """One step with everything nerfstudio hangs on it: callbacks, viewer, event files, evaluation, checkpoint."""
        with self._alone, TimeWriter(writer, EventName.ITER_TRAIN_TIME, step=step) as timer:
            self.pipeline.train()
            self._run_callbacks(step, TrainingCallbackLocation.BEFORE_TRAIN_ITERATION)
            loss, loss_dict, metrics_dict = self.train_iteration(step)
            self._run_callbacks(step, TrainingCallbackLocation.AFTER_TRAIN_ITERATION)
        self.step = step
        self._between_steps = True
        num_gaussians = self.pipeline.model.num_total or self.pipeline.model.num_points
        psnr = float(metrics_dict["psnr"]) if "psnr" in metrics_dict else None
        if self.world.is_main:
            progress.update(step, timer.duration, float(loss), psnr, num_gaussians)
        if step > 1:  # the first steps would skew the viewer's estimate of how often it may render
            rays = self.pipeline.datamanager.get_train_rays_per_batch()
            writer.put_time(EventName.TRAIN_RAYS_PER_SEC, rays / max(1e-3, timer.duration), step, avg_over_steps=True)
        self._update_viewer_state(step)
        if step_check(step, self.config.logging.steps_per_log, run_at_zero=True):
            growing = (step + 1) * self.batch_size < self.pipeline.model.config.stop_split_at
            require_finite(self.world, step, self.pipeline, mended=MENDED if growing else 0.0)
            writer.put_scalar("Train Loss", loss, step)
            writer.put_dict("Train Loss Dict", loss_dict, step)
            writer.put_dict("Train Metrics Dict", metrics_dict | {"gaussian_count": num_gaussians}, step)
            writer.put_dict("learning_rate", self.optimizers.learning_rates(), step)
        if self.pipeline.datamanager.eval_dataset and self._evaluation_due(step):
            with self._alone, progress.paused():
                self.eval_iteration(step)
        if step_check(step, self.config.steps_per_save):
            self.save_checkpoint(step)
        if self._events is not None:
            self._events.write()

    def train_iteration(self, step: int) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Gradients of the step's B views, one update of every parameter, then growing and pruning.

        Returns:
            loss, its terms and the metrics: means over the views.
        """
        self.optimizers.zero_grad_all()
        loss, loss_dict, metrics_dict = self.pipeline.train_step(step)
        if self.config.log_gradients:
            metrics_dict |= self._gradient_norms()
        self._between_steps = False
        start = time.perf_counter()
        self.optimizers.optimizer_step_all()
        self.optimizers.scheduler_step_all(step)
        optimizer_s = time.perf_counter() - start
        report = self.pipeline.model.refine(step)
        if self.world.size > 1 or self.pipeline.config.stats_file is not None:
            utilisation = self.pipeline.datamanager.utilisation(self.pipeline.model.tree.num_partitions)
            more = {"optimizer_s": optimizer_s} | ({} if report is None else report.own)
            numbers = self.pipeline.stats.finish_step(step, more, utilisation)
            metrics_dict |= {f"rank 0/{name}": torch.tensor(value) for name, value in numbers.items()}
        return loss, loss_dict, metrics_dict

    def _gradient_norms(self) -> dict[str, Tensor]:
        named = self.pipeline.model.named_parameters()
        norms = {f"Gradients/{name}": value.grad.norm() for name, value in named if value.grad is not None}
        return norms | {
            "Gradients/Total": torch.stack([*(norm.cpu() for norm in norms.values()), torch.zeros(())]).sum()
        }

    def _run_callbacks(self, step: int, location: TrainingCallbackLocation) -> None:
        for callback in self.callbacks:
            callback.run_callback_at_location(step, location=location)

    def _evaluation_due(self, step: int) -> bool:
        config = self.config
        intervals = (config.steps_per_eval_batch, config.steps_per_eval_image, config.steps_per_eval_all_images)
        return any(step_check(step, interval) for interval in intervals)

    def _save_dataparser_transform(self) -> None:
        outputs = getattr(self.pipeline.datamanager, "train_dataparser_outputs", None)
        if outputs is not None and self.world.is_main:
            outputs.save_dataparser_transform(self.base_dir / "dataparser_transforms.json")

    def save_checkpoint(self, step: int) -> None:
        """Write the run's state after `step`; if that fails, say so, keep the checkpoint before, and go on."""
        if step < 0 or step == self._saved_step:
            return
        try:
            with self._signals.deferred():
                path = save_run(self.world, self.checkpoint_dir, step, self.pipeline, self.optimizers)
                self._saved_step = step
                if self.config.save_only_latest_checkpoint and self.world.is_main:
                    remove_others(self.checkpoint_dir, keep=path)
        except OSError as error:
            CONSOLE.print(
                f"Could not save the checkpoint of step {step}: {error}. Checkpoints written before are untouched; "
                "training goes on. Free space or make the folder writable before it ends.",
                style="bold red",
                markup=False,
            )

    def _end_on_signal(self, number: int) -> None:
        with self._alone:
            self.save_checkpoint(self.step)
        saved = f"its checkpoint is in {self.checkpoint_dir}" if self._saved_step == self.step else "nothing was saved"
        CONSOLE.print(
            f"Stopped by {signal.Signals(number).name} after {self.step + 1} of {self.config.max_num_iterations} "
            f"steps; {saved}. {self._how_to_continue()}",
            markup=False,
        )
        raise SystemExit(128 + number)

    def _how_to_continue(self) -> str:
        if self._saved_step is None and not checkpoint_steps(self.checkpoint_dir):
            return "There is no checkpoint to continue from."
        return f"Continue with --resume auto --timestamp {self.config.timestamp}."

    def _save_last(self) -> None:
        self.training_state = "completed"
        self.save_checkpoint(self.step)
        if self.step >= 0 and self._saved_step != self.step:
            raise RuntimeError(
                f"Training ended at step {self.step}, but its checkpoint could not be written to {self.checkpoint_dir} "
                f"(see above). The last one saved is that of step {self._saved_step}."
            )

    def _after_train(self) -> None:
        """Run the last callbacks, and keep the viewer where somebody can still use it."""
        CONSOLE.print(f"{self.step + 1} steps are done. Configuration: {self.base_dir / 'config.yml'}", markup=False)
        CONSOLE.print(f"Checkpoints: {self.checkpoint_dir}", markup=False)
        self._run_callbacks(self.step, TrainingCallbackLocation.AFTER_TRAIN)
        summary = self.pipeline.stats.summary()
        if summary is not None:
            CONSOLE.print(summary)
        if self._events is not None:
            self._events.write(flush=True)
        watched = self.viewer_state is not None and has_terminal() and self._signals.received is None
        if watched and self.world.size > 1:
            CONSOLE.print("The ranks end together and the viewer with them: open the result with ns-viewer.")
            watched = False
        if watched and not self.config.viewer.quit_on_train_completion:
            try:
                self._train_complete_viewer()
            except KeyboardInterrupt:
                CONSOLE.print("Viewer closed.")

    def _close_viewer(self) -> None:
        if self.viewer_state is not None:
            self.shutdown()
