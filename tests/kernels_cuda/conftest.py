"""The CUDA kernels against the CPU ops and the float64 references, on a GPU or in the emulator.

`SPLAXEL_GPU_TESTS` says where: "device", or the path of the emulated library (`tests/cuda_emulator/build.py`), which
needs address sanitizer's runtime loaded before Python. `tests/cuda_emulator/test_kernels.py` runs this folder so; on
its own nothing here is collected.

Read-modify-writes that must be atomic are beyond the emulator: its threads are never interrupted between waits. They
were reviewed by hand: the counters of splats, clipped and dropped pairs (`bin.cu`, `raster.cu`), the tile's last pair
and the sums of a splat's pixels (`raster.cu`), and the ends of rows (`region.cu`). Every other address is written by
one thread only.
"""

from __future__ import annotations

import pytest
from gpu_ops import WHERE, Gpu, find_gpu

collect_ignore_glob = [] if WHERE else ["test_*"]


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    """The GPU, or the emulator in its place."""
    return find_gpu()
