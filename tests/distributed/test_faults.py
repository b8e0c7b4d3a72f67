"""What becomes of a job under torchrun whose ranks are killed or asked to stop (design 9)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from splaxel_ns.bench.soak import last_step, process_of
from splaxel_ns.checkpoint import checkpoint_steps

SCENE = Path(__file__).parents[1] / "data" / "matrixcity_caliterra" / "small_city" / "aerial"
START_S = 240.0
"""Importing nerfstudio on a busy machine takes a while."""


class Job:
    """A training job of two ranks in a folder."""

    def __init__(self, folder: Path, steps: int, *flags: str, restarts: int = 0, save_every: int = 10) -> None:
        self.stats, self.log = folder / "stats.jsonl", folder / "log.txt"
        self.checkpoints = folder / "job" / "splaxel" / "run" / "nerfstudio_models"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("--max-restarts", str(restarts), str(Path(sys.executable).with_name("ns-train")), "splaxel"),
            *("--data", str(SCENE), "--output-dir", str(folder), "--experiment-name", "job", "--timestamp", "run"),
            *("--resume", "auto", "--vis", "tensorboard", "--max-num-iterations", str(steps)),
            *("--steps-per-save", str(save_every), "--steps-per-eval-image", "0", "--steps-per-eval-all-images", "0"),
            *("--pipeline.datamanager.camera-res-scale-factor", "0.25", "--pipeline.stats-file", str(self.stats)),
            *flags,
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "300"}
        with open(self.log, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def wait_for(self, what: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            time.sleep(0.05)

    def ended_within(self, seconds: float) -> float:
        start = time.monotonic()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"The job outlived {seconds} s: {self.log.read_text()[-4000:]}") from None
        return time.monotonic() - start


GROWING = [
    *("--pipeline.model.warmup-length", "1", "--pipeline.model.refine-every", "1"),
    *("--pipeline.model.max-gaussians", "34000"),
]
"""Every step refines."""


def runs(pid: int) -> bool:
    """Not so if it has ended and nobody has taken note."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_a_killed_rank_ends_the_job_by_name_and_resuming_continues(tmp_path: Path) -> None:
    """Also where every step refines, moves and saves, so that the signal comes in the middle of that."""
    job = Job(tmp_path, 100_000, *GROWING, save_every=1)
    job.wait_for(lambda: last_step(job.stats) >= 8, START_S)
    victim = process_of(job.process.pid, 1)
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    job.ended_within(60)
    text = job.log.read_text()
    assert job.process.returncode != 0
    assert f"lost rank 1 (process {victim})" in text and "--resume auto" in text
    saved = checkpoint_steps(job.checkpoints)
    assert last_step(job.stats) - 1 <= saved[-1] <= last_step(job.stats)
    done = saved[-1]
    again = Job(tmp_path, done + 6, *GROWING)
    again.wait_for(lambda: again.process.poll() is not None or last_step(again.stats) == done + 5, START_S)
    again.ended_within(60)
    assert again.process.returncode == 0, again.log.read_text()[-4000:]
    assert f"Continuing at step {done + 1}." in again.log.read_text()
    steps = [json.loads(line)["step"] for line in again.stats.read_text().splitlines()]
    assert steps[-1] == done + 5


@pytest.mark.parametrize("save_every", [1, 100_000])
def test_sigterm_saves_and_ends(tmp_path: Path, save_every: int) -> None:
    job = Job(tmp_path, 100_000, save_every=save_every)
    job.wait_for(lambda: last_step(job.stats) >= 5, START_S)
    job.process.send_signal(signal.SIGTERM)
    assert job.ended_within(29) < 25
    saved = checkpoint_steps(job.checkpoints)
    assert len(saved) == 1 and saved[0] == last_step(job.stats)
    assert "Stopped by SIGTERM" in job.log.read_text()


def test_what_is_wrong_for_all_ranks_is_said_once(tmp_path: Path) -> None:
    job = Job(tmp_path, 10, "--pipeline.model.ssim-lambda", "7")
    job.ended_within(START_S)
    text = job.log.read_text()
    assert job.process.returncode != 0 and text.count("ValueError: --pipeline.model.ssim-lambda is 7.0") == 1
    assert "[rank0]: Traceback" in text and "[rank1]" not in text


def test_torchrun_restarts_and_the_run_continues(tmp_path: Path) -> None:
    job = Job(tmp_path, 60, restarts=1)
    job.wait_for(lambda: last_step(job.stats) >= 15, START_S)
    victim = process_of(job.process.pid, 0)
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    job.ended_within(START_S)
    assert job.process.returncode == 0, job.log.read_text()[-4000:]
    assert "Continuing at step" in job.log.read_text()
    assert checkpoint_steps(job.checkpoints) == [59]


def test_ranks_do_not_outlive_torchrun(tmp_path: Path) -> None:
    job = Job(tmp_path, 100_000, save_every=100_000)
    job.wait_for(lambda: last_step(job.stats) >= 5, START_S)
    ranks = [process_of(job.process.pid, rank) for rank in (0, 1)]
    job.process.kill()
    deadline = time.monotonic() + 25
    while any(pid is not None and runs(pid) for pid in ranks):
        assert time.monotonic() < deadline, job.log.read_text()[-4000:]
        time.sleep(0.05)
    assert checkpoint_steps(job.checkpoints) == [last_step(job.stats)]
    assert "Stopped by SIGTERM" in job.log.read_text()
