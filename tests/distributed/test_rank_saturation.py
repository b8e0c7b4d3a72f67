"""Saturated pixels of views that several ranks draw: one process's masks on all ranks, and fewer pixels on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import rank_walls
import torch
from nerfstudio.cameras.camera_optimizers import CameraOptimizerConfig
from rank_walls import LARGE, NUM_VIEWS, SMALL
from torch import Tensor

from splaxel_ns.bench.rank_job import RankJob
from splaxel_ns.cuda.saturation import pack_bits, unpack_bits
from splaxel_ns.exchange import HALO, RankRegions, covered, crop_for, dilated, grown, loss_share, whole
from splaxel_ns.saturation import SaturationMasks, ViewMask

RankPools = Callable[[int], RankJob]
EPS = 1e-4


def same(a: Any, b: Any) -> bool:
    """Whether two nested values are equal, tensors bit by bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


def error_of(chapter: dict[str, Any]) -> float:
    """How far a rank's training pictures are from those without masks, where it needs them."""
    worst = 0.0
    for picture, unmasked in zip(chapter["pictures"], chapter["whole"], strict=True):
        if picture is not None:
            crop, rgb, needed = picture
            rows, columns = slice(crop["top"], crop["bottom"]), slice(crop["left"], crop["right"])
            difference = (rgb - unmasked[rows, columns]).abs().amax(dim=-1)
            worst = max(worst, float(difference.where(needed[rows, columns], 0.0).max()))
    return worst


@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 9), (27, 55), (40, 64)])
def test_grown_pixels(height: int, width: int) -> None:
    """Squares around pixels, in bits, are those of max pooling, also at the border."""
    for seed in range(20):
        pixels = torch.rand(height, width, generator=torch.Generator().manual_seed(seed)) < 0.02
        for reach in (1, 5, 10, 20):
            pooled = torch.nn.functional.max_pool2d(pixels[None, None].float(), 2 * reach + 1, 1, reach)[0, 0]
            assert torch.equal(unpack_bits(grown(pack_bits(pixels), reach), width), pooled > 0)


def test_what_a_rank_needs_around_what_it_still_draws() -> None:
    """Far from it nothing is sent to it, and nothing of the loss is its own to count."""
    height, width = 36, 90
    spans = whole(height, width).expand(3, -1, -1).clone()
    spans[2, :, 1] = 70
    hidden = torch.zeros(2, height, width, dtype=torch.bool)
    hidden[0, :, 15:75] = True  # of rank 0, which draws on both sides of it
    hidden[1, :20] = True
    budgets = tuple(torch.zeros(int(part.sum()), dtype=torch.uint8) for part in hidden)
    mask = ViewMask(torch.eye(4), torch.eye(3), width, height, (0, 1), pack_bits(hidden), budgets, ())
    regions = RankRegions((2, 1, 0), spans, dilated(spans, HALO, width), width).without(mask)

    sent = torch.zeros(height * width, dtype=torch.bool)
    sent[regions.stream(2, 0)] = True
    expected = torch.zeros(height, width, dtype=torch.bool)
    expected[:, : 15 + HALO], expected[:, 75 - HALO : 70] = True, True
    assert torch.equal(sent.view(height, width), expected)
    assert len(regions.stream(0, 1)) == 30 * (height - 20 + HALO)

    pixels, windows = torch.zeros(height, width), torch.zeros(height - 10, width - 10)
    for rank in range(3):
        crop = crop_for(regions, rank)
        assert crop is not None
        share = loss_share(regions, rank, crop)
        assert regions.needed is not None
        needed = unpack_bits(regions.needed[rank], width) & covered(regions.needs[rank], width)
        counted = torch.zeros(height, width, dtype=torch.bool)
        crop.of(counted).copy_(share.pixels > 0)
        for y, x in share.windows.nonzero().tolist():
            counted[crop.top + y : crop.top + y + 11, crop.left + x : crop.left + x + 11] = True
            windows[crop.top + y, crop.left + x] += 1
        assert not bool((counted & ~needed).any())
        crop.of(pixels).add_(share.pixels)
    assert bool((pixels == 1).all()) and bool((windows == 1).all())


@pytest.mark.parametrize("front_side", [SMALL, LARGE])
@pytest.mark.parametrize(("num_ranks", "exchange"), [(2, "selective"), (4, "selective"), (4, "owner")])
def test_the_masks_of_one_process(ranks_of: RankPools, num_ranks: int, exchange: str, front_side: float) -> None:
    """Bits, budgets, counts, participants, loss and gradients are those of one process with a partition per rank."""
    stories = ranks_of(num_ranks).run(rank_walls.story, num_ranks, front_side, exchange)
    alone = rank_walls.story(num_ranks, front_side)
    for number, expected in enumerate(alone):
        chapters = [story[number] for story in stories]
        for chapter in chapters:
            assert same(chapter["masks"], expected["masks"]), number
            assert chapter["participants"] == expected["participants"]
            for name in ("version", "masked", "pairs", "pruned", "flipped"):
                assert chapter["counts"][name] == expected["counts"][name], (number, name)
            assert chapter["metrics"] == chapters[0]["metrics"]
            if number < 3:  # later some views still go by masks from before the wall became clear
                assert error_of(chapter) < 3 * EPS
        for name, gradient in expected["gradients"].items():
            # Round Gaussians have none in their rotations but rounding errors.
            bound = max(1e-4 * float(gradient.abs().max()), 1e-9)
            for rank, chapter in enumerate(chapters):
                difference = (chapter["gradients"][name] - gradient[expected["owner"] == rank]).abs()
                assert float(difference.max()) <= bound, (number, name)
        for view in range(NUM_VIEWS):
            losses = [chapter["losses"][view] for chapter in chapters]
            assert sum(losses) == pytest.approx(expected["losses"][view], abs=1e-5)
            assert torch.stack([chapter["decided"][view] for chapter in chapters]).sum(dim=0).eq(1).all()


