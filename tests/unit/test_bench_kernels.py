"""The kernel benchmark: its scenes are what they claim, its torch renderer draws what the kernels draw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from splaxel_ns import cuda
from splaxel_ns.bench import kernels, kernels_reference, results
from splaxel_ns.cuda import _reference_splats as splats


def test_scene_is_as_described() -> None:
    scene = kernels.make_scene(20_000, 256, 192)
    means, quats, scales, opacities, *_ = scene.activated()
    *_, conics, _, extents = cuda.project(
        means, quats, scales, opacities, scene.viewmat, scene.K, scene.width, scene.height, 0.01, 1e10
    )
    seen = extents[:, 0] > 0
    assert 0.81 <= float(seen.float().mean()) <= 0.89
    major = 3.0 * scales.amax(dim=1) / means[:, 2] * scene.width  # pixels
    assert 5.9 < float(major.min()) and float(major.max()) < 10.1
    assert bool((scales.amin(dim=1) >= 0.249 * scales.amax(dim=1)).all())
    logits = scene.params[3]
    assert abs(float(logits.mean()) + 1.0) < 0.05 and abs(float(logits.std()) - 1.5) < 0.05


def test_torch_renderer_draws_what_the_kernels_draw() -> None:
    scene = kernels.make_scene(400, 40, 24, seed=3)  # tiles at the right and lower edge are not whole
    iteration = kernels.Iteration(scene)
    means, quats, scales, opacities, sh0, shN = scene.activated()
    *parts, extents = splats.project(means, quats, scales, opacities, scene.viewmat, scene.K, 40, 24, 0.01, 1e10)
    colors = splats.spherical_harmonics(3, means, torch.zeros(3), sh0, shN, extents[:, 0] > 0)
    (ours, _, _), stats = iteration.draw([*parts, colors, extents], means)
    listed, counts = kernels_reference.tile_lists(parts[0], extents, parts[1], 40, 24)
    assert len(listed) == int(counts.sum()) and abs(len(listed) - stats.num_pairs) <= 3  # extents of ours have a slack
    pairs = torch.cat([parts[0], parts[2], parts[3][:, None], colors], dim=1)[listed]
    begin = 0
    for tile, count in enumerate(counts.tolist()):
        y, x = tile // 3 * 16, tile % 3 * 16
        expected = ours[0, y : y + 16, x : x + 16].reshape(-1, 3)
        drawn = kernels_reference.draw_tile(pairs[begin : begin + count], tile, 40, 24)
        torch.testing.assert_close(drawn, expected, rtol=0, atol=1e-3)  # the kernels stop at T <= 1e-4
        begin += count


def test_result_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.SIZES, "a", (500, 48, 32))
    command = kernels.Kernels(tmp_path / "out.json", sizes=("a",), seconds=0.0, threads=1, reference_pairs=400)
    command.main()
    result = json.loads((tmp_path / "out.json").read_text())
    (row,) = result["rows"]
    assert row["gaussians"] == 500 and row["image"] == [48, 32] and row["pairs"] > 100
    assert row["iteration_ms"] > 0 and row["ratio_to_reference"] > 0 and 0 < row["reference_share"] <= 1
    stages = row["levels"][result["levels"][0]]["stages"]
    parts = {
        *("activation", "project_and_sh", "sort_and_bin", "raster_forward", "composite", "loss"),
        *("composite_backward", "raster_backward", "gradients_and_adam"),
    }
    assert {*parts, "iteration", "project", "sh", "forward_backward"} == set(stages)
    assert sum(stages[part]["median"] for part in parts) <= 1.5 * stages["iteration"]["median"]
    assert torch.get_num_threads() >= 1 and isinstance(result["cpu_features"], list)


def test_results_name_the_commit_of_their_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = iter(("first", "second"))
    monkeypatch.setattr(results, "provenance", lambda: {"commit": next(commits)})
    file = results.ResultFile(tmp_path / "new" / "out.json")
    for count in (1, 2):
        file.write({"count": count})
        assert json.loads((tmp_path / "new" / "out.json").read_text()) == {"commit": "first", "count": count}


def test_unknown_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no z"):
        kernels.Kernels(tmp_path / "out.json", sizes=("z",)).main()


def test_spread() -> None:
    assert kernels.spread([4.0]) == {"median": 4.0, "low": 4.0, "high": 4.0}
    assert kernels.spread([1.0, 2.0, 3.0, 4.0, 5.0])["median"] == 3.0
    calls: list[int] = []
    assert kernels.timed(lambda: calls.append(0), 0.0, 3) == 3 == len(calls)
