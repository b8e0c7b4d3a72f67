"""How a run starts, continues, stops and fails, with a model of a few numbers in place of a renderer.

The stand-ins have the interface of our model and datamanager; the real ones are in tests/integration.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from gsplat.strategy.ops import duplicate
from nerfstudio.configs.base_config import InstantiateConfig
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackLocation
from nerfstudio.engine.optimizers import AdamOptimizerConfig
from nerfstudio.engine.schedulers import ExponentialDecaySchedulerConfig, MultiStepSchedulerConfig
from nerfstudio.utils import profiler, writer
from torch import Tensor

from splaxel_ns.checkpoint import checkpoint_steps, load_checkpoint, newest_checkpoint
from splaxel_ns.comm import World
from splaxel_ns.evaluation import average_metrics, picture_names
from splaxel_ns.interrupts import StopSignals
from splaxel_ns.optimization import BatchOptimizers
from splaxel_ns.pipeline import SplaxelPipelineConfig
from splaxel_ns.progress import ProgressLine, clock
from splaxel_ns.trainer import SplaxelTrainerConfig

NUM_VIEWS = 5


@dataclass
class ToyModelConfig(InstantiateConfig):
    _target: type = field(default_factory=lambda: ToyModel)
    num_partitions: int = 1
    boundary: str = "filter"
    background_color: str = "black"
    stop_split_at: int = 0


class ToyModel(torch.nn.Module):
    """Predicts one colour, the mean of its points plus noise from torch's generator; gains points every 4 steps."""

    nan_at: int | None = None
    is_shared = False
    num_total = 0
    renderer = None
    world = World()

    def __init__(self, config: ToyModelConfig, **_: Any) -> None:
        super().__init__()
        self.config = config
        points = torch.linspace(0, 1, 12).reshape(4, 3)
        self.gauss_params = torch.nn.ParameterDict({"means": torch.nn.Parameter(points)})
        self.tree = SimpleNamespace(num_partitions=1)
        self.step = 0
        self.views_seen = 0
        self.optimizers: dict[str, torch.optim.Optimizer] = {}

    @property
    def device(self) -> torch.device:
        return self.gauss_params["means"].device

    @property
    def num_points(self) -> int:
        return len(self.gauss_params["means"])

    def set_training_views(self, cameras: Any, batch_size: int) -> None:
        self.batch_size = batch_size

    def keep_own_share(self) -> None: ...

    def shows(self, participants: set[int]) -> bool:
        return True

    def begin(self, camera: Any) -> None: ...

    def finish(self, camera: Any, flight: None) -> dict[str, Tensor]:
        return self.get_outputs(camera)

    def update_to_step(self, step: int) -> None: ...

    def take_saturation_snapshot(self, new_epoch: bool) -> None: ...

    def load_state_dict(self, state: dict[str, Tensor], strict: bool = True) -> Any:  # type: ignore[override]
        self.gauss_params["means"] = torch.nn.Parameter(torch.zeros_like(state["gauss_params.means"]))
        return super().load_state_dict(state, strict)

    def participants_for(self, cameras: Any) -> list[set[int]]:
        return [{0}] * NUM_VIEWS

    def get_outputs(self, camera: Any) -> dict[str, Tensor]:
        color = self.gauss_params["means"].mean(dim=0) + 0.1 * torch.rand(3)
        if self.nan_at == self.step:
            color = color * float("nan")
        return {"rgb": color.expand(6, 8, 3)}

    def get_outputs_for_camera(self, camera: Any) -> dict[str, Tensor]:
        return {"rgb": self.gauss_params["means"].mean(dim=0).expand(6, 8, 3)}

    def get_metrics_dict(self, outputs: dict[str, Tensor], batch: dict[str, Any]) -> dict[str, Any]:
        return {"psnr": -10 * torch.log10(((outputs["rgb"] - batch["image"]) ** 2).mean())}

    def get_loss_dict(
        self, outputs: dict[str, Tensor], batch: dict[str, Any], metrics: Any = None
    ) -> dict[str, Tensor]:
        return {"main_loss": (outputs["rgb"] - batch["image"]).abs().mean(), "scale_reg": torch.zeros(())}

    def get_image_metrics_and_images(self, outputs: dict[str, Tensor], batch: dict[str, Any]) -> tuple[dict, dict]:
        return {"psnr": float(self.get_metrics_dict(outputs, batch)["psnr"])}, {"img": outputs["rgb"].detach()}

    def after_backward(self, camera: Any) -> None:
        self.views_seen += 1

    def refine(self, step: int) -> None:
        if step % 4 == 3:
            mask = torch.zeros(self.num_points, dtype=torch.bool)
            mask[:2] = True
            duplicate(params=self.gauss_params, optimizers=self.optimizers, state={}, mask=mask)

    def training_state(self) -> dict[str, Any]:
        return {"views_seen": self.views_seen}

    def load_training_state(self, state: dict[str, Any]) -> None:
        self.views_seen = state["views_seen"]

    def get_param_groups(self) -> dict[str, list[torch.nn.Parameter]]:
        return {"means": [self.gauss_params["means"]]}

    def get_training_callbacks(self, attributes: Any) -> list[TrainingCallback]:
        def note(optimizers: Any, step: int) -> None:
            self.step, self.optimizers = step, optimizers.optimizers

        return [TrainingCallback([TrainingCallbackLocation.BEFORE_TRAIN_ITERATION], note, args=[attributes.optimizers])]


