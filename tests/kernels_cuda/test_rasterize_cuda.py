"""Partial rasterisation: values, gradients, ownership, stop, masks, and the lists that binning leaves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from gpu_ops import Gpu
from test_rasterize import GRADIENT_TOLERANCE, VALUE_TOLERANCE, Scene, assert_close, make_scene, weigh
from torch import Tensor

from splaxel_ns.cuda import pack_bits


class OnDevice:
    """A scene's tree on another device."""

    def __init__(self, tree: Any, device: torch.device) -> None:
        self.axis, self.threshold, self.children = (t.to(device) for t in (tree.axis, tree.threshold, tree.children))
        self.lo, self.hi = tree.lo.to(device), tree.hi.to(device)


def moved(scene: Scene, device: torch.device) -> Scene:
    values: dict[str, Any] = {f.name: getattr(scene, f.name) for f in dataclasses.fields(scene)}
    values = {name: value.to(device) if torch.is_tensor(value) else value for name, value in values.items()}
    values["tree"] = OnDevice(scene.tree, device)
    return Scene(**values)


def render(gpu: Gpu, scene: Scene, **options: Any) -> tuple[list[Tensor], dict[str, Tensor], Any]:
    """Images, leaves and statistics of the kernels."""
    there = moved(scene, gpu.device)
    splats = there.splats()
    options = {name: value.to(gpu.device) if torch.is_tensor(value) else value for name, value in options.items()}
    with gpu.ops():
        *images, stats = there.render(splats, **options)
    return images, splats, stats


def gradients(gpu: Gpu, images: list[Tensor], splats: dict[str, Tensor], weights: list[Tensor]) -> dict[str, Tensor]:
    with gpu.ops():
        torch.autograd.backward(images, [weight.to(gpu.device) for weight in weights])
    found = {}
    for name, splat in splats.items():
        assert splat.grad is not None
        found[name] = splat.grad.cpu()
    return found


def check(gpu: Gpu, scene: Scene, mask: Tensor | None = None, **options: Any) -> Any:
    """Values and gradients against the float64 reference, values and counts against the CPU op; returns the counts."""
    # A GPU's exp2 and reciprocal are good to 2 ulp, and it fuses multiplications with additions.
    tolerance, slack = (1.0, 0) if gpu.emulated else (2.0, 2)
    exact = scene.splats(torch.float64)
    *images, doubtful = scene.reference(exact, saturated=mask, **options)
    sure = ~doubtful
    assert sure.float().mean() > 0.5
    weights = weigh([image.float() for image in images], sure)
    total = torch.stack([(weight.double() * image).sum() for weight, image in zip(weights, images, strict=True)]).sum()
    expected = dict(zip(exact, torch.autograd.grad(total, list(exact.values())), strict=True))
    bits = None if mask is None else pack_bits(mask)
    with torch.no_grad():
        *on_cpu, cpu_stats = scene.render(scene.splats(), saturated=bits, **options)
    actual, splats, stats = render(gpu, scene, saturated=bits, **options)
    for image, reference, other in zip(actual, images, on_cpu, strict=True):
        here = sure[..., None] if image.ndim == 4 else sure
        bound = tolerance * VALUE_TOLERANCE * max(reference.abs().max().item(), 1.0)
        assert_close(image.detach().cpu() * here, reference.detach() * here, bound, f"image {list(image.shape)}")
        assert_close(image.detach().cpu() * here, other.double() * here, bound, f"CPU's image {list(image.shape)}")
    for name in ("num_splats", "num_pairs", "straddling"):
        assert abs(getattr(stats, name) - getattr(cpu_stats, name)) <= slack, name
    # Alphas within rounding of 1/255 may fall on either side.
    assert abs(stats.dropped_pairs - cpu_stats.dropped_pairs) <= 2 + 1e-4 * cpu_stats.dropped_pairs
    for name, gradient in gradients(gpu, actual, splats, weights).items():
        bound = tolerance * GRADIENT_TOLERANCE * expected[name].abs().max().item()
        assert_close(gradient, expected[name], bound, f"gradient {name}")
    return stats


@pytest.mark.parametrize("stop", [0.0, 1e-4])
@pytest.mark.parametrize("num_partitions", [1, 3])
@pytest.mark.parametrize("boundary", ["filter", "exact", "none"])
def test_against_reference(gpu: Gpu, boundary: str, num_partitions: int, stop: float) -> None:
    scene = make_scene(num_partitions, seed=num_partitions)
    stats = check(gpu, scene, boundary=boundary, stop=stop)
    assert stats.num_splats > 0 and stats.num_pairs > stats.num_splats
    assert (stats.straddling > 0) == (num_partitions > 1)
    assert (stats.dropped_pairs > 0) == (num_partitions > 1 and boundary == "filter")


def test_more_splats_than_a_batch_holds(gpu: Gpu) -> None:
    """Several batches of 256, stopping within some of them, and a last one that is not full."""
    scene = make_scene(2, count=1200, width=20, height=18, opacity=(0.02, 0.3), seed=31)
    check(gpu, scene, boundary="filter", stop=1e-4)
    check(gpu, scene, boundary="exact", stop=0.0)


def test_opaque_stacks_without_stop(gpu: Gpu) -> None:
    """Transmittances vanish below float32's range; gradients must neither vanish nor overflow."""
    scene = make_scene(2, count=150, width=20, height=20, opacity=(0.9, 0.998), largest=30.0, seed=3)
    check(gpu, scene, boundary="none", stop=0.0)


