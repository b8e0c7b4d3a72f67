"""SIGINT and SIGTERM as a request to stop at the next good moment."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any


class StopSignals:
    """While active, the first SIGINT or SIGTERM is only noted; a second SIGINT interrupts at once.

    Signals can only be handled in the main thread; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is None:
            self.received = number
            # Not with print: the handler may run in the middle of one.
            os.write(2, b"\nStopping after this step ...\n")
