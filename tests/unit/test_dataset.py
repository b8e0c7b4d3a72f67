"""Photographs, masks and cameras of a dataset: pixel formats, undistortion, errors."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.data.datamanagers.full_images_datamanager import _undistort_image
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.data.utils.dataloaders import FixedIndicesEvalDataloader
from PIL import Image

from splaxel_ns.dataset import SplaxelDataset
from splaxel_ns.image_io import read_mask, read_photograph

WIDTH, HEIGHT = 48, 36


def picture(seed: int = 0, width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """A smooth colourful uint8 picture [H, W, 3]."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)


def make_cameras(num: int, width: int = WIDTH, height: int = HEIGHT, **kwargs) -> Cameras:
    """Pinhole cameras at the origin, principal point off centre."""
    poses = torch.eye(4)[None, :3].repeat(num, 1, 1)
    defaults = {"fx": 40.0, "fy": 42.0, "cx": width / 2 + 1.0, "cy": height / 2 - 1.5, "width": width, "height": height}
    return Cameras(camera_to_worlds=poses, **(defaults | kwargs))


def make_dataset(paths: list[Path], masks: list[Path] | None = None, cameras: Cameras | None = None, **kwargs):
    outputs = DataparserOutputs(
        image_filenames=paths,
        cameras=make_cameras(len(paths)) if cameras is None else cameras,
        mask_filenames=masks,
        alpha_color=kwargs.pop("alpha_color", None),
        metadata=kwargs.pop("metadata", {}),
    )
    return SplaxelDataset(outputs, **kwargs)


def test_eight_bit_modes_keep_their_values(tmp_path: Path) -> None:
    rgb = picture()
    image = Image.fromarray(rgb)
    image.save(tmp_path / "rgb.png")
    image.convert("L").save(tmp_path / "grey.png")
    image.convert("1").save(tmp_path / "bits.png")
    image.quantize(64).save(tmp_path / "palette.png")
    image.convert("CMYK").save(tmp_path / "cmyk.tif")
    image.convert("YCbCr").save(tmp_path / "ycc.tif")
    assert np.array_equal(read_photograph(tmp_path / "rgb.png"), rgb)
    grey = np.array(image.convert("L"))
    assert np.array_equal(read_photograph(tmp_path / "grey.png"), np.repeat(grey[..., None], 3, 2))
    for name, bound in (("palette.png", 30.0), ("cmyk.tif", 1.5), ("ycc.tif", 3.0)):
        pixels = read_photograph(tmp_path / name)
        assert pixels.shape == rgb.shape and pixels.dtype == np.uint8
        assert np.abs(pixels.astype(float) - rgb).mean() < bound, name
    assert set(np.unique(read_photograph(tmp_path / "bits.png"))) == {0, 255}


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits_are_scaled(tmp_path: Path, suffix: str) -> None:
    deep = (picture().astype(np.uint16) * 257 + 100).clip(0, 65535).astype(np.uint16)
    expected = np.round(deep / 257.0).astype(np.uint8)
    cv2.imwrite(str(tmp_path / f"rgb.{suffix}"), deep[..., ::-1])
    Image.fromarray(deep[..., 0]).save(tmp_path / f"grey.{suffix}")
    assert np.array_equal(read_photograph(tmp_path / f"rgb.{suffix}"), expected)
    assert np.array_equal(read_photograph(tmp_path / f"grey.{suffix}")[..., 1], expected[..., 0])


