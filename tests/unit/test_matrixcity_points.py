"""Seed points and depth of the matrixcity dataparser, and the committed capture that looks like MatrixCity."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from matrixcity_tree import poses_metres, write_aerial, write_cloud, write_photographs, write_pose
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from PIL import Image
from plyfile import PlyData
from scipy.spatial import KDTree

from splaxel_ns.dataparsers import matrixcity_depth
from splaxel_ns.dataparsers.matrixcity import MatrixCityDataParser, MatrixCityDataParserConfig
from splaxel_ns.dataparsers.matrixcity_depth import edge_mask, lift_depth, read_depth
from splaxel_ns.dataparsers.matrixcity_points import choose_rows, read_point_clouds
from splaxel_ns.dataparsers.normalise import NormalisedOutputs, WorldFrame

DATA = Path(__file__).parents[1] / "data/matrixcity_caliterra"
SCENE = DATA / "small_city/aerial"
CLOUD = DATA / "small_city_pointcloud/point_cloud_ds20/aerial/Block_all.ply"
FLOAT32_DEPTH = DATA / "small_city_depth_float32/aerial/train/block_1_depth/0003.exr"
FLOAT16_DEPTH = DATA / "small_city_depth/aerial/train/block_1_depth/0001.exr"


def parser(data: Path, **options) -> MatrixCityDataParser:
    return MatrixCityDataParserConfig(data=data, **options).setup()


def write_exr(path: Path, centimetres: np.ndarray, half: bool = False) -> None:
    os.environ.setdefault("OPENCV_IO_ENABLE_OPENEXR", "1")
    import cv2

    path.parent.mkdir(parents=True, exist_ok=True)
    kind = cv2.IMWRITE_EXR_TYPE_HALF if half else cv2.IMWRITE_EXR_TYPE_FLOAT
    pixels = np.repeat(np.asarray(centimetres, np.float32)[..., None], 3, axis=2)
    assert cv2.imwrite(str(path), pixels, [cv2.IMWRITE_EXR_TYPE, kind])


def frame_of(outputs: DataparserOutputs) -> WorldFrame:
    assert isinstance(outputs, NormalisedOutputs)
    return outputs.world_frame


def to_input(outputs: DataparserOutputs, points) -> np.ndarray:
    return frame_of(outputs).points_to_input(np.asarray(points))


def test_committed_data_is_small_and_whole():
    files = [path for path in DATA.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 5e6
    assert (DATA / "ORIGIN.md").read_text().count("CC0") >= 1
    made = parser(DATA)
    train, test = made.get_dataparser_outputs("train"), made.get_dataparser_outputs("test")
    assert (len(train.image_filenames), len(test.image_filenames)) == (52, 8)
    assert len(set(train.image_filenames + test.image_filenames)) == 60
    assert {path.name for path in test.image_filenames} == {f"{k:04d}.png" for k in range(4)}
    assert train.cameras.width.unique().tolist() == [238] and train.cameras.height.unique().tolist() == [178]
    assert train.metadata["points3D_xyz"].shape == (30122, 3)


def test_committed_raw_and_pose_agree():
    pose, raw = (parser(SCENE / kind).get_dataparser_outputs("train") for kind in ("pose/block_all", "train"))
    assert pose.image_filenames == raw.image_filenames
    np.testing.assert_allclose(raw.cameras.camera_to_worlds, pose.cameras.camera_to_worlds, atol=1e-5)
    np.testing.assert_allclose(raw.cameras.fx, pose.cameras.fx, rtol=1e-5)
    np.testing.assert_allclose(raw.metadata["points3D_xyz"], pose.metadata["points3D_xyz"], atol=1e-5)


def test_committed_cloud_has_the_colours_of_the_photographs():
    """A reprojected point has the brightness of its pixel; a wrong axis, unit or pairing of files gives none of it."""
    outputs = parser(SCENE).get_dataparser_outputs("test")
    points, colors = read_point_clouds([CLOUD], 0, 0)
    for k, path in enumerate(outputs.image_filenames):
        pose = frame_of(outputs).poses_to_input(outputs.cameras.camera_to_worlds[k : k + 1].numpy())[0]
        camera = outputs.cameras[k]
        local = (points - pose[:, 3]) @ pose[:, :3]
        x = float(camera.fx) * local[:, 0] / -local[:, 2] + float(camera.cx)
        y = -float(camera.fy) * local[:, 1] / -local[:, 2] + float(camera.cy)
        seen = (local[:, 2] < 0) & (x >= 0) & (x < 238) & (y >= 0) & (y < 178)
        with Image.open(path) as image:
            pixels = np.asarray(image)[y[seen].astype(int), x[seen].astype(int)]
        assert seen.sum() > 1000
        assert np.corrcoef(pixels.mean(axis=1), colors[seen].mean(axis=1))[0, 1] > 0.7


@pytest.mark.parametrize("kind", ["pose/block_all", "train"])
def test_committed_depth_lies_on_the_cloud(kind: str):
    """With hectometre poses and with metre poses; depth was interpolated from this cloud, to about a metre."""
    outputs = parser(SCENE / kind, seed_points="depth", max_seed_points=4000).get_dataparser_outputs()
    lifted = to_input(outputs, outputs.metadata["points3D_xyz"]) / (1 if kind.startswith("pose") else 100)
    assert 3900 <= len(lifted) <= 4000
    cloud = read_point_clouds([CLOUD], 0, 0)[0]
    distances = KDTree(cloud).query(lifted)[0]
    assert np.median(distances) < 0.006  # hectometres; the cloud's own spacing is 0.003
    assert np.percentile(distances, 99) < 0.03
    colors = outputs.metadata["points3D_rgb"].numpy()
    nearest = read_point_clouds([CLOUD], 0, 0)[1][KDTree(cloud).query(lifted)[1]]
    assert np.corrcoef(colors.mean(axis=1), nearest.mean(axis=1))[0, 1] > 0.4


def test_committed_depth_masks_the_saturated_patch():
    half, full = read_depth(FLOAT16_DEPTH), read_depth(FLOAT32_DEPTH)
    assert half.shape == full.shape == (178, 238)
    assert np.isnan(half[:20, :40]).all() and np.isnan(half).sum() == 800
    assert np.isfinite(full).all() and 30 < full.min() < full.max() < 60  # metres


def test_frame_is_the_same_for_cloud_and_cameras():
    outputs = parser(SCENE).get_dataparser_outputs()
    np.testing.assert_allclose(
        to_input(outputs, outputs.metadata["points3D_xyz"]), read_point_clouds([CLOUD], 0, 0)[0], atol=1e-6
    )
    assert outputs.dataparser_transform.dtype.is_floating_point and outputs.dataparser_transform.itemsize == 8


def test_scale_options():
    plain = parser(SCENE, auto_scale_poses=False).get_dataparser_outputs()
    tripled = parser(SCENE, auto_scale_poses=False, scale_factor=3.0).get_dataparser_outputs()
    assert (plain.dataparser_scale, tripled.dataparser_scale) == (1.0, 3.0)
    for key in ("cameras", "points"):
        a, b = (
            out.cameras.camera_to_worlds[:, :, 3] if key == "cameras" else out.metadata["points3D_xyz"]
            for out in (plain, tripled)
        )
        np.testing.assert_allclose(3 * a, b, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="scale_factor is 0"):
        parser(SCENE, scale_factor=0.0).get_dataparser_outputs()


def test_load_depth_hands_maps_to_other_methods(tmp_path: Path):
    write_aerial(tmp_path / "small_city/aerial")
    made = parser(tmp_path, load_depth=True, block=("A",), seed_points="random", num_random_points=5)
    with pytest.raises(ValueError, match=r"3 of 3 have none, the first .*block_1/0001.png.*small_city_depth_float32"):
        made.get_dataparser_outputs()
    for k in range(1, 4):
        folder = "small_city_depth_float32" if k < 3 else "small_city_depth"
        write_exr(tmp_path / folder / f"aerial/train/block_1_depth/{k:04d}.exr", np.full((18, 32), 5000.0), k == 3)
    outputs = made.get_dataparser_outputs()
    assert [path.name for path in outputs.metadata["depth_filenames"]] == ["0001.exr", "0002.exr", "0003.exr"]
    from nerfstudio.data.utils.data_utils import get_depth_image_from_path

    factor = outputs.metadata["depth_unit_scale_factor"] * outputs.dataparser_scale
    depth = get_depth_image_from_path(outputs.metadata["depth_filenames"][0], 18, 32, factor)
    assert float(depth[0, 0, 0]) == pytest.approx(0.5 * outputs.dataparser_scale, rel=1e-5)  # 50 m are 0.5 hm


def plane_scene(tmp_path: Path) -> np.ndarray:
    """Two cameras over the plane z = 0, with exact depth maps of half the photographs' size. Poses in metres."""
    scene = tmp_path / "small_city/aerial"
    poses = poses_metres(2)
    write_photographs(scene / "train/block_1", ["0000.png", "0001.png"], (64, 36))
    listed = [(f"../../train/block_1/{k:04d}.png", pose) for k, pose in enumerate(poses)]
    write_pose(scene / "pose/block_A/transforms_train.json", listed, size=(64, 36))
    focal = 16 / np.tan(0.5 * 0.7853981852531433)
    x, y = np.meshgrid((np.arange(32) + 0.5 - 16) / focal, -(np.arange(18) + 0.5 - 9) / focal)
    for k, pose in enumerate(poses):
        rays = np.stack([x, y, -np.ones_like(x)], axis=-1) @ pose[:3, :3].T
        write_exr(
            tmp_path / f"small_city_depth/aerial/train/block_1_depth/{k:04d}.exr", -pose[2, 3] / rays[..., 2] * 100
        )
    return poses


