"""Ranks of a job that a benchmark starts itself, one process and one thread each, and asks to run one thing at once."""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import socket
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000
"""Of Linux's setns(2): a network namespace."""
NAMESPACES = Path("/var/run/netns")
PORT = 29500
"""Of the meeting point in a namespace, where nobody else is."""

GRACE_S = 5.0
"""A rank that has not answered so long after another has failed waits for it."""


@dataclass(frozen=True)
class Home:
    """Where a rank lives on the network."""

    namespace: str | None = None
    """Of `ip netns`; None: that of this process."""
    interface: str = "lo"
    meeting_point: str = "127.0.0.1"
    """Address of rank 0."""


class RankJob:
    """R processes of one Gloo job; a context manager that leaves none behind.

    Args:
        size: R.
        homes: Of each rank; None: all on this machine's loopback.
    """

    def __init__(self, size: int, homes: Sequence[Home] | None = None) -> None:
        self.size = size
        homes = [Home()] * size if homes is None else homes
        port = free_port() if homes[0].namespace is None else PORT
        context = multiprocessing.get_context("spawn")  # the ops' threads do not survive a fork
        self._pipes, self._processes = [], []
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # read when the ranks load their libraries
        try:
            for rank, home in enumerate(homes):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(rank, size, home, port, theirs), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
        finally:
            if threads is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = threads

    def __enter__(self) -> RankJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, patience_s: float | None = None) -> list[Any]:
        """What `function(*args)`, of an importable module, returns on each rank.

        Args:
            patience_s: How long to wait for the next answer; None: for ever.

        Raises:
            RuntimeError: Ranks failed, ended or did not answer; the job goes on only if all have answered.
        """
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        try:
            for pipe in self._pipes:
                pipe.send((function.__module__, function.__name__, args))
            while waiting := {pipe: k for k, pipe in enumerate(self._pipes) if k not in results and k not in errors}:
                # The others may be waiting for one that has failed, or fail alike a moment later.
                ready = wait(list(waiting), GRACE_S if errors else patience_s)
                if not ready:
                    errors |= dict.fromkeys(waiting.values(), "no answer")
                    self._kill()
                for pipe in ready:
                    fine, value = pipe.recv()  # type: ignore[union-attr]
                    (results if fine else errors)[waiting[pipe]] = value  # type: ignore[index]
        except (EOFError, OSError) as error:
            self._kill()
            raise RuntimeError(f"A rank of {self.size} ended without an answer; is there enough memory?") from error
        except BaseException:
            self._kill()
            raise
        if errors:
            raise RuntimeError("\n".join(f"rank {k} of {self.size} failed: {errors[k]}" for k in sorted(errors)))
        return [results[rank] for rank in range(self.size)]

    @property
    def alive(self) -> bool:
        """Whether all processes are there."""
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                pass
        for process in self._processes:
            process.join(5)
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(5)


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def enter_namespace(name: str) -> None:
    """Move this thread, and those it will start, into a network namespace of `ip netns`.

    Raises:
        OSError: It is not there, or not allowed.
    """
    with open(NAMESPACES / name) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter the network namespace {name}: {os.strerror(number)}")


def bytes_sent_by(interface: str) -> int:
    """Bytes that have left a network interface of this process's namespace, as `ip -s link` shows them.

    Raises:
        ValueError: There is no such interface.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise ValueError(f"There is no network interface {interface} here.")


def _serve(rank: int, size: int, home: Home, port: int, pipe: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), GLOO_SOCKET_IFNAME=home.interface)
    os.environ.update(MASTER_ADDR=home.meeting_point, MASTER_PORT=str(port))
    warnings.filterwarnings("ignore", category=FutureWarning)  # of libraries: once is enough
    try:
        if home.namespace is not None:
            enter_namespace(home.namespace)
        while (task := pipe.recv()) is not None:
            module, name, args = task
            try:
                pipe.send((True, getattr(importlib.import_module(module), name)(*args)))
            except (ValueError, OSError) as error:
                pipe.send((False, str(error)))
            except Exception:
                pipe.send((False, traceback.format_exc()))
    except (EOFError, KeyboardInterrupt):  # the benchmark has ended
        return
    except OSError as error:
        pipe.send((False, str(error)))
