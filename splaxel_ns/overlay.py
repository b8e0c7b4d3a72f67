"""Who renders which pixel of a view, painted over its picture (paper, Fig. 24). For the viewer alone.

Shapes: P partitions, Q participants front to back, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splaxel_ns.render import Rendered

GREY = torch.tensor([0.5, 0.5, 0.5])
TINT = 0.45
"""Part of the paint in a painted pixel."""


@dataclass(frozen=True)
class Overlay:
    """Each partition's region in its colour, and where it is saturated in grey."""

    colors: Sequence[tuple[int, int, int]]  # P, 0 to 255
    saturation: bool
    """Whether saturated pixels turn grey."""

    def paint(self, rendered: Rendered, shown: int | None, eps: float) -> Tensor:
        """Paint a view that was drawn in full.

        Args:
            rendered: The view.
            shown: Only this partition, over its partial image on black; None: all, over the whole picture, where a
                pixel of several partitions gets the mean of their paints.
            eps: Transmittance below which what lies behind is saturated.

        Returns:
            [H, W, 3].
        """
        plan, passed = rendered.plan, rendered.partials.transmittances.detach()
        if shown is not None and shown not in plan.order:
            return torch.zeros_like(rendered.rgb)
        device = rendered.rgb.device
        columns = torch.arange(rendered.rgb.shape[1], device=device)
        spans = plan.spans[list(plan.order)].to(device)
        regions = (columns >= spans[..., :1]) & (columns < spans[..., 1:])  # [Q, H, W]
        in_front = torch.cat([torch.ones_like(passed[:1]), passed.cumprod(dim=0)])[:-1]  # [Q, H, W]
        colors = torch.tensor(list(self.colors))[list(plan.order)].to(device)[:, None, None] / 255.0  # [Q, 1, 1, 3]
        saturated = (in_front < eps)[..., None] & self.saturation
        paint = torch.where(saturated, GREY.to(device), colors) * regions[..., None]  # [Q, H, W, 3]
        picture, paints, number = rendered.rgb, paint.sum(dim=0), regions.sum(dim=0)[..., None]
        if shown is not None:
            index = plan.order.index(shown)
            picture, paints, number = rendered.partials.colors[index], paint[index], regions[index].int()[..., None]
            picture = torch.where(saturated[index], picture.mean(dim=-1, keepdim=True), picture)
        painted = (1 - TINT) * picture + TINT * paints / number.clamp_min(1)
        return torch.where(number > 0, painted, picture)
