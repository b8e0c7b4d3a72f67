"""Checkpoints are complete or absent, are read without executing anything, and end in one clear error when damaged."""

from __future__ import annotations

import collections
import os
import pickle
import random
import resource
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from splaxel_ns.checkpoint import (
    checkpoint_steps,
    generator_states,
    load_checkpoint,
    newest_checkpoint,
    plain,
    remove_others,
    restore_generators,
    write_checkpoint,
)


def content(step: int = 7, size: int = 1000) -> dict[str, Any]:
    return {
        "step": step,
        "pipeline": {"_model.gauss_params.means": torch.arange(3 * size, dtype=torch.float32).reshape(size, 3)},
        "optimizers": {"means": {"state": {}, "param_groups": [{"lr": np.float64(0.1), "betas": (0.9, 0.999)}]}},
        "schedulers": {"means": {"milestones": collections.Counter([3, 5])}},
        "scalers": {},
        "batch_size": 1,
        "datamanager": {},
        "model": {},
        "generators": generator_states(),
    }


class Code:
    """Creates a file when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return (os.mkdir, (str(self.marker),))


def test_round_trip_keeps_values_and_makes_numbers_plain(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "nerfstudio_models", 7, content())
    assert path.name == "step-000000007.ckpt"
    loaded = load_checkpoint(path)
    assert torch.equal(
        loaded["pipeline"]["_model.gauss_params.means"], content()["pipeline"]["_model.gauss_params.means"]
    )
    assert type(loaded["optimizers"]["means"]["param_groups"][0]["lr"]) is float
    assert loaded["schedulers"]["means"]["milestones"] == {3: 1, 5: 1}
    assert sorted(item.name for item in tmp_path.iterdir()) == ["nerfstudio_models"], "a temporary file was left"


def test_views_are_written_without_the_storage_behind_them(tmp_path: Path) -> None:
    big = torch.zeros(1_000_000)
    path = write_checkpoint(tmp_path / "models", 1, content(1) | {"model": {"view": big[:10]}})
    assert path.stat().st_size < 100_000


def test_objects_are_refused_with_their_place() -> None:
    with pytest.raises(TypeError, match=r"\['a'\]\[1\] is a PosixPath"):
        plain({"a": [1, Path("x")]}, "")


def test_newest_ignores_junk_names(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "missing") is None
    assert newest_checkpoint(tmp_path) is None
    for name in (
        "step-000000010.ckpt",
        "step-000000009.ckpt",
        "step-99.ckpt",
        ".step-000000500.ckpt.partial",
        "._x-1.y",
    ):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "step-000000999.ckpt").mkdir()
    assert checkpoint_steps(tmp_path) == [9, 10]
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest == tmp_path / "step-000000010.ckpt"
    remove_others(tmp_path, newest)
    assert checkpoint_steps(tmp_path) == [10]
    assert (tmp_path / "._x-1.y").exists()


@pytest.mark.parametrize("kept", [0.0, 0.02, 0.5, 0.999])
def test_truncated(tmp_path: Path, kept: float) -> None:
    path = write_checkpoint(tmp_path / "models", 7, content())
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(ValueError, match=f"{path.name} is truncated, corrupted"):
        load_checkpoint(path)


def test_a_flipped_bit_in_a_tensor_is_noticed(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "models", 7, content())
    data = bytearray(path.read_bytes())
    place = data.index(torch.arange(100, 120, dtype=torch.float32).numpy().tobytes())
    data[place + 5] ^= 4
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is corrupted.*checksum"):
        load_checkpoint(path)


def test_random_damage_never_gets_through_or_crashes(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "models", 7, content(size=20))
    data = path.read_bytes()
    generator = random.Random(0)
    for _ in range(60):
        damaged = bytearray(data)
        start = generator.randrange(len(data))
        damaged[start : start + 16] = generator.randbytes(16)
        path.write_bytes(damaged)
        try:
            loaded = load_checkpoint(path)
        except ValueError as error:
            assert path.name in str(error)
        else:  # padding between the entries carries nothing
            assert torch.equal(loaded["pipeline"]["_model.gauss_params.means"], torch.arange(60.0).reshape(20, 3))


def test_pickles_with_code_are_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    plain_pickle = tmp_path / "step-000000001.ckpt"
    plain_pickle.write_bytes(pickle.dumps({"step": 1, "pipeline": Code(marker)}))
    archive = tmp_path / "step-000000002.ckpt"
    torch.save(content() | {"format": "splaxel", "version": 1, "model": {"x": Code(marker)}}, archive)
    for path in (plain_pickle, archive):
        with pytest.raises(ValueError, match=path.name):
            load_checkpoint(path)
    assert not marker.exists()


def test_foreign_and_incomplete_files(tmp_path: Path) -> None:
    path = tmp_path / "step-000000003.ckpt"
    with pytest.raises(ValueError, match="There is no checkpoint"):
        load_checkpoint(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("holiday.txt", "photographs")
    with pytest.raises(ValueError, match="was not loaded"):
        load_checkpoint(path)
    torch.save({"step": 3, "pipeline": {}, "optimizers": {}, "scalers": {}}, path)
    with pytest.raises(ValueError, match="another method"):
        load_checkpoint(path)
    torch.save(torch.zeros(3), path)
    with pytest.raises(ValueError, match="another method"):
        load_checkpoint(path)
    torch.save({"format": "splaxel", "version": 99}, path)
    with pytest.raises(ValueError, match="checkpoint version 99"):
        load_checkpoint(path)
    incomplete = content() | {"format": "splaxel", "version": 1}
    del incomplete["optimizers"]
    torch.save(incomplete, path)
    with pytest.raises(ValueError, match="'optimizers' is missing"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": -1}, "step is -1"),
        ({"step": 2**31}, "step is 2147483648"),
        ({"step": True}, "'step' is missing or no int"),
        ({"generators": {}}, "generator 'torch'"),
        ({"generators": generator_states() | {"python": torch.zeros(625)}}, "generator 'python'"),
        ({"generators": generator_states() | {"numpy": torch.full((625,), -1)}}, "generator 'numpy'"),
    ],
)
def test_values_out_of_range_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "step-000000003.ckpt"
    torch.save(plain(content() | {"format": "splaxel", "version": 1} | changes), path)
    with pytest.raises(ValueError, match=rf"step-000000003.ckpt.*{message}"):
        load_checkpoint(path)


def test_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    models = tmp_path / "models"
    first = write_checkpoint(models, 1, content(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        with pytest.raises(OSError, match="step-000000002"):
            write_checkpoint(models, 2, content(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert newest_checkpoint(models) == first
    assert load_checkpoint(first)["step"] == 1
    assert [item.name for item in tmp_path.iterdir()] == ["models"]


def test_unwritable_folder(tmp_path: Path) -> None:
    models = tmp_path / "models"
    write_checkpoint(models, 1, content(1))
    shutil.rmtree(models)
    models.write_text("a file where the folder was")
    with pytest.raises(OSError, match="models"):
        write_checkpoint(models, 2, content(2))


def test_orphans_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".step-000000004.ckpt.partial").write_bytes(b"half")
    write_checkpoint(tmp_path / "models", 5, content(5))
    assert [item.name for item in tmp_path.iterdir()] == ["models"]


def test_generators_continue(tmp_path: Path) -> None:
    def draw() -> tuple:
        return torch.rand(3).tolist(), random.random(), float(np.random.rand())

    path = write_checkpoint(tmp_path / "models", 1, content(1) | {"generators": generator_states()})
    expected = draw()
    assert draw() != expected
    restore_generators(load_checkpoint(path)["generators"])
    assert draw() == expected
