"""Gloo ranks that stay for a whole test session and run what a test asks of all of them at once."""

from __future__ import annotations

import importlib
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

PATIENCE_S = 240
"""A rank that has not answered by then hangs."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _serve(rank: int, size: int, port: int, pipe: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    while True:
        task = pipe.recv()
        if task is None:
            return
        module, name, args = task
        try:
            function = getattr(importlib.import_module(module), name)
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Ranks:
    """R processes of one Gloo job."""

    def __init__(self, size: int) -> None:
        self.size = size
        context = mp.get_context("spawn")  # the ops' threads do not survive a fork
        port = free_port()
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(*args)`, of an importable module, returns on each rank."""
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__name__, args))
        results, errors = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(PATIENCE_S):
                errors.append(f"rank {rank} hangs")
                continue
            fine, value = pipe.recv()
            results.append(value)
            if not fine:
                errors.append(f"rank {rank}:\n{value}")
        assert not errors, "\n".join(errors)
        return results

    def close(self) -> None:
        for pipe in self._pipes:  # all of them first: a rank that leaves waits for the others
            try:
                pipe.send(None)
            except OSError:
                pass
        for process in self._processes:
            process.join(5)
            process.kill()
