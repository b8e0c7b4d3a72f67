"""Each damaged configuration or checkpoint ends `splaxel-export` in one sentence that names the file."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from nerfstudio.engine.trainer import TrainerConfig

from splaxel_ns import export
from splaxel_ns.checkpoint import generator_states, write_checkpoint
from splaxel_ns.config import splaxel


def make_run(folder: Path) -> tuple[Path, Path]:
    """A run's config.yml and a readable checkpoint of no model."""
    config: Any = copy.deepcopy(splaxel.config)
    config.output_dir, config.experiment_name, config.timestamp = folder, "scene", "run"
    base = config.get_base_dir()
    content = {
        **{name: {} for name in ("pipeline", "optimizers", "schedulers", "scalers", "datamanager", "model")},
        **{"step": 3, "batch_size": 1, "generators": generator_states()},
    }
    checkpoint = write_checkpoint(base / "nerfstudio_models", 3, content)
    (base / "config.yml").write_text(yaml.dump(config))
    return base / "config.yml", checkpoint


def message_of(config: Path, out: Path, monkeypatch: Any, *more: str) -> str:
    monkeypatch.setattr(sys, "argv", ["export", "--load-config", str(config), "--output-dir", str(out), *more])
    with pytest.raises(SystemExit) as ended:
        export.entrypoint()
    return str(ended.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "holds no configuration but a NoneType"),
        ("a: [1, 2", "damaged or no configuration"),
        ("!!python/object:no.such.Class {}", "damaged or no configuration"),
        ("a: 1", "holds no configuration but a dict"),
        (yaml.dump(TrainerConfig(method_name="nerfacto")), "run of nerfacto, not of splaxel"),
        ("!!python/object:nerfstudio.engine.trainer.TrainerConfig {}", "not of splaxel, or damaged"),
    ],
)
def test_damaged_configurations(tmp_path: Path, monkeypatch: Any, text: str, expected: str) -> None:
    config = tmp_path / "config.yml"
    config.write_text(text)
    message = message_of(config, tmp_path / "out", monkeypatch)
    assert message.startswith("splaxel-export: ") and str(config) in message and expected in message


def test_a_missing_configuration_and_an_endless_offset(tmp_path: Path, monkeypatch: Any) -> None:
    assert "config.yml cannot be read" in message_of(tmp_path / "config.yml", tmp_path, monkeypatch)
    offset = ("--offset", "0", "nan", "inf")
    assert "--offset is 0.0 nan inf" in message_of(tmp_path / "config.yml", tmp_path, monkeypatch, *offset)


def test_damaged_and_missing_checkpoints(tmp_path: Path, monkeypatch: Any) -> None:
    config, checkpoint = make_run(tmp_path)
    (checkpoint.parent / "notes.txt").write_text("not a checkpoint")
    whole = checkpoint.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"\x80\x02" + whole[2:], b"holiday"):
        checkpoint.write_bytes(damaged)
        message = message_of(config, tmp_path / "out", monkeypatch)
        assert str(checkpoint) in message and "Move it away" in message
    torch.save({"step": 3}, checkpoint)
    assert "another method" in message_of(config, tmp_path / "out", monkeypatch)
    checkpoint.unlink()
    assert "There is no checkpoint" in message_of(config, tmp_path / "out", monkeypatch)


def test_a_configuration_that_lacks_parts(tmp_path: Path, monkeypatch: Any) -> None:
    config, _ = make_run(tmp_path)
    loaded = yaml.load(config.read_text(), Loader=yaml.Loader)
    loaded.pipeline.datamanager = None
    config.write_text(yaml.dump(loaded))
    message = message_of(config, tmp_path / "out", monkeypatch)
    assert f"No model can be made of {config}" in message
