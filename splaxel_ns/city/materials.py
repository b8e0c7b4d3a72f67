"""The surfaces of a city: from the point that a ray hits to its albedo and its gloss.

Each material is a function of a `Hits`; u and v are metres in the frame of the object. Details are drawn from the
object's seed, so a surface looks the same from everywhere.

Shapes: n rays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from splaxel_ns.city.buildings import window_columns
from splaxel_ns.city.mesh import FacadeParams, Kind
from splaxel_ns.city.textures import Noise, band, fade, hashed, mix, step

_WHITE_LINE = np.array([0.62, 0.61, 0.57], np.float32)
_GLASS = np.array([0.025, 0.032, 0.04], np.float32)
_HAZE = np.array([0.42, 0.46, 0.5], np.float32)
_SIGNS = np.array([[0.5, 0.05, 0.04], [0.04, 0.12, 0.35], [0.05, 0.3, 0.12], [0.6, 0.45, 0.06], [0.06, 0.06, 0.07]])
_SIGNS = _SIGNS.astype(np.float32)
_CROSSING = (1.0, 3.6)  # metres from the end of a road between which its zebra crossing lies


@dataclass(frozen=True)
class Hits:
    """Where rays met the city."""

    points: np.ndarray  # [n, 3] float32, metres
    normals: np.ndarray  # [n, 3] unit, towards the camera
    directions: np.ndarray  # [n, 3] unit, from the camera
    footprints: np.ndarray  # [n] metres that a ray stands for
    u: np.ndarray  # [n] metres
    v: np.ndarray  # [n] metres
    colors: np.ndarray  # [n, 2, 3]: of the object, and of its trim
    params: np.ndarray  # [n, 8]
    seeds: np.ndarray  # [n] int32
    centers: np.ndarray  # [n, 3]: origin of the object's frame

    def take(self, rows: np.ndarray) -> Hits:
        """The chosen rays."""
        return Hits(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


Surface = tuple[np.ndarray, np.ndarray]  # albedo [n, 3], gloss [n] in 0..1: how much of a mirror it is


def surface_of(kind: Kind, hits: Hits, noise: Noise) -> Surface:
    """Albedo and gloss of rays that all hit objects of one kind."""
    albedo, gloss = _MATERIALS[kind](hits, noise)
    return np.clip(albedo, 0.004, 0.9), gloss


def _no_gloss(hits: Hits) -> np.ndarray:
    return np.zeros(len(hits.points), np.float32)


def _grain(hits: Hits, noise: Noise, u: np.ndarray, v: np.ndarray, fine: float, coarse: float) -> np.ndarray:  # [n]
    """Factor around 1 from noise of centimetres to metres and of metres to tens of metres, shifted per object."""
    shift = (hits.seeds & 1023) * np.float32(0.37)
    small = noise.sample(u + shift, v - shift, 0.02, hits.footprints)
    large = noise.sample(u - shift, v + shift, 0.17, hits.footprints)
    return np.maximum(1.0 + fine * small + coarse * large, 0.1)


def _road(hits: Hits, noise: Noise) -> Surface:
    u, v, pixel = hits.u, hits.v, hits.footprints
    length, half, avenue = hits.params[:, 0], hits.params[:, 1], hits.params[:, 2] > 0
    marked = length > 0
    x, y = hits.points[:, 0], hits.points[:, 1]
    albedo = hits.colors[:, 0] * _grain(hits, noise, x, y, 0.16, 0.16)[:, None]
    tar = noise.sample(x + 91.0, y - 37.0, 0.02, pixel)  # cracks filled with tar, along a level line of the noise
    albedo *= (1 - 0.5 * band(tar - 0.6, 0.04, 0.05 + 2.0 * pixel) * fade(pixel, 0.3))[:, None]
    patch = hashed(np.floor(u / 7.0), np.floor(v / 2.3), hits.seeds)  # repaired pieces
    albedo *= np.where(marked & (patch > 0.86), 0.62 + 0.5 * (patch - 0.86) / 0.14, 1.0)[:, None]
    lane = np.where(avenue, 0.3, 0.36) * half
    albedo *= (1 - 0.16 * np.exp(-(((np.abs(np.abs(v) - lane) - 0.75) / 0.3) ** 2)) * marked)[:, None]  # tracks
    end = np.minimum(u, length - u)
    dash = np.where(avenue, 1.0, step(np.abs((u % 6.0) - 3.0) - 1.5, pixel))
    middle = band(np.abs(v) - np.where(avenue, 0.18, 0.0), 0.07, pixel) * dash
    outer = band(np.abs(v) - (half - 2.3), 0.06, pixel) * step((end % 6.0) - 0.2, pixel)
    lines = (middle + outer) * step(end - _CROSSING[1] - 1.6, pixel)
    zebra = band(end - 0.5 * sum(_CROSSING), 0.5 * (_CROSSING[1] - _CROSSING[0]), pixel)
    zebra *= band((v % 1.1) - 0.55, 0.28, pixel)
    stop = band(end - _CROSSING[1] - 1.1, 0.2, pixel) * np.where(u < length - u, v > 0, v < 0)
    share = np.clip(lines + zebra + stop, 0, 1) * marked
    worn = np.clip(0.8 - 0.3 * noise.sample(x - 17.0, y + 53.0, 0.03, pixel), 0.2, 1.0)
    return mix(albedo, _WHITE_LINE, share * worn), _no_gloss(hits)


def _paving(hits: Hits, noise: Noise) -> Surface:
    u, v, pixel = hits.u, hits.v, hits.footprints
    grain = _grain(hits, noise, hits.points[:, 0], hits.points[:, 1], 0.1, 0.1)
    tile = hashed(np.floor(u / 0.6), np.floor(v / 0.6), hits.seeds)
    grain *= 1 + (tile - 0.5) * 0.3 * fade(pixel, 0.6)
    for along in (u, v):
        joint = band(0.5 - np.abs((along / 0.6) % 1 - 0.5), 0.02, pixel / 0.6)
        grain *= 1 - 0.35 * joint
    edge = np.maximum(np.abs(u) - hits.params[:, 0], np.abs(v) - hits.params[:, 1])
    kerb = step(edge + 0.3, pixel) * 0.35 - 0.5 * band(edge + 0.3, 0.015, pixel)
    return hits.colors[:, 0] * (grain * (1 + kerb))[:, None], _no_gloss(hits)


def _facade(hits: Hits, noise: Noise) -> Surface:
    u, v, pixel, p = hits.u, hits.v, hits.footprints, hits.params
    width, floor, spacing = p[:, FacadeParams.WIDTH], p[:, FacadeParams.FLOOR], p[:, FacadeParams.SPACING]
    columns = window_columns(width, spacing).astype(np.float32)
    from_left = u - 0.5 * (width - columns * spacing)
    column = np.floor(from_left / spacing)
    row = np.floor(v / floor)
    x, y = from_left - (column + 0.5) * spacing, v - row * floor
    inside = (column >= 0) & (column < columns) & (v < p[:, FacadeParams.HEIGHT] - 0.5)
    ground = (row == 0) & (hits.centers[:, 2] < 1.0)
    shop = ground & (p[:, FacadeParams.SHOPS] > 0)
    door_at = np.floor(hashed(hits.seeds, 5) * columns)
    door = ground & (column == door_at)
    half_w = np.where(shop, 0.46 * spacing, 0.5 * p[:, FacadeParams.WINDOW_WIDTH])
    half_h = np.where(shop, 0.36 * floor, 0.5 * p[:, FacadeParams.WINDOW_HEIGHT])
    half_w, half_h = np.where(door, 0.6, half_w), np.where(door, 1.15, half_h)
    middle = np.where(door, 1.15, np.where(shop, 0.42 * floor, 0.54 * floor))
    dy = y - middle

    albedo = _wall(hits, noise)
    base = step(0.7 - v, pixel) * (hits.centers[:, 2] < 1.0)
    albedo *= (1 - 0.4 * base)[:, None]
    sign = band(y - 0.87 * floor, 0.3, pixel) * shop * band(x, 0.47 * spacing, pixel)
    colors = _SIGNS[(hashed(column, hits.seeds, 9) * len(_SIGNS)).astype(int)]
    letters = step(noise.sample(u * 0.6, v + 31.0, 0.06, pixel) - 0.9, 0.1 + 3 * pixel) * band(
        y - 0.87 * floor, 0.17, pixel
    )
    albedo = mix(albedo, mix(colors, _WHITE_LINE, letters), sign)
    frame = band(x, half_w + 0.1, pixel) * band(dy, half_h + 0.1, pixel) * inside
    albedo = mix(albedo, hits.colors[:, 1], frame)
    sill = band(x, half_w + 0.2, pixel) * band(dy + half_h + 0.1, 0.07, pixel) * inside * ~(shop | door)
    albedo = mix(albedo, hits.colors[:, 1] * 1.2 + 0.05, sill)
    glass = band(x, half_w, pixel) * band(dy, half_h, pixel) * inside
    bars = np.maximum(band(x, 0.035, pixel), band(dy - 0.25 * half_h, 0.03, pixel)) * (half_w > 0.4)
    glass *= 1 - bars * ~door
    albedo = mix(albedo, _behind_glass(hits, noise, column, row, x, dy, half_h, door), glass)
    return albedo, (0.9 * glass * ~door).astype(np.float32)


def _wall(hits: Hits, noise: Noise) -> np.ndarray:  # [n, 3]
    """Plaster or bricks, with streaks below the roof and dirt near the ground."""
    u, v, pixel = hits.u, hits.v, hits.footprints
    grain = _grain(hits, noise, u, v, 0.07, 0.09)
    brick = hits.params[:, FacadeParams.BRICK]
    course = np.floor(v / 0.09)
    shifted = u / 0.26 + 0.5 * (course % 2)
    single = hashed(np.floor(shifted), course, hits.seeds) - 0.5
    whole = band((v / 0.09) % 1 - 0.5, 0.42, pixel / 0.09) * band(shifted % 1 - 0.5, 0.46, pixel / 0.26)
    grain *= 1 + brick * (0.5 * single - 0.35 * (1 - whole)) * fade(pixel, 0.12)
    streak = noise.sample(3.0 * u, 0.08 * v, 0.05, pixel)  # drawn out downwards
    grain *= 1 - 0.07 * np.maximum(streak, 0)
    return hits.colors[:, 0] * np.maximum(grain, 0.1)[:, None]


def _behind_glass(
    hits: Hits,
    noise: Noise,
    column: np.ndarray,
    row: np.ndarray,
    x: np.ndarray,
    dy: np.ndarray,
    half_h: np.ndarray,
    door: np.ndarray,
) -> np.ndarray:  # [n, 3]
    """Dark rooms, curtains, blinds drawn down to some height; the wood of doors."""
    pick = hashed(column, row, hits.seeds)
    other = hashed(column, row, hits.seeds, 3)
    room = _GLASS * (0.4 + 1.6 * other)[:, None]
    cloth = np.array([0.5, 0.46, 0.38], np.float32) * (0.45 + 0.55 * other)[:, None]
    folds = 1 + 0.15 * np.sin(40.0 * x + 6.0 * other) * fade(hits.footprints, 0.15)
    open_to = np.where(pick < 0.25, 0.3 + 0.9 * other, 9.0)  # curtains at both sides
    curtain = step(np.abs(x) - open_to * 0.6, hits.footprints)
    blind = step(dy - half_h * (1 - 2 * other), hits.footprints) * ((pick > 0.3) & (pick < 0.55))
    room = mix(room, cloth * folds[:, None], np.maximum(curtain, blind))
    room *= (1 - 0.5 * step(dy - half_h + 0.22, hits.footprints))[:, None]  # the lintel's shade
    wood = hits.colors[:, 1] * 0.45 * (1 + 0.2 * noise.sample(9.0 * x, dy, 0.03, hits.footprints))[:, None]
    return np.where(door[:, None], wood, room)


def _flat_roof(hits: Hits, noise: Noise) -> Surface:
    x, y, pixel = hits.points[:, 0], hits.points[:, 1], hits.footprints
    grain = _grain(hits, noise, x, y, 0.15, 0.2)
    strip = hashed(np.floor(x / 1.0), hits.seeds)  # lengths of roofing felt
    grain *= 1 + 0.16 * (strip - 0.5) * fade(pixel, 1.5) - 0.25 * band(x % 1.0 - 0.5, 0.02, pixel)
    puddle = step(noise.sample(x, y, 0.4, pixel) - 1.0, 0.3 + pixel)
    return hits.colors[:, 0] * (grain * (1 - 0.35 * puddle))[:, None], _no_gloss(hits)


def _roof_tiles(hits: Hits, noise: Noise) -> Surface:
    u, v, pixel = hits.u, hits.v, hits.footprints
    row = np.floor(v / 0.32)
    across = u / 0.24 + 0.5 * (row % 2)
    grain = _grain(hits, noise, u, v, 0.08, 0.14)
    grain *= 1 + 0.5 * (hashed(np.floor(across), row, hits.seeds) - 0.5) * fade(pixel, 0.4)
    grain *= 1 - 0.45 * band((v / 0.32) % 1 - 0.07, 0.07, pixel / 0.32)
    grain *= 1 - 0.25 * band(across % 1 - 0.04, 0.05, pixel / 0.24) * fade(pixel, 0.3)
    moss = np.clip(noise.sample(u, v, 0.11, pixel) - 0.9, 0, 1)
    albedo = hits.colors[:, 0] * np.maximum(grain, 0.1)[:, None]
    return mix(albedo, np.array([0.12, 0.13, 0.06], np.float32), 0.6 * moss), _no_gloss(hits)


def _plain(hits: Hits, noise: Noise) -> Surface:
    """Any other solid: grain on the two axes that the surface faces least."""
    facing = np.abs(hits.normals)
    flat = (facing[:, 2] > facing[:, 0]) & (facing[:, 2] > facing[:, 1])
    u = np.where(flat | (facing[:, 0] < facing[:, 1]), hits.points[:, 0], hits.points[:, 1])
    v = np.where(flat, hits.points[:, 1], hits.points[:, 2])
    grain = _grain(hits, noise, u, v, 1.0, 1.0)
    return hits.colors[:, 0] * np.maximum(1 + hits.params[:, 0] * (grain - 1), 0.3)[:, None], _no_gloss(hits)


def _leaves(hits: Hits, noise: Noise) -> Surface:
    """Leaf clusters: dark inside the crown, speckled, some of them yellower."""
    x, y, z = hits.points.T
    speckle = noise.sample(x + 0.6 * z, y - 0.8 * z, 0.025, hits.footprints)
    depth = np.linalg.norm(hits.points - hits.centers, axis=1) / np.maximum(hits.params[:, 0], 1e-3)
    light = (0.4 + 0.6 * np.clip(depth, 0, 1) ** 2) * np.maximum(1 + 0.45 * speckle, 0.25)
    tint = (
        np.array([1.4, 1.15, 0.8], np.float32) ** np.clip(noise.sample(x, y + z, 0.3, hits.footprints), -1, 1)[:, None]
    )
    return hits.colors[:, 0] * light[:, None] * tint, _no_gloss(hits)


def _grass(hits: Hits, noise: Noise) -> Surface:
    x, y, pixel = hits.points[:, 0], hits.points[:, 1], hits.footprints
    albedo = hits.colors[:, 0] * _grain(hits, noise, x, y, 0.25, 0.15)[:, None]
    dry = np.clip(0.5 + 0.5 * noise.sample(x + 7.0, y, 0.25, pixel), 0, 1)
    return mix(albedo, albedo * np.array([1.7, 1.2, 1.1], np.float32), dry), _no_gloss(hits)


def _ground(hits: Hits, noise: Noise) -> Surface:
    """Fields of some hundred metres, paler with the distance from the city: the haze before the horizon."""
    x, y, pixel = hits.points[:, 0], hits.points[:, 1], hits.footprints
    field = hashed(np.floor((x + 0.3 * y) / 130.0), np.floor((y - 0.3 * x) / 90.0))
    kinds = np.array([[1.0, 1.0, 1.0], [1.9, 1.35, 1.3], [0.8, 1.1, 0.9], [2.3, 1.6, 1.8], [1.2, 1.3, 1.0]], np.float32)
    albedo = hits.colors[:, 0] * kinds[(field * len(kinds)).astype(int)]
    albedo = albedo * _grain(hits, noise, x, y, 0.22, 0.2)[:, None]
    albedo *= (1 + 0.12 * np.sin((x + 0.3 * y) * (2 * np.pi / 3.0)) * fade(pixel, 1.5))[:, None]
    away = np.maximum(np.abs(x), np.abs(y)) - hits.params[:, 0]
    return mix(albedo, _HAZE, 0.85 * (1 - np.exp(-np.maximum(away, 0) / 1500.0))), _no_gloss(hits)


def _paint(hits: Hits, noise: Noise) -> Surface:
    return hits.colors[:, 0].copy(), np.full(len(hits.points), 0.5, np.float32)


_MATERIALS: dict[Kind, Callable[[Hits, Noise], Surface]] = {
    Kind.GROUND: _ground,
    Kind.ROAD: _road,
    Kind.PAVING: _paving,
    Kind.FACADE: _facade,
    Kind.ROOF_FLAT: _flat_roof,
    Kind.ROOF_TILES: _roof_tiles,
    Kind.PLAIN: _plain,
    Kind.LEAVES: _leaves,
    Kind.GRASS: _grass,
    Kind.PAINT: _paint,
}
