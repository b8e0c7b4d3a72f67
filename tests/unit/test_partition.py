"""The KD-tree: boxes that fill space, balance, order along rays, what a damaged checkpoint does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from splaxel_ns.partition import PartitionTree, imbalance


def _clouds() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(2000, 3, generator=generator)
    return {
        "city": normal * torch.tensor([20.0, 8.0, 0.5]),
        "offset": normal + torch.tensor([3e5, -4e6, 20.0]),
        "plane": normal * torch.tensor([1.0, 1.0, 0.0]),
        "line": normal * torch.tensor([0.0, 1.0, 0.0]) + 2.0,
        "all equal": torch.full((50, 3), -1.5),
        "few values": torch.randint(0, 2, (300, 3), generator=generator).float(),
        "mostly equal": torch.cat([torch.ones(995, 3), normal[:5]]),
        "empty": torch.zeros(0, 3),
        "one": torch.ones(1, 3),
        "immense": torch.tensor([[3.4e38, 0.0, 0.0], [-3.4e38, 0.0, 1.0], [3.4e38, -3.4e38, 3.4e38]]),
        "damaged": torch.cat([normal, torch.full((20, 3), math.nan), torch.tensor([[math.inf, 0.0, -math.inf]])]),
    }


@pytest.mark.parametrize("name", _clouds())
def test_boxes_hold_the_points_located_in_them(name: str) -> None:
    points = _clouds()[name]
    finite = points[points.isfinite().all(dim=1)]
    probes = torch.cat([finite, 3.0 * torch.randn(500, 3, generator=torch.Generator().manual_seed(0))])
    for num_partitions in range(1, 17):
        tree = PartitionTree.build(points, num_partitions)
        assert tree.num_partitions == num_partitions
        # Faces are points too: a coordinate equal to a threshold belongs to the right side only.
        corners = torch.where(tree.lo.isfinite(), tree.lo, tree.hi)
        everywhere = torch.cat([probes, corners[corners.isfinite().all(dim=1)]])
        inside = ((everywhere[:, None] >= tree.lo) & (everywhere[:, None] < tree.hi)).all(dim=2)
        assert torch.equal(inside.sum(dim=1), torch.ones(len(everywhere), dtype=torch.int64))
        assert torch.equal(inside.int().argmax(dim=1).int(), tree.locate(everywhere))
        assert tree.locate(points).dtype == torch.int32


def test_points_are_shared_out_evenly_for_any_number_of_partitions() -> None:
    points = _clouds()["city"]
    for num_partitions in range(1, 17):
        counts = PartitionTree.build(points, num_partitions).locate(points).bincount(minlength=num_partitions)
        assert imbalance(counts) < 0.02, counts


def test_the_longest_axis_is_cut_and_strays_do_not_choose_it() -> None:
    points = _clouds()["city"].repeat(2, 1)
    points[0, 2], points[1, 2] = 1e6, -1e6
    tree = PartitionTree.build(points, 2)
    assert tree.axis.tolist() == [0]
    assert tree.threshold.item() == pytest.approx(float(points[:, 0].median()), abs=0.1)


def test_leaves_below_a_node_are_a_run_whose_union_is_a_box() -> None:
    tree = PartitionTree.build(_clouds()["city"], 13)

    def leaves_below(node: int) -> list[int]:
        if node < 0:
            return [~node]
        return [leaf for child in tree.children[node].tolist() for leaf in leaves_below(child)]

    for node in range(12):
        leaves = leaves_below(node)
        assert leaves == list(range(leaves[0], leaves[-1] + 1))
        lo, hi = tree.lo[leaves].amin(dim=0), tree.hi[leaves].amax(dim=0)
        outside = [leaf for leaf in range(13) if leaf not in leaves]
        touching = (tree.lo[outside] < hi).all(dim=1) & (tree.hi[outside] > lo).all(dim=1)
        assert not touching.any()


@pytest.mark.parametrize("name", ["city", "plane", "few values", "all equal"])
def test_order_is_front_to_back_on_every_ray(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    points = _clouds()[name]
    spread = points.std(dim=0).clamp(min=1.0)
    for num_partitions in (1, 2, 3, 7, 8, 16):
        tree = PartitionTree.build(points, num_partitions)
        lo, hi = tree.lo.double(), tree.hi.double()
        on_a_face = torch.where(tree.lo[-1].isfinite(), tree.lo[-1], torch.zeros(3))
        centers = [*(torch.randn(6, 3, generator=generator) * spread), 100 * spread, on_a_face, points[0]]
        for center in centers:
            order = tree.order(center)
            assert sorted(order) == list(range(num_partitions))
            origin = center.double()
            rays = torch.randn(300, 3, generator=generator, dtype=torch.float64)
            to_lo, to_hi = (lo - origin) / rays[:, None], (hi - origin) / rays[:, None]  # [rays, P, 3]
            enters = torch.minimum(to_lo, to_hi).amax(dim=2).clamp(min=0.0)[:, order]
            leaves = torch.maximum(to_lo, to_hi).amin(dim=2)[:, order]
            crossed = leaves > enters + 1e-12
            # Along the order, a box that is crossed may not be entered before an earlier one is left.
            left_so_far = torch.where(crossed, leaves, 0.0).cummax(dim=1).values
            assert (~crossed[:, 1:] | (enters[:, 1:] >= left_so_far[:, :-1] - 1e-9)).all()


def test_imbalance() -> None:
    assert imbalance([3, 1, 2]) == pytest.approx(0.5)
    assert imbalance(torch.tensor([4, 4])) == 0.0
    assert imbalance([0, 0]) == 0.0


def test_a_saved_tree_returns_unchanged() -> None:
    for num_partitions in (1, 2, 11):
        tree = PartitionTree.build(_clouds()["city"], num_partitions)
        again = PartitionTree.from_state_dict(tree.state_dict())
        for field in ("axis", "threshold", "children", "lo", "hi"):
            assert torch.equal(getattr(tree, field), getattr(again, field))


def test_a_damaged_tree_is_refused() -> None:
    good = PartitionTree.build(_clouds()["city"], 4).state_dict()

    def changed(name: str, index: tuple[int, ...], value: float) -> dict[str, Tensor]:
        state = {key: tensor.clone() for key, tensor in good.items()}
        state[name][index] = value
        return state

    damaged = [
        {key: value for key, value in good.items() if key != "children"},
        good | {"axis": good["axis"].float()},
        good | {"axis": good["axis"][:-1]},
        good | {"threshold": torch.tensor(1.0)},
        good | {"threshold": good["threshold"].double()},
        good | {"children": good["children"].flatten()},
        changed("axis", (0,), 3),
        changed("axis", (1,), -1),
        changed("threshold", (1,), math.nan),
        changed("threshold", (2,), math.inf),
        changed("children", (0, 0), 0),
        changed("children", (0, 1), 7),
        changed("children", (2, 1), ~0),
        changed("children", (1, 0), ~9),
    ]
    for state in damaged:
        with pytest.raises(ValueError, match="damaged"):
            PartitionTree.from_state_dict(state)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PartitionTree.build(torch.zeros(4, 3), 0)
    with pytest.raises(ValueError, match=r"\[N, 3\]"):
        PartitionTree.build(torch.zeros(4, 2), 2)