@dataclass
class ToyDatamanagerConfig(InstantiateConfig):
    _target: type = field(default_factory=lambda: ToyDatamanager)
    data: Path | None = None
    batch_size: int = 1
    num_eval: int = 2


class ToyDataset(list):
    metadata: dict = {}
    scene_box = None

    def __init__(self, count: int) -> None:
        super().__init__(range(count))
        sizes = torch.full((count, 1), 8)
        self.cameras = SimpleNamespace(width=sizes, height=sizes)
        self.image_filenames = [Path(f"/data/block_{i % 2}/{i // 2:04d}.png") for i in range(count)]


class ToyDatamanager(torch.nn.Module):
    test_split = "val"
    includes_time = False

    def __init__(self, config: ToyDatamanagerConfig, **_: Any) -> None:
        super().__init__()
        self.config = config
        self.train_dataset, self.eval_dataset = ToyDataset(NUM_VIEWS), ToyDataset(config.num_eval)
        self.position = 0
        self.participants_set = 0

    def view(self, index: int) -> tuple[Any, dict[str, Any]]:
        return None, {"image": torch.full((6, 8, 3), (index + 1) / NUM_VIEWS), "image_idx": index}

    def new_epoch_next(self, step: int) -> bool:
        return self.position % NUM_VIEWS == 0

    def set_participants(self, participants: Any) -> None:
        assert len(participants) == NUM_VIEWS
        self.participants_set += 1

    def next_train_batch(self, step: int, wanted: Any = None) -> list:
        views = [self.view((self.position + i) % NUM_VIEWS) for i in range(self.config.batch_size)]
        self.position += self.config.batch_size
        return views

    @property
    def fixed_indices_eval_dataloader(self) -> list:
        return [self.view(index) for index in range(len(self.eval_dataset))]

    def get_datapath(self) -> Path:
        return Path("/data")

    def get_train_rays_per_batch(self) -> int:
        return 48

    def get_param_groups(self) -> dict:
        return {}

    def get_training_callbacks(self, attributes: Any) -> list:
        return []

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return super().state_dict(*args, **kwargs) if args or kwargs else {"position": self.position}

    def load_state_dict(self, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.position = state["position"]


def make_config(folder: Path, total: int, **changes: Any) -> SplaxelTrainerConfig:
    batch_size = changes.pop("batch_size", 1)
    num_eval = changes.pop("num_eval", 2)
    config = SplaxelTrainerConfig(
        method_name="splaxel",
        experiment_name="toy",
        timestamp="run",
        output_dir=folder,
        vis="tensorboard",
        max_num_iterations=total,
        steps_per_eval_batch=0,
        steps_per_eval_image=0,
        steps_per_eval_all_images=changes.pop("steps_per_eval_all_images", 0),
        pipeline=SplaxelPipelineConfig(
            datamanager=ToyDatamanagerConfig(batch_size=batch_size, num_eval=num_eval),  # type: ignore[arg-type]
            model=ToyModelConfig(),  # type: ignore[arg-type]
        ),
        optimizers={
            "means": {
                "optimizer": AdamOptimizerConfig(lr=0.01, eps=1e-15),
                "scheduler": ExponentialDecaySchedulerConfig(lr_final=1e-4, max_steps=100),
            }
        },
        **changes,
    )
    config.machine.device_type = "cpu"
    return config


def start(config: SplaxelTrainerConfig, seed: int = 0) -> Any:
    """Set up a trainer whose losses are recorded."""
    torch.manual_seed(seed)
    config.set_timestamp()
    config.save_config()
    trainer = config.setup(local_rank=0, world_size=1)
    trainer.setup()
    trainer.losses = {}
    inner = trainer.train_iteration

    def recorded(step: int) -> Any:
        result = inner(step)
        trainer.losses[step] = float(result[0])
        return result

    trainer.train_iteration = recorded
    return trainer


def run(config: SplaxelTrainerConfig, seed: int = 0) -> Any:
    trainer = start(config, seed)
    trainer.train()
    return trainer


@pytest.fixture(autouse=True)
def fresh_writers() -> Iterator[None]:
    """nerfstudio keeps its writers and profilers in module globals; each run here gets its own."""
    yield
    for kept in (writer.EVENT_WRITERS, writer.EVENT_STORAGE, writer.GLOBAL_BUFFER, profiler.PROFILER):
        kept.clear()


def models(folder: Path) -> Path:
    return folder / "toy" / "splaxel" / "run" / "nerfstudio_models"


def test_a_run_ends_and_leaves_checkpoint_config_and_events(tmp_path: Path, capsys: Any) -> None:
    trainer = run(make_config(tmp_path, 12))
    assert checkpoint_steps(models(tmp_path)) == [11]
    base = models(tmp_path).parent
    assert (base / "config.yml").is_file()
    assert list(base.glob("events.out.tfevents*"))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(lines) == 2 and "12/12" in lines[1]
    for word in ("loss", "PSNR", "Gaussians 10", "it/s", "ETA 0:00:00"):
        assert word in lines[1]
    assert trainer.pipeline.model.views_seen == 12
    assert trainer.pipeline.datamanager.participants_set == 3, "once per epoch of 5 views"


@pytest.mark.parametrize("stop", [8, 10], ids=["right after points were added", "in between"])
def test_resume_equals_the_uninterrupted_run(tmp_path: Path, stop: int) -> None:
    whole = run(make_config(tmp_path / "whole", stop + 20))
    run(make_config(tmp_path / "parts", stop))
    resumed = run(make_config(tmp_path / "parts", stop + 20, resume="auto"), seed=123)
    assert list(resumed.losses) == list(range(stop, stop + 20)), "max_num_iterations is the total"
    for step, loss in resumed.losses.items():
        assert loss == pytest.approx(whole.losses[step], abs=1e-6), step
    assert resumed.pipeline.model.num_points == whole.pipeline.model.num_points
    assert checkpoint_steps(models(tmp_path / "parts")) == [stop + 19]


def test_load_dir_counts_the_total_too(tmp_path: Path) -> None:
    run(make_config(tmp_path / "first", 6))
    second = run(make_config(tmp_path / "second", 10, load_dir=models(tmp_path / "first")))
    assert list(second.losses) == [6, 7, 8, 9]
    path = models(tmp_path / "first") / "step-000000005.ckpt"
    third = run(make_config(tmp_path / "third", 10, load_checkpoint=path))
    assert third.losses == pytest.approx(second.losses)


def test_a_complete_run_says_so_and_ends(tmp_path: Path, capsys: Any) -> None:
    run(make_config(tmp_path, 6))
    before = newest_checkpoint(models(tmp_path)).stat().st_mtime_ns  # type: ignore[union-attr]
    trainer = run(make_config(tmp_path, 6, resume="auto"))
    assert "Nothing to train: 6 steps are done" in capsys.readouterr().out
    assert not trainer.losses and newest_checkpoint(models(tmp_path)).stat().st_mtime_ns == before  # type: ignore[union-attr]


def test_a_fresh_run_does_not_replace_an_earlier_one(tmp_path: Path) -> None:
    run(make_config(tmp_path, 6))
    path = models(tmp_path).parent / "config.yml"
    before = path.read_bytes()
    for changes in ({}, {"save_only_latest_checkpoint": False}, {"load_dir": models(tmp_path)}):
        with pytest.raises(ValueError, match=r"toy/splaxel/run/.* --resume auto, or choose another --timestamp"):
            start(make_config(tmp_path, 4, **changes))
    assert checkpoint_steps(models(tmp_path)) == [5] and path.read_bytes() == before
    shutil.rmtree(models(tmp_path))  # what is left of a run without checkpoints is no loss
    run(make_config(tmp_path, 4))
    assert checkpoint_steps(models(tmp_path)) == [3] and path.read_bytes() != before


def test_resume_without_a_checkpoint_starts_afresh(tmp_path: Path) -> None:
    assert list(run(make_config(tmp_path, 3, resume="auto")).losses) == [0, 1, 2]


def test_resume_needs_a_timestamp(tmp_path: Path) -> None:
    config = make_config(tmp_path, 3, resume="auto")
    config.timestamp = "{timestamp}"
    with pytest.raises(ValueError, match="--timestamp NAME"):
        start(config)
    assert not list(tmp_path.iterdir())


def test_resume_falls_back_to_the_checkpoint_before_a_broken_one(tmp_path: Path, capsys: Any) -> None:
    run(make_config(tmp_path, 9, steps_per_save=4, save_only_latest_checkpoint=False))
    assert checkpoint_steps(models(tmp_path)) == [4, 8]
    newest = models(tmp_path) / "step-000000008.ckpt"
    newest.write_bytes(newest.read_bytes()[:500])
    assert list(run(make_config(tmp_path, 9, resume="auto")).losses) == [5, 6, 7, 8]
    assert "Trying the one before" in capsys.readouterr().out.replace("\n", " ")


def test_resume_with_only_broken_checkpoints_is_an_error(tmp_path: Path) -> None:
    run(make_config(tmp_path, 3))
    path = newest_checkpoint(models(tmp_path))
    assert path is not None
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=path.name):
        start(make_config(tmp_path, 9, resume="auto"))
    assert path.exists()


