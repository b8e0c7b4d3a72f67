"""How ranks meet, also where a store holds what an earlier attempt of the job left."""

from __future__ import annotations

# torch documents its stores, but its __all__ lacks them.
# pyright: reportPrivateImportUsage=false
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch import distributed as dist

from splaxel_ns import rendezvous


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False)


def attempt(pool: ThreadPoolExecutor, store: dist.TCPStore, ranks: list[int], size: int) -> dict[int, Future]:
    """Ranks that come in this order, each with a connection of its own, as processes have."""

    def come(rank: int) -> dist.Store:
        mine = dist.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=20))
        return rendezvous.meet(mine, rank, size, patience_s=20.0)

    return {rank: pool.submit(come, rank) for rank in ranks}


def test_all_meet_and_share_a_store(store: dist.TCPStore) -> None:
    with ThreadPoolExecutor(4) as pool:
        stores = {rank: f.result(20) for rank, f in attempt(pool, store, [2, 0, 3, 1], 4).items()}
    stores[1].set("address", "here")
    assert all(stores[rank].get("address") == b"here" for rank in range(4))


def test_a_restarted_rank_does_not_meet_the_dead(store: dist.TCPStore) -> None:
    """The others come first: all they find at first is what the dead have written."""
    with ThreadPoolExecutor(3) as pool:
        first = {rank: f.result(20) for rank, f in attempt(pool, store, [0, 1, 2], 3).items()}
        first[0].set("address", "nobody listens here any more")
        early = attempt(pool, store, [1, 2], 3)
        threading.Event().wait(0.3)
        assert not any(future.done() for future in early.values())
        late = attempt(pool, store, [0], 3)
        second = [future.result(20) for future in (early | late).values()]
    assert not any(each.check(["address"]) for each in second)
    second[0].set("address", "new")
    assert all(each.get("address") == b"new" for each in second)
    assert first[1].get("address") == b"nobody listens here any more"


def test_an_attempt_that_never_was_complete(store: dist.TCPStore) -> None:
    """Rank 2 of the first attempt never came; its place is taken in the second."""
    with ThreadPoolExecutor(5) as pool:
        mine = dist.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=20))
        with pytest.raises(rendezvous.NobodyCame, match="rank 2 of 3"):
            one = attempt(pool, store, [1], 3)[1]
            rendezvous.meet(mine, 0, 3, patience_s=0.3)
        stores = [future.result(20) for future in attempt(pool, store, [2, 0], 3).values()]
        stores.append(one.result(20))
    stores[0].set("address", "new")
    assert all(each.get("address") == b"new" for each in stores)


def test_who_does_not_come_is_named(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "SAY_AFTER_S", 0.1)
    with pytest.raises(rendezvous.NobodyCame, match=r"no sign of ranks 1, 2 of 3: start all ranks"):
        rendezvous.meet(store, 0, 3, patience_s=0.4)
    assert capsys.readouterr().out.count("Waiting for ranks 1, 2 of 3.") == 1
    with pytest.raises(rendezvous.NobodyCame, match="rank 0 of 3"):
        rendezvous.meet(store, 1, 3, patience_s=0.2)


def test_nobody_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    free = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = free.port
    del free
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(rendezvous, "JOIN_S", 1.0)
    with pytest.raises(rendezvous.NobodyCame, match=rf"found nobody at 127.0.0.1:{port} within 1 s"):
        rendezvous.open_store(1, 2, timedelta(seconds=5))
