"""How the ranks of a job meet: each says that it is there, and all start together with an empty store.

torchrun keeps one store for all attempts of a job. A rank that is restarted may therefore read what its peers wrote
before they died, such as addresses that nobody listens at any more. Here rank 0 opens a generation under a name that
never was, and the others follow once it has seen them; the process group lives under that name.

Shapes: R ranks.
"""

from __future__ import annotations

# torch documents its stores, but its __all__ lacks them.
# pyright: reportPrivateImportUsage=false
import os
import time
import uuid
from datetime import timedelta

from nerfstudio.utils.rich_utils import CONSOLE
from torch import distributed as dist

JOIN_S = 900.0
"""Ranks start together; one that is not there by then does not come. Slow imports from a network folder fit in."""
SAY_AFTER_S = 15.0
_POLL_S = 0.02
_GENERATION = "splaxel/generation"


class NobodyCame(RuntimeError):
    """Some ranks of the job did not start."""


def open_store(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT; rank 0 serves it where torchrun does not.

    Args:
        rank: Of this process.
        size: R.
        timeout: Of every later operation on the store.

    Raises:
        NobodyCame: Nobody serves it.
        RuntimeError: The port is taken, or the address is none of this machine.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            host,
            port,
            size,
            is_master=rank == 0 and not served,
            timeout=timedelta(seconds=JOIN_S),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistNetworkError as error:
        if rank == 0 and not served:
            raise
        raise NobodyCame(
            f"Rank {rank} of {size} found nobody at {host}:{port} within {JOIN_S:.0f} s: is rank 0 running there, and "
            "are MASTER_ADDR and MASTER_PORT the same for all ranks?"
        ) from error
    store.set_timeout(timeout)
    return store


def meet(store: dist.Store, rank: int, size: int, patience_s: float = JOIN_S) -> dist.Store:
    """Wait until all R ranks of this attempt are there.

    Args:
        store: Shared by the ranks; it may hold keys of earlier attempts.
        rank: Of this process.
        size: R.
        patience_s: How long to wait for all.

    Returns:
        The part of the store that only this attempt uses.

    Raises:
        NobodyCame: After `patience_s`; rank 0 names who is missing.
    """
    me = uuid.uuid4().hex
    clock = _Patience(patience_s)
    if rank == 0:
        store.set(_GENERATION, me)
        there = {0: me}
        while len(there) < size:
            for other in range(1, size):
                key = _presence(me, other)
                if other not in there and store.check([key]):
                    there[other] = store.get(key).decode()
            if missing := [str(other) for other in range(size) if other not in there]:
                clock.tick(f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} of {size}")
        store.set(_roster(me), ",".join(there.values()))
        return dist.PrefixStore(f"splaxel/{me}", store)
    generation = ""
    while True:
        if store.check([_GENERATION]) and (latest := store.get(_GENERATION).decode()) != generation:
            generation = latest  # of an attempt that has ended, maybe: then a newer one follows
            store.set(_presence(generation, rank), me)
        # An earlier attempt's roster does not hold the name that this process has just given itself.
        if generation and store.check([_roster(generation)]) and me in store.get(_roster(generation)).decode():
            return dist.PrefixStore(f"splaxel/{generation}", store)
        clock.tick(f"rank 0 of {size}, or those it waits for")


class _Patience:
    """Waits between looks, says once what for, and ends."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._start, self._said = seconds, time.monotonic(), False

    def tick(self, whom: str) -> None:
        waited = time.monotonic() - self._start
        if waited > self._seconds:
            raise NobodyCame(
                f"After {waited:.0f} s there is still no sign of {whom}: start all ranks of the job together, with one "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
            )
        if waited > SAY_AFTER_S and not self._said:
            self._said = True
            CONSOLE.print(f"Waiting for {whom}.", markup=False, soft_wrap=True)
        time.sleep(_POLL_S)


def _presence(generation: str, rank: int) -> str:
    return f"splaxel/{generation}/rank {rank} is"


def _roster(generation: str) -> str:
    return f"splaxel/{generation}/roster"
