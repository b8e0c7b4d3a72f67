"""Saturated pixels: the rule against a plain form of it, and what the rasteriser leaves out."""

from __future__ import annotations

import pytest
import torch
from test_rasterize import GRADIENT_TOLERANCE, VALUE_TOLERANCE, assert_close, available_levels, make_scene, weigh
from torch import Tensor

from splaxel_ns import cuda

EPS = 1e-4


def reference_update(
    transmittances: Tensor, slots: list[int], regions: Tensor, pruned: Tensor, budgets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The rule pair by pair: regions, pruned (bool) and budgets [K, H, W] -> pruned and budgets after it, and flips."""
    count, height, width = regions.shape
    after, kept, flips = torch.zeros_like(pruned), budgets.clone(), torch.zeros_like(pruned)
    eps = torch.tensor(EPS)
    for y in range(height):
        for x in range(width):
            light = torch.tensor(1.0)
            for k in range(count):
                passed = transmittances[slots[k], y, x] if slots[k] >= 0 else torch.tensor(1.0)
                if regions[k, y, x] and not pruned[k, y, x] and slots[k] >= 0 and light < eps:
                    after[k, y, x] = True
                    kept[k, y, x] = int(((light - light * passed) / eps * 255 + 0.5).clamp(max=255))
                light = light * passed
            for k in range(count):
                if not (regions[k, y, x] and pruned[k, y, x]):
                    continue
                budget = budgets[k, y, x].float() * (eps / 255)
                if light > eps and light >= budget:
                    flips[k, y, x], light = True, light - budget
                else:
                    after[k, y, x], light = True, torch.tensor(0.0)
    return after, kept, flips


def random_views(seed: int) -> tuple[Tensor, list[int], Tensor, Tensor, Tensor, Tensor]:
    """Transmittances [Q, H, W] from 1 to 1e-7, slots, spans, regions, pruned and budgets [K, H, W] of one visit."""
    rng = torch.Generator().manual_seed(seed)
    count, height, width = 5, 19, 29
    slots = [0, 1, -1, 2, 3]
    spans = torch.randint(0, width + 1, (count, height, 2), generator=rng, dtype=torch.int32)
    spans[:, :12] = torch.tensor([0, width])  # most rows of all of them
    columns = torch.arange(width)
    regions = (columns >= spans[..., :1]) & (columns < spans[..., 1:])
    pruned = (torch.rand(count, height, width, generator=rng) < 0.3) & (torch.arange(count) >= 2)[:, None, None]
    pruned[:, :3] = False  # rows without bits
    drawn = torch.tensor([k for k in range(count) if slots[k] >= 0])
    transmittances = 10 ** (-7 * torch.rand(4, height, width, generator=rng) ** 3)
    transmittances[:, 2:4] = 1.0  # rows that nothing darkens
    pruned[2:, 5:8] = True  # whole rows, behind the dark and, in one row, behind the light
    transmittances[0, 5:7], transmittances[:2, 7] = 1e-6, 0.5
    transmittances = torch.where(regions[drawn] & ~pruned[drawn], transmittances, 1.0)
    budgets = torch.randint(0, 256, (count, height, width), generator=rng).to(torch.uint8) * pruned
    return transmittances, slots, spans, regions, pruned, budgets


@pytest.mark.parametrize("seed", [0, 1])
def test_rule_against_reference(seed: int) -> None:
    transmittances, slots, spans, regions, pruned, budgets = random_views(seed)
    bits, new_budgets, counts = cuda.update_saturation(
        transmittances, torch.tensor(slots, dtype=torch.int32), spans, cuda.pack_bits(pruned), budgets[pruned], EPS
    )
    after, kept, flips = reference_update(transmittances, slots, regions, pruned, budgets)
    assert flips.any() and (after & ~pruned).any() and (after & pruned).any()  # the case holds all that can happen
    assert torch.equal(cuda.unpack_bits(bits, regions.shape[2]), after)
    # A budget of w (1 - t) in float32 may round to the neighbouring step.
    assert (new_budgets.int() - kept[after].int()).abs().max() <= 1
    assert torch.equal(counts.pairs, regions.sum(dim=(1, 2)))
    assert torch.equal(counts.pruned, (regions & pruned).sum(dim=(1, 2)))
    assert torch.equal(counts.flipped, flips.sum(dim=(1, 2)))
    assert torch.equal(counts.left, (regions & ~after).sum(dim=(1, 2)))


def test_same_for_every_thread_count() -> None:
    transmittances, slots, spans, _, pruned, budgets = random_views(3)
    threads = torch.get_num_threads()
    arguments = (torch.tensor(slots, dtype=torch.int32), spans, cuda.pack_bits(pruned), budgets[pruned], EPS)
    try:
        results = []
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(cuda.update_saturation(transmittances, *arguments))
    finally:
        torch.set_num_threads(threads)
    (bits, kept, counts), (other_bits, other_kept, other_counts) = results
    assert torch.equal(bits, other_bits) and torch.equal(kept, other_kept)
    assert torch.equal(counts.left, other_counts.left)


def test_nothing_saturated() -> None:
    spans = torch.tensor([0, 9], dtype=torch.int32).repeat(2, 5, 1)
    bits, budgets, counts = cuda.update_saturation(
        torch.full((2, 5, 9), 0.5), torch.tensor([1, 0], dtype=torch.int32), spans,
        torch.zeros(2, 5, 2, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8), EPS,
    )  # fmt: skip
    assert not bits.any() and len(budgets) == 0 and counts.left.tolist() == counts.pairs.tolist() == [45, 45]
    bits, budgets, counts = cuda.update_saturation(
        torch.zeros(0, 5, 9), torch.zeros(0, dtype=torch.int32), spans[:0], bits[:0], budgets, EPS
    )
    assert bits.shape == (0, 5, 2) and len(counts.pairs) == 0


def test_wrong_arguments() -> None:
    spans, budgets = torch.zeros(1, 5, 2, dtype=torch.int32), torch.zeros(3, dtype=torch.uint8)
    slots, bits = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 5, 2, dtype=torch.uint8)
    light = torch.ones(1, 5, 9)
    with pytest.raises(ValueError, match="3 budgets for 0 pruned"):
        cuda.update_saturation(light, slots, spans, bits, budgets, EPS)
    with pytest.raises(ValueError, match="slots"):
        cuda.update_saturation(light, slots + 1, spans, bits, budgets[:0], EPS)
    with pytest.raises(ValueError, match="bits must be a uint8"):
        cuda.update_saturation(light, slots, spans, bits[:, :4], budgets[:0], EPS)
    with pytest.raises(ValueError, match="eps"):
        cuda.update_saturation(light, slots, spans, bits, budgets[:0], 0.0)


@pytest.mark.parametrize("width", [1, 8, 13, 64])
def test_bits_round_trip(width: int) -> None:
    pixels = torch.rand(3, 5, width, generator=torch.Generator().manual_seed(width)) < 0.5
    bits = cuda.pack_bits(pixels)
    assert bits.shape == (3, 5, (width + 7) // 8) and torch.equal(cuda.unpack_bits(bits, width), pixels)


@pytest.mark.parametrize("boundary", ["filter", "exact", "none"])
def test_saturated_pixels_are_not_drawn(boundary: str) -> None:
    scene = make_scene(4, seed=31)
    saturated = torch.rand(4, 45, 61, generator=torch.Generator().manual_seed(5)) < 0.4
    saturated[:, 16:32, 16:32] = True  # a whole tile
    saturated[2] = True  # a whole participant
    exact = scene.splats(torch.float64)
    *images, doubtful = scene.reference(exact, boundary=boundary, saturated=saturated)
    weights = weigh(images, ~doubtful)
    expected = torch.autograd.grad(images, list(exact.values()), [weight.double() for weight in weights])
    for level in available_levels():
        cuda.set_cpu_level(level)
        splats = scene.splats()
        *actual, _ = scene.render(splats, boundary=boundary, saturated=cuda.pack_bits(saturated))
        for image, reference in zip(actual, images, strict=True):
            sure = ~doubtful[..., None] if image.ndim == 4 else ~doubtful
            assert_close(image * sure, reference.detach() * sure, VALUE_TOLERANCE * 6, f"{level}: image")
        colors, depths, transmittances = actual
        assert not colors[saturated].any() and not depths[saturated].any() and (transmittances[saturated] == 1).all()
        torch.autograd.backward(actual, weights)
        for (name, splat), reference in zip(splats.items(), expected, strict=True):
            assert splat.grad is not None
            assert_close(splat.grad, reference, GRADIENT_TOLERANCE * reference.abs().max().item(), f"{level}: {name}")


def test_saturated_tiles_cost_no_pairs() -> None:
    scene = make_scene(3, seed=32)
    plain = scene.render(scene.splats())[3]
    nothing = torch.zeros(3, 45, 8, dtype=torch.uint8)
    assert scene.render(scene.splats(), saturated=nothing)[3] == plain
    alone = [scene.render(scene.splats(), saturated=nothing | mask)[3].num_pairs for mask in _all_but_one(3)]
    assert all(0 < pairs < plain.num_pairs for pairs in alone) and sum(alone) == plain.num_pairs
    assert scene.render(scene.splats(), saturated=nothing | 255)[3].num_pairs == 0
    half = torch.zeros(3, 45, 61, dtype=torch.bool)
    half[:, :, 32:] = True
    assert scene.render(scene.splats(), saturated=cuda.pack_bits(half))[3].num_pairs < plain.num_pairs


def test_filter_goes_by_the_regions() -> None:
    # Saturating the other partitions changes nothing in one partition's image: pairs it gave up stay given up.
    scene = make_scene(3, seed=33)
    images = scene.render(scene.splats(), boundary="filter")
    for index, mask in enumerate(_all_but_one(3)):
        alone = scene.render(scene.splats(), boundary="filter", saturated=mask.expand(3, 45, 8).contiguous())
        assert all(torch.equal(image[index], other[index]) for image, other in zip(images[:3], alone[:3], strict=True))


def test_wrong_mask() -> None:
    scene = make_scene(2, seed=34)
    with pytest.raises(ValueError, match=r"saturated must be a uint8 tensor of shape \[2, 45, 8\]"):
        scene.render(scene.splats(), saturated=torch.zeros(2, 45, 61, dtype=torch.uint8))


def _all_but_one(count: int) -> list[Tensor]:
    masks = torch.full((count, count, 1, 1), 255, dtype=torch.uint8)
    for index in range(count):
        masks[index, index] = 0
    return list(masks)
