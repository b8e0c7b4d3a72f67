"""Photographs with their cameras: pinhole cameras known before any photograph is opened, pixels on demand.

Shapes: N views, H x W pixels of one view.
"""

from __future__ import annotations

from collections.abc import Hashable
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.data.datamanagers.full_images_datamanager import _undistort_image
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.data.datasets.base_dataset import InputDataset
from PIL import Image
from torch import Tensor

from splaxel_ns.image_io import read_mask, read_photograph
from splaxel_ns.loss import SSIM_WINDOW
from splaxel_ns.photo_cache import Photo, PhotoCache

PERSPECTIVE, FISHEYE = CameraType.PERSPECTIVE.value, CameraType.FISHEYE.value
PIXEL_CENTRE = 0.5  # OpenCV's pixel centres lie at whole numbers, nerfstudio's at halves
STAND_IN_GREY = 0.5
MAX_FOCAL_CHANGE = 5.0
"""Undistorting that changes the focal length of a perspective camera by more shows a distortion without inverse."""

Lens = tuple[float, ...]
"""(type, fx, fy, cx, cy, width, height, distortion parameters ...) of a camera that is not a pinhole yet."""


def _lenses(cameras: Cameras, filenames: list[Path]) -> list[Lens | None]:
    """Return for every camera its distortion, or None where it is a pinhole.

    Raises:
        ValueError: A camera cannot be turned into a pinhole.
    """
    num = len(filenames)
    if num == 0:
        return []
    types = cameras.camera_type.reshape(num)
    distortion = torch.zeros(num, 6) if cameras.distortion_params is None else cameras.distortion_params.cpu()
    for index in torch.nonzero((types != PERSPECTIVE) & (types != FISHEYE)).flatten().tolist():
        raise ValueError(
            f"{filenames[index]}: its camera is of nerfstudio's type {CameraType(int(types[index])).name}. Partitions "
            "are rendered for pinhole cameras only; give perspective or fisheye photographs, which are undistorted."
        )
    columns = (cameras.fx, cameras.fy, cameras.cx, cameras.cy, cameras.width, cameras.height)
    rows = torch.cat([types[:, None].double(), *(c.reshape(num, 1).double() for c in columns), distortion.double()], 1)
    plain = (types == PERSPECTIVE) & (distortion == 0).all(dim=1)
    for index in torch.nonzero((types == PERSPECTIVE) & (distortion[:, 3] != 0)).flatten().tolist():
        raise ValueError(
            f"{filenames[index]}: its camera has a fourth radial distortion parameter k4 = {distortion[index, 3]:g}. "
            "Only k1, k2, k3, p1, p2 can be undistorted; export undistorted photographs (colmap image_undistorter)."
        )
    return [None if plain[i] else tuple(rows[i].tolist()) for i in range(num)]


def _pinhole_of(lens: Lens, filename: Path) -> tuple[float, float, float, float, int, int]:
    """Return fx, fy, cx, cy [pixels], width and height after undistortion, as nerfstudio's `_undistort_image` does.

    Raises:
        ValueError: Nothing useful would be left of the photograph.
    """
    kind, fx, fy, cx, cy, width, height = lens[:7]
    k1, k2, k3, k4, p1, p2 = lens[7:13]
    size = (int(width), int(height))
    intrinsics = np.array([[fx, 0, cx - PIXEL_CENTRE], [0, fy, cy - PIXEL_CENTRE], [0, 0, 1]], dtype=np.float32)
    if kind == PERSPECTIVE:
        new, (x, y, width, height) = cv2.getOptimalNewCameraMatrix(
            intrinsics, np.array([k1, k2, p1, p2, k3, 0, 0, 0], dtype=np.float32), size, 0
        )
    else:
        new = cv2.fisheye.estimateNewCameraMatrixForUndistortRectify(
            intrinsics, np.array([k1, k2, k3, k4], dtype=np.float32), size, np.eye(3), balance=0
        )
        x, y = 0, 0
    finite = np.isfinite(new).all() and min(width, height) >= 2 and min(new[0, 0], new[1, 1]) > 0
    ratios = np.array([new[0, 0] / fx, new[1, 1] / fy]) if finite else np.ones(2)
    if not finite or (kind == PERSPECTIVE and np.abs(np.log(ratios)).max() > np.log(MAX_FOCAL_CHANGE)):
        raise ValueError(
            f"{filename}: undistorting leaves no usable picture (fx {fx:g}, fy {fy:g}, distortion "
            f"{[round(value, 6) for value in lens[7:13]]}); check the camera's calibration."
        )
    centre_x, centre_y = new[0, 2] - x + PIXEL_CENTRE, new[1, 2] - y + PIXEL_CENTRE
    return float(new[0, 0]), float(new[1, 1]), float(centre_x), float(centre_y), int(width), int(height)