def test_depth_of_a_plane_lifts_to_the_plane(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    poses = plane_scene(tmp_path)
    outputs = parser(tmp_path, max_seed_points=300).get_dataparser_outputs()
    points = to_input(outputs, outputs.metadata["points3D_xyz"]) * 100  # metres
    assert len(points) == 300
    assert np.abs(points[:, 2]).max() < 0.01
    assert "300 pixels of 2 depth maps" in capsys.readouterr().out
    near = parser(tmp_path, max_depth=float(poses[:, 2, 3].min()) * 1.1).get_dataparser_outputs()
    assert 0 < len(near.metadata["points3D_xyz"]) < 2 * 32 * 18
    with pytest.raises(ValueError, match="No valid pixel in 2 depth maps.*--max-depth"):
        parser(tmp_path, max_depth=1.0).get_dataparser_outputs()


def test_same_seed_gives_the_same_points(tmp_path: Path):
    plane_scene(tmp_path)
    a, b, c = (
        parser(tmp_path, max_seed_points=50, seed=seed).get_dataparser_outputs().metadata["points3D_xyz"]
        for seed in (1, 1, 2)
    )
    assert (a == b).all() and not (a == c).all()


def test_lift_uses_pixel_centres():
    pose = np.eye(4)
    pose[:3, 3] = [10.0, 20.0, 30.0]
    depth = np.full((4, 6), 5.0, np.float32)
    points = lift_depth(depth, np.array([1]), np.array([4]), pose, np.array([2.0, 2.0, 3.0, 2.0]), 100.0)
    np.testing.assert_allclose(points, [[10 + 1.5 / 2 * 0.05, 20 + 0.5 / 2 * 0.05, 30 - 0.05]])


def test_edges_are_left_out():
    depth = np.full((5, 6), 100.0, np.float32)
    depth[:, 3:] = 120.0
    depth[0, 0] = np.nan
    edges = edge_mask(depth, 0.05)
    assert edges[:, 2:4].all() and edges.sum() == 10
    assert not edge_mask(depth, 0.3).any() and not edge_mask(depth, 0.0).any()


def test_unreadable_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for content, message in ((b"", "empty"), (b"P6 no", "not an EXR file")):
        (tmp_path / "0.exr").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_depth(tmp_path / "0.exr")
    import cv2

    monkeypatch.setattr(cv2, "imread", lambda *arguments: None)  # what an OpenCV without OpenEXR answers
    monkeypatch.setitem(__import__("sys").modules, "OpenEXR", None)
    with pytest.raises(RuntimeError, match="opencv-python-headless 4.10.0.84.*pip install OpenEXR"):
        read_depth(FLOAT32_DEPTH)
    assert matrixcity_depth.SATURATED_CM == np.finfo(np.float16).max


def city(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """A scene and points in hectometres below its cameras."""
    write_aerial(tmp_path / "small_city/aerial")
    points = np.random.default_rng(3).uniform([-10, -7, 0], [-1, 1, 0.5], (500, 3))
    return tmp_path / "small_city/aerial", points


@pytest.mark.parametrize(
    "folder",
    [
        "small_city_pointcloud/point_cloud_ds20",
        "small_city_pointcloud/matrixcity_point_cloud_ds20/point_cloud_ds20",
        "point_cloud_ds20",
        "small_city/point_cloud_ds20",
    ],
)
def test_cloud_is_found(tmp_path: Path, folder: str):
    scene, points = city(tmp_path)
    write_cloud(tmp_path / folder / "aerial/Block_all.ply", points)
    for data in (scene / "pose", scene / "train"):
        outputs = parser(data).get_dataparser_outputs()
        unit = 1 if data.name == "pose" else 100
        np.testing.assert_allclose(to_input(outputs, outputs.metadata["points3D_xyz"]), unit * points, atol=1e-4 * unit)
        assert outputs.metadata["points3D_rgb"].unique().tolist() == [77]


def test_cloud_of_the_selected_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    scene, points = city(tmp_path)
    folder = tmp_path / "small_city_pointcloud/point_cloud_ds20/aerial"
    write_cloud(folder / "Block_A.ply", points[:100])
    write_cloud(folder / "Block_B.ply", points[100:])
    options = [(("A",), 100), (("1", "2"), 100), ((), 500)]
    for block, count in options:
        outputs = parser(scene, block=block).get_dataparser_outputs()
        assert len(outputs.metadata["points3D_xyz"]) == count
    far = points + [400, 0, 0]
    write_cloud(folder / "Block_all.ply", np.concatenate([points, far]))
    (folder / "Block_A.ply").unlink()
    outputs = parser(scene, block=("A",)).get_dataparser_outputs()  # cut out of the whole city
    assert len(outputs.metadata["points3D_xyz"]) == 500
    assert "500 from" in capsys.readouterr().out
    assert len(parser(scene, max_seed_points=40).get_dataparser_outputs().metadata["points3D_xyz"]) == 40


def test_cloud_given_by_path_in_metres(tmp_path: Path):
    scene, points = city(tmp_path)
    write_cloud(tmp_path / "my.ply", points * 100)
    options = {"seed_points": "ply", "point_cloud": tmp_path / "my.ply"}
    outputs = parser(scene, point_cloud_unit=1.0, **options).get_dataparser_outputs()
    np.testing.assert_allclose(to_input(outputs, outputs.metadata["points3D_xyz"]), points, atol=1e-4)
    with pytest.raises(ValueError, match="of 500 points lie around the cameras.*--point-cloud-unit is 100"):
        write_cloud(tmp_path / "my.ply", points * 100 + [5000, 0, 0])
        parser(scene, **options).get_dataparser_outputs()
    (tmp_path / "my.ply").write_bytes(CLOUD.read_bytes()[:9000])
    with pytest.raises(ValueError, match="my.ply is not a readable point cloud"):
        parser(scene, **options).get_dataparser_outputs()
    write_cloud(tmp_path / "my.ply", points[:0])
    with pytest.raises(ValueError, match="no finite point"):
        parser(scene, **options).get_dataparser_outputs()


def test_no_points_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    scene, _ = city(tmp_path)
    outputs = parser(scene, num_random_points=2000).get_dataparser_outputs()
    assert "Warning: no point cloud in" in capsys.readouterr().out
    points = to_input(outputs, outputs.metadata["points3D_xyz"])
    cameras = frame_of(outputs).poses_to_input(outputs.cameras.camera_to_worlds.numpy())[:, :, 3]
    assert len(points) == 2000
    assert points[:, 2].min() >= -1e-6 and points[:, 2].max() <= cameras[:, 2].min() + 1e-6
    assert (points[:, :2].min(axis=0) < cameras[:, :2].min(axis=0)).all()
    for wanted, message in (("ply", "No Block_.*.ply for .*--point-cloud"), ("depth", "No depth map .*_depth_float32")):
        with pytest.raises(ValueError, match=message):
            parser(scene, seed_points=wanted).get_dataparser_outputs()
    archive = tmp_path / "small_city_pointcloud/matrixcity_point_cloud_ds20.zip"
    archive.parent.mkdir()
    archive.write_bytes(b"PK")
    with pytest.raises(ValueError, match="matrixcity_point_cloud_ds20.zip is not unpacked: unzip "):
        parser(scene, seed_points="ply").get_dataparser_outputs()
    with pytest.raises(ValueError, match="Leave one of them out"):
        parser(scene, seed_points="random", point_cloud=archive).get_dataparser_outputs()


def test_choose_rows():
    assert choose_rows(5, 0, 0).tolist() == choose_rows(5, 9, 0).tolist() == [0, 1, 2, 3, 4]
    rows = choose_rows(1_000_000_007, 1000, 1)
    assert len(np.unique(rows)) == 1000 and rows.max() < 1_000_000_007 and rows.max() > 990_000_000
    assert (choose_rows(1001, 1000, 1) == choose_rows(1001, 1000, 1)).all()


def test_read_cloud_with_float_colours_and_gaps(tmp_path: Path):
    points = np.array([[0, 0, 0], [np.nan, 0, 0], [1, 2, 3.0]])
    write_cloud(tmp_path / "a.ply", points)
    xyz, rgb = read_point_clouds([tmp_path / "a.ply"], 0, 0)
    assert xyz.tolist() == [[0, 0, 0], [1, 2, 3]] and rgb.tolist() == [[77] * 3] * 2
    header = "ply\nformat ascii 1.0\nelement vertex 1\nproperty float x\nproperty float y\nproperty float z\n"
    (tmp_path / "b.ply").write_text(
        header + "property float red\nproperty float green\nproperty float blue\nend_header\n1 2 3 0 0.5 1\n"
    )
    assert read_point_clouds([tmp_path / "b.ply"], 0, 0)[1].tolist() == [[0, 128, 255]]
    (tmp_path / "c.ply").write_text(header + "end_header\n1 2 3\n")
    assert read_point_clouds([tmp_path / "c.ply"], 0, 0)[1].tolist() == [[128, 128, 128]]
    assert len(PlyData.read(str(CLOUD))["vertex"].data) == 30122


def test_halved_copy_of_the_committed_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shutil.copytree(SCENE, tmp_path / "aerial")
    for path in (tmp_path / "aerial").rglob("*.png"):
        with Image.open(path) as image:
            image.resize((119, 89)).save(path)
    full, half = (parser(data, num_random_points=3).get_dataparser_outputs() for data in (SCENE, tmp_path / "aerial"))
    np.testing.assert_allclose(half.cameras.fx * 2, full.cameras.fx, rtol=1e-6)
    np.testing.assert_allclose(half.cameras.cy * 2, full.cameras.cy, rtol=1e-6)
    assert "intrinsics were scaled by 0.5" in capsys.readouterr().out
