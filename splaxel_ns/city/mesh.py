"""Triangles of a city, and what each object they belong to is made of.

Coordinates are metres, x east, y north, z up; the streets lie at z = 0.

Shapes: F triangles, O objects, B boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np


class Kind(IntEnum):
    """What an object is made of; `params` holds, per kind, in metres where not said otherwise."""

    GROUND = 0  # half size of the city
    ROAD = 1  # length, half width, 1 for an avenue; length 0: a crossing, without markings
    PAVING = 2  # half sizes of the slab along u and v
    FACADE = 3  # see `FacadeParams`
    ROOF_FLAT = 4
    ROOF_TILES = 5
    PLAIN = 6  # contrast of the surface's grain
    LEAVES = 7  # radius of the crown
    GRASS = 8
    PAINT = 9  # cars


class FacadeParams(IntEnum):
    """Columns of `params` of a façade."""

    WIDTH = 0
    HEIGHT = 1
    FLOOR = 2
    SPACING = 3  # between the middles of windows
    WINDOW_WIDTH = 4
    WINDOW_HEIGHT = 5
    SHOPS = 6  # 1: shop windows on the ground floor
    BRICK = 7  # contrast of the bricks


NUM_PARAMS = 8


@dataclass(frozen=True)
class Mesh:
    """A city as a soup of triangles."""

    corners: np.ndarray  # [F, 3, 3] float32, metres
    objects: np.ndarray  # [F] int32: the object that a triangle belongs to
    kinds: np.ndarray  # [O] int8: Kind
    frames: np.ndarray  # [O, 3, 3] float32: origin, direction of u, direction of v
    colors: np.ndarray  # [O, 2, 3] float32: albedo of the surface and of its trim, linear
    params: np.ndarray  # [O, 8] float32
    seeds: np.ndarray  # [O] int32


_AXES = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0]], np.float32)
_BOX_FACES = np.array(
    [[0, 3, 2, 1], [4, 5, 6, 7], [0, 1, 5, 4], [1, 2, 6, 5], [2, 3, 7, 6], [3, 0, 4, 7]]
)  # bottom, top, -y, +x, +y, -x; corners counted around the bottom, then around the top


@dataclass
class MeshBuilder:
    """Collects objects and triangles."""

    _corners: list[np.ndarray] = field(default_factory=list)
    _objects: list[np.ndarray] = field(default_factory=list)
    _tables: dict[str, list] = field(default_factory=lambda: {k: [] for k in ("kind", "frame", "color", "param")})

    def add_object(
        self,
        kind: Kind,
        color: Sequence[float] | np.ndarray,  # [3] linear albedo
        trim: Sequence[float] | np.ndarray | None = None,  # [3]
        frame: np.ndarray = _AXES,  # [3, 3] origin, u, v
        params: Sequence[float] = (),
    ) -> int:
        """The number of a new object."""
        tables = self._tables
        tables["kind"].append(kind)
        tables["frame"].append(frame)
        tables["color"].append((color, color if trim is None else trim))
        tables["param"].append([*params, *(0.0,) * (NUM_PARAMS - len(params))])
        return len(tables["kind"]) - 1

    def add_quads(self, corners: np.ndarray, objects: int | np.ndarray) -> None:
        """Planar quadrilaterals [..., 4, 3], with one object, or one for each."""
        quads = np.asarray(corners, np.float32).reshape(-1, 4, 3)
        ids = np.broadcast_to(np.asarray(objects, np.int32), (len(quads),))
        self._corners.append(quads[:, [0, 1, 2, 0, 2, 3]].reshape(-1, 3, 3))
        self._objects.append(np.repeat(ids, 2))

    def add_triangles(self, corners: np.ndarray, obj: int) -> None:
        """Triangles [..., 3, 3] of one object."""
        soup = np.asarray(corners, np.float32).reshape(-1, 3, 3)
        self._corners.append(soup)
        self._objects.append(np.full(len(soup), obj, np.int32))

    def add_boxes(
        self,
        low: np.ndarray | Sequence,  # [B, 3] or [3]
        high: np.ndarray | Sequence,  # the same
        objects: int | np.ndarray,  # one, or [B]
    ) -> None:
        """Axis-aligned boxes, closed."""
        low, high = np.atleast_2d(np.asarray(low, np.float32)), np.atleast_2d(np.asarray(high, np.float32))
        x, y, z = (np.stack([low[:, k], high[:, k]], axis=1) for k in range(3))
        around = [(0, 0), (1, 0), (1, 1), (0, 1)]
        corners = np.stack(
            [np.stack([x[:, i], y[:, j], z[:, k]], axis=-1) for k in (0, 1) for i, j in around], axis=1
        )  # [B, 8, 3]
        ids = np.broadcast_to(np.asarray(objects, np.int32), (len(low),))
        self.add_quads(corners[:, _BOX_FACES], np.repeat(ids, 6))

    def build(self, rng: np.random.Generator) -> Mesh:
        """The finished city; `rng` gives every object the number that its details are drawn from."""
        tables = self._tables
        return Mesh(
            corners=np.concatenate(self._corners),
            objects=np.concatenate(self._objects),
            kinds=np.asarray(tables["kind"], np.int8),
            frames=np.asarray(tables["frame"], np.float32),
            colors=np.asarray(tables["color"], np.float32),
            params=np.asarray(tables["param"], np.float32),
            seeds=rng.integers(0, 1 << 30, len(tables["kind"])).astype(np.int32),
        )


def frame_of(origin: Sequence[float] | np.ndarray, u: Sequence[float], v: Sequence[float]) -> np.ndarray:  # [3, 3]
    """The frame of a surface: coordinates are u = (p - origin) . u, v likewise."""
    return np.array([origin, u, v], np.float32)
