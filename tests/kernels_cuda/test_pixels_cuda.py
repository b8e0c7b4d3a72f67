"""Composition of images and of streams, packing and unpacking, and Adam on rows."""

from __future__ import annotations

import pytest
import torch
from gpu_ops import Gpu
from test_streams import make_layers, make_region, packed
from torch import Tensor

from splaxel_ns import cuda
from splaxel_ns.cuda import _reference_splats as reference


def weighted(results: tuple[Tensor, ...], device: torch.device) -> Tensor:
    rng = torch.Generator().manual_seed(5)
    parts = [(result * torch.randn(result.shape, generator=rng).to(result).to(device)).sum() for result in results]
    return torch.stack(parts).sum()


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """To a few roundings in float32 of the largest number."""
    if expected.numel():
        scale = max(float(expected.detach().abs().max()), 1.0)
        assert float((actual.detach().cpu().double() - expected.detach().double()).abs().max()) < 2e-6 * scale


@pytest.mark.parametrize("num_layers, height, width", [(0, 5, 7), (1, 1, 1), (3, 19, 23), (8, 16, 16), (21, 9, 30)])
def test_composite(gpu: Gpu, num_layers: int, height: int, width: int) -> None:
    layers = make_layers(num_layers, height, width)
    exact = [layer.double().requires_grad_() for layer in layers]
    expected = reference.composite(*exact)
    weighted(expected, torch.device("cpu")).backward()
    there = [layer.to(gpu.device).requires_grad_() for layer in layers]
    on_cpu = cuda.composite(*layers)
    with gpu.ops():
        results = cuda.composite(*there)
        weighted(results, gpu.device).backward()
    for result, wanted, other in zip(results, expected, on_cpu, strict=True):
        assert_close(result, wanted)
        assert_close(result, other)
    for leaf, wanted in zip(there, exact, strict=True):
        assert leaf.grad is not None
        if wanted.numel():
            assert wanted.grad is not None
            assert_close(leaf.grad, wanted.grad)


def test_too_many_layers_are_refused(gpu: Gpu) -> None:
    colors, depths, transmittances, background = (layer.to(gpu.device) for layer in make_layers(65, 2, 2))
    with gpu.ops(), pytest.raises(ValueError, match="At most 64 partial images"):
        cuda.composite(colors, depths, transmittances, background)


@pytest.mark.parametrize("with_depth", [True, False])
def test_composite_streams(gpu: Gpu, with_depth: bool) -> None:
    height, width = 21, 26
    colors, depths, transmittances, background = make_layers(4, height, width)
    regions = [make_region(height, width, seed) for seed in range(3)] + [make_region(height, width, 0, empty=True)]
    stream = torch.cat(
        [packed([colors[q], depths[q], transmittances[q]], region, with_depth) for q, region in enumerate(regions)]
    )
    gradients = []
    for device, ops in ((torch.device("cpu"), None), (gpu.device, gpu)):
        leaves = [stream.to(device).requires_grad_(), background.to(device).requires_grad_()]
        if ops is None:
            results = cuda.composite_streams(leaves[0], regions, leaves[1])
            weighted(results, device).backward()
        else:
            with ops.ops():
                results = cuda.composite_streams(leaves[0], regions, leaves[1])
                weighted(results, device).backward()
        gradients.append([result.detach().cpu() for result in results] + [leaf.grad.cpu() for leaf in leaves])  # pyright: ignore[reportOptionalMemberAccess]
    for ours, theirs in zip(*gradients, strict=True):
        assert_close(theirs, ours)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("with_depth", [True, False])
@pytest.mark.parametrize("height, width", [(1, 1), (17, 43), (40, 8)])
def test_streams(gpu: Gpu, height: int, width: int, with_depth: bool, half: bool) -> None:
    layers = [layer[0] for layer in make_layers(1, height, width)[:3]]
    layers[0][0, 0, 0] = 1e6 if half else 2.0  # beyond float16
    layers[2][height // 3 :, width // 4 :] = 1.0
    region = make_region(height, width, 3)
    expected = packed(layers, region, with_depth, half)
    wanted = cuda.pack_active(expected)
    images = cuda.unpack_pixels(expected, region)
    with gpu.ops():
        stream = packed([layer.to(gpu.device) for layer in layers], region, with_depth, half)
        bits, values, count = cuda.pack_active(stream)
        again = cuda.unpack_active(bits, values, region.num_pixels)
        back = cuda.unpack_pixels(stream, region)
    assert torch.equal(stream.cpu(), expected)
    assert torch.equal(bits.cpu(), wanted[0]) and int(count) == int(wanted[2])
    assert torch.equal(values.cpu()[: int(count)], wanted[1][: int(count)])
    active = stream[:, 3] != 1
    assert torch.equal(again[active], stream[active]) and int(active.sum()) == int(count)
    assert bool((again[~active][:, 3] == 1).all()) and not again[~active][:, :3].any()
    assert all(torch.equal(one.cpu(), other) for one, other in zip(back, images, strict=True))


def test_no_pixels(gpu: Gpu) -> None:
    region = make_region(6, 9, 0, empty=True)
    layers = [layer[0].to(gpu.device) for layer in make_layers(1, 6, 9)[:3]]
    with gpu.ops():
        stream = packed(layers, region)
        bits, values, count = cuda.pack_active(stream)
        assert stream.shape == (0, 5) and bits.shape == (0,) and int(count) == 0
        assert cuda.unpack_active(bits, values, 0).shape == (0, 5)
        colors, depths, transmittances = cuda.unpack_pixels(stream, region)
    assert not colors.any() and not depths.any() and bool((transmittances == 1).all())


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (300, 4), (77, 15, 3)])
@pytest.mark.parametrize("only_visible", [False, True])
def test_adam(gpu: Gpu, shape: tuple[int, ...], only_visible: bool) -> None:
    rng = torch.Generator().manual_seed(2)
    start, grads = torch.randn(shape, generator=rng), torch.randn(3, *shape, generator=rng)
    visible = torch.rand(shape[0], generator=rng) < 0.5 if only_visible else None
    settings = cuda.AdamSettings(0.01, 0.9, 0.999, 1e-8)
    leaf = torch.nn.Parameter(start.double())
    adam = torch.optim.Adam([leaf], lr=0.01, eps=1e-8)
    param, *moments = [start.to(gpu.device), *(torch.zeros(shape, device=gpu.device) for _ in range(2))]
    for step, grad in enumerate(grads):
        leaf.grad = grad.double()
        adam.step()
        with gpu.ops():
            there = None if visible is None else visible.to(gpu.device)
            cuda.adam_rows(param, moments[0], moments[1], grad.to(gpu.device), settings, step + 1, there)
    moves = torch.ones(shape[0], dtype=torch.bool) if visible is None else visible
    torch.testing.assert_close(param.cpu()[moves].double(), leaf.detach()[moves], rtol=1e-5, atol=1e-6)
    assert torch.equal(param.cpu()[~moves], start[~moves]) and not moments[0].cpu()[~moves].any()
