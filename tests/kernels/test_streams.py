"""Pixel streams on the CPU: round trips, float16, active pixels, and composition as of whole images."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from splaxel_ns import cuda


def make_layers(num_layers: int, height: int, width: int) -> list[Tensor]:
    """Colours [Q, H, W, 3], depths, transmittances [Q, H, W] and a background [3]."""
    rng = torch.Generator().manual_seed(num_layers)
    transmittances = torch.rand(num_layers, height, width, generator=rng)
    transmittances[transmittances < 0.1] = 0.0
    return [
        torch.rand(num_layers, height, width, 3, generator=rng),
        torch.rand(num_layers, height, width, generator=rng) * 5,
        transmittances,
        torch.rand(3, generator=rng),
    ]


def make_region(height: int, width: int, seed: int, empty: bool = False) -> cuda.Region:
    rng = torch.Generator().manual_seed(seed)
    spans = torch.zeros(height, 2, dtype=torch.int32)
    if not empty:
        spans[:, 0] = torch.randint(0, width // 2 + 1, (height,), generator=rng)
        spans[:, 1] = torch.randint(width // 2, width + 1, (height,), generator=rng)
        spans[spans[:, 0] >= spans[:, 1]] = 0
        spans[0] = torch.tensor([0, width])
    return cuda.Region(spans, width)


def half_step(half: bool) -> float:
    """Relative rounding of a stream's numbers."""
    return torch.finfo(torch.float16 if half else torch.float32).eps


def packed(layers: list[Tensor], region: cuda.Region, with_depth: bool = True, half: bool = False) -> Tensor:
    colors, depths, transmittances = layers
    return cuda.pack_pixels(colors, depths, transmittances, region, with_depth, half)


def covered(region: cuda.Region) -> Tensor:
    x = torch.arange(region.width)
    return (x >= region.spans[:, :1]) & (x < region.spans[:, 1:])


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("with_depth", [False, True])
def test_round_trip(with_depth: bool, half: bool) -> None:
    height, width = 13, 37
    layers = [layer[0] for layer in make_layers(1, height, width)[:3]]
    region = make_region(height, width, 1)
    inside = covered(region)
    stream = packed(layers, region, with_depth, half)
    assert stream.shape == (int(inside.sum()), 5 if with_depth else 4)
    assert torch.equal(stream[:, :3], layers[0][inside].to(stream.dtype))  # row after row, without indices
    for image, layer, empty in zip(cuda.unpack_pixels(stream, region), layers, (0.0, 0.0, 1.0), strict=True):
        here = inside if with_depth or empty or image.ndim == 3 else torch.zeros_like(inside)
        expected = torch.where(here[..., None] if image.ndim == 3 else here, layer, empty)
        torch.testing.assert_close(image, expected, rtol=half_step(half), atol=0)


def test_float16_does_not_overflow() -> None:
    layers = [torch.full((1, 1, 3), 1e9), torch.full((1, 1), 1e9), torch.zeros(1, 1)]
    region = make_region(1, 1, 0)
    assert float(packed(layers, region, half=True).max()) == torch.finfo(torch.float16).max


def test_active_pixels() -> None:
    stream = torch.rand(101, 5)
    stream[::3] = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0])
    bits, values, count = cuda.pack_active(stream)
    active = stream[:, 3] != 1
    assert int(count) == int(active.sum()) and torch.equal(values[: int(count)], stream[active])
    assert torch.equal(cuda.unpack_active(bits, values[: int(count)], 101), stream)
    with pytest.raises(ValueError, match="the bits name"):
        cuda.unpack_active(bits, values[: int(count) - 1], 101)


def test_composition_as_of_whole_images() -> None:
    height, width = 11, 29
    *layers, background = make_layers(3, height, width)
    regions = [make_region(height, width, seed) for seed in range(3)]
    stream = torch.cat([packed([each[q] for each in layers], regions[q]) for q in range(3)])
    parts = stream.split([region.num_pixels for region in regions])
    images = [cuda.unpack_pixels(part, region) for part, region in zip(parts, regions, strict=True)]
    dense = [torch.stack(parts).requires_grad_() for parts in zip(*images, strict=True)]
    leaves = [stream.requires_grad_(), background.clone().requires_grad_()]
    other = background.clone().requires_grad_()
    expected = cuda.composite(dense[0], dense[1], dense[2], other)
    results = cuda.composite_streams(leaves[0], regions, leaves[1])
    weights = [torch.randn(result.shape, generator=torch.Generator().manual_seed(1)) for result in results]
    torch.autograd.backward(list(expected), weights)
    torch.autograd.backward(list(results), weights)
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-6, atol=1e-6)
    v_colors, v_depths, v_transmittances = (leaf.grad for leaf in dense)
    assert v_colors is not None and v_depths is not None and v_transmittances is not None
    wanted = torch.cat([cuda.pack_pixels(v_colors[q], v_depths[q], v_transmittances[q], regions[q]) for q in range(3)])
    torch.testing.assert_close(leaves[0].grad, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(leaves[1].grad, other.grad, rtol=1e-5, atol=1e-6)


def test_refuses() -> None:
    region = make_region(3, 4, 0)
    with pytest.raises(ValueError, match="outside 0..4"):
        cuda.Region(torch.tensor([[0, 5]], dtype=torch.int32), 4)
    with pytest.raises(ValueError, match=r"colors must have shape \[3, 4, 3\]"):
        cuda.pack_pixels(torch.zeros(4, 3, 3), torch.zeros(3, 4), torch.zeros(3, 4), region)
    with pytest.raises(ValueError, match="the stream must be"):
        cuda.unpack_pixels(torch.zeros(2, 5), region)
    with pytest.raises(ValueError, match="at least one layer"):
        cuda.composite_streams(torch.zeros(0, 5), [], torch.zeros(3))
