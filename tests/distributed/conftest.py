"""Pools of ranks, one per rank count, started when the first test asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from rank_pool import Ranks


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[Callable[[int], Ranks]]:
    pools: dict[int, Ranks] = {}

    def get(size: int) -> Ranks:
        if size not in pools:
            pools[size] = Ranks(size)
        return pools[size]

    yield get
    for pool in pools.values():
        pool.close()
