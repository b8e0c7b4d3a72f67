"""`splaxel-colmap` from a dataset folder to cameras, files and seed points."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from colmap_writer import PINHOLE, Model, centres, dataset, survey, write_binary, write_photographs, write_text
from nerfstudio.cameras.cameras import CameraType
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig
from PIL import Image
from scipy.spatial.transform import Rotation

from splaxel_ns.dataparsers.colmap import SplaxelColmapDataParser, SplaxelColmapDataParserConfig, splaxel_colmap
from splaxel_ns.dataparsers.normalise import NormalisedOutputs

NAMES = [f"{k:04}.jpg" for k in range(10)]


def outputs(data: Path, split: str = "train", needed: bool = True, **options) -> NormalisedOutputs:
    parser = SplaxelColmapDataParserConfig(data=data, **options).setup()
    assert isinstance(parser, SplaxelColmapDataParser)
    parser.photographs_needed = needed
    found = parser.get_dataparser_outputs(split)
    assert isinstance(found, NormalisedOutputs)
    assert torch.isfinite(found.cameras.camera_to_worlds).all()
    assert len(found.image_filenames) == len(found.cameras)
    return found


def below(found: NormalisedOutputs, root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in found.image_filenames]


def test_cameras_and_points_in_the_model_frame(tmp_path: Path) -> None:
    """Every point projects to the same pixel through nerfstudio's cameras as through COLMAP's."""
    model = survey(NAMES)
    found = outputs(dataset(tmp_path, model), eval_interval=0)
    assert below(found, tmp_path / "images") == NAMES
    assert found.metadata["points3D_xyz"].dtype == torch.float32
    assert found.metadata["points3D_rgb"].dtype == torch.uint8
    to_world = torch.eye(4, dtype=torch.float64).repeat(10, 1, 1)
    to_world[:, :3] = found.cameras.camera_to_worlds.double()
    for k, pose in enumerate(model.poses):
        w, x, y, z = pose.quat
        rotation = np.array(
            [
                [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
                [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
                [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
            ]
        )
        cam = model.points @ rotation.T + pose.translation  # x right, y down, z forward
        points = torch.cat([found.metadata["points3D_xyz"].double(), torch.ones(20, 1)], dim=1)
        ours = (points @ torch.linalg.inv(to_world[k]).T)[:, :3].numpy() * [1, -1, -1]
        np.testing.assert_allclose(ours[:, :2] / ours[:, 2:], cam[:, :2] / cam[:, 2:], atol=1e-5)
    lens = [getattr(found.cameras, name)[0].item() for name in ("fx", "fy", "cx", "cy", "width", "height")]
    assert lens == [35, 36, 20, 15, 40, 30]
    assert found.cameras.distortion_params is None
    positions = found.cameras.camera_to_worlds[:, :, 3]
    assert positions.mean(0).abs().max() < 1e-6 and abs(positions.abs().max() - 1) < 1e-6


def test_map_coordinates_give_the_same_cameras_to_a_millimetre(tmp_path: Path) -> None:
    offset = (587_660.0, 3_338_101.0, 61.0)
    near = outputs(dataset(tmp_path / "near", survey(NAMES)))
    far_model = survey(NAMES, offset)
    far = outputs(dataset(tmp_path / "far", far_model, text=True))
    metres = 1.0 / near.dataparser_scale
    assert (near.cameras.camera_to_worlds - far.cameras.camera_to_worlds)[:, :, 3].abs().max() * metres < 1e-3
    assert (near.metadata["points3D_xyz"] - far.metadata["points3D_xyz"]).abs().max() * metres < 1e-3
    assert far.dataparser_transform.dtype == torch.float64
    back = far.world_frame.points_to_input(far.cameras.camera_to_worlds[:, :, 3].numpy())
    train = [k for k in range(10) if k % 8]
    np.testing.assert_allclose(back, centres(far_model)[train], atol=1e-3)


@pytest.mark.parametrize("text", [False, True])
def test_names_with_blanks_brackets_and_accents(tmp_path: Path, text: bool, capsys) -> None:
    names = ["Schloß Süd-0 (402).JPG", "[red]b[/red]/c d.jpg", "京都/#1.png"]
    found = outputs(dataset(tmp_path, survey(names), text), eval_interval=0)
    assert below(found, tmp_path / "images") == names
    (tmp_path / "images" / names[1]).unlink()
    outputs(tmp_path, eval_interval=0, on_problem="skip")
    assert f"3 registered, 2 found; 1 missing: '{names[1]}'" in capsys.readouterr().out


def test_the_same_file_name_in_two_folders(tmp_path: Path) -> None:
    """Each camera keeps the photograph of its own folder, also when others are missing."""
    names = [f"{folder}/{k:04}.jpg" for folder in "ab" for k in range(4)]
    data = dataset(tmp_path, survey(names))
    (data / "images/b/0002.jpg").unlink()
    train, held_out = outputs(data, on_problem="skip"), outputs(data, "val", on_problem="skip")
    assert below(train, data / "images") + below(held_out, data / "images") == [
        name for name in (*names[1:], names[0]) if name != "b/0002.jpg"
    ]
    assert len(set(train.image_filenames)) == 6


def test_a_windows_model_on_another_system(tmp_path: Path) -> None:
    names = ["C:\\survey\\images\\a\\IMG_1.JPG", "C:\\survey\\images\\b\\IMG_1.JPG"]
    write_text(tmp_path / "sparse/0", survey(names), newline="\r\n")
    write_photographs(tmp_path / "images", ["a/IMG_1.jpg", "b/IMG_1.jpg"])
    assert below(outputs(tmp_path, eval_interval=0), tmp_path / "images") == ["a/IMG_1.jpg", "b/IMG_1.jpg"]


@pytest.mark.parametrize(
    ("model_place", "image_place", "options"),
    [
        ("sparse/0", "images", {}),
        ("colmap/sparse/0", "images", {}),
        ("dense/sparse", "dense/images", {}),
        ("sparse", "input", {}),
        (".", "images", {}),
        ("sparse/0", ".", {}),
        ("sparse/0", "Images", {}),
        ("out/m", "pictures", {"colmap_path": Path("out/m"), "images_path": Path("pictures")}),
    ],
)
def test_places_of_model_and_photographs(tmp_path: Path, model_place: str, image_place: str, options: dict) -> None:
    write_binary(tmp_path / model_place, survey(NAMES[:3]))
    write_photographs(tmp_path / image_place, NAMES[:3])
    assert len(outputs(tmp_path, eval_interval=0, **options).cameras) == 3


def test_data_may_be_the_model_itself_and_images_a_link(tmp_path: Path) -> None:
    write_binary(tmp_path / "sparse/0", survey(NAMES))
    write_photographs(tmp_path / "elsewhere", NAMES)
    (tmp_path / "images").symlink_to(tmp_path / "elsewhere")
    assert len(outputs(tmp_path / "sparse/0", eval_interval=0).cameras) == 10


def test_photographs_not_found_names_the_folders(tmp_path: Path) -> None:
    write_binary(tmp_path / "sparse/0", survey(NAMES))
    write_photographs(tmp_path / "images", ["other.jpg"])
    with pytest.raises(
        ValueError, match=r"None of the 10 registered.*'0000\.jpg'.*Folders in .*: images, sparse\..*--images-path"
    ):
        outputs(tmp_path)
    with pytest.raises(ValueError, match=r"None of the 10 .*camera-res-scale-factor"):
        outputs(tmp_path, downscale_factor=2)


def test_missing_and_cut_photographs(tmp_path: Path, capsys) -> None:
    data = dataset(tmp_path, survey(NAMES))
    (data / "images/0003.jpg").unlink()
    (data / "images/0004.jpg").write_bytes((data / "images/0004.jpg").read_bytes()[:-60])
    (data / "images/._0001.jpg").write_bytes(b"junk")
    write_photographs(data / "images", ["not_in_model.jpg"])
    with pytest.raises(ValueError, match="10 registered, 9 found, 8 usable.*'0003.jpg'.*--on-problem skip"):
        outputs(data)
    found = outputs(data, on_problem="skip")
    assert below(found, data / "images") == ["0001.jpg", "0002.jpg", "0005.jpg", "0006.jpg", "0007.jpg", "0009.jpg"]
    assert "does not have, and are not used: 1." in capsys.readouterr().out
    write_photographs(data / "images", NAMES)
    whole = outputs(data)
    assert found.dataparser_scale == whole.dataparser_scale  # the frame does not depend on files
    torch.testing.assert_close(found.dataparser_transform, whole.dataparser_transform, rtol=0, atol=0)


def test_a_trained_model_opens_without_photographs(tmp_path: Path) -> None:
    data = dataset(tmp_path, survey(NAMES))
    expected = outputs(data)
    for path in (data / "images").iterdir():
        path.unlink()
    (data / "images").rmdir()
    found = outputs(data, needed=False, masks_path=Path("masks"))
    torch.testing.assert_close(found.cameras.camera_to_worlds, expected.cameras.camera_to_worlds, rtol=0, atol=0)
    assert found.image_filenames == expected.image_filenames
    assert outputs(data, needed=False, downscale_factor=2).cameras.width[0].item() == 20


def test_halved_photographs_halve_the_intrinsics(tmp_path: Path, capsys) -> None:
    data = dataset(tmp_path, survey(NAMES), size=(20, 15))
    found = outputs(data)
    assert [getattr(found.cameras, k)[0].item() for k in ("fx", "fy", "cx", "width", "height")] == [
        17.5,
        18,
        10,
        20,
        15,
    ]
    assert "file 20x15, camera 40x30" in capsys.readouterr().out
    Image.new("RGB", (20, 25)).save(data / "images/0003.jpg")
    with pytest.raises(ValueError, match="'0003.jpg' has 20x25 pixels, its camera 40x30"):
        outputs(data)


def test_downscaled_copies(tmp_path: Path) -> None:
    data = dataset(tmp_path, survey(NAMES))
    write_photographs(data / "images_4", NAMES, size=(10, 7))
    found = outputs(data, downscale_factor=4)
    assert found.image_filenames[0].parent.name == "images_4"
    assert found.cameras.height[0].item() == 7 and found.cameras.fx[0].item() == 35 / 4
    with pytest.raises(ValueError, match="downscale_factor is 0"):
        outputs(data, downscale_factor=0)


@pytest.mark.parametrize("form", ["{}.png", "{stem}.png"])
def test_masks(tmp_path: Path, form: str) -> None:
    names = ["a/0.jpg", "b/0.jpg", "b/1.jpg"]
    data = dataset(tmp_path, survey(names))
    masks = [form.format(name, stem=name[:-4]) for name in names]
    assert outputs(data, eval_interval=0).mask_filenames is None
    write_photographs(data / "masks", masks)
    found = outputs(data, eval_interval=0, masks_path=Path("masks"))
    assert found.mask_filenames == [data / "masks" / mask for mask in masks]
    (data / "masks" / masks[1]).unlink()
    with pytest.raises(ValueError, match="Masks in .*3 registered, 2 found; 1 missing: 'b/0.jpg.png'"):
        outputs(data, eval_interval=0, masks_path=Path("masks"))
    assert len(outputs(data, eval_interval=0, masks_path=Path("masks"), on_problem="skip").cameras) == 2
    write_photographs(data / "masks", masks, size=(20, 15))  # the dataset scales it
    assert len(outputs(data, eval_interval=0, masks_path=Path("masks")).mask_filenames or []) == 3
    write_photographs(data / "masks", masks, size=(20, 20))
    with pytest.raises(ValueError, match="has 20x20 pixels, its photograph 40x30"):
        outputs(data, eval_interval=0, masks_path=Path("masks"))
    with pytest.raises(ValueError, match="mask folder .*nowhere is not there"):
        outputs(data, masks_path=Path("nowhere"))


def test_one_image_trains_and_holds_out_nothing(tmp_path: Path) -> None:
    data = dataset(tmp_path, survey(NAMES[:1]))
    assert len(outputs(data).cameras) == 1
    assert outputs(data).dataparser_scale == 1.0
    assert len(outputs(data, "val").cameras) == 0


def test_all_cameras_at_one_centre(tmp_path: Path) -> None:
    model = survey(NAMES)
    offset = np.array([5e5, 4e6, 100.0])
    poses = []
    for pose, centre in zip(model.poses, centres(model), strict=True):
        # t = -R C; moving every centre to `offset` adds R (C - offset)
        w, *xyz = pose.quat
        turned = Rotation.from_quat([*xyz, w]).apply(centre - offset)
        poses.append(replace(pose, translation=tuple(np.array(pose.translation) + turned)))
    found = outputs(dataset(tmp_path, replace(model, poses=tuple(poses))))
    assert found.dataparser_scale == 1.0
    assert found.cameras.camera_to_worlds[:, :, 3].abs().max() < 1e-6


@pytest.mark.parametrize("change", [{"translation": (np.nan, 0, 0)}, {"quat": (np.inf, 0, 0, 1)}, {"quat": (0,) * 4}])
@pytest.mark.parametrize("text", [False, True])
def test_a_pose_that_is_not_finite_is_dropped_by_name(tmp_path: Path, change: dict, text: bool, capsys) -> None:
    model = survey(NAMES)
    poses = list(model.poses)
    poses[3] = replace(poses[3], **change)
    found = outputs(dataset(tmp_path, replace(model, poses=tuple(poses)), text))
    assert "0003.jpg" not in below(found, tmp_path / "images") and len(found.cameras) == 7
    assert "Left out 1 of 10 images ('0003.jpg')" in capsys.readouterr().out
    assert below(outputs(tmp_path, "val"), tmp_path / "images") == ["0000.jpg", "0008.jpg"]


def test_no_usable_image(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 0 images and none with a usable pose"):
        outputs(dataset(tmp_path, Model(())))


def test_an_image_registered_twice_is_used_once(tmp_path: Path, capsys) -> None:
    model = survey([*NAMES, NAMES[4]])
    found = outputs(dataset(tmp_path, model), eval_interval=0)
    assert below(found, tmp_path / "images") == NAMES
    assert "second pose of 1 of 11 images ('0004.jpg')" in capsys.readouterr().out


@pytest.mark.parametrize("count", [0, 1, 3])
def test_few_points(tmp_path: Path, count: int, capsys) -> None:
    found = outputs(dataset(tmp_path, survey(NAMES, points=np.full((count, 3), 0.5))))
    assert len(found.metadata.get("points3D_xyz", [])) == len(found.metadata.get("points3D_rgb", [])) == count
    assert ("points3D_xyz" in found.metadata) == (count > 0)
    assert ("no usable points to start from" in capsys.readouterr().out) == (count == 0)


def test_points_that_are_not_finite_are_dropped(tmp_path: Path, capsys) -> None:
    points = np.zeros((5, 3))
    points[1, 2], points[3, 0] = np.nan, np.inf
    found = outputs(dataset(tmp_path, survey(NAMES, points=points)))
    assert len(found.metadata["points3D_xyz"]) == 3 and torch.isfinite(found.metadata["points3D_xyz"]).all()
    assert "Left out 2 of 5 points" in capsys.readouterr().out
    assert "points3D_xyz" not in outputs(tmp_path, load_3D_points=False).metadata


@pytest.mark.parametrize(
    ("camera", "fx", "fy", "distortion"),
    [
        (("SIMPLE_PINHOLE", 40, 30, (35.0, 20.0, 15.0)), 35, 35, None),
        (PINHOLE, 35, 36, None),
        (("SIMPLE_RADIAL", 40, 30, (35.0, 20.0, 15.0, 0.1)), 35, 35, [0.1, 0, 0, 0, 0, 0]),
        (("RADIAL", 40, 30, (35.0, 20.0, 15.0, 0.1, 0.2)), 35, 35, [0.1, 0.2, 0, 0, 0, 0]),
        (("OPENCV", 40, 30, (35.0, 36.0, 20.0, 15.0, 0.1, 0.2, 0.3, 0.4)), 35, 36, [0.1, 0.2, 0, 0, 0.3, 0.4]),
        (
            ("FULL_OPENCV", 40, 30, (35.0, 36.0, 20.0, 15.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.0, 0.0, 0.0)),
            *(35, 36, [0.1, 0.2, 0.5, 0, 0.3, 0.4]),
        ),
    ],
)
def test_camera_models(tmp_path: Path, camera, fx: float, fy: float, distortion: list[float] | None) -> None:
    found = outputs(dataset(tmp_path, survey(NAMES, cameras={1: camera}))).cameras
    assert [found.fx[0].item(), found.fy[0].item(), found.cx[0].item(), found.cy[0].item()] == [fx, fy, 20, 15]
    if distortion is None:
        assert found.distortion_params is None
    else:
        assert found.distortion_params is not None
        torch.testing.assert_close(found.distortion_params[0], torch.tensor(distortion))


def test_fisheye_beside_pinhole(tmp_path: Path) -> None:
    """Both are pinholes once the dataset has undistorted them."""
    fisheye = ("OPENCV_FISHEYE", 40, 30, (35.0, 36.0, 20.0, 15.0, 0.01, 0.02, 0.03, 0.04))
    model = survey(NAMES[:2], cameras={1: PINHOLE, 2: fisheye})
    model = replace(model, poses=(model.poses[0], replace(model.poses[1], camera_id=2)))
    found = outputs(dataset(tmp_path, model), eval_interval=0)
    kinds = [CameraType(int(kind)) for kind in found.cameras.camera_type[:, 0]]
    assert kinds == [CameraType.PERSPECTIVE, CameraType.FISHEYE]
    assert found.cameras.distortion_params is not None
    torch.testing.assert_close(found.cameras.distortion_params[1], torch.tensor([0.01, 0.02, 0.03, 0.04, 0, 0]))


BAD_CAMERAS = [
    (("THIN_PRISM_FISHEYE", 40, 30, (35.0, 36.0, 20.0, 15.0, *[0.0] * 8)), "THIN_PRISM_FISHEYE.*image_undistorter"),
    (("FOV", 40, 30, (35.0, 36.0, 20.0, 15.0, 0.9)), "FOV.*image_undistorter"),
    (("FULL_OPENCV", 40, 30, (35.0, 36.0, 20.0, 15.0, *[0.1] * 8)), "k4, k5 or k6.*image_undistorter"),
    (("PINHOLE", 40, 30, (0.0, 36.0, 20.0, 15.0)), r"focal lengths \[0.0, 36.0\]"),
    (("PINHOLE", 40, 30, (35.0, np.nan, 20.0, 15.0)), "parameters that are not finite"),
    (("PINHOLE", 0, 30, (35.0, 36.0, 20.0, 15.0)), "is 0x30 pixels large"),
]


@pytest.mark.parametrize(("camera", "match"), BAD_CAMERAS)
def test_cameras_we_cannot_use_are_refused_if_used(tmp_path: Path, camera, match: str) -> None:
    with pytest.raises(ValueError, match="Camera 1 of .*" + match):
        outputs(dataset(tmp_path / "used", survey(NAMES, cameras={1: camera})))
    outputs(dataset(tmp_path / "unused", survey(NAMES, cameras={1: PINHOLE, 2: camera})))


def test_a_missing_camera_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'0000.jpg' uses camera 1, which .* does not have"):
        outputs(dataset(tmp_path, survey(NAMES, cameras={8: PINHOLE})))


def test_cameras_of_several_sizes(tmp_path: Path) -> None:
    model = survey(NAMES[:2], cameras={1: PINHOLE, 9: ("SIMPLE_RADIAL", 20, 10, (9.0, 10.0, 5.0, 0.1))})
    model = replace(model, poses=(model.poses[0], replace(model.poses[1], camera_id=9)))
    data = dataset(tmp_path, model)
    Image.new("RGB", (20, 10)).save(data / "images/0001.jpg")
    found = outputs(data, eval_interval=0).cameras
    assert found.width[:, 0].tolist() == [40, 20] and found.distortion_params is not None
    assert found.distortion_params[:, 0].tolist() == pytest.approx([0, 0.1])


def split_names(data: Path, **options) -> tuple[list[str], list[str]]:
    root = data / "images"
    return below(outputs(data, **options), root), below(outputs(data, "test", **options), root)


def test_splits(tmp_path: Path) -> None:
    data = dataset(tmp_path, survey(NAMES))
    assert split_names(data)[1] == ["0000.jpg", "0008.jpg"]
    assert split_names(data, eval_interval=5)[1] == ["0000.jpg", "0005.jpg"]
    assert split_names(data, eval_interval=0) == (NAMES, [])
    assert split_names(data, eval_mode="all") == (NAMES, NAMES)
    train, held_out = split_names(data, eval_mode="fraction", train_split_fraction=0.7)
    assert len(train) == 7 and sorted(train + held_out) == NAMES
    assert split_names(data, eval_images=("0003.jpg", "0007.jpg"))[1] == ["0003.jpg", "0007.jpg"]
    with pytest.raises(ValueError, match="All 10 images are held out"):
        outputs(data, eval_interval=1)
    with pytest.raises(ValueError, match=r"'003.jpg' in --eval-images is not an image.*0003.jpg"):
        outputs(data, eval_images=("003.jpg",))
    with pytest.raises(ValueError, match="eval_interval is -1"):
        outputs(data, eval_interval=-1)
    with pytest.raises(ValueError, match="split is 'all'"):
        outputs(data, "all")


def test_held_out_by_name_in_folders(tmp_path: Path) -> None:
    names = ["a/train_0.jpg", "a/eval_1.jpg", "b/train_0.jpg", "b/train_2.jpg"]
    data = dataset(tmp_path, survey(names))
    assert split_names(data, eval_mode="filename")[1] == ["a/eval_1.jpg"]
    assert split_names(data, eval_images=("train_2.jpg",))[1] == ["b/train_2.jpg"]
    assert split_names(data, eval_images=("b\\train_0.jpg",))[1] == ["b/train_0.jpg"]
    with pytest.raises(ValueError, match="'train_0.jpg' .*fits 'a/train_0.jpg' and 'b/train_0.jpg'"):
        outputs(data, eval_images=("train_0.jpg",))


def test_one_bad_file_leaves_the_split_of_the_others(tmp_path: Path) -> None:
    data = dataset(tmp_path, survey(NAMES))
    (data / "images/0001.jpg").unlink()
    assert split_names(data, on_problem="skip")[1] == ["0000.jpg", "0008.jpg"]


@pytest.mark.parametrize("method", ["auto", "up", "vertical", "pca", "none"])
def test_orientations_are_rotations(tmp_path: Path, method) -> None:
    model = survey(NAMES)
    found = outputs(dataset(tmp_path, model), orientation_method=method, eval_interval=0)
    rotation = found.dataparser_transform[:, :3].numpy()
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(rotation) == pytest.approx(1)
    back = found.world_frame.points_to_input(found.cameras.camera_to_worlds[:, :, 3].numpy())
    np.testing.assert_allclose(back, centres(model), atol=1e-5)


@pytest.mark.parametrize("method", ["up", "vertical", "none"])
@pytest.mark.parametrize("center", ["poses", "none"])
@pytest.mark.parametrize("assume", [True, False])
def test_frames_are_nerfstudios(tmp_path: Path, method, center, assume: bool) -> None:
    """To float32, in which nerfstudio's parser calculates; its "pca" is no rotation to the axes and is not ours."""
    model = survey(f"{k:04}.jpg" for k in range(20))
    data = dataset(tmp_path, replace(model, poses=model.poses[::2]))  # one way only: tops that do not cancel out
    options = {
        "orientation_method": method,
        "center_method": center,
        "assume_colmap_world_coordinate_convention": assume,
    }
    stock = ColmapDataParserConfig(data=data, colmap_path=Path("sparse/0"), downscale_factor=1, **options)
    expected = stock.setup().get_dataparser_outputs("train")
    found = outputs(data, **options)
    assert found.image_filenames == expected.image_filenames
    assert found.dataparser_scale == pytest.approx(expected.dataparser_scale, rel=1e-5)
    close = {"rtol": 0, "atol": 2e-5, "check_dtype": False}
    torch.testing.assert_close(found.cameras.camera_to_worlds, expected.cameras.camera_to_worlds, **close)
    torch.testing.assert_close(found.metadata["points3D_xyz"], expected.metadata["points3D_xyz"], **close)


