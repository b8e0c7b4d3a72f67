"""The world frame: float64 there and back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from splaxel_ns.dataparsers.normalise import fit_world_frame, make_cameras, make_outputs

UTM = np.array([587_660.0, 3_338_101.0, 300.0])  # metres


def utm_poses(count: int = 20) -> np.ndarray:  # [count, 4, 4]
    generator = np.random.default_rng(0)
    poses = np.tile(np.eye(4), (count, 1, 1))
    poses[:, :3, :3] = Rotation.from_rotvec(generator.normal(size=(count, 3))).as_matrix()
    poses[:, :3, 3] = UTM + generator.normal(size=(count, 3)) * 60
    return poses


def cameras_of(poses: np.ndarray):
    count = len(poses)
    size, focal = np.full(count, 100.0), np.full(count, 80.0)
    return make_cameras(poses, focal, focal, size / 2, size / 2, size, size)


@pytest.mark.parametrize("rotation", [None, Rotation.from_euler("xyz", [0.3, -1.0, 2.0]).as_matrix()])
def test_there_and_back_in_float64(rotation: np.ndarray | None):
    poses = utm_poses()
    frame = fit_world_frame(poses[:, :3, 3], rotation=rotation)
    model = frame.poses_to_model(poses)
    assert np.abs(model[:, :, 3]).max() == pytest.approx(1.0)
    np.testing.assert_allclose(frame.poses_to_input(model), poses[:, :3], atol=1e-8)
    np.testing.assert_allclose(
        frame.points_to_input(frame.points_to_model(poses[:, :3, 3])), poses[:, :3, 3], atol=1e-8
    )
    by_transform = poses[:, :3, 3] @ frame.transform[:, :3].T + frame.transform[:, 3]
    np.testing.assert_allclose(model[:, :, 3], frame.scale * by_transform, atol=1e-9)


def test_outputs_keep_the_frame_in_float64(tmp_path: Path):
    poses = utm_poses()
    frame = fit_world_frame(poses[:, :3, 3], scale_factor=2.0)
    points = poses[:, :3, 3] + 1
    colors = np.full((len(points), 3), 9, np.uint8)
    paths = [Path(f"{k}.png") for k in range(len(poses))]
    outputs = make_outputs(frame, paths, cameras_of(frame.poses_to_model(poses)), (points, colors))
    assert outputs.metadata["points3D_xyz"].dtype == torch.float32
    assert outputs.metadata["points3D_rgb"].dtype == torch.uint8
    back = outputs.transform_poses_to_original_space(outputs.cameras.camera_to_worlds, "opengl")
    np.testing.assert_allclose(back[:, :, 3], poses[:, :3, 3], atol=1e-3)  # a millimetre, from float32 model poses
    flipped = outputs.transform_poses_to_original_space(outputs.cameras.camera_to_worlds)  # to OpenCV axes
    np.testing.assert_allclose(flipped[:, :, 1], -back[:, :, 1])
    np.testing.assert_allclose(outputs.world_frame.centre, frame.centre, rtol=1e-15)
    outputs.save_dataparser_transform(tmp_path / "run/dataparser_transforms.json")
    saved = json.loads((tmp_path / "run/dataparser_transforms.json").read_text())
    assert saved["scale"] == frame.scale
    np.testing.assert_array_equal(saved["transform"], frame.transform)


def test_no_extent_and_no_cameras():
    assert fit_world_frame(np.tile(UTM + 0.1, (7, 1))).scale == 1.0
    assert fit_world_frame(UTM[None]).scale == 1.0
    empty = fit_world_frame(np.empty((0, 3)))
    outputs = make_outputs(empty, [], cameras_of(np.empty((0, 3, 4))))
    assert len(outputs.cameras) == 0 and outputs.metadata == {}


def test_refusals():
    with pytest.raises(ValueError, match="not finite"):
        fit_world_frame(np.array([[0.0, np.nan, 0.0]]))
    with pytest.raises(ValueError, match="scale_factor is -1"):
        fit_world_frame(UTM[None], scale_factor=-1)
