"""How many partitions have work at a time on given camera poses: a view, or a bucket of views (paper, section 4.4).

Poses come without geometry, so the surfaces are where their rays end: seen from above, on the ground; in streets, where
the rays leave the strip around the cameras' ways, which is taken for the front of a house, or on the street. Partitions
are cut over these points. Two answers are given: participants by region, as training begins, and by what is visible,
which leaving out saturated pixels comes close to.

Shapes: V views, M rays of a view, N end points, P partitions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.spatial import KDTree

from splaxel_ns.dataparsers.matrixcity_frames import FrameTable, complete_intrinsics, read_frames
from splaxel_ns.partition import PartitionTree
from splaxel_ns.schedule import ViewScheduler
from splaxel_ns.types import View
from splaxel_ns.visibility import content_boxes, participants, view_slope

AERIAL_ABOVE = 50.0
"""Cameras are flying if their median height is more than this, metres."""
EYE_HEIGHT = 1.7
"""Of street cameras, metres."""
STREET_WIDTH = 24.0
HOUSE_HEIGHT = 30.0
"""Metres; rays that pass higher end in the sky."""
CELL = 1.0
"""Metres on a side of the squares that are street or not."""
STEP = 2.0
"""Metres between the places where a ray is looked at."""
FARTHEST = 500.0
"""Metres that rays in streets go at most."""
RAYS = 16
"""Rays along each side of a view."""
NEAR = 1.0
"""Metres."""
RADIUS = 0.5
"""Of the Gaussians that stand for surfaces, metres."""


def utilisation_of_folder(folder: Path, num_partitions: int) -> list[dict[str, Any]]:
    """Of every transforms_train.json below a folder.

    Returns:
        Per file: its views, and the mean part of the partitions that has work.

    Raises:
        ValueError: There is no such file, or one is damaged.
    """
    files = sorted(folder.rglob("transforms_train.json"))
    if not files:
        raise ValueError(f"--poses {folder}: there is no transforms_train.json below it.")
    return [
        {"poses": str(path.relative_to(folder).parent)} | utilisation_of_file(path, num_partitions) for path in files
    ]


def utilisation_of_file(path: Path, num_partitions: int) -> dict[str, Any]:
    """Of one camera file in MatrixCity's layout.

    Raises:
        ValueError: It is damaged.
    """
    table, _ = read_frames([path], path.parent)
    if not len(table):
        raise ValueError(f"{path} lists no camera.")
    poses = table.poses.copy()  # [V, 4, 4]
    poses[:, :3, 3] = (poses[:, :3, 3] - poses[:, :3, 3].mean(axis=0) * [1, 1, 0]) * table.units[:, None]
    focal = complete_intrinsics(table.intrinsics, table.angles, table.sizes)
    ends = end_points(poses, focal, table.sizes)  # [V, M, 3]
    seen = np.isfinite(ends).all(axis=-1)  # [V, M]
    points = torch.from_numpy(ends[seen]).float()
    tree = PartitionTree.build(points, num_partitions)
    leaf = np.full(seen.shape, -1)
    leaf[seen] = tree.locate(points).numpy()
    visible = [set(row[row >= 0].tolist()) for row in leaf]
    views = views_of(poses, focal, table)
    slope = max(view_slope(view.K, view.width, view.height) for view in views[:1])
    scales = torch.full_like(points, RADIUS)
    boxes = content_boxes(points, scales, tree, "filter", slope)
    result: dict[str, Any] = {"views": len(views), "partitions": num_partitions}
    for name, sets in (("frustum", participants(views, tree, boxes, NEAR)), ("visible", visible)):
        scheduler = ViewScheduler(len(views), seed=0, batch_size=1)
        scheduler.set_participants(sets)
        result[name], result[f"{name}_consolidated"] = scheduler.utilisation(num_partitions)
    return result


def views_of(poses: np.ndarray, intrinsics: np.ndarray, table: FrameTable) -> list[View]:
    """Views [V] of camera-to-world matrices in OpenGL axes; sizes that are not given follow the principal point."""
    to_cam = np.linalg.inv(poses @ np.diag([1.0, -1.0, -1.0, 1.0]))
    views = []
    for matrix, (fx, fy, cx, cy), (width, height) in zip(to_cam, intrinsics, table.sizes, strict=True):
        K = torch.tensor([[fx, 0, cx], [0, fy, cy], [0, 0, 1.0]], dtype=torch.float32)
        views.append(View(torch.from_numpy(matrix).float(), K, int(width), int(height)))
    return views


def end_points(poses: np.ndarray, intrinsics: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Where rays through a grid of pixels end: [V, M, 3] metres, NaN for the sky.

    Args:
        poses: Camera to world, OpenGL axes, metres.  # [V, 4, 4]
        intrinsics: fx, fy, cx, cy, pixels.  # [V, 4]
        sizes: Width and height, pixels.  # [V, 2]
    """
    share = (np.arange(RAYS) + 0.5) / RAYS
    x, y = np.meshgrid(share, share)
    local = np.stack(
        [
            (x.ravel() * sizes[:, :1] - intrinsics[:, 2:3]) / intrinsics[:, :1],
            -(y.ravel() * sizes[:, 1:] - intrinsics[:, 3:]) / intrinsics[:, 1:2],
            -np.ones((len(poses), RAYS * RAYS)),
        ],
        axis=-1,
    )  # [V, M, 3]
    rays = np.einsum("vij,vmj->vmi", poses[:, :3, :3], local)
    rays /= np.linalg.norm(rays, axis=-1, keepdims=True)
    centers = poses[:, :3, 3]
    if np.median(centers[:, 2]) > AERIAL_ABOVE:
        return _on_ground(centers, rays, np.zeros(len(centers)))
    return _in_streets(centers, rays)


def _on_ground(centers: np.ndarray, rays: np.ndarray, ground: np.ndarray) -> np.ndarray:
    down = rays[..., 2] < -1e-3
    distance = np.where(down, (ground - centers[:, 2])[:, None] / np.where(down, rays[..., 2], -1.0), np.nan)
    return centers[:, None] + distance[..., None] * rays


def _in_streets(centers: np.ndarray, rays: np.ndarray) -> np.ndarray:
    """The first of: out of the strip around the cameras' ways, on the street, above the houses."""
    low = centers[:, :2].min(axis=0) - STREET_WIDTH
    cells = np.ceil((centers[:, :2].max(axis=0) + STREET_WIDTH - low) / CELL).astype(int)
    middles = low + CELL * (np.stack(np.meshgrid(*map(np.arange, cells), indexing="ij"), axis=-1) + 0.5)
    is_street = KDTree(centers[:, :2]).query(middles)[0] <= STREET_WIDTH / 2  # [X, Y]
    ground = centers[:, 2] - EYE_HEIGHT
    ends = np.full(rays.shape, np.nan)
    along = np.arange(STEP, FARTHEST, STEP)[:, None]  # [S, 1]
    for view, (center, directions) in enumerate(zip(centers, rays, strict=True)):
        x, y = (
            np.clip((center[axis] - low[axis] + along * directions[:, axis]) / CELL, 0, cells[axis] - 1).astype(int)
            for axis in (0, 1)
        )  # [S, M]
        height = center[2] - ground[view] + along * directions[:, 2]
        stops = ~is_street[x, y] | (height <= 0) | (height > HOUSE_HEIGHT)
        first = stops.argmax(axis=0)  # [M]
        column = np.arange(len(directions))
        hit = stops[first, column] & (height[first, column] <= HOUSE_HEIGHT)
        ends[view, hit] = (center + along[first] * directions)[hit]
    return ends
