"""Checkpoints of several ranks: whole or absent, loadable on any number of ranks, and never executed."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_shards import Boxes, load, run_config, save, train, whole_state
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp

from splaxel_ns.bench.rank_job import RankJob
from splaxel_ns.checkpoint import (
    checkpoint_steps,
    load_checkpoint,
    remove_others,
    verify_for_evaluation,
    write_checkpoint,
)
from splaxel_ns.comm import World
from splaxel_ns.gaussian_rows import GAUSSIANS, split_rows
from splaxel_ns.shard_files import checksum
from splaxel_ns.shards import own_state

RankPools = Callable[[int], RankJob]


def rows_by_position(tables: dict[str, Tensor]) -> dict[bytes, bytes]:
    """All that belongs to a Gaussian, by the bytes of its mean."""
    names = sorted(tables)
    flat = torch.cat(
        [tables[name].flatten(1) if tables[name].dim() > 1 else tables[name][:, None] for name in names], 1
    )
    keys = tables[GAUSSIANS + "means"]
    return {key.numpy().tobytes(): row.numpy().tobytes() for key, row in zip(keys, flat, strict=True)}


def compare(loaded: list[Any], expected: dict[str, Any]) -> None:
    """The ranks together hold each Gaussian once, with all that belongs to it, and each rank all the rest."""
    rest, tables = split_rows(expected)
    assert all(not isinstance(one, str) for one in loaded), loaded
    assert all(set(one[1]) == set(tables) for one in loaded)
    together = {name: torch.cat([one[1][name] for one in loaded]) for name in tables}
    assert len(together[GAUSSIANS + "means"]) == len(tables[GAUSSIANS + "means"])
    assert rows_by_position(together) == rows_by_position(tables)
    for one, _ in loaded:
        for name, value in rest["pipeline"].items():
            assert torch.equal(one["pipeline"][name], value), name
        poses = one["optimizers"]["camera_opt"]["state"][0]["exp_avg"]
        assert torch.equal(poses, rest["optimizers"]["camera_opt"]["state"][0]["exp_avg"])
        for name, optimizer in rest["optimizers"].items():
            assert one["optimizers"][name]["param_groups"] == optimizer["param_groups"]
            assert one["optimizers"][name]["state"][0].get("step") == optimizer["state"][0].get("step")
        for name in ("step", "schedulers", "datamanager", "batch_size"):
            assert one[name] == rest[name]


def load_alone(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return split_rows(own_state(load_checkpoint(path), Boxes(World())))  # type: ignore[arg-type]


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def saved(ranks: RankJob, models: Path, step: int = 7, **options: Any) -> Path:
    assert ranks.run(save, models, step, *options.values()) == [""] * ranks.size
    return models / f"step-{step:09d}.ckpt"


def test_four_ranks_save_and_any_number_loads(ranks_of: RankPools, tmp_path: Path) -> None:
    path = saved(ranks_of(4), tmp_path / "models")
    expected = whole_state(7)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["models", "shards"]
    assert [p.name for p in (tmp_path / "shards").iterdir()] == ["step-000000007"]
    compare([load_alone(path)], expected)
    for size in (2, 3, 4):
        loaded = ranks_of(size).run(load, path.parent)
        compare(loaded, expected)
        assert all(len(one[1][GAUSSIANS + "means"]) > 0 for one in loaded)
    content = torch.load(path, weights_only=True)
    assert content["version"] == 2 and sum(content["shards"]["counts"]) == 503
    assert path.stat().st_size < 100_000 < sum(size for size, _ in content["shards"]["files"].values())


def test_other_tools_read_the_shards(ranks_of: RankPools, tmp_path: Path) -> None:
    """The folder is one of torch.distributed.checkpoint, with each table as one tensor."""
    saved(ranks_of(2), tmp_path / "models")
    tables = split_rows(whole_state(7))[1]
    found = {name: torch.zeros_like(value) for name, value in tables.items()}
    with warnings.catch_warnings(action="ignore"):
        load_with_dcp(found, checkpoint_id=tmp_path / "shards" / "step-000000007", no_dist=True)
    assert rows_by_position(found) == rows_by_position(tables)


@pytest.mark.parametrize("size", [2, 4])
def test_one_process_saves_and_ranks_load(ranks_of: RankPools, tmp_path: Path, size: int) -> None:
    write_checkpoint(tmp_path / "models", 7, whole_state(7))
    compare(ranks_of(size).run(load, tmp_path / "models"), whole_state(7))


def test_ranks_that_have_seen_nothing(ranks_of: RankPools, tmp_path: Path) -> None:
    """Where a rank has no moments and statistics yet they are zero, as those that it would begin with."""
    path = saved(ranks_of(2), tmp_path / "models", fault="", faulty_rank=0, bare_rank=0)
    rest, tables = load_alone(path)
    assert float(rest["optimizers"]["quats"]["state"][0]["step"]) == 7
    num = torch.load(path, weights_only=True)["shards"]["counts"][0]
    assert 0 < num < 503
    for name in ("optimizers.quats.exp_avg", "strategy.grad2d"):
        assert float(tables[name][:num].abs().max()) == 0 < float(tables[name][num:].abs().min())


def test_ranks_without_gaussians(ranks_of: RankPools, tmp_path: Path) -> None:
    path = saved(ranks_of(4), tmp_path / "models", fault="", faulty_rank=0, bare_rank=None, away=100.0)
    assert torch.load(path, weights_only=True)["shards"]["counts"] == [503, 0, 0, 0]
    compare([load_alone(path)], whole_state(7, away=100.0))
    for size in (2, 4):
        compare(ranks_of(size).run(load, path.parent), whole_state(7, away=100.0))


def test_more_ranks_than_boxes(ranks_of: RankPools, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "models", 7, whole_state(7, num_partitions=2))
    assert all(
        "2 partitions cannot be shared out among 4 ranks" in one for one in ranks_of(4).run(load, tmp_path / "models")
    )


class Code:
    """Creates a folder when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return (os.mkdir, (str(self.marker),))


