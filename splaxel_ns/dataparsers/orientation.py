"""Which way is up: the rotation from a dataset's axes to a model frame with z up, in float64.

Shapes: N cameras; poses are camera-to-world in OpenGL axes (x right, y up, z back), float64.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from nerfstudio.cameras.camera_utils import auto_orient_and_center_poses, focus_of_attention
from scipy.spatial.transform import Rotation

OrientationMethod = Literal["auto", "pca", "up", "vertical", "none"]
CenterMethod = Literal["poses", "focus", "none"]
_Z = np.array([0.0, 0.0, 1.0])
_COLMAP_TO_Z_UP = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, -1.0, 0.0]])


def choose_rotation(
    poses: np.ndarray,  # [N, 3 or 4, 4] float64
    method: OrientationMethod,
    assume_colmap_axes: bool = True,
) -> np.ndarray:  # [3, 3] float64
    """The rotation that nerfstudio's orientation methods name, and "auto".

    "auto" keeps the axes where z already points up, as in every georeferenced model; sidewise "up" would stand the
    ground of a nadir survey on its edge, because the tops of such photographs point along the flight lines. Where
    the flight lines go back and forth the tops cancel out, and up is then where the cameras come from. Otherwise
    "auto" is "up".

    Args:
        poses: every camera of the dataset.
        method: "auto"; "up", "vertical" as in nerfstudio; "pca": z along the thinnest direction of the camera
            positions; "none": the dataset's axes.
        assume_colmap_axes: turn COLMAP's guess of gravity (y down) to z up first, as nerfstudio does. It is the
            result of "none"; for the others it only chooses among the rotations about z.
    """
    views = -poses[:, :3, 2].mean(axis=0)
    if method == "auto" and (_points_to_z(poses[:, :3, 1].mean(axis=0)) or _points_to_z(-views)):
        return np.eye(3)
    axes = _COLMAP_TO_Z_UP if assume_colmap_axes else np.eye(3)
    turned = axes @ poses[:, :3]  # [N, 3, 4]
    ups = turned[:, :, 1].mean(axis=0)
    if method == "auto":
        cancelled = np.linalg.norm(ups) < 0.5 < np.linalg.norm(views)
        return _turn_to_z(-axes @ views if cancelled else ups) @ axes
    if method == "up":
        return _turn_to_z(ups) @ axes
    if method == "pca":
        return _principal_axes(turned[:, :, 3], ups) @ axes
    if method == "vertical":
        rotations = torch.eye(4).repeat(len(poses), 1, 1)
        rotations[:, :3, :3] = torch.from_numpy(turned[:, :, :3])
        _, transform = auto_orient_and_center_poses(rotations, method="vertical", center_method="none")
        left, _, right = np.linalg.svd(transform[:, :3].double().numpy())  # orthonormal again beyond float32
        return left @ right @ axes
    if method == "none":
        return axes
    raise ValueError(f"orientation_method is '{method}'; it must be auto, pca, up, vertical or none.")


def choose_center(poses: np.ndarray, method: CenterMethod) -> np.ndarray:  # [N, 3 or 4, 4] -> [3]
    """The input position that becomes the origin: mean camera, what the cameras look at, or the origin itself.

    Raises:
        ValueError: "focus" and the cameras look in parallel, so that their axes meet nowhere.
    """
    mean = poses[:, :3, 3].mean(axis=0)
    if method == "poses":
        return mean
    if method == "none":
        return np.zeros(3)
    local = torch.from_numpy(np.concatenate([poses[:, :3, :3], (poses[:, :3, 3] - mean)[:, :, None]], axis=2))
    try:
        focus = focus_of_attention(local, torch.zeros(3, dtype=torch.float64)).numpy()
    except RuntimeError:  # torch's LinAlgError: a singular system
        focus = np.full(3, np.nan)
    if not np.isfinite(focus).all():
        raise ValueError("The cameras look in parallel and have no common focus. Use --center-method poses.")
    return mean + focus


def _points_to_z(direction: np.ndarray) -> bool:
    """Within 18 degrees of z, and not just the remainder of directions that cancel out."""
    length = float(np.linalg.norm(direction))
    return length > 0.3 and direction[2] > 0.95 * length


def _turn_to_z(direction: np.ndarray) -> np.ndarray:
    """The smallest rotation that turns a direction to z; none for directions that cancel out altogether."""
    length = float(np.linalg.norm(direction))
    if length < 1e-6:
        return np.eye(3)
    return Rotation.align_vectors(_Z[None], direction[None] / length)[0].as_matrix()


def _principal_axes(positions: np.ndarray, ups: np.ndarray) -> np.ndarray:
    """Rows are the principal directions of the positions, widest first, with the cameras' tops above."""
    offsets = positions - positions.mean(axis=0)
    rotation = np.linalg.eigh(offsets.T @ offsets)[1].T[::-1].copy()
    if rotation[2] @ ups < 0:
        rotation[2] *= -1
    if np.linalg.det(rotation) < 0:
        rotation[1] *= -1
    return rotation
