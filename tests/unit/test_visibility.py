"""Regions hold every pixel a Gaussian touches, are little larger than needed, and agree with an independent hull.

Shapes: N Gaussians, P partitions, H x W pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from scipy.spatial import ConvexHull, HalfspaceIntersection
from torch import Tensor

from splaxel_ns import cuda
from splaxel_ns.partition import PartitionTree
from splaxel_ns.types import Boundary, View
from splaxel_ns.visibility import check_pinhole, content_boxes, participants, plan_view, view_slope

NEAR = 0.05


def _look_at(center: list[float], target: list[float], K: list[float], width: int, height: int) -> View:
    """A camera at `center` that looks at `target`; K is fx, fy, cx, cy in pixels."""
    eye = torch.tensor(center, dtype=torch.float64)
    forward = torch.nn.functional.normalize(torch.tensor(target, dtype=torch.float64) - eye, dim=0)
    helper = torch.tensor([0.0, 0.3, -1.0], dtype=torch.float64)
    right = torch.nn.functional.normalize(torch.linalg.cross(helper, forward), dim=0)
    rotation = torch.stack([right, torch.linalg.cross(forward, right), forward])
    world_to_cam = torch.eye(4, dtype=torch.float64)
    world_to_cam[:3, :3], world_to_cam[:3, 3] = rotation, -rotation @ eye
    fx, fy, cx, cy = K
    return View(world_to_cam.float(), torch.tensor([[fx, 0, cx], [0, fy, cy], [0, 0, 1.0]]), width, height)


def _views() -> dict[str, View]:
    return {
        "outside": _look_at([6, -4, 3], [0, 0, 0], [40, 40, 24, 18], 48, 36),
        "far away": _look_at([80, 90, 40], [0, 0, 0], [900, 900, 24, 18], 48, 36),
        "inside": _look_at([0.3, 0.2, 0.1], [3, 1, 0], [24, 24, 24, 24], 48, 48),
        "looking away": _look_at([7, 0, 0], [20, 0, 0], [40, 40, 24, 18], 48, 36),
        "90 degrees, tall": _look_at([-1, -2, 0.5], [1, 1, 0], [16, 16, 16, 30], 32, 60),
        "off-centre": _look_at([4, 4, 1], [0, 1, 0], [30, 45, 5, 33], 48, 36),
        "principal point outside": _look_at([4, 4, 1], [0, 1, 0], [30, 30, -10, 18], 48, 36),
        "at the edge": _look_at([5, 0, 0], [6, 0.2, 5], [30, 30, 24, 18], 48, 36),
    }


@dataclass
class Scene:
    means: Tensor  # [N, 3] float64
    quats: Tensor  # [N, 4]
    scales: Tensor  # [N, 3]
    opacities: Tensor  # [N]

    def touched(self, view: View) -> tuple[Tensor, Tensor]:
        """alpha >= 1/255 [N, H, W] and the rays' points at the Gaussians' depths [N, H, W, 3], in float64."""
        world_to_cam, K = view.world_to_cam.double(), view.K.double()
        fx, fy, cx, cy = K[0, 0], K[1, 1], K[0, 2], K[1, 2]
        w, x, y, z = torch.nn.functional.normalize(self.quats, dim=1).unbind(dim=1)
        rotation = torch.stack(
            [
                torch.stack([1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)], 1),
                torch.stack([2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)], 1),
                torch.stack([2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)], 1),
            ],
            1,
        )
        half = world_to_cam[:3, :3] @ rotation * self.scales[:, None]
        covariance = half @ half.transpose(1, 2)  # [N, 3, 3], camera axes
        at = self.means @ world_to_cam[:3, :3].T + world_to_cam[:3, 3]
        depth = at[:, 2]
        margin_x, margin_y = 0.15 * view.width / fx, 0.15 * view.height / fy
        slope_x = (at[:, 0] / depth).clamp(-(cx / fx + margin_x), (view.width - cx) / fx + margin_x)
        slope_y = (at[:, 1] / depth).clamp(-(cy / fy + margin_y), (view.height - cy) / fy + margin_y)
        jacobian = torch.zeros(len(at), 2, 3, dtype=torch.float64)
        jacobian[:, 0, 0], jacobian[:, 0, 2] = fx / depth, -fx / depth * slope_x
        jacobian[:, 1, 1], jacobian[:, 1, 2] = fy / depth, -fy / depth * slope_y
        cov2d = jacobian @ covariance @ jacobian.transpose(1, 2) + 0.3 * torch.eye(2, dtype=torch.float64)
        px, py = torch.meshgrid(torch.arange(view.width) + 0.5, torch.arange(view.height) + 0.5, indexing="xy")
        ray = torch.stack([(px - cx) / fx, (py - cy) / fy, torch.ones_like(px)], dim=2).double()  # [H, W, 3]
        offset = torch.stack(
            [
                px - (fx * at[:, 0] / depth + cx)[:, None, None],
                py - (fy * at[:, 1] / depth + cy)[:, None, None],
            ],
            dim=3,
        )
        solved = torch.einsum("nij,nhwj->nhwi", torch.linalg.inv(cov2d), offset)
        alpha = self.opacities[:, None, None] * torch.exp(-0.5 * (solved * offset).sum(dim=3))
        in_front = (depth >= NEAR)[:, None, None]
        points = (depth[:, None, None, None] * ray - world_to_cam[:3, 3]) @ world_to_cam[:3, :3]
        return (alpha >= 1 / 255) & in_front, points


def _scene(kind: str, seed: int = 0) -> Scene:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    num = 160
    means = normal(num, 3) * torch.tensor([2.5, 1.5, 0.4])
    scales = torch.exp(normal(num, 3) * 0.8 - 2.5)
    opacities = torch.sigmoid(normal(num) * 2 + 1)
    if kind == "plane":
        means[:, 2] = 0.0
    if kind == "huge":
        scales[::20] *= 30.0
        means[::11] *= 15.0
    if kind == "tiny":
        # Points below a pixel, many beside the faces: all they touch, they touch through the blur.
        scales[:] = 1e-4
        means[: num // 2] = means[:1] + 0.02 * normal(num // 2, 3)
        opacities[:] = 1.0
    return Scene(means.float().double(), normal(num, 4), scales.float().double(), opacities)


def _inside(spans: Tensor, width: int) -> Tensor:
    """[P, H, W] bool from row spans."""
    columns = torch.arange(width)
    return (columns >= spans[..., :1]) & (columns < spans[..., 1:])


def _boxes(scene: Scene, tree: PartitionTree, boundary: Boundary, slope: float):
    return content_boxes(scene.means.float(), scene.scales.float(), tree, boundary, slope)


@pytest.mark.parametrize("kind", ["ordinary", "plane", "huge", "tiny"])
@pytest.mark.parametrize("boundary", ["filter", "none", "exact"])
def test_no_touched_pixel_lies_outside_its_region(kind: str, boundary: Boundary) -> None:
    scene = _scene(kind)
    some_pixels = 0
    for view in _views().values():
        touches, points = scene.touched(view)
        slope = view_slope(view.K, view.width, view.height)
        for num_partitions in (1, 2, 6, 16):
            tree = PartitionTree.build(scene.means.float(), num_partitions)
            # Boxes made for a narrower lens must serve a wider one too.
            for made_for in (slope, 1.0) if num_partitions == 6 else (slope,):
                plan = plan_view(view, tree, _boxes(scene, tree, boundary, made_for), NEAR)
                inside = _inside(plan.spans, view.width)
                leaf = tree.locate(points.reshape(-1, 3)).reshape(touches.shape).long()
                if boundary != "exact":
                    leaf = tree.locate(scene.means).long()[:, None, None].expand_as(touches)
                rows, columns = torch.meshgrid(torch.arange(view.height), torch.arange(view.width), indexing="ij")
                clipped = touches & ~inside[leaf, rows, columns]
                assert not clipped.any()
                assert set(plan.order) == set(inside.flatten(1).any(dim=1).nonzero().flatten().tolist())
                assert list(plan.order) == [k for k in tree.order(view.cam_center) if k in plan.order]
                some_pixels += int(touches.sum())
    assert some_pixels > 10_000


def test_regions_are_tight() -> None:
    """Pixels rendered per pixel touched, over partitions and views.

    Dilation, and under `exact` the blur, weigh much in images of 48 pixels; so do Gaussians this large.
    """
    generator = torch.Generator().manual_seed(2)
    num = 1000
    means = (torch.rand(num, 3, generator=generator, dtype=torch.float64) - 0.5) * torch.tensor([8.0, 5.0, 1.0])
    quats = torch.randn(num, 4, generator=generator, dtype=torch.float64)
    scene = Scene(means, quats, torch.full((num, 3), 0.06).double(), torch.ones(num).double())
    tree = PartitionTree.build(means.float(), 8)
    modes: tuple[Boundary, Boundary] = ("filter", "exact")
    rendered, needed = {"filter": 0, "exact": 0}, {"filter": 0, "exact": 0}
    for name in ("outside", "inside", "far away"):
        view = _views()[name]
        touches, points = scene.touched(view)
        owner = tree.locate(means)[:, None, None].expand_as(touches)
        drawer = tree.locate(points.reshape(-1, 3)).reshape(touches.shape)
        for boundary, leaf in zip(modes, (owner, drawer), strict=True):
            boxes = _boxes(scene, tree, boundary, view_slope(view.K, view.width, view.height))
            spans = plan_view(view, tree, boxes, NEAR).spans
            rendered[boundary] += int((spans[..., 1] - spans[..., 0]).sum())
            needed[boundary] += sum(int((touches & (leaf == k)).any(dim=0).sum()) for k in range(8))
    assert rendered["filter"] < 2.4 * needed["filter"]
    assert rendered["exact"] < 2.4 * needed["exact"]


def test_a_few_far_or_huge_gaussians_do_not_spread_the_region() -> None:
    scene = _scene("ordinary")
    view = _look_at([6, -4, 3], [0, 0, -2], [40, 40, 24, 18], 48, 36)  # looks down: the sky is not in the image
    tree = PartitionTree.build(scene.means.float(), 4)
    before = plan_view(view, tree, _boxes(scene, tree, "filter", 1.5), NEAR).spans
    scene.means[::40] = torch.tensor([0.0, 0.0, 400.0], dtype=torch.float64)
    scene.scales[::40] = 20.0
    after = plan_view(view, tree, _boxes(scene, tree, "filter", 1.5), NEAR).spans
    area_before, area_after = (int((spans[..., 1] - spans[..., 0]).sum()) for spans in (before, after))
    assert area_after < 1.1 * area_before


def test_looking_away_leaves_no_participants() -> None:
    scene = _scene("ordinary")
    for boundary in ("filter", "exact"):
        tree = PartitionTree.build(scene.means.float(), 5)
        boxes = _boxes(scene, tree, boundary, 1.5)
        view = _look_at([60, 0, 0], [90, 0, 0], [40, 40, 24, 18], 48, 36)
        plan = plan_view(view, tree, boxes, NEAR)
        assert plan.order == () and not plan.spans.any()
        assert participants([view], tree, boxes, NEAR) == [set()]


def test_participants_of_many_views_are_those_of_each() -> None:
    generator = torch.Generator().manual_seed(1)
    views = list(_views().values())
    for _ in range(60):
        center, target = (torch.randn(2, 3, generator=generator) * torch.tensor([6.0, 6.0, 2.0])).tolist()
        views.append(_look_at(center, target, [40, 35, 20, 20], 48, 36))
    for kind in ("ordinary", "huge"):
        scene = _scene(kind)
        for boundary in ("filter", "exact"):
            tree = PartitionTree.build(scene.means.float(), 7)
            boxes = _boxes(scene, tree, boundary, max(view_slope(v.K, v.width, v.height) for v in views))
            found = participants(views, tree, boxes, NEAR)
            assert found == [set(plan_view(view, tree, boxes, NEAR).order) for view in views]
            assert 1 < sum(map(len, found)) / len(found) < 7
    assert participants([], tree, boxes, NEAR) == []


def test_empty_partitions_and_damaged_gaussians() -> None:
    view = _views()["outside"]
    means = torch.tensor([[0.0, 0.0, 0.0]]).repeat(6, 1)
    means[1, 0], means[2, 1] = math.nan, math.inf
    scales = torch.full((6, 3), 0.1)
    scales[3, 2] = math.nan
    for boundary in ("filter", "exact", "none"):
        tree = PartitionTree.build(means, 4)
        boxes = content_boxes(means, scales, tree, boundary, 1.5)
        assert not boxes.bounds.isnan().any() and not boxes.radii.isnan().any()
        plan = plan_view(view, tree, boxes, NEAR)
        assert int(tree.locate(means[:1])) in plan.order
        if boundary != "exact":
            assert len(plan.order) == 1
        nothing = content_boxes(means[:0], scales[:0], tree, boundary, 1.5)
        assert plan_view(view, tree, nothing, NEAR).order == ()


def _hull_region(lo: np.ndarray, hi: np.ndarray, view: View) -> np.ndarray:
    """Distance [H, W] by which a pixel's square of half side 2 misses the projection; <= 0 is inside."""
    world_to_cam, K = view.world_to_cam.double().numpy(), view.K.double().numpy()
    faces = np.concatenate(
        [np.c_[np.eye(3), -hi], np.c_[-np.eye(3), lo], [[*-world_to_cam[2, :3], NEAR - world_to_cam[2, 3]]]]
    )
    # A point inside all half-spaces, as far from the faces as can be.
    center = linprog([0, 0, 0, -1], A_ub=np.c_[faces[:, :3], np.ones(7)], b_ub=-faces[:, 3], bounds=[(None, None)] * 4)
    if center.x[3] < 1e-9:
        return np.full((view.height, view.width), np.inf)
    corners = HalfspaceIntersection(faces, center.x[:3]).intersections @ world_to_cam[:3, :3].T + world_to_cam[:3, 3]
    pixels = corners @ K.T
    pixels = pixels[:, :2] / pixels[:, 2:]
    px, py = np.meshgrid(np.arange(view.width) + 0.5, np.arange(view.height) + 0.5)
    # Two convex shapes are apart iff a face normal of one of them separates them.
    normals = ConvexHull(pixels).equations
    gaps = [a * px + b * py + c - 2.0 * (abs(a) + abs(b)) for a, b, c in normals]
    (left, top), (right, bottom) = pixels.min(axis=0), pixels.max(axis=0)
    return np.max([*gaps, px - 2 - right, left - px - 2, py - 2 - bottom, top - py - 2], axis=0)


