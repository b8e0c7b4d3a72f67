"""The ranks of a job and all they say to each other. Beside `rendezvous`, nothing else imports torch.distributed.

Every call counts its bytes, messages and the time it waited. Calls that involve other ranks must come in the same
order on all of them; a rank that has gone ends the job with a `LostRank` naming who noticed and during what.

Shapes: R ranks.
"""

from __future__ import annotations

import os
import platform
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from splaxel_ns import rendezvous
from splaxel_ns.interrupts import stop_with_launcher

TIMEOUT = timedelta(hours=2)
"""A rank that loads data or compiles may keep the others waiting that long. One that has died is noticed at once, for
its connections close."""


SAME_ERROR_S = 5.0
"""Ranks that fail alike do so within this time."""


class LostRank(RuntimeError):
    """Another rank does not answer any more."""


class Disagreement(RuntimeError):
    """Two ranks are not at the same point of the same run."""


class FailedTogether(ValueError):
    """What some rank could not do, raised on all of them at the same point: they may still save together."""


@dataclass
class Counters:
    """What this rank sent and received, by kind of content, since they were taken last."""

    bytes_sent: dict[str, int] = field(default_factory=dict)
    bytes_received: dict[str, int] = field(default_factory=dict)
    messages: int = 0
    wait_s: float = 0.0
    """Time spent waiting for others, with nothing else to do."""

    def add(self, kind: str, sent: int, received: int, messages: int) -> None:
        """Count some traffic of this rank."""
        self.bytes_sent[kind] = self.bytes_sent.get(kind, 0) + sent
        self.bytes_received[kind] = self.bytes_received.get(kind, 0) + received
        self.messages += messages


@dataclass
class Pending:
    """Point-to-point messages under way."""

    world: World
    received: dict[int, Tensor]
    """By rank; complete after `wait`."""
    kept: list[Tensor]
    """What is being sent must not be freed before it has left."""
    works: list[Any]
    what: str

    def wait(self) -> dict[int, Tensor]:
        """Wait until everything has arrived and left; returns `received`.

        Raises:
            LostRank: A peer is gone.
        """
        with self.world.waiting(self.what):
            for work in self.works:
                work.wait()
        self.works, self.kept = [], []
        return self.received


