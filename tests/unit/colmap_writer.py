"""Writes small COLMAP models and photographs, binary and text, whole or odd, for the tests of the parser."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.spatial.transform import Rotation

MODEL_IDS = {
    "SIMPLE_PINHOLE": 0,
    "PINHOLE": 1,
    "SIMPLE_RADIAL": 2,
    "RADIAL": 3,
    "OPENCV": 4,
    "OPENCV_FISHEYE": 5,
    "FULL_OPENCV": 6,
    "FOV": 7,
    "THIN_PRISM_FISHEYE": 10,
}
Camera = tuple[str, int, int, tuple[float, ...]]  # model, width, height, params
PINHOLE: Camera = ("PINHOLE", 40, 30, (35.0, 36.0, 20.0, 15.0))


@dataclass(frozen=True)
class Pose:
    """One registered image: world to camera, as COLMAP stores it."""

    image_id: int
    quat: tuple[float, ...]  # wxyz
    translation: tuple[float, ...]
    name: str
    camera_id: int = 1
    point_ids: tuple[int, ...] = (1, -1, 2)


@dataclass(frozen=True)
class Model:
    """A whole model; points are [M, 3]."""

    poses: tuple[Pose, ...]
    cameras: Mapping[int, Camera] = field(default_factory=lambda: {1: PINHOLE})
    points: np.ndarray = field(default_factory=lambda: np.random.default_rng(1).normal(size=(20, 3)))
    point_ids: Sequence[int] | None = None

    @property
    def names(self) -> list[str]:
        return [pose.name for pose in self.poses]


def survey(names: Iterable[str], offset: Sequence[float] = (0.0, 0.0, 0.0), **changes) -> Model:
    """Cameras that look down from a winding line at height 5, above points near the ground (z up)."""
    down = Rotation.from_matrix([[1, 0, 0], [0, -1, 0], [0, 0, -1]])  # world to camera
    poses = []
    for k, name in enumerate(names):
        turned = Rotation.from_euler("zyx", [180.0 * (k % 2), 3.0 * np.sin(k), 2.0 * np.cos(k)], degrees=True) * down
        centre = np.array([0.7 * k, 0.3 * (k % 3), 5.0]) + offset
        x, y, z, w = turned.as_quat()
        poses.append(Pose(k + 1, (w, x, y, z), tuple(-turned.apply(centre)), name))
    model = Model(tuple(poses), **changes)
    return replace(model, points=model.points + np.asarray(offset))


def centres(model: Model) -> np.ndarray:
    """Camera centres [N, 3] of a model, float64."""
    quats = np.array([pose.quat for pose in model.poses])[:, [1, 2, 3, 0]]
    return -Rotation.from_quat(quats).inv().apply(np.array([pose.translation for pose in model.poses]))


def write_binary(folder: Path, model: Model) -> Path:
    """Write cameras.bin, images.bin and points3D.bin."""
    folder.mkdir(parents=True, exist_ok=True)
    data = struct.pack("<Q", len(model.cameras))
    for camera_id, (kind, width, height, params) in model.cameras.items():
        data += struct.pack(f"<IiQQ{len(params)}d", camera_id, MODEL_IDS[kind], width, height, *params)
    (folder / "cameras.bin").write_bytes(data)
    data = struct.pack("<Q", len(model.poses))
    for pose in model.poses:
        data += struct.pack("<I7dI", pose.image_id, *pose.quat, *pose.translation, pose.camera_id)
        data += pose.name.encode() + b"\0" + struct.pack("<Q", len(pose.point_ids))
        for point_id in pose.point_ids:
            data += struct.pack("<ddq", 1.5, 2.5, point_id)
    (folder / "images.bin").write_bytes(data)
    data = struct.pack("<Q", len(model.points))
    for k, xyz in enumerate(model.points):
        track = (1, 0) * (k % 3)
        data += struct.pack("<Q3d3BdQ", _point_id(model, k), *xyz, k % 256, 20, 30, 0.5, len(track) // 2)
        data += struct.pack(f"<{len(track)}i", *track)
    (folder / "points3D.bin").write_bytes(data)
    return folder


def write_text(folder: Path, model: Model, newline: str = "\n", observations: bool = True, end: str = "") -> Path:
    """Write cameras.txt, images.txt and points3D.txt; `end` comes behind every line."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = {
        "cameras": ["# Camera list", *(f"{k} {c[0]} {c[1]} {c[2]} {_join(c[3])}" for k, c in model.cameras.items())],
        "images": ["# Image list", "#   IMAGE_ID, QW, QX, QY, QZ, TX, TY, TZ, CAMERA_ID, NAME"],
        "points3D": ["# 3D point list"],
    }
    for pose in model.poses:
        numbers = _join([*pose.quat, *pose.translation])
        lines["images"].append(f"{pose.image_id} {numbers} {pose.camera_id} {pose.name}")
        if observations:
            lines["images"].append(" ".join(f"1.5 2.5 {point_id}" for point_id in pose.point_ids))
    for k, xyz in enumerate(model.points):
        track = " 1 0" * (k % 3)
        lines["points3D"].append(f"{_point_id(model, k)} {_join(xyz)} {k % 256} 20 30 0.5{track}")
    for stem, content in lines.items():
        (folder / f"{stem}.txt").write_bytes((newline.join(line + end for line in content) + newline).encode())
    return folder


def write_photographs(root: Path, names: Iterable[str], size: tuple[int, int] = (40, 30)) -> list[Path]:
    """One small photograph per name; each has its own grey, so that mixed-up files show."""
    paths = []
    for k, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (20 * k % 256,) * 3).save(path)
        paths.append(path)
    return paths


def dataset(data: Path, model: Model, text: bool = False, size: tuple[int, int] = (40, 30)) -> Path:
    """A dataset folder: sparse/0 and images/."""
    (write_text if text else write_binary)(data / "sparse/0", model)
    write_photographs(data / "images", model.names, size)
    return data


def _point_id(model: Model, k: int) -> int:
    return k + 1 if model.point_ids is None else model.point_ids[k]


def _join(numbers: Iterable[float]) -> str:
    return " ".join(repr(float(number)) for number in numbers)
