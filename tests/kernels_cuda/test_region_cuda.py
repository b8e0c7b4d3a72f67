"""Regions: the row spans are the CPU's, to the pixel."""

from __future__ import annotations

import pytest
import torch
from gpu_ops import Gpu

from splaxel_ns import cuda

WIDTH, HEIGHT = 83, 57


@pytest.mark.parametrize("with_leaves", [False, True])
def test_spans_are_those_of_the_cpu(gpu: Gpu, with_leaves: bool) -> None:
    rng = torch.Generator().manual_seed(4)
    K = torch.tensor([[60.0, 0, 40], [0, 65, 30], [0, 0, 1]])
    for seed in range(6):
        rotation, _ = torch.linalg.qr(torch.randn(3, 3, generator=rng))
        viewmat = torch.eye(4)
        viewmat[:3, :3], viewmat[:3, 3] = rotation, torch.randn(3, generator=rng)
        low = torch.randn(3, 4, 3, generator=rng) * 3
        boxes = torch.stack([low, low + torch.rand(3, 4, 3, generator=rng) * 2], dim=2)
        boxes[0, 1, 0] = 9e9  # empty
        boxes[2, 0] = torch.tensor([[-1e12] * 3, [1e12] * 3])  # too large for the hull's arithmetic
        if seed == 0:
            boxes[1] = boxes[1].flip(1)  # a partition without boxes
        leaves = None
        if with_leaves:
            leaves = torch.tensor([[-3.4e38] * 3, [3.4e38] * 3]).repeat(3, 1, 1)
            leaves[0, 1, 0] = leaves[1, 0, 0] = -1.0
            leaves[1, 1, 0] = leaves[2, 0, 0] = 1.0
        expected = cuda.region_spans(boxes, viewmat, K, WIDTH, HEIGHT, 0.1, leaves)
        with gpu.ops():
            spans = cuda.region_spans(boxes.to(gpu.device), viewmat, K, WIDTH, HEIGHT, 0.1, leaves)
        # Rounding in float64 on another processor may move an end that lies on a pixel's edge by that pixel.
        assert int((spans.cpu() - expected).abs().max()) <= (0 if gpu.emulated else 1)
        assert bool((expected[..., 1] > expected[..., 0]).any())


def test_no_partitions(gpu: Gpu) -> None:
    with gpu.ops():
        spans = cuda.region_spans(torch.zeros(0, 4, 2, 3, device=gpu.device), torch.eye(4), torch.eye(3), 8, 6, 0.1)
    assert spans.shape == (0, 6, 2)
