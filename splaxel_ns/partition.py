"""Space cut into convex boxes by a KD-tree, and the front-to-back order of the boxes for a camera.

Design: paper section 4.2 (convex partitions keep the blending order) and 8.1 (median splits of the longest axis).
Shapes: N points, P partitions (leaves), P - 1 inner nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splaxel_ns import cuda

LOW_PERCENTILE = 0.001
"""Extents run from this quantile to its mirror image, so that a few stray points do not choose the axis."""

_FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class PartitionTree:
    """A KD-tree whose leaves are half-open boxes that fill space: each point lies in exactly one.

    A point goes right iff `point[axis] >= threshold`; this one expression, in the point's float type, decides
    everywhere (here, in the kernels, in the order). Node 0 is the root. Leaves are numbered from left to right, so
    the leaves under any node are a contiguous run and their union is a box.
    """

    axis: Tensor  # [P - 1] int32, 0..2
    threshold: Tensor  # [P - 1] float32, world units
    children: Tensor  # [P - 1, 2] int32, left and right: a node if >= 0, else ~leaf
    lo: Tensor  # [P, 3] float32, closed lower faces; -inf where the box is open to the outside
    hi: Tensor  # [P, 3] float32, open upper faces; +inf likewise

    @property
    def num_partitions(self) -> int:
        """Number of leaves, P."""
        return len(self.lo)

    @classmethod
    def build(cls, points: Tensor, num_partitions: int) -> PartitionTree:
        """Split at medians along the axis of largest extent until there are `num_partitions` boxes.

        Any P is possible: a node of P leaves gives ceil(P / 2) to its left, and points in proportion. Where points
        coincide, boxes without points result; that is not an error. Non-finite points are ignored.

        Args:
            points: [N, 3], world units; N may be 0.
            num_partitions: P >= 1.

        Raises:
            ValueError: P < 1, or points of another shape.
        """
        if num_partitions < 1:
            raise ValueError(f"num_partitions is {num_partitions}; at least 1 is needed.")
        if points.ndim != 2 or points.shape[1] != 3:
            raise ValueError(f"Points must have the shape [N, 3], not {list(points.shape)}.")
        points = points.detach().to("cpu", torch.float32)
        nodes: list[tuple[int, float, list[int]]] = []
        _split(points[points.isfinite().all(dim=1)], num_partitions, 0, [-math.inf] * 3, [math.inf] * 3, nodes)
        return cls._from_nodes(
            torch.tensor([node[0] for node in nodes], dtype=torch.int32),
            torch.tensor([node[1] for node in nodes], dtype=torch.float32),
            torch.tensor([node[2] for node in nodes], dtype=torch.int32).reshape(-1, 2),
        )

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> PartitionTree:
        """The tree that `state_dict` saved.

        Raises:
            ValueError: the tensors are missing, of a wrong type or shape, or do not form a tree.
        """
        missing = {"axis", "threshold", "children"} - set(state)
        if missing:
            raise ValueError(f"The saved partition lacks {', '.join(sorted(missing))}; the checkpoint is damaged.")
        axis, threshold, children = (state[name] for name in ("axis", "threshold", "children"))
        num_nodes = len(threshold) if isinstance(threshold, Tensor) and threshold.ndim == 1 else -1
        for name, value, dtype, shape in (
            ("threshold", threshold, torch.float32, (num_nodes,)),
            ("axis", axis, torch.int32, (num_nodes,)),
            ("children", children, torch.int32, (num_nodes, 2)),
        ):
            if not isinstance(value, Tensor) or value.dtype != dtype or tuple(value.shape) != shape:
                raise ValueError(
                    f"The saved partition's {name} is {getattr(value, 'dtype', type(value))} of shape "
                    f"{list(getattr(value, 'shape', []))}, which no partition has; the checkpoint is damaged."
                )
        return cls._from_nodes(axis.cpu(), threshold.cpu(), children.cpu())

    def state_dict(self) -> dict[str, Tensor]:
        """What `from_state_dict` needs; the boxes' faces follow from it."""
        return {"axis": self.axis, "threshold": self.threshold, "children": self.children}

    def locate(self, points: Tensor, within: range | None = None) -> Tensor:
        """The leaf that holds each point.

        Args:
            points: [N, 3], world units.
            within: Of the leaves of one rank (`runs_of`), the one nearest to the point; None: of all.

        Returns:
            [N] int32.
        """
        points = points.detach()
        if within is not None and len(within) < self.num_partitions:
            if len(within) == 1:
                return torch.full((len(points),), within.start, dtype=torch.int32, device=points.device)
            lo, hi = (cuda.upload(side, points.device) for side in self.box_of(within))
            points = points.clamp(min=lo, max=torch.nextafter(hi, torch.full_like(hi, -math.inf)))
        if points.device.type == "cpu" and points.dtype == torch.float32:
            return cuda.locate(points, self.axis, self.threshold, self.children)
        columns = points.unbind(dim=1)
        # Each point belongs to the node whose box holds it, so one comparison per node and run of leaves suffices.
        leaf = torch.zeros(len(points), dtype=torch.int32, device=points.device)
        axes, thresholds = self.axis.tolist(), self.threshold.tolist()
        for (first, middle, stop), node in zip(self._runs(), range(len(axes)), strict=True):
            goes_right = columns[axes[node]] >= thresholds[node]
            if (first, stop) != (0, self.num_partitions):
                goes_right &= leaf == first
            leaf.masked_fill_(goes_right, middle)
        return leaf

    def runs_of(self, num_ranks: int) -> list[range]:
        """Share the leaves out: each rank gets those under one node, so that its union is a box.

        A node's ranks are split between its sides in proportion to their leaves. With as many ranks as leaves each
        gets one; of a tree that was built for another number of ranks some may get more leaves than others.

        Args:
            num_ranks: R, 1 to the number of leaves.

        Returns:
            R runs of leaves, in order.

        Raises:
            ValueError: More ranks than leaves.
        """
        if not 1 <= num_ranks <= self.num_partitions:
            raise ValueError(
                f"{self.num_partitions} partitions cannot be shared out among {num_ranks} ranks, each of which needs "
                f"one: use --pipeline.model.num-partitions {num_ranks} or more for a new run, or fewer ranks."
            )
        children, runs = self.children.tolist(), self._runs()
        shares: list[range] = []

        def share(node: int, first: int, stop: int, ranks: int) -> None:
            if ranks == 1:
                shares.append(range(first, stop))
                return
            middle = runs[node][1]
            left = round(ranks * (middle - first) / (stop - first))
            left = min(max(left, 1, ranks - (stop - middle)), ranks - 1, middle - first)
            share(children[node][0], first, middle, left)
            share(children[node][1], middle, stop, ranks - left)

        share(0 if children else ~0, 0, self.num_partitions, num_ranks)
        return shares

    def box_of(self, run: range) -> tuple[Tensor, Tensor]:
        """The box that a rank's leaves fill: closed lower faces [3] and open upper faces [3]."""
        return self.lo[run.start : run.stop].amin(dim=0), self.hi[run.start : run.stop].amax(dim=0)

    def order(self, cam_center: Tensor | Sequence[float]) -> list[int]:
        """All leaves, front to back for every ray that starts at the camera's centre.

        Args:
            cam_center: [3], world units.

        Returns:
            A permutation of 0..P-1: of two boxes that one ray crosses, the nearer comes first.
        """
        center = cam_center.tolist() if isinstance(cam_center, Tensor) else list(cam_center)
        axes, thresholds, children = self.axis.tolist(), self.threshold.tolist(), self.children.tolist()
        leaves: list[int] = []
        stack = [0 if axes else ~0]
        while stack:
            node = stack.pop()
            if node < 0:
                leaves.append(~node)
                continue
            near = int(center[axes[node]] >= thresholds[node])
            stack += [children[node][1 - near], children[node][near]]
        return leaves

    def _runs(self) -> list[tuple[int, int, int]]:
        """Per node the leaves [first, middle) on its left and [middle, stop) on its right."""
        children = self.children.tolist()
        runs = [(0, 0, 0)] * len(children)

        # Depth first and left to right; a node's right run starts where its left run ends.
        def visit(node: int, first: int) -> int:
            if node < 0:
                return first + 1
            middle = visit(children[node][0], first)
            stop = visit(children[node][1], middle)
            runs[node] = (first, middle, stop)
            return stop

        visit(0 if children else ~0, 0)
        return runs

    @classmethod
    def _from_nodes(cls, axis: Tensor, threshold: Tensor, children: Tensor) -> PartitionTree:
        """Check that the nodes form a tree in depth-first order and derive the leaves' boxes."""
        num_partitions = len(axis) + 1
        axes, thresholds, links = axis.tolist(), threshold.tolist(), children.tolist()
        lo, hi = torch.full((num_partitions, 3), -math.inf), torch.full((num_partitions, 3), math.inf)
        next_node, next_leaf = 0, 0
        stack: list[tuple[int, list[float], list[float]]] = [(0 if axes else ~0, [-math.inf] * 3, [math.inf] * 3)]
        while stack:
            node, box_lo, box_hi = stack.pop()
            # Parents before children, left before right: each node and leaf is then met once, in its own order.
            if node != (next_node if node >= 0 else ~next_leaf) or next_node > num_partitions - 1:
                raise ValueError("The saved partition's children do not form a tree; the checkpoint is damaged.")
            if node < 0:
                lo[next_leaf], hi[next_leaf] = torch.tensor(box_lo), torch.tensor(box_hi)
                next_leaf += 1
                continue
            next_node += 1
            if node >= len(axes):
                raise ValueError("The saved partition's children do not form a tree; the checkpoint is damaged.")
            split, cut = axes[node], thresholds[node]
            if split not in (0, 1, 2) or not math.isfinite(cut) or not box_lo[split] <= cut <= box_hi[split]:
                raise ValueError(
                    f"The saved partition cuts axis {split} at {cut}, which is no plane through its box; "
                    "the checkpoint is damaged."
                )
            left_hi, right_lo = box_hi.copy(), box_lo.copy()
            left_hi[split] = right_lo[split] = cut
            stack += [(links[node][1], right_lo, box_hi), (links[node][0], box_lo, left_hi)]
        if next_node != len(axes) or next_leaf != num_partitions:
            raise ValueError("The saved partition's children do not form a tree; the checkpoint is damaged.")
        return cls(axis, threshold, children, lo, hi)


