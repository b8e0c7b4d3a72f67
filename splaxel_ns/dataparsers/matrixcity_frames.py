"""MatrixCity's camera files as arrays: poses, units, intrinsics.

                  raw (train/<block>/transforms.json)      pose (pose/<block>/transforms_train.json)
    matrix        rot_mat, columns of length 0.01          transform_matrix, columns of length 1
    translation   metres                                   hectometres
    photograph    frame_index (with gaps), beside the file file_path, relative to the file
    intrinsics    camera_angle_x only                      camera_angle_x, fl_x, ..., w, h as floats (fusion: per frame)

Which of the two a file is shows in the length of the columns, so it is measured. Matrices are camera-to-world
in OpenGL axes; their last row is padding.

Shapes: N frames.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

_RAW_COLUMN, _POSE_COLUMN = 0.01, 1.0
METRES_PER_HECTOMETRE = 100.0
_DISTORTION = ("k1", "k2", "k3", "k4", "p1", "p2")


@dataclass(frozen=True, eq=False)
class FrameTable:
    """Frames in the order of the camera files, with NaN for what the files do not say."""

    paths: np.ndarray  # [N] object: Path of each photograph, where the camera file puts it
    poses: np.ndarray  # [N, 4, 4] float64, unit rotation, translation in input units
    intrinsics: np.ndarray  # [N, 4] float64: fx, fy, cx, cy in pixels
    angles: np.ndarray  # [N] float64, horizontal field of view in radians
    sizes: np.ndarray  # [N, 2] float64: width, height in pixels
    distortion: np.ndarray  # [N, 6] float64: k1 k2 k3 k4 p1 p2
    units: np.ndarray  # [N] float64, metres per input unit: 1 (raw) or 100 (pose)

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, rows: np.ndarray) -> FrameTable:  # indices or mask over N
        """The chosen frames."""
        return FrameTable(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


def read_frames(files: Sequence[Path], root: Path) -> tuple[FrameTable, list[str]]:
    """All frames of some camera files, without doubles, and the names of frames dropped for non-finite poses.

    Args:
        files: camera files of one split.
        root: the folder that names in messages are relative to.

    Raises:
        ValueError: a file is damaged or lacks a field, or a matrix is neither of the two kinds.
    """
    tables = [_read_file(path) for path in files]
    merged = {f.name: [getattr(table, f.name) for table in tables] for f in fields(FrameTable)}
    if not tables:
        return _empty(), []
    table = FrameTable(**{name: np.concatenate(parts) for name, parts in merged.items()})
    _, first = np.unique(np.array([str(path) for path in table.paths], dtype=object).astype(str), return_index=True)
    table = table.take(np.sort(first))
    finite = np.isfinite(table.poses).all(axis=(1, 2))
    dropped = [os.path.relpath(path, root) for path in table.paths[~finite]]
    return table.take(finite), dropped


def check_one_unit(*tables: FrameTable) -> float:
    """Metres per input unit of all tables; 1 if they are empty.

    Raises:
        ValueError: some frames are in metres and others in hectometres.
    """
    units = np.concatenate([table.units for table in tables])
    paths = np.concatenate([table.paths for table in tables])
    if len(units) == 0:
        return 1.0
    other = np.flatnonzero(units != units[0])
    if len(other):
        names = {float(units[0]): paths[0], float(units[other[0]]): paths[other[0]]}
        raise ValueError(
            f"Cameras in different units: '{names[1.0]}' is in metres (rotation columns of length 0.01, a raw camera "
            f"file), '{names[100.0]}' in hectometres (length 1, a pose file). Use files of one kind: a pose folder "
            f"or raw blocks, not both."
        )
    return float(units[0])


def complete_intrinsics(
    intrinsics: np.ndarray,  # [N, 4] with NaN where unknown
    angles: np.ndarray,  # [N] radians
    sizes: np.ndarray,  # [N, 2] pixels, the size that the intrinsics are meant for
) -> np.ndarray:  # [N, 4] float64
    """Focal lengths from the field of view, and principal points in the middle, where the files do not give them."""
    result = intrinsics.copy()
    from_angle = 0.5 * sizes[:, 0] / np.tan(0.5 * angles)
    result[:, 0] = np.where(np.isnan(result[:, 0]), from_angle, result[:, 0])
    result[:, 1] = np.where(np.isnan(result[:, 1]), result[:, 0], result[:, 1])
    for column, axis in ((2, 0), (3, 1)):
        result[:, column] = np.where(np.isnan(result[:, column]), 0.5 * sizes[:, axis], result[:, column])
    return result


def _empty() -> FrameTable:
    return FrameTable(
        paths=np.empty(0, dtype=object),
        poses=np.empty((0, 4, 4)),
        intrinsics=np.empty((0, 4)),
        angles=np.empty(0),
        sizes=np.empty((0, 2)),
        distortion=np.empty((0, 6)),
        units=np.empty(0),
    )


def _read_file(path: Path) -> FrameTable:
    """One camera file."""
    try:
        with open(path, encoding="utf-8-sig") as file:  # some editors put a byte order mark before the text
            meta = json.load(file)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not readable JSON ({error}). Download it again.") from error
    frames = meta.get("frames") if isinstance(meta, dict) else None
    if not isinstance(frames, list) or not all(isinstance(frame, dict) for frame in frames):
        raise ValueError(f"{path} has no list 'frames': it is not a camera file of MatrixCity.")
    if not frames:
        return _empty()
    paths = _paths(path, frames)
    poses, units = _poses(path, frames, paths)
    columns = {name: _column(path, meta, frames, name) for name in ("fl_x", "fl_y", "cx", "cy", "w", "h")}
    angles = _column(path, meta, frames, "camera_angle_x")
    blind = np.flatnonzero(np.isnan(angles) & np.isnan(columns["fl_x"]))
    if len(blind):
        raise ValueError(f"{path} gives neither camera_angle_x nor fl_x for '{paths[blind[0]].name}'.")
    distortion = np.stack([_column(path, meta, frames, name) for name in _DISTORTION], axis=1)
    return FrameTable(
        paths=paths,
        poses=poses,
        intrinsics=np.stack([columns[name] for name in ("fl_x", "fl_y", "cx", "cy")], axis=1),
        angles=angles,
        sizes=np.stack([columns["w"], columns["h"]], axis=1),
        distortion=np.nan_to_num(distortion),
        units=units,
    )


def _paths(path: Path, frames: list[dict[str, Any]]) -> np.ndarray:  # [N] object
    """Where the file puts the photographs. An index is a name, never a position: indices have gaps."""
    folder = path.parent
    paths = np.empty(len(frames), dtype=object)
    bases: dict[str, Path] = {}
    for i, frame in enumerate(frames):
        if isinstance(frame.get("file_path"), str):
            head, name = os.path.split(frame["file_path"].replace("\\", "/"))
            if head not in bases:
                bases[head] = Path(os.path.normpath(folder / head))
            paths[i] = bases[head] / name
        elif isinstance(frame.get("frame_index"), int):
            paths[i] = folder / f"{frame['frame_index']:04d}.png"
        else:
            raise ValueError(f"{path}: frame {i} of the list has neither frame_index nor file_path.")
    return paths


def _poses(path: Path, frames: list[dict[str, Any]], paths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Matrices with unit rotation [N, 4, 4], and metres per unit [N]."""
    key = "rot_mat" if "rot_mat" in frames[0] else "transform_matrix"
    poses = np.tile(np.eye(4), (len(frames), 1, 1))
    for i, frame in enumerate(frames):
        try:
            matrix = np.asarray(frame.get(key), dtype=np.float64)
        except (TypeError, ValueError):
            matrix = np.empty(0)
        if matrix.shape not in ((3, 4), (4, 4)):
            raise ValueError(f"{path}: '{paths[i].name}' has no {key} of 4x4 numbers.")
        poses[i, :3] = matrix[:3]
    finite = np.isfinite(poses).all(axis=(1, 2))
    lengths = np.where(finite[:, None], np.linalg.norm(np.nan_to_num(poses[:, :3, :3]), axis=1), _POSE_COLUMN)
    raw = np.abs(lengths / _RAW_COLUMN - 1).max(axis=1) < 0.02
    unit = np.abs(lengths / _POSE_COLUMN - 1).max(axis=1) < 0.02
    unit &= key != "rot_mat"
    odd = np.flatnonzero(finite & ~raw & ~unit)
    if len(odd):
        shown = ", ".join(f"{length:.4g}" for length in lengths[odd[0]])
        raise ValueError(
            f"{path}: the rotation of '{paths[odd[0]].name}' ({key}) has columns of length {shown}. Expected 0.01 "
            f"(raw files, metres) or, in transform_matrix, 1 (pose files, hectometres): the unit of the translation "
            f"cannot be told. Use the file as distributed."
        )
    poses[:, :3, :3] = np.where(raw[:, None, None], poses[:, :3, :3] / _RAW_COLUMN, poses[:, :3, :3])
    rotations = poses[finite, :3, :3]
    skew = np.abs(rotations @ rotations.transpose(0, 2, 1) - np.eye(3)).max(axis=(1, 2), initial=0.0)
    wrong = np.flatnonzero((skew > 0.05) | (np.linalg.det(rotations) < 0))
    if len(wrong):
        raise ValueError(f"{path}: {key} of '{paths[finite][wrong[0]].name}' is not a rotation (skewed or mirrored).")
    units = np.where(raw, 1.0, METRES_PER_HECTOMETRE)
    units[~finite] = units[finite][0] if finite.any() else units[0]
    return poses, units


def _column(path: Path, meta: dict[str, Any], frames: list[dict[str, Any]], name: str) -> np.ndarray:  # [N]
    """One number per frame, from the frame or else from the top of the file; NaN where neither has it."""
    default = meta.get(name, np.nan)
    values = [frame.get(name, default) for frame in frames]
    try:
        column = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {name} is not a number ({error}).") from error
    if name in ("camera_angle_x", "fl_x", "fl_y", "w", "h") and (column <= 0).any():
        raise ValueError(f"{path}: {name} is {column[column <= 0][0]:g}, it must be positive.")
    return column