class World:
    """The ranks of this job; a job of one process is a world of one and sends nothing.

    Tensors may be on the CPU, which Gloo serves, or on this rank's GPU, which NCCL serves; a call's are on the same on
    all ranks. NCCL works on a stream of its own, ordered by events: what is drawn after `start` overlaps with the
    exchange, and `Pending.wait` holds up the GPU's stream, not the host. The time that takes is not counted.

    Args:
        rank: This process, 0 to size - 1.
        size: R, number of ranks.
        cpu_group: Who serves tensors on the CPU, if the job's own group does not.
    """

    def __init__(self, rank: int = 0, size: int = 1, cpu_group: Any = None) -> None:
        self.rank = rank
        self.size = size
        self._cpu_group = cpu_group
        self.counters = Counters()
        self.checks: list[Callable[[], None]] = []
        """Of what has come to a GPU: each raises if it is not what was due."""
        self._homes: list[tuple[int, int]] = []  # of each rank, its machine and its process there

    def __deepcopy__(self, memo: dict[int, Any]) -> World:
        return self  # models are copied for evaluation; the job is one

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files, shows the viewer and speaks for the job."""
        return self.rank == 0

    def take_counters(self) -> Counters:
        """What was counted since the last call."""
        taken, self.counters = self.counters, Counters()
        return taken

    def check(self) -> None:
        """Look at what has come to the GPU meanwhile; before anything is made of it for good.

        Raises:
            Disagreement: It is not what was due.
        """
        checks, self.checks = self.checks, []
        for look in checks:
            look()

    @contextmanager
    def waiting(self, what: str):
        """Time spent inside counts as waiting; a failure of the network becomes a `LostRank`, no other error does."""
        start = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and not _NETWORK.search(str(error)):
                raise
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            first = re.sub(r"\[/\S+\] |\. This is typically caused by.*", "", first)  # Gloo's source and advice
            raise LostRank(
                f"Rank {self.rank} of {self.size} lost {self._who_has_gone()} while it swapped {what} ({first}). "
                "The job ends."
            ) from error
        finally:
            self.counters.wait_s += time.perf_counter() - start

    def introduce(self) -> None:
        """Tell the others where this rank lives, so that they can name it when it has gone."""
        here = torch.tensor([zlib.crc32(platform.node().encode()), os.getpid()])
        self._homes = [(int(machine), int(process)) for machine, process in self.gather(here).tolist()]

    def _who_has_gone(self) -> str:
        """The ranks of this machine whose process has ended; beyond it one cannot see."""
        if not self._homes:
            return "another rank"
        machine = self._homes[self.rank][0]
        deadline = time.monotonic() + 1.0  # a connection closes before its process is gone
        while time.monotonic() < deadline:
            gone = [
                f"rank {k} (process {pid})" for k, (m, pid) in enumerate(self._homes) if m == machine and _gone(pid)
            ]
            if gone:
                return " and ".join(gone)
            time.sleep(0.05)
        others = any(m != machine for m, _ in self._homes)
        return "a rank on another machine" if others else "another rank, which has closed its connection"

    # Collectives

    def gather(self, tensor: Tensor, kind: str = "agreement") -> Tensor:
        """Everybody's tensor of one shape: [...] -> [R, ...].

        Raises:
            LostRank: A peer is gone.
        """
        if self.size == 1:
            return tensor[None].clone()
        out = tensor.new_empty((self.size, *tensor.shape))
        with self.waiting(kind):
            dist.all_gather(list(out.unbind(0)), tensor.contiguous(), group=self._group(tensor))
        others = (self.size - 1) * tensor.nbytes
        self.counters.add(kind, others, others, self.size - 1)
        return out

    def gather_uneven(self, tensor: Tensor, kind: str) -> list[Tensor]:
        """Everybody's rows, whose number differs: [n, ...] -> R x [n_r, ...].

        Raises:
            LostRank: A peer is gone.
        """
        if self.size == 1:
            return [tensor]
        counts = self.gather(torch.tensor(len(tensor)), kind).tolist()
        return self._swap([tensor] * self.size, counts, kind)

    def to_each(self, parts: Sequence[Tensor], kind: str) -> list[Tensor]:
        """Rows for every rank: R x [m_r, ...] -> R x [n_r, ...], those that each rank had for this one.

        Args:
            parts: By destination; rows of one shape and type everywhere.

        Raises:
            LostRank: A peer is gone.
        """
        if self.size == 1:
            return list(parts)
        counts = self.gather(torch.tensor([len(part) for part in parts]), kind)[:, self.rank].tolist()
        return self._swap(parts, counts, kind)

    def _swap(self, parts: Sequence[Tensor], counts: Sequence[int], kind: str) -> list[Tensor]:
        sends = {rank: part for rank, part in enumerate(parts) if rank != self.rank and len(part)}
        empty = parts[self.rank][:0]
        receives = {
            rank: empty.new_empty((count, *empty.shape[1:]))
            for rank, count in enumerate(counts)
            if rank != self.rank and count
        }
        received = self.start(sends, receives, kind).wait()
        return [parts[rank] if rank == self.rank else received.get(rank, empty) for rank in range(self.size)]

    def sum(self, tensor: Tensor, kind: str = "sums") -> Tensor:
        """The sum over the ranks, in place.

        Raises:
            LostRank: A peer is gone.
        """
        if self.size > 1:
            with self.waiting(kind):
                dist.all_reduce(tensor, group=self._group(tensor))
            # As a ring moves them: twice the tensor, less the part that is at home.
            moved = 2 * tensor.nbytes * (self.size - 1) // self.size
            self.counters.add(kind, moved, moved, 2 * (self.size - 1))
        return tensor

    def from_main(self, tensor: Tensor, kind: str = "agreement") -> Tensor:
        """Rank 0's tensor, in place, of one shape everywhere.

        Raises:
            LostRank: A peer is gone.
        """
        if self.size > 1:
            with self.waiting(kind):
                dist.broadcast(tensor, 0, group=self._group(tensor))
            moved = tensor.nbytes
            sent, received = (moved * (self.size - 1), 0) if self.is_main else (0, moved)
            self.counters.add(kind, sent, received, self.size - 1 if self.is_main else 0)
        return tensor

    def _group(self, tensor: Tensor) -> Any:
        """Who serves this tensor; None: the job's group."""
        return self._cpu_group if tensor.device.type == "cpu" else None

    def text_from_main(self, text: str) -> str:
        """Rank 0's string."""
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        length = int(self.from_main(torch.tensor(len(data))))
        buffer = data if self.is_main else torch.zeros(length, dtype=torch.uint8)
        return bytes(self.from_main(buffer).tolist()).decode() if length else ""

    def any(self, flag: bool) -> bool:
        """Whether some rank says yes."""
        return bool(self.gather(torch.tensor(int(flag))).any())

    def barrier(self) -> None:
        """Wait until all ranks have come here."""
        self.gather(torch.zeros((), dtype=torch.int64))

    def failures(self, error: str | None) -> list[str]:
        """What went wrong on each rank where something did, the same list everywhere; rank by rank."""
        message = torch.tensor(list((error or "").encode()), dtype=torch.uint8)
        texts = [bytes(part.tolist()).decode() for part in self.gather_uneven(message, "agreement")]
        return [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]

    # Point to point

    def start(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], kind: str) -> Pending:
        """Start sending and receiving; every rank names the same pairs with the same sizes, in the same order of calls.

        Args:
            sends: By destination, contiguous.
            receives: Buffers by source.
            kind: What is sent, for the counters and for error messages.
        """
        kept = [tensor.contiguous() for tensor in sends.values()]
        operations = [dist.P2POp(dist.irecv, b, source, self._group(b)) for source, b in receives.items()]
        operations += [dist.P2POp(dist.isend, t, target, self._group(t)) for t, target in zip(kept, sends, strict=True)]
        works: list[Any] = []
        if operations:
            with self.waiting(kind):
                works = dist.batch_isend_irecv(operations)
        sent = sum(tensor.nbytes for tensor in kept)
        self.counters.add(kind, sent, sum(buffer.nbytes for buffer in receives.values()), len(kept))
        return Pending(self, dict(receives), kept, works, kind)

    # Outside of all collectives

    def say_failed(self, error: str) -> None:
        """Let the other ranks know that this one ends with an error, and has said so."""
        with suppress(RuntimeError, ValueError):  # whoever keeps the store may be gone
            dist.distributed_c10d._get_default_store().set(f"splaxel failed {self.rank}", error)

    def main_failed_with(self, error: str) -> bool:
        """Whether rank 0 ends with the same error; if so, this returns when it has said so."""
        key = "splaxel failed 0"
        with suppress(RuntimeError, ValueError):
            store = dist.distributed_c10d._get_default_store()
            store.wait([key], timedelta(seconds=SAME_ERROR_S))
            return store.get(key).decode() == error
        return False


