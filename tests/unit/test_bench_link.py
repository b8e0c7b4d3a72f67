"""What the benchmarks of exchanges make of their rows."""

from __future__ import annotations

import pytest

from splaxel_ns.bench.comm import crossover
from splaxel_ns.bench.link import medians, wire


def test_medians_of_turns() -> None:
    turns = [{"step_s": t, "bytes": {"pixels": 10 * t}, "boundary": "filter"} for t in (3.0, 1.0, 2.0)]
    turns[0]["bytes"]["boxes"] = 9.0  # type: ignore[index]
    found = medians(turns)
    assert found == {"step_s": 2.0, "bytes": {"pixels": 20.0, "boxes": 0.0}, "boundary": "filter"}


def test_wire() -> None:
    found = wire([{"bytes": {"a": 40, "b": 10}, "interface_bytes": 55}, {"bytes": {"a": 50}, "interface_bytes": 50}])
    assert found["counted_bytes"] == 100 and found["interface_over_counted"] == pytest.approx(1.05)


def test_crossover_between_two_numbers() -> None:
    """The baseline's bytes grow with the Gaussians: from 1/2 to 2 they cross at the geometric mean."""
    found = crossover("selective", [(100, 0.5), (400, 2.0)])
    assert found["gaussians"] == 200 and found["cheaper"] == "selective"
    assert crossover("selective", [(100, 0.1), (400, 0.4)])["gaussians"] is None
