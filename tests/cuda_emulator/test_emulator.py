"""The emulator finds the faults it claims to find, and runs kernels without fault as a GPU would."""

from __future__ import annotations

import subprocess
from pathlib import Path

import build
import pytest


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of `faults.cu`."""
    program = tmp_path_factory.mktemp("faults") / "faults"
    build.run("g++", *build.FLAGS, build.SANITIZER, "-o", program, "-x", "c++", build.HERE / "faults.cu")
    return program


def run(program: Path, name: str, seed: int = 0) -> str:
    # Abandoned threads leave their strings behind.
    environment = {"ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([program, name, str(seed)], capture_output=True, text=True, timeout=60, env=environment)
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", ["reverse", "votes", "fold"])
def test_what_is_right_stays_right(faults: Path, name: str) -> None:
    assert all(run(faults, name, seed).splitlines() == ["right", "right"] for seed in range(5))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing_barrier", "wrong\nright"),
        ("never_written", "not a number\nright"),
        ("one_half_only", "barrier"),
        ("two_barriers", "wait at the barriers of lines"),
        ("overflow", "heap-buffer-overflow"),
        ("global_overflow", "heap-buffer-overflow"),
        ("absent_lane", "a lane ended|a mask names lanes that have ended"),
        ("split_warp", "lanes of a warp meet in line"),
        ("odd_block", "a multiple of 32"),
    ],
)
def test_faults_are_found(faults: Path, name: str, message: str) -> None:
    for seed in range(3):
        output = run(faults, name, seed)
        assert any(part in output for part in message.split("|")), output
        # After an error of the emulator's own, the next kernel runs as if nothing had been.
        assert "AddressSanitizer" in output or output.splitlines()[-1] == "right"