def _pinhole_cameras(cameras: Cameras, lenses: list[Lens | None], filenames: list[Path]) -> Cameras:
    """Return the cameras as they are after undistortion. No photograph is opened."""
    cameras = deepcopy(cameras)
    known: dict[Lens, tuple[float, float, float, float, int, int]] = {}
    for index, lens in enumerate(lenses):
        if lens is None:
            continue
        if lens not in known:
            known[lens] = _pinhole_of(lens, filenames[index])
        fields = (cameras.fx, cameras.fy, cameras.cx, cameras.cy, cameras.width, cameras.height)
        for field, value in zip(fields, known[lens], strict=True):
            field[index] = value
    cameras.camera_type = torch.full_like(cameras.camera_type, PERSPECTIVE)
    cameras.distortion_params = None
    return cameras


class SplaxelDataset(InputDataset):
    """The views of one split: pinhole cameras, photographs decoded when asked for.

    `cameras` are those after scaling and undistortion, from the start; stock nerfstudio knows them only once every
    photograph has been decoded. Photographs come as `get_data` says, from `cache` where there is one.

    Args:
        dataparser_outputs: Photographs, masks and cameras of the split.
        scale_factor: Both are scaled by it.
        cache: Holds decoded photographs; without one each is decoded every time.
        has_photographs: Whether photographs may be opened for display; without, grey stand-ins are shown.

    Raises:
        ValueError: A camera is not a pinhole after undistortion, or its photograph is too small for SSIM's window.
    """

    def __init__(
        self,
        dataparser_outputs: DataparserOutputs,
        scale_factor: float = 1.0,
        cache: PhotoCache | None = None,
        has_photographs: bool = True,
    ):
        super().__init__(dataparser_outputs, scale_factor)
        self.exclude_batch_keys_from_device = ["image", "mask"]
        self.cache = cache
        self.has_photographs = has_photographs
        self._file_sizes = torch.stack(
            [dataparser_outputs.cameras.width.reshape(-1), dataparser_outputs.cameras.height.reshape(-1)], dim=1
        ).tolist()  # [N][2], pixels
        self._lens_cameras = self.cameras
        self._lenses = _lenses(self.cameras, self.image_filenames)
        self.cameras = _pinhole_cameras(self.cameras, self._lenses, self.image_filenames)
        if has_photographs:
            self._refuse_tiny()

    def _refuse_tiny(self) -> None:
        """Loss and metrics hold windows of SSIM against each photograph: it must be as large as one."""
        sides = torch.minimum(self.cameras.width, self.cameras.height).reshape(-1)  # [N]
        for index in torch.nonzero(sides < SSIM_WINDOW).flatten().tolist():
            raise ValueError(
                f"{self.image_filenames[index]}: {int(self.cameras.width[index])}x{int(self.cameras.height[index])} "
                f"pixels are left of the photograph after scaling and undistortion; each side needs {SSIM_WINDOW}, the "
                "window of SSIM. Leave it out of the dataset, or scale it down less."
            )

    def expected_bytes(self, image_idx: int) -> int:
        """Return the size of a decoded photograph without alpha, with its mask, before it is opened."""
        channels = 3 if self._dataparser_outputs.mask_filenames is None else 4
        return int(self.cameras.width[image_idx]) * int(self.cameras.height[image_idx]) * channels

    def key(self, image_idx: int) -> Hashable:
        """Name the pixels of a view: the files with their folders (base names repeat), and the undistortion."""
        masks = self._dataparser_outputs.mask_filenames
        mask = None if masks is None else str(masks[image_idx])
        return str(self.image_filenames[image_idx]), mask, self._lenses[image_idx], self.scale_factor

    def announce(self, image_indices: list[int]) -> None:
        """Have the cache decode these views in the background, the first first."""
        if self.cache is not None:
            self.cache.announce(
                [(self.key(i), self.expected_bytes(i), lambda i=i: self.decode(i)) for i in image_indices]
            )

    def photo(self, image_idx: int, keep: bool = True) -> Photo:
        """Return the view's pixels, from the cache if they are there. They are shared: do not write to them.

        Raises:
            ValueError: As `decode`.
        """
        if self.cache is None:
            return self.decode(image_idx)
        return self.cache.get(self.key(image_idx), lambda: self.decode(image_idx), keep=keep)

    def decode(self, image_idx: int) -> Photo:
        """Read, scale and undistort one photograph and its mask.

        Returns:
            image uint8 [H, W, 3 | 4], mask bool [H, W, 1] (True: counts) if the dataset has masks.

        Raises:
            ValueError: A file is missing, damaged, or not of its camera's size; the message names it.
        """
        path = self.image_filenames[image_idx]
        image = read_photograph(path)
        self._check_size(path, image, image_idx)
        masks = self._dataparser_outputs.mask_filenames
        mask = None if masks is None else self._read_mask(masks[image_idx], image.shape)
        camera = self._lens_cameras
        size = (int(camera.width[image_idx]), int(camera.height[image_idx]))
        if size != (image.shape[1], image.shape[0]):
            image = np.array(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR))
            mask = None if mask is None else cv2.resize(mask, size, interpolation=cv2.INTER_NEAREST)
        if self._lenses[image_idx] is not None:
            image, mask = self._undistort(image_idx, image, mask)
        photo = {"image": torch.from_numpy(self._colour(image, mask))}
        if mask is not None:
            photo["mask"] = torch.from_numpy(mask > 127)[..., None]
        return photo

    def _check_size(self, path: Path, image: np.ndarray, image_idx: int) -> None:
        width, height = self._file_sizes[image_idx]
        if image.shape[:2] != (height, width):
            turned = " The photograph lies on its side; save it upright." if image.shape[:2] == (width, height) else ""
            raise ValueError(
                f"{path}: the photograph has {image.shape[1]}x{image.shape[0]} pixels, its camera {width}x{height}. "
                f"Resize the photograph or correct the camera's size and intrinsics.{turned}"
            )

    def _read_mask(self, path: Path, shape: tuple[int, ...]) -> np.ndarray:
        """Return the mask as uint8 [H, W], 0 or 255, of the photograph's size."""
        mask = read_mask(path).astype(np.uint8) * 255
        height, width = shape[:2]
        if mask.shape == (height, width):
            return mask
        same_ratio = abs(mask.shape[1] * height - mask.shape[0] * width) < max(height, width)
        if not same_ratio:
            raise ValueError(
                f"{path}: the mask has {mask.shape[1]}x{mask.shape[0]} pixels, its photograph {width}x{height}, "
                "which is another shape; make the mask for this photograph."
            )
        return cv2.resize(mask, (width, height), interpolation=cv2.INTER_NEAREST)

    def _undistort(
        self, image_idx: int, image: np.ndarray, mask: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Undistort and crop by nerfstudio's function, the mask like one more channel."""
        camera = self._lens_cameras[image_idx].reshape(())
        assert camera.distortion_params is not None or int(camera.camera_type) == FISHEYE
        distortion = np.zeros(6, np.float32) if camera.distortion_params is None else camera.distortion_params.numpy()

        def undistort(pixels: np.ndarray) -> np.ndarray:
            intrinsics = camera.get_intrinsics_matrices().numpy()  # the function writes into it
            return np.ascontiguousarray(_undistort_image(camera, distortion, {}, pixels, intrinsics)[1])

        image = undistort(image)
        expected = (int(self.cameras.height[image_idx]), int(self.cameras.width[image_idx]))
        if image.shape[:2] != expected:
            raise RuntimeError(f"{self.image_filenames[image_idx]}: undistorted to {image.shape[:2]}, not {expected}")
        return image, None if mask is None else undistort(mask)

    def _colour(self, image: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
        """Put the background and mask colours that the dataparser may ask for into the photograph."""
        alpha_color = self._dataparser_outputs.alpha_color
        if alpha_color is not None and image.shape[2] == 4:
            image = over_background(image, alpha_color.numpy())
        if self.mask_color is not None and mask is not None:
            fill = np.round(255 * np.asarray(self.mask_color, dtype=np.float32)).astype(np.uint8)
            image = np.where(mask[..., None] > 127, image[..., :3], fill)
        return image

    def get_numpy_image(self, image_idx: int) -> np.ndarray:
        """Return uint8 [H, W, 3 | 4]; see `get_data`."""
        return self.photo(image_idx)["image"].numpy()

    def get_image_uint8(self, image_idx: int) -> Tensor:
        """Return uint8 [H, W, 3 | 4]; see `get_data`."""
        return self.photo(image_idx)["image"]

    def get_image_float32(self, image_idx: int) -> Tensor:
        """Return float32 [H, W, 3 | 4] in 0..1; see `get_data`."""
        return self.photo(image_idx)["image"].float() / 255.0

    def get_data(self, image_idx: int, image_type: Literal["uint8", "float32"] = "float32", keep: bool = True) -> dict:
        """Return one view's image_idx, image [H, W, 3 | 4] and, with masks, mask bool [H, W, 1].

        The fourth channel is alpha, not premultiplied, and only there if the photograph has transparent pixels and
        the dataparser names no colour to put behind them. uint8 tensors belong to the cache: do not write to them.

        Raises:
            ValueError: As `decode`.
        """
        data: dict[str, Any] = {"image_idx": image_idx, **self.photo(image_idx, keep)}
        if image_type == "float32":
            data["image"] = data["image"].float() / 255.0
        data.update(self.get_metadata(data))
        return data

    def __getitem__(self, image_idx: int) -> dict:
        """Return a view for display, as nerfstudio's viewer and `ns-render dataset` ask for it.

        image is float32 [H, W, 3] in 0..1, transparent pixels over black: both would take a fourth channel for
        features. Without photographs it is grey.
        """
        if not self.has_photographs:
            size = (int(self.cameras.height[image_idx]), int(self.cameras.width[image_idx]), 3)
            return {"image_idx": image_idx, "image": torch.full(size, STAND_IN_GREY)}
        data = self.get_data(image_idx, "uint8")
        image = data["image"]
        if image.shape[2] == 4:
            image = torch.from_numpy(over_background(image.numpy(), np.zeros(3, np.float32)))
        return {**data, "image": image.float() / 255.0}


def over_background(image: np.ndarray, background: np.ndarray) -> np.ndarray:
    """Put uint8 [H, W, 4] with straight alpha over a colour [3] in 0..1; returns uint8 [H, W, 3]."""
    alpha = image[..., 3:].astype(np.float32) / 255.0
    blended = image[..., :3] * alpha + 255.0 * background.astype(np.float32) * (1.0 - alpha)
    return np.clip(np.round(blended), 0, 255).astype(np.uint8)
