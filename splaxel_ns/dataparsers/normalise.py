"""From the frame a data set comes in to the frame the model is trained in, and back, in float64.

Coordinates of a survey (UTM: millions of metres) do not fit into float32, so everything is float64 until the centre has
been subtracted. A frame is a similarity, the same for cameras, points and depth:

    x_model = scale * rotation @ (x_input - centre)

Shapes: N cameras, M points. Poses are camera-to-world in OpenGL axes (x right, y up, z back), as nerfstudio keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs, transform_poses_to_original_space
from nerfstudio.data.scene_box import SceneBox
from torch import Tensor


@dataclass(frozen=True, eq=False)
class WorldFrame:
    """The similarity between input coordinates and model coordinates. All methods take and return float64 arrays."""

    centre: np.ndarray  # [3] float64, input units: becomes the origin of the model frame
    scale: float = 1.0  # model units per input unit
    rotation: np.ndarray = field(default_factory=lambda: np.eye(3))  # [3, 3] float64, input axes to model axes

    @property
    def transform(self) -> np.ndarray:  # [3, 4] float64
        """nerfstudio's `dataparser_transform`: rotation and translation, applied before the scale."""
        return np.concatenate([self.rotation, -(self.rotation @ self.centre)[:, None]], axis=1)

    def points_to_model(self, points: np.ndarray) -> np.ndarray:  # [M, 3] -> [M, 3]
        """Positions in the input frame, in the model frame."""
        return self.scale * ((np.asarray(points, np.float64) - self.centre) @ self.rotation.T)

    def points_to_input(self, points: np.ndarray) -> np.ndarray:  # [M, 3] -> [M, 3]
        """Positions in the model frame, in the input frame."""
        return (np.asarray(points, np.float64) / self.scale) @ self.rotation + self.centre

    def poses_to_model(self, poses: np.ndarray) -> np.ndarray:  # [N, 3 or 4, 4] -> [N, 3, 4]
        """Camera-to-world matrices of the input frame, in the model frame."""
        poses = np.asarray(poses, np.float64)
        positions = self.points_to_model(poses[:, :3, 3])
        return np.concatenate([self.rotation @ poses[:, :3, :3], positions[:, :, None]], axis=2)

    def poses_to_input(self, poses: np.ndarray) -> np.ndarray:  # [N, 3 or 4, 4] -> [N, 3, 4]
        """Camera-to-world matrices of the model frame, in the input frame."""
        poses = np.asarray(poses, np.float64)
        positions = self.points_to_input(poses[:, :3, 3])
        return np.concatenate([self.rotation.T @ poses[:, :3, :3], positions[:, :, None]], axis=2)


def fit_world_frame(
    cam_centers: np.ndarray,  # [N, 3] float64, input units
    auto_scale: bool = True,
    scale_factor: float = 1.0,
    rotation: np.ndarray | None = None,  # [3, 3] float64
) -> WorldFrame:
    """The frame with the mean camera at the origin and, with `auto_scale`, the farthest camera coordinate at 1.

    Give it the cameras that the data set lists, not those whose photographs were found: the frame of a trained model
    must not depend on which files are present. Cameras that all stand in one place have no extent: their scale is 1.

    Raises:
        ValueError: a centre is not finite, or `scale_factor` is not a positive number.
    """
    cam_centers = np.asarray(cam_centers, np.float64).reshape(-1, 3)
    if not np.isfinite(cam_centers).all():
        raise ValueError("a camera position is not finite; drop such poses before fitting the world frame")
    if not (np.isfinite(scale_factor) and scale_factor > 0):
        raise ValueError(f"scale_factor is {scale_factor}; it must be a positive number")
    rotation = np.eye(3) if rotation is None else np.asarray(rotation, np.float64)
    centre = cam_centers.mean(axis=0) if len(cam_centers) else np.zeros(3)
    offsets = (cam_centers - centre) @ rotation.T
    extent = float(np.abs(offsets).max(initial=0.0))
    # The mean of equal numbers may differ from them in the last bits: that is no extent.
    flat = extent <= 1e-12 * max(1.0, float(np.abs(centre).max()))
    scale = 1.0 / extent if auto_scale and not flat else 1.0
    return WorldFrame(centre=centre, scale=scale * float(scale_factor), rotation=rotation)


