"""The plan of a city: streets around blocks, blocks cut into lots, and everything that stands on them.

A city is a square around the origin, crossed by streets along x and y, with fields around it. It depends on nothing but
its size and seed.

Shapes: S streets along one axis, G cells of the height map along one side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splaxel_ns.city.buildings import Part, add_building
from splaxel_ns.city.furniture import add_cars, add_lamps, add_trees
from splaxel_ns.city.mesh import Kind, Mesh, MeshBuilder, frame_of

KERB = 0.14  # metres from the street up to the pavement
SIDEWALK = 3.2  # metres
_HALF_STREET, _HALF_AVENUE = 4.6, 7.6  # metres from the middle to the kerb; both with room for parked cars
_BLOCK = 72.0  # metres, about, from street to street
_LARGEST_LOT = 34.0
_TALLEST = 90.0  # metres
_CELL = 2.0  # metres per cell of the height map
FIELDS = 3.0  # the fields reach this many times the city's size, and 2 km more
CONCRETE, ASPHALT, SOIL = (0.36, 0.35, 0.33), (0.115, 0.113, 0.115), (0.13, 0.17, 0.055)


@dataclass(frozen=True)
class Streets:
    """The streets along one axis, from one edge of the city to the other."""

    centers: np.ndarray  # [S] metres, on the other axis
    halves: np.ndarray  # [S] metres from the middle to the kerb


@dataclass(frozen=True)
class City:
    """Geometry and what cameras need to know to find their places."""

    size: float  # metres, a side
    mesh: Mesh
    streets: tuple[Streets, Streets]  # along x, along y
    heights: np.ndarray  # [G, G] float32: height of buildings at (x, y), metres
    tallest: float  # metres

    @property
    def cell(self) -> float:
        """Metres per cell of `heights`; the first begins at (-size / 2, -size / 2)."""
        return self.size / len(self.heights)


def build_city(size: float, seed: int) -> City:
    """A city of size x size metres.

    Args:
        size: metres; at least 60, or nothing fits between two streets.
        seed: everything is drawn from it.
    """
    rng = np.random.default_rng([seed, 1])
    mesh = MeshBuilder()
    streets = (_lay_streets(size, rng), _lay_streets(size, rng))
    _add_roads(mesh, size, streets)
    _add_fields(mesh, rng, size)
    cells = int(np.ceil(size / _CELL))
    heights = np.zeros((cells, cells), np.float32)
    along_x, along_y = streets
    gaps = [
        list(zip(line.centers[:-1] + line.halves[:-1], line.centers[1:] - line.halves[1:], strict=True))
        for line in (along_y, along_x)
    ]
    several = len(gaps[0]) * len(gaps[1]) > 2
    trees = []
    for x0, x1 in gaps[0]:
        for y0, y1 in gaps[1]:
            low, high = np.array([x0, y0]), np.array([x1, y1])
            _add_slab(mesh, low, high)
            trees.append(_street_trees(rng, low, high))
            inner = (low + SIDEWALK, high - SIDEWALK)
            if several and rng.random() < 0.08:
                trees.append(_add_park(mesh, rng, *inner))
            else:
                for lot in _cut_lots(rng, *inner):
                    for part in _build_on(mesh, rng, size, *lot):
                        _rasterise(heights, part, size)
    _park_cars(mesh, rng, size, streets)
    _stand_lamps(mesh, size, streets)
    add_trees(mesh, rng, np.concatenate(trees))
    return City(size, mesh.build(rng), streets, heights, float(heights.max()))


def _lay_streets(size: float, rng: np.random.Generator) -> Streets:
    """One street at each edge and some between; every third is an avenue."""
    count = max(1, round(size / _BLOCK))
    halves = np.full(count + 1, _HALF_STREET)
    halves[int(rng.integers(1, 3)) : -1 : 3] = _HALF_AVENUE
    blocks = rng.uniform(0.75, 1.3, count)
    blocks *= (size - 2 * halves.sum()) / blocks.sum()
    starts = np.concatenate([[0.0], np.cumsum(blocks + 2 * halves[:-1])])
    return Streets(starts + halves - 0.5 * size, halves)


def _add_roads(mesh: MeshBuilder, size: float, streets: tuple[Streets, Streets]) -> None:
    """A piece of road between neighbouring crossings, and the crossings."""
    for axis, (own, other) in enumerate((streets, streets[::-1])):
        ends = list(zip(other.centers[:-1] + other.halves[:-1], other.centers[1:] - other.halves[1:], strict=True))
        along, across = np.eye(3)[axis], np.eye(3)[1 - axis]
        for center, half in zip(own.centers, own.halves, strict=True):
            for start, end in ends:
                corners = [along * a + across * b for a, b in _rectangle(start, end, center - half, center + half)]
                frame = frame_of(along * start + across * center, along.tolist(), across.tolist())
                params = [end - start, half, float(half == _HALF_AVENUE)]
                mesh.add_quads(np.stack(corners), mesh.add_object(Kind.ROAD, ASPHALT, frame=frame, params=params))
    along_x, along_y = streets
    crossing = mesh.add_object(Kind.ROAD, ASPHALT, params=[0.0, 0.0, 0.0])
    for y, dy in zip(along_x.centers, along_x.halves, strict=True):
        for x, dx in zip(along_y.centers, along_y.halves, strict=True):
            corners = [(a, b, 0.0) for a, b in _rectangle(x - dx, x + dx, y - dy, y + dy)]
            mesh.add_quads(np.array(corners), crossing)


def _rectangle(a0: float, a1: float, b0: float, b1: float) -> list[tuple[float, float]]:
    return [(a0, b0), (a1, b0), (a1, b1), (a0, b1)]


def _add_fields(mesh: MeshBuilder, rng: np.random.Generator, size: float) -> None:
    """Level ground to the horizon, and trees near the city."""
    reach = FIELDS * size + 2000.0
    fields = mesh.add_object(Kind.GROUND, SOIL, params=[0.5 * size])
    inner = 0.5 * size
    for x0, x1, y0, y1 in (
        (-reach, reach, -reach, -inner),
        (-reach, reach, inner, reach),
        (-reach, -inner, -inner, inner),
        (inner, reach, -inner, inner),
    ):
        mesh.add_quads(np.array([(a, b, -0.02) for a, b in _rectangle(x0, x1, y0, y1)]), fields)
    count = int(np.clip(size / 2.5, 10, 2000))
    where = rng.uniform(-inner - 60.0, inner + 60.0, (4 * count, 2))
    outside = where[(np.abs(where) > inner + 4.0).any(axis=1)][:count]
    add_trees(mesh, rng, np.column_stack([outside, np.full(len(outside), -0.02)]))


def _add_slab(mesh: MeshBuilder, low: np.ndarray, high: np.ndarray) -> None:
    """The raised ground of a block, of which the pavement is the rim."""
    middle, half = 0.5 * (low + high), 0.5 * (high - low)
    frame = frame_of([*middle, KERB], (1, 0, 0), (0, 1, 0))
    mesh.add_boxes([*low, -0.3], [*high, KERB], mesh.add_object(Kind.PAVING, CONCRETE, frame=frame, params=list(half)))


def _street_trees(rng: np.random.Generator, low: np.ndarray, high: np.ndarray) -> np.ndarray:  # [T, 3]
    """A row along each side of a block, with gaps."""
    feet = []
    for axis in (0, 1):
        for edge in (low[1 - axis] + 0.9, high[1 - axis] - 0.9):
            along = np.arange(low[axis] + 7.0, high[axis] - 6.0, float(rng.uniform(8.0, 11.0)))
            along = along[rng.random(len(along)) < rng.choice([0.35, 0.85])]
            row = np.full((len(along), 3), KERB)
            row[:, axis], row[:, 1 - axis] = along + rng.uniform(-0.5, 0.5, len(along)), edge
            feet.append(row)
    return np.concatenate(feet)


def _add_park(mesh: MeshBuilder, rng: np.random.Generator, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Lawns between crossing paths; the feet of its trees, [T, 3]."""
    middle = 0.5 * (low + high)
    lawn = mesh.add_object(Kind.GRASS, (0.1, 0.17, 0.04))
    feet = []
    for x0, x1 in ((low[0], middle[0] - 1.5), (middle[0] + 1.5, high[0])):
        for y0, y1 in ((low[1], middle[1] - 1.5), (middle[1] + 1.5, high[1])):
            mesh.add_boxes([x0, y0, 0.0], [x1, y1, KERB + 0.05], lawn)
            count = int((x1 - x0) * (y1 - y0) / 70)
            where = rng.uniform([x0 + 1, y0 + 1], [x1 - 1, y1 - 1], (count, 2))
            feet.append(np.column_stack([where, np.full(count, KERB + 0.05)]))
    return np.concatenate(feet)


