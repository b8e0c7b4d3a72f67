"""What the benchmark of the viewer makes of a run's statistics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from splaxel_ns.bench.viewer import Viewer, Window, summary


def test_a_window_of_the_statistics(tmp_path: Path) -> None:
    """Steps count once, whatever the number of ranks; the line that is being written does not count yet."""
    stats = tmp_path / "stats.jsonl"
    lines = [json.dumps({"step": k // 2, "rank": k % 2} | ({"sent viewer": 304} if k == 6 else {})) for k in range(10)]
    stats.write_text("\n".join(lines) + '\n{"step": 5, "ra')
    assert Window.of(stats, 0, 2.0) == Window(5, 1, 2.0)
    assert Window.of(stats, len(lines[0]) - 3, 2.0) == Window(4, 1, 2.0)


def test_each_round_is_compared_with_itself() -> None:
    windows = {
        "alone": [Window(100, 0, 10.0), Window(50, 0, 10.0)],
        "still": [Window(95, 1, 10.0), Window(45, 1, 10.0)],
        "moving": [Window(90, 0, 10.0), Window(45, 0, 10.0)],
    }
    found = summary(windows)
    assert found["ratio"] == {"still": pytest.approx(0.925), "moving": pytest.approx(0.9)}
    assert found["steps_per_second"]["alone"] == pytest.approx(7.5)
    assert found["pictures"]["still"] == 2
    assert found["steps_per_picture"] == {"alone": None, "still": 70.0, "moving": None}


@pytest.mark.parametrize(("name", "value"), [("ranks", 1), ("seconds", 0.0), ("data", Path("nowhere"))])
def test_refused(tmp_path: Path, name: str, value: object) -> None:
    arguments = {"data": tmp_path, "json": tmp_path / "out.json"} | {name: value}
    with pytest.raises(ValueError, match=f"--{name}"):
        Viewer(**arguments).main()  # type: ignore[arg-type]
