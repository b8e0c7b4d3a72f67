"""What a GPU does in torch's and gsplat's operations, against the CPU's kernels; they run on the CPU alike."""

from __future__ import annotations

import gpu_models
import pytest
import torch
from torch import Tensor

from splaxel_ns import cuda
from splaxel_ns.cuda import _gsplat, _scene, _ssim, saturation


@pytest.fixture(autouse=True)
def gsplat_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gsplat, "functions", lambda: gpu_models.IN_TORCH)


def gaussians(num: int = 400, spread: float = 2.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Leaves: means, quats, scales, opacities; many lie outside a 61 x 45 image, some behind it."""
    generator = torch.Generator().manual_seed(num)
    means = torch.randn(num, 3, generator=generator) * torch.tensor([spread, spread, 1.0]) + torch.tensor([0.0, 0, 3])
    quats = torch.randn(num, 4, generator=generator)
    scales = torch.exp(torch.randn(num, 3, generator=generator) - 2.5)
    opacities = torch.sigmoid(2 * torch.randn(num, generator=generator))
    for leaf in (means, quats, scales, opacities):
        leaf.requires_grad_()
    return means, quats, scales, opacities


def camera() -> tuple[Tensor, Tensor]:
    angle = torch.tensor(0.2)
    viewmat = torch.eye(4)
    viewmat[0, 0] = viewmat[2, 2] = angle.cos()
    viewmat[0, 2], viewmat[2, 0] = angle.sin(), -angle.sin()
    viewmat[:3, 3] = torch.tensor([0.1, -0.2, 0.3])
    return viewmat.requires_grad_(), torch.tensor([[50.0, 0, 28], [0, 55, 25], [0, 0, 1]])


@pytest.mark.parametrize("antialiased", [False, True])
def test_projection(antialiased: bool) -> None:
    """Where both draw, values and gradients agree; where one does not, what gsplat leaves out is at the border."""
    found: list[list[Tensor]] = []
    results: list[tuple[Tensor, ...]] = []
    weights = [torch.randn(size, generator=torch.Generator().manual_seed(1)) for size in ((400, 2), 400, (400, 3), 400)]
    for project in (cuda.project, _gsplat.project):
        leaves, (viewmat, K) = gaussians(), camera()
        result = project(*leaves, viewmat, K, 61, 45, 0.2, 1e10, antialiased)
        results.append(tuple(value.detach() for value in result))
    both = (results[0][4][:, 0] > 0) & (results[1][4][:, 0] > 0)
    ours, theirs = results[0][4][:, 0] > 0, results[1][4][:, 0] > 0
    assert both.sum() > 100 and not (theirs & ~ours).any()
    for project in (cuda.project, _gsplat.project):
        leaves, (viewmat, K) = gaussians(), camera()
        result = project(*leaves, viewmat, K, 61, 45, 0.2, 1e10, antialiased)
        total = sum(
            (weight.mul(both if weight.dim() == 1 else both[:, None]) * value).sum()
            for weight, value in zip(weights, result, strict=False)
        )
        total.backward()  # type: ignore[union-attr]
        found.append([leaf.grad for leaf in (*leaves, viewmat) if leaf.grad is not None])
    for name, one, other in zip(("means2d", "depths", "conics", "opacities"), *results, strict=False):
        assert float((one - other)[both].abs().max()) <= 1e-3 * max(1.0, float(one[both].abs().max())), name
    # Extents hold for gsplat's conics: within what those differ by, and never below the CPU's by more.
    assert float(((results[0][4] - results[1][4]).abs() / results[0][4])[both].max()) < 1e-3
    for one, other in zip(*found, strict=True):
        assert float((one - other).abs().max()) <= 2e-3 * float(one.abs().max())
    # gsplat's square of 3 standard deviations misses the image, our box of up to 3.33 does not.
    means2d, _, conics, opacities, _ = (value[ours & ~theirs] for value in results[0])
    nearest = torch.minimum(means2d.clamp_min(0), torch.tensor([61.0, 45.0])) - means2d
    a, b, c = conics.unbind(1)
    largest = 0.5 * (a + c) - torch.sqrt(0.25 * (a - c) ** 2 + b * b)  # of the precision, the least eigenvalue
    assert (opacities * torch.exp(-0.5 * largest * (nearest**2).sum(1)) <= 0.0112).all()


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_harmonics(degree: int) -> None:
    generator = torch.Generator().manual_seed(degree)
    shapes = ((50, 3), (3,), (50, 1, 3), (50, 15, 3))
    visible = torch.rand(50, generator=generator) < 0.7
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    results = []
    for harmonics in (cuda.spherical_harmonics, _gsplat.spherical_harmonics):
        leaves = [value.clone().requires_grad_() for value in values]
        colors = harmonics(degree, leaves[0], leaves[1], leaves[2], leaves[3], visible)
        (colors * torch.arange(150.0).view(50, 3)).sum().backward()
        results.append([colors.detach(), *(torch.zeros_like(v) if v.grad is None else v.grad for v in leaves)])
    for one, other in zip(*results, strict=True):
        assert float((one - other).abs().max()) <= 2e-5 * max(1.0, float(one.abs().max()))
    assert not results[1][0][~visible].any()


def test_values_that_gsplat_never_wrote_harm_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, it leaves memory as it was where it culls."""
    leaves, (viewmat, K) = gaussians(), camera()

    def with_rubbish(*args: object, **kwargs: object) -> tuple[Tensor, ...]:
        radii, *values = gpu_models.IN_TORCH.fully_fused_projection(*args, **kwargs)
        seen = radii > 0
        return radii, *(
            torch.where(seen.view(*seen.shape, *[1] * (value.dim() - 2)), value, torch.nan) for value in values
        )

    monkeypatch.setattr(
        _gsplat, "functions", lambda: _gsplat.Functions(with_rubbish, gpu_models.IN_TORCH.spherical_harmonics)
    )
    results = _gsplat.project(*leaves, viewmat, K, 61, 45, 0.2, 1e10, True)
    assert all(bool(value.isfinite().all()) for value in results)
    results[3].sum().backward()
    assert leaves[3].grad is not None and bool(leaves[3].grad.isfinite().all())


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("ssim_lambda", [0.0, 0.2, 1.0])
def test_loss(share: bool, ssim_lambda: float) -> None:
    generator = torch.Generator().manual_seed(3)
    pred, gt = torch.rand(40, 50, 3, generator=generator), torch.rand(40, 50, 3, generator=generator)
    pred[:20] = gt[:20] + 0.01 * pred[:20]
    part = None
    if share:
        pixels, windows = (torch.rand(size, generator=generator) for size in ((40, 50), (30, 40)))
        part = cuda.LossShare((pixels < 0.5).float(), (windows < 0.5).float(), 90, 70)
    results = []
    for on_gpu in (False, True):
        leaf = pred.clone().requires_grad_()
        if on_gpu:
            parts = (None, None, 40, 50) if part is None else (part.pixels, part.windows, part.height, part.width)
            values = _ssim.l1_ssim(leaf, gt, ssim_lambda, *parts)
        else:
            values = cuda.l1_ssim(leaf, gt, ssim_lambda, part)
        (3 * values[0]).backward()
        assert leaf.grad is not None
        results.append([*(value.detach() for value in values), leaf.grad])
    for one, other in zip(*results, strict=True):
        assert float((one - other).abs().max()) <= 1e-5 * float(one.abs().max())


@pytest.mark.parametrize("num, parts, width, height", [(500, 3, 61, 45), (0, 2, 10, 1), (3000, 5, 300, 130)])
def test_boxes_and_spans(num: int, parts: int, width: int, height: int) -> None:
    generator = torch.Generator().manual_seed(num)
    means, scales = torch.randn(num, 3, generator=generator) * 3, torch.rand(num, 3, generator=generator)
    owner = torch.randint(0, parts, (num,), generator=generator).int()
    size = torch.tensor([width, height], dtype=torch.float32)
    means2d, extents = (torch.rand(num, 2, generator=generator) * factor for factor in (1.6 * size, 10.0))
    means2d -= 0.3 * size
    extents[::4] = 0
    if num:
        means[5], scales[7], scales[:3], extents[1] = torch.nan, torch.inf, 30.0, 500.0
    bulk, axis = cuda.bulk_boxes(means, owner, parts, 1, 0.01, 0.1)
    for one, other in zip(
        cuda.content_bounds(means, scales, owner, bulk, axis, 1.3),
        _scene.content_bounds(means, scales, owner, bulk, axis, 1.3),
        strict=True,
    ):
        assert torch.equal(one, other)
    expected = cuda.splat_spans(means2d, extents, owner, parts, width, height)
    assert torch.equal(_scene.splat_spans(means2d, extents, owner, parts, width, height), expected)


def test_saturation() -> None:
    """Bit by bit, over visits in which pairs are pruned, flip, and leave their regions."""
    generator = torch.Generator().manual_seed(0)
    count, height, width = 4, 20, 37
    slots = torch.tensor([0, -1, 1, 2], dtype=torch.int32)
    bits, budgets = torch.zeros(count, height, 5, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)
    flips = 0
    for visit in range(8):
        left = torch.randint(0, 15, (count, height), generator=generator)
        spans = torch.stack([left, torch.randint(15, 38, (count, height), generator=generator)], -1).int()
        passed = torch.rand(3, height, width, generator=generator) ** (1 if visit % 2 else 8)
        arguments = (passed, slots, spans, bits, budgets, 0.02)
        bits, budgets, counts = cuda.update_saturation(*arguments)
        found = saturation._update_on_gpu(*arguments)
        assert torch.equal(found[0], bits) and torch.equal(found[1], budgets)
        assert torch.equal(found[2], torch.stack([counts.pairs, counts.pruned, counts.flipped, counts.left], dim=1))
        flips += int(counts.flipped.sum())
    assert flips > 0
