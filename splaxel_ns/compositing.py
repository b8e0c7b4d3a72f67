"""Ordered partial images -> image (paper, Eq. 4-6).

Shapes: P partial images front to back, H x W pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splaxel_ns import cuda
from splaxel_ns.types import PartialImages


def composite(colors: Tensor, transmittances: Tensor, background: Tensor) -> Tensor:
    """Compose partial images over a background: C = sum_k W_k C_k + W_{P+1} background, W_{k+1} = W_k T_k.

    Args:
        colors: Premultiplied colours, nearest first.  # [P, H, W, 3]
        transmittances: Products of 1 - alpha.  # [P, H, W]
        background: Colour behind everything.  # [3]

    Returns:
        The image [H, W, 3], differentiable in all three arguments; with P = 0 the background alone.

    Raises:
        ValueError: A shape, type or device is wrong, or the background is not finite.
    """
    for name, tensor in {"colors": colors, "transmittances": transmittances, "background": background}.items():
        check_tensor(name, tensor)
    if colors.dim() != 4 or colors.shape[-1] != 3:
        raise ValueError(f"colors must be [P, H, W, 3], not {list(colors.shape)}")
    if transmittances.shape != colors.shape[:3]:
        raise ValueError(f"transmittances must be {list(colors.shape[:3])}, not {list(transmittances.shape)}")
    if background.shape != (3,):
        raise ValueError(f"background must be [3], not {list(background.shape)}")
    check_background(background)
    partials = PartialImages(colors, torch.zeros_like(transmittances), transmittances)
    return compose(partials, background)[0]


def check_tensor(name: str, value: object) -> None:
    """Refuse an argument that is not a float32 tensor on the CPU or a GPU.

    Raises:
        ValueError: Naming the argument.
    """
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, not {type(value).__name__}")
    if value.dtype != torch.float32 or value.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be float32 on the CPU or a GPU, not {value.dtype} on {value.device}")


def check_background(background: Tensor) -> None:
    """Refuse a background [3] that is not a colour.

    Raises:
        ValueError: It is not finite.
    """
    if not bool(background.isfinite().all()):
        raise ValueError(f"background must be finite, not {background.tolist()}")


def compose(partials: PartialImages, background: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compose the partial images of a view with depth and opacity.

    Args:
        partials: Q partial images, nearest first.
        background: Colour behind everything.  # [3]

    Returns:
        rgb [H, W, 3], depth [H, W] (sum of weight times depth, undivided; world units) and alpha [H, W].
    """
    return cuda.composite(
        partials.colors.contiguous(),
        partials.depths.contiguous(),
        partials.transmittances.contiguous(),
        background.contiguous(),
    )


def expected_depth(depth: Tensor, alpha: Tensor) -> Tensor:
    """Undivided depth [H, W] -> expected depth [H, W] in world units, as gsplat's ED; 0 where nothing was drawn."""
    return depth / alpha.clamp_min(1e-10)
