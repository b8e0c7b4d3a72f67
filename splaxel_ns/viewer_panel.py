"""What our method adds to nerfstudio's viewer: the partitions as coloured boxes, and one partition's partial image.

The panel is found by the viewer's scan of the pipeline for viewer elements, which descends into modules only;
hence `PartitionPanel` is a module although it has no parameters.
"""

from __future__ import annotations

import colorsys
from typing import TYPE_CHECKING

import numpy as np
import torch
from nerfstudio.viewer.viewer_elements import ViewerCheckbox, ViewerControl, ViewerDropdown

from splaxel_ns.overlay import Overlay

if TYPE_CHECKING:
    from splaxel_ns.model import SplaxelModel

WHOLE_IMAGE = "whole image"
OVERLAYS = ("none", "regions", "regions and saturation")
# One closed walk over the 12 edges of a box; corners are numbered by bits (x, y, z), some edges are walked twice.
EDGE_WALK = (0, 1, 3, 2, 0, 4, 5, 1, 5, 7, 3, 7, 6, 2, 6, 4)


def partition_colors(num_partitions: int) -> list[tuple[int, int, int]]:
    """Distinct colours, one per partition, 0 to 255."""
    return [
        tuple(int(255 * c) for c in colorsys.hsv_to_rgb(k / max(num_partitions, 1), 0.75, 1.0))  # type: ignore[misc]
        for k in range(num_partitions)
    ]


class ScenePanel(ViewerControl):
    """The viewer's scene, with the partitions drawn into it as soon as the viewer exists."""

    def __init__(self, panel: PartitionPanel) -> None:
        self.panel = panel

    def _setup(self, viewer) -> None:
        super()._setup(viewer)
        self.panel.draw_boxes()


class PartitionPanel(torch.nn.Module):
    """Viewer elements of one model.

    Args:
        model: the model whose partitions are shown. Its `shown_partition` is set by the panel and read by
            `get_outputs_for_camera`, which only the viewer's thread and evaluation call.
    """

    def __init__(self, model: SplaxelModel) -> None:
        super().__init__()
        # In a tuple, so that the model is not registered a second time (state_dict, parameters).
        self._model = (model,)
        self.boxes = ViewerCheckbox(
            "Show boxes", False, cb_hook=lambda _: self.draw_boxes(), hint="The partitions, where they hold Gaussians."
        )
        self.partial_image = ViewerDropdown(
            "Partial image",
            WHOLE_IMAGE,
            [WHOLE_IMAGE, *(f"partition {k}" for k in range(model.tree.num_partitions))],
            cb_hook=lambda element: self.choose(element.value),
            hint="What one partition contributes before composition, over black.",
        )
        self.overlay = ViewerDropdown(
            "Overlay",
            OVERLAYS[0],
            list(OVERLAYS),
            cb_hook=lambda element: self.paint(element.value),
            hint="Each partition's pixels in its colour; grey where partitions in front of it are opaque.",
        )
        self.scene = ScenePanel(self)
        self._handles: list = []

    def choose(self, name: str) -> None:
        """Shows one partition's partial image, or the composed one."""
        self._model[0].shown_partition = None if name == WHOLE_IMAGE else int(name.rsplit(" ", 1)[1])

    def paint(self, name: str) -> None:
        """Paints the partitions' regions, and where they are saturated, over the picture, or nothing."""
        model = self._model[0]
        colors = partition_colors(model.tree.num_partitions)
        model.overlay = None if name == OVERLAYS[0] else Overlay(colors, saturation=name == OVERLAYS[2])

    def draw_boxes(self) -> None:
        """Draws or removes the boxes. Outer faces, which lie at infinity, are drawn where the Gaussians end."""
        from nerfstudio.viewer.viewer import VISER_NERFSTUDIO_SCALE_RATIO

        for handle in self._handles:
            handle.remove()
        self._handles = []
        server = getattr(self.scene, "viser_server", None)
        if server is None or not self.boxes.value:
            return
        boxes = visible_boxes(self._model[0]) * VISER_NERFSTUDIO_SCALE_RATIO
        colors = partition_colors(len(boxes))
        for k, (lo, hi) in enumerate(boxes):
            corners = np.array([[(lo, hi)[bit >> axis & 1][axis] for axis in range(3)] for bit in range(8)])
            self._handles.append(
                server.scene.add_spline_catmull_rom(
                    f"/partitions/box_{k}",
                    corners[list(EDGE_WALK)],
                    curve_type="catmullrom",
                    tension=0.0,  # straight edges
                    closed=True,
                    line_width=3.0,
                    color=colors[k],
                    segments=len(EDGE_WALK) * 8,
                )
            )
            top = ((lo[0] + hi[0]) / 2, (lo[1] + hi[1]) / 2, hi[2])
            self._handles.append(server.scene.add_label(f"/partitions/name_{k}", f"partition {k}", position=top))


def visible_boxes(model: SplaxelModel) -> np.ndarray:
    """The partitions' boxes with outer faces at the bounds of the middle 99.8 % of the means, [P, 2, 3] world units."""
    means = model.means.detach()[:: max(1, model.num_points >> 18)]  # a sample is enough
    finite = means[torch.isfinite(means).all(dim=-1)].numpy(force=True)
    low, high = np.percentile(finite, [0.1, 99.9], axis=0) if len(finite) else (np.zeros(3), np.ones(3))
    lo = np.maximum(model.tree.lo.numpy(force=True), low)
    hi = np.maximum(np.minimum(model.tree.hi.numpy(force=True), high), lo)
    return np.stack([lo, hi], axis=1)