def test_sixteen_bit_alpha(tmp_path: Path) -> None:
    deep = np.dstack([picture(), picture(1)[..., :1]]).astype(np.uint16) * 257
    cv2.imwrite(str(tmp_path / "rgba.png"), deep[..., [2, 1, 0, 3]])
    assert np.array_equal(read_photograph(tmp_path / "rgba.png"), (deep // 257).astype(np.uint8))


def test_alpha_only_where_it_means_something(tmp_path: Path) -> None:
    rgba = np.dstack([picture(), np.full((HEIGHT, WIDTH), 255, np.uint8)])
    Image.fromarray(rgba).save(tmp_path / "opaque.png")
    rgba[:10, :, 3] = 0
    Image.fromarray(rgba).save(tmp_path / "holes.png")
    Image.fromarray(rgba).convert("LA").save(tmp_path / "la.png")
    palette = Image.fromarray(rgba[..., :3]).quantize(16)
    palette.save(tmp_path / "palette.png", transparency=palette.getpixel((0, 0)))
    assert read_photograph(tmp_path / "opaque.png").shape == (HEIGHT, WIDTH, 3)
    assert np.array_equal(read_photograph(tmp_path / "holes.png"), rgba)
    for name in ("la.png", "palette.png"):
        pixels = read_photograph(tmp_path / name)
        assert pixels.shape == (HEIGHT, WIDTH, 4) and pixels[0, 0, 3] == 0 and pixels[..., 3].max() == 255


def test_unusable_files_are_named(tmp_path: Path) -> None:
    buffer = cv2.imencode(".jpg", picture(0, 400, 300))[1].tobytes()
    (tmp_path / "cut.jpg").write_bytes(buffer[: len(buffer) // 2])
    png = cv2.imencode(".png", picture(0, 400, 300).astype(np.uint16) * 257)[1].tobytes()
    (tmp_path / "cut16.png").write_bytes(png[: len(png) // 2])
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "._junk.jpg").write_bytes(b"\0\5\26\7")
    Image.fromarray(np.linspace(0, 3, WIDTH * HEIGHT, dtype=np.float32).reshape(HEIGHT, WIDTH)).save(
        tmp_path / "float.tif"
    )
    for name in ("cut.jpg", "cut16.png", "empty.jpg", "._junk.jpg", "float.tif", "gone.jpg", "linear.exr"):
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            read_photograph(tmp_path / name)
    with pytest.raises(ValueError, match="linear colour"):
        read_photograph(tmp_path / "linear.exr")
    with pytest.raises(ValueError, match="fixed white"):
        read_photograph(tmp_path / "float.tif")


def test_masks_of_any_mode(tmp_path: Path) -> None:
    kept = np.zeros((HEIGHT, WIDTH), bool)
    kept[5:20, 8:30] = True
    white = kept.astype(np.uint8) * 255
    Image.fromarray(white).save(tmp_path / "l.png")
    Image.fromarray(kept.astype(np.uint8)).save(tmp_path / "labels.png")
    Image.fromarray(kept).save(tmp_path / "bits.png")
    Image.fromarray(np.dstack([white] * 3)).save(tmp_path / "rgb.png")
    Image.fromarray(np.dstack([white] * 3)).quantize(2).save(tmp_path / "p.png")
    Image.fromarray(white.astype(np.uint16) * 257).save(tmp_path / "i16.png")
    Image.fromarray(np.dstack([np.full_like(white, 255)] * 3 + [white])).save(tmp_path / "white_alpha.png")
    Image.fromarray(np.dstack([np.zeros_like(white)] * 3 + [white])).save(tmp_path / "black_alpha.png")
    for name in ("l", "labels", "bits", "rgb", "p", "i16", "white_alpha", "black_alpha"):
        assert np.array_equal(read_mask(tmp_path / f"{name}.png"), kept), name
    Image.fromarray(white).save(tmp_path / "noisy.jpg", quality=60)
    assert (read_mask(tmp_path / "noisy.jpg") != kept).mean() < 0.01
    with pytest.raises(ValueError, match="no such mask"):
        read_mask(tmp_path / "gone.png")


def test_views_come_with_masks_of_their_size(tmp_path: Path) -> None:
    Image.fromarray(picture()).save(tmp_path / "a.png")
    mask = np.zeros((HEIGHT // 2, WIDTH // 2), np.uint8)
    mask[:9] = 255
    Image.fromarray(mask).save(tmp_path / "half.png")
    Image.fromarray(mask.T.copy()).save(tmp_path / "turned.png")
    data = make_dataset([tmp_path / "a.png"], [tmp_path / "half.png"]).get_data(0, "uint8")
    assert data["image"].dtype == torch.uint8 and data["mask"].dtype == torch.bool
    assert data["mask"].shape == (HEIGHT, WIDTH, 1) and data["mask"][:18].all() and not data["mask"][18:].any()
    with pytest.raises(ValueError, match=r"turned\.png.*18x24.*48x36"):
        make_dataset([tmp_path / "a.png"], [tmp_path / "turned.png"]).get_data(0)


def test_colours_the_dataparser_asks_for(tmp_path: Path) -> None:
    rgba = np.dstack([picture(), np.full((HEIGHT, WIDTH), 255, np.uint8)])
    rgba[:10, :, 3], rgba[10:12, :, 3] = 0, 51
    Image.fromarray(rgba).save(tmp_path / "a.png")
    image = make_dataset([tmp_path / "a.png"], alpha_color=torch.tensor([1.0, 0.5, 0.0])).get_data(0, "uint8")["image"]
    assert image.shape == (HEIGHT, WIDTH, 3) and image[0, 0].tolist() == [255, 128, 0]
    assert np.abs(image[11, 5].numpy() - (0.2 * rgba[11, 5, :3] + 0.8 * np.array([255, 127.5, 0]))).max() <= 1
    kept = np.zeros((HEIGHT, WIDTH), np.uint8)
    kept[12:] = 255
    Image.fromarray(kept).save(tmp_path / "mask.png")
    dataset = make_dataset([tmp_path / "a.png"], [tmp_path / "mask.png"], metadata={"mask_color": (0.0, 1.0, 0.0)})
    image = dataset.get_data(0, "uint8")["image"]
    assert image[3, 3].tolist() == [0, 255, 0] and np.array_equal(image[20].numpy(), rgba[20, :, :3])


def test_wrong_size_is_an_error(tmp_path: Path) -> None:
    Image.fromarray(picture(0, HEIGHT, WIDTH)).save(tmp_path / "side.png")
    with pytest.raises(ValueError, match=r"side\.png.*36x48.*48x36.*on its side"):
        make_dataset([tmp_path / "side.png"]).get_data(0)


def test_scale_factor_scales_camera_and_pixels(tmp_path: Path) -> None:
    Image.fromarray(picture()).save(tmp_path / "a.png")
    Image.fromarray(picture()[..., 0] // 128).save(tmp_path / "m.png")
    dataset = make_dataset([tmp_path / "a.png"], [tmp_path / "m.png"], scale_factor=0.7)
    data = dataset.get_data(0, "float32")
    size = (int(dataset.cameras.height[0]), int(dataset.cameras.width[0]))
    assert size == (25, 33) and data["image"].shape == (*size, 3) and data["mask"].shape == (*size, 1)
    assert data["image"].dtype == torch.float32 and data["image"].max() <= 1


DISTORTED = {
    "radial": (CameraType.PERSPECTIVE, [0.08, -0.03, 0.01, 0.0, 0.002, -0.001]),
    "barrel": (CameraType.PERSPECTIVE, [-0.2, 0.05, 0.0, 0.0, 0.0, 0.0]),
    "fisheye": (CameraType.FISHEYE, [0.02, -0.004, 0.0, 0.0, 0.0, 0.0]),
    "fisheye without parameters": (CameraType.FISHEYE, [0.0] * 6),
}


@pytest.mark.parametrize("kind", DISTORTED)
@pytest.mark.parametrize("with_alpha", [False, True])
def test_undistorted_cameras_are_known_before_the_photographs(tmp_path: Path, kind: str, with_alpha: bool) -> None:
    camera_type, parameters = DISTORTED[kind]
    width, height = 160, 120
    pixels = picture(0, width, height)
    if with_alpha:
        pixels = np.dstack([pixels, picture(1, width, height)[..., 0]])
    Image.fromarray(pixels).save(tmp_path / "a.png")
    mask = np.full((height, width), 255, np.uint8)
    mask[40:60, 50:90] = 0
    Image.fromarray(mask).save(tmp_path / "m.png")
    cameras = make_cameras(1, width, height, fx=130.0, fy=131.0, camera_type=camera_type)
    cameras.distortion_params = torch.tensor([parameters])
    # What stock nerfstudio finds out by decoding.
    K, expected, _ = _undistort_image(
        cameras[0].reshape(()), np.array(parameters), {}, pixels, cameras[0].get_intrinsics_matrices().numpy()
    )
    dataset = make_dataset([tmp_path / "gone.png"], None, cameras)  # there is no photograph to look at
    found = dataset.cameras
    assert found.distortion_params is None and int(found.camera_type[0]) == CameraType.PERSPECTIVE.value
    assert (int(found.width[0]), int(found.height[0])) == (expected.shape[1], expected.shape[0])
    intrinsics = [found.fx.item(), found.fy.item(), found.cx.item(), found.cy.item()]
    np.testing.assert_allclose(intrinsics, [K[0, 0], K[1, 1], K[0, 2], K[1, 2]], rtol=1e-5)

    data = make_dataset([tmp_path / "a.png"], [tmp_path / "m.png"], cameras).get_data(0, "uint8")
    assert np.array_equal(data["image"].numpy(), expected)
    assert data["mask"].shape == (*expected.shape[:2], 1) and 0.01 < 1 - data["mask"].float().mean().item() < 0.2


def test_undistorted_pixels_lie_where_the_pinhole_camera_sees_them(tmp_path: Path) -> None:
    """A dot drawn through the distorted camera appears where the undistorted one projects the same ray."""
    width, height, parameters = 160, 120, [-0.15, 0.03, 0.0, 0.0, 0.004, -0.002]
    ray = np.array([0.3, -0.2, 1.0])
    cameras = make_cameras(1, width, height, fx=130.0, fy=131.0, distortion_params=torch.tensor([parameters]))
    k1, k2, k3, _, p1, p2 = parameters
    K = cameras[0].get_intrinsics_matrices().numpy().astype(np.float64)
    spot = cv2.projectPoints(ray[None], np.zeros(3), np.zeros(3), K, np.array([k1, k2, p1, p2, k3]))[0].ravel()
    ys, xs = np.mgrid[:height, :width] + 0.5
    blob = 255 * np.exp(-((xs - spot[0]) ** 2 + (ys - spot[1]) ** 2) / 8)
    Image.fromarray(blob.astype(np.uint8)).save(tmp_path / "dot.png")
    dataset = make_dataset([tmp_path / "dot.png"], None, cameras)
    weights = dataset.get_data(0)["image"][..., 0].double().numpy()
    ys, xs = np.mgrid[: weights.shape[0], : weights.shape[1]] + 0.5
    seen = np.array([(weights * xs).sum(), (weights * ys).sum()]) / weights.sum()
    K = dataset.cameras[0].get_intrinsics_matrices().numpy()
    assert np.abs(seen - (K @ ray)[:2]).max() < 0.15


def test_cameras_that_are_no_pinholes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pano.jpg"
    with pytest.raises(ValueError, match=r"pano\.jpg.*EQUIRECTANGULAR"):
        make_dataset([path], None, make_cameras(1, camera_type=CameraType.EQUIRECTANGULAR))
    with pytest.raises(ValueError, match=r"pano\.jpg.*k4"):
        make_dataset([path], None, make_cameras(1, distortion_params=torch.tensor([[0, 0, 0, 0.1, 0, 0]])))
    with pytest.raises(ValueError, match=r"pano\.jpg.*no usable picture"):
        make_dataset([path], None, make_cameras(1, distortion_params=torch.tensor([[-9.0, 40.0, 0, 0, 0, 0]])))


def test_same_name_in_two_folders(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "0000.png" for folder in ("a", "b")]
    for seed, path in enumerate(paths):
        path.parent.mkdir()
        Image.fromarray(picture(seed)).save(path)
    dataset = make_dataset(paths)
    assert dataset.key(0) != dataset.key(1)
    assert np.array_equal(dataset.get_data(1, "uint8")["image"].numpy(), picture(1))


def test_display_as_nerfstudio_renders_a_dataset(tmp_path: Path) -> None:
    """`ns-render dataset` and the viewer index the dataset: three channels, floats, the cameras' sizes."""
    sizes = [(48, 36), (40, 30), (36, 48)]
    paths, masks = [], []
    for index, (width, height) in enumerate(sizes):
        pixels = picture(index, width, height)
        if index == 1:
            pixels = np.dstack([pixels, np.full((height, width), 128, np.uint8)])
        paths.append(tmp_path / f"{index}.png")
        masks.append(tmp_path / f"m{index}.png")
        Image.fromarray(pixels).save(paths[-1])
        Image.fromarray(np.full((height, width), 255, np.uint8)).save(masks[-1])
    cameras = make_cameras(3)
    cameras.width, cameras.height = (torch.tensor(sizes)[:, i : i + 1] for i in (0, 1))
    dataset = make_dataset(paths, masks, cameras)
    loader = FixedIndicesEvalDataloader(input_dataset=dataset, device="cpu")
    for (width, height), (camera, batch) in zip(sizes, loader, strict=True):
        assert (int(camera.width), int(camera.height)) == (width, height)
        assert batch["image"].shape == (height, width, 3) and batch["image"].dtype == torch.float32
        assert batch["mask"].shape == (height, width, 1)
    assert np.abs(dataset[1]["image"].numpy() - picture(1, 40, 30) / 255 * 128 / 255).max() < 0.003
    stand_in = make_dataset([tmp_path / "gone.png"], has_photographs=False)[0]["image"]
    assert stand_in.shape == (HEIGHT, WIDTH, 3)


def test_empty_split() -> None:
    cameras = make_cameras(1)
    dataset = make_dataset([], None, cameras[:0])
    assert len(dataset) == 0 and len(list(FixedIndicesEvalDataloader(input_dataset=dataset))) == 0


def test_photographs_below_the_window_of_ssim_are_refused(tmp_path: Path) -> None:
    """Known from the cameras: before any photograph is opened. Without photographs there is nothing to compare."""
    cameras = make_cameras(2)
    cameras.width, cameras.height = torch.tensor([[48], [40]]), torch.tensor([[36], [10]])
    paths = [tmp_path / "large.png", tmp_path / "small.png"]
    with pytest.raises(ValueError, match="small.png: 40x10 pixels .* each side needs 11"):
        make_dataset(paths, cameras=cameras)
    with pytest.raises(ValueError, match="large.png: 14x10 pixels"):
        make_dataset(paths[:1], scale_factor=0.3)
    assert len(make_dataset(paths, cameras=cameras, has_photographs=False)) == 2
