"""L1 and SSIM on a GPU, in torch's operations: as the CPU's kernel (include/ssim.h), gradient in the same pass.

Shapes: H x W pixels, windows of 11 x 11 inside the image.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import conv2d, conv_transpose2d

WINDOW = 11
SIGMA = 1.5
C1, C2 = 0.01**2, 0.03**2
SHIFT = 0.5
"""Taken off both images: variances are differences of squares, and lose fewer digits near zero."""


def l1_ssim(
    pred: Tensor,  # [H, W, 3]
    gt: Tensor,  # [H, W, 3]
    ssim_lambda: float,
    pixels: Tensor | None,  # [H, W]
    windows: Tensor | None,  # [H - 10, W - 10]
    height: int,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `splats.l1_ssim`; pixels, windows, height and width are those of `splats.LossShare`."""
    return _L1Ssim.apply(pred, gt, ssim_lambda, pixels, windows, height, width)


class _L1Ssim(Function):
    @staticmethod
    def forward(ctx: Any, pred, gt, ssim_lambda, pixels, windows, height, width):
        of_pixels = 1.0 / (3 * height * width)
        of_windows = 1.0 / (3 * (height - WINDOW + 1) * (width - WINDOW + 1))
        difference = pred - gt
        x, y = (image.permute(2, 0, 1) - SHIFT for image in (pred, gt))  # [3, H, W]
        mean_x, mean_y, squares, product = _filtered(torch.cat([x, y, x * x + y * y, x * y])).split(3)
        mu_x, mu_y = mean_x + SHIFT, mean_y + SHIFT
        a1, b1 = 2.0 * mu_x * mu_y + C1, mu_x * mu_x + mu_y * mu_y + C1
        a2 = 2.0 * (product - mean_x * mean_y) + C2
        b2 = squares - (mean_x * mean_x + mean_y * mean_y) + C2
        inverse = 1.0 / (b1 * b2)
        values = a1 * a2 * inverse  # [3, H - 10, W - 10]
        counted = difference.abs() if pixels is None else difference.abs() * pixels[..., None]
        l1, ssim = of_pixels * counted.sum(), of_windows * (values if windows is None else values * windows).sum()
        # One minus SSIM: the part of the windows that count.
        share = 1.0 if windows is None else 3.0 * of_windows * windows.sum()
        loss = (1.0 - ssim_lambda) * l1 + ssim_lambda * (share - ssim)
        if ctx.needs_input_grad[0]:
            v_square, v_product = -values * b1 * inverse, 2.0 * a1 * inverse
            v_mean = 2.0 * (mu_y * a2 - mu_x * values * b2) * inverse - 2.0 * mean_x * v_square - mean_y * v_product
            spread = _spread(torch.cat([v_mean, v_square, v_product]))
            v_first, v_second, v_third = spread.split(3)
            v_ssim = (v_first + 2.0 * x * v_second + y * v_third).permute(1, 2, 0)
            v_pred = (1.0 - ssim_lambda) * of_pixels * difference.sign() - ssim_lambda * of_windows * v_ssim
            ctx.save_for_backward(v_pred)
        ctx.mark_non_differentiable(l1, ssim)
        return loss, l1, ssim

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *v_results):
        (v_pred,) = ctx.saved_tensors
        return v_pred * v_results[0], *[None] * 6


@cache
def _weights(device: torch.device) -> Tensor:
    """[11] float32, which sum to 1: the outermost, whose rounding is finest, take up the rest."""
    x = torch.arange(WINDOW, dtype=torch.float64) - WINDOW // 2
    exact = torch.exp(-(x**2) / (2 * SIGMA**2))
    weights = (exact / exact.sum()).float()
    weights[[0, -1]] = ((1.0 - weights[1:-1].double().sum()) / 2).float()
    return weights.to(device)


def _filtered(planes: Tensor) -> Tensor:
    """Moments under every window: [C, H, W] -> [C, H - 10, W - 10]."""
    return _separable(conv2d, planes)


def _spread(planes: Tensor) -> Tensor:
    """The transpose of `_filtered`: [C, H - 10, W - 10] -> [C, H, W]."""
    return _separable(conv_transpose2d, planes)


def _separable(convolve: Any, planes: Tensor) -> Tensor:
    channels = len(planes)
    weights = _weights(planes.device).expand(channels, 1, 1, WINDOW)
    # cuDNN would use TF32, whose 10 bits are too few for variances.
    with torch.backends.cudnn.flags(enabled=False):
        rows = convolve(planes[None], weights, groups=channels)
        return convolve(rows, weights.transpose(2, 3), groups=channels)[0]
