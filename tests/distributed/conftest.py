"""Pools of ranks, one per rank count, started when the first test asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from splaxel_ns.bench.rank_job import RankJob

PATIENCE_S = 240.0
"""A rank that has not answered by then hangs."""


class Ranks(RankJob):
    """Ranks that stay for a whole test session and run what a test asks of all of them at once."""

    def run(self, function: Callable[..., Any], *args: Any, patience_s: float | None = PATIENCE_S) -> list[Any]:
        return super().run(function, *args, patience_s=patience_s)


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[Callable[[int], RankJob]]:
    pools: dict[int, Ranks] = {}

    def get(size: int) -> Ranks:
        if size not in pools or not pools[size].alive:
            pools[size] = Ranks(size)
        return pools[size]

    yield get
    for pool in pools.values():
        pool.close()
