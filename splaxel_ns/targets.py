"""Photographs and masks at the resolution training has reached.

Shapes: H x W pixels, d the factor by which each side shrinks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, max_pool2d


def shrink_photograph(image: Tensor, d: int) -> Tensor:
    """A photograph as float32 in 0..1, averaged over d x d pixels, premultiplied if it has an alpha channel.

    Args:
        image: uint8, or float in 0..1.  # [H, W, 3 | 4]
        d: At least 1.

    Returns:
        [H // d, W // d, 3 | 4].
    """
    if image.dim() != 3 or image.shape[2] not in (3, 4):
        raise ValueError(f"A photograph must be [H, W, 3] or [H, W, 4], not {list(image.shape)}")
    image = image.float() / 255.0 if image.dtype == torch.uint8 else image.float()
    if image.shape[2] == 4:
        # Averaged colours must count only as much as they are opaque.
        image = torch.cat([image[..., :3] * image[..., 3:], image[..., 3:]], dim=-1)
    if d > 1:
        image = avg_pool2d(image.permute(2, 0, 1), d).permute(1, 2, 0)
    return image.contiguous()


def shrink_mask(mask: Tensor, d: int) -> Tensor:
    """A mask [H, W, 1 or more], non-zero where a pixel counts -> [H // d, W // d, 1] bool.

    A small pixel counts only if all that its colour averages counts, so masked pixels have no influence.
    """
    counts = mask.reshape(*mask.shape[:2], -1)[..., :1] > 0
    if d == 1:
        return counts
    hidden = max_pool2d((~counts).float().permute(2, 0, 1), d).permute(1, 2, 0)
    return hidden == 0


def over_background(image: Tensor, background: Tensor) -> Tensor:
    """A premultiplied image [H, W, 3 | 4] over a background, [3] or [H, W, 3] -> [H, W, 3]."""
    return image[..., :3] + (1.0 - image[..., 3:]) * background if image.shape[2] == 4 else image
