"""Which device a rank takes, told by what torch says is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from splaxel_ns import comm, devices
from splaxel_ns.comm import World
from splaxel_ns.cuda import _backend


class Ranks(World):
    """One of several ranks; `others` says whether the rest can use a GPU."""

    def __init__(self, rank: int, size: int, others: bool = True) -> None:
        super().__init__(rank, size)
        self.others = others

    def any(self, flag: bool) -> bool:
        return flag or not self.others


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two GPUs whose kernels are compiled; the ones that were made current."""
    chosen: list[Any] = []
    load = _backend.load
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(devices._backend, "load", lambda device=None: load())
    monkeypatch.setattr(devices._gsplat, "functions", lambda: None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return chosen


def test_one_process(gpus: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert devices.choose_device("cuda", World()) == torch.device("cuda:0")
    assert devices.choose_device("cuda:1", World()) == torch.device("cuda:1") == gpus[-1]
    assert "splaxel renders on a GPU (cuda:1)." in capsys.readouterr().out
    assert devices.choose_device("cpu", World()) == torch.device("cpu")
    assert ": " not in capsys.readouterr().out.replace("threads: ", "")


def test_ranks(gpus: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's says where each is on its machine; nerfstudio's own ask for a numbered device."""
    assert devices.choose_device("cuda:1", Ranks(3, 4)) == torch.device("cuda:1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert devices.choose_device("cuda:0", Ranks(3, 4)) == torch.device("cuda:1")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="number 2 on this machine, which has 2 GPUs.*--machine.device-type cpu"):
        devices.choose_device("cuda:0", Ranks(2, 4))


def test_all_ranks_or_none(gpus: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert devices.choose_device("cuda:0", Ranks(0, 2, others=False)) == torch.device("cpu")
    assert "another rank has no GPU to use" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("which", ["_backend", "_gsplat"])
def test_kernels_that_cannot_be_built(
    gpus: list[Any], which: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = devices._backend.load

    def fail(device: Any = None) -> Any:
        if which == "_backend" and device is None:
            return load()
        raise RuntimeError("there is no nvcc.")

    monkeypatch.setattr(getattr(devices, which), "load" if which == "_backend" else "functions", fail)
    assert devices.choose_device("cuda", World()) == torch.device("cpu")
    assert "the GPU stays unused, for there is no nvcc." in " ".join(capsys.readouterr().out.split())


def test_whose_group_serves_whom() -> None:
    """Under NCCL alone, tensors on the CPU have a group of their own."""
    group = object()
    assert World(0, 2, group)._group(torch.zeros(1)) is group
    assert World(0, 2)._group(torch.zeros(1)) is None
    assert World(0, 2, group)._group(torch.empty(1, device="meta")) is None


def test_checks_wait_for_their_time() -> None:
    world, seen = World(0, 2), []
    world.checks.append(lambda: seen.append(1))
    assert not seen
    world.check()
    world.check()
    assert seen == [1]


def test_a_group_formed_elsewhere_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    destroyed: list[Tensor] = []
    monkeypatch.setattr(comm.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(comm.dist, "destroy_process_group", lambda: destroyed.append(torch.zeros(())))
    monkeypatch.setattr(comm, "_own_group", False)
    comm.leave()
    assert not destroyed
    monkeypatch.setattr(comm, "_own_group", True)
    comm.leave()
    assert len(destroyed) == 1
