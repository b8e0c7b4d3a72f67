"""Exchange `owner`, empty pixels and half precision: who composes what, and how many bytes that takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from rank_scenes import Task, draw_alone, draw_together, regions_of
from test_ranks import compare
from torch import Tensor
from torch.nn.functional import max_pool2d

from splaxel_ns.bench.rank_job import RankJob
from splaxel_ns.bench.traffic import as_selective, blocks_of_many, traffic
from splaxel_ns.exchange import HALO, RankRegions, bounding, dilated, loss_share
from splaxel_ns.model import SplaxelModelConfig
from splaxel_ns.model_checks import check_config
from splaxel_ns.owner_exchange import BLOCK, has, spread, with_owners

RankPools = Callable[[int], RankJob]


def regions_with(boxes: list[tuple[int, int, int, int]], height: int, width: int) -> RankRegions:
    """Ranks that draw rectangles: top, bottom, left, right."""
    spans = torch.zeros(len(boxes), height, 2, dtype=torch.int32)
    for rank, (top, bottom, left, right) in enumerate(boxes):
        spans[rank, top:bottom] = torch.tensor([left, right], dtype=torch.int32)
    order = tuple(rank for rank, (top, bottom, left, right) in enumerate(boxes) if bottom > top and right > left)
    return RankRegions(order, spans, dilated(spans, HALO, width), width)


def sharers_of(regions: RankRegions) -> Tensor:
    """[H, W]."""
    return torch.stack([regions.drawn_by(rank) for rank in regions.order]).sum(dim=0)


@pytest.mark.parametrize("reach", [0, 1, 5, 10])
def test_spread(reach: int) -> None:
    bits = torch.zeros(40, 33, dtype=torch.int32)
    bits[3, 4], bits[39, 32], bits[20, 0], bits[3, 9] = 1, 2, 5, 1 << 15
    found = spread(bits, reach)
    for rank in (0, 1, 2, 15):
        pooled = max_pool2d(has(bits, rank).float()[None], 2 * reach + 1, stride=1, padding=reach)[0]
        assert torch.equal(has(found, rank), pooled > 0)


MANY = [(0, 200, 0, 300), (10, 190, 0, 300), (0, 200, 60, 290), (50, 200, 0, 220), (0, 0, 0, 0), (0, 60, 250, 300)]


@pytest.mark.parametrize("boxes", [MANY, MANY[:2], MANY[4:], [(0, 0, 0, 0)] * 3])
def test_every_pixel_has_composers(boxes: list[tuple[int, int, int, int]]) -> None:
    """Of two sharers both, of more one in every block; loss and windows are counted once, where all of it is known."""
    height, width = 200, 300
    shared = regions_with(boxes, height, width)
    regions = with_owners(shared, 16)
    composers, drawn = regions.composers, regions.drawn
    assert bool(((composers & ~drawn) == 0).all()) and torch.equal(composers != 0, drawn != 0)
    one = (composers & (composers - 1)) == 0
    num = torch.stack([has(drawn, rank) for rank in range(len(boxes))]).sum(dim=0)
    assert torch.equal(composers[num <= 2], drawn[num <= 2])
    if boxes == MANY:
        assert bool(one[num >= 4].all())
        owned = [int((has(composers, rank) & one & (num >= 3)).sum()) for rank in range(4)]
        assert min(owned) > 0.1 * sum(owned)
        for y in range(0, height, BLOCK):
            for x in range(0, width, BLOCK):
                block = (slice(y, y + BLOCK), slice(x, x + BLOCK))
                whole_block = composers[block][(drawn[block] & 15) == 15]  # four ranks draw it all
                assert whole_block.numel() == 0 or bool((whole_block == whole_block[0]).all())
    pixels, windows = torch.zeros(height, width), torch.zeros(height - 10, width - 10)
    for rank in range(len(boxes)):
        crop = bounding(regions.needs[rank])
        wanted = has(regions.wanted, rank)
        assert bool(wanted.any()) == (crop is not None)
        if crop is None:
            continue
        assert int(crop.of(wanted).sum()) == int(wanted.sum())
        share = loss_share(regions, rank, crop)
        crop.of(pixels).add_(share.pixels * (crop.of(drawn) != 0))
        windows[crop.top : crop.bottom - 10, crop.left : crop.right - 10] += share.windows
        known = torch.cat([regions.halo_stream(other, rank) for other in range(len(boxes)) if other != rank])
        have = has(composers, rank).flatten()
        have[known] = True
        assert torch.equal(have.view(height, width), wanted & (drawn != 0))
    assert bool((pixels[drawn != 0] == 1).all()) and float(windows.max()) <= 1


def test_not_where_it_does_not_pay() -> None:
    """A sliver that three ranks share is swapped as in `selective`: the colours around it would cost more."""
    regions = with_owners(regions_with([(0, 200, 0, 100), (0, 200, 95, 200), (0, 200, 90, 105)], 200, 200), 16)
    assert torch.equal(regions.composers, regions.drawn)
    # Gradients stay float32: beside float16 pixels a third sharer is not enough either.
    three = regions_with([(0, 128, 0, 128)] * 3, 128, 128)
    assert not torch.equal(with_owners(three, 16).composers, with_owners(three, 16).drawn)
    assert torch.equal(with_owners(three, 8).composers, with_owners(three, 8).drawn)


@pytest.mark.parametrize(("kind", "num_ranks"), [("wide", 4), ("wide", 8), ("plain", 8), ("huge", 8)])
def test_bytes_by_sharers(kind: str, num_ranks: int) -> None:
    """Never more than `selective`; where four or more share, at most 0.6 of it."""
    shared = regions_of(Task(kind, num_ranks, boundary="filter", scale=8), num_ranks)
    owned = with_owners(shared, 16)
    before, after = traffic(as_selective(owned)), traffic(owned)
    assert torch.equal(before, traffic(shared))
    assert float(after.sum()) <= 1.0 * float(before.sum())
    many = sharers_of(shared) >= 4
    assert float(after[many].sum()) <= 0.6 * float(before[many].sum()) > 0
    found = blocks_of_many(owned)
    assert found["blocks"] > 0 and found["owner_bytes"] <= 0.6 * found["selective_bytes"]


def sent(parts: list[dict[str, Any]]) -> dict[str, int]:
    kinds = ("pixels", "halo", "pixel gradients")
    return {kind: sum(part["counters"]["bytes_sent"].get(kind, 0) for part in parts) for kind in kinds}


def test_blocks_of_several_owners(ranks_of: RankPools) -> None:
    """A view of several blocks: that of one process, and the bytes are those that the regions say."""
    task = Task("wide", num_partitions=4, exchange="owner", boundary="filter", scale=4)
    parts = ranks_of(4).run(draw_together, task)
    compare(parts, draw_alone(task), 1e-5, 1e-5, pose_noise=3.0)
    assert sum(bool(part["composed"].any()) for part in parts) == 4
    counted, regions = sent(parts), with_owners(regions_of(task, 4), 16)
    assert all(counted.values())
    messages = sum(part["counters"]["messages"] for part in parts) - 4 * 3  # those that swap the regions
    assert sum(counted.values()) == int(traffic(regions).sum()) + 16 * messages
    selective = sent(ranks_of(4).run(draw_together, replace(task, exchange="selective")))
    assert sum(counted.values()) < sum(selective.values())


@pytest.mark.parametrize("exchange", ["selective", "owner", "dense"])
@pytest.mark.parametrize("kind", ["plain", "huge"])
def test_empty_pixels_stay_at_home(ranks_of: RankPools, kind: str, exchange: str) -> None:
    """One bit for each of them: bit by bit the same picture, loss and gradients, and fewer bytes of every kind."""
    task = Task(kind, num_partitions=4, exchange=exchange, boundary="filter", scale=2)
    plain = ranks_of(4).run(draw_together, task)
    active = ranks_of(4).run(draw_together, replace(task, active=True))
    for a, b in zip(plain, active, strict=True):
        for name in ("rgb", "means", "sh", "opacities", "absgrad", "pose"):
            assert torch.equal(a[name], b[name]), name
        assert a["loss"] == b["loss"]
    before, after = sent(plain), sent(active)
    assert after["pixels"] < before["pixels"] and after["halo"] == before["halo"]
    assert after["pixel gradients"] <= before["pixel gradients"]


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("exchange", ["selective", "owner"])
def test_half_precision(ranks_of: RankPools, exchange: str, active: bool) -> None:
    """Pixels as float16: the picture within 2e-3, for half the bytes."""
    task = Task("wide", num_partitions=4, exchange=exchange, boundary="filter", active=active)
    alone = draw_alone(task)
    whole, half = (ranks_of(4).run(draw_together, replace(task, half=half)) for half in (False, True))
    worst = 0.0
    for part in half:
        if part["rgb"] is None:  # all that it draws is composed by others
            continue
        crop = part["crop"]
        expected = alone["rgb"][crop["top"] : crop["bottom"], crop["left"] : crop["right"]]
        own = part["composed"][crop["top"] : crop["bottom"], crop["left"] : crop["right"]]
        error = (part["rgb"] - expected).abs().amax(dim=-1).where(own, 0.0)
        worst = max(worst, float(error.max()))
    assert 0 < worst <= 2e-3
    assert sum(part["loss"] for part in half) == pytest.approx(alone["loss"], abs=1e-3)
    if exchange == "selective":
        assert sent(half)["pixels"] < 0.56 * sent(whole)["pixels"]
    else:
        assert sum(sent(half).values()) < 0.85 * sum(sent(whole).values())


@pytest.mark.parametrize(
    ("exchange", "option", "value", "why"),
    [
        ("gaussian", "half_pixels", True, "no pixels travel"),
        ("gaussian", "active_pixels", True, "no pixels travel"),
        ("gaussian", "num_partitions", 2, "there are no boxes"),
        ("gaussian", "boundary", "exact", "there are no boxes"),
        ("gaussian", "balance_every", 10, "there are no boxes"),
        ("selective", "placement", "kdtree", "boxes say"),
    ],
)
def test_options_without_effect_are_refused(exchange: Any, option: str, value: Any, why: str) -> None:
    config = SplaxelModelConfig(exchange=exchange)
    check_config(config)
    setattr(config, option, value)
    with pytest.raises(ValueError, match=f"{option.replace('_', '-')} is {value}.*{exchange} .*{why}.*leave it at"):
        check_config(config)
