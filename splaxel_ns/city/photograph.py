"""Photographs of a city: rays through every pixel, one sun with shadows, the light of the sky, and exact depth.

Colours are linear until the samples of a pixel have been averaged; then the exposure, which is the same for all
photographs, and sRGB. Depth is that of the ray through the middle of a pixel, so edges are not blends of near and far.

Shapes: n rays, H x W pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.ndimage import gaussian_filter

from splaxel_ns.city.materials import Hits, surface_of
from splaxel_ns.city.mesh import Kind
from splaxel_ns.city.streets import City
from splaxel_ns.city.textures import Noise

_SUN = np.array([2.55, 2.35, 2.05], np.float32)
_ZENITH, _HORIZON = np.array([0.16, 0.33, 0.72], np.float32), np.array([0.62, 0.72, 0.84], np.float32)
_AMBIENT_UP, _AMBIENT_DOWN = np.array([0.62, 0.74, 0.95], np.float32), np.array([0.34, 0.31, 0.27], np.float32)
_EXPOSURE = 0.72
_OFFSET = 0.02  # metres off a surface, where its shadow ray starts
_CANYON, _DARKEST = 28.0, 0.5  # metres below the roofs around at which most of the sky is hidden; how much of it then
_RAYS = 1 << 18  # shaded at a time, which bounds the memory


@dataclass(frozen=True)
class Light:
    """Where the sun stands, in degrees: above the horizon, and from east to north."""

    elevation: float = 42.0
    azimuth: float = 235.0

    @property
    def direction(self) -> np.ndarray:  # [3] unit, towards the sun
        up, around = np.radians(self.elevation), np.radians(self.azimuth)
        return np.array([np.cos(up) * np.cos(around), np.cos(up) * np.sin(around), np.sin(up)], np.float32)


def load_open3d() -> Any:
    """Open3D, which is slow to import and needs a system library.

    Raises:
        RuntimeError: it cannot be loaded.
    """
    try:
        import open3d
    except (ImportError, OSError) as error:
        raise RuntimeError(
            f"open3d, which casts the rays, cannot be loaded ({error}): pip install open3d, and the system library "
            "libusb (Debian: apt install libusb-1.0-0)"
        ) from error
    return open3d


class Photographer:
    """Takes photographs of one city, on one thread.

    Args:
        city: to photograph.
        seed: of the textures.
        light: where the sun stands.
    """

    def __init__(self, city: City, seed: int, light: Light) -> None:
        self._o3d = load_open3d()
        self._city, self._sun = city, light.direction
        self._noise = Noise(seed)
        # How high the roofs around a place are, smoothly: the sky that they hide darkens streets and courtyards.
        self._roofs = gaussian_filter(city.heights, 9.0 / city.cell, mode="nearest")
        self._scene = self._o3d.t.geometry.RaycastingScene(nthreads=1)
        corners = np.ascontiguousarray(city.mesh.corners.reshape(-1, 3))
        triangles = np.arange(len(corners), dtype=np.uint32).reshape(-1, 3)
        self._scene.add_triangles(self._o3d.core.Tensor(corners), self._o3d.core.Tensor(triangles))

    def photograph(
        self, pose: np.ndarray, fov: float, width: int, height: int, samples: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """One photograph.

        Args:
            pose: [4, 4] camera-to-world, OpenGL axes, metres.
            fov: horizontal, radians.
            width: pixels.
            height: pixels.
            samples: along each side of a pixel.

        Returns:
            [H, W, 3] uint8 sRGB, and [H, W] float32 depth along the optical axis in metres, infinite in the sky.
        """
        focal = 0.5 * width / np.tan(0.5 * fov)
        rows = max(1, _RAYS // (width * samples**2))
        colors, depths = [], []
        for top in range(0, height, rows):
            bottom = min(top + rows, height)
            rays = camera_rays(pose, focal, width, height, (top, bottom), samples)
            linear = self._radiance(rays, 1.0 / (focal * samples))
            pixels = linear.reshape(bottom - top, samples, width, samples, 3).mean(axis=(1, 3))
            colors.append(_encode(pixels))
            middle = camera_rays(pose, focal, width, height, (top, bottom), 1)
            depths.append(self._cast(middle)["t_hit"].numpy().reshape(bottom - top, width))
        return np.concatenate(colors), np.concatenate(depths)

    def _cast(self, rays: np.ndarray) -> Any:
        return self._scene.cast_rays(self._o3d.core.Tensor(rays), nthreads=1)

    def _radiance(self, rays: np.ndarray, spread: float) -> np.ndarray:  # [n, 6] -> [n, 3]
        """Light along rays, at most 1 after the exposure.

        Args:
            rays: origin, direction with one metre along the optical axis.
            spread: metres that a ray stands for at a depth of one metre.
        """
        answer = self._cast(rays)
        depth = answer["t_hit"].numpy()
        lengths = np.linalg.norm(rays[:, 3:], axis=1, keepdims=True)
        unit = rays[:, 3:] / lengths
        result = sky(unit, self._sun)
        hit = np.flatnonzero(np.isfinite(depth))
        if len(hit):
            triangle = answer["primitive_ids"].numpy()[hit].astype(np.int64)
            normals = answer["primitive_normals"].numpy()[hit]
            result[hit] = self._shade(rays[hit], unit[hit], depth[hit], triangle, normals, spread)
        return np.minimum(result * _EXPOSURE, 1.0)

    def _shade(
        self,
        rays: np.ndarray,  # [n, 6]
        unit: np.ndarray,  # [n, 3]
        depth: np.ndarray,  # [n]
        triangle: np.ndarray,  # [n]
        normals: np.ndarray,  # [n, 3]
        spread: float,
    ) -> np.ndarray:  # [n, 3]
        mesh = self._city.mesh
        obj = mesh.objects[triangle]
        points = rays[:, :3] + rays[:, 3:] * depth[:, None]
        facing = np.einsum("nk,nk->n", normals, unit)
        normals = np.where(facing[:, None] > 0, -normals, normals)
        frames = mesh.frames[obj]
        local = points - frames[:, 0]
        hits = Hits(
            points=points,
            normals=normals,
            directions=unit,
            footprints=depth * spread / np.sqrt(np.maximum(np.abs(facing), 0.06)),
            u=np.einsum("nk,nk->n", local, frames[:, 1]),
            v=np.einsum("nk,nk->n", local, frames[:, 2]),
            colors=mesh.colors[obj],
            params=mesh.params[obj],
            seeds=mesh.seeds[obj],
            centers=frames[:, 0],
        )
        kinds = mesh.kinds[obj]
        albedo, gloss = np.empty_like(points), np.empty(len(points), np.float32)
        for kind in np.unique(kinds):
            rows = np.flatnonzero(kinds == kind)
            albedo[rows], gloss[rows] = surface_of(Kind(kind), hits.take(rows), self._noise)
        leafy = kinds == Kind.LEAVES
        round_off = np.where(leafy[:, None], local / np.maximum(np.linalg.norm(local, axis=1, keepdims=True), 1e-6), 0)
        smooth = normals + 1.5 * round_off  # a crown is lit as a ball, not card by card
        smooth /= np.linalg.norm(smooth, axis=1, keepdims=True)
        light = self._sunlight(points, normals, smooth) + self._skylight(points, smooth)
        return albedo * light * (1 - 0.6 * gloss)[:, None] + self._mirrored(hits, gloss)

    def _sunlight(self, points: np.ndarray, normals: np.ndarray, smooth: np.ndarray) -> np.ndarray:  # [n, 3]
        """Light of the sun where nothing is in its way."""
        slope = smooth @ self._sun
        lit = np.flatnonzero(slope > 0)
        side = np.where((normals[lit] @ self._sun)[:, None] > 0, normals[lit], -normals[lit])
        rays = np.concatenate([points[lit] + _OFFSET * side, np.broadcast_to(self._sun, (len(lit), 3))], axis=1)
        shadow = self._scene.test_occlusions(self._o3d.core.Tensor(rays.astype(np.float32)), nthreads=1).numpy()
        amount = np.zeros(len(points), np.float32)
        amount[lit] = np.where(shadow, 0.0, slope[lit])
        return amount[:, None] * _SUN

    def _skylight(self, points: np.ndarray, normals: np.ndarray) -> np.ndarray:  # [n, 3]
        """Light of the sky and of the ground, less between buildings."""
        up = (0.5 + 0.5 * normals[:, 2])[:, None]
        at = (points[:, :2] + 0.5 * self._city.size) / self._city.cell
        cell = np.clip(at, 0, len(self._roofs) - 1).astype(np.int32)
        below = np.clip((self._roofs[cell[:, 0], cell[:, 1]] - points[:, 2]) / _CANYON, 0.0, 1.0)
        return (_AMBIENT_DOWN + (_AMBIENT_UP - _AMBIENT_DOWN) * up) * (1 - _DARKEST * below)[:, None]

    def _mirrored(self, hits: Hits, gloss: np.ndarray) -> np.ndarray:  # [n, 3]
        """The sky in windows and on cars; what stands opposite is only a darker lower half."""
        result = np.zeros_like(hits.points)
        rows = np.flatnonzero(gloss > 0)
        if len(rows) == 0:
            return result
        normal, ahead = hits.normals[rows], hits.directions[rows]
        against = -np.einsum("nk,nk->n", normal, ahead)
        reflected = ahead + 2 * against[:, None] * normal
        strength = gloss[rows] * (0.06 + 0.94 * (1 - np.clip(against, 0, 1)) ** 5)
        image = sky(reflected, self._sun)
        image *= np.clip(0.45 + 2.0 * reflected[:, 2], 0.25, 1.0)[:, None]
        result[rows] = image * strength[:, None]
        return result


def camera_rays(
    pose: np.ndarray, focal: float, width: int, height: int, rows: tuple[int, int], samples: int
) -> np.ndarray:  # [(rows[1] - rows[0]) * samples * width * samples, 6] float32, row by row
    """Rays of some rows of pixels; pixel centres are at +0.5, and a direction is one metre along the optical axis."""
    x = ((np.arange(width * samples) + 0.5) / samples - 0.5 * width) / focal
    y = ((np.arange(rows[0] * samples, rows[1] * samples) + 0.5) / samples - 0.5 * height) / focal
    local = np.stack(np.broadcast_arrays(x[None, :], -y[:, None], -1.0), axis=-1).reshape(-1, 3)
    rays = np.empty((len(local), 6), np.float32)
    rays[:, :3] = pose[:3, 3]
    rays[:, 3:] = local @ pose[:3, :3].T
    return rays


def sky(direction: np.ndarray, sun: np.ndarray) -> np.ndarray:  # [n, 3] unit, [3] -> [n, 3]
    """Blue above, pale at the horizon, bright around the sun."""
    up = np.clip(direction[:, 2:], 0.0, 1.0)
    glow = np.clip(direction @ sun, 0.0, 1.0)[:, None]
    color = _HORIZON + (_ZENITH - _HORIZON) * up**0.55 + 0.25 * glow**8 + 1.5 * glow**400
    return color.astype(np.float32)


def _encode(linear: np.ndarray) -> np.ndarray:  # [..., 3] -> uint8
    """sRGB."""
    curve = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * np.maximum(linear, 1e-8) ** (1 / 2.4) - 0.055)
    return np.rint(255.0 * np.clip(curve, 0.0, 1.0)).astype(np.uint8)
