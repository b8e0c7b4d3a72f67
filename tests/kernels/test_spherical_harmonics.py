"""spherical_harmonics: values and gradients against a float64 reference and gsplat's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from splaxel_ns import cuda
from splaxel_ns.cuda import _reference_splats as reference

Harmonics = Callable[..., Tensor]
spherical_harmonics: Harmonics = cuda.spherical_harmonics


def inputs(count: int, bases: int = 16, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """means, cam_center, sh0, shN; and which are visible. A third of the colours is clamped."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(count, 3), (3,), (count, 1, 3), (count, bases - 1, 3)]
    tensors = [torch.randn(*shape, generator=generator) for shape in shapes]
    return tensors, torch.rand(count, generator=generator) > 0.3


def run(
    function: Harmonics, degree: int, tensors: Sequence[Tensor], visible: Tensor, dtype: torch.dtype, weights: Tensor
) -> tuple[Tensor, list[Tensor]]:
    leaves = [tensor.to(dtype).clone().requires_grad_() for tensor in tensors]
    colors = function(degree, *leaves, visible)
    (colors * weights.to(dtype)).sum().backward()
    return colors, [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def error(ours: Tensor, expected: Tensor) -> float:
    return float((ours.double() - expected).detach().abs().max() / expected.detach().abs().max().clamp_min(1e-30))


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
@pytest.mark.parametrize(("count", "bases"), [(1, 16), (300, 16), (128, 25)])
def test_values_and_gradients_match_float64(degree: int, count: int, bases: int) -> None:
    tensors, visible = inputs(count, bases)
    visible[0] = True
    weights = torch.randn(count, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    colors, gradients = run(spherical_harmonics, degree, tensors, visible, torch.float32, weights)
    expected, expected_gradients = run(reference.spherical_harmonics, degree, tensors, visible, torch.float64, weights)
    assert error(colors, expected) < 1e-6
    assert bool((colors[~visible] == 0).all())
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert error(ours, theirs) < 1e-5
    assert bool((gradients[3][:, (degree + 1) ** 2 - 1 :] == 0).all())


def test_only_the_bases_of_the_degree_need_to_be_stored() -> None:
    tensors, visible = inputs(50, bases=1)
    colors, gradients = run(spherical_harmonics, 0, tensors, visible, torch.float32, torch.ones(50, 3))
    assert torch.allclose(colors[visible], (0.5 + 0.2820947917738781 * tensors[2][visible, 0]).clamp_min(0))
    assert list(gradients[3].shape) == [50, 0, 3]


def test_float64_reference_has_the_derivatives_of_its_values() -> None:
    tensors, _ = inputs(5)
    leaves = [tensor.double().requires_grad_() for tensor in tensors]
    visible = torch.tensor([True, True, False, True, True])

    def harmonics(means: Tensor, cam_center: Tensor, sh0: Tensor, rest: Tensor) -> Tensor:
        return reference.spherical_harmonics(3, means, cam_center, sh0, rest, visible)

    assert torch.autograd.gradcheck(harmonics, leaves)


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_agrees_with_gsplat(degree: int) -> None:
    torch_impl = pytest.importorskip("gsplat.cuda._torch_impl")
    tensors, _ = inputs(200)
    means, center, sh0, rest = (tensor.double() for tensor in tensors)
    ours = spherical_harmonics(degree, *tensors, torch.ones(200, dtype=torch.bool))
    theirs = torch_impl._spherical_harmonics(degree, means - center, torch.cat([sh0, rest], 1)) + 0.5
    assert error(ours, theirs.clamp_min(0)) < 1e-6


def test_black_gaussians_can_brighten() -> None:
    # 0.5 + C0 sh0 is exactly zero or rounds to it; torch.clamp_min passes the gradient there.
    sh0 = torch.zeros(1, 1, 3, requires_grad=True)
    with torch.no_grad():
        sh0.fill_(-0.5 / 0.2820947917738781)
        sh0 += 1e-7
    visible = torch.ones(1, dtype=torch.bool)
    colors = spherical_harmonics(0, torch.ones(1, 3), torch.zeros(3), sh0, torch.zeros(1, 15, 3), visible)
    colors.sum().backward()
    assert float(colors.detach().abs().max()) < 1e-6
    assert sh0.grad is not None and float(sh0.grad.min()) == pytest.approx(0.2820948)


def test_invisible_gaussians_are_not_read() -> None:
    tensors, visible = inputs(130)
    visible[:] = True
    visible[::5] = False
    for tensor in (tensors[0], tensors[2], tensors[3]):
        tensor[~visible] = math.nan
    weights = torch.ones(130, 3)
    weights[~visible] = math.nan
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    colors = spherical_harmonics(3, *leaves, visible)
    colors.backward(weights)
    assert bool(torch.isfinite(colors).all())
    for leaf in leaves:
        assert leaf.grad is not None and bool(torch.isfinite(leaf.grad).all())


def test_mean_at_the_camera() -> None:
    tensors, visible = inputs(1)
    visible[:] = True
    tensors[1] = tensors[0][0].clone()
    _, gradients = run(spherical_harmonics, 3, tensors, visible, torch.float32, torch.ones(1, 3))
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def test_no_gaussians() -> None:
    tensors, visible = inputs(0)
    colors, gradients = run(spherical_harmonics, 3, tensors, visible, torch.float32, torch.zeros(0, 3))
    assert list(colors.shape) == [0, 3]
    assert bool((gradients[1] == 0).all())


@pytest.mark.parametrize(
    ("degree", "changes", "message"),
    [
        (4, {}, "degree 0 to 3"),
        (3, {3: torch.zeros(3, 8, 3)}, "K - 1 >= 15"),
        (1, {2: torch.zeros(3, 3)}, r"sh0 must have shape \[3, 1, 3\]"),
        (1, {4: torch.zeros(3)}, "visible must be torch.bool"),
    ],
)
def test_refuses(degree: int, changes: dict[int, Tensor], message: str) -> None:
    arguments = [torch.zeros(3, 3), torch.zeros(3), torch.zeros(3, 1, 3), torch.zeros(3, 15, 3), torch.ones(3) > 0]
    for position, value in changes.items():
        arguments[position] = value
    with pytest.raises(ValueError, match=message):
        spherical_harmonics(degree, *arguments)


@pytest.mark.parametrize("degree", [0, 3])
def test_what_is_not_finite_is_not_hidden(degree: int) -> None:
    """A coefficient that is NaN gives a colour that is NaN, not black: training must notice."""
    sh0, shN = torch.zeros(40, 1, 3), torch.zeros(40, 15, 3)
    sh0[7, 0, 1] = float("nan")
    seen = torch.ones(40, dtype=torch.bool)
    colors = cuda.spherical_harmonics(degree, torch.rand(40, 3), torch.zeros(3), sh0, shN, seen)
    assert bool(colors[7, 1].isnan()) and bool(colors[torch.arange(40) != 7].isfinite().all())