def test_long_thin_and_huge_splats(gpu: Gpu) -> None:
    check(gpu, make_scene(3, count=61, width=50, height=34, largest=400.0, seed=4), boundary="exact", stop=1e-4)


@pytest.mark.parametrize("boundary", ["filter", "exact"])
def test_saturated_pixels_are_left_out(gpu: Gpu, boundary: str) -> None:
    scene = make_scene(3, full_regions=True, seed=40)
    rng = torch.Generator().manual_seed(1)
    mask = torch.rand(3, 45, 61, generator=rng) < 0.3
    mask[0, :20, :40] = True  # whole tiles
    mask[1] = True  # a whole participant
    stats = check(gpu, scene, mask=mask, boundary=boundary)
    images, _, free = render(gpu, scene, boundary=boundary)
    assert stats.num_pairs < free.num_pairs
    assert not torch.equal(images[0][0].cpu(), torch.zeros(45, 61, 3))


def test_depth_without_gradient(gpu: Gpu) -> None:
    scene = make_scene(2, count=60, width=30, height=20, seed=15)
    found = []
    for with_depth in (False, True):
        images, splats, _ = render(gpu, scene)
        with gpu.ops():
            loss = images[0].sum() + images[2].sum() + (0.0 * images[1].sum() if with_depth else 0.0)
            loss.backward()
        found.append([splat.grad.cpu() for splat in splats.values() if splat.grad is not None])
    # Only the order of the sums differs.
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("num_partitions", [1, 4])
def test_absolute_gradients(gpu: Gpu, num_partitions: int) -> None:
    scene = make_scene(num_partitions, count=77, width=31, height=23, seed=20 + num_partitions)
    here = scene.splats()
    *images, _ = scene.render(here, absgrad=True, boundary="exact")
    weights = weigh([image.detach() for image in images], torch.ones(images[1].shape, dtype=torch.bool))
    torch.autograd.backward(images, weights)
    actual, splats, _ = render(gpu, scene, absgrad=True, boundary="exact")
    gradients(gpu, actual, splats, weights)
    expected = here["means2d"].absgrad  # pyright: ignore[reportAttributeAccessIssue]
    absolute = splats["means2d"].absgrad.cpu()  # pyright: ignore[reportAttributeAccessIssue]
    assert_close(absolute, expected.double(), GRADIENT_TOLERANCE * expected.max().item(), "absgrad")


@pytest.mark.parametrize("count, width, height", [(0, 21, 13), (1, 1, 1), (33, 17, 50), (150, 130, 3)])
def test_odd_sizes(gpu: Gpu, count: int, width: int, height: int) -> None:
    scene = make_scene(2, count=count, width=width, height=height, full_regions=True, seed=6)
    if count == 0:
        images, splats, stats = render(gpu, scene)
        assert not images[0].any() and bool((images[2] == 1).all()) and stats.num_pairs == 0
        found = gradients(gpu, images, splats, [torch.ones(image.shape) for image in images])
        assert all(gradient.numel() == 0 for gradient in found.values())
        return
    check(gpu, scene)


def test_nobody_takes_part(gpu: Gpu) -> None:
    scene = make_scene(2, seed=7)
    scene.order = []
    images, splats, stats = render(gpu, scene)
    assert images[0].shape == (0, 45, 61, 3) and stats.num_splats == stats.num_pairs == 0
    found = gradients(gpu, images, splats, [torch.ones(image.shape) for image in images])
    assert not any(gradient.any() for gradient in found.values())


def test_empty_regions_and_culled_splats(gpu: Gpu) -> None:
    scene = make_scene(2, seed=8)
    scene.spans[scene.order[0]] = 0
    (colors, depths, transmittances), *_ = render(gpu, scene)
    assert not colors[0].any() and not depths[0].any() and bool((transmittances[0] == 1).all())
    assert colors[1].any()
    scene.extents[:] = 0
    (colors, _, transmittances), _, stats = render(gpu, scene)
    assert stats.num_splats == 0 and not colors.any() and bool((transmittances == 1).all())


def test_not_finite_splats_harm_nobody_else(gpu: Gpu) -> None:
    scene = make_scene(2, seed=13)
    scene.means2d[3], scene.conics[5], scene.depths[7], scene.means2d[9] = torch.nan, torch.inf, torch.nan, 1e30
    images, *_ = render(gpu, scene)
    assert all(image.isfinite().float().mean() > 0.5 for image in images)


@pytest.mark.parametrize("boundary", ["none", "exact"])
def test_clipped_pairs_are_counted(gpu: Gpu, boundary: str) -> None:
    scene = make_scene(3, seed=5)
    *_, expected = scene.render(scene.splats(), boundary=boundary, count_clipped=True)
    *_, stats = render(gpu, scene, boundary=boundary, count_clipped=True)
    assert expected.clipped_pairs is not None and expected.clipped_pairs > 1000
    assert abs(stats.clipped_pairs - expected.clipped_pairs) <= 3
    assert render(gpu, scene)[2].clipped_pairs is None


def test_owner_out_of_range_is_refused(gpu: Gpu) -> None:
    scene = make_scene(2, seed=14)
    scene.owner[3] = 2
    with pytest.raises(ValueError, match="outside the 2 partitions"):
        render(gpu, scene)