def test_resume_with_another_batch_size_is_refused(tmp_path: Path) -> None:
    run(make_config(tmp_path, 3))
    with pytest.raises(ValueError, match=r"step-000000002.ckpt: .*--pipeline.datamanager.batch-size 1"):
        start(make_config(tmp_path, 9, resume="auto", batch_size=2))


def test_foreign_model_state_is_one_clear_error(tmp_path: Path) -> None:
    trainer = run(make_config(tmp_path, 3))
    good = load_checkpoint(newest_checkpoint(models(tmp_path)))["pipeline"]  # type: ignore[arg-type]
    pipeline = trainer.pipeline
    for state, message in (
        ({"field.mlp": torch.zeros(3)}, "holds no model"),
        (good | {"_model.extra": torch.zeros(1)}, "extra"),
        (good | {"_model.extra": "text"}, "no tensor"),
        ([], "not one of splaxel"),
    ):
        with pytest.raises(ValueError, match=message):
            pipeline.load_pipeline(state, 2)
    pipeline.load_pipeline(good, 2)


@pytest.mark.parametrize("masked", [{1}, set(range(NUM_VIEWS))], ids=["one view", "all views"])
def test_views_that_are_masked_entirely_have_no_metrics(
    tmp_path: Path, masked: set[int], monkeypatch: Any, capsys: Any
) -> None:
    inner, logged = ToyModel.get_metrics_dict, []

    def metrics_dict(self: Any, outputs: Any, batch: dict[str, Any]) -> dict[str, Any]:
        return {} if batch["image_idx"] in masked else inner(self, outputs, batch)

    monkeypatch.setattr(ToyModel, "get_metrics_dict", metrics_dict)
    monkeypatch.setattr(writer, "put_dict", lambda name, scalar_dict, step: logged.append((name, scalar_dict)))
    monkeypatch.setattr(ToyModel, "get_image_metrics_and_images", lambda *_: ({}, {"img": torch.zeros(6, 8, 3)}))
    trainer = run(make_config(tmp_path, 6, batch_size=2, steps_per_eval_all_images=3))
    said = capsys.readouterr().out
    assert ("PSNR" in said) == (len(masked) == 1) and "nan" not in said
    kept = [values for name, values in logged if name == "Train Metrics Dict"]
    assert kept and all(("psnr" in values) == (len(masked) == 1) for values in kept)
    assert any("all images" in name for name, _ in logged), "training goes on where evaluation has nothing to say"
    with pytest.raises(ValueError, match="all 2 views of the val split of /data are masked entirely"):
        trainer.pipeline.get_average_eval_image_metrics(get_std=True)


