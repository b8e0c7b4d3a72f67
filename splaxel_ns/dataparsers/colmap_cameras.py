"""What COLMAP's cameras and poses mean to nerfstudio: pinhole intrinsics, distortion, camera-to-world matrices.

Letters: N images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.spatial.transform import Rotation

from splaxel_ns.dataparsers.colmap_model import ColmapCamera, ColmapImages

# Position in COLMAP's parameters of fx, fy, cx, cy and of nerfstudio's k1, k2, k3, k4, p1, p2; None is zero.
# nerfstudio undoes k1, k2, k3, p1, p2, or the four terms of a fisheye; its k4 is not that of FULL_OPENCV, which is
# checked apart.
_PARAMS: dict[str, tuple[int | None, ...]] = {
    "SIMPLE_PINHOLE": (0, 0, 1, 2, None, None, None, None, None, None),
    "PINHOLE": (0, 1, 2, 3, None, None, None, None, None, None),
    "SIMPLE_RADIAL": (0, 0, 1, 2, 3, None, None, None, None, None),
    "RADIAL": (0, 0, 1, 2, 3, 4, None, None, None, None),
    "OPENCV": (0, 1, 2, 3, 4, 5, None, None, 6, 7),
    "FULL_OPENCV": (0, 1, 2, 3, 4, 5, 8, None, 6, 7),
    "OPENCV_FISHEYE": (0, 1, 2, 3, 4, 5, 6, 7, None, None),
    "SIMPLE_RADIAL_FISHEYE": (0, 0, 1, 2, 3, None, None, None, None, None),
    "RADIAL_FISHEYE": (0, 0, 1, 2, 3, 4, None, None, None, None),
}
_FISHEYE = ("OPENCV_FISHEYE", "SIMPLE_RADIAL_FISHEYE", "RADIAL_FISHEYE")
_UNDISTORT = "Make pinhole images and a new model with `colmap image_undistorter`, and use its output folder as --data."


@dataclass(frozen=True)
class Lenses:
    """Intrinsics of N images: pixels, pixel centres at +0.5."""

    intrinsics: np.ndarray  # [N, 4] float64: fx, fy, cx, cy
    sizes: np.ndarray  # [N, 2] int64: width, height
    distortion: np.ndarray  # [N, 6] float64: k1, k2, k3, k4, p1, p2
    fisheye: np.ndarray  # [N] bool: the distortion is a polynomial in the angle, not in the radius

    def take(self, rows: np.ndarray) -> Lenses:
        """The lenses of some images."""
        return Lenses(self.intrinsics[rows], self.sizes[rows], self.distortion[rows], self.fisheye[rows])

    def resized(self, sizes: np.ndarray) -> Lenses:  # sizes [N, 2]
        """The lenses for images of other sizes; distortion is independent of the size."""
        ratio = sizes / self.sizes
        return replace(self, intrinsics=self.intrinsics * np.concatenate([ratio, ratio], axis=1), sizes=sizes)


def usable_rows(images: ColmapImages) -> tuple[np.ndarray, list[str]]:
    """Images to keep, and sentences about the others.

    Dropped are poses that are not finite or have no rotation (one NaN would make every camera NaN once they are
    centred), and the second pose of a photograph that is registered twice.

    Returns:
        Rows [K] int64 in ascending order, and what to tell the user.
    """
    notes = []
    norms = np.linalg.norm(images.quats, axis=1)
    finite = np.isfinite(images.quats).all(axis=1) & np.isfinite(images.translations).all(axis=1)
    posed = finite & (norms > 1e-6)
    if not posed.all():
        notes.append(f"Left out {_listed(images.names, ~posed)}: the pose is not finite.")
    first = np.zeros(len(images.names), dtype=bool)
    seen: set[str] = set()
    for row in np.flatnonzero(posed):
        first[row] = images.names[row] not in seen
        seen.add(images.names[row])
    if (posed & ~first).any():
        notes.append(f"Left out the second pose of {_listed(images.names, posed & ~first)}: registered twice.")
    return np.flatnonzero(first), notes


def camera_to_world(images: ColmapImages) -> np.ndarray:  # [N, 3, 4] float64
    """Camera-to-world matrices in OpenGL axes (x right, y up, z back), input units."""
    if not images.names:
        return np.zeros((0, 3, 4))
    world_to_cam = Rotation.from_quat(images.quats[:, [1, 2, 3, 0]]).as_matrix()  # normalises, as COLMAP does
    rotations = world_to_cam.transpose(0, 2, 1)  # [N, 3, 3]
    centres = -(rotations @ images.translations[:, :, None])
    return np.concatenate([rotations * [1.0, -1.0, -1.0], centres], axis=2)


def pinhole_lenses(images: ColmapImages, cameras: Mapping[int, ColmapCamera], model: Path) -> Lenses:
    """The lens of every image; cameras that no image uses are not looked at.

    Raises:
        ValueError: a camera is missing, has a size or focal length that cannot be, or a distortion that nerfstudio
            does not undo (thin prism, field of view, the fractional terms of FULL_OPENCV).
    """
    rows = np.zeros((len(images.names), 13))
    known: dict[int, np.ndarray] = {}
    for i, camera_id in enumerate(images.camera_ids.tolist()):
        if camera_id not in known:
            if camera_id not in cameras:
                raise ValueError(
                    f"'{images.names[i]}' uses camera {camera_id}, which {model} does not have (it has "
                    f"{len(cameras)} cameras). Cameras and images are not of the same model; export both again."
                )
            known[camera_id] = _lens(camera_id, cameras[camera_id], model)
        rows[i] = known[camera_id]
    return Lenses(
        intrinsics=rows[:, :4],
        distortion=rows[:, 4:10],
        sizes=rows[:, 10:12].astype(np.int64),
        fisheye=rows[:, 12] > 0,
    )


def _lens(camera_id: int, camera: ColmapCamera, model: Path) -> np.ndarray:  # [13]
    """fx, fy, cx, cy, distortion, width, height and 1 for fisheye, of one camera."""
    name = f"Camera {camera_id} of {model} ({camera.model})"
    if camera.model not in _PARAMS:
        raise ValueError(f"{name} is a kind of camera that cannot be undistorted here. {_UNDISTORT}")
    if not np.isfinite(camera.params).all():
        raise ValueError(f"{name} has parameters that are not finite: {camera.params}. Run the reconstruction again.")
    if camera.model == "FULL_OPENCV" and any(camera.params[9:12]):
        raise ValueError(f"{name} has k4, k5 or k6 {camera.params[9:12]}, which nerfstudio cannot undo. {_UNDISTORT}")
    values = [0.0 if k is None else camera.params[k] for k in _PARAMS[camera.model]]
    if min(values[:2]) <= 0:
        raise ValueError(f"{name} has focal lengths {values[:2]}; they must be positive. Run the reconstruction again.")
    if not (0 < camera.width < 1 << 20 and 0 < camera.height < 1 << 20):
        raise ValueError(f"{name} is {camera.width}x{camera.height} pixels large. Correct its width and height.")
    return np.array([*values, camera.width, camera.height, camera.model in _FISHEYE])


def _listed(names: list[str], chosen: np.ndarray) -> str:
    hits = [names[row] for row in np.flatnonzero(chosen)]
    shown = ", ".join(f"'{name}'" for name in hits[:3])
    return f"{len(hits)} of {len(names)} images ({shown}{', ...' if len(hits) > 3 else ''})"
