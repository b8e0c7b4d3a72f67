"""The plain values that pass between modules.

Shapes: N Gaussians, P partitions (leaves of the KD-tree), S content boxes of a partition, Q participants of a view,
H x W pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Boundary = Literal["filter", "exact", "none"]
"""What happens to a Gaussian that straddles a partition's face (paper, section 8.1)."""

Exchange = Literal["selective", "owner", "dense", "gaussian"]
"""What ranks swap for a view (paper, sections 4 and 6; design 5)."""

MAX_PARTITIONS = 16
"""Boxes that a model or one call of `rasterize` may have."""


@dataclass(frozen=True)
class View:
    """A pinhole camera in OpenCV axes (x right, y down, z forward) and the size of its image in pixels."""

    world_to_cam: Tensor  # [4, 4]
    K: Tensor  # [3, 3], pixels
    width: int
    height: int

    @property
    def cam_center(self) -> Tensor:  # [3], world units
        """Where the camera stands in the world."""
        rotation = self.world_to_cam[:3, :3]
        return -(rotation.T @ self.world_to_cam[:3, 3])


@dataclass(frozen=True)
class ContentBoxes:
    """Where the Gaussians of each partition can put a pixel: a few world boxes per partition (`visibility.py`)."""

    bounds: Tensor  # [P, S, 2, 3] float32, world units, lower and upper corner; unused boxes have lower > upper
    radii: Tensor  # [P, S] float32, world units: largest cut-off radius 3.33 s_max among a box's Gaussians
    slope: float  # the boxes hold for views whose `view_slope` is at most this; wider views enlarge them by `radii`
    boundary: Boundary


@dataclass(frozen=True)
class Splats:
    """The Gaussians of one process, projected into one view. Extents of zero mark those the view does not see."""

    means2d: Tensor  # [N, 2], pixels
    depths: Tensor  # [N], world units along the optical axis
    conics: Tensor  # [N, 3], upper triangle of the inverse 2D covariance
    opacities: Tensor  # [N]
    colors: Tensor  # [N, 3]
    extents: Tensor  # [N, 2], pixels: half sizes of the box that holds every pixel with alpha >= 1/255


@dataclass(frozen=True)
class ViewPlan:
    """Who renders what in one view: the participants, front to back, and every partition's pixel region."""

    order: tuple[int, ...]  # Q partitions with a non-empty region, nearest first
    spans: Tensor  # [P, H, 2] int32: partition p renders columns spans[p, y, 0] <= x < spans[p, y, 1] of row y
    saturated: Tensor | None = None  # [Q, H, ceil(W / 8)] uint8: bit x % 8 of byte x // 8 leaves out pixel x of a row


@dataclass(frozen=True)
class PartialImages:
    """Premultiplied images of the participants of a view, front to back, without background."""

    colors: Tensor  # [Q, H, W, 3]
    depths: Tensor  # [Q, H, W], sum of weight times depth, undivided
    transmittances: Tensor  # [Q, H, W], product of 1 - alpha
