"""An error that several ranks have in common is reported by one of them."""

from __future__ import annotations

import sys
from types import TracebackType

from splaxel_ns.comm import World


def report_once(world: World) -> None:
    """From now on an uncaught error of a rank is printed unless rank 0 ends with the same one, and prints it.

    All of them exit with Python's status 1. The ranks do not meet for this: one that fails alone finds the others
    waiting for it elsewhere.
    """
    before = sys.excepthook  # torch's, which puts the rank in front

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = f"{kind.__name__}: {error}"
        if not world.is_main and world.main_failed_with(text):
            return
        before(kind, error, trace)
        sys.stderr.flush()
        world.say_failed(text)

    sys.excepthook = report
