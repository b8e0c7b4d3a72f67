"""Where the CUDA kernels run in these tests: on a GPU, or in the emulator in its place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from splaxel_ns.cuda import _backend

WHERE = os.environ.get("SPLAXEL_GPU_TESTS", "")
"""'device', or the path of the emulated library."""


@dataclass(frozen=True)
class Gpu:
    """Where tensors go, and the ops that run there."""

    device: torch.device
    emulated: bool
    schemas: Any = field(default=None, repr=False)  # of the emulated ops: they last as long as this object

    @contextlib.contextmanager
    def ops(self) -> Iterator[None]:
        """Within, the package's functions call the kernels, also for tensors on the CPU if they are emulated."""
        before = _backend.load
        if self.emulated:
            _backend.load = lambda device=None: torch.ops.splaxel_emulated
        try:
            yield
        finally:
            _backend.load = before


def find_gpu() -> Gpu:
    """What SPLAXEL_GPU_TESTS names."""
    if WHERE == "device":
        return Gpu(torch.device("cuda"), False)
    import build

    _backend.load()
    schemas = torch.library.Library("splaxel_emulated", "DEF")
    for name in build.op_names():
        schema = str(getattr(torch.ops.splaxel, name).default._schema)
        schemas.define(schema.removeprefix("splaxel::"))
    torch.ops.load_library(WHERE)
    return Gpu(torch.device("cpu"), True, schemas)
