"""What stands in streets and parks: trees, cars, lamps.

Shapes: T trees, C cars, L lamps.
"""

from __future__ import annotations

import numpy as np

from splaxel_ns.city.mesh import Kind, MeshBuilder

_CARDS = 180  # clusters of leaves of a tree
_PAINTS = np.array(
    [[0.6, 0.6, 0.6], [0.05, 0.05, 0.06], [0.4, 0.03, 0.03], [0.04, 0.1, 0.3], [0.75, 0.74, 0.7], [0.25, 0.26, 0.27]]
)


def add_trees(mesh: MeshBuilder, rng: np.random.Generator, feet: np.ndarray) -> None:
    """Trees with a trunk and a crown of leaf clusters around branches.

    Args:
        mesh: to add to.
        rng: of sizes and shapes.
        feet: [T, 3] metres.
    """
    count = len(feet)
    if count == 0:
        return
    radius = rng.uniform(1.5, 2.6, count)
    centers = feet + np.column_stack([np.zeros((count, 2)), rng.uniform(3.2, 4.2, count) + radius])
    bark = mesh.add_object(Kind.PLAIN, (0.1, 0.075, 0.05), params=[0.3])
    thick = 0.06 * radius[:, None] * np.array([1.0, 1.0, 0.0])
    tops = np.column_stack([feet[:, :2], centers[:, 2]])
    mesh.add_boxes(feet - thick, tops + thick, bark)
    greens = np.array([0.09, 0.16, 0.03]) * rng.uniform(0.7, 1.5, (count, 1)) + rng.uniform(0, 0.04, (count, 3))
    crowns = np.array(
        [
            mesh.add_object(
                Kind.LEAVES, color, frame=np.array([center, (1, 0, 0), (0, 1, 0)], np.float32), params=[size]
            )
            for color, center, size in zip(greens, centers, radius, strict=True)
        ]
    )
    direction = rng.standard_normal((count, _CARDS, 3))
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    distance = rng.uniform(0.35, 1.0, (count, _CARDS, 1)) ** 0.5
    lumps = 1.0 + 0.25 * np.sin(3.0 * direction[..., :1] + 5.0 * direction[..., 1:2] + 6.0 * rng.random((count, 1, 1)))
    middle = centers[:, None] + direction * distance * lumps * radius[:, None, None] * np.array([1.0, 1.0, 1.15])
    across = rng.standard_normal((count, _CARDS, 3)) * 0.25
    turned = rng.standard_normal((count, _CARDS, 3)) * 0.25
    quads = np.stack([middle - across, middle - turned, middle + across, middle + turned], axis=2)
    mesh.add_quads(quads, np.repeat(crowns, _CARDS))


def add_cars(mesh: MeshBuilder, rng: np.random.Generator, places: np.ndarray, along_y: np.ndarray) -> None:
    """Parked cars: body, cabin, wheels.

    Args:
        mesh: to add to.
        rng: of sizes and colours.
        places: [C, 3] metres, the middle of the car on the street.
        along_y: [C] bool, whether it is parked along y instead of x.
    """
    if len(places) == 0:
        return
    glass, tyre = mesh.add_object(Kind.PAINT, (0.03, 0.035, 0.04)), mesh.add_object(Kind.PLAIN, (0.02, 0.02, 0.02))
    paints = np.array([mesh.add_object(Kind.PAINT, color) for color in _PAINTS])
    chosen = paints[rng.integers(len(paints), size=len(places))]
    length, height = rng.uniform(1.9, 2.35, len(places)), rng.uniform(1.35, 1.75, len(places))

    def point(along: np.ndarray, across: float, up: np.ndarray | float) -> np.ndarray:  # [C, 3]
        local = np.column_stack([along, np.full(len(places), across), np.broadcast_to(up, len(places))])
        return places + np.where(along_y[:, None], local[:, [1, 0, 2]], local)

    def tapered(foot: tuple, top: tuple, sides: int | np.ndarray, lid: int | np.ndarray) -> None:
        """A closed truncated pyramid between two rectangles (back, front, half width, height)."""
        low, high = (
            [point(a, b, z) for a, b in ((back, -half), (front, -half), (front, half), (back, half))]
            for back, front, half, z in (foot, top)
        )
        for k in range(4):
            mesh.add_quads(np.stack([low[k], low[k - 3], high[k - 3], high[k]], axis=1), sides)
        mesh.add_quads(np.stack(low[::-1], axis=1), sides)
        mesh.add_quads(np.stack(high, axis=1), lid)

    belt = 0.58 * height
    tapered((-length, length, 0.88, 0.25), (-length, 0.98 * length, 0.9, 0.7 * belt), chosen, chosen)
    tapered((-length, 0.98 * length, 0.9, 0.7 * belt), (-0.95 * length, 0.85 * length, 0.8, belt), chosen, chosen)
    tapered((-0.85 * length, 0.42 * length, 0.79, belt), (-0.62 * length, 0.08 * length, 0.62, height), glass, chosen)
    for start in (-0.75, 0.45):
        wheel = (start * length, start * length + 0.62, 0.89)
        tapered((*wheel, 0.0), (*wheel, 0.55), tyre, tyre)


def add_lamps(mesh: MeshBuilder, feet: np.ndarray, arms: np.ndarray) -> None:
    """Street lamps.

    Args:
        mesh: to add to.
        feet: [L, 3] metres.
        arms: [L, 2] metres, from the post to the light.
    """
    if len(feet) == 0:
        return
    metal = mesh.add_object(Kind.PLAIN, (0.13, 0.14, 0.14), params=[0.05])
    light = mesh.add_object(Kind.PLAIN, (0.75, 0.74, 0.68), params=[0.02])
    thin = np.array([0.06, 0.06, 0.0])
    mesh.add_boxes(feet - thin, feet + thin + [0, 0, 6.0], metal)
    top, end = feet[:, :2], feet[:, :2] + arms
    flat = np.full(len(feet), 6.0) + feet[:, 2]
    low, high = np.minimum(top, end), np.maximum(top, end)
    mesh.add_boxes(np.column_stack([low - 0.04, flat - 0.1]), np.column_stack([high + 0.04, flat]), metal)
    mesh.add_boxes(np.column_stack([end - 0.22, flat - 0.22]), np.column_stack([end + 0.22, flat - 0.1]), light)