@pytest.mark.parametrize("front_side", [SMALL, LARGE])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_fewer_pixels_travel_until_a_wall_becomes_clear(ranks_of: RankPools, num_ranks: int, front_side: float) -> None:
    stories = ranks_of(num_ranks).run(rank_walls.story, num_ranks, front_side)
    sent = [sum(story[number]["bytes"] for story in stories) for number in range(6)]
    masked = [chapter["counts"]["masked"] for chapter in stories[0]]
    assert masked[:4] == [0, 3, 3, 3]
    front = num_ranks - 1
    taking_part = [[story[number]["takes_part"] for story in stories] for number in range(6)]
    if front_side == LARGE:  # nothing but the wall in front is drawn or sent
        assert sent[1:4] == [0, 0, 0] and sent[0] > 0
        for number in range(1, 4):  # made clear before the last of these, the wall has nothing to show
            shows = front if number < 3 else None
            assert taking_part[number] == [[rank == shows] * NUM_VIEWS for rank in range(num_ranks)]
            assert stories[0][number]["participants"] == [{front}] * NUM_VIEWS
    else:
        assert sent[1] == sent[2] < 0.9 * sent[0]
    # Made clear before the fourth epoch: those visits find flips, the fifth draws everything again.
    assert stories[0][3]["counts"]["pruned"] > 0 and stories[0][3]["counts"]["flipped"] == 0
    flipped = stories[0][4]["counts"]
    assert flipped["flipped"] > 0.5 * flipped["pruned"] > 0
    # The wall itself has nothing to show any more, and its rank no part in the views; two ranks have nothing to swap.
    assert taking_part[4] == [[rank != front] * NUM_VIEWS for rank in range(num_ranks)]
    assert (sent[4] > 0.3 * sent[0]) == (num_ranks > 2)
    assert error_of(stories[0][4]) < 3 * EPS


def test_ranks_of_several_partitions(ranks_of: RankPools) -> None:
    """A rank's mask holds for all its partitions; all ranks have the same."""
    stories = ranks_of(2).run(rank_walls.story, 4, SMALL)
    sent = [sum(story[number]["bytes"] for story in stories) for number in range(3)]
    assert sent[1] < sent[0]
    for first, second in zip(*stories, strict=True):
        assert same(first["masks"], second["masks"]) and first["participants"] == second["participants"]
        assert first["counts"] == second["counts"]
    for chapter in (*stories[0][:3], *stories[1][:3]):
        assert error_of(chapter) < 3 * EPS


def test_dropped_on_all_ranks_at_once(ranks_of: RankPools) -> None:
    for counts in ranks_of(2).run(rank_walls.drops):
        assert counts == {
            "masked": NUM_VIEWS,
            "reset": 0,
            "after the reset": 0,
            "resolution": 0,
            "new resolution": NUM_VIEWS,
            "boxes": 0,
        }


def test_memory_is_bounded_alike(ranks_of: RankPools) -> None:
    found = ranks_of(4).run(rank_walls.bounded, 2.5)
    for part in found:
        assert 0 < part["masked"] < NUM_VIEWS and part["largest"] <= part["limit"]
        assert same(part["masks"], found[0]["masks"])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_state_continues_exactly(ranks_of: RankPools, num_ranks: int) -> None:
    """One rank's state serves all: masks, what waits, and counts; other ranks draw everything."""
    found = ranks_of(num_ranks).run(rank_walls.saved_and_continued)
    for part in found:
        assert same(part["in force"], found[0]["in force"]) and same(part["loaded"], part["in force"])
        assert same(part["then"], found[0]["then"]) and same(part["then loaded"], part["then"])
        assert same(part["state"], found[0]["state"])
        assert not same(part["then"][0], part["in force"])
    other = 4 if num_ranks == 2 else 2
    assert ranks_of(other).run(rank_walls.foreign, found[0]["state"]) == [NUM_VIEWS] * other
    alone = SaturationMasks(EPS, 2**30)
    alone.load_state_dict(found[0]["state"])
    assert alone.num_masked == 0 and alone.version == found[0]["state"]["version"]


@pytest.mark.parametrize(("how", "what"), [("budget", "masks"), ("visit", "views")])
def test_ranks_that_have_come_apart(ranks_of: RankPools, how: str, what: str) -> None:
    for said in ranks_of(2).run(rank_walls.come_apart, how):
        assert f"Ranks 0 and 1 do not have the same {what}" in said


def test_not_used_for_other_exchanges_or_moving_poses(ranks_of: RankPools) -> None:
    choices: list[dict[str, Any]] = [
        {"exchange": "dense"},
        {"exchange": "gaussian"},
        {"camera_optimizer": CameraOptimizerConfig(mode="SO3xR3")},
        {"saturation": False},
    ]
    for options in choices:
        assert ranks_of(2).run(rank_walls.not_used, options) == [(False, 0)] * 2
