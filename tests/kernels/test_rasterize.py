"""Partial rasterisation against its float64 reference: values, gradients, ownership, stop, odd sizes, determinism."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from splaxel_ns import cuda
from splaxel_ns.cuda import _reference
from splaxel_ns.partition import PartitionTree

# Float32 against float64. Values: images are sums of weights below 1 of colours up to 1. Gradients: relative to the
# largest entry of the tensor, the bound that the design sets.
VALUE_TOLERANCE = 2e-6
GRADIENT_TOLERANCE = 1e-5

GRADIENTS = ("means2d", "depths", "conics", "opacities", "colors")


@dataclass
class Scene:
    """Splats of one view, consistent with a camera and with Gaussians in the world, and a plan."""

    means2d: Tensor
    depths: Tensor
    conics: Tensor
    opacities: Tensor
    colors: Tensor
    extents: Tensor
    owner: Tensor
    means: Tensor
    viewmat: Tensor
    K: Tensor
    tree: PartitionTree
    order: list[int]
    spans: Tensor
    width: int

    def splats(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Fresh leaves of the differentiable inputs."""
        return {name: getattr(self, name).to(dtype).clone().requires_grad_() for name in GRADIENTS}

    def render(self, splats: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor, Tensor, cuda.RasterStats]:
        return cuda.rasterize_partials(
            **splats, extents=self.extents, owner=self.owner, means=self.means, viewmat=self.viewmat, K=self.K,
            tree=self.tree, order=self.order, spans=self.spans, width=self.width, **options,
        )  # fmt: skip

    def reference(self, splats: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _reference.rasterize_partials(
            **splats, extents=self.extents, owner=self.owner, viewmat=self.viewmat, K=self.K, tree=self.tree,
            order=self.order, spans=self.spans, width=self.width, **options,
        )  # fmt: skip


def make_scene(
    num_partitions: int = 1,
    count: int = 199,  # not a multiple of 16
    width: int = 61,
    height: int = 45,
    full_regions: bool = False,
    opacity: tuple[float, float] = (0.02, 1.0),
    largest: float = 9.0,  # pixels, standard deviation
    seed: int = 0,
) -> Scene:
    rng = torch.Generator().manual_seed(seed)

    def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return torch.rand(*shape, generator=rng, dtype=torch.float64) * (high - low) + low

    K = torch.tensor([[50.0, 0, width / 2 + 3], [0, 55.0, height / 2 - 2], [0, 0, 1]], dtype=torch.float64)
    rotation, _ = torch.linalg.qr(torch.randn(3, 3, generator=rng, dtype=torch.float64))
    viewmat = torch.eye(4, dtype=torch.float64)
    viewmat[:3, :3] = rotation * torch.sign(torch.linalg.det(rotation))
    viewmat[:3, 3] = uniform(3, low=-2, high=2)

    means2d = torch.stack([uniform(count, low=-6, high=width + 6), uniform(count, low=-6, high=height + 6)], dim=1)
    depths = uniform(count, low=2, high=6)
    depths[count // 2 : count // 2 + 4] = 4.0  # ties
    in_camera = torch.cat([(means2d - K[:2, 2]) / K.diagonal()[:2], torch.ones(count, 1, dtype=torch.float64)], dim=1)
    means = (in_camera * depths[:, None] - viewmat[:3, 3]) @ viewmat[:3, :3]
    tree = PartitionTree.build(means.float(), num_partitions)

    angle = uniform(count, high=math.pi)
    axes = torch.stack([angle.cos(), angle.sin(), -angle.sin(), angle.cos()], dim=1).reshape(count, 2, 2)
    sigmas = torch.stack([uniform(count, low=0.6, high=largest), uniform(count, low=0.6, high=largest / 3)], dim=1)
    cov = axes.transpose(1, 2) @ torch.diag_embed(sigmas**2) @ axes
    inverse = torch.linalg.inv(cov)
    opacities = uniform(count, low=opacity[0], high=opacity[1])
    extents = (2 * torch.log(255 * opacities))[:, None].sqrt() * cov.diagonal(dim1=1, dim2=2).sqrt()
    extents[::17] = 0  # culled
    spans = torch.zeros(num_partitions, height, 2, dtype=torch.int32)
    spans[..., 1] = width
    if not full_regions:
        spans[..., 0] = torch.randint(0, width // 2, (num_partitions, height), generator=rng)
        spans[..., 1] = torch.randint(width // 2, width + 1, (num_partitions, height), generator=rng)
        spans[:, : height // 8] = 0
    scene = Scene(
        means2d, depths, torch.stack([inverse[:, 0, 0], inverse[:, 0, 1], inverse[:, 1, 1]], dim=1), opacities,
        uniform(count, 3), extents * 1.00001, tree.locate(means.float()), means, viewmat, K, tree,
        torch.randperm(num_partitions, generator=rng).tolist(), spans, width,
    )  # fmt: skip
    floats = {
        name: value.float()
        for name, value in vars(scene).items()
        if torch.is_tensor(value) and value.is_floating_point()
    }
    return replace(scene, **floats)


def available_levels() -> list[str]:
    levels = []
    for level in ("portable", "avx2", "avx512"):
        try:
            cuda.set_cpu_level(level)
        except ValueError:
            continue
        levels.append(level)
    cuda.set_cpu_level("best")
    return levels


@pytest.fixture(autouse=True)
def best_level():
    yield
    cuda.set_cpu_level("best")


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    worst = (actual.double() - expected).abs().max().item() if expected.numel() else 0.0
    assert worst <= tolerance, f"{what}: off by {worst:.3g}, allowed {tolerance:.3g}"


def weigh(images: list[Tensor], sure: Tensor) -> list[Tensor]:
    """Random weights for a scalar of the images, zero where the reference is not sure."""
    rng = torch.Generator().manual_seed(7)
    return [
        torch.randn(image.shape, generator=rng) * (sure[..., None] if image.ndim == 4 else sure) for image in images
    ]


def check_against_reference(scene: Scene, levels: list[str], absgrad: bool = False, **options: Any) -> cuda.RasterStats:
    """Compares values and gradients on each level; returns the counts of the last."""
    exact = scene.splats(torch.float64)
    if absgrad:  # one copy of means2d per pixel, so that each pixel's own gradient is seen
        shape = (len(scene.means2d), scene.spans.shape[1], scene.width, 2)
        exact["means2d"] = scene.means2d.double()[:, None, None, :].expand(shape).clone().requires_grad_()
    *images, doubtful = scene.reference(exact, **options)
    # Pixels where rounding may rightly decide a threshold otherwise are left out of values and gradients.
    sure = ~doubtful
    assert sure.float().mean() > 0.5
    weights = weigh(images, sure)
    total = torch.stack([(weight.double() * image).sum() for weight, image in zip(weights, images, strict=True)]).sum()
    expected = dict(zip(exact, torch.autograd.grad(total, list(exact.values())), strict=True))
    if absgrad:
        expected["absgrad"] = expected["means2d"].abs().sum(dim=(1, 2))
        expected["means2d"] = expected["means2d"].sum(dim=(1, 2))
    stats = None
    for level in levels:
        cuda.set_cpu_level(level)
        splats = scene.splats()
        *actual, stats = scene.render(splats, absgrad=absgrad, **options)
        for image, reference in zip(actual, images, strict=True):
            mask = sure[..., None] if image.ndim == 4 else sure
            tolerance = VALUE_TOLERANCE * max(reference.abs().max().item(), 1.0)
            assert_close(image * mask, reference.detach() * mask, tolerance, f"{level}: image {list(image.shape)}")
        torch.autograd.backward(actual, weights)
        gradients = {name: splat.grad for name, splat in splats.items()}
        if absgrad:
            gradients["absgrad"] = splats["means2d"].absgrad  # pyright: ignore[reportAttributeAccessIssue]
        for name, gradient in gradients.items():
            assert gradient is not None
            tolerance = GRADIENT_TOLERANCE * expected[name].abs().max().item()
            assert_close(gradient, expected[name], tolerance, f"{level}: gradient {name}")
    assert stats is not None
    return stats


@pytest.mark.parametrize("stop", [0.0, 1e-4])
@pytest.mark.parametrize("num_partitions", [1, 2, 3, 8])
@pytest.mark.parametrize("boundary", ["filter", "exact", "none"])
def test_against_reference(boundary: str, num_partitions: int, stop: float) -> None:
    scene = make_scene(num_partitions, seed=num_partitions)
    stats = check_against_reference(scene, available_levels(), boundary=boundary, stop=stop)
    assert stats.num_splats > 0 and stats.num_pairs > stats.num_splats
    assert (stats.straddling > 0) == (num_partitions > 1)
    assert (stats.dropped_pairs > 0) == (num_partitions > 1 and boundary == "filter")


@pytest.mark.parametrize("num_partitions", [1, 4, 7])
def test_absolute_gradients(num_partitions: int) -> None:
    scene = make_scene(num_partitions, count=77, width=31, height=23, seed=20 + num_partitions)
    check_against_reference(scene, available_levels(), boundary="exact", stop=0.0, absgrad=True)


def test_absolute_gradients_reach_a_computed_tensor() -> None:
    scene = make_scene(2, count=50, seed=12)
    splats = scene.splats()
    splats["means2d"] = splats["means2d"] * 1.0  # as the projection's result: no leaf
    colors, *_ = scene.render(splats, absgrad=True)
    colors.sum().backward()
    absolute = splats["means2d"].absgrad  # pyright: ignore[reportAttributeAccessIssue]
    assert absolute.shape == (50, 2) and absolute.max() > 0


def test_not_finite_splats_harm_nobody_else() -> None:
    scene = make_scene(2, seed=13)
    scene.means2d[3], scene.conics[5], scene.depths[7], scene.means2d[9] = math.nan, math.inf, math.nan, 1e30
    images = scene.render(scene.splats())[:3]
    assert all(image.isfinite().float().mean() > 0.5 for image in images)


def test_opaque_stacks_without_stop() -> None:
    # Transmittances vanish below float32's range behind a few dozen opaque splats; gradients must not.
    scene = make_scene(2, count=150, width=20, height=20, opacity=(0.9, 0.998), largest=30.0, seed=3)
    check_against_reference(scene, available_levels(), boundary="none", stop=0.0)


def test_long_thin_and_huge_splats() -> None:
    scene = make_scene(3, count=61, width=50, height=34, largest=400.0, seed=4)
    # A float32 conic is the input; the long thin ones are where its evaluation could lose digits.
    check_against_reference(scene, available_levels(), boundary="exact", stop=1e-4)


@pytest.mark.parametrize("num_partitions", [2, 3, 5, 8])
def test_exact_partitions_compose_to_one(num_partitions: int) -> None:
    scene = make_scene(num_partitions, full_regions=True, seed=num_partitions)
    one = make_scene(1, full_regions=True, seed=num_partitions)
    view = scene.viewmat.double()
    scene.order = scene.tree.order((-view[:3, :3].T @ view[:3, 3]).float())
    results = []
    for each in (one, scene):
        splats = each.splats()
        colors, depths, transmittances, stats = each.render(splats, boundary="exact", stop=0.0, count_clipped=True)
        assert stats.clipped_pairs == 0
        passed = torch.cumprod(transmittances, dim=0)
        before = torch.cat([torch.ones_like(passed[:1]), passed[:-1]])
        image = torch.cat(
            [(before[..., None] * colors).sum(0), (before * depths).sum(0)[..., None], passed[-1][..., None]], -1
        )
        weights = torch.randn(image.shape, generator=torch.Generator().manual_seed(1))
        (image * weights).sum().backward()
        results.append((image.detach(), {name: splat.grad for name, splat in splats.items()}))
    (expected, expected_grads), (image, grads) = results
    # Every pair is drawn exactly once, whatever the tree: only the order of float32 roundings differs.
    assert_close(image, expected, 1e-5, "composed image")
    for name, grad in grads.items():
        assert_close(grad, expected_grads[name], GRADIENT_TOLERANCE * expected_grads[name].abs().max().item(), name)


def test_clipped_pairs_are_counted() -> None:
    scene = make_scene(3, seed=5)
    scene.order = scene.order[:2]
    scene.spans[[p for p in range(3) if p not in scene.order]] = 0  # renders nothing: all its pairs are clipped
    *_, stats = scene.render(scene.splats(), boundary="none", count_clipped=True)
    dx, dy = (_reference._pixel_centres(45, 61, torch.float64) - scene.means2d.double()[:, None, None]).unbind(-1)
    a, b, c = scene.conics.double()[:, :, None, None].unbind(1)
    alpha = scene.opacities[:, None, None] * torch.exp(-0.5 * (a * dx**2 + c * dy**2) - b * dx * dy)
    touches = (alpha >= 1 / 255) & (scene.extents[:, 0] > 0)[:, None, None]
    inside = _reference._regions(scene.spans, scene.width)[scene.owner.long()]
    wanted = (touches & ~inside).sum().item()
    assert stats.clipped_pairs is not None and wanted > 1000
    assert abs(stats.clipped_pairs - wanted) <= 2  # alphas within rounding of 1/255
    assert scene.render(scene.splats())[3].clipped_pairs is None


@pytest.mark.parametrize("count, width, height", [(0, 21, 13), (1, 1, 1), (16, 16, 16), (33, 17, 50), (150, 130, 3)])
def test_odd_sizes(count: int, width: int, height: int) -> None:
    scene = make_scene(2, count=count, width=width, height=height, full_regions=True, seed=6)
    splats = scene.splats()
    *images, stats = scene.render(splats)
    *expected, doubtful = scene.reference(scene.splats(torch.float64))
    for image, reference in zip(images, expected, strict=True):
        sure = ~doubtful[..., None] if image.ndim == 4 else ~doubtful
        assert_close(image * sure, reference.detach() * sure, 1e-5, f"image {list(image.shape)}")
    torch.stack([image.sum() for image in images]).sum().backward()
    assert all(splat.grad is not None and splat.grad.isfinite().all() for splat in splats.values())
    assert stats.num_splats <= count


def test_nobody_takes_part() -> None:
    scene = make_scene(2, seed=7)
    scene.order = []
    splats = scene.splats()
    colors, depths, transmittances, stats = scene.render(splats)
    assert colors.shape == (0, 45, 61, 3) and depths.shape == transmittances.shape == (0, 45, 61)
    assert stats.num_splats == stats.num_pairs == 0
    (colors.sum() + depths.sum() + transmittances.sum()).backward()
    assert all(splat.grad is not None and not splat.grad.any() for splat in splats.values())


def test_empty_regions_and_culled_splats() -> None:
    scene = make_scene(2, seed=8)
    scene.spans[scene.order[0]] = 0
    colors, depths, transmittances, _ = scene.render(scene.splats())
    assert not colors[0].any() and not depths[0].any() and (transmittances[0] == 1).all()
    assert colors[1].any()
    scene.extents[:] = 0
    colors, _, transmittances, stats = scene.render(scene.splats())
    assert stats.num_splats == 0 and not colors.any() and (transmittances == 1).all()


def test_same_bits_every_time_and_for_every_thread_count() -> None:
    scene = make_scene(3, count=3000, width=150, height=100, seed=9)
    threads = torch.get_num_threads()
    for level in available_levels():
        cuda.set_cpu_level(level)
        results = []
        try:
            for num_threads in (2, 2, 1, 3):
                torch.set_num_threads(num_threads)
                splats = scene.splats()
                *images, _ = scene.render(splats, boundary="exact")
                torch.autograd.backward(images, [torch.ones_like(image) for image in images])
                results.append([*images, *(splat.grad for splat in splats.values())])
        finally:
            torch.set_num_threads(threads)
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), level


def test_stop_is_inclusive() -> None:
    # Three splats over one pixel, T = 0.1, 0.01, 0.001: the second brings T to the threshold and is still blended.
    scene = make_scene(1, count=3, width=1, height=1, full_regions=True)
    scene.means2d[:] = 0.5
    scene.conics[:] = torch.tensor([0.01, 0.0, 0.01])
    scene.opacities[:] = 0.9
    scene.depths[:] = torch.tensor([3.0, 1.0, 2.0])
    scene.extents[:] = 30.0
    for level in available_levels():
        cuda.set_cpu_level(level)
        for stop, transmittance in ((0.05, 0.01), (0.2, 0.1), (0.005, 0.001), (0.0, 0.001)):
            _, _, transmittances, _ = scene.render(scene.splats(), stop=stop)
            assert transmittances.item() == pytest.approx(transmittance, rel=1e-5)


def test_equal_depths_go_by_looks() -> None:
    """All at one depth, some at one place: the same picture from Gaussians in any order, by any number of threads."""
    scene = make_scene(1, count=5000, width=20, height=18, opacity=(0.02, 0.1), seed=5)
    scene.depths[:] = 3.0
    scene.means2d[:2000] = scene.means2d[2000:4000]
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(1))
    names = (*GRADIENTS, "extents", "owner", "means")
    shuffled = replace(scene, **{name: getattr(scene, name)[order] for name in names})
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        first = scene.render(scene.splats(), boundary="none")[:3]
        torch.set_num_threads(1)
        second = shuffled.render(shuffled.splats(), boundary="none")[:3]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) and bool((first[2] < 0.5).any())


def test_reference_by_finite_differences() -> None:
    scene = make_scene(2, count=20, width=12, height=10, full_regions=True, seed=11)
    names = ("means2d", "conics", "opacities", "colors")

    def images(*values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        splats = {"depths": scene.depths.double(), **dict(zip(names, values, strict=True))}
        return scene.reference(splats, boundary="none", stop=0.0)[:3]

    values = [getattr(scene, name).double().requires_grad_() for name in names]
    # Smooth except where a perturbed alpha crosses 1/255; 1e-7 px is too small a step for that here.
    assert torch.autograd.gradcheck(images, values, eps=1e-7, atol=1e-5, rtol=1e-4, fast_mode=True)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("means2d", lambda t: t.double(), "means2d must be a float32 tensor .* got float64"),
        ("conics", lambda t: t[:-1], "conics must be a float32 tensor of shape"),
        ("owner", lambda t: t.long(), "owner must be a int32"),
        ("owner", lambda t: t + 2, "outside the 2 partitions"),
        ("extents", lambda t: t.to("meta"), "on meta; the kernels run on the CPU"),
        ("spans", lambda t: t[:1], "spans must be"),
        ("order", lambda _: [0, 0], "each once"),
        ("order", lambda _: [2], "partitions of 0..1"),
        ("width", lambda _: 0, "image is 0 x 45"),
        ("K", lambda t: -t, "focal lengths"),
    ],
)
def test_errors_name_the_value(name: str, change: Any, message: str) -> None:
    scene = make_scene(2)
    splats = {key: splat.detach() for key, splat in scene.splats().items()}
    if name in splats:
        splats[name] = change(splats[name])
    else:
        setattr(scene, name, change(getattr(scene, name)))
    with pytest.raises(ValueError, match=message):
        scene.render(splats)


def test_invalid_options() -> None:
    scene = make_scene(2)
    with pytest.raises(ValueError, match="boundary is 'soft'"):
        scene.render(scene.splats(), boundary="soft")
    with pytest.raises(ValueError, match="stop is 1"):
        scene.render(scene.splats(), stop=1.0)
    with pytest.raises(ValueError, match="not one of"):
        cuda.set_cpu_level("sse")
