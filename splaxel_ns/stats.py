"""What every rank did in a step: bytes by kind, messages, waiting, rendering; to a file, the event files and a summary.

Shapes: R ranks.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from nerfstudio.utils.rich_utils import CONSOLE

from splaxel_ns.comm import FailedTogether

if TYPE_CHECKING:
    from splaxel_ns.model import SplaxelModel

MIB = 2**20


def _memory() -> int:
    """Resident bytes of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


class StepStats:
    """Counts the steps of a run; what it prints as bytes is what crossed the wire (design 9).

    Args:
        model: Whose ranks are counted.
        path: JSON lines, one per step and rank; written by rank 0. None: no file.

    Raises:
        FailedTogether: The file cannot be opened; on all ranks.
    """

    def __init__(self, model: SplaxelModel, path: Path | None) -> None:
        self._model = model
        self._file: IO[str] | None = None
        self._wanted = path is not None
        self._steps = 0
        self._sums: dict[str, float] = {}
        if path is not None:
            self._open(path)

    def _open(self, path: Path) -> None:
        error = None
        if self._model.world.is_main:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(path, "a", encoding="utf-8")
            except OSError as failure:
                error = f"--pipeline.stats-file {path} cannot be written ({failure.strerror}): name another file."
        failures = self._model.world.failures(error)
        if failures:
            raise FailedTogether(failures[0].partition(": ")[2])

    def finish_step(self, step: int, more: Mapping[str, float], utilisation: float) -> dict[str, float]:
        """Take the counters of the step that has just been done; every rank calls this at once.

        Args:
            step: From 0.
            more: Times that were measured elsewhere, and what growing and pruning did, by name.
            utilisation: Of the epoch's buckets: partitions that draw something, in parts of all.

        Returns:
            This rank's numbers under short names, for the event files.
        """
        own = self._take(more) | {"utilisation": utilisation}
        self._steps += 1
        for name, value in own.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        if self._wanted:
            self._write(step, own)
        return own

    def _take(self, more: Mapping[str, float]) -> dict[str, float]:
        counters = self._model.world.take_counters()
        own: dict[str, float] = {f"sent {kind}": size for kind, size in sorted(counters.bytes_sent.items())}
        own |= {f"received {kind}": size for kind, size in sorted(counters.bytes_received.items())}
        own |= {
            "bytes_sent": sum(counters.bytes_sent.values()),
            "bytes_received": sum(counters.bytes_received.values()),
        }
        own |= {"messages": counters.messages, "wait_s": counters.wait_s}
        own |= {"gaussians": self._model.num_points, "memory": _memory()}
        if self._model.renderer is not None:
            own |= self._model.renderer.take_numbers()
        return own | dict(more)

    def _write(self, step: int, own: Mapping[str, float]) -> None:
        """A line for each rank."""
        text = json.dumps({name: round(value, 6) for name, value in own.items()})
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        for rank, part in enumerate(self._model.world.gather_uneven(data, "statistics")):
            if self._file is not None:
                line: dict[str, Any] = {"step": step, "rank": rank} | json.loads(bytes(part.tolist()))
                try:
                    self._file.write(json.dumps(line) + "\n")
                    self._file.flush()
                except OSError as error:
                    CONSOLE.print(
                        f"The statistics cannot be written any more ({error}); training goes on.", markup=False
                    )
                    self._file = None

    def summary(self) -> str | None:
        """One line about the run, None for a run of one rank."""
        if self._model.world.size == 1 or not self._steps:
            return None
        mean = {name: value / self._steps for name, value in self._sums.items()}
        kinds = ", ".join(
            f"{name.removeprefix('sent ')} {value / MIB:.3f}"
            for name, value in mean.items()
            if name.startswith("sent ") and value >= 1024
        )
        times = ", ".join(
            f"{name} {1000 * mean[f'{name}_s']:.1f}"
            for name in ("render", "compose", "backward", "optimizer", "wait")
            if f"{name}_s" in mean
        )
        return (
            f"Rank 0 per step: {mean['bytes_sent'] / MIB:.3f} MiB sent ({kinds}) in {mean['messages']:.0f} messages; "
            f"milliseconds: {times}; utilisation {mean['utilisation']:.2f}."
        )

    def close(self) -> None:
        """Finish the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
