"""COLMAP models, binary and text, as arrays: where they are, their cameras, images and points.

Formats: https://colmap.github.io/format.html. nerfstudio's reader keeps every 2D observation as Python objects,
cuts names at blanks and keys images by id; here observations are skipped, a name is the rest of its line, and ids
are only ever compared. Files of COLMAP 3.12 and later (rigs, frames) may lie beside the model and are not needed.

Everything is float64: models in map coordinates lose decimetres in float32.

Letters: N images, C cameras, M points.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# COLMAP's src/colmap/sensor/models.h: number of each camera model, its name and number of parameters.
CAMERA_MODELS: dict[int, tuple[str, int]] = {
    0: ("SIMPLE_PINHOLE", 3),
    1: ("PINHOLE", 4),
    2: ("SIMPLE_RADIAL", 4),
    3: ("RADIAL", 5),
    4: ("OPENCV", 8),
    5: ("OPENCV_FISHEYE", 8),
    6: ("FULL_OPENCV", 12),
    7: ("FOV", 5),
    8: ("SIMPLE_RADIAL_FISHEYE", 4),
    9: ("RADIAL_FISHEYE", 5),
    10: ("THIN_PRISM_FISHEYE", 12),
    11: ("RAD_TAN_THIN_PRISM_FISHEYE", 16),
}
_NUM_PARAMS = dict(CAMERA_MODELS.values())
# Where models lie below a dataset folder, first match wins; each may hold several numbered models.
_MODEL_PLACES = ("sparse", "colmap/sparse", "dense/sparse", "dense/0/sparse", "colmap", "model", ".")
_NUMBERS_ONLY = re.compile(rb"^[\s0-9.+\-eEnaifNAIFxX]*$")  # also nan and inf
_POINTS_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class ColmapCamera:
    """Intrinsics shared by images. `params` in COLMAP's order for `model`, pixels, pixel centres at +0.5."""

    model: str
    width: int
    height: int
    params: tuple[float, ...]


@dataclass(frozen=True)
class ColmapImages:
    """Registered images in ascending order of their ids (stable for equal ids)."""

    names: list[str]  # [N] as stored, any folder separator
    quats: np.ndarray  # [N, 4] float64, world to camera, wxyz, not normalised
    translations: np.ndarray  # [N, 3] float64, world to camera
    camera_ids: np.ndarray  # [N] int64

    def take(self, rows: np.ndarray) -> ColmapImages:
        """Some of the images."""
        names = [self.names[row] for row in rows]
        return ColmapImages(names, self.quats[rows], self.translations[rows], self.camera_ids[rows])


def is_model(folder: Path) -> bool:
    """Whether the folder holds cameras and images of one format."""
    return any(
        (folder / f"cameras.{kind}").is_file() and (folder / f"images.{kind}").is_file() for kind in ("bin", "txt")
    )


def find_model(data: Path) -> tuple[Path, str | None]:
    """Find the COLMAP model of a dataset.

    Args:
        data: the dataset's folder, or the model's own.

    Returns:
        The folder of the model and, when one of several was chosen, a sentence that says so.

    Raises:
        ValueError: there is none. Names the places looked at and, if there is half a model, what it lacks.
    """
    if not data.is_dir():
        raise ValueError(f"{data} is not a folder. Give the folder that holds sparse/ and images/ with --data.")
    for place in _MODEL_PLACES:
        parent = data / place
        if not parent.is_dir():
            continue
        models = [parent] if is_model(parent) else []
        models += sorted((child for child in parent.iterdir() if child.is_dir() and is_model(child)), key=_by_number)
        if len(models) == 1:
            return models[0], None
        if models:
            counts = [count_images(model) for model in models]
            best = int(np.argmax(counts))  # the first of equals
            listed = ", ".join(
                f"{model.relative_to(data).as_posix()} {n}" for model, n in zip(models, counts, strict=True)
            )
            return models[best], (
                f"Several COLMAP models (registered images: {listed}). Using "
                f"{models[best].relative_to(data).as_posix()}; choose another with --colmap-path."
            )
    raise ValueError(_no_model(data))


def count_images(folder: Path) -> int:
    """Number of registered images, from the header where the format has one."""
    path = _pick(folder, "images")
    if path.suffix == ".bin":
        with open(path, "rb") as file:
            head = file.read(8)
        return struct.unpack("<Q", head)[0] if len(head) == 8 else 0
    return sum(1 for _ in _text_images(path))


def read_cameras(folder: Path) -> dict[int, ColmapCamera]:
    """Cameras by id. Raises ValueError naming file and cause if the file is damaged or of another kind."""
    path = _pick(folder, "cameras")
    if path.suffix == ".bin":
        return _binary_cameras(path)
    cameras: dict[int, ColmapCamera] = {}
    for number, line in _text_lines(path):
        fields = line.split()
        try:
            model = fields[1].decode("ascii").upper()
            width, height = int(float(fields[2])), int(float(fields[3]))
            camera_id, params = int(fields[0]), tuple(float(field) for field in fields[4:])
        except (IndexError, ValueError, OverflowError) as error:
            raise _bad_line(path, number, line, "CAMERA_ID MODEL WIDTH HEIGHT PARAMS[]") from error
        if len(params) != _NUM_PARAMS.get(model, len(params)):
            raise _bad_line(path, number, line, f"{_NUM_PARAMS[model]} parameters for a {model} camera")
        cameras[camera_id] = ColmapCamera(model, width, height, params)
    return cameras