def test_spans_agree_with_an_independent_hull() -> None:
    generator = np.random.default_rng(4)
    num_inside = 0
    for view in _views().values():
        for _ in range(25):
            center = generator.normal(size=3) * [3.0, 3.0, 1.0]
            half = np.exp(generator.normal(size=3) * 1.2 - 0.5)
            lo, hi = (center - half).astype(np.float32), (center + half).astype(np.float32)
            boxes = torch.from_numpy(np.stack([lo, hi]))[None, None]
            spans = cuda.region_spans(boxes, view.world_to_cam, view.K, view.width, view.height, NEAR)
            gap = _hull_region(lo.astype(np.float64), hi.astype(np.float64), view)
            inside = _inside(spans, view.width)[0].numpy()
            decided = np.abs(gap) > 1e-6
            assert (inside == (gap <= 0))[decided].all()
            num_inside += int(inside.sum())
    assert num_inside > 10_000


def test_a_partitions_span_joins_its_boxes() -> None:
    view = _views()["outside"]
    boxes = torch.tensor([[[[0, 0, 0], [1, 1, 1]], [[-2, -1, 0], [-1, 0, 0.5]], [[9, 9, 9], [-9, -9, -9]]]]).float()
    arguments = view.world_to_cam, view.K, view.width, view.height, NEAR
    joined = cuda.region_spans(boxes, *arguments)[0]
    first, second, unused = cuda.region_spans(boxes[0][:, None], *arguments)
    assert not unused.any()
    for row, a, b in zip(joined.tolist(), first.tolist(), second.tolist(), strict=True):
        filled = [span for span in (a, b) if span[0] < span[1]]
        assert row == ([min(s[0] for s in filled), max(s[1] for s in filled)] if filled else [0, 0])


