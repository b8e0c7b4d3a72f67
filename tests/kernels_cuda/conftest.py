"""The CUDA kernels against the CPU ops and the float64 references, on a GPU or in the emulator.

`SPLAXEL_GPU_TESTS` says where: "device", or the path of the emulated library (`tests/cuda_emulator/build.py`), which
needs address sanitizer's runtime loaded before Python. `tests/cuda_emulator/test_kernels.py` runs this folder so; on its
own nothing here is collected.

Read-modify-writes that must be atomic are beyond the emulator: its threads are never interrupted between waits. They
were reviewed by hand: counters of splats and of dropped pairs (`bin.cu`, `raster.cu`), the tile's last pair and the sums
of a splat's pixels (`raster.cu`). Every other address is written by one thread only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from splaxel_ns.cuda import _backend

WHERE = os.environ.get("SPLAXEL_GPU_TESTS", "")
collect_ignore_glob = [] if WHERE else ["test_*"]


@dataclass(frozen=True)
class Gpu:
    """Where tensors go, and the ops that run there."""

    device: torch.device
    emulated: bool

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


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    """The GPU, or the emulator in its place."""
    if WHERE == "device":
        return Gpu(torch.device("cuda"), False)
    import build

    _backend.load()
    schemas = torch.library.Library("splaxel_emulated", "DEF")  # noqa: TOR901
    for name in build.op_names():
        schema = str(getattr(torch.ops.splaxel, name).default._schema)
        schemas.define(schema.removeprefix("splaxel::"))
    torch.ops.load_library(WHERE)
    gpu = Gpu(torch.device("cpu"), True)
    object.__setattr__(gpu, "schemas", schemas)  # they last as long as this object
    return gpu
