"""The matrixcity dataparser on every layout of the data set, and on what people do to it."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from matrixcity_tree import (
    STREET_FOV,
    STREET_SIZE,
    write_aerial,
    write_photographs,
    write_pose,
    write_raw,
)
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs

from splaxel_ns.dataparsers.matrixcity import MatrixCityDataParser, MatrixCityDataParserConfig, matrixcity


def parser(data: Path, **options) -> MatrixCityDataParser:
    return MatrixCityDataParserConfig(data=data, **{"seed_points": "random", "num_random_points": 8, **options}).setup()


def names(outputs: DataparserOutputs, count: int = 2) -> list[str]:
    return ["/".join(path.parts[-count:]) for path in outputs.image_filenames]


def input_poses(outputs: DataparserOutputs) -> np.ndarray:  # [N, 3, 4]
    return outputs.transform_poses_to_original_space(outputs.cameras.camera_to_worlds, "opengl").numpy()


def change_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


POSE_FRAMES = ["block_1/0001.png", "block_1/0002.png", "block_1/0003.png"]
ALL_FRAMES = POSE_FRAMES + [name.replace("1/", "2/") for name in POSE_FRAMES]


@pytest.mark.parametrize(
    ("below", "expected"),
    [
        ("", ALL_FRAMES),
        ("small_city", ALL_FRAMES),
        ("small_city/aerial", ALL_FRAMES),
        ("small_city/aerial/pose", ALL_FRAMES),
        ("small_city/aerial/pose/block_all", ALL_FRAMES),
        ("small_city/aerial/pose/block_A", POSE_FRAMES),
        ("small_city/aerial/pose/block_A/transforms_train.json", POSE_FRAMES),
        ("small_city/aerial/train", ALL_FRAMES),
        ("small_city/aerial/train/block_1", POSE_FRAMES),
        ("small_city/aerial/test/block_1_test", POSE_FRAMES),
    ],
)
def test_aerial_from_any_folder(tmp_path: Path, below: str, expected: list[str]):
    write_aerial(tmp_path / "small_city/aerial")
    (tmp_path / "small_city_depth/aerial/train/block_1_depth").mkdir(parents=True)  # no scene
    made = parser(tmp_path / below)
    train, test = made.get_dataparser_outputs("train"), made.get_dataparser_outputs("test")
    assert names(train) == expected
    assert names(test) == [name.replace("/", "_test/") for name in expected if name.endswith("1.png")]
    assert names(made.get_dataparser_outputs("val")) == names(test)
    assert train.cameras.width[0, 0] == 32 and train.cameras.height[0, 0] == 18
    assert train.cameras.fx[0, 0] == pytest.approx(16 / np.tan(np.pi / 8), rel=1e-5)
    assert train.dataparser_scale == test.dataparser_scale
    assert train.cameras.camera_to_worlds[:, :, 3].abs().max() == pytest.approx(1.0)


def test_raw_and_pose_agree(tmp_path: Path):
    write_aerial(tmp_path)
    pose, raw = (parser(tmp_path / kind).get_dataparser_outputs("train") for kind in ("pose", "train"))
    np.testing.assert_allclose(raw.cameras.camera_to_worlds, pose.cameras.camera_to_worlds, atol=1e-5)
    assert raw.dataparser_scale == pytest.approx(pose.dataparser_scale / 100)
    np.testing.assert_allclose(input_poses(raw)[:, :, 3], 100 * input_poses(pose)[:, :, 3], atol=1e-3)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (("A",), POSE_FRAMES),
        (("block_2",), ALL_FRAMES[3:]),
        (("1", "2"), ALL_FRAMES),
        (("block_A", "block_all"), ALL_FRAMES),
    ],
)
def test_block_option(tmp_path: Path, block: tuple[str, ...], expected: list[str]):
    write_aerial(tmp_path)
    assert names(parser(tmp_path, block=block).get_dataparser_outputs()) == expected


def test_blocks_of_the_paper_without_pose_folder(tmp_path: Path):
    write_aerial(tmp_path / "aerial", pose=False, blocks=("1", "2", "3", "10"))
    assert len(parser(tmp_path / "aerial").get_dataparser_outputs().image_filenames) == 12
    assert names(parser(tmp_path / "aerial", block=("A",)).get_dataparser_outputs()) == ALL_FRAMES
    with pytest.raises(ValueError, match="Block B is not in .*block_1, block_2, block_3, block_10"):
        parser(tmp_path / "aerial", block=("B",)).get_dataparser_outputs()


def test_all_frames_takes_transforms_origin(tmp_path: Path):
    write_aerial(tmp_path)
    expected = ["block_1/0000.png", *POSE_FRAMES]
    assert names(parser(tmp_path, block=("1",), all_frames=True).get_dataparser_outputs()) == expected
    file = tmp_path / "train/block_1/transforms_origin.json"
    assert names(parser(file).get_dataparser_outputs()) == expected


def test_gaps_and_five_digits(tmp_path: Path):
    folder = tmp_path / "train/block_1"
    poses = write_raw(folder, 3, photographs=False)
    frames = json.loads((folder / "transforms.json").read_text())["frames"]
    for frame, index in zip(frames, (7, 9999, 12345), strict=True):
        frame["frame_index"] = index
    change_json(folder / "transforms.json", frames=frames)
    write_photographs(folder, ["0007.png", "9999.png", "12345.png"])
    outputs = parser(tmp_path).get_dataparser_outputs()
    assert names(outputs, 1) == ["0007.png", "9999.png", "12345.png"]
    np.testing.assert_allclose(input_poses(outputs), poses[:, :3], atol=1e-4)


def test_big_city_and_scene_option(tmp_path: Path):
    write_aerial(tmp_path / "small_city/aerial")
    big = tmp_path / "big_city"
    for block in ("big_high_block_1", "big_high_block_2"):
        write_raw(big / "aerial/train" / block)
        write_raw(big / "aerial/test" / f"{block}_test", 1)
    write_raw(big / "street/train/left_area", fov=STREET_FOV, size=STREET_SIZE)
    write_raw(big / "street/test/left_area_test", 1, fov=STREET_FOV, size=STREET_SIZE)
    with pytest.raises(ValueError, match="several scenes: big_city/aerial, big_city/street, small_city/aerial"):
        parser(tmp_path).get_dataparser_outputs()
    assert len(parser(tmp_path, scene="big_city").get_dataparser_outputs().image_filenames) == 6
    assert len(parser(big).get_dataparser_outputs("test").image_filenames) == 2
    assert len(parser(big, block=("2",)).get_dataparser_outputs("test").image_filenames) == 1
    street = parser(tmp_path, scene="big_city/street", block=("left",)).get_dataparser_outputs()
    assert names(street) == [f"left_area/{k:04d}.png" for k in range(3)]
    assert street.cameras.fx[0, 0] == pytest.approx(10.0, rel=1e-5)
    with pytest.raises(ValueError, match="no scene 'indoor'.*big_city/aerial"):
        parser(tmp_path, scene="indoor").get_dataparser_outputs()


def test_small_street(tmp_path: Path):
    scene = tmp_path / "small_city/street"
    for road in ("down", "outside"):
        for split, suffix, count in (("train", "", 2), ("train_dense", "_dense", 5), ("test", "_test", 1)):
            name = f"small_city_road_{road}{suffix}"
            write_raw(scene / split / name, count, fov=STREET_FOV, size=STREET_SIZE)
    for block in ("block_A", "block_small"):
        for split in ("train", "train_dense", "test"):
            suffix = {"train": "", "train_dense": "_dense", "test": "_test"}[split]
            name = f"../../{split}/small_city_road_down{suffix}/0000.png"
            file = scene / f"pose/{block}/transforms_{split}.json"
            write_pose(file, [(name, np.eye(4))], fov=STREET_FOV, size=STREET_SIZE)
    counts = {
        "sparse": len(parser(scene).get_dataparser_outputs().image_filenames),
        "dense": len(parser(scene, dense=True).get_dataparser_outputs().image_filenames),
        "outside": len(parser(scene, road_outside=True).get_dataparser_outputs().image_filenames),
        "one": len(parser(scene, block=("outside",)).get_dataparser_outputs().image_filenames),
        "test": len(parser(scene).get_dataparser_outputs("test").image_filenames),
    }
    assert counts == {"sparse": 2, "dense": 5, "outside": 4, "one": 2, "test": 1}
    dense = parser(scene, block=("A",), dense=True).get_dataparser_outputs()
    assert names(dense, 3) == ["train_dense/small_city_road_down_dense/0000.png"]
    assert dense.dataparser_scale == 1.0  # one camera has no extent
    folder = scene / "train_dense/small_city_road_down_dense"
    assert len(parser(folder).get_dataparser_outputs().image_filenames) == 5
    assert len(parser(folder).get_dataparser_outputs("test").image_filenames) == 1


def test_fusion_raw_and_merged(tmp_path: Path):
    root = tmp_path / "aerial_street_fusion"
    aerial = write_raw(root / "aerial", 3)
    street = write_raw(root / "street/train", 2, fov=STREET_FOV, size=STREET_SIZE, seed=1)
    write_raw(root / "street/test", 1, fov=STREET_FOV, size=STREET_SIZE, seed=2)
    for data, options in ((root, {}), (tmp_path, {"scene": "fusion"})):
        made = parser(data, **options)
        outputs = made.get_dataparser_outputs()
        assert names(outputs) == ["aerial/0000.png", "aerial/0001.png", "aerial/0002.png"] + [
            "train/0000.png",
            "train/0001.png",
        ]
        assert outputs.cameras.width[:, 0].tolist() == [32] * 3 + [20] * 2
        assert names(made.get_dataparser_outputs("test"), 3) == ["street/test/0000.png"]
    np.testing.assert_allclose(input_poses(outputs), np.concatenate([aerial, street])[:, :3], atol=1e-4)
    assert names(parser(root, scene="street").get_dataparser_outputs()) == ["train/0000.png", "train/0001.png"]
    assert names(parser(root / "street/train").get_dataparser_outputs("test")) == ["test/0000.png"]
    assert len(parser(root / "aerial").get_dataparser_outputs("test").image_filenames) == 0

    frames = []
    for name, pose, size, focal in (("aerial", aerial[0], (32, 18), 38.6), ("street/train", street[0], (20, 20), 10.0)):
        matrix = pose.copy()
        matrix[:3, 3] /= 100
        frame = {"w": float(size[0]), "h": float(size[1]), "fl_x": focal, "fl_y": focal}
        frame |= {"cx": size[0] / 2, "cy": size[1] / 2, "camera_angle_x": 1.0}
        frames.append(frame | {"file_path": f"../{name}/0000.png", "transform_matrix": matrix.tolist()})
    merged = root / "aerial_street/transforms_train.json"
    merged.parent.mkdir()
    merged.write_text(json.dumps({"camera_model": "SIMPLE_PINHOLE", "frames": frames}))
    for data, options in ((merged.parent, {}), (root, {"scene": "aerial_street"})):
        outputs = parser(data, **options).get_dataparser_outputs()
        assert outputs.cameras.fx[:, 0].tolist() == pytest.approx([38.6, 10.0])
        assert outputs.cameras.height[:, 0].tolist() == [18, 20]


@pytest.mark.parametrize("folder", ["input", "rgb", "images", "block_1"])
def test_moved_photographs(tmp_path: Path, folder: str):
    write_aerial(tmp_path)
    for block in (tmp_path / "train/block_1", tmp_path / "test/block_1_test"):
        (block / folder).mkdir()
        for file in block.glob("*.png"):
            file.rename(block / folder / file.name)
    if folder == "block_1":  # an archive unpacked inside the folder of its name
        (tmp_path / "test/block_1_test/block_1").rename(tmp_path / "test/block_1_test/block_1_test")
    for data in (tmp_path, tmp_path / "train"):
        made = parser(data)
        assert names(made.get_dataparser_outputs())[0] == f"{folder}/0001.png"
        made.get_dataparser_outputs("test")


def test_other_image_suffix(tmp_path: Path):
    write_aerial(tmp_path)
    for file in (tmp_path / "train").rglob("*.png"):
        write_photographs(file.parent, [file.stem + ".jpg"])
        file.unlink()
    assert names(parser(tmp_path).get_dataparser_outputs())[0] == "block_1/0001.jpg"


def make_archive(archive: Path, folder: Path) -> None:
    """Pack the photographs of a block as distributed (block_1/0000.png) and delete them."""
    with tarfile.open(archive, "w") as tar:
        for file in sorted(folder.glob("*.png")):
            tar.add(file, arcname=f"{folder.name}/{file.name}")
            file.unlink()


@pytest.mark.parametrize("place", ["beside the folder", "inside the folder"])
def test_packed_photographs(tmp_path: Path, place: str):
    scene = tmp_path / "a city/aerial"
    write_aerial(scene)
    for block in ("block_1", "block_2"):
        folder = scene / "train" / block
        make_archive((folder.parent if place.startswith("beside") else folder) / f"{block}.tar", folder)
    with pytest.raises(ValueError, match="2 archives are not unpacked yet") as caught:
        parser(scene).get_dataparser_outputs()
    commands = str(caught.value).splitlines()[1:]
    assert len(commands) == 2
    for command in commands:
        subprocess.run(command, shell=True, check=True)
    assert names(parser(scene).get_dataparser_outputs()) == ALL_FRAMES


def test_archives_without_camera_files(tmp_path: Path):
    write_aerial(tmp_path, pose=False)
    make_archive(tmp_path / "train/block_3.tar", tmp_path / "train/block_1")
    with pytest.raises(ValueError, match=r"tar -xf .*block_3.tar"):
        parser(tmp_path).get_dataparser_outputs()
    (tmp_path / "train/block_3.tar").rename(tmp_path / "train/block_1.tar")
    (tmp_path / "train/block_1.tar").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ValueError, match="block_1.tar .* not a readable archive.*git lfs pull"):
        parser(tmp_path).get_dataparser_outputs()
    packed = tmp_path / "elsewhere/aerial.tar"
    packed.parent.mkdir()
    with tarfile.open(packed, "w") as tar:
        tar.add(tmp_path / "train/block_2", arcname="aerial")
    for data in (packed.parent, packed, packed.with_suffix("")):
        with pytest.raises(
            ValueError, match=r"1 archive is not unpacked yet.*\n  tar -xf \S+aerial.tar -C \S+elsewhere"
        ):
            parser(data).get_dataparser_outputs()


def test_blocks_that_were_not_downloaded(tmp_path: Path):
    write_aerial(tmp_path)
    for file in (tmp_path / "train/block_2").glob("*.png"):
        file.unlink()
    with pytest.raises(ValueError, match=r"No photographs for 1 of 2 block folders.*--block \(found: block_1\)"):
        parser(tmp_path).get_dataparser_outputs()
    shutil.rmtree(tmp_path / "test")
    skipping = parser(tmp_path, on_problem="skip")
    assert names(skipping.get_dataparser_outputs()) == POSE_FRAMES
    assert len(skipping.get_dataparser_outputs("test").cameras) == 0
    with pytest.raises(ValueError, match="No photographs for 2 of 2 block folders.*--on-problem skip"):
        parser(tmp_path).get_dataparser_outputs("test")
    assert names(parser(tmp_path, block=("1",)).get_dataparser_outputs()) == POSE_FRAMES


def test_missing_truncated_and_empty_photographs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_aerial(tmp_path)
    full = parser(tmp_path).get_dataparser_outputs()
    (tmp_path / "train/block_1/0001.png").unlink()
    (tmp_path / "train/block_1/0002.png").write_bytes(b"")
    cut = tmp_path / "train/block_2/0001.png"
    cut.write_bytes(cut.read_bytes()[:-20])
    with pytest.raises(ValueError, match="6 registered, 5 found, 3 usable.*train/block_1/0001.png"):
        parser(tmp_path).get_dataparser_outputs()
    outputs = parser(tmp_path, on_problem="skip").get_dataparser_outputs()
    assert names(outputs) == ["block_1/0003.png", "block_2/0002.png", "block_2/0003.png"]
    assert "1 missing" in capsys.readouterr().out
    np.testing.assert_array_equal(outputs.dataparser_transform, full.dataparser_transform)


def test_mixed_units_are_refused(tmp_path: Path):
    write_aerial(tmp_path)
    file = tmp_path / "pose/block_all/transforms_train.json"
    frames = json.loads(file.read_text())["frames"]
    matrix = np.array(frames[2]["transform_matrix"])
    matrix[:3, :3] *= 0.01
    frames[2]["transform_matrix"] = matrix.tolist()
    change_json(file, frames=frames)
    with pytest.raises(ValueError, match="different units: '.*0003.png' is in metres .*hectometres"):
        parser(tmp_path).get_dataparser_outputs()
    matrix[:3, :3] *= 37
    frames[2]["transform_matrix"] = matrix.tolist()
    change_json(file, frames=frames)
    with pytest.raises(ValueError, match="'0003.png' .*columns of length 0.37, 0.37, 0.37"):
        parser(tmp_path).get_dataparser_outputs()


def test_raw_file_with_unit_rotation_is_refused(tmp_path: Path):
    write_aerial(tmp_path, pose=False)
    file = tmp_path / "train/block_1/transforms.json"
    frames = json.loads(file.read_text())["frames"]
    for frame in frames:
        frame["rot_mat"] = (np.array(frame["rot_mat"]) * 100).tolist()
    change_json(file, frames=frames)
    with pytest.raises(
        ValueError, match="rot_mat.*columns of length 1, 1, 1.*the unit of the translation cannot be told"
    ):
        parser(tmp_path).get_dataparser_outputs()


def test_resized_photographs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_aerial(tmp_path)
    for split in ("train", "test"):
        file = tmp_path / f"pose/block_all/transforms_{split}.json"
        change_json(file, w=64.0, h=36.0, fl_x=80.0, fl_y=82.0, cx=32.0, cy=18.0)
    outputs = parser(tmp_path).get_dataparser_outputs()
    cameras = outputs.cameras
    assert (cameras.fx[0, 0], cameras.fy[0, 0], cameras.cx[0, 0], cameras.cy[0, 0]) == (40.0, 41.0, 16.0, 9.0)
    assert (cameras.width[0, 0], cameras.height[0, 0]) == (32, 18)
    assert "file 32x18, camera 64x36" in capsys.readouterr().out
    change_json(tmp_path / "pose/block_all/transforms_train.json", w=64.0, h=64.0)
    with pytest.raises(ValueError, match="'train/block_1/0001.png' has 32x18 pixels, its camera 64x64"):
        parser(tmp_path).get_dataparser_outputs()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_non_finite_pose_is_dropped_by_name(tmp_path: Path, value: float | None, capsys: pytest.CaptureFixture[str]):
    write_aerial(tmp_path)
    for file, key in (
        ("pose/block_all/transforms_train.json", "transform_matrix"),
        ("train/block_1/transforms.json", "rot_mat"),
    ):
        frames = json.loads((tmp_path / file).read_text())["frames"]
        frames[1][key][0][3] = value
        change_json(tmp_path / file, frames=frames)
    for data in ("pose", "train"):
        outputs = parser(tmp_path / data).get_dataparser_outputs()
        assert names(outputs) == ALL_FRAMES[:1] + ALL_FRAMES[2:]
        assert np.isfinite(outputs.cameras.camera_to_worlds.numpy()).all()
        assert "1 train camera(s) without a finite pose left out: train/block_1/0002.png" in capsys.readouterr().out


def test_viewer_needs_no_photographs(tmp_path: Path):
    write_aerial(tmp_path)
    write_raw(tmp_path / "street/train/small_city_road_down", fov=STREET_FOV, photographs=False)
    with_files = parser(tmp_path, load_depth=False).get_dataparser_outputs()
    for file in tmp_path.rglob("*.png"):
        file.unlink()
    for data, size in (("pose", (32, 18)), ("train", (1920, 1080)), ("street", (1000, 1000))):
        made = parser(tmp_path / data, seed_points="auto", load_depth=True)
        made.photographs_needed = False
        outputs = made.get_dataparser_outputs()
        assert (outputs.cameras.width[0, 0], outputs.cameras.height[0, 0]) == size
        assert outputs.metadata == {}
        made.get_dataparser_outputs("test")
        if data == "pose":
            np.testing.assert_array_equal(outputs.dataparser_transform, with_files.dataparser_transform)
            assert outputs.cameras.fx[0] == with_files.cameras.fx[0]
    assert outputs.cameras.fx[0, 0] == pytest.approx(500.0, rel=1e-4)


def test_mirrored_pose_is_refused(tmp_path: Path):
    write_aerial(tmp_path)
    file = tmp_path / "pose/block_all/transforms_train.json"
    frames = json.loads(file.read_text())["frames"]
    frames[1]["transform_matrix"] = (np.array(frames[1]["transform_matrix"]) * [-1, 1, 1, 1]).tolist()
    change_json(file, frames=frames)
    with pytest.raises(ValueError, match="transform_matrix of '0002.png' is not a rotation"):
        parser(tmp_path).get_dataparser_outputs()


def test_camera_file_edited_elsewhere(tmp_path: Path):
    """A byte order mark, backslashes, and a name without suffix."""
    write_aerial(tmp_path)
    file = tmp_path / "pose/block_A/transforms_train.json"
    text = file.read_text().replace("../../train/block_1/0001.png", "..\\\\..\\\\train\\\\block_1\\\\0001")
    file.write_text(text, encoding="utf-8-sig")
    assert names(parser(file.parent).get_dataparser_outputs()) == POSE_FRAMES


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not readable JSON"),
        ("[]", "no list 'frames'"),
        ('{"frames": [{"frame_index": 0, "rot_mat": [[1]]}]}', "'0000.png' has no rot_mat of 4x4 numbers"),
        ('{"frames": [{"rot_mat": []}]}', "neither frame_index nor file_path"),
        ('{"frames": []}', "No training camera"),
    ],
)
def test_damaged_camera_files(tmp_path: Path, content: str, message: str):
    write_raw(tmp_path / "train/block_1")
    (tmp_path / "train/block_1/transforms.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        parser(tmp_path).get_dataparser_outputs()


def test_unknown_layouts(tmp_path: Path):
    with pytest.raises(ValueError, match="No MatrixCity layout in .*transforms_train.json.*found nothing"):
        parser(tmp_path).get_dataparser_outputs()
    (tmp_path / "sparse").mkdir()
    with pytest.raises(ValueError, match="use the splaxel-colmap dataparser"):
        parser(tmp_path).get_dataparser_outputs()
    with pytest.raises(ValueError, match="does not exist"):
        parser(tmp_path / "nowhere").get_dataparser_outputs()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match="notes.txt is a file. --data takes a folder"):
        parser(tmp_path / "notes.txt").get_dataparser_outputs()
    with pytest.raises(ValueError, match="Unknown split 'all'"):
        parser(tmp_path).get_dataparser_outputs("all")


def test_missing_data_option_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="--data was not given .*small_city/aerial does not exist"):
        MatrixCityDataParserConfig().setup().get_dataparser_outputs()


def test_whole_small_city_takes_seconds(tmp_path: Path):
    """5,621 cameras in ten blocks, as in the data set; the bound leaves room for slow disks."""
    write_raw(tmp_path / "train/block_1", 563, indices=range(1, 563))
    photograph = (tmp_path / "train/block_1/0000.png").read_bytes()
    for block in range(2, 11):
        folder = tmp_path / f"train/block_{block}"
        write_raw(folder, 563, indices=range(1, 563), photographs=False, seed=block)
        for k in range(563):
            (folder / f"{k:04d}.png").write_bytes(photograph)
    start = time.perf_counter()
    outputs = parser(tmp_path).get_dataparser_outputs()
    assert time.perf_counter() - start < 20
    assert len(outputs.image_filenames) == 5620
    assert names(outputs)[-1] == "block_10/0562.png"


def test_plugin_specification():
    assert isinstance(matrixcity.config, MatrixCityDataParserConfig)
    assert isinstance(matrixcity.config.setup(), MatrixCityDataParser)