def test_a_box_too_large_for_the_arithmetic_fills_the_image() -> None:
    view = _views()["inside"]
    limit = torch.finfo(torch.float32).max
    boxes = torch.tensor([[-limit] * 3, [limit] * 3])[None, None]
    spans = cuda.region_spans(boxes, view.world_to_cam, view.K, view.width, view.height, NEAR)
    assert (spans == torch.tensor([0, view.width])).all()
    immense = torch.tensor([[3e38, 0.0, 0.0], [-3e38, 1.0, 0.0]])
    tree = PartitionTree.build(immense, 2)
    bounds = content_boxes(immense, torch.full((2, 3), 3e38), tree, "exact", 1.5)
    assert bounds.bounds.isfinite().any() and not bounds.bounds.isnan().any()
    plan_view(view, tree, bounds, NEAR)


def test_views_that_are_not_pinhole_are_refused() -> None:
    good = _views()["outside"]
    check_pinhole(good)

    def with_K(row: int, column: int, value: float) -> View:
        K = good.K.clone()
        K[row, column] = value
        return View(good.world_to_cam, K, good.width, good.height)

    for bad in (with_K(0, 1, 0.5), with_K(2, 0, 0.1), with_K(2, 2, 0.0), with_K(0, 0, -40.0), with_K(1, 1, 0.0)):
        with pytest.raises(ValueError, match="pinhole"):
            check_pinhole(bad)
        tree = PartitionTree.build(torch.zeros(1, 3), 2)
        boxes = content_boxes(torch.zeros(1, 3), torch.ones(1, 3), tree, "filter", 1.5)
        with pytest.raises(ValueError, match="View 1 of 2"):
            participants([good, bad], tree, boxes, NEAR)
    for bad, words in (
        (with_K(0, 2, math.nan), "not finite"),
        (View(good.world_to_cam * 2, good.K, good.width, good.height), "scales or shears"),
        (View(good.world_to_cam, good.K, 0, good.height), "at least one"),
    ):
        with pytest.raises(ValueError, match=words):
            check_pinhole(bad)


