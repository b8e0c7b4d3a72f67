"""Where a process trains and draws: on the GPU that is its own, or on the CPU."""

from __future__ import annotations

import os

import torch
from nerfstudio.utils.rich_utils import CONSOLE

from splaxel_ns.comm import World
from splaxel_ns.cuda import _backend, _gsplat


def choose_device(wanted: str | torch.device, world: World) -> torch.device:
    """The device of this rank, made ready: kernels are compiled, and a sentence says what it is. All ranks call this.

    Args:
        wanted: nerfstudio's machine.device-type, perhaps with a number: "cpu" keeps to the CPU. "cuda" is taken where
            torch finds a GPU and the kernels can be built, on all ranks or on none; of several ranks on a machine each
            takes the GPU of its number there (LOCAL_RANK).
        world: The ranks.

    Raises:
        ValueError: This machine has more ranks than GPUs.
    """
    reason = _why_not(torch.device(wanted))
    if world.any(reason is not None):
        _backend.load()
        said = f"splaxel renders on the CPU (threads: {torch.get_num_threads()})"
        reason = "another rank has no GPU to use" if reason is None else reason.rstrip(".")
        CONSOLE.print(f"{said}: {reason}." if reason else f"{said}.", markup=False)
        return torch.device("cpu")
    device = _own_gpu(torch.device(wanted), world)
    torch.cuda.set_device(device)
    CONSOLE.print(f"splaxel renders on {torch.cuda.get_device_name(device)} ({device}).", markup=False)
    return device


def _why_not(wanted: torch.device) -> str | None:
    """Why a GPU is not used, "" if none was wanted; None if one can be."""
    if wanted.type == "cpu":
        return ""
    if wanted.type != "cuda":
        return f"its kernels are not made for {wanted.type}"
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU"
    try:
        _backend.load(torch.device("cuda"))
        _gsplat.functions()
    except RuntimeError as error:
        return f"the GPU stays unused, for {error}"
    return None


def _own_gpu(wanted: torch.device, world: World) -> torch.device:
    if world.size == 1:
        return torch.device("cuda", wanted.index or 0)
    # torchrun says it in the environment, nerfstudio's own processes by the device they ask for.
    index = int(os.environ.get("LOCAL_RANK", wanted.index or 0))
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"Rank {world.rank} is number {index} on this machine, which has {torch.cuda.device_count()} GPUs, and "
            "each rank needs its own: start fewer ranks, or use --machine.device-type cpu."
        )
    return torch.device("cuda", index)
