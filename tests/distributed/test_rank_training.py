"""Whole training runs on several ranks against one (design 9)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_training import config_of, report, train, train_and_diverge, train_and_miss, train_and_watch

from splaxel_ns import comm
from splaxel_ns.bench.rank_job import RankJob
from splaxel_ns.checkpoint import checkpoint_steps

RankPools = Callable[[int], RankJob]


STEPS = int(os.environ.get("SPLAXEL_TEST_STEPS", "100"))
"""Of the comparison of rank counts; 500 take 5 minutes on 2 cores."""


def test_losses_of_ranks_are_those_of_one(ranks_of: RankPools, tmp_path: Path) -> None:
    """4 partitions, batches of 4, one view order, no growth: losses over 50 steps differ by less than 1 %."""
    windows = {}
    for num_ranks in (1, 2, 4):
        runs = ranks_of(num_ranks).run(train, config_of(tmp_path / str(num_ranks), STEPS))
        losses = torch.tensor(runs[0]["losses"])
        assert all(run["losses"] == runs[0]["losses"] for run in runs), "every rank says the same"
        windows[num_ranks] = losses.view(-1, 50).mean(dim=1)
        assert losses[-20:].mean() < 0.5 * losses[:20].mean()
    for num_ranks in (2, 4):
        difference = float((windows[num_ranks] / windows[1] - 1).abs().max())
        print(f"{num_ranks} ranks, {STEPS} steps: windows differ by at most {difference:.2e}")
        assert difference < 0.01


@pytest.mark.parametrize(
    "options",
    [
        {"background_color": "random", "num_downscales": 1, "resolution_schedule": 16},
        {"camera_optimizer.mode": "SO3xR3"},
        {"use_bilateral_grid": True},
        {"strategy": "mcmc", "use_scale_regularization": True},
        {"exchange": "gaussian", "num_partitions": None, "boundary": "filter"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_on_ranks(ranks_of: RankPools, tmp_path: Path, options: dict[str, Any]) -> None:
    """Exact boundaries: losses, poses and grids are those of one rank, step by step."""
    runs = {}
    for num_ranks in (1, 2):
        config = config_of(tmp_path / str(num_ranks), 8, batch_size=3, num_partitions=2, boundary="exact")
        for name, value in options.items():
            target, _, field = name.rpartition(".")
            setattr(getattr(config.pipeline.model, target) if target else config.pipeline.model, field, value)
        runs[num_ranks] = ranks_of(num_ranks).run(train, config)
    alone, together = runs[1][0], runs[2]
    assert together[0]["losses"] == pytest.approx(alone["losses"], rel=1e-3)
    for name, expected in alone["views"].items():
        for rank in together:
            assert float((rank["views"][name] - expected).abs().max()) <= 1e-3 * float(expected.abs().max()), name


def test_growth_moves_and_balances(ranks_of: RankPools, tmp_path: Path) -> None:
    """An uneven start is balanced, growth is shared, and no Gaussian is lost or doubled on the way."""
    config = config_of(
        tmp_path,
        24,
        num_partitions=None,
        stop_split_at=10_000,
        warmup_length=10,
        refine_every=20,
        imbalance=0.5,
        balance_every=30,
        migrate_every=1,
        max_gaussians=34_000,
    )
    runs = ranks_of(2).run(train, config)
    assert runs[0]["totals"] == runs[1]["totals"]
    assert sum(run["num"] for run in runs) == runs[0]["totals"][-1] <= 34_000
    assert runs[0]["totals"][-1] > runs[0]["totals"][0]
    held = [run["num"] for run in runs]
    assert max(held) / (sum(held) / 2) - 1 <= 0.2
    for run in runs:  # everybody is at home
        low, high = run["box"]
        assert bool(((run["means"] >= low) & (run["means"] < high)).all())


def test_mcmc_shares_out_what_is_added(ranks_of: RankPools, tmp_path: Path) -> None:
    """Relocations keep the number, additions raise it by 5 % up to the cap, as on one rank."""
    options = {"strategy": "mcmc", "stop_split_at": 10_000, "warmup_length": 10, "refine_every": 20}
    totals = {}
    for num_ranks in (1, 2):
        config = config_of(tmp_path / str(num_ranks), 16, num_partitions=2, max_gs_num=33_000, **options)
        totals[num_ranks] = ranks_of(num_ranks).run(train, config)[0]["totals"]
    assert totals[1] == totals[2] and totals[1][-1] == 33_000


def test_the_viewer_is_served_between_steps(ranks_of: RankPools, tmp_path: Path) -> None:
    """A picture that a thread of rank 0 asks for while the ranks train is that of all of them; training goes on."""
    seen, other = ranks_of(2).run(train_and_watch, config_of(tmp_path, 40, num_partitions=2))
    assert len(seen["pictures"]) == 3 and not other["pictures"]
    assert seen["losses"] == other["losses"] and len(seen["losses"]) == 40
    for picture, again in zip(seen["pictures"], seen["pictures"][1:], strict=False):
        assert picture.shape == (44, 59, 3) and bool(picture.isfinite().all())
        assert float(picture.std()) > 0.01
        assert not torch.equal(picture, again), "the model has moved on"


def test_a_photograph_that_one_rank_misses_ends_all_of_them_saved(ranks_of: RankPools, tmp_path: Path) -> None:
    """All ranks name the rank and the file, the step before is saved, and the views of the failed one are to come."""
    ended = ranks_of(2).run(train_and_miss, config_of(tmp_path, 40, num_partitions=2), 5)
    assert ended[0] == ended[1]
    assert ended[0]["kind"] == "FailedTogether" and ended[0]["saved"] == 4
    assert ended[0]["said"] == "rank 1: photo.png: there is no such photograph"
    config = config_of(tmp_path, 6, num_partitions=2)
    config.resume = "auto"
    whole = ranks_of(2).run(train, config_of(tmp_path / "whole", 6, num_partitions=2))
    again = ranks_of(2).run(train, config)
    assert again[0]["losses"][0] == pytest.approx(whole[0]["losses"][5], rel=1e-5), "it goes on with the same views"


def test_statistics_that_cannot_be_written_are_refused(ranks_of: RankPools, tmp_path: Path) -> None:
    config = config_of(tmp_path, 2, num_partitions=2)
    config.pipeline.stats_file = tmp_path
    with pytest.raises(
        RuntimeError, match=r"(?s)rank 0 of 2 failed:.*stats-file .* cannot be written.*rank 1 of 2 failed:.*stats-file"
    ):
        ranks_of(2).run(train, config)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_model_that_is_not_finite_is_not_saved(ranks_of: RankPools, tmp_path: Path, num_ranks: int) -> None:
    """No loss tells, for nobody draws such Gaussians; the run ends before it replaces what can still be read."""
    config = config_of(tmp_path, 3, num_partitions=2)
    config.optimizers["scales"]["optimizer"].lr = 1e38
    with pytest.raises(RuntimeError, match=r"(?s)FloatingPointError: After step \d.*rank 0: .*scales.*nothing"):
        ranks_of(num_ranks).run(train, config)
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize("what", ["loss", "all", "one"])
def test_what_diverges_on_one_rank_ends_all(ranks_of: RankPools, tmp_path: Path, what: str) -> None:
    """With one message, at the step or when the next line is logged; checkpoints stay as they are. A few Gaussians
    that are not finite are pruned instead, as long as the model grows."""
    growth = {"stop_split_at": 10_000, "warmup_length": 10, "refine_every": 36} if what == "one" else {}
    config = config_of(tmp_path, 12, 4, num_partitions=2, **growth)
    config.steps_per_save, config.logging.steps_per_log = 5, 2
    ended = ranks_of(2).run(train_and_diverge, config, what, 6)
    assert ended[0]["said"] == ended[1]["said"] and ended[0]["kind"] == ended[1]["kind"]
    saved = checkpoint_steps(config.get_checkpoint_dir())
    if what == "one":
        assert ended[0]["said"] == "" and saved == [11]
        return
    assert ended[0]["kind"] == "FloatingPointError" and saved == [5]
    if what == "loss":
        assert "rank 1: The loss became nan at step 6, view '" in ended[0]["said"] and ended[0]["step"] == 5
    else:
        assert "After step 6 these parameters are not finite: rank 1: means" in ended[0]["said"]


def test_an_error_of_all_ranks_is_printed_once(ranks_of: RankPools) -> None:
    first, second = ranks_of(2).run(report, True)
    assert first.count("Traceback") == 1 and "no such folder" in first and second == ""
    first, second = ranks_of(2).run(report, False)
    assert "no such folder on rank 0" in first
    assert "[rank1]: ValueError: no such folder on rank 1" in second


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE='many'"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK='2'"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_ranks_set_by_hand(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(comm, "_world", None)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{message}.*torchrun"):
        comm.world()