def damage(kind: str, folder: Path, marker: Path) -> None:
    shard = folder / "__1_0.distcp"
    if kind == "flipped":
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 8
        shard.write_bytes(data)
    elif kind == "truncated":
        os.truncate(shard, shard.stat().st_size - 1)
    elif kind == "gone":
        shard.unlink()
    elif kind == "no folder":
        shutil.rmtree(folder)
    elif kind == "pickle":
        (folder / ".metadata").write_bytes(pickle.dumps(Code(marker)))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("flipped", "__1_0.distcp is corrupted or foreign"),
        ("truncated", "__1_0.distcp is truncated or foreign"),
        ("gone", "__1_0.distcp cannot be read"),
        ("no folder", "step-000000007, are missing"),
        ("pickle", ".metadata is truncated or foreign"),
    ],
)
def test_damaged_shards(ranks_of: RankPools, tmp_path: Path, kind: str, message: str) -> None:
    """One clear error, in one process and on every rank; the checkpoint before is used; nothing is executed."""
    models, marker = tmp_path / "models", tmp_path / "executed"
    path = saved(ranks_of(2), models)
    damage(kind, tmp_path / "shards" / "step-000000007", marker)
    with pytest.raises(ValueError, match=f"step-000000007.ckpt is damaged.*{message}"):
        load_checkpoint(path)
    with pytest.raises(ValueError, match=message):
        verify_for_evaluation(models, None)
    errors = ranks_of(2).run(load, models)
    assert errors[0] == errors[1] and message in errors[0]
    write_checkpoint(models, 5, whole_state(5))
    compare(ranks_of(2).run(load, models), whole_state(5))
    assert not marker.exists()


