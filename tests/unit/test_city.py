"""The parts of `splaxel-city`: rays and depth against planes, cameras, textures, arguments, folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from splaxel_ns.city import command, layout
from splaxel_ns.city.cameras import Shot, aerial_shots, look, num_test, street_shots
from splaxel_ns.city.command import CityCommand, check
from splaxel_ns.city.mesh import Kind, MeshBuilder
from splaxel_ns.city.photograph import Light, Photographer, camera_rays
from splaxel_ns.city.streets import KERB, City, build_city
from splaxel_ns.city.textures import Noise, band, hashed, step

BOX = (np.array([-5.0, -5.0, 0.0]), np.array([5.0, 5.0, 10.0]))
FOV = np.radians(60.0)


@pytest.fixture(scope="module")
def city() -> City:
    return build_city(150.0, 3)


@pytest.fixture(scope="module")
def studio() -> Photographer:
    """One box on a plane, in the sun from the east."""
    mesh = MeshBuilder()
    corners = np.array([(-500, -500, 0), (500, -500, 0), (500, 500, 0), (-500, 500, 0)])
    mesh.add_quads(corners, mesh.add_object(Kind.PLAIN, (0.4, 0.4, 0.4)))
    mesh.add_boxes(*BOX, mesh.add_object(Kind.PLAIN, (0.4, 0.1, 0.1)))
    empty = City(60.0, mesh.build(np.random.default_rng(0)), build_city(60.0, 0).streets, np.zeros((30, 30)), 10.0)
    return Photographer(empty, 0, Light(elevation=45.0, azimuth=0.0))


def test_depth_is_that_of_a_plane_and_a_box(studio: Photographer) -> None:
    """Along the optical axis, through the middle of every pixel, infinite above the horizon."""
    pose = look(np.array([-40.0, 3.0, 25.0]), np.radians(10.0), np.radians(-20.0))
    width, height = 48, 36
    _, depth = studio.photograph(pose, float(FOV), width, height, 2)
    focal = 0.5 * width / np.tan(0.5 * FOV)
    row, column = np.mgrid[:height, :width]
    local = np.stack([(column + 0.5 - width / 2) / focal, -(row + 0.5 - height / 2) / focal, -np.ones(row.shape)], -1)
    rays = local @ pose[:3, :3].T
    with np.errstate(divide="ignore"):
        plane = np.where(rays[..., 2] < 0, -pose[2, 3] / rays[..., 2], np.inf)
        faces = np.stack([(side - pose[:3, 3]) / rays for side in BOX])
    enter, leave = faces.min(axis=0).max(axis=-1), faces.max(axis=0).min(axis=-1)
    expected = np.where((enter < leave) & (enter > 0), enter, plane)
    on_plane = pose[:3, 3] + rays * np.where(np.isfinite(expected), expected, 0)[..., None]
    expected[np.abs(on_plane[..., :2]).max(axis=-1) > 500] = np.inf
    assert np.isinf(expected).any() and (expected == enter).any() and (expected == plane).any()
    np.testing.assert_array_equal(np.isinf(depth), np.isinf(expected))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(depth[finite], expected[finite], rtol=2e-5)


def test_shadow_falls_away_from_the_sun(studio: Photographer) -> None:
    pixels, _ = studio.photograph(look(np.array([0, 0, 80.0]), np.pi / 2, -np.pi / 2), float(FOV), 65, 65, 2)
    focal = 0.5 * 65 / np.tan(0.5 * FOV)
    east, west = (pixels[32, int(32.5 + focal * x / 80.0)].astype(float).mean() for x in (10.0, -10.0))
    assert west < 0.75 * east


def test_rays_of_rows_are_rows_of_rays() -> None:
    pose = look(np.array([1.0, 2.0, 3.0]), 0.4, -0.3)
    whole = camera_rays(pose, 50.0, 8, 6, (0, 6), 2).reshape(12, 16, 6)
    part = camera_rays(pose, 50.0, 8, 6, (2, 5), 2).reshape(6, 16, 6)
    np.testing.assert_array_equal(part, whole[4:10])
    middle = camera_rays(pose, 50.0, 8, 6, (0, 6), 1).reshape(6, 8, 6)
    pixels = whole.reshape(6, 2, 8, 2, 6).mean(axis=(1, 3))
    np.testing.assert_allclose(middle, pixels, atol=1e-6)


def test_look_is_a_rotation_that_looks_ahead() -> None:
    pose = look(np.array([1.0, 2.0, 3.0]), np.radians(30.0), np.radians(-45.0))
    np.testing.assert_allclose(pose[:3, :3] @ pose[:3, :3].T, np.eye(3), atol=1e-12)
    assert np.linalg.det(pose[:3, :3]) == pytest.approx(1.0)
    half = np.sqrt(0.5)
    np.testing.assert_allclose(-pose[:3, 2], [half * np.cos(np.pi / 6), half * 0.5, -half], atol=1e-12)
    assert pose[2, 1] > 0 and pose[2, 0] == 0  # the head is up, the horizon level


def keys(shots: list[Shot], split: str) -> set[bytes]:
    return {shot.pose.round(6).tobytes() for shot in shots if shot.split == split}


@pytest.mark.parametrize("count", [0, 2, 3, 9, 40])
def test_splits_share_no_camera(city: City, count: int) -> None:
    """As many as asked for, all different, looking at the city from above the roofs or from the streets."""
    for shots in (
        aerial_shots(city, count, 0.25, 0.8, None, 1),
        street_shots(city, count, 0.25, 1.6, 1.7, 10.0, 4, 1),
    ):
        tests = num_test(count, 0.25)
        train, test = keys(shots, "train"), keys(shots, "test")
        assert (len(train), len(test)) == (count - tests, tests) and not train & test
        names = [(shot.block, shot.index) for shot in shots]
        assert len(set(names)) == count
        for shot in shots:
            place, ahead = shot.pose[:3, 3], -shot.pose[:3, 2]
            if shot.view == "aerial":
                assert place[2] > city.tallest
                spot = place - ahead * place[2] / ahead[2]
                assert np.abs(spot[:2]).max() < 0.5 * city.size
            else:
                along_x, along_y = city.streets
                lanes = (np.abs(place[1] - along_x.centers) < along_x.halves).any()
                assert lanes or (np.abs(place[0] - along_y.centers) < along_y.halves).any()
                assert np.abs(place[:2]).max() < 0.5 * city.size and place[2] == 1.7


def test_many_street_views_fill_all_streets(city: City) -> None:
    shots = street_shots(city, 2000, 0.1, 1.6, 1.7, 10.0, 2, 1)
    assert len(keys(shots, "train")) == 1800
    assert {shot.block for shot in shots if shot.split == "train"} == {
        "small_city_road_horizon",
        "small_city_road_vertical",
    }


def test_city_depends_on_its_seed_alone(city: City) -> None:
    again, other = build_city(150.0, 3), build_city(150.0, 4)
    for name in ("corners", "objects", "kinds", "frames", "colors", "params", "seeds"):
        np.testing.assert_array_equal(getattr(city.mesh, name), getattr(again.mesh, name))
    assert city.mesh.corners.shape != other.mesh.corners.shape


@pytest.mark.parametrize("size", [60.0, 61.0, 99.5, 333.0])
def test_city_of_any_size(size: float) -> None:
    city = build_city(size, 0)
    assert {Kind.ROAD, Kind.FACADE, Kind.LEAVES, Kind.PAVING} <= set(city.mesh.kinds.tolist())
    assert np.isfinite(city.mesh.corners).all()
    solid = ~np.isin(city.mesh.kinds[city.mesh.objects], [Kind.GROUND, Kind.LEAVES, Kind.PLAIN])
    assert np.abs(city.mesh.corners[solid][..., :2]).max() <= 0.5 * size + 1
    assert 2 * 3.0 + KERB <= city.tallest <= 100


def test_noise_is_filtered() -> None:
    noise = Noise(0, size=256)
    x, y = np.random.default_rng(0).uniform(-500, 500, (2, 20000)).astype(np.float32)
    deviations = [noise.sample(x, y, 0.1, np.full(20000, size)).std() for size in (0.05, 0.4, 3.2, 100.0)]
    assert deviations[0] == pytest.approx(1.0, abs=0.05)
    assert all(a > b for a, b in zip(deviations, deviations[1:], strict=False)) and deviations[-1] < 0.05


def test_edges_are_averages() -> None:
    x = np.linspace(-2, 2, 9)
    near = x[:, None] + np.linspace(-0.5, 0.5, 4001)[None] * 0.8
    np.testing.assert_allclose(band(x, 0.3, np.full(9, 0.8)), (np.abs(near) < 0.3).mean(axis=1), atol=1e-3)
    np.testing.assert_allclose(step(x, np.full(9, 0.8)), (near > 0).mean(axis=1), atol=1e-3)


def test_hash_is_uniform_and_tells_integers_apart() -> None:
    i, j = np.meshgrid(np.arange(-100, 100), np.arange(100))
    values = hashed(i, j)
    assert values.min() >= 0 and values.max() < 1
    assert values.mean() == pytest.approx(0.5, abs=0.01) and values.std() == pytest.approx(12**-0.5, abs=0.01)
    assert abs(np.corrcoef(values[:, 1:].ravel(), values[:, :-1].ravel())[0, 1]) < 0.03


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": 20.0}, "--size is 20; it must lie between 60"),
        ({"size": float("nan")}, "--size is nan"),
        ({"aerial_views": -1}, "--aerial-views is -1"),
        ({"street_views": 1}, "--street-views is 1, which leaves none to train on"),
        ({"aerial_views": 0, "street_views": 0}, "nothing to photograph"),
        ({"width": 5}, "--width is 5"),
        ({"height": 100_000}, "--height is 100000"),
        ({"test_share": 0.9}, "--test-share is 0.9"),
        ({"samples": 0}, "--samples is 0"),
        ({"street_fov": 180.0}, "--street-fov is 180"),
        ({"street_yaws": 0}, "--street-yaws is 0"),
        ({"seed": -3}, "--seed is -3"),
        ({"aerial_height": 1.0}, "--aerial-height is 1;"),
        ({"size": 90_000.0, "workers": 2}, "with 2 processes needs about .* GB, this machine has"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(replace(CityCommand(Path("city")), **changes))


def test_defaults_are_accepted() -> None:
    check(CityCommand(Path("city"), workers=1))
    check(CityCommand(Path("city"), workers=1, aerial_views=1, street_views=0, test_share=0))


def test_processes_fit_the_memory(monkeypatch) -> None:
    monkeypatch.setattr(command, "_memory_of_machine", lambda: 4 << 30)
    monkeypatch.setattr(command.os, "sched_getaffinity", lambda _: set(range(64)))
    chosen = command.num_workers(CityCommand(Path("city")))
    assert 1 < chosen <= 4
    check(CityCommand(Path("city")))
    assert command.num_workers(CityCommand(Path("city"), aerial_views=2, street_views=0)) == 2
    with pytest.raises(ValueError, match="give a smaller --size or fewer --workers"):
        check(CityCommand(Path("city"), workers=64))


def test_cameras_among_roofs_are_refused(city: City) -> None:
    with pytest.raises(ValueError, match="--aerial-height is 12, among the roofs of this city: give"):
        command.plan_shots(CityCommand(Path("city"), aerial_height=12.0), city)


def small(out: Path, **changes: Any) -> CityCommand:
    tiny = CityCommand(out, size=60.0, aerial_views=2, street_views=0, width=32, height=18, samples=1, points=50)
    return replace(tiny, **({"workers": 1} | changes))


def test_folders_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("x")
    with pytest.raises(ValueError, match="mine is not empty and holds no city"):
        small(tmp_path / "mine", overwrite=True).main()
    with pytest.raises(ValueError, match="notes.txt is a file: give a folder"):
        small(tmp_path / "mine/notes.txt").main()
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes.txt"]


def test_replaces_a_city_only_when_told_and_only_by_a_whole_one(tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "city"
    out.mkdir()  # an empty folder is as good as none
    small(out).main()
    first = (out / layout.MARK).read_bytes()
    assert [path.name for path in (out / "small_city").iterdir()] == ["aerial"]  # --street-views 0
    with pytest.raises(ValueError, match="city holds a city already: give another folder, or --overwrite"):
        small(out).main()

    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(layout, "write_cloud", fail)
        with pytest.raises(OSError, match="No space"):
            small(out, seed=1, overwrite=True).main()
        with pytest.raises(OSError, match="No space"):
            small(tmp_path / "other").main()
    assert [path.name for path in tmp_path.iterdir()] == ["city"] and (out / layout.MARK).read_bytes() == first
    small(out, seed=1, overwrite=True).main()
    assert [path.name for path in tmp_path.iterdir()] == ["city"] and (out / layout.MARK).read_bytes() != first


def test_depth_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="0000.exr cannot be written"):
        layout.write_depth(tmp_path / "missing" / "0000.exr", np.ones((4, 4), np.float32))


def test_without_test_views(tmp_path: Path) -> None:
    small(tmp_path / "city", test_share=0.0, aerial_views=1).main()
    scene = layout.scene_folder(tmp_path / "city", "aerial")
    assert not (scene / "test").exists() and not (scene / "pose/block_all/transforms_test.json").exists()
    with Image.open(scene / "train/block_1/0000.png") as image:
        assert image.size == (32, 18) and np.asarray(image).std() > 10