def imbalance(counts: Tensor | Sequence[int]) -> float:
    """N_max / mean - 1 over the partitions' counts of Gaussians (paper, section 8.1); 0 where there are none."""
    values = [float(count) for count in counts]
    total = sum(values)
    return max(values) * len(values) / total - 1.0 if total else 0.0


def _split(
    points: Tensor,  # [n, 3] float32, those in this box
    num_leaves: int,
    first_leaf: int,
    lo: list[float],
    hi: list[float],
    nodes: list[tuple[int, float, list[int]]],
) -> int:
    """Append the subtree of `num_leaves` leaves to `nodes`, parents first; return its index, or ~leaf."""
    if num_leaves == 1:
        return ~first_leaf
    left_leaves = (num_leaves + 1) // 2
    axis, threshold = _choose_cut(points, left_leaves / num_leaves, lo, hi)
    node = len(nodes)
    links = [0, 0]
    nodes.append((axis, threshold, links))
    right = points[:, axis] >= threshold
    left_hi, right_lo = hi.copy(), lo.copy()
    left_hi[axis] = right_lo[axis] = threshold
    links[0] = _split(points[~right], left_leaves, first_leaf, lo, left_hi, nodes)
    links[1] = _split(points[right], num_leaves - left_leaves, first_leaf + left_leaves, right_lo, hi, nodes)
    return node