_NETWORK = re.compile(r"gloo/(transport|rendezvous)|Connection (closed|reset|refused)|Broken pipe|[Tt]imed out")
"""What Gloo says when it cannot reach a rank; its errors are plain RuntimeErrors, like those of wrong arguments."""
_REMEDY = "start several ranks with torchrun, and unset these variables for one"
_world: World | None = None
_own_group = False
"""Whether the group of ranks was formed here."""


def world() -> World:
    """The job this process belongs to: as torchrun's environment or a process group that is already there say."""
    global _world
    if _world is None:
        _world = _join()
    return _world


def launched() -> tuple[int, int]:
    """Rank and number of ranks as torchrun's environment names them; joins nothing.

    Raises:
        ValueError: It names what cannot be.
    """
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise ValueError(f"RANK={rank!r} and WORLD_SIZE={size!r} are no rank among ranks: {_REMEDY}.")
    return int(rank), int(size)


def leave() -> None:
    """Say good-bye to the other ranks, at the end of the job or before another.

    Processes that nerfstudio has brought together part by themselves, after a last word.
    """
    global _world, _own_group
    _world = None
    if _own_group and dist.is_initialized():
        dist.destroy_process_group()
    _own_group = False


def _gone(pid: int) -> bool:
    """Whether a process has ended, though nobody may have taken note of it yet."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True


def _backends() -> str:
    """NCCL joins when it is first used, so it costs nothing where ranks draw on the CPU."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def _join() -> World:
    global _own_group
    if not dist.is_available():
        return World()
    rank, size = launched()
    if not dist.is_initialized():
        if size == 1:
            return World()
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(f"WORLD_SIZE is {size}, but {' and '.join(missing)} are not set: {_REMEDY}.")
        if "TORCHELASTIC_RUN_ID" in os.environ:
            stop_with_launcher()
        store = rendezvous.meet(rendezvous.open_store(rank, size, TIMEOUT), rank, size)
        dist.init_process_group(backend=_backends(), store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        _own_group = True
    # nerfstudio's own processes have met under NCCL alone.
    cpu_group = dist.new_group(backend="gloo", timeout=TIMEOUT) if "cpu:" not in dist.get_backend_config() else None
    joined = World(dist.get_rank(), dist.get_world_size(), cpu_group)
    joined.introduce()
    return joined
