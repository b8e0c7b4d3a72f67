"""Photographs and masks from files, converted by pixel format.

Shapes: H x W pixels. Everything comes back as the file stores it: EXIF orientation is not applied, because
neither COLMAP nor nerfstudio applies it to the camera.
"""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
from PIL import Image

NO_FIXED_RANGE = {".exr", ".hdr", ".pfm"}
LOSSY = {"JPEG", "MPO", "WEBP", "JPEG2000"}
WITH_ALPHA = {"RGBA", "RGBa", "LA", "La", "PA"}
SIXTEEN_TO_EIGHT = 257  # 65535 = 255 * 257, so white stays white


def _to_eight_bit(values: np.ndarray) -> np.ndarray:
    """Scale 16-bit values to 8 bits with rounding."""
    return ((values.astype(np.uint32) + SIXTEEN_TO_EIGHT // 2) // SIXTEEN_TO_EIGHT).astype(np.uint8)


def _is_sixteen_bit_colour(image: Image.Image) -> bool:
    """Pillow holds colour in 8 bits only; its decoder's raw mode tells that the file has 16."""
    for tile in getattr(image, "tile", []):
        arguments = tile[3]
        raw_mode = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
        if isinstance(raw_mode, str) and ";16" in raw_mode:
            return image.mode in ("RGB", "RGBA")
    return False


def _read_sixteen_bit_colour(path: Path) -> np.ndarray | None:
    """Return uint8 [H, W, 3 | 4] with correct rounding, or None where OpenCV cannot read the file."""
    pixels = cv2.imdecode(np.fromfile(path, dtype=np.uint8), cv2.IMREAD_UNCHANGED)
    if pixels is None or pixels.dtype != np.uint16 or pixels.ndim != 3:
        return None
    order = [2, 1, 0] if pixels.shape[2] == 3 else [2, 1, 0, 3]
    return _to_eight_bit(pixels[..., order])


def _grey_values(image: Image.Image) -> np.ndarray:
    """Return the one channel of a 16-bit, 32-bit or floating-point image as uint8 [H, W].

    Raises:
        ValueError: The values have no fixed white.
    """
    values = np.asarray(image)
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers without a fixed white; save it as 8- or 16-bit sRGB")
    if values.size and (values.min() < 0 or values.max() > 65535):
        raise ValueError("its pixels are 32-bit integers without a fixed white; save it as 8- or 16-bit sRGB")
    return _to_eight_bit(values)


def _decode(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        deep = _read_sixteen_bit_colour(path) if _is_sixteen_bit_colour(image) else None
        image.load()  # also reports a truncated file, which OpenCV fills with grey
        if deep is not None:
            return deep
        if image.mode.startswith("I") or image.mode == "F":
            return np.repeat(_grey_values(image)[..., None], 3, axis=2)
        if image.mode in ("RGBa", "La"):
            image = image.convert(image.mode.upper())
        has_alpha = image.mode in WITH_ALPHA or "transparency" in image.info
        return np.array(image.convert("RGBA" if has_alpha else "RGB"))


def read_photograph(path: Path) -> np.ndarray:
    """Read one photograph of any common pixel format.

    16-bit values are scaled, palettes looked up, CMYK and the like converted; an alpha channel that is opaque
    everywhere is left out.

    Returns:
        uint8 [H, W, 3], or [H, W, 4] where some pixel is transparent (alpha not premultiplied).

    Raises:
        ValueError: The file is missing, damaged, or holds linear colour; the message names it.
    """
    if path.suffix.lower() in NO_FIXED_RANGE:
        raise ValueError(
            f"{path}: {path.suffix} files hold linear colour without a fixed white, which training cannot compare "
            "with sRGB; convert the photographs to PNG or JPEG and point the data at those."
        )
    try:
        pixels = _decode(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such photograph; restore it or take it out of the data.") from None
    except Exception as error:  # Pillow's decoders raise many kinds: OSError, SyntaxError, struct.error, zlib.error
        raise ValueError(
            f"{path}: cannot be read as a photograph ({type(error).__name__}: {error}); "
            "replace the file or take it out of the data."
        ) from error
    if pixels.shape[2] == 4 and (pixels[..., 3] == 255).all():
        pixels = np.ascontiguousarray(pixels[..., :3])
    return pixels


def read_mask(path: Path) -> np.ndarray:
    """Read one mask: True where the photograph counts.

    Black or transparent means "leave out". Lossless files keep every value above zero, lossy ones (JPEG), whose
    black is not quite zero, every value in the brighter half. A picture whose colour is black all over carries
    its mask in alpha.

    Returns:
        bool [H, W].

    Raises:
        ValueError: The file is missing or damaged; the message names it.
    """
    try:
        with Image.open(path) as image:
            lossy = image.format in LOSSY
            image.load()
            if image.mode.startswith("I") or image.mode == "F":
                return np.asarray(image) > 0
            if image.mode in ("RGBa", "La"):
                image = image.convert(image.mode.upper())
            has_alpha = image.mode in WITH_ALPHA or "transparency" in image.info
            pixels = np.array(image.convert("RGBA" if has_alpha else "RGB"))
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such mask; restore it or remove the masks from the data.") from None
    except Exception as error:
        raise ValueError(f"{path}: cannot be read as a mask ({type(error).__name__}: {error}).") from error
    kept = pixels[..., :3].max(axis=2) > (127 if lossy else 0)
    if has_alpha:
        opaque = pixels[..., 3] > 0
        kept = (kept & opaque) if kept.any() else opaque
    return kept
