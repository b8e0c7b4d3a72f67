"""The ranks of the benchmarks: the same Gaussians and views whatever is measured beside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from splaxel_ns.bench.comm import summary
from splaxel_ns.bench.rank_job import RankJob
from splaxel_ns.bench.rank_run import RunSettings, measure, measure_in_turns

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


@pytest.mark.parametrize("mode", ["owner", "selective+saturation"])
def test_what_rows_say_beside(ranks_of: Callable[[int], RankJob], mode: str) -> None:
    """Blocks that four ranks share, in bytes of both exchanges; what a snapshot takes, and how many steps it serves."""
    settings = RunSettings(SCENE, mode, 4, scale=0.25)
    row = summary(settings, ranks_of(4).run(measure, settings, 1), 1)
    if mode == "owner":
        shared = row["blocks_of_4_or_more"]
        assert shared["blocks"] > 0
        # How much less is for test_owner.py: an image of a few blocks is mostly halo.
        assert 0 < shared["owner_bytes"] < shared["selective_bytes"]
        assert shared["ratio"] == pytest.approx(shared["owner_bytes"] / shared["selective_bytes"])
        assert "snapshot" not in row
    else:
        snapshot = row["snapshot"]
        assert (snapshot["views"], snapshot["steps"]) == (4, 1) and snapshot["bytes"] > 0
        assert row["snapshot_bytes_per_image"] == snapshot["bytes"] / 4
        assert snapshot["held_bytes_per_rank"] == 0  # seed points are not opaque: nothing is hidden
        assert "blocks_of_4_or_more" not in row