def test_foreign_pickles_are_never_unpickled(ranks_of: RankPools, tmp_path: Path) -> None:
    """Also where the checksums fit."""
    models, marker = tmp_path / "models", tmp_path / "executed"
    path = saved(ranks_of(2), models)
    folder = tmp_path / "shards" / "step-000000007"
    (folder / ".metadata").write_bytes(pickle.dumps(Code(marker)))
    content = torch.load(path, weights_only=True)
    forged = dict(content["shards"])
    forged["files"] = forged["files"] | {".metadata": list(checksum(folder / ".metadata"))}
    write_checkpoint(models, 7, content | {"shards": forged})
    compare([load_alone(path)], whole_state(7))
    shard = folder / "__1_0.distcp"
    torch.save(Code(marker), shard)
    shard.write_bytes(shard.read_bytes().ljust(forged["files"][shard.name][0], b"\0"))
    forged["files"] = forged["files"] | {shard.name: list(checksum(shard))}
    write_checkpoint(models, 7, content | {"shards": forged})
    errors = ranks_of(2).run(load, models)
    assert errors[0] == errors[1] and "rank 1: The shards in" in errors[0]
    assert not marker.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"folder": "../../elsewhere"}, "no folder of shards"),
        ({"counts": [250, -1]}, "numbers of Gaussians"),
        ({"counts": [600, 600]}, "lies outside its shard"),
        ({"counts": [503]}, "it has 1 ranks"),
        ({"tables": {"x": {"dtype": "load", "row": [1]}}}, "places in its shards|described as"),
        ({"places": torch.zeros(2, 3)}, "places in its shards"),
    ],
)
def test_impossible_manifests(ranks_of: RankPools, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = saved(ranks_of(2), tmp_path / "models")
    content = torch.load(path, weights_only=True)
    write_checkpoint(path.parent, 7, content | {"shards": content["shards"] | change})
    with pytest.raises(ValueError, match=f"{path.name} is damaged.*({message})"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("fault", "rank", "message"),
    [
        ("full disk", 1, "rank 1: "),
        ("full disk", 0, "rank 0: "),
        ("unwritable", 1, "rank 1: .*__1_0.distcp"),
        ("other machine", 1, "rank 1: .*all of them share"),
        ("no commit", 0, "rank 0: .*No space left"),
    ],
)
def test_what_cannot_be_written_changes_nothing(
    ranks_of: RankPools, tmp_path: Path, fault: str, rank: int, message: str
) -> None:
    models = tmp_path / "models"
    saved(ranks_of(2), models, 3)
    before = contents(tmp_path)
    errors = ranks_of(2).run(save, models, 4, fault, rank)
    assert errors[0] == errors[1]
    with pytest.raises(OSError, match=message):
        raise OSError(errors[0])
    assert contents(tmp_path) == before
    assert sorted(p.name for p in (tmp_path / "shards").iterdir()) == ["step-000000003"]
    compare(ranks_of(2).run(load, models), whole_state(3))
    saved(ranks_of(2), models, 4)
    compare(ranks_of(2).run(load, models), whole_state(4))


def test_what_fails_after_the_commit_leaves_a_whole_checkpoint(ranks_of: RankPools, tmp_path: Path) -> None:
    errors = ranks_of(2).run(save, tmp_path / "models", 4, "late", 0)
    assert errors[0] == errors[1] and "rank 0: " in errors[0]
    compare(ranks_of(2).run(load, tmp_path / "models"), whole_state(4))


def test_the_folder_of_shards_cannot_be_made(ranks_of: RankPools, tmp_path: Path) -> None:
    (tmp_path / "shards").write_text("a file in its place")
    errors = ranks_of(2).run(save, tmp_path / "models", 4)
    assert errors[0] == errors[1] and errors[0].startswith("rank 0: ") and "shards" in errors[0]
    assert not checkpoint_steps(tmp_path / "models")


def test_old_ones_and_leftovers_go(ranks_of: RankPools, tmp_path: Path) -> None:
    models, root = tmp_path / "models", tmp_path / "shards"
    ranks = ranks_of(2)
    saved(ranks, models, 3)
    for orphan in (".step-000000002-0123456789abcdef.partial", "step-000000009", "photographs"):
        (root / orphan).mkdir()
    saved(ranks, models, 4)
    names = ["photographs", "step-000000003", "step-000000004"]
    assert sorted(p.name for p in root.iterdir()) == names
    again = saved(ranks, models, 4)  # the first one stays until the second is whole
    assert sorted(p.name for p in root.iterdir()) == [*names[:2], "step-000000004-2"]
    compare(ranks.run(load, models), whole_state(4))
    remove_others(models, keep=again)
    assert checkpoint_steps(models) == [4]
    assert sorted(p.name for p in root.iterdir()) == ["photographs", "step-000000004-2"]


@pytest.fixture(scope="module")
def run_of_two(ranks_of: RankPools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], int]:
    """A run of two ranks that grew after step 4, saved after step 5, went on and grew again: its folder, its last
    losses, its Gaussians."""
    folder = tmp_path_factory.mktemp("two")
    results = ranks_of(2).run(train, folder, range(9), False, 5)
    assert results[0][0] == results[1][0]
    return folder, results[0][0][6:], sum(num for _, num, _ in results)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_run_goes_on_as_if_uninterrupted(
    ranks_of: RankPools, run_of_two: tuple[Path, list[float], int], size: int
) -> None:
    """Losses, sizes, statistics and rates come from the checkpoint, and so the next refinement finds the same."""
    folder, losses, num = run_of_two
    results = ranks_of(size).run(train, folder, range(6, 9), True) if size > 1 else [train(folder, range(6, 9), True)]
    assert results[0][0] == pytest.approx(losses, abs=1e-6 if size == 2 else 1e-4)
    # Other ranks split with other draws, and a few Gaussians of thousands become transparent or not.
    assert sum(count for _, count, _ in results) == pytest.approx(num, abs=0 if size == 2 else 0.001 * num)
    tables = load_alone(run_config(folder).get_checkpoint_dir() / "step-000000005.ckpt")[1]
    begun = [sizes for *_, sizes in results]
    assert all(len(sizes.rows) == 1 for sizes in begun), "one row each in parameters, moments and statistics"
    assert sum(sum(sizes.rows) for sizes in begun) == len(tables[GAUSSIANS + "means"])
    assert sum(sizes.seen for sizes in begun) == float(tables["strategy.count"].sum()) > 0
    start = run_config(folder).optimizers["means"]["optimizer"].lr * 2**0.5
    assert all(sizes.rates == begun[0].rates and sizes.rates["means"] < start for sizes in begun)


