"""Seed points for MatrixCity: its point clouds, or random points where there are none.

The clouds are Open3D PLY files (double xyz, colours) in hectometres, in
`<city>_pointcloud/point_cloud_ds{,20}/<view>/`, one per block of the paper and one for all of them.

Shapes: M points, N cameras.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from plyfile import PlyData, PlyParseError

from splaxel_ns.dataparsers.matrixcity_layout import Layout

_COLORS = (("red", "green", "blue"), ("r", "g", "b"), ("diffuse_red", "diffuse_green", "diffuse_blue"))
SeedPoints = tuple[np.ndarray, np.ndarray]  # [M, 3] float64 positions, [M, 3] uint8 colours


def find_point_clouds(layout: Layout) -> tuple[list[Path], bool]:
    """The clouds of the selected part, and whether they hold more than that part.

    Looks beside the scene, the city and the data set. Without a cloud of the selected block that of the whole city is
    taken; without one of the whole city, those of its blocks.
    """
    views = ("aerial", "street", "merge", "") if layout.view == "fusion" else (layout.view, "")
    for place in _places(layout):
        for view in views:
            clouds = {path.stem.lower(): path for path in sorted((place / view).glob("[Bb]lock_*.ply"))}
            if f"block_{layout.block.lower()}" in clouds:
                return [clouds[f"block_{layout.block.lower()}"]], False
            if "block_all" in clouds:
                return [clouds["block_all"]], layout.block != "all"
            if clouds:
                return list(clouds.values()), layout.block != "all"
    return [], False


def packed_point_clouds(layout: Layout) -> list[Path]:
    """Archives of clouds that were not unpacked."""
    folders = {(path / pattern).parent for path, pattern in _search_folders(layout)}
    return sorted(path for folder in folders for path in folder.glob("*point_cloud_ds*.zip"))


def searched_folders(layout: Layout) -> str:
    """Where `find_point_clouds` looks, for messages."""
    return ", ".join(sorted(str(path / pattern) for path, pattern in _search_folders(layout)))


def read_point_clouds(paths: Sequence[Path], limit: int, seed: int) -> SeedPoints:
    """Positions in the file's units and colours of at most `limit` points (0: all), a random subset of the rest.

    Raises:
        ValueError: a file is not a PLY with x, y, z of at least one finite point.
    """
    clouds = [_open(path) for path in paths]
    total = sum(len(vertices) for vertices in clouds)
    rows = choose_rows(total, limit, seed)
    positions, colors, start = [], [], 0
    for vertices in clouds:
        part = rows[(rows >= start) & (rows < start + len(vertices))] - start
        start += len(vertices)
        chosen = vertices[part]
        positions.append(np.stack([np.asarray(chosen[axis], np.float64) for axis in "xyz"], axis=1))
        colors.append(_colors(chosen))
    points = np.concatenate(positions)
    finite = np.isfinite(points).all(axis=1)
    if not finite.any():
        raise ValueError(f"{', '.join(map(str, paths))}: no finite point in the file. Choose other --seed-points.")
    return points[finite], np.concatenate(colors)[finite]


def choose_rows(total: int, limit: int, seed: int) -> np.ndarray:  # [min(total, limit)] int64, ascending
    """A random subset without doubles, spread evenly over the file; `limit` 0 takes all.

    One row from each of `limit` equal stretches: memory grows with the limit, not with the file.
    """
    if limit <= 0 or total <= limit:
        return np.arange(total)
    bounds = np.arange(limit + 1, dtype=np.int64) * total // limit
    return np.random.default_rng(seed).integers(bounds[:-1], bounds[1:])


def crop_to_cameras(
    points: np.ndarray,  # [M, 3]
    cam_centers: np.ndarray,  # [N, 3]
    least_margin: float,
) -> np.ndarray:  # [M] bool
    """Points that the cameras may see: within their bounding box in x and y, and twice their height around it."""
    height = float(np.max(cam_centers[:, 2]) - np.percentile(points[:, 2], 1))
    margin = max(2.0 * height, 0.1 * float(np.ptp(cam_centers[:, :2], axis=0).max()), least_margin)
    low, high = cam_centers[:, :2].min(axis=0) - margin, cam_centers[:, :2].max(axis=0) + margin
    return ((points[:, :2] >= low) & (points[:, :2] <= high)).all(axis=1)


def random_points(poses: np.ndarray, count: int, seed: int, fallback_height: float) -> SeedPoints:
    """Random points where a city may be: around the cameras in x and y, between the ground and the lowest of them.

    Args:
        poses: [N, 4, 4] float64, z up. The ground is z = 0 if all cameras are above it, as in MatrixCity.
        count: number of points.
        seed: of the random numbers.
        fallback_height: height of the box, in input units, where the cameras do not look down from above the roofs.
    """
    centers = poses[:, :3, 3]
    low, high = centers.min(axis=0), centers.max(axis=0)
    downward = float(np.median(poses[:, 2, 2])) > 0.3  # the camera's z axis points back, so up if it looks down
    if low[2] > 0:
        ground, top = 0.0, float(low[2]) if downward else max(float(high[2]), fallback_height)
    else:
        ground, top = float(low[2]) - fallback_height, float(high[2]) + fallback_height
    margin = max(float(high[2]) - ground, 0.05 * float(np.ptp(centers[:, :2], axis=0).max()))
    box_low = np.array([low[0] - margin, low[1] - margin, ground])
    box_high = np.array([high[0] + margin, high[1] + margin, top])
    generator = np.random.default_rng(seed)
    points = generator.uniform(box_low, box_high, size=(count, 3))
    return points, generator.integers(0, 256, size=(count, 3)).astype(np.uint8)


def _search_folders(layout: Layout) -> list[tuple[Path, str]]:
    """Folders and the patterns of the folders of clouds in them."""
    scene = layout.scenes[0]
    city = scene.parent
    clouds = f"{city.name}_pointcloud"
    patterns = (f"{clouds}/*point_cloud_ds*", f"{clouds}/*/point_cloud_ds*", "*point_cloud_ds*")
    beside = [(folder, pattern) for folder in (city.parent, city) for pattern in patterns]
    return [*beside, (scene, patterns[-1])]


def _places(layout: Layout) -> list[Path]:
    """Folders that hold `<view>/Block_*.ply`, in the order of preference; the thinned clouds (ds20) first."""
    places = []
    for folder, pattern in _search_folders(layout):
        places += sorted(folder.glob(pattern), key=lambda path: (not path.name.endswith("ds20"), path.name))
    return [path for path in places if path.is_dir()]


def _open(path: Path) -> np.ndarray:
    """The vertices of a PLY as a structured array, mapped into memory where the file allows."""
    try:
        vertices = PlyData.read(str(path))["vertex"].data
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist.") from error
    except (PlyParseError, KeyError, OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a readable point cloud ({error}). Download or export it again.") from error
    if not set("xyz") <= set(vertices.dtype.names or ()):
        raise ValueError(f"{path}: the vertices have no x, y, z but {', '.join(vertices.dtype.names or ())}.")
    return vertices


def _colors(vertices: np.ndarray) -> np.ndarray:  # [M, 3] uint8
    """Colours as bytes, from bytes or from floats in 0..1; grey where the file has none."""
    for names in _COLORS:
        if set(names) <= set(vertices.dtype.names or ()):
            colors = np.stack([np.asarray(vertices[name]) for name in names], axis=1)
            if colors.dtype.kind == "f":
                colors = np.rint(np.clip(np.nan_to_num(colors), 0, 1) * 255)
            elif colors.dtype == np.uint16:
                colors = colors // 257
            return colors.astype(np.uint8)
    return np.full((len(vertices), 3), 128, dtype=np.uint8)
