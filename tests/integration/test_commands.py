"""nerfstudio's console commands on a run of ours, from training to export, without a terminal."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from conftest import STEPS, Trained, start_command
from plyfile import PlyData

from splaxel_ns.checkpoint import checkpoint_steps
from splaxel_ns.loss import alexnet_weights

NUM_TEST_VIEWS = 8


def run_command(name: str, *arguments: object) -> None:
    """A console script's own function in this process: starting Python and torch anew costs ten seconds."""
    (script,) = entry_points(group="console_scripts", name=name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        getattr(import_module(script.module), script.attr)()


def test_training_without_a_terminal_ends_though_the_viewer_is_on(trained: Trained) -> None:
    assert trained.returncode == 0, trained.output
    assert "Viewer running locally" in trained.output
    assert f"{STEPS} steps are done" in trained.output
    assert checkpoint_steps(trained.config.parent / "nerfstudio_models") == [STEPS - 1]
    assert [*trained.config.parent.glob("events.out.tfevents*")]
    assert "Traceback" not in trained.output


def test_other_methods_still_start_and_importing_ours_loads_nothing() -> None:
    """A plugin that fails would take every method with it."""
    help_text = start_command("ns-train", "nerfacto", "--help")
    code = "import sys, splaxel_ns; print('torch' in sys.modules, 'nerfstudio' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    output, _ = help_text.communicate(timeout=600)
    assert done.stdout.split() == ["False", "False"]
    assert help_text.returncode == 0 and "nerfacto" in output, output
    assert "splaxel-colmap" in output and "Error" not in output


def test_eval(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out, pictures = tmp_path / "eval.json", tmp_path / "pictures"
    flags = ("--load-config", trained.config, "--output-path", out, "--render-output-path", pictures)
    run_command("ns-eval", *flags)
    results = json.loads(out.read_text())["results"]
    assert 8 < results["psnr"] < 40 and 0 < results["ssim"] < 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"Evaluation protocol: mean over {NUM_TEST_VIEWS} views of the test split" in said
    if not alexnet_weights().exists():
        assert not [name for name in results if "lpips" in name]
        assert said.count("LPIPS is left out") == 1
    assert len([*pictures.rglob("*.png")]) == NUM_TEST_VIEWS


def test_render_dataset(trained: Trained, tmp_path: Path) -> None:
    flags = ("--load-config", trained.config, "--output-path", tmp_path, "--rendered-output-names")
    run_command("ns-render", "dataset", *flags, "rgb", "depth", "--image-format", "png")
    for kind in ("rgb", "depth"):
        assert len([*(tmp_path / "test" / kind).rglob("*.png")]) == NUM_TEST_VIEWS


@pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="ffmpeg is not installed")
def test_render_interpolate(trained: Trained, tmp_path: Path) -> None:
    flags = ("--load-config", trained.config, "--output-path", tmp_path / "pictures", "--output-format", "images")
    run_command("ns-render", "interpolate", *flags, "--interpolation-steps", "2", "--pose-source", "eval")
    assert len([*tmp_path.rglob("*.jpg")]) >= 2 * (NUM_TEST_VIEWS - 1)


def test_export_gaussian_splat(trained: Trained, tmp_path: Path) -> None:
    try:
        import open3d  # noqa: F401
    except (ImportError, OSError) as error:
        pytest.skip(f"open3d, which ns-export imports, cannot be loaded: {error}")
    run_command("ns-export", "gaussian-splat", "--load-config", trained.config, "--output-dir", tmp_path)
    assert len(PlyData.read(tmp_path / "splat.ply")["vertex"]) > 10_000
