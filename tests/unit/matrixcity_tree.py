"""Small trees in MatrixCity's layouts, with tiny photographs, for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from plyfile import PlyData, PlyElement

AERIAL_FOV = 0.7853981852531433
STREET_FOV = 1.5707963705062866
AERIAL_SIZE, STREET_SIZE = (32, 18), (20, 20)  # pixels


def poses_metres(count: int, seed: int = 0, height: float = 200.0) -> np.ndarray:  # [count, 4, 4]
    """Camera-to-world matrices that look down at 60 degrees, in metres."""
    generator = np.random.default_rng(seed)
    poses = np.tile(np.eye(4), (count, 1, 1))
    for pose, yaw in zip(poses, generator.uniform(0, 2 * np.pi, count), strict=True):
        pitch = np.radians(30.0)  # 0 looks straight down
        about_z = np.array([[np.cos(yaw), -np.sin(yaw), 0], [np.sin(yaw), np.cos(yaw), 0], [0, 0, 1]])
        about_x = np.array([[1, 0, 0], [0, np.cos(pitch), -np.sin(pitch)], [0, np.sin(pitch), np.cos(pitch)]])
        pose[:3, :3] = about_z @ about_x
    poses[:, :3, 3] = generator.uniform([-900, -600, height], [-200, 0, height * 1.5], (count, 3))
    return poses


def write_photographs(folder: Path, names: Sequence[str], size: tuple[int, int] = AERIAL_SIZE) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for k, name in enumerate(names):
        Image.new("RGB", size, (40 + 7 * k % 200, 90, 20)).save(folder / name)


def write_raw(
    folder: Path,
    count: int = 3,
    *,
    indices: Sequence[int] | None = None,
    fov: float = AERIAL_FOV,
    size: tuple[int, int] = AERIAL_SIZE,
    seed: int = 0,
    photographs: bool = True,
) -> np.ndarray:
    """A raw block: transforms_origin.json (all of `count`), transforms.json (those in `indices`), photographs.

    The last row of the matrices is all zeros, as padding may be. Returns the poses in metres, [count, 4, 4].
    """
    folder.mkdir(parents=True, exist_ok=True)
    poses = poses_metres(count, seed)
    frames = []
    for k, pose in enumerate(poses):
        matrix = pose.copy()
        matrix[:3, :3] *= 0.01
        matrix[3] = 0
        frames.append({"frame_index": k, "rot_mat": matrix.tolist(), "euler": [0.0, 0.0, 0.0]})
    kept = frames if indices is None else [frames[k] for k in indices]
    for name, chosen in (("transforms_origin", frames), ("transforms", kept)):
        (folder / f"{name}.json").write_text(json.dumps({"camera_angle_x": fov, "frames": chosen}))
    if photographs:
        write_photographs(folder, [f"{k:04d}.png" for k in range(count)], size)
    return poses


def write_pose(
    path: Path,
    frames: Sequence[tuple[str, np.ndarray]],  # file_path, pose in metres
    *,
    fov: float = AERIAL_FOV,
    size: tuple[int, int] = AERIAL_SIZE,
) -> None:
    """A pose file: unit rotation, hectometres, intrinsics as floats."""
    path.parent.mkdir(parents=True, exist_ok=True)
    focal = 0.5 * size[0] / np.tan(0.5 * fov)
    meta = {"camera_angle_x": fov, "fl_x": focal, "fl_y": focal, "cx": size[0] / 2, "cy": size[1] / 2}
    meta |= {"w": float(size[0]), "h": float(size[1])} | dict.fromkeys(("k1", "k2", "k3", "k4", "p1", "p2"), 0)
    listed = []
    for name, pose in frames:
        matrix = pose.copy()
        matrix[:3, 3] /= 100
        listed.append({"file_path": name, "transform_matrix": matrix.tolist()})
    path.write_text(json.dumps(meta | {"frames": listed}))


def write_aerial(scene: Path, *, pose: bool = True, blocks: Sequence[str] = ("1", "2")) -> None:
    """small_city/aerial with two train and two test blocks, and pose/block_A and block_all."""
    frames: dict[str, list[tuple[str, np.ndarray]]] = {"train": [], "test": []}
    for k, number in enumerate(blocks):
        for split, name, count in (("train", f"block_{number}", 4), ("test", f"block_{number}_test", 2)):
            poses = write_raw(scene / split / name, count, indices=range(1, count), seed=10 * k + count)
            frames[split] += [(f"../../{split}/{name}/{i:04d}.png", poses[i]) for i in range(1, count)]
    if pose:
        for split, listed in frames.items():
            write_pose(scene / f"pose/block_A/transforms_{split}.json", listed[: len(listed) // 2])
            write_pose(scene / f"pose/block_all/transforms_{split}.json", listed)


def write_cloud(path: Path, points: np.ndarray, color: int = 77) -> None:
    """An Open3D-like cloud: double xyz, byte colours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = [("x", "f8"), ("y", "f8"), ("z", "f8"), ("red", "u1"), ("green", "u1"), ("blue", "u1")]
    vertices = np.empty(len(points), dtype=fields)
    for axis, values in zip("xyz", points.T, strict=True):
        vertices[axis] = values
    for name in ("red", "green", "blue"):
        vertices[name] = color
    PlyData([PlyElement.describe(vertices, "vertex")]).write(str(path))
