"""What somebody who watches costs several ranks: steps per second with and without a client of the live viewer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nerfstudio.utils.rich_utils import CONSOLE

from splaxel_ns.bench.comm import check_numbers
from splaxel_ns.bench.rank_job import free_port
from splaxel_ns.bench.results import ResultFile
from splaxel_ns.bench.soak import last_step
from splaxel_ns.bench.watcher import Client
from splaxel_ns.types import MAX_PARTITIONS

START_S = 600.0
"""Imports and a compilation fit in."""
KINDS = ("alone", "still", "moving")


@dataclass(frozen=True)
class Window:
    """What the ranks did in some seconds."""

    steps: int
    pictures: int  # that they drew for the viewer, whether or not a client got them
    seconds: float

    @classmethod
    def of(cls, stats: Path, begin: int, seconds: float) -> Window:
        """From what was written to a file of statistics behind its first `begin` bytes."""
        with open(stats, "rb") as file:
            file.seek(begin)
            whole = file.read().rpartition(b"\n")[0].splitlines()
        # The first line may have been written in part before.
        lines = [json.loads(line) for line in whole if line.startswith(b"{")]
        main = [line for line in lines if line["rank"] == 0]
        return cls(len(main), sum(line.get("sent viewer", 0) > 0 for line in main), seconds)


def summary(windows: Mapping[str, Sequence[Window]]) -> dict[str, Any]:
    """Steps per second of every kind of windows, in parts of those alone, and pictures.

    Returns:
        `ratio`: the median over rounds, each window against the one alone of its round. `steps_per_picture`: None where
        no pictures were drawn.
    """
    speeds = {kind: [window.steps / window.seconds for window in of_kind] for kind, of_kind in windows.items()}
    steps = {kind: sum(window.steps for window in of_kind) for kind, of_kind in windows.items()}
    pictures = {kind: sum(window.pictures for window in of_kind) for kind, of_kind in windows.items()}
    ratios = {
        kind: [seen / alone for alone, seen in zip(speeds["alone"], speeds[kind], strict=True)]
        for kind in windows
        if kind != "alone"
    }
    return {
        "steps_per_second": {kind: statistics.median(values) for kind, values in speeds.items()},
        "windows": speeds,
        "pictures": pictures,
        "steps_per_picture": {kind: steps[kind] / num if num else None for kind, num in pictures.items()},
        "ratio": {kind: statistics.median(values) for kind, values in ratios.items()},
    }


@dataclass
class Viewer:
    """Train on several ranks, in turns alone, with a client of the viewer that looks at the scene, and with one that
    also moves; compare the steps per second."""

    data: Path
    """The scene (MatrixCity layout)."""
    json: Path
    """Result file."""
    ranks: int = 2
    """Processes."""
    rounds: int = 4
    """Windows of each kind."""
    seconds: float = 12.0
    """Length of each window."""
    move_every: float = 1.0
    """Seconds between two moves of the client's camera."""

    def main(self) -> None:
        """Measure, print and write.

        Raises:
            RuntimeError: The job ended, or did not begin.
            ValueError: An argument is out of range, or there is no such scene.
        """
        check_numbers("--ranks", (self.ranks,), 2, MAX_PARTITIONS)
        check_numbers("--rounds", (self.rounds,), 1, 1000)
        for option, value in (("--seconds", self.seconds), ("--move-every", self.move_every)):
            if not 0 < value < 3600:
                raise ValueError(f"{option} is {value}; it must lie between 0 and 3600 seconds.")
        if not self.data.exists():
            raise ValueError(f"--data {self.data}: there is no such file or folder.")
        file = ResultFile(self.json)
        with tempfile.TemporaryDirectory() as folder:
            windows = self._measure(Path(folder))
        result = {"ranks": self.ranks, "seconds": self.seconds, "move_every": self.move_every} | summary(windows)
        file.write(result)
        for kind in KINDS:
            of_alone = "" if kind == "alone" else f"; {result['ratio'][kind]:.3f} of the speed alone"
            CONSOLE.print(
                f"{self.ranks} ranks, {kind}: {result['steps_per_second'][kind]:.2f} steps/s, "
                f"{result['pictures'][kind]} pictures{of_alone}",
                markup=False,
            )

    def _measure(self, folder: Path) -> dict[str, list[Window]]:
        stats, port = folder / "stats.jsonl", free_port()
        windows: dict[str, list[Window]] = {kind: [] for kind in KINDS}
        with open(folder / "log.txt", "w+", encoding="utf-8") as log, self._job(folder, stats, port, log) as job:

            def wait_until(done: Callable[[], bool], seconds: float) -> None:
                deadline = time.monotonic() + seconds
                while not done():
                    if job.poll() is not None or time.monotonic() > deadline:
                        log.seek(0)
                        raise RuntimeError(f"The job has ended or hangs:\n{log.read()[-3000:]}")
                    time.sleep(0.02)

            def window() -> Window:
                begin, start = stats.stat().st_size, time.monotonic()
                wait_until(lambda: time.monotonic() - start >= self.seconds, 2 * self.seconds)
                return Window.of(stats, begin, time.monotonic() - start)

            wait_until(lambda: last_step(stats) >= 100, START_S)
            for _ in range(self.rounds):
                windows["alone"].append(window())
                for kind, pause in (("still", 0.0), ("moving", self.move_every)):
                    with Client(port, pause) as client:
                        wait_until(lambda client=client: client.pictures > 0, 60.0)
                        windows[kind].append(window())
                    time.sleep(1.0)  # the viewer notices that the client is gone
        return windows

    @contextlib.contextmanager
    def _job(self, folder: Path, stats: Path, port: int, log: Any) -> Iterator[subprocess.Popen[bytes]]:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)),
            *(str(Path(sys.executable).with_name("ns-train")), "splaxel", "--data", str(self.data)),
            *("--output-dir", str(folder), "--vis", "viewer", "--viewer.websocket-port", str(port)),
            *("--viewer.websocket-host", "127.0.0.1", "--max-num-iterations", "1000000"),
            *("--steps-per-eval-all-images", "0", "--steps-per-eval-image", "0", "--steps-per-save", "1000000"),
            *("--pipeline.stats-file", str(stats), "--pipeline.datamanager.batch-size", str(self.ranks)),
            *("--pipeline.model.stop-split-at", "0", "--pipeline.model.resolution-schedule", "1"),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "300"}
        job = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            yield job
        finally:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
