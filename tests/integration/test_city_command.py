"""`splaxel-city` as a command, and the matrixcity dataparser on what it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import start_command
from PIL import Image

from splaxel_ns.city.cameras import Shot
from splaxel_ns.city.command import CityCommand, plan_shots
from splaxel_ns.city.photograph import load_open3d
from splaxel_ns.city.streets import City, build_city
from splaxel_ns.dataparsers.matrixcity import MatrixCityDataParserConfig
from splaxel_ns.dataparsers.matrixcity_depth import read_depth

SIZE, WIDTH, HEIGHT = 60.0, 64, 36
FLAGS: dict[str, Any] = {
    "size": SIZE,
    "aerial_views": 2,
    "street_views": 2,
    "width": WIDTH,
    "height": HEIGHT,
    "points": 300,
    "seed": 5,
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By two processes."""
    out = tmp_path_factory.mktemp("city") / "out"
    flags = [word for name, value in FLAGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    process = start_command("splaxel-city", str(out), *flags, "--workers", "2")
    try:
        said, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert "4 photographs (2 train, 2 test)" in said and f"--data {out}/small_city/aerial" in said
    return out


@pytest.fixture(scope="module")
def city() -> City:
    return build_city(SIZE, FLAGS["seed"])


@pytest.fixture(scope="module")
def surface(city: City) -> Any:
    """The triangles, for Open3D's own camera and distances."""
    o3d = load_open3d()
    scene = o3d.t.geometry.RaycastingScene(nthreads=1)
    corners = city.mesh.corners.reshape(-1, 3)
    triangles = np.arange(len(corners), dtype=np.uint32).reshape(-1, 3)
    scene.add_triangles(o3d.core.Tensor(corners), o3d.core.Tensor(triangles))
    return scene


def shots_of(city: City, view: str) -> dict[str, Shot]:
    return {shot.split: shot for shot in plan_shots(CityCommand(Path("out"), **FLAGS), city) if shot.view == view}


@pytest.mark.parametrize("source", ["", "pose", "train"])
@pytest.mark.parametrize("view", ["aerial", "street"])
def test_dataparser_reads_poses_depth_and_cloud(
    written: Path, city: City, surface: Any, view: str, source: str
) -> None:
    """Poses to a millimetre; depth as Open3D's own pinhole camera sees it there; seeds on surfaces."""
    scene = written / "small_city" / view
    tensor = load_open3d().core.Tensor
    parser = MatrixCityDataParserConfig(data=scene / source, load_depth=True).setup()
    metres = 1.0 if source == "train" else 100.0
    for split, shot in shots_of(city, view).items():
        outputs = parser.get_dataparser_outputs(split)
        assert [path.parent.parent.name for path in outputs.image_filenames] == [split]
        pose = outputs.transform_poses_to_original_space(outputs.cameras.camera_to_worlds, "opengl").numpy()[0]
        np.testing.assert_allclose(pose[:, :3], shot.pose[:3, :3], atol=1e-5)
        np.testing.assert_allclose(pose[:, 3] * metres, shot.pose[:3, 3], atol=1e-3)
        camera = outputs.cameras[0]
        assert (camera.width.item(), camera.height.item()) == (WIDTH, HEIGHT)
        focal = float(camera.fx)
        assert focal == pytest.approx(0.5 * WIDTH / np.tan(0.5 * shot.fov), rel=1e-6)
        lens = np.array([[focal, 0, WIDTH / 2], [0, focal, HEIGHT / 2], [0, 0, 1]])
        world_to_cam = np.linalg.inv(shot.pose @ np.diag([1.0, -1.0, -1.0, 1.0]))
        rays = surface.create_rays_pinhole(tensor(lens), tensor(world_to_cam), WIDTH, HEIGHT)
        expected = surface.cast_rays(rays)["t_hit"].numpy()
        files = outputs.metadata["depth_filenames"]
        depth = read_depth(files[0])
        sky = np.isinf(expected)
        # Rounding moves a ray that grazes an edge to its other side.
        agree = (np.isnan(depth) == sky) & (sky | np.isclose(depth, expected, rtol=1e-4))
        assert agree.mean() > 0.995
        if split == "train":
            points = outputs.metadata["points3D_xyz"].double().numpy()
            assert len(points) == FLAGS["points"] and outputs.metadata["points3D_rgb"].shape == points.shape
            transform = outputs.dataparser_transform.double().numpy()
            points = (points / outputs.dataparser_scale - transform[:3, 3]) @ transform[:3, :3] * metres
            away = surface.compute_distance(tensor(points.astype(np.float32))).numpy()
            assert away.max() < 2e-3


def test_the_result_does_not_depend_on_the_number_of_processes(written: Path, tmp_path: Path) -> None:
    CityCommand(tmp_path / "again", **FLAGS, workers=1).main()
    files = sorted(path.relative_to(written) for path in written.rglob("*") if path.is_file())
    again = sorted(path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*") if path.is_file())
    assert files == again and sum(path.suffix == ".png" for path in files) == 4
    for path in files:
        assert (written / path).read_bytes() == (tmp_path / "again" / path).read_bytes(), path
    assert [path.name for path in written.parent.iterdir()] == ["out"]


def test_photographs_show_something(written: Path) -> None:
    for path in written.rglob("*.png"):
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"), float)
        assert pixels.shape == (HEIGHT, WIDTH, 3) and pixels.std() > 20 and 40 < pixels.mean() < 215, path


def test_a_wrong_argument_ends_in_one_sentence(tmp_path: Path) -> None:
    process = start_command("splaxel-city", str(tmp_path / "out"), "--size", "3")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert said.strip() == "splaxel-city: --size is 3; it must lie between 60 and 100000"
    assert not list(tmp_path.iterdir())