def read_images(folder: Path) -> ColmapImages:
    """Names and poses of the registered images. Raises ValueError naming file and cause if damaged."""
    path = _pick(folder, "images")
    rows = list(_binary_images(path) if path.suffix == ".bin" else _text_images(path))
    rows.sort(key=lambda row: row[0])
    poses = np.array([row[1] for row in rows], dtype=np.float64).reshape(-1, 7)
    return ColmapImages(
        names=[row[3] for row in rows],
        quats=poses[:, :4],
        translations=poses[:, 4:],
        camera_ids=np.array([row[2] for row in rows], dtype=np.int64),
    )


def read_points(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The sparse points, in file order; a model without points3D has none.

    Returns:
        xyz [M, 3] float64 in world units and rgb [M, 3] uint8.

    Raises:
        ValueError: the file is damaged; names it.
    """
    path = _pick(folder, "points3D")
    if not path.is_file():
        return np.zeros((0, 3)), np.zeros((0, 3), dtype=np.uint8)
    return _binary_points(path) if path.suffix == ".bin" else _text_points(path)


def _pick(folder: Path, stem: str) -> Path:
    """The file of the model's one format: binary if cameras and images are, as COLMAP itself chooses."""
    binary = (folder / "cameras.bin").is_file() and (folder / "images.bin").is_file()
    return folder / f"{stem}.{'bin' if binary else 'txt'}"


def _by_number(folder: Path) -> tuple[int, int, str]:
    return (0, int(folder.name), "") if folder.name.isdecimal() else (1, 0, folder.name)


def _no_model(data: Path) -> str:
    """Say what was looked for, and what is missing where half a model lies."""
    for place in (*_MODEL_PLACES, "sparse/0", "colmap/sparse/0", "dense/sparse/0"):
        folder = data / place
        have = [f"{stem}.{kind}" for stem in ("cameras", "images") for kind in ("bin", "txt")]
        have = [name for name in have if (folder / name).is_file()]
        if have:
            return (
                f"{folder} holds {' and '.join(have)} but no complete COLMAP model: it needs cameras and images, both "
                ".bin or both .txt."
            )
    places = ", ".join(place for place in _MODEL_PLACES if place != ".")
    return (
        f"No COLMAP model (cameras and images, .bin or .txt) in {data}. Looked there and in {places} with their "
        "subfolders. Give its folder with --colmap-path, relative to --data."
    )


def _damaged(path: Path, what: str) -> ValueError:
    with open(path, "rb") as file:
        head = file.read(24)
    if head.startswith(b"version https://git-lfs"):
        return ValueError(f"{path} is only a Git LFS pointer. Fetch the file itself: `git lfs pull`.")
    return ValueError(
        f"{path} is damaged: {what}. Copy it again, or write it again with `colmap model_converter --output_type BIN`."
    )


def _map(path: Path) -> mmap.mmap:
    """Map a file, so that skipped observations are never read from disk."""
    if path.stat().st_size < 8:
        raise _damaged(path, f"it has {path.stat().st_size} bytes, not even its 8-byte count")
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _binary_cameras(path: Path) -> dict[int, ColmapCamera]:
    cameras: dict[int, ColmapCamera] = {}
    with _map(path) as data:
        (count,) = struct.unpack_from("<Q", data, 0)
        at = 8
        for k in range(count):
            try:
                camera_id, model_id, width, height = struct.unpack_from("<IiQQ", data, at)
                if model_id not in CAMERA_MODELS:
                    raise ValueError(
                        f"{path}: camera {camera_id} is of a kind we do not know (number {model_id}). Make pinhole "
                        "images and a new model with `colmap image_undistorter`, or the file is damaged."
                    )
                model, num_params = CAMERA_MODELS[model_id]
                params = struct.unpack_from(f"<{num_params}d", data, at + 24)
            except struct.error as error:
                raise _damaged(path, f"it ends in camera {k + 1} of {count}") from error
            cameras[camera_id] = ColmapCamera(model, width, height, params)
            at += 24 + 8 * num_params
    return cameras


def _binary_images(path: Path) -> Iterator[tuple[int, tuple[float, ...], int, str]]:
    """Yield (id, qw qx qy qz tx ty tz, camera id, name) per image; observations are stepped over."""
    with _map(path) as data:
        size = len(data)
        (count,) = struct.unpack_from("<Q", data, 0)
        at = 8
        for k in range(count):
            end = data.find(b"\0", at + 64)
            if end < 0 or end + 9 > size:
                raise _damaged(path, f"it ends in image {k + 1} of {count}")
            image_id, *pose, camera_id = struct.unpack_from("<I7dI", data, at)
            try:
                name = data[at + 64 : end].decode("utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(path, f"image {k + 1}", data[at + 64 : end]) from error
            (num_points,) = struct.unpack_from("<Q", data, end + 1)
            at = end + 9 + 24 * num_points
            if at > size:
                raise _damaged(path, f"it ends in image {k + 1} of {count} ('{name[:80]}')")
            yield image_id, tuple(pose), camera_id, name


def _binary_points(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Step along the records (43 fixed bytes, then a track of its own length), then gather in one go."""
    with _map(path) as mapped:
        (count,) = struct.unpack_from("<Q", mapped, 0)
        size = len(mapped)
        if count * 51 + 8 > size:
            raise _damaged(path, f"it has {size} bytes, too few for its {count} points")
        offsets = np.empty(count, dtype=np.int64)
        track_length = struct.Struct("<Q").unpack_from
        at = 8
        for k in range(count):
            if at + 51 > size:
                raise _damaged(path, f"it ends in point {k + 1} of {count}")
            offsets[k] = at
            at += 51 + 8 * track_length(mapped, at + 43)[0]
        if at > size:
            raise _damaged(path, f"it ends in point {count} of {count}")
        xyz = np.empty((count, 3), dtype=np.float64)
        rgb = np.empty((count, 3), dtype=np.uint8)
        data = np.frombuffer(mapped, dtype=np.uint8)
        rows = data[:0]
        for start in range(0, count, _POINTS_AT_ONCE):
            part = slice(start, min(start + _POINTS_AT_ONCE, count))
            rows = data[offsets[part, None] + np.arange(8, 35)]  # [m, 27]: xyz, rgb behind the id
            xyz[part] = np.ascontiguousarray(rows[:, :24]).view("<f8")
            rgb[part] = rows[:, 24:]
        del data, rows  # a mapping cannot be closed while arrays look into it
    return xyz, rgb


def _text_lines(path: Path, blank: bool = False) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line) without byte order mark, line end, comments and, unless asked for, blank lines."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                if line.startswith((b"\xff\xfe", b"\xfe\xff")):
                    raise ValueError(f"{path} is UTF-16. Save it as UTF-8, or export the model as binary.")
                line = line.removeprefix(b"\xef\xbb\xbf")
            line = line.strip(b" \t\r\n\0")
            if (line and not line.startswith(b"#")) or (blank and not line):
                yield number, line


def _text_images(path: Path) -> Iterator[tuple[int, tuple[float, ...], int, str]]:
    """Yield (id, qw qx qy qz tx ty tz, camera id, name) per image.

    The second line of an image (its observations, possibly empty) is skipped. Some exporters leave it out: a line
    that ends in something other than numbers is then taken for the next image.
    """
    second = False
    for number, line in _text_lines(path, blank=True):
        if second:
            second = False
            if _NUMBERS_ONLY.match(line[-64:]):
                continue
        if not line:
            continue
        fields = line.split(None, 9)
        try:
            image_id, camera_id = int(fields[0]), int(fields[8])
            pose = tuple(float(field) for field in fields[1:8])
            raw = fields[9]
        except (IndexError, ValueError) as error:
            raise _bad_line(path, number, line, "IMAGE_ID QW QX QY QZ TX TY TZ CAMERA_ID NAME") from error
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _not_utf8(path, f"line {number}", raw) from error
        second = True
        yield image_id, pose, camera_id, name


def _text_points(path: Path) -> tuple[np.ndarray, np.ndarray]:
    parts: list[np.ndarray] = [np.zeros((0, 6))]
    rows: list[list[bytes]] = []
    lines = _text_lines(path)
    while True:
        item = next(lines, None)
        if item is not None:
            fields = item[1].split(None, 7)
            if len(fields) < 7:
                raise _bad_line(path, *item, "POINT3D_ID X Y Z R G B ERROR TRACK[]")
            rows.append(fields[1:7])
        if rows and (item is None or len(rows) == _POINTS_AT_ONCE):
            try:
                parts.append(np.array(rows).astype(np.float64))
            except ValueError as error:
                raise ValueError(f"{path} holds a point whose position or colour is not a number: {error}.") from error
            rows = []
        if item is None:
            break
    table = np.concatenate(parts)
    return table[:, :3], np.nan_to_num(table[:, 3:]).clip(0, 255).astype(np.uint8)


def _bad_line(path: Path, number: int, line: bytes, expected: str) -> ValueError:
    shown = line[:80].decode("utf-8", errors="replace")
    return ValueError(f"{path}, line {number}: expected {expected}, found '{shown}'. Export the model again.")


def _not_utf8(path: Path, where: str, name: bytes) -> ValueError:
    return ValueError(
        f"{path}, {where}: the name {name[:80]!r} is not UTF-8. Save the model as UTF-8, or rename the photograph."
    )