def test_a_nan_loss_stops_and_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(ToyModel, "nan_at", 7)
    with pytest.raises(FloatingPointError, match=r"step 7, view '/data/block_0/0001.png'"):
        run(make_config(tmp_path, 20, steps_per_save=5))
    assert checkpoint_steps(models(tmp_path)) == [5]
    assert list(models(tmp_path).parent.glob("events.out.tfevents*"))


@pytest.fixture
def hangup_heard() -> Iterator[None]:
    """SIGHUP at its default: under nohup it is ignored, and training leaves it so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup_heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_after_the_step_and_exits(tmp_path: Path, capsys: Any, number: signal.Signals) -> None:
    trainer = start(make_config(tmp_path, 50))
    trainer.pipeline.model.after_backward = lambda camera: (
        os.kill(os.getpid(), number) if trainer.pipeline.model.step == 6 else None
    )
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as stopped:
        trainer.train()
    assert stopped.value.code == 128 + number
    assert signal.getsignal(number) is before
    assert checkpoint_steps(models(tmp_path)) == [6]
    assert "--resume auto --timestamp run" in " ".join(capsys.readouterr().out.split())
    assert list(run(make_config(tmp_path, 9, resume="auto")).losses) == [7, 8]


def test_an_earlier_configuration_stays_until_the_new_run_is_set_up(tmp_path: Path) -> None:
    config = models(tmp_path).parent / "config.yml"
    run(make_config(tmp_path, 6))
    before = config.read_text()
    run(make_config(tmp_path, 6, resume="auto", steps_per_save=77))
    assert config.read_text() == before, "there was nothing to train"
    with pytest.raises(ValueError, match="batch-size 1"):
        start(make_config(tmp_path, 9, resume="auto", batch_size=2))
    assert config.read_text() == before, "the resume was refused"
    run(make_config(tmp_path, 9, resume="auto", steps_per_save=77))
    assert yaml.load(config.read_text(), Loader=yaml.Loader).steps_per_save == 77


def test_a_second_run_in_the_folder_is_refused_while_the_first_trains(tmp_path: Path) -> None:
    first = start(make_config(tmp_path, 4))
    config = (models(tmp_path).parent / "config.yml").read_text()
    with pytest.raises(ValueError, match=r"toy/splaxel/run.*another --timestamp"):
        start(make_config(tmp_path, 5))
    assert (models(tmp_path).parent / "config.yml").read_text() == config
    first.train()
    assert list(run(make_config(tmp_path, 5, resume="auto")).losses) == [4]


def test_a_file_system_without_locks_is_said(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert list(run(make_config(tmp_path, 1)).losses) == [0]
    assert "cannot be locked (No locks available)" in " ".join(capsys.readouterr().out.split())


def test_a_second_interrupt_waits_for_the_checkpoint(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    trainer = start(make_config(tmp_path, 50))
    trainer.pipeline.model.after_backward = lambda camera: (
        os.kill(os.getpid(), signal.SIGINT) if trainer.pipeline.model.step == 6 else None
    )
    save = torch.save

    def interrupted_save(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        save(*args)

    monkeypatch.setattr(torch, "save", interrupted_save)
    with pytest.raises(SystemExit) as stopped:
        trainer.train()
    assert stopped.value.code == 130
    assert checkpoint_steps(models(tmp_path)) == [6]
    out = " ".join(capsys.readouterr().out.split())
    assert "Could not save" not in out and "--resume auto --timestamp run" in out


def test_an_interrupt_without_a_checkpoint_offers_none(tmp_path: Path, capsys: Any) -> None:
    trainer = start(make_config(tmp_path, 50))

    def twice(camera: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    trainer.pipeline.model.after_backward = twice
    with pytest.raises(SystemExit) as stopped:
        trainer.train()
    assert stopped.value.code == 130 and not checkpoint_steps(models(tmp_path))
    assert "no checkpoint to continue from" in " ".join(capsys.readouterr().out.split())


def test_an_ignored_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_photograph_that_vanishes_costs_one_step(tmp_path: Path, capsys: Any) -> None:
    trainer = start(make_config(tmp_path, 50))
    inner = trainer.pipeline.datamanager.next_train_batch

    def vanish(step: int, wanted: Any = None) -> list:
        if step == 7:
            raise ValueError("[/data]/0007.png cannot be read")
        return inner(step)

    trainer.pipeline.datamanager.next_train_batch = vanish
    with pytest.raises(ValueError, match="0007.png"):
        trainer.train()
    assert checkpoint_steps(models(tmp_path)) == [6]
    assert "the state after step 6 is saved" in " ".join(capsys.readouterr().out.split())
    assert list(run(make_config(tmp_path, 9, resume="auto")).losses) == [7, 8]


def test_a_second_interrupt_is_immediate() -> None:
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_stop_and_pause_from_the_viewer(tmp_path: Path) -> None:
    trainer = start(make_config(tmp_path, 50))

    def stop_at_4(camera: Any) -> None:
        trainer.stop_training = trainer.pipeline.model.step == 4
        trainer.training_state = "paused"

    trainer.pipeline.model.after_backward = lambda camera: None
    inner = trainer._take_turn

    def resume_after_a_while(signals: Any) -> Any:
        def resume() -> None:
            trainer.training_state = "training"

        threading.Timer(0.2 if trainer.training_state == "paused" else 0.0, resume).start()
        return inner(signals)

    trainer._take_turn = resume_after_a_while
    trainer.pipeline.model.after_backward = stop_at_4
    trainer.train()
    assert checkpoint_steps(models(tmp_path)) == [4], "the last step done, not the next"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_does_not_end_training(tmp_path: Path, capsys: Any) -> None:
    config = make_config(tmp_path, 30, steps_per_save=5)
    config.logging.steps_per_log = 1
    trainer = start(config)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_disk(camera: Any) -> None:
        step = trainer.pipeline.model.step
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]) if 8 <= step < 14 else limits)

    trainer.pipeline.model.after_backward = fill_disk
    try:
        trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    out = " ".join(capsys.readouterr().out.split())
    assert "Could not save the checkpoint of step 10" in out and "training goes on" in out
    assert out.count("event files cannot be written") == 1
    assert checkpoint_steps(models(tmp_path)) == [29]


def test_an_unwritable_folder_is_an_error_at_the_end_only(tmp_path: Path) -> None:
    trainer = start(make_config(tmp_path, 12, steps_per_save=5))

    def replace_folder(camera: Any) -> None:
        if trainer.pipeline.model.step == 7:
            shutil.rmtree(models(tmp_path))
            models(tmp_path).write_text("in the way")

    trainer.pipeline.model.after_backward = replace_folder
    with pytest.raises(RuntimeError, match="could not be written"):
        trainer.train()
    assert len(trainer.losses) == 12


def test_batch_4_follows_the_schedule_of_batch_1() -> None:
    config = make_config(Path("unused"), 1).optimizers
    config["steps"] = {
        "optimizer": AdamOptimizerConfig(lr=0.1, eps=1e-8),
        "scheduler": MultiStepSchedulerConfig(milestones=(40, 80)),
    }

    def rates(batch_size: int, steps: int) -> tuple[BatchOptimizers, list[dict[str, float]]]:
        groups = {name: [torch.nn.Parameter(torch.zeros(1))] for name in config}
        optimizers = BatchOptimizers(config, groups, batch_size)
        course = []
        for step in range(steps):
            course.append(optimizers.learning_rates())
            optimizers.optimizer_step_all()
            optimizers.scheduler_step_all(step)
        return optimizers, course

    _, one = rates(1, 100)
    optimizers, four = rates(4, 25)
    for step, values in enumerate(four):
        for name, value in values.items():
            assert value == pytest.approx(2 * one[4 * step][name], rel=1e-9), (step, name)
    group = optimizers.optimizers["steps"].param_groups[0]
    assert group["betas"] == pytest.approx((0.9**4, 0.999**4)) and group["eps"] == pytest.approx(0.5e-8)
    assert config["means"]["optimizer"].lr == 0.01, "the configuration itself is not changed"


def test_fused_adam_gives_the_same_parameters() -> None:
    config = {"means": {"optimizer": AdamOptimizerConfig(lr=0.01, eps=1e-15), "scheduler": None}}
    generator = torch.Generator().manual_seed(0)
    ours, plain = (torch.nn.Parameter(torch.ones(1000, 3)) for _ in range(2))
    optimizers = BatchOptimizers(config, {"means": [ours]}, 1)
    reference = torch.optim.Adam([plain], lr=0.01, eps=1e-15)
    for _ in range(30):
        ours.grad = torch.randn(1000, 3, generator=generator) * 1e-6
        plain.grad = ours.grad.clone()
        optimizers.optimizer_step_all()
        reference.step()
    assert torch.allclose(ours, plain, rtol=1e-6)


def test_gradients_are_means_over_the_views(tmp_path: Path) -> None:
    trainer = start(make_config(tmp_path, 1, batch_size=NUM_VIEWS))
    torch.manual_seed(5)
    loss, terms, metrics = trainer.pipeline.train_step(0)
    grad = trainer.pipeline.model.gauss_params["means"].grad.clone()
    trainer.optimizers.zero_grad_all()
    trainer.pipeline.datamanager.config.batch_size = 1
    torch.manual_seed(5)
    parts = [trainer.pipeline.train_step(step) for step in range(NUM_VIEWS)]
    assert float(loss) == pytest.approx(sum(float(part[0]) for part in parts) / NUM_VIEWS)
    assert torch.allclose(grad * NUM_VIEWS, trainer.pipeline.model.gauss_params["means"].grad)
    assert not loss.requires_grad and set(terms) == {"main_loss", "scale_reg"} and set(metrics) == {"psnr"}


def test_evaluation_writes_one_picture_per_view(tmp_path: Path, capsys: Any) -> None:
    trainer = start(make_config(tmp_path, 1, num_eval=4))
    out = tmp_path / "pictures"
    result = trainer.pipeline.get_average_eval_image_metrics(output_path=out, get_std=True)
    names = sorted(str(path.relative_to(out)) for path in out.rglob("*.png"))
    assert names == ["block_0/0000.png", "block_0/0001.png", "block_1/0000.png", "block_1/0001.png"]
    assert all(type(value) is float for value in result.values()) and {"psnr", "psnr_std", "fps"} <= set(result)
    trainer.pipeline.get_average_eval_image_metrics()
    assert capsys.readouterr().out.count("Evaluation protocol: mean over 4 views") == 1
    assert trainer.pipeline.training


def test_one_view_has_no_deviation_and_none_is_an_error(tmp_path: Path) -> None:
    trainer = start(make_config(tmp_path, 1, num_eval=1))
    assert trainer.pipeline.get_average_eval_image_metrics(get_std=True)["psnr_std"] == 0.0
    writer.EVENT_WRITERS.clear()
    trainer = start(make_config(tmp_path / "none", 3, num_eval=0, steps_per_eval_all_images=1))
    for evaluate in (trainer.pipeline.get_average_eval_image_metrics, trainer.pipeline.get_eval_loss_dict):
        with pytest.raises(ValueError, match="no view to evaluate"):
            evaluate(step=0)
    trainer.train()


def test_averages_leave_out_views_without_a_value() -> None:
    assert average_metrics([{"psnr": 20.0}, {"psnr": float("nan")}, {"psnr": 30.0}], False) == {"psnr": 25.0}
    assert average_metrics([{"psnr": 20.0}, {"psnr": 30.0}], True)["psnr_std"] == pytest.approx(50**0.5)


def test_picture_names_stay_distinct() -> None:
    files = [Path("/d/a/0.jpg"), Path("/d/b/0.jpg"), Path("/d/b/1.jpg"), Path("/d/b/1.tif")]
    assert list(map(str, picture_names(files))) == ["a/0.png", "b/0.png", "b/1.jpg.png", "b/1.tif.png"]
    assert picture_names([Path("/d/a/0.jpg")]) == [Path("0.png")] and picture_names([]) == []


def test_an_old_config_without_our_newer_fields_loads(tmp_path: Path) -> None:
    config = make_config(tmp_path, 1)
    text = "\n".join(line for line in yaml.dump(config).splitlines() if not line.startswith("resume:"))
    assert "resume" in yaml.dump(config) and "resume" not in text
    old = yaml.load(text, Loader=yaml.Loader)
    assert old.resume == "off"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixed_precision": True}, "float32"),
        ({"total": 0}, "--max-num-iterations is 0"),
        ({"gradient_accumulation_steps": {"means": 4}}, "batch-size"),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start(make_config(tmp_path, **({"total": 1} | changes)))


@pytest.mark.parametrize("port", [65536, -1, 0])
@pytest.mark.parametrize("name", ["websocket_port", "websocket_port_default"])
def test_ports_that_do_not_exist_are_refused(tmp_path: Path, port: int, name: str) -> None:
    config = make_config(tmp_path, 1)
    setattr(config.viewer, name, port)
    with pytest.raises(ValueError, match=f"--viewer.{name.replace('_', '-')} is {port}; it must be from 1 to 65535"):
        start(config)


def test_two_ways_of_starting_ranks_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="num-devices"):
        make_config(tmp_path, 1).setup(local_rank=0, world_size=2)


@pytest.mark.parametrize("device, reason", [("cuda", "torch finds no CUDA GPU"), ("mps", "not made for mps")])
def test_a_gpu_is_declined_in_one_sentence(tmp_path: Path, device: Any, reason: str, capsys: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    config = make_config(tmp_path, 2)
    config.machine.device_type = device
    trainer = run(config)
    assert trainer.device == "cpu"
    assert " ".join(capsys.readouterr().out.split()).count(reason) == 1


def test_progress_on_a_terminal_and_clock(capsys: Any) -> None:
    with ProgressLine(4, 2, terminal=True) as progress:
        for step in range(4):
            progress.update(step, 0.5, 0.1, 20.0, 1000)
            with progress.paused():
                pass
    assert "4/4" in capsys.readouterr().out
    assert [clock(s) for s in (0, 61, 3600, 100_000)] == ["0:00:00", "0:01:01", "1:00:00", "1d 3:46:40"]
