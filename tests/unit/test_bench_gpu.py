"""The GPU benchmark: what it does without a GPU, and that its scenes and times are what they claim, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from splaxel_ns import cuda
from splaxel_ns.bench import gpu, gpu_training

CPU = torch.device("cpu")


def test_without_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu.Gpu(tmp_path / "out.json").main()
    assert capsys.readouterr().out == "no CUDA device\n"
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["rows"] == [] and result["device"] is None


def test_partitions_compose_to_the_picture() -> None:
    splats = gpu.make_splats(3000, 96, 64, CPU)
    pictures = []
    for count in (1, 4):
        parts = gpu.cut(splats, count)
        assert len(parts.order) == count and int(parts.owner.max()) == count - 1
        images = gpu.draw(splats, splats.leaves(), parts)
        pictures.append(cuda.composite(*images, torch.zeros(3))[0])
    assert float((pictures[0] - pictures[1]).detach().abs().max()) < 2e-4  # the stop
    assert float(pictures[0].detach().mean()) > 0.1


def test_a_row() -> None:
    row = gpu.Gpu(Path("unused"), width=64, height=48, seconds=0.0).measure(500, CPU, gsplat=False)
    assert set(row["partitions"]) == {1, 4, 8}
    assert all(value >= 0 for times in row["partitions"].values() for value in times.values())
    assert row["composition_of_8_over_a_render"] > 0


def test_training_is_measured_in_a_process_of_its_own() -> None:
    row = gpu_training.measure_apart("splaxel", gpu.SCENE, 5, 100.0, device="cpu")
    assert row.get("iterations_per_second", 0) > 0 and row["steps"] == 5 and row["device"] == "cpu", row
    assert "took longer" in gpu_training.measure_apart("splaxel", gpu.SCENE, 5, 0.0, device="cpu")["left_out"]


def test_a_scene_that_is_not_there_is_left_out(tmp_path: Path) -> None:
    command = gpu.Gpu(tmp_path / "out.json", scene=tmp_path / "none")
    assert command.train(0.0) == {} and str(tmp_path / "none") in command.left_out[0]
