"""SIGINT, SIGTERM and SIGHUP as a request to stop at the next good moment, and the end of whoever started us."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_PR_SET_PDEATHSIG = 1


class StopSignals:
    """While active, the first signal is only noted; a second SIGINT interrupts at once, or when `deferred` ends.

    Signals can only be handled in the main thread; elsewhere this does nothing. A SIGHUP that is ignored, as under
    nohup, stays ignored.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}
        self._deferring = False
        self._interrupted = False

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM]
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                numbers.append(signal.SIGHUP)
            self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Nothing inside is interrupted; a second SIGINT that came meanwhile is raised at the end.

        Raises:
            KeyboardInterrupt: After the body has finished.
        """
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
        if self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: Any) -> None:
        if self.received is not None and number == signal.SIGINT:
            if not self._deferring:
                raise KeyboardInterrupt
            self._interrupted = True
            _say(b"\nInterrupting as soon as the checkpoint is written ...\n")
        if self.received is None:
            self.received = number
            _say(b"\nStopping after this step ...\n")


def stop_with_launcher() -> None:
    """Ask the kernel for a SIGTERM when torchrun dies without stopping this rank, which nobody could stop any more."""
    launcher = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:  # it died before the kernel knew
        os.kill(os.getpid(), signal.SIGTERM)


def _say(text: bytes) -> None:
    """Not with print: the handler may run in the middle of one. The terminal may be gone."""
    with suppress(OSError):
        os.write(2, text)
