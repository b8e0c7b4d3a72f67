"""MatrixCity's depth maps: where they lie, how they are read, and seed points from them.

Files are EXR with three or four equal channels: z-depth (along the optical axis, not the ray) in centimetres, float16
or float32. float16 ends at 65504 cm, which then means "farther than 655 m", and the sky has finite values: the first is
masked here, the second by a largest depth. Renders are anti-aliased, so depths at the edges of objects are blends of
near and far and lie in the air.

Shapes: N frames, H x W pixels, M points.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
from PIL import Image
from rich.progress import track

from splaxel_ns.dataparsers.matrixcity_points import SeedPoints

CENTIMETRES_PER_METRE = 100.0
SATURATED_CM = 65504.0  # the largest float16
_PROGRESS_FROM = 20  # files; fewer are done before a bar could be read
_EXR_HELP = (
    "Reading EXR needs OpenCV built with OpenEXR (opencv-python-headless 4.10.0.84 is; 5.0.0.93 is not) or the OpenEXR "
    "package: pip install OpenEXR."
)


def find_depth_files(photographs: Sequence[Path], nominals: Sequence[Path]) -> list[Path | None]:
    """The depth map of each photograph, float32 before float16; None where there is none.

    Args:
        photographs: [N] the files found.
        nominals: [N] where the camera files put them: <root>/<city>/<view>/<split>/<block>/0001.png.
    """
    folders: dict[Path, list[Path]] = {}
    files = []
    for photograph, nominal in zip(photographs, nominals, strict=True):
        if nominal.parent not in folders:
            folders[nominal.parent] = [folder for folder in _depth_folders(nominal.parent) if folder.is_dir()]
        stems = dict.fromkeys((nominal.stem, photograph.stem))
        candidates = (folder / f"{stem}.exr" for folder in folders[nominal.parent] for stem in stems)
        files.append(next((path for path in candidates if path.is_file()), None))
    return files


def depth_folders(block: Path) -> str:
    """Where depth maps of a block are looked for, for messages."""
    return ", ".join(str(path) for path in _depth_folders(block))


def _depth_folders(block: Path) -> list[Path]:
    """Sibling trees of the city as distributed, the block's sibling, and the block's subfolder."""
    split, view, city = block.parent, block.parent.parent, block.parent.parent.parent
    name = f"{block.name}_depth"
    trees = [city.parent / (city.name + suffix) for suffix in ("_depth_float32", "_depth")]
    distributed = [tree / view.name / split.name / name for tree in trees]
    nested = [folder / name for folder in distributed]  # an archive unpacked inside a folder of its own name
    return [*distributed, *nested, split / name, block / "depth"]


def read_depth(path: Path) -> np.ndarray:  # [H, W] float32, metres; NaN where the file has no valid depth
    """One depth map.

    Raises:
        RuntimeError: no library here can read EXR.
        ValueError: the file is damaged.
    """
    depth = _read_exr(path).astype(np.float32)
    invalid = ~np.isfinite(depth) | (depth <= 0) | (depth == SATURATED_CM)
    return np.where(invalid, np.float32(np.nan), depth / np.float32(CENTIMETRES_PER_METRE))


def stock_reader_gain(path: Path) -> float:
    """What nerfstudio's DepthDataset reads from a map, over what the map says.

    It lets OpenCV turn the equal channels into grey, with weights that do not add up to 1 for EXR files (1.09 in 4.10).
    """
    ours = _read_exr(path).astype(np.float64)
    import cv2  # after `_read_exr` has allowed it to read EXR

    grey = cv2.imread(str(path), cv2.IMREAD_ANYDEPTH)
    usable = np.isfinite(ours) & (ours > 0)
    if grey is None or grey.shape != ours.shape or not usable.any():
        raise RuntimeError(f"OpenCV cannot read {path} as nerfstudio does. {_EXR_HELP}")
    return float(np.median(grey[usable] / ours[usable]))


def edge_mask(depth: np.ndarray, threshold: float) -> np.ndarray:  # [H, W] -> [H, W] bool
    """Pixels whose depth differs from a neighbour's by more than `threshold` of it (0: none)."""
    edges = np.zeros(depth.shape, dtype=bool)
    if threshold <= 0:
        return edges
    for axis in (0, 1):
        step = np.abs(np.diff(depth, axis=axis))
        near = np.minimum(depth[_head(axis)], depth[_tail(axis)])
        jump = step > threshold * near  # False beside invalid pixels, which are NaN
        edges[_head(axis)] |= jump
        edges[_tail(axis)] |= jump
    return edges


