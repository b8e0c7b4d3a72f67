"""What somebody who watches costs several ranks: steps per second with and without a client of the live viewer."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from nerfstudio.utils.rich_utils import CONSOLE
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from splaxel_ns.bench.rank_job import free_port
from splaxel_ns.bench.results import ResultFile
from splaxel_ns.bench.soak import last_step

START_S = 300.0
"""Imports and a compilation fit in."""


@dataclass
class Viewer:
    """Train on several ranks, with and without a client of the viewer in turns; compare the steps per second."""

    data: Path
    """The scene (MatrixCity layout)."""
    json: Path
    """Result file."""
    ranks: int = 2
    """Processes."""
    rounds: int = 4
    """Pairs of windows."""
    seconds: float = 12.0
    """Length of each window."""
    move_every: float = 1.0
    """Seconds between two moves of the client's camera; 0: it stays where it is."""

    def main(self) -> None:
        """Measure, print and write.

        Raises:
            RuntimeError: The job ended, or did not begin.
        """
        file = ResultFile(self.json)
        with tempfile.TemporaryDirectory() as folder:
            speeds, pictures = self._measure(Path(folder))
        rates = {name: statistics.median(values) for name, values in speeds.items()}
        ratios = [seen / alone for alone, seen in zip(speeds["alone"], speeds["watched"], strict=True)]
        result = {
            "ranks": self.ranks,
            "seconds": self.seconds,
            "move_every": self.move_every,
            "steps_per_second": rates,
            "windows": speeds,
            "pictures_per_second": pictures / (self.rounds * self.seconds),
            "ratio": statistics.median(ratios),
        }
        file.write(result)
        CONSOLE.print(
            f"{self.ranks} ranks: {rates['alone']:.2f} steps/s alone, {rates['watched']:.2f} watched "
            f"({result['pictures_per_second']:.2f} pictures/s); ratio {result['ratio']:.3f}",
            markup=False,
        )

    def _measure(self, folder: Path) -> tuple[dict[str, list[float]], int]:
        stats, port = folder / "stats.jsonl", free_port()
        speeds: dict[str, list[float]] = {"alone": [], "watched": []}
        pictures = 0
        with open(folder / "log.txt", "w+", encoding="utf-8") as log, self._job(folder, stats, port, log) as job:

            def wait_until(done: Callable[[], bool], seconds: float) -> None:
                deadline = time.monotonic() + seconds
                while not done():
                    if job.poll() is not None or time.monotonic() > deadline:
                        log.seek(0)
                        raise RuntimeError(f"The job has ended or hangs:\n{log.read()[-3000:]}")
                    time.sleep(0.02)

            def speed() -> float:
                first, start = last_step(stats), time.monotonic()
                wait_until(lambda: time.monotonic() - start >= self.seconds, 2 * self.seconds)
                return (last_step(stats) - first) / (time.monotonic() - start)

            wait_until(lambda: last_step(stats) >= 100, START_S)
            for _ in range(self.rounds):
                speeds["alone"].append(speed())
                with Client(port, self.move_every) as client:
                    wait_until(lambda: client.pictures > 0, 60.0)
                    before = client.pictures
                    speeds["watched"].append(speed())
                    pictures += client.pictures - before
                time.sleep(1.0)
        return speeds, pictures

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


class Client:
    """A client of viser without a browser: it looks at the scene, moves now and then, and counts the pictures.

    Args:
        port: Of the viewer on this machine.
        move_every: Seconds between two moves; 0: none.
    """

    def __init__(self, port: int, move_every: float) -> None:
        self.pictures = 0
        self._move_every = move_every
        self._socket = connect(f"ws://127.0.0.1:{port}", max_size=None, compression=None)
        self._left = threading.Event()
        self._threads = [threading.Thread(target=self._look), threading.Thread(target=self._move)]

    def __enter__(self) -> Client:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._socket.close()
        for thread in self._threads:
            thread.join()

    def _look(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            for message in self._socket:
                # One message holds several of viser's; those of the background carry the picture.
                self.pictures += message.count(b"BackgroundImageMessage")  # type: ignore[arg-type]

    def _move(self) -> None:
        number = 0
        with contextlib.suppress(ConnectionClosed):
            while not self._left.is_set():
                self._socket.send(msgspec.msgpack.encode(_camera(0.2 * number)))
                number += 1
                self._left.wait(self._move_every or None)


def _camera(angle: float) -> dict[str, Any]:
    """viser's message about a camera that looks down on the scene's middle, turned about the vertical axis."""
    half = 0.5 * angle
    # Looking down is half a turn about x, before the turn about z: quaternions w, x, y, z.
    return {
        "type": "ViewerCameraMessage",
        "wxyz": [0.0, math.cos(half), math.sin(half), 0.0],
        "position": [0.0, 0.0, 15.0],
        "fov": 0.9,
        "aspect": 1.5,
        "look_at": [0.0, 0.0, 0.0],
        "up_direction": [-math.sin(angle), math.cos(angle), 0.0],
    }