def _choose_cut(points: Tensor, share: float, lo: list[float], hi: list[float]) -> tuple[int, float]:
    """The axis of largest extent and the threshold that leaves `share` of the points on its left."""
    count = len(points)
    if count:
        skip = int(LOW_PERCENTILE * (count - 1))
        low, high = points.kthvalue(1 + skip, dim=0).values, points.kthvalue(count - skip, dim=0).values
        if not (high > low).any():
            low, high = points.amin(dim=0), points.amax(dim=0)
        axis = int((high.double() - low.double()).argmax())
        if high[axis] > low[axis]:
            return axis, _quantile_cut(points[:, axis], share)
    return _cut_without_extent(points, lo, hi)


def _quantile_cut(values: Tensor, share: float) -> float:
    """A float32 threshold between two distinct neighbouring values, as near to the quantile as ties allow."""
    ordered = values.sort().values
    target = min(max(round(share * len(ordered)), 1), len(ordered) - 1)
    pivot = ordered[target]
    # All copies of the pivot stay together; cut below or above them, whichever keeps the counts closer.
    below = int(torch.searchsorted(ordered, pivot))
    above = int(torch.searchsorted(ordered, pivot, right=True))
    if below == 0 or (above < len(ordered) and above - target < target - below):
        below = above
    left, right = float(ordered[below - 1]), float(ordered[below])
    middle = float(torch.tensor(left + 0.5 * (right - left), dtype=torch.float32))
    return middle if left < middle < right else right


def _cut_without_extent(points: Tensor, lo: list[float], hi: list[float]) -> tuple[int, float]:
    """A plane for no points, or for points that all coincide: keep the box with the points as roomy as can be."""
    anchors = points[0].tolist() if len(points) else [min(max(0.0, a), b) for a, b in zip(lo, hi, strict=True)]
    for axis in range(3):
        if lo[axis] < anchors[axis] < hi[axis]:
            return axis, anchors[axis]
    for axis in range(3):
        step = max(1.0, abs(anchors[axis]))
        far = anchors[axis] + step if math.isinf(hi[axis]) else 0.5 * anchors[axis] + 0.5 * hi[axis]
        far = float(torch.tensor(min(far, _FLOAT32_MAX), dtype=torch.float32))
        if anchors[axis] < far < hi[axis]:
            return axis, far
    return 0, lo[0] if math.isfinite(lo[0]) else hi[0]
