"""nerfstudio's cameras as our views."""

from __future__ import annotations

import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from torch import Tensor

from splaxel_ns.types import View


def view_of(camera: Cameras, downscale: int = 1, pose: Tensor | None = None) -> View:
    """The view of one camera, float32; nothing of the camera is changed.

    Args:
        camera: One camera, OpenGL axes, undistorted.
        downscale: The image is this many times smaller on each side, rounded down.
        pose: Camera to world, OpenGL axes, instead of the camera's; gradients flow to it.  # [1, 3, 4]

    Returns:
        The view in OpenCV axes.

    Raises:
        ValueError: More than one camera, or not a pinhole.
    """
    if camera.camera_to_worlds.device.type != "cpu":  # the viewer's
        camera = camera.to("cpu")
    if camera.camera_to_worlds.reshape(-1, 3, 4).shape[0] != 1:
        raise ValueError(f"One camera at a time, not {tuple(camera.shape)}")
    camera_type = int(camera.camera_type.flatten()[0])
    if camera_type != CameraType.PERSPECTIVE.value:
        raise ValueError(
            f"Camera type {CameraType(camera_type).name} cannot be drawn: the order of partitions holds for pinhole "
            "cameras only. Choose a perspective camera, or undistort the photographs first."
        )
    camera_to_world = (camera.camera_to_worlds if pose is None else pose).reshape(3, 4).float().cpu()
    rotation = camera_to_world[:, :3] * torch.tensor([1.0, -1.0, -1.0])  # OpenGL to OpenCV axes
    translation = -(rotation.T @ camera_to_world[:, 3:])  # [3, 1]
    world_to_cam = torch.cat([torch.cat([rotation.T, translation], dim=1), torch.eye(4)[3:]])
    fx, fy, cx, cy = (float(v.flatten()[0]) / downscale for v in (camera.fx, camera.fy, camera.cx, camera.cy))
    intrinsics = torch.tensor([[fx, 0.0, cx], [0.0, fy, cy], [0.0, 0.0, 1.0]])
    width, height = int(camera.width.flatten()[0]), int(camera.height.flatten()[0])
    return View(world_to_cam, intrinsics, width // downscale, height // downscale)
