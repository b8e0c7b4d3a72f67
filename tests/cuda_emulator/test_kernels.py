"""Runs tests/kernels_cuda in the emulator, under address sanitizer and with threads in random order.

A process of its own, because the sanitizer's runtime must be loaded before Python.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import build
import pytest

from splaxel_ns.cuda import _backend

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's kernels and bindings, compiled for the emulator."""
    _backend.load()  # the CPU ops, which the tests compare with, are not compiled under the sanitizer
    return build.build(tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize(
    "files", ["test_rasterize_cuda.py", "test_pixels_cuda.py", "test_region_cuda.py", "test_step_cuda.py"]
)
def test_every_kernel(library: Path, files: str) -> None:
    runtime = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")  # the sanitizer looks for exceptions' functions when it starts
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(runtime),
        # Python itself leaks, and libraries without red zones need no quarantine.
        "ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=16",
        "SPLAXEL_GPU_TESTS": str(library),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        str(TESTS / "kernels_cuda" / files),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=TESTS.parent, timeout=600)
    report = done.stdout + done.stderr
    assert done.returncode == 0 and "passed" in done.stdout, report[-8000:]
