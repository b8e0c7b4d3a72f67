"""Where the photographs are taken, as in MatrixCity: flights over the city, and drives through its streets.

Aerial: straight flights on a grid, four headings, pitch -45 or -60 degrees; the test flights have a grid of their own,
random headings and pitches between. Street: stations along streets, some directions at each; the test stations lie
between, each with one random heading. Poses are camera-to-world in OpenGL axes (x right, y up, z back), metres.

Shapes: N cameras.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from splaxel_ns.city.streets import City

_STEEP, _OBLIQUE = -60.0, -45.0  # degrees
_LANE = 0.4  # of the way from the middle of a street to its kerb


@dataclass(frozen=True)
class Shot:
    """One photograph to take."""

    view: Literal["aerial", "street"]
    split: Literal["train", "test"]
    block: str  # its folder
    index: int  # its number there
    pose: np.ndarray  # [4, 4] float64, camera-to-world, metres
    fov: float  # radians, horizontal


def look(position: np.ndarray, heading: float, pitch: float) -> np.ndarray:  # [3] -> [4, 4]
    """The pose of a camera; heading in radians from east to north, pitch in radians, up positive."""
    ahead = np.array([np.cos(pitch) * np.cos(heading), np.cos(pitch) * np.sin(heading), np.sin(pitch)])
    right = np.array([np.sin(heading), -np.cos(heading), 0.0])
    pose = np.eye(4)
    pose[:3] = np.column_stack([right, np.cross(right, ahead), -ahead, position])
    return pose


def num_test(count: int, share: float) -> int:
    """How many of `count` photographs are for testing."""
    return 0 if share == 0 or count == 0 else min(max(1, round(count * share)), count - 1)


def aerial_shots(city: City, count: int, share: float, fov: float, height: float | None, seed: int) -> list[Shot]:
    """Cameras over the city, each looking at a place in it.

    Args:
        city: to photograph.
        count: of all photographs.
        share: of them that is for testing.
        fov: radians.
        height: metres above the streets; None: see `_default_height`.
        seed: of the test flights.
    """
    rng = np.random.default_rng([seed, 2])
    tests = num_test(count, share)
    above = height if height is not None else _default_height(city, count - tests)
    shots = []
    targets, number = _grid(city.size, (count - tests) / 4), np.arange(count - tests)
    turns = len(targets) * 4
    for k, chosen in enumerate((number * turns) // max(len(number), 1)):
        row, heading = divmod(int(chosen), 4)
        pitch = np.radians(_STEEP if row % 2 else _OBLIQUE)
        pose = _aim(targets[row], above, 0.5 * np.pi * heading, pitch)
        shots.append(Shot("aerial", "train", "block_1", k, pose, fov))
    targets = _grid(city.size, tests)
    for k in range(tests):
        spot = targets[k * len(targets) // tests] + rng.uniform(-0.05, 0.05, 2) * city.size
        pitch = np.radians(rng.uniform(_STEEP, _OBLIQUE))
        pose = _aim(spot, above, rng.uniform(0, 2 * np.pi), pitch)
        shots.append(Shot("aerial", "test", "block_1_test", k, pose, fov))
    return shots


def _default_height(city: City, count: int) -> float:  # metres
    """150 to 500 as MatrixCity's flights: as low as still shows each place in about 16 of `count` photographs.

    One covers about 0.8 height**2 of the ground. Over a small city, lower, but always above all roofs.
    """
    enough = city.size * np.sqrt(20.0 / max(count, 1))
    return float(max(min(max(150.0, enough), 500.0, 0.6 * city.size), 1.25 * city.tallest))


def _grid(size: float, count: float) -> np.ndarray:  # [at least count, 2] metres
    """Places spread evenly over a square."""
    side = max(1, int(np.ceil(np.sqrt(count) - 1e-9)))
    line = ((np.arange(side) + 0.5) / side - 0.5) * size
    return np.stack(np.meshgrid(line, line, indexing="ij"), axis=-1).reshape(-1, 2)


def _aim(spot: np.ndarray, height: float, heading: float, pitch: float) -> np.ndarray:  # [2] -> [4, 4]
    """The camera at that height whose middle is the spot on the ground."""
    back = height / np.tan(-pitch)
    position = np.array([spot[0] - back * np.cos(heading), spot[1] - back * np.sin(heading), height])
    return look(position, heading, pitch)


@dataclass(frozen=True)
class _Stations:
    """Places in one street."""

    axis: int  # 0: along x
    center: float  # metres, of the street
    offset: float  # of the lane from it
    first: float  # metres along the street
    count: int


def street_shots(
    city: City, count: int, share: float, fov: float, eye: float, spacing: float, yaws: int, seed: int
) -> list[Shot]:
    """Cameras in streets, from the middle of the city outwards, as many streets as the count fills.

    Args:
        city: to photograph.
        count: of all photographs.
        share: of them that is for testing.
        fov: radians.
        eye: metres above the street.
        spacing: metres between stations; less where all streets together are too short for the count.
        yaws: directions at every station, evenly around it, the first along the street.
        seed: of the test headings.
    """
    rng = np.random.default_rng([seed, 3])
    tests = num_test(count, share)
    needed = -(-(count - tests) // yaws)
    room = city.size - 8.0
    num_streets = sum(len(line.centers) for line in city.streets)
    spacing = min(spacing, num_streets * room / (needed + num_streets))
    drives = _drives(city, needed, spacing, room)
    shots: list[Shot] = []
    numbers: dict[str, int] = {}

    def take(split: Literal["train", "test"], drive: _Stations, along: float, heading: float) -> None:
        name = ("small_city_road_horizon", "small_city_road_vertical")[drive.axis]
        block = name if split == "train" else f"{name}_test"
        place = np.array([along, drive.center + drive.offset])
        pose = look(np.array([*(place if drive.axis == 0 else place[::-1]), eye]), heading, 0.0)
        shots.append(Shot("street", split, block, numbers.get(block, 0), pose, fov))
        numbers[block] = numbers.get(block, 0) + 1

    places = [(drive, drive.first + k * spacing) for drive in drives for k in range(drive.count)]
    for turn in range(yaws):  # heading by heading, as MatrixCity stores them
        for drive, along in places:
            if len(shots) < count - tests:
                take("train", drive, along, 0.5 * np.pi * drive.axis + 2 * np.pi * turn / yaws)
    for k in range(tests):
        drive, along = places[k * len(places) // tests]
        between = spacing * rng.uniform(0.3, 0.7) * (-1.0 if along + spacing > 0.5 * room else 1.0)
        take("test", drive, along + between, rng.uniform(0, 2 * np.pi))
    return shots


def _drives(city: City, needed: int, spacing: float, room: float) -> list[_Stations]:
    """Stretches with `needed` stations: whole streets, those nearest to the middle first, the last one in part."""
    streets = [
        (abs(float(center)), axis, float(center), _LANE * float(half))
        for axis, line in enumerate(city.streets)
        for center, half in zip(line.centers, line.halves, strict=True)
    ]
    most = int(room / spacing) + 1
    drives = []
    for _, axis, center, lane in sorted(streets):
        count = min(most, needed)
        if count > 0:
            offset = -lane if axis == 0 else lane  # on the right-hand side
            drives.append(_Stations(axis, center, offset, -0.5 * spacing * (count - 1), count))
        needed -= count
    return drives
