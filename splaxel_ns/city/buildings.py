"""Buildings: walls with windows, ledges, balconies, roofs and what stands on them.

Shapes: B boxes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from splaxel_ns.city.mesh import Kind, MeshBuilder, frame_of

_WALLS = np.array(  # linear albedo: brick, dark brick, plaster, sand, white, concrete, ochre, rose, blue grey, sage
    [
        [0.34, 0.13, 0.08],
        [0.22, 0.09, 0.06],
        [0.62, 0.52, 0.38],
        [0.50, 0.40, 0.27],
        [0.72, 0.70, 0.66],
        [0.38, 0.37, 0.35],
        [0.58, 0.38, 0.16],
        [0.56, 0.34, 0.28],
        [0.30, 0.36, 0.42],
        [0.36, 0.40, 0.30],
    ]
)
_NUM_BRICKS = 2  # the first of these are bricks
_TRIMS = np.array([[0.70, 0.68, 0.62], [0.24, 0.24, 0.25], [0.40, 0.30, 0.20], [0.55, 0.55, 0.55], [0.10, 0.16, 0.14]])
_ROOFS = np.array([[0.38, 0.12, 0.06], [0.26, 0.10, 0.07], [0.12, 0.12, 0.13], [0.22, 0.17, 0.13]])
_FLAT_ROOFS = np.array([[0.30, 0.29, 0.27], [0.16, 0.16, 0.17], [0.42, 0.40, 0.36], [0.28, 0.20, 0.16]])
_METAL = (0.45, 0.46, 0.47)


@dataclass(frozen=True)
class Style:
    """What the parts of one building share."""

    wall: np.ndarray  # [3] albedo
    trim: np.ndarray  # [3]
    floor: float  # metres
    spacing: float  # metres between windows
    window: tuple[float, float]  # metres
    shops: bool
    brick: float
    ledges: int  # a ledge every so many floors, 0: none
    balconies: bool


@dataclass(frozen=True)
class Part:
    """A box of a building."""

    low: np.ndarray  # [2] metres
    high: np.ndarray  # [2]
    bottom: float
    top: float


def draw_style(rng: np.random.Generator, tall: bool) -> Style:
    """How a building looks; `tall` ones may have walls of glass."""
    number = int(rng.integers(len(_WALLS)))
    spacing = float(rng.uniform(2.3, 3.8))
    floor = float(rng.uniform(3.0, 3.7))
    glass = tall and rng.random() < 0.45
    share = rng.uniform(0.9, 0.94) if glass else rng.uniform(0.38, 0.6)
    height = floor * (0.8 if glass else rng.uniform(0.42, 0.58))
    return Style(
        wall=np.clip(_WALLS[number] * rng.uniform(0.8, 1.15), 0, 0.8),
        trim=_TRIMS[rng.integers(len(_TRIMS))],
        floor=floor,
        spacing=spacing,
        window=(float(spacing * share), float(height)),
        shops=rng.random() < 0.5,
        brick=1.0 if number < _NUM_BRICKS else 0.0,
        ledges=0 if glass else int(rng.choice([0, 1, 1, 2, 3])),
        balconies=not glass and rng.random() < 0.4,
    )


def add_building(
    mesh: MeshBuilder,
    rng: np.random.Generator,
    low: np.ndarray,  # [2] metres
    high: np.ndarray,  # [2]
    floors: int,
    ground: float,
) -> list[Part]:
    """A building on a rectangle; its boxes, for what needs their heights."""
    style = draw_style(rng, tall=floors > 9)
    top = ground + floors * style.floor
    extent = high - low
    parts = [Part(low, high, ground, top)]
    pitched = floors <= 6 and rng.random() < 0.6
    if floors > 11 and extent.min() > 12:  # a tower on its base, maybe with a step further up
        base = ground + int(rng.integers(2, 6)) * style.floor
        inset = extent * rng.uniform(0.1, 0.2, 2)
        parts = [Part(low, high, ground, base), Part(low + inset, high - inset, base, top)]
        if floors > 16 and rng.random() < 0.7:
            middle = base + style.floor * int(0.65 * (top - base) / style.floor)
            again = inset + extent * 0.1
            parts[1:] = [replace(parts[1], top=middle), Part(low + again, high - again, middle, top)]
    elif not pitched and extent.min() > 14 and rng.random() < 0.45:  # two wings of different heights
        axis = int(rng.integers(2))
        cut = low[axis] + extent[axis] * rng.uniform(0.4, 0.6)
        first, second = high.copy(), low.copy()
        first[axis] = second[axis] = cut
        if rng.random() < 0.6:
            second[1 - axis] += extent[1 - axis] * rng.uniform(0.25, 0.5)
        lower = ground + max(1, floors - int(rng.integers(1, 4))) * style.floor
        parts = [Part(low, first, ground, top), Part(second, high, ground, lower)]
    for part in parts:
        _add_part(mesh, rng, part, style, pitched)
    return parts


def _add_part(mesh: MeshBuilder, rng: np.random.Generator, part: Part, style: Style, pitched: bool) -> None:
    on_ground = part.bottom < 1.0
    for corner, along, width, outward in _walls(part):
        origin = np.array([*corner, part.bottom])
        params = [width, part.top - part.bottom, style.floor, style.spacing, *style.window]
        facade = mesh.add_object(
            Kind.FACADE,
            style.wall,
            style.trim,
            frame_of(origin, (*along, 0.0), (0.0, 0.0, 1.0)),
            [*params, float(style.shops and on_ground), style.brick],
        )
        right, up = np.array([*along, 0.0]) * width, np.array([0.0, 0.0, part.top - part.bottom])
        mesh.add_quads(np.stack([origin, origin + right, origin + right + up, origin + up]), facade)
        if style.balconies and width > 6:
            _add_balconies(mesh, rng, part, style, (corner, along, width, outward))
    _add_ledges(mesh, part, style)
    if pitched:
        _add_pitched_roof(mesh, rng, part, style)
    else:
        _add_flat_roof(mesh, rng, part, style)


def _walls(part: Part) -> list[tuple[np.ndarray, np.ndarray, float, np.ndarray]]:
    """For each wall its left corner seen from outside, the direction to its right, its width, and outward."""
    (x0, y0), (x1, y1) = part.low, part.high
    corners = [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]
    directions = [(1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0)]
    widths = [x1 - x0, y1 - y0, x1 - x0, y1 - y0]
    return [
        (np.array(corner), np.array(along), float(width), np.array([along[1], -along[0]]))
        for corner, along, width in zip(corners, directions, widths, strict=True)
    ]


def window_columns(width: float | np.ndarray, spacing: float | np.ndarray) -> np.ndarray:
    """How many windows stand beside each other on a wall; they are centred on it."""
    return np.maximum(np.floor((np.asarray(width) - 1.2) / spacing), 1.0)


def _add_balconies(
    mesh: MeshBuilder,
    rng: np.random.Generator,
    part: Part,
    style: Style,
    wall: tuple[np.ndarray, np.ndarray, float, np.ndarray],
) -> None:
    """A slab with a parapet before every second or third window, from the first floor up."""
    corner, along, width, outward = wall
    columns = int(window_columns(width, style.spacing))
    left = 0.5 * (width - columns * style.spacing)
    chosen = np.arange(int(rng.integers(2)), columns, int(rng.integers(2, 4)))
    floors = np.arange(1, int((part.top - part.bottom) / style.floor + 1e-3))
    if len(chosen) == 0 or len(floors) == 0:
        return
    u, z = (grid.ravel() for grid in np.meshgrid(left + (chosen + 0.5) * style.spacing, floors * style.floor))
    z = z + part.bottom
    half, depth = 0.47 * style.spacing, 1.15
    slab = mesh.add_object(Kind.PLAIN, style.trim * 0.5 + 0.2, params=[0.08])
    rail = mesh.add_object(Kind.PLAIN, style.trim * 0.8, params=[0.05])
    for obj, inner, u0, u1, outer, z0, z1 in (
        (slab, 0.0, -half, half, depth, -0.1, 0.06),
        (rail, depth - 0.06, -half, half, depth, 0.06, 0.95),
        (rail, 0.0, -half, -half + 0.06, depth, 0.06, 0.95),
        (rail, 0.0, half - 0.06, half, depth, 0.06, 0.95),
    ):
        a = corner + np.outer(u + u0, along) + outward * inner
        b = corner + np.outer(u + u1, along) + outward * outer
        mesh.add_boxes(np.column_stack([np.minimum(a, b), z + z0]), np.column_stack([np.maximum(a, b), z + z1]), obj)


def _add_ledges(mesh: MeshBuilder, part: Part, style: Style) -> None:
    """Rings around the building at its floors, a stronger one below the roof."""
    heights = np.arange(1, int((part.top - part.bottom) / style.floor + 1e-3)) * style.floor + part.bottom
    heights = heights[:: style.ledges] if style.ledges else heights[:0]
    obj = mesh.add_object(Kind.PLAIN, style.trim, params=[0.1])
    for z, reach, thick in [*((z, 0.14, 0.16) for z in heights), (part.top - 0.3, 0.28, 0.3)]:
        _add_ring(mesh, part.low - reach, part.high + reach, z - 0.5 * thick, z + 0.5 * thick, reach, obj)


def _add_ring(
    mesh: MeshBuilder, low: np.ndarray, high: np.ndarray, bottom: float, top: float, thick: float, obj: int
) -> None:
    """Four boxes along the inside of a rectangle."""
    (x0, y0), (x1, y1) = low, high
    lows = [(x0, y0), (x0, y1 - thick), (x0, y0 + thick), (x1 - thick, y0 + thick)]
    highs = [(x1, y0 + thick), (x1, y1), (x0 + thick, y1 - thick), (x1, y1 - thick)]
    mesh.add_boxes([(*p, bottom) for p in lows], [(*p, top) for p in highs], obj)


def _add_flat_roof(mesh: MeshBuilder, rng: np.random.Generator, part: Part, style: Style) -> None:
    """A roof with a parapet, a stairwell, machines and maybe a tank."""
    (x0, y0), (x1, y1), z = part.low, part.high, part.top
    roof = mesh.add_object(Kind.ROOF_FLAT, _FLAT_ROOFS[rng.integers(len(_FLAT_ROOFS))])
    mesh.add_quads(np.array([(x0, y0, z), (x1, y0, z), (x1, y1, z), (x0, y1, z)]), roof)
    parapet = mesh.add_object(Kind.PLAIN, 0.5 * (style.wall + style.trim), params=[0.1])
    _add_ring(mesh, part.low, part.high, z, z + float(rng.uniform(0.5, 1.1)), 0.3, parapet)
    room = part.high - part.low - 3.0
    if room.min() < 3:
        return
    count = int(np.clip(room.prod() / 45, 2, 14))
    half = rng.uniform([0.5, 0.5], [1.4, 1.4], (count, 2))
    center = part.low + 1.5 + half + rng.random((count, 2)) * (room - 2 * half)
    for k in range(count):
        machine = mesh.add_object(Kind.PLAIN, np.array(_METAL) * rng.uniform(0.6, 1.3), params=[0.12])
        top = z + float(rng.uniform(0.5, 1.6))
        mesh.add_boxes([*(center[k] - half[k]), z], [*(center[k] + half[k]), top], machine)
    if room.min() > 6:
        stair = mesh.add_object(Kind.PLAIN, style.wall, params=[0.12])
        at = part.low + 1.5 + rng.random(2) * (room - np.array([4.0, 3.0]))
        mesh.add_boxes([*at, z], [*(at + [4.0, 3.0]), z + 2.8], stair)
        if rng.random() < 0.35:
            _add_tank(mesh, part.low + 3.0 + rng.random(2) * (room - 3.0), z)


def _add_tank(mesh: MeshBuilder, at: np.ndarray, z: float) -> None:
    """A water tank on legs, with a pointed lid."""
    obj = mesh.add_object(Kind.PLAIN, (0.26, 0.17, 0.1), params=[0.2])
    angle = np.linspace(0, 2 * np.pi, 11)
    ring = np.column_stack([at[0] + 1.3 * np.cos(angle), at[1] + 1.3 * np.sin(angle)])
    low, high = np.column_stack([ring, np.full(11, z + 1.6)]), np.column_stack([ring, np.full(11, z + 4.2)])
    mesh.add_quads(np.stack([low[:-1], low[1:], high[1:], high[:-1]], axis=1), obj)
    tip = np.broadcast_to([*at, z + 5.2], (10, 3))
    mesh.add_triangles(np.stack([high[:-1], high[1:], tip], axis=1), obj)
    mesh.add_triangles(np.stack([low[1:], low[:-1], np.broadcast_to([*at, z + 1.6], (10, 3))], axis=1), obj)
    legs = at + np.array([[-0.8, -0.8], [0.8, -0.8], [-0.8, 0.8], [0.8, 0.8]])
    mesh.add_boxes(
        np.column_stack([legs - 0.08, np.full(4, z)]), np.column_stack([legs + 0.08, np.full(4, z + 1.6)]), obj
    )


def _add_pitched_roof(mesh: MeshBuilder, rng: np.random.Generator, part: Part, style: Style) -> None:
    """A gable or hip roof along the longer side, with eaves and chimneys."""
    eaves, z = 0.45, part.top
    low, high = part.low - eaves, part.high + eaves
    long = int(np.argmax(high - low))
    short = 1 - long
    half = 0.5 * (high - low)[short]
    rise = half * float(rng.uniform(0.45, 0.85))
    hip = half * 0.9 if rng.random() < 0.45 else 0.0
    ridge = 0.5 * (low + high)
    obj_color = _ROOFS[rng.integers(len(_ROOFS))] * rng.uniform(0.85, 1.2)

    def point(a: float, b: float, height: float) -> np.ndarray:
        """`a` along the ridge, `b` across."""
        xy = np.empty(2)
        xy[long], xy[short] = a, b
        return np.array([*xy, z + height])

    ends = (low[long] + hip, high[long] - hip)
    for side, edge in ((-1.0, low[short]), (1.0, high[short])):
        quad = [point(low[long], edge, 0), point(high[long], edge, 0)]
        quad += [point(ends[1], ridge[short], rise), point(ends[0], ridge[short], rise)]
        slope = (point(0, ridge[short], rise) - point(0, edge, 0)) / np.hypot(half, rise)
        along = point(1, 0, 0) - point(0, 0, 0)
        obj = mesh.add_object(Kind.ROOF_TILES, obj_color, frame=frame_of(quad[0], along, slope))
        mesh.add_quads(np.stack(quad if side < 0 else quad[::-1]), obj)
    for edge, end in ((low[long], ends[0]), (high[long], ends[1])):
        triangle = np.stack([point(edge, low[short], 0), point(edge, high[short], 0), point(end, ridge[short], rise)])
        if hip:
            slope = (triangle[2] - point(edge, ridge[short], 0)) / np.hypot(hip, rise)
            across = (triangle[1] - triangle[0]) / (2 * half)
            obj = mesh.add_object(Kind.ROOF_TILES, obj_color, frame=frame_of(triangle[0], across, slope))
        else:
            obj = mesh.add_object(Kind.PLAIN, style.wall, params=[0.1])
        mesh.add_triangles(triangle, obj)
    (x0, y0), (x1, y1) = low, high
    under = mesh.add_object(Kind.PLAIN, style.trim * 0.6, params=[0.05])
    mesh.add_quads(np.array([(x0, y0, z), (x0, y1, z), (x1, y1, z), (x1, y0, z)]), under)
    chimney = mesh.add_object(Kind.PLAIN, (0.3, 0.13, 0.09), params=[0.25])
    for _ in range(int(rng.integers(1, 3))):
        center = point(
            ends[0] + rng.uniform(0.1, 0.9) * (ends[1] - ends[0]), ridge[short] + rng.uniform(-0.5, 0.5) * half, 0
        )
        mesh.add_boxes(center - [0.35, 0.5, 0], center + [0.35, 0.5, rise + 1.1], chimney)