def lift_depth(
    depth: np.ndarray,  # [H, W] metres, NaN where invalid
    rows: np.ndarray,  # [M] int
    columns: np.ndarray,  # [M] int
    pose: np.ndarray,  # [4, 4] float64 camera-to-world, OpenGL axes, input units
    intrinsics: np.ndarray,  # [4] fx, fy, cx, cy for this size, pixel centres at +0.5
    metres_per_unit: float,
) -> np.ndarray:  # [M, 3] float64, input units
    """World positions of pixels."""
    z = depth[rows, columns].astype(np.float64) / metres_per_unit
    fx, fy, cx, cy = intrinsics
    in_camera = np.stack([(columns + 0.5 - cx) / fx * z, -(rows + 0.5 - cy) / fy * z, -z], axis=1)
    return in_camera @ pose[:3, :3].T + pose[:3, 3]


def points_from_depth(
    files: Sequence[Path],  # [N]
    photographs: Sequence[Path],  # [N]
    poses: np.ndarray,  # [N, 4, 4] float64
    intrinsics: np.ndarray,  # [N, 4]
    sizes: np.ndarray,  # [N, 2] width, height that the intrinsics are for
    *,
    metres_per_unit: float,
    limit: int,
    max_depth: float,  # metres
    edge_threshold: float,
    seed: int,
) -> SeedPoints:
    """Random pixels of every given frame, lifted to the world and coloured by the photographs; at most `limit`.

    A size of the depth map that differs from the photograph's is allowed where the proportions are the same.
    """
    generator = np.random.default_rng(seed)
    quotas = np.diff(np.arange(len(files) + 1) * limit // max(len(files), 1))
    positions, colors = [np.empty((0, 3))], [np.empty((0, 3), np.uint8)]
    show = len(files) >= _PROGRESS_FROM
    for k, quota in track(enumerate(quotas), "Reading depth maps", len(quotas), transient=True, disable=not show):
        depth = read_depth(files[k])
        height, width = depth.shape
        scale = np.array([width, height]) / sizes[k]
        if abs(scale[0] / scale[1] - 1) > 0.02:
            raise ValueError(f"{files[k]} is {width}x{height}, not the proportions of {photographs[k]}.")
        with np.errstate(invalid="ignore"):
            usable = (depth <= max_depth) & ~edge_mask(depth, edge_threshold)
        chosen = np.flatnonzero(usable)
        chosen = generator.choice(chosen, size=min(int(quota), len(chosen)), replace=False)
        rows, columns = np.divmod(chosen, width)
        scaled = intrinsics[k] * np.concatenate([scale, scale])
        positions.append(lift_depth(depth, rows, columns, poses[k], scaled, metres_per_unit))
        with Image.open(photographs[k]) as image:
            pixels = np.asarray(image.convert("RGB"))
        at = (
            ((rows + 0.5) * pixels.shape[0] / height).astype(int),
            ((columns + 0.5) * pixels.shape[1] / width).astype(int),
        )
        colors.append(pixels[at])
    return np.concatenate(positions), np.concatenate(colors)


def _head(axis: int) -> tuple[slice, ...]:
    return (slice(None, -1), slice(None)) if axis == 0 else (slice(None), slice(None, -1))


def _tail(axis: int) -> tuple[slice, ...]:
    return (slice(1, None), slice(None)) if axis == 0 else (slice(None), slice(1, None))


def _read_exr(path: Path) -> np.ndarray:  # [H, W] centimetres
    """The first channel. OpenCV reads EXR only with this variable set, and some of its builds not even then."""
    if not path.is_file() or path.stat().st_size == 0:
        raise ValueError(f"{path} is {'empty' if path.is_file() else 'missing'}. Download it again.")
    with open(path, "rb") as file:
        if file.read(4) != b"\x76\x2f\x31\x01":
            raise ValueError(f"{path} is not an EXR file. Download it again.")
    os.environ.setdefault("OPENCV_IO_ENABLE_OPENEXR", "1")
    import cv2  # after the variable, which OpenCV reads once

    try:
        pixels = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    except cv2.error:
        pixels = None
    if pixels is None:
        pixels = _read_with_openexr(path)
    return pixels if pixels.ndim == 2 else pixels[..., 0]


def _read_with_openexr(path: Path) -> np.ndarray:
    """The fallback where OpenCV returned nothing."""
    try:
        import OpenEXR  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise RuntimeError(
            f"{path} cannot be read: it is damaged, or OpenCV has no EXR support here. {_EXR_HELP}"
        ) from error
    try:
        with OpenEXR.File(str(path)) as file:
            channel = next(iter(file.channels().values()))
            return cast(np.ndarray, channel.pixels)
    except (RuntimeError, OSError, StopIteration) as error:
        raise ValueError(f"{path} is damaged ({error}). Download it again.") from error
