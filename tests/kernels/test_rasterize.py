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
    max_opacity: float = 1.0,
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
    depths[count // 2 : count // 2 + 4] = depths[count // 2]  # ties
    in_camera = torch.cat([(means2d - K[:2, 2]) / K.diagonal()[:2], torch.ones(count, 1, dtype=torch.float64)], dim=1)
    means = (in_camera * depths[:, None] - viewmat[:3, 3]) @ viewmat[:3, :3]
    tree = PartitionTree.build(means.float(), num_partitions)

    angle = uniform(count, high=math.pi)
    axes = torch.stack([angle.cos(), angle.sin(), -angle.sin(), angle.cos()], dim=1).reshape(count, 2, 2)
    sigmas = torch.stack([uniform(count, low=0.6, high=largest), uniform(count, low=0.6, high=largest / 3)], dim=1)
    cov = axes.transpose(1, 2) @ torch.diag_embed(sigmas**2) @ axes
    inverse = torch.linalg.inv(cov)
    opacities = uniform(count, low=0.02, high=max_opacity)
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


def check_against_reference(scene: Scene, levels: list[str], absgrad: bool = False, **options: Any) -> cuda.RasterStats:
    """Compares values and gradients on each level; returns the counts of the last."""
    count, height = len(scene.means2d), scene.spans.shape[1]
    exact = scene.splats(torch.float64)
    if absgrad:  # one copy of means2d per pixel, so that each pixel's own gradient is seen
        per_pixel = scene.means2d.double()[:, None, None, :].expand(count, height, scene.width, 2).clone()
        exact["means2d"] = per_pixel.requires_grad_()
    *images, doubtful = scene.reference(exact, **options)
    # Pixels where rounding may rightly decide a threshold otherwise are left out of values and gradients.
    sure = ~doubtful
    assert sure.float().mean() > 0.6
    rng = torch.Generator().manual_seed(7)
    weights = [
        torch.randn(image.shape, generator=rng) * (sure[..., None] if image.ndim == 4 else sure) for image in images
    ]
    total = sum((weight.double() * image).sum() for weight, image in zip(weights, images, strict=True))
    expected = dict(zip(exact, torch.autograd.grad(total, list(exact.values())), strict=True))
    stats = None
    for level in levels:
        cuda.set_cpu_level(level)
        splats = scene.splats()
        *actual, stats = scene.render(splats, absgrad=absgrad, **options)
        for image, reference in zip(actual, images, strict=True):
            scale = max(reference.abs().max().item(), 1.0)
            mask = sure[..., None] if image.ndim == 4 else sure
            assert_close(
                image * mask, reference.detach() * mask, VALUE_TOLERANCE * scale, f"{level} image {image.ndim}"
            )
        torch.autograd.backward(actual, weights)
        for name, splat in splats.items():
            wanted = expected[name]
            if absgrad and name == "means2d":
                per_pixel = wanted.abs().sum(dim=(1, 2))
                assert_close(
                    splat.absgrad, per_pixel, GRADIENT_TOLERANCE * per_pixel.abs().max().item(), f"{level} absgrad"
                )
                wanted = wanted.sum(dim=(1, 2))
            assert splat.grad is not None
            assert_close(
                splat.grad, wanted, GRADIENT_TOLERANCE * wanted.abs().max().item(), f"{level} gradient of {name}"
            )
    assert stats is not None
    return stats


@pytest.mark.parametrize("stop", [0.0, 1e-4])
@pytest.mark.parametrize("num_partitions", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("boundary", ["filter", "exact", "none"])
def test_against_reference(boundary: str, num_partitions: int, stop: float) -> None:
    scene = make_scene(num_partitions, seed=num_partitions)
    stats = check_against_reference(scene, available_levels(), boundary=boundary, stop=stop)
    assert stats.num_splats > 0 and stats.num_pairs > stats.num_splats
    assert (stats.straddling > 0) == (num_partitions > 1)
    assert (stats.dropped_pairs > 0) == (num_partitions > 1 and boundary == "filter")
