"""composite: partial images, front to back, against a float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from splaxel_ns import cuda
from splaxel_ns.cuda import _reference_splats as reference

Composite = Callable[..., tuple[Tensor, ...]]
composite: Composite = cuda.composite


def layers(count: int, height: int, width: int, seed: int = 0) -> list[Tensor]:
    """colors, depths, transmittances, background; a fifth of the pixels opaque, a fifth untouched."""
    generator = torch.Generator().manual_seed(seed)
    transmittances = torch.rand(count, height, width, generator=generator)
    kind = torch.rand(count, height, width, generator=generator)
    transmittances = torch.where(kind < 0.2, 0.0, torch.where(kind > 0.8, 1.0, transmittances))
    colors = torch.rand(count, height, width, 3, generator=generator) * (1 - transmittances[..., None])
    depths = torch.rand(count, height, width, generator=generator) * (1 - transmittances)
    return [colors, depths, transmittances, torch.rand(3, generator=generator)]


def run(
    function: Composite, tensors: Sequence[Tensor], dtype: torch.dtype, weights: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    leaves = [tensor.to(dtype).clone().requires_grad_() for tensor in tensors]
    results = function(*leaves)
    # Without participants the reference's depth and alpha depend on nothing.
    pairs = [pair for pair in zip(results, weights, strict=True) if pair[0].requires_grad]
    torch.autograd.backward([result for result, _ in pairs], [weight.to(dtype) for _, weight in pairs])
    return results, [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def random_weights(height: int, width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(height, width, 3), (height, width), (height, width)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


# Counts of pixels below, beside and above a multiple of the block.
@pytest.mark.parametrize("size", [(1, 1), (3, 43), (37, 53)])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 16])
def test_values_and_gradients_match_float64(count: int, size: tuple[int, int]) -> None:
    tensors = layers(count, *size)
    weights = random_weights(*size)
    results, gradients = run(composite, tensors, torch.float32, weights)
    expected, expected_gradients = run(reference.composite, tensors, torch.float64, weights)
    for ours, theirs in zip(results, expected, strict=True):
        assert float((ours.double() - theirs).detach().abs().max()) < 1e-6
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        scale = float(theirs.abs().max()) if theirs.numel() else 1.0
        assert ours.numel() == 0 or float((ours.double() - theirs).detach().abs().max()) <= 1e-6 * scale


def test_without_participants_the_image_is_the_background() -> None:
    rgb, depth, alpha = composite(*layers(0, 4, 6)[:3], torch.tensor([0.1, 0.2, 0.3]))
    assert torch.equal(rgb, torch.tensor([0.1, 0.2, 0.3]).expand(4, 6, 3))
    assert bool((depth == 0).all()) and bool((alpha == 0).all())


def test_float64_reference_has_the_derivatives_of_its_values() -> None:
    leaves = [tensor.double().requires_grad_() for tensor in layers(4, 2, 3)]
    assert torch.autograd.gradcheck(reference.composite, leaves)


def test_gradient_through_one_result_only() -> None:
    tensors = layers(3, 5, 7)
    for index in range(3):
        weights = [weight if k == index else torch.zeros_like(weight) for k, weight in enumerate(random_weights(5, 7))]
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        composite(*leaves)[index].backward(weights[index].float())
        _, expected = run(reference.composite, tensors, torch.float64, weights)
        for leaf, theirs in zip(leaves, expected, strict=True):
            assert leaf.grad is not None
            assert float((leaf.grad.double() - theirs).abs().max()) < 1e-6


def test_what_lies_behind_an_opaque_layer_does_not_show() -> None:
    colors, depths, transmittances, background = layers(3, 8, 8)
    transmittances[1] = 0
    leaves = [tensor.clone().requires_grad_() for tensor in (colors, depths, transmittances, background)]
    rgb, depth, alpha = composite(*leaves)
    (rgb.sum() + depth.sum()).backward()
    assert torch.equal(alpha, torch.ones(8, 8))
    assert leaves[0].grad is not None and leaves[2].grad is not None and leaves[3].grad is not None
    assert bool((leaves[0].grad[2] == 0).all()) and bool((leaves[2].grad[2] == 0).all())
    assert bool((leaves[3].grad == 0).all())


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(4, 5, 3), r"colors must be \[Q, H, W, 3\]"),
        (1, torch.zeros(2, 4, 6), r"depths must have shape \[2, 4, 5\]"),
        (2, torch.zeros(2, 4, 5, dtype=torch.float16), "transmittances must be torch.float32"),
        (3, torch.zeros(1), r"background must have shape \[3\]"),
    ],
)
def test_refuses(position: int, value: Tensor, message: str) -> None:
    arguments = layers(2, 4, 5)
    arguments[position] = value
    with pytest.raises(ValueError, match=message):
        composite(*arguments)
