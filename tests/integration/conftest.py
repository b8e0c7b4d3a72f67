"""One short training run by the real command, shared by the tests of what comes after training."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SCENE = Path(__file__).parents[1] / "data" / "matrixcity_caliterra" / "small_city" / "aerial"
STEPS = 10
FLAGS = (
    *("--pipeline.model.num-partitions", "4"),
    *("--pipeline.datamanager.camera-res-scale-factor", "0.5"),
    *("--max-num-iterations", str(STEPS)),
    *("--steps-per-eval-image", "5"),
    *("--steps-per-eval-all-images", "0"),
    *("--viewer.websocket-port-default", "7500"),
)


def start_command(name: str, *arguments: str) -> subprocess.Popen[str]:
    """A console command of this environment, without a terminal; its output is collected."""
    return subprocess.Popen(
        [str(Path(sys.executable).with_name(name)), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
    )


@dataclass(frozen=True)
class Trained:
    """What the command left and said."""

    config: Path  # config.yml
    returncode: int
    output: str


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The committed scene after 10 steps in 4 partitions, with the viewer and event files on."""
    folder = tmp_path_factory.mktemp("trained")
    where = ("--output-dir", str(folder), "--experiment-name", "aerial", "--timestamp", "run")
    process = start_command("ns-train", "splaxel", *FLAGS, *where, "--data", str(SCENE))
    try:
        output, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    return Trained(folder / "aerial" / "splaxel" / "run" / "config.yml", process.returncode, output)
