"""Options of training on the committed aerial capture: each survives a checkpoint, `--resume` and `ns-eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from nerfstudio.scripts.eval import ComputePSNR
from test_training import Course, make_config, run

from splaxel_ns.checkpoint import load_checkpoint
from splaxel_ns.resume import load_run_state

TOTAL, STOP = 24, 13
OPTIONS = ("mcmc", "views")


def configure(folder: Path, option: str, **changes: Any) -> Any:
    config = make_config(folder, **({"total": TOTAL} | changes))
    model = config.pipeline.model
    if option == "mcmc":
        model.strategy = "mcmc"
        model.mcmc_min_opacity = 0.095  # so that some fall below within a few steps
    else:
        model.camera_optimizer.mode = "SO3xR3"
        model.use_bilateral_grid = True
        model.grid_shape = (4, 4, 2)
        model.color_corrected_metrics = True
        model.output_depth_during_training = True
        for name in ("camera_opt", "bilateral_grid"):
            config.optimizers[name]["scheduler"].warmup_steps = 4
    return config


@pytest.fixture(scope="module", params=OPTIONS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Course]:
    """The uninterrupted run with the checkpoint from its middle."""
    folder = tmp_path_factory.mktemp(request.param)
    config = configure(folder, request.param, steps_per_save=STOP, save_only_latest_checkpoint=False)
    return request.param, run(config)


def test_resumed_and_repeated_runs_are_the_same_to_the_bit(whole: tuple[str, Course], tmp_path: Path) -> None:
    """Whatever the global generator does in between."""
    option, course = whole
    saved = course.trainer.checkpoint_dir / f"step-{STOP:09d}.ckpt"
    config = configure(tmp_path, option, resume="auto")
    models = config.get_checkpoint_dir()
    models.mkdir(parents=True)
    (models / saved.name).write_bytes(saved.read_bytes())
    resumed = run(config, seed=7)
    assert resumed.losses == {step: course.losses[step] for step in range(STOP + 1, TOTAL)}
    repeated = run(configure(tmp_path / "again", option))
    assert repeated.losses == course.losses
    ends = [c.trainer.pipeline.model.state_dict() for c in (course, resumed)]
    assert ends[0].keys() == ends[1].keys() and all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
    if option == "mcmc":
        assert course.refined_at == [10, 20] and len(set(course.num_gaussians.values())) == 3
    else:
        moved, grids = ends[0]["camera_optimizer.pose_adjustment"], ends[0]["bil_grids.grids"]
        assert float(moved.abs().max()) > 1e-4 and float((grids - grids[:, :, :1, :1, :1]).abs().max()) > 1e-3


def test_evaluation_of_the_checkpoint(whole: tuple[str, Course], tmp_path: Path) -> None:
    option, course = whole
    out = tmp_path / "eval.json"
    ComputePSNR(load_config=course.trainer.base_dir / "config.yml", output_path=out).main()
    results = json.loads(out.read_text())["results"]
    expected = course.trainer.pipeline.get_average_eval_image_metrics()
    names = {"psnr", "ssim"} | ({"cc_psnr", "cc_ssim"} if option == "views" else set())
    assert {name for name in results if name.endswith(("psnr", "ssim"))} == names
    for name in names:
        assert results[name] == pytest.approx(expected[name], abs=1e-4)
    assert results.get("cc_psnr", 99.0) > results["psnr"]


def test_parts_of_other_views_are_refused(whole: tuple[str, Course]) -> None:
    """Pose corrections and grids of one view are not given to another; Gaussians belong to nobody."""
    option, course = whole
    loaded = load_checkpoint(course.trainer.checkpoint_dir / f"step-{STOP:09d}.ckpt")
    loaded["datamanager"]["views"] += 1
    trainer = course.trainer
    if option == "views":
        with pytest.raises(ValueError, match="bilateral_grid and camera_opt"):
            load_run_state(loaded, trainer.pipeline, trainer.optimizers, load_scheduler=True)
    else:
        load_run_state(loaded, trainer.pipeline, trainer.optimizers, load_scheduler=True)