def _cut_lots(rng: np.random.Generator, low: np.ndarray, high: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Cut a rectangle at its longer side until no piece is too large for one building."""
    extent = high - low
    axis = int(np.argmax(extent))
    if extent[axis] <= _LARGEST_LOT * rng.uniform(0.8, 1.0):
        return [(low, high)]
    first, second = high.copy(), low.copy()
    first[axis] = second[axis] = low[axis] + extent[axis] * rng.uniform(0.4, 0.6)
    return [*_cut_lots(rng, low, first), *_cut_lots(rng, second, high)]


def _build_on(
    mesh: MeshBuilder, rng: np.random.Generator, size: float, low: np.ndarray, high: np.ndarray
) -> list[Part]:
    """A building on a lot, higher towards the middle of the city; a lawn where the lot is too narrow."""
    inset = rng.uniform(0.1, 1.6, (2, 2))
    foot = (low + inset[0], high - inset[1])
    if (foot[1] - foot[0]).min() < 6.0:
        mesh.add_boxes([*low, 0.0], [*high, KERB + 0.04], mesh.add_object(Kind.GRASS, (0.1, 0.16, 0.04)))
        return []
    away = float(np.linalg.norm(0.5 * (low + high))) / (0.5 * size)
    floors = rng.lognormal(np.log(3.5 + 5.0 * np.exp(-2.0 * away**2)), 0.4)
    if rng.random() < 0.12 * np.exp(-1.5 * away**2):
        floors *= 2.6
    most = min(_TALLEST, 0.3 * size) / 3.7
    return add_building(mesh, rng, *foot, int(np.clip(floors, 2, max(2.0, most))), KERB)


def _rasterise(heights: np.ndarray, part: Part, size: float) -> None:
    """Enter a box into the height map."""
    scale = len(heights) / size
    (x0, y0), (x1, y1) = (np.clip((p + 0.5 * size) * scale, 0, len(heights)).astype(int) for p in (part.low, part.high))
    window = heights[x0 : x1 + 1, y0 : y1 + 1]
    np.maximum(window, np.float32(part.top), out=window)


def _park_cars(mesh: MeshBuilder, rng: np.random.Generator, size: float, streets: tuple[Streets, Streets]) -> None:
    """Cars along the kerbs, none near crossings."""
    places, along_y = [], []
    for axis, (own, other) in enumerate((streets, streets[::-1])):
        for center, half in zip(own.centers, own.halves, strict=True):
            for side in (-1.0, 1.0):
                along = np.arange(-0.5 * size + 8.0, 0.5 * size - 8.0, 6.0)
                along = along + rng.uniform(-0.4, 0.4, len(along))
                distance = np.abs(along[:, None] - other.centers) - other.halves
                along = along[(distance > 9.0).all(axis=1) & (rng.random(len(along)) < 0.45)]
                row = np.zeros((len(along), 3))
                row[:, axis], row[:, 1 - axis] = along, center + side * (half - 1.15)
                places.append(row)
                along_y.append(np.full(len(along), axis == 1))
    add_cars(mesh, rng, np.concatenate(places), np.concatenate(along_y))


def _stand_lamps(mesh: MeshBuilder, size: float, streets: tuple[Streets, Streets]) -> None:
    """Lamps on both pavements in turn."""
    feet, arms = [np.empty((0, 3))], [np.empty((0, 2))]
    for axis, (own, other) in enumerate((streets, streets[::-1])):
        for center, half in zip(own.centers, own.halves, strict=True):
            along = np.arange(-0.5 * size + 12.0, 0.5 * size - 10.0, 24.0)
            along = along[(np.abs(along[:, None] - other.centers) - other.halves > 1.5).all(axis=1)]
            side = np.where(np.arange(len(along)) % 2 == 0, -1.0, 1.0)
            inside = np.abs(center + side * (half + 0.5)) < 0.5 * size
            row, arm = np.full((len(along), 3), KERB), np.zeros((len(along), 2))
            row[:, axis], row[:, 1 - axis] = along, center + side * (half + 0.5)
            arm[:, 1 - axis] = -1.6 * side
            feet.append(row[inside])
            arms.append(arm[inside])
    add_lamps(mesh, np.concatenate(feet), np.concatenate(arms))
