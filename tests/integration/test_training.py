"""Training the committed aerial capture for some tens of steps: resume, schedules, evaluation, rendering, failures."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from nerfstudio.scripts.eval import ComputePSNR
from nerfstudio.scripts.render import DatasetRender
from nerfstudio.scripts.viewer.run_viewer import RunViewer
from nerfstudio.utils import profiler
from nerfstudio.utils.eval_utils import eval_setup

from splaxel_ns.checkpoint import checkpoint_steps, load_checkpoint
from splaxel_ns.config import splaxel

DATA = Path(__file__).parents[1] / "data" / "matrixcity_caliterra" / "small_city" / "aerial"
TOTAL = 41
REFINE_EVERY = 10
AFTER_REFINEMENT, IN_BETWEEN = 20, 15


@dataclass
class Course:
    """What a run did, step by step."""

    trainer: Any
    losses: dict[int, float] = field(default_factory=dict)
    num_gaussians: dict[int, int] = field(default_factory=dict)
    sh_degrees: dict[int, int] = field(default_factory=dict)
    downscales: dict[int, int] = field(default_factory=dict)
    rates: dict[int, dict[str, float]] = field(default_factory=dict)
    refined_at: list[int] = field(default_factory=list)
    """Images at which Gaussians were grown and pruned."""


def make_config(folder: Path, total: int = TOTAL, batch_size: int = 1, **changes: Any) -> Any:
    """The method as registered, with schedules short enough for everything to happen within 41 images."""
    config: Any = copy.deepcopy(splaxel.config)
    config.output_dir = folder
    config.experiment_name, config.timestamp = "aerial", "run"
    config.vis = "tensorboard"
    config.max_num_iterations = total
    config.steps_per_eval_image = config.steps_per_eval_all_images = 0
    config.pipeline.datamanager.data = DATA
    config.pipeline.datamanager.batch_size = batch_size
    config.pipeline.datamanager.camera_res_scale_factor = 0.25
    config.pipeline.datamanager.dataparser.max_seed_points = 3000
    model = config.pipeline.model
    model.num_partitions = 4
    model.warmup_length = 5
    model.refine_every = REFINE_EVERY
    model.resolution_schedule = 10
    model.num_downscales = 1
    model.sh_degree_interval = 10
    model.densify_grad_thresh = 1e-4
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def start(config: Any, seed: int = 42) -> Course:
    torch.manual_seed(seed)
    config.set_timestamp()
    config.save_config()
    trainer = config.setup(local_rank=0, world_size=1)
    trainer.setup()
    course = Course(trainer)
    inner = trainer.train_iteration

    def recorded(step: int) -> Any:
        model = trainer.pipeline.model
        course.sh_degrees[step] = model.render_options().sh_degree
        course.downscales[step] = model.downscale_factor(67, 89)
        course.rates[step] = trainer.optimizers.learning_rates()
        result = inner(step)
        course.losses[step] = float(result[0])
        course.num_gaussians[step] = model.num_points
        return result

    def refine(step: int) -> Any:
        report = trainer.pipeline.model.__class__.refine(trainer.pipeline.model, step)
        if report is not None and report.refined:
            course.refined_at.append(report.images)
        return report

    trainer.train_iteration = recorded
    trainer.pipeline.model.refine = refine
    return course


def run(config: Any, seed: int = 42) -> Course:
    course = start(config, seed)
    course.trainer.train()
    profiler.PROFILER.clear()
    return course


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Course]:
    """The uninterrupted run; its checkpoints of every fifth step stay."""
    folder = tmp_path_factory.mktemp("whole")
    yield run(make_config(folder, steps_per_save=5, save_only_latest_checkpoint=False))


def test_a_run_ends_with_checkpoint_config_and_events(whole: Course) -> None:
    base = whole.trainer.base_dir
    assert (base / "config.yml").is_file() and (base / "dataparser_transforms.json").is_file()
    assert list(base.glob("events.out.tfevents*"))
    assert checkpoint_steps(base / "nerfstudio_models") == [*range(5, TOTAL, 5)]
    assert whole.refined_at == [10, 20, 30, 40]
    assert len(set(whole.num_gaussians.values())) > 1, "nothing was grown or pruned"
    values = list(whole.losses.values())
    assert sum(values[-5:]) < sum(values[10:15])


@pytest.mark.parametrize("stop", [AFTER_REFINEMENT, IN_BETWEEN], ids=["right after refinement", "in between"])
def test_resume_equals_the_uninterrupted_run(whole: Course, stop: int, tmp_path: Path) -> None:
    """Also right after Gaussians were added and removed, where stale sizes would show."""
    saved = whole.trainer.checkpoint_dir / f"step-{stop:09d}.ckpt"
    config = make_config(tmp_path, total=stop + 21, resume="auto")
    models = config.get_checkpoint_dir()
    models.mkdir(parents=True)
    (models / saved.name).write_bytes(saved.read_bytes())
    resumed = run(config, seed=7)
    assert list(resumed.losses) == list(range(stop + 1, stop + 21)), "max_num_iterations is the total"
    for step, loss in resumed.losses.items():
        assert loss == pytest.approx(whole.losses[step], abs=1e-4), step
        assert resumed.num_gaussians[step] == whole.num_gaussians[step], step


def test_batch_4_follows_the_schedules_of_batch_1(whole: Course, tmp_path: Path) -> None:
    four = run(make_config(tmp_path, total=TOTAL // 4 + 1, batch_size=4))
    for step in four.losses:
        assert four.sh_degrees[step] == whole.sh_degrees[4 * step], step
        assert four.downscales[step] == whole.downscales[4 * step], step
        for name, rate in four.rates[step].items():
            assert rate == pytest.approx(2.0 * whole.rates[4 * step][name], rel=1e-9), (step, name)
    assert four.refined_at == [12, 20, 32, 40]
    assert len(set(four.sh_degrees.values())) > 1 and len(set(four.downscales.values())) == 2


def test_evaluation_and_rendering_of_the_checkpoint(whole: Course, tmp_path: Path) -> None:
    config = whole.trainer.base_dir / "config.yml"
    out = tmp_path / "eval.json"
    ComputePSNR(load_config=config, output_path=out, render_output_path=tmp_path / "pictures").main()
    results = json.loads(out.read_text())["results"]
    num_views = len(whole.trainer.pipeline.datamanager.eval_dataset)
    assert len(list((tmp_path / "pictures").rglob("*.png"))) == num_views == 8
    expected = whole.trainer.pipeline.get_average_eval_image_metrics()
    for name in ("psnr", "ssim"):
        assert type(results[name]) is float and results[name] == pytest.approx(expected[name], abs=1e-4)
        assert results[f"{name}_std"] > 0
    DatasetRender(load_config=config, output_path=tmp_path / "renders", rendered_output_names=["rgb"]).main()
    assert len(list((tmp_path / "renders").rglob("*.jpg"))) == num_views


def test_a_foreign_or_damaged_model_state_is_one_clear_error(whole: Course, tmp_path: Path) -> None:
    good = load_checkpoint(whole.trainer.checkpoint_dir / "step-000000040.ckpt")["pipeline"]
    pipeline = whole.trainer.pipeline
    splatfacto = {name: value for name, value in good.items() if "gauss_params" in name}
    cut = good | {"_model.gauss_params.quats": good["_model.gauss_params.quats"][:-1]}
    lower = good | {"_model.gauss_params.features_rest": good["_model.gauss_params.features_rest"][:, :8]}
    for state, message in ((splatfacto, "splatfacto"), (cut, "quats"), (lower, "sh-degree"), ({}, "no model")):
        with pytest.raises(ValueError, match=message):
            pipeline.load_pipeline(state, 40)
    pipeline.load_pipeline(good, 40)


def test_a_damaged_or_foreign_file_where_the_checkpoint_should_be(
    whole: Course, tmp_path: Path, monkeypatch: Any
) -> None:
    """nerfstudio's commands say so in one sentence, also where torch is told to execute what it reads."""
    config = make_config(tmp_path)
    models = config.get_checkpoint_dir()
    models.mkdir(parents=True)
    config.save_config()
    path = models / "step-000000003.ckpt"
    marker = tmp_path / "executed"
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    good = (whole.trainer.checkpoint_dir / "step-000000040.ckpt").read_bytes()
    damages = {
        "truncated": good[: len(good) // 2],
        "does not match its checksum": flipped(good),
        "no checkpoint": b"holiday pictures",
        "another method": saved({"step": 3, "pipeline": {"_model.field.weight": torch.zeros(2)}}),
        "other than tensors and plain values": saved({"step": 3, "pipeline": Code(marker)}),
        "truncated, corrupted or no checkpoint": pickle.dumps(Code(marker)),
    }
    for message, content in damages.items():
        path.write_bytes(content)
        for command in (ComputePSNR, RunViewer, DatasetRender):
            with pytest.raises(ValueError, match=message) as raised:
                command(load_config=config.get_base_dir() / "config.yml").main()
            assert str(path) in str(raised.value) and "Move it to another folder" in str(raised.value)
    assert not marker.exists()


def flipped(content: bytes) -> bytes:
    """One bit of the largest tensor changed."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        largest = max(archive.infolist(), key=lambda info: info.file_size)
    middle = largest.header_offset + largest.file_size // 2 + 200
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def saved(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def test_missing_and_stray_files_where_checkpoints_should_be(whole: Course, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    config.save_config()
    path, models = config.get_base_dir() / "config.yml", config.get_checkpoint_dir()
    assert "_to_be_loaded" not in yaml.dump(config.pipeline)
    with pytest.raises(ValueError, match="There is no checkpoint"):
        eval_setup(path)
    models.mkdir()
    with pytest.raises(ValueError, match="There is no checkpoint"):
        eval_setup(path)
    saved = whole.trainer.checkpoint_dir / "step-000000040.ckpt"
    (models / saved.name).write_bytes(saved.read_bytes())
    (models / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes.txt is no checkpoint"):
        eval_setup(path)
    (models / "notes.txt").unlink()
    assert eval_setup(path)[3] == 40
    config.load_step = 41
    config.write_config()
    with pytest.raises(ValueError, match=r"step-000000041.ckpt\. load_step in .*config.yml"):
        eval_setup(path)


class Code:
    """Makes a folder when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return (os.mkdir, (str(self.marker),))


def test_a_nan_loss_names_step_and_view(tmp_path: Path) -> None:
    course = start(make_config(tmp_path, steps_per_save=2))
    model = course.trainer.pipeline.model
    inner = model.after_backward

    def poison(camera: Any) -> None:
        inner(camera)
        if model.step == 3:
            model.features_dc.grad = torch.full_like(model.features_dc, float("nan"))

    model.after_backward = poison
    with pytest.raises(FloatingPointError, match=r"step 4, view '.*aerial/train/block_\d/\d{4}\.png'"):
        course.trainer.train()
    assert checkpoint_steps(course.trainer.checkpoint_dir) == [2]