def test_auto_keeps_the_ground_of_a_nadir_survey_level(tmp_path: Path) -> None:
    """Georeferenced (z up): axes kept. In COLMAP's own axes (z forward, so down here): turned by where cameras are."""
    model = survey(NAMES)
    kept = outputs(dataset(tmp_path / "z_up", model)).dataparser_transform[:, :3].numpy()
    np.testing.assert_array_equal(kept, np.eye(3))
    poses = []
    for pose in model.poses:
        w, x, y, z = pose.quat
        # The world turned half around x (y and z reversed): R diag(1, -1, -1), and t as it was.
        poses.append(replace(pose, quat=(-x, w, z, -y)))
    points = model.points * [1, -1, -1]
    turned = outputs(dataset(tmp_path / "z_down", replace(model, poses=tuple(poses), points=points)))
    views = -turned.cameras.camera_to_worlds[:, :, 2].mean(0)
    assert views[2] < -0.99
    positions = turned.cameras.camera_to_worlds[:, 2, 3].mean()
    assert turned.metadata["points3D_xyz"][:, 2].mean() < positions


def test_center_methods(tmp_path: Path) -> None:
    data = dataset(tmp_path, survey(NAMES))
    unmoved = outputs(data, center_method="none", auto_scale_poses=False, scale_factor=2.0)
    assert unmoved.dataparser_transform[:, 3].abs().max() == 0 and unmoved.dataparser_scale == 2.0
    focus = outputs(data, center_method="focus")
    assert focus.world_frame.centre[2] < 5.0  # below the cameras
    with pytest.raises(ValueError, match="scale_factor is 0"):
        outputs(data, scale_factor=0.0)


def test_the_plugin_is_what_nerfstudio_looks_for() -> None:
    assert isinstance(splaxel_colmap.config, SplaxelColmapDataParserConfig)
    assert isinstance(splaxel_colmap.config.setup(), SplaxelColmapDataParser)
