"""Composition of partial images alone: against the definition in float64, and its edge cases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import splaxel_ns
from splaxel_ns.compositing import compose, expected_depth
from splaxel_ns.types import PartialImages


def definition(colors: Tensor, transmittances: Tensor, background: Tensor) -> Tensor:
    """C = sum_k W_k C_k + W_{P+1} background (design 2)."""
    through = torch.ones_like(transmittances[0]) if len(transmittances) else torch.ones(1, 1, dtype=colors.dtype)
    image = torch.zeros_like(colors[0])
    for color, transmittance in zip(colors, transmittances, strict=True):
        image = image + through[..., None] * color
        through = through * transmittance
    return image + through[..., None] * background


@pytest.mark.parametrize("num_partials", [1, 2, 7, 16])
def test_values_and_gradients(num_partials: int) -> None:
    """Exact to 1e-6: at most 16 products and sums of numbers up to 1 in float32."""
    torch.manual_seed(num_partials)
    shape = (num_partials, 13, 9)
    inputs = [torch.rand(*shape, 3), torch.rand(shape), torch.rand(3)]
    inputs[1][:, 0] = 0.0  # nothing shines through: the definition divides nowhere, nor must we
    weight = torch.rand(13, 9, 3)
    singles = [t.clone().requires_grad_() for t in inputs]
    doubles = [t.double().requires_grad_() for t in inputs]
    image = splaxel_ns.composite(*singles)
    reference = definition(*doubles)
    torch.testing.assert_close(image.double(), reference, rtol=0, atol=1e-6)
    (image * weight).sum().backward()
    (reference * weight).sum().backward()
    for single, double in zip(singles, doubles, strict=True):
        assert single.grad is not None and double.grad is not None
        bound = 1e-6 * max(1.0, float(double.grad.abs().max()))
        torch.testing.assert_close(single.grad.double(), double.grad, rtol=0, atol=bound)


def test_grouping_does_not_matter() -> None:
    """Composing a contiguous run first gives the same image: what lets a rank send one partial image for several."""
    torch.manual_seed(0)
    colors, transmittances = torch.rand(4, 5, 6, 3), torch.rand(4, 5, 6)
    depths, background, black = torch.rand(4, 5, 6), torch.rand(3), torch.zeros(3)
    whole = compose(PartialImages(colors, depths, transmittances), background)
    halves = [compose(PartialImages(colors[s], depths[s], transmittances[s]), black) for s in (slice(2), slice(2, 4))]
    rgb, depth, alpha = (torch.stack(parts) for parts in zip(*halves, strict=True))
    for a, b in zip(compose(PartialImages(rgb, depth, 1 - alpha), background), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_nobody_takes_part() -> None:
    background = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
    image = splaxel_ns.composite(torch.zeros(0, 4, 5, 3), torch.zeros(0, 4, 5), background)
    torch.testing.assert_close(image, background.detach().expand(4, 5, 3))
    image.sum().backward()
    assert background.grad is not None and background.grad.tolist() == [20.0] * 3


def test_expected_depth_is_finite_where_nothing_is() -> None:
    torch.testing.assert_close(
        expected_depth(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 0.5]])), torch.tensor([[0.0, 2.0]])
    )


@pytest.mark.parametrize(
    ("shapes", "name"),
    [
        (((2, 4, 5), (2, 4, 5), (3,)), "colors"),
        (((2, 4, 5, 3), (2, 4, 6), (3,)), "transmittances"),
        (((2, 4, 5, 3), (2, 4, 5), (4,)), "background"),
    ],
)
def test_shapes_are_checked(shapes, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        splaxel_ns.composite(*(torch.zeros(shape) for shape in shapes))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("colors", [[0.0]], "colors must be a tensor, not list"),
        ("colors", torch.zeros(2, 4, 5, 3, dtype=torch.float64), "colors must be float32"),
        ("transmittances", torch.zeros(2, 4, 5, dtype=torch.float64), "transmittances must be float32"),
        ("background", None, "background must be a tensor, not NoneType"),
        ("background", torch.tensor([0.0, float("nan"), 0.0]), "background must be finite"),
    ],
)
def test_types_are_checked(name: str, value: object, message: str) -> None:
    arguments = {
        "colors": torch.zeros(2, 4, 5, 3),
        "transmittances": torch.zeros(2, 4, 5),
        "background": torch.zeros(3),
        name: value,
    }
    with pytest.raises(ValueError, match=message):
        splaxel_ns.composite(**arguments)  # type: ignore[arg-type]