@dataclass
class NormalisedOutputs(DataparserOutputs):
    """Dataparser outputs with a float64 `dataparser_transform`, so that results go back to the input frame exactly."""

    @property
    def world_frame(self) -> WorldFrame:
        """The similarity these outputs were made with (float64)."""
        transform = self.dataparser_transform.double().cpu().numpy()
        rotation = transform[:, :3]
        return WorldFrame(-(rotation.T @ transform[:, 3]), float(self.dataparser_scale), rotation)

    def transform_poses_to_original_space(
        self,
        poses: Tensor,  # [N, 3, 4]
        camera_convention: Literal["opengl", "opencv"] = "opencv",
    ) -> Tensor:  # [N, 3, 4] float64
        """As in the base class, in float64 whatever the poses' type."""
        transform = self.dataparser_transform.double().to(poses.device)
        return transform_poses_to_original_space(poses.double(), transform, self.dataparser_scale, camera_convention)


def make_cameras(
    poses: np.ndarray,  # [N, 3, 4] float64, model frame
    fx: np.ndarray,  # [N], pixels
    fy: np.ndarray,  # [N], pixels
    cx: np.ndarray,  # [N], pixels
    cy: np.ndarray,  # [N], pixels
    widths: np.ndarray,  # [N], pixels
    heights: np.ndarray,  # [N], pixels
    distortion: np.ndarray | None = None,  # [N, 6] k1 k2 k3 k4 p1 p2; None: pinhole
    camera_type: CameraType = CameraType.PERSPECTIVE,
) -> Cameras:
    """nerfstudio cameras in float32, one entry per photograph; N may be 0."""

    def column(values: np.ndarray, dtype: torch.dtype) -> Tensor:  # [N, 1]
        return torch.as_tensor(np.asarray(values), dtype=dtype).reshape(-1, 1)

    count = len(poses)
    return Cameras(
        camera_to_worlds=torch.from_numpy(np.asarray(poses, np.float32).reshape(count, 3, 4)),
        fx=column(fx, torch.float32),
        fy=column(fy, torch.float32),
        cx=column(cx, torch.float32),
        cy=column(cy, torch.float32),
        width=column(widths, torch.int64),
        height=column(heights, torch.int64),
        distortion_params=None if distortion is None else torch.from_numpy(np.asarray(distortion, np.float32)),
        camera_type=torch.full((count, 1), camera_type.value, dtype=torch.int64),
    )


def make_outputs(
    frame: WorldFrame,
    image_filenames: Sequence[Path],
    cameras: Cameras,
    points: tuple[np.ndarray, np.ndarray] | None = None,  # [M, 3] float64 in the input frame, [M, 3] uint8
    mask_filenames: Sequence[Path] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> NormalisedOutputs:
    """Everything a datamanager needs, in the model frame.

    Args:
        frame: the data set's frame; the same for every split.
        image_filenames: one path per camera.
        cameras: in the model frame (`make_cameras` of `frame.poses_to_model`).
        points: seed positions and colours; None or no points leaves the keys out, and the model starts at random.
        mask_filenames: one path per camera, or None.
        metadata: further entries.
    """
    entries: dict[str, Any] = dict(metadata or {})
    if points is not None and len(points[0]) > 0:
        entries["points3D_xyz"] = torch.from_numpy(frame.points_to_model(points[0]).astype(np.float32))
        entries["points3D_rgb"] = torch.from_numpy(np.ascontiguousarray(points[1], np.uint8))
    positions = cameras.camera_to_worlds[:, :, 3]
    extent = max(1.0, float(positions.abs().max())) if len(positions) else 1.0
    return NormalisedOutputs(
        image_filenames=list(image_filenames),
        cameras=cameras,
        scene_box=SceneBox(aabb=torch.tensor([[-extent] * 3, [extent] * 3], dtype=torch.float32)),
        mask_filenames=None if mask_filenames is None else list(mask_filenames),
        metadata=entries,
        dataparser_transform=torch.from_numpy(frame.transform),
        dataparser_scale=frame.scale,
    )
