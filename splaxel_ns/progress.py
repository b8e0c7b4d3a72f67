"""What a training run says while it runs: one line with step, loss, PSNR, Gaussians, speed and time left."""

from __future__ import annotations

import math
import shutil
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from nerfstudio.utils.rich_utils import CONSOLE
from rich.live import Live
from rich.text import Text


def has_terminal() -> bool:
    """Whether somebody watches: without a terminal lines are plain, and the command ends when training ends."""
    return sys.stdout.isatty()


class ProgressLine:
    """Prints a line every few steps; on a terminal the line is refreshed in place.

    Loss and PSNR are means over the steps since the last line, for a single view's values say little; speed and time
    left are those of the last steps, evaluation and saving not counted.

    Args:
        total: Steps at which training ends.
        every: Steps between lines.
        terminal: Refresh in place instead of printing lines.
    """

    def __init__(self, total: int, every: int, terminal: bool) -> None:
        self._total = total
        self._every = max(every, 1)
        # On the console that nerfstudio and our modules print to, so that their lines go above this one.
        self._live = Live(console=CONSOLE, auto_refresh=False) if terminal else None
        self._seconds: deque[float] = deque(maxlen=200)
        self._num_updates = 0
        self._losses: list[float] = []
        self._psnrs: list[float] = []

    def __enter__(self) -> ProgressLine:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, step: int, seconds: float, loss: float, psnr: float | None, num_gaussians: int) -> None:
        """Count one finished step, and show the line where it is due.

        Args:
            step: The step just finished, from 0.
            seconds: How long it took.
            loss: Its mean loss.
            psnr: Its mean PSNR in dB; None if all its views are masked entirely.
            num_gaussians: How many there are now.
        """
        if self._num_updates == 1:
            self._seconds.clear()  # the first step compiled the kernels and says nothing about the others
        self._num_updates += 1
        self._seconds.append(seconds)
        self._losses.append(loss)
        if psnr is not None and math.isfinite(psnr):
            self._psnrs.append(psnr)
        done = step + 1
        if done % self._every and done != self._total:
            return
        line = self._line(done, num_gaussians)
        self._losses.clear()
        self._psnrs.clear()
        if self._live is not None:
            # That console has 120 columns whatever the terminal has, and a wrapped line cannot be refreshed in place.
            columns = min(shutil.get_terminal_size().columns, CONSOLE.width) - 1
            text = Text(line if len(line) <= columns else line.replace("  ", " ").replace(" dB", ""), no_wrap=True)
            text.truncate(columns, overflow="ellipsis")
            self._live.update(text, refresh=True)
        else:
            print(line, flush=True)

    def _line(self, done: int, num_gaussians: int) -> str:
        loss = sum(self._losses) / len(self._losses)
        psnr = f"PSNR {sum(self._psnrs) / len(self._psnrs):5.2f} dB  " if self._psnrs else ""
        speed = len(self._seconds) / max(sum(self._seconds), 1e-9)
        width = len(str(self._total))
        count = f"{num_gaussians:,}" if num_gaussians < 1_000_000 else f"{num_gaussians / 1e6:.2f}M"
        return (
            f"step {done:{width}d}/{self._total}  loss {loss:.4f}  {psnr}Gaussians {count}  "
            f"{speed:.2f} it/s  ETA {clock((self._total - done) / speed)}"
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While something else writes to the terminal, such as a progress bar of its own."""
        if self._live is None:
            yield
            return
        self._live.stop()
        try:
            yield
        finally:
            self._live.start()


def clock(seconds: float) -> str:
    """h:mm:ss, days in front if it takes days."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hour}:{minute:02d}:{second:02d}"
