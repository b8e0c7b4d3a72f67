"""A city on disk, in MatrixCity's layout: where everything lies, and how it is written.

    small_city/<view>/{train,test}/<block>/transforms{,_origin}.json, 0000.png     raw: rotations x 0.01, metres
    small_city/<view>/pose/block_all/transforms_{train,test}.json                   pose: hectometres
    small_city_depth_float32/<view>/{train,test}/<block>_depth/0000.exr             centimetres, along the optical axis
    small_city_pointcloud/point_cloud_ds20/<view>/Block_all.ply                     hectometres
    city.json                                                                       how it was made

Shapes: M points, H x W pixels.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from plyfile import PlyData, PlyElement

from splaxel_ns.city.cameras import Shot
from splaxel_ns.dataparsers.matrixcity_depth import CENTIMETRES_PER_METRE, SATURATED_CM
from splaxel_ns.dataparsers.matrixcity_frames import METRES_PER_HECTOMETRE

MARK = "city.json"
"""The file by which a folder is known to hold a city of this command."""
_CITY = "small_city"
_RAW_SCALE = 0.01
_DISTORTION = dict.fromkeys(("k1", "k2", "k3", "k4", "p1", "p2"), 0.0)


def scene_folder(root: Path, view: str) -> Path:
    """What `--data` takes."""
    return root / _CITY / view


def photograph_path(root: Path, shot: Shot) -> Path:
    return scene_folder(root, shot.view) / shot.split / shot.block / f"{shot.index:04d}.png"


def depth_path(root: Path, shot: Shot) -> Path:
    folder = root / f"{_CITY}_depth_float32" / shot.view / shot.split / f"{shot.block}_depth"
    return folder / f"{shot.index:04d}.exr"


def cloud_path(root: Path, view: str) -> Path:
    return root / f"{_CITY}_pointcloud" / "point_cloud_ds20" / view / "Block_all.ply"


def make_folders(root: Path, shots: Sequence[Shot]) -> None:
    """Every folder that files of these photographs go to."""
    files = [path for shot in shots for path in (photograph_path(root, shot), depth_path(root, shot))]
    files += [cloud_path(root, view) for view in {shot.view for shot in shots}]
    for folder in sorted({path.parent for path in files}):
        folder.mkdir(parents=True)


def write_photograph(path: Path, pixels: np.ndarray) -> None:  # [H, W, 3] uint8
    Image.fromarray(pixels).save(path)


def write_depth(path: Path, depth: np.ndarray) -> None:  # [H, W] metres, infinite in the sky
    """Three equal channels; the sky has the value of a saturated float16, which readers leave out.

    Raises:
        RuntimeError: OpenCV cannot write EXR here.
        OSError: the file cannot be written.
    """
    os.environ.setdefault("OPENCV_IO_ENABLE_OPENEXR", "1")
    import cv2  # after the variable, which OpenCV reads once

    centimetres = np.where(np.isfinite(depth), depth * np.float32(CENTIMETRES_PER_METRE), np.float32(SATURATED_CM))
    try:
        written = cv2.imwrite(str(path), np.repeat(centimetres.astype(np.float32)[..., None], 3, axis=-1))
    except cv2.error as error:
        raise RuntimeError(
            f"{path} cannot be written ({' '.join(str(error).split())}): OpenCV has no EXR support here; "
            "opencv-python-headless 4.10.0.84 has, with OPENCV_IO_ENABLE_OPENEXR=1"
        ) from error
    if not written:
        raise OSError(f"{path} cannot be written: is the disk full?")


def write_cloud(path: Path, points: np.ndarray, colors: np.ndarray) -> None:  # [M, 3] metres, [M, 3] uint8
    """As Open3D writes it."""
    fields = [(axis, "f8") for axis in "xyz"] + [(name, "u1") for name in ("red", "green", "blue")]
    vertices = np.empty(len(points), dtype=fields)
    for k, axis in enumerate("xyz"):
        vertices[axis] = points[:, k] / METRES_PER_HECTOMETRE
    for k, name in enumerate(("red", "green", "blue")):
        vertices[name] = colors[:, k]
    PlyData([PlyElement.describe(vertices, "vertex")]).write(str(path))


def write_cameras(root: Path, shots: Sequence[Shot], width: int, height: int) -> None:
    """The camera files of all blocks, and the pose files of both splits."""
    blocks: dict[Path, list[Shot]] = {}
    splits: dict[tuple[str, str], list[Shot]] = {}
    for shot in shots:
        blocks.setdefault(photograph_path(root, shot).parent, []).append(shot)
        splits.setdefault((shot.view, shot.split), []).append(shot)
    for folder, taken in blocks.items():
        frames = [{"frame_index": shot.index, "rot_mat": _raw_matrix(shot.pose)} for shot in taken]
        for name in ("transforms", "transforms_origin"):
            _write_json(folder / f"{name}.json", {"camera_angle_x": taken[0].fov, "frames": frames})
    for (view, split), taken in splits.items():
        folder = scene_folder(root, view) / "pose" / "block_all"
        folder.mkdir(parents=True, exist_ok=True)
        focal = 0.5 * width / np.tan(0.5 * taken[0].fov)
        meta = {"camera_angle_x": taken[0].fov, "fl_x": focal, "fl_y": focal, "cx": 0.5 * width, "cy": 0.5 * height}
        meta |= {"w": float(width), "h": float(height)} | _DISTORTION
        frames = [
            {
                "file_path": f"../../{split}/{shot.block}/{shot.index:04d}.png",
                "transform_matrix": _pose_matrix(shot.pose),
            }
            for shot in taken
        ]
        _write_json(folder / f"transforms_{split}.json", meta | {"frames": frames})


def write_mark(root: Path, facts: dict) -> None:
    _write_json(root / MARK, facts)


def _raw_matrix(pose: np.ndarray) -> list[list[float]]:
    """Columns of length 0.01, metres."""
    matrix = pose.copy()
    matrix[:3, :3] *= _RAW_SCALE
    return matrix.tolist()


def _pose_matrix(pose: np.ndarray) -> list[list[float]]:
    """Unit columns, hectometres."""
    matrix = pose.copy()
    matrix[:3, 3] /= METRES_PER_HECTOMETRE
    return matrix.tolist()


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
