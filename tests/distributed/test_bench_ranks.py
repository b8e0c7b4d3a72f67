"""The ranks of the benchmarks: the same Gaussians and views whatever is measured beside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from splaxel_ns.bench.rank_job import RankJob
from splaxel_ns.bench.rank_run import RunSettings, measure_in_turns

SCENE = Path(__file__).parent.parent / "data/matrixcity_caliterra/small_city/aerial"


def test_depths_in_turns(ranks_of: Callable[[int], RankJob]) -> None:
    """Views in flight change when ranks wait, not what they send."""
    settings = [RunSettings(SCENE, "selective", 4, scale=0.25, in_flight=depth) for depth in (1, 3)]
    parts = ranks_of(2).run(measure_in_turns, settings, 2, 1, "lo")
    for part in parts:
        assert set(part) == {("selective", 1), ("selective", 3)}
        one, three = part["selective", 1], part["selective", 3]
        assert [turn["bytes"]["pixels"] for turn in one] == [turn["bytes"]["pixels"] for turn in three]
        assert all(turn["bytes"]["pixels"] > 0 and turn["wait_s"] > 0 for turn in [*one, *three])