def test_wrong_shapes_are_refused() -> None:
    view = _views()["outside"]
    with pytest.raises(ValueError, match="boxes"):
        cuda.region_spans(torch.zeros(2, 2, 3), view.world_to_cam, view.K, 48, 36, NEAR)
    with pytest.raises(ValueError, match="near plane"):
        cuda.region_spans(torch.zeros(1, 1, 2, 3), view.world_to_cam, view.K, 48, 36, 0.0)
    with pytest.raises(ValueError, match="viewmat"):
        cuda.region_spans(torch.zeros(1, 1, 2, 3), view.world_to_cam[:3], view.K, 48, 36, NEAR)
    with pytest.raises(ValueError, match="owner"):
        bulk, axis = torch.zeros(1, 2, 3), torch.zeros(1, dtype=torch.int32)
        cuda.content_bounds(torch.zeros(4, 3), torch.ones(4, 3), torch.zeros(3, dtype=torch.int32), bulk, axis, 1.0)


def test_regions_end_where_splats_do() -> None:
    """A splat outside the frustum widens no region; every pixel that a splat's box holds is in its partition's."""
    means2d = torch.tensor([[5.2, 3.0], [20.0, 9.0], [7.0, 4.0], [-9.0, 4.0]])
    extents = torch.tensor([[2.0, 1.0], [4.0, 2.0], [0.0, 0.0], [3.0, 3.0]])  # the third is not seen
    owner = torch.tensor([0, 2, 1, 0], dtype=torch.int32)
    spans = cuda.splat_spans(means2d, extents, owner, 3, 22, 12)
    x, y = torch.arange(22) + 0.5, torch.arange(12) + 0.5
    for leaf in range(3):
        columns = torch.arange(22)
        inside = (columns >= spans[leaf, :, :1]) & (columns < spans[leaf, :, 1:])  # [H, W]
        needed = torch.zeros(12, 22, dtype=torch.bool)
        for k in ((owner == leaf) & (extents[:, 0] > 0)).nonzero().flatten().tolist():
            in_x, in_y = (x - means2d[k, 0]).abs() <= extents[k, 0], (y - means2d[k, 1]).abs() <= extents[k, 1]
            needed |= in_y[:, None] & in_x
        assert bool((inside | ~needed).all())
        assert int(inside.sum()) <= 4 * int(needed.sum()) and (leaf != 1 or not inside.any())
    with pytest.raises(ValueError, match="owner"):
        cuda.splat_spans(means2d, extents, owner + 1, 3, 22, 12)