def test_a_run_of_one_goes_on_with_two(ranks_of: RankPools, tmp_path: Path) -> None:
    losses, num, _ = train(tmp_path, range(9), False, 5)
    results = ranks_of(2).run(train, tmp_path, range(6, 9), True)
    assert results[0][0] == pytest.approx(losses[6:], abs=1e-4)
    assert sum(count for _, count, _ in results) == pytest.approx(num, abs=0.001 * num)


def test_evaluation_and_export_find_the_shards(run_of_two: tuple[Path, list[float], int], tmp_path: Path) -> None:
    """nerfstudio's `eval_setup` (ns-eval, ns-render, ns-viewer, ns-export) and `splaxel-export`, in one process."""
    from nerfstudio.utils.eval_utils import eval_setup

    from splaxel_ns.export import Export

    folder = tmp_path / "copy"  # it may be moved
    shutil.copytree(run_of_two[0], folder)
    config = run_config(folder)
    config.write_config()
    path = config.get_base_dir() / "config.yml"
    checkpoint = config.get_checkpoint_dir() / "step-000000005.ckpt"
    tables = load_alone(checkpoint)[1]
    _, pipeline, _, step = eval_setup(path, test_mode="inference")
    assert step == 5
    for name, value in pipeline.model.state_dict().items():
        if name.startswith("gauss_params."):
            assert torch.equal(value, tables[f"_model.{name}"]), name
    Export(path, tmp_path / "ply", check_views=0).main()
    header = (tmp_path / "ply" / "splat.ply").read_bytes()[:300]
    assert f"element vertex {len(tables[GAUSSIANS + 'means'])}".encode() in header
    shutil.rmtree(config.get_base_dir() / "shards")
    for load_it in (lambda: eval_setup(path, test_mode="inference"), lambda: Export(path, tmp_path / "ply").main()):
        with pytest.raises(ValueError, match="are missing"):
            load_it()
