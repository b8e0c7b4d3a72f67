"""What a step needs of all Gaussians beside their drawing, against plain torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from splaxel_ns import cuda
from splaxel_ns.partition import PartitionTree


def some_points(num: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, 3, generator=generator) * torch.tensor([3.0, 1.0, 0.3])


@pytest.mark.parametrize("num_partitions", [1, 2, 5, 16])
def test_leaves_of_points(num_partitions: int) -> None:
    """Points in float64 are compared node by node; float32 walks the tree. Points on a face go right."""
    points = some_points(20_000)
    tree = PartitionTree.build(points, num_partitions)
    for node in range(num_partitions - 1):
        points[node, int(tree.axis[node])] = tree.threshold[node]
    points[-1], points[-2] = math.nan, math.inf
    found = tree.locate(points)
    assert found.dtype == torch.int32
    assert torch.equal(found, tree.locate(points.double()))


def bulk_by_sorting(means: Tensor, owner: Tensor, num_partitions: int, stride: int, quantile: float, margin: float):
    means, owner = means[::stride], owner[::stride]
    bulk = torch.tensor([-math.inf, math.inf])[:, None].repeat(num_partitions, 1, 3)
    axis = torch.zeros(num_partitions, dtype=torch.int32)
    for leaf in range(num_partitions):
        points = means[(owner == leaf) & means.isfinite().all(dim=1)].sort(dim=0).values
        if len(points):
            skip = int(quantile * (len(points) - 1))
            low, high = points[skip], points[len(points) - 1 - skip]
            bulk[leaf] = torch.stack([low, high]) + torch.tensor([[-1.0], [1.0]]) * margin * (high - low).max()
            axis[leaf] = int((high - low).argmax())
    return bulk, axis


@pytest.mark.parametrize(("num", "quantile"), [(0, 0.01), (1, 0.01), (2, 0.4), (5, 0.5), (3001, 0.01), (3001, 0.3)])
def test_bulk_boxes(num: int, quantile: float) -> None:
    means = some_points(num)
    owner = (means[:, 0] > 1.0).int() + (means[:, 1] > 0.0).int()  # partition 3 has none
    if num > 10:
        means[7, 2], means[14, 0] = math.nan, -math.inf
    found = cuda.bulk_boxes(means, owner, 4, 7, quantile, 0.1)
    expected = bulk_by_sorting(means, owner, 4, 7, quantile, 0.1)
    torch.testing.assert_close(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("with_radii", [True, False])
def test_statistics_of_a_view(with_radii: bool) -> None:
    num = 30_000
    generator = torch.Generator().manual_seed(1)
    grads, extents = (torch.randn(num, 2, generator=generator) for _ in range(2))
    spread = torch.randn(num, 2, 2, generator=generator)
    inverse = spread @ spread.transpose(1, 2) + 1e-3 * torch.eye(2)
    conics = torch.stack([inverse[:, 0, 0], inverse[:, 0, 1], inverse[:, 1, 1]], dim=1)
    before = [torch.rand(num, generator=generator) for _ in range(3)]
    grad2d, count, radii = (value.clone() for value in before)
    cuda.add_statistics(grads, extents, conics, (120.0, 80.0), 240.0, grad2d, count, radii if with_radii else None)
    seen = (extents > 0).all(dim=1)
    assert 0 < int(seen.sum()) < num
    norms = (grads.double() * torch.tensor([120.0, 80.0])).norm(dim=1)
    torch.testing.assert_close(grad2d, torch.where(seen, before[0] + norms, before[0]).float())
    torch.testing.assert_close(count, before[1] + seen)
    largest = torch.where(seen, torch.maximum(before[2], cuda.screen_radii(conics) / 240.0), before[2])
    torch.testing.assert_close(radii, largest if with_radii else before[2])
    # A covariance's larger standard deviation is one over the root of the conic's smaller eigenvalue.
    deviation = torch.linalg.eigvalsh(inverse.double())[:, 0].rsqrt()
    assert ((cuda.screen_radii(conics) - (3.0 * deviation)).abs() <= 1.01).all()


def test_wrong_arguments_are_refused() -> None:
    zeros = torch.zeros
    with pytest.raises(ValueError, match="owner names partition -1 of 2"):
        cuda.bulk_boxes(zeros(1, 3), torch.tensor([-1]), 2, 1, 0.1, 0.1)
    with pytest.raises(ValueError, match=r"conics must have the shape \[4, 3\], not \[4, 2\]"):
        cuda.add_statistics(zeros(4, 2), zeros(4, 2), zeros(4, 2), (1.0, 1.0), 1.0, zeros(4), zeros(4))
