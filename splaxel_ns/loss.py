"""The photometric loss, its regularisers, and the metrics, all over the pixels a mask leaves.

Shapes: H x W pixels, N Gaussians. Images are RGB in [0, 1]; a mask is true where a pixel counts.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from nerfstudio.model_components.lib_bilagrid import color_correct
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure

from splaxel_ns import cuda
from splaxel_ns.cuda.splats import SSIM_WINDOW

WARP_COEFFICIENTS = 10
"""Of the quadratic function of red, green and blue that colour correction fits to each channel."""


def photometric_loss(
    pred: Tensor, target: Tensor, mask: Tensor | None, ssim_lambda: float, share: cuda.LossShare | None = None
) -> Tensor:
    """(1 - lambda) L1 + lambda (1 - SSIM), with SSIM over valid 11x11 windows (paper, Eq. 3).

    Masked pixels are black in both images, so they carry neither loss nor gradient; the means still divide by
    the full image, as the sum over several owners of one image's pixels has to.

    Args:
        pred: Rendered image.  # [H, W, 3]
        target: Photograph.  # [H, W, 3]
        mask: True where a pixel counts, or None.  # [H, W, 1]
        ssim_lambda: Weight of the SSIM term, 0 to 1.
        share: Of which image these are a crop, and what of it they count; None: the whole image.

    Returns:
        The loss, or the crop's share of it, a scalar.

    Raises:
        ValueError: The sizes differ, or the image is smaller than one SSIM window.
    """
    _check_pair(pred, target, mask)
    if mask is not None:
        pred = torch.where(mask, pred, 0.0)
        target = torch.where(mask, target, 0.0)
    loss, _, _ = cuda.l1_ssim(pred.contiguous(), target.contiguous(), ssim_lambda, share)
    return loss


def scale_regularization(log_scales: Tensor, max_ratio: float) -> Tensor:
    """PhysGaussian's penalty on needles: 0.1 mean(max(longest / shortest axis, max_ratio) - max_ratio).

    Args:
        log_scales: Logarithms of the axes.  # [N, 3]
        max_ratio: Ratio up to which nothing is paid.

    Returns:
        The penalty, a scalar; zero without Gaussians.
    """
    if log_scales.shape[0] == 0:
        return log_scales.sum()
    ratio = torch.exp(log_scales.amax(dim=-1) - log_scales.amin(dim=-1))  # [N]
    return 0.1 * (ratio.clamp_min(max_ratio) - max_ratio).mean()


def opacity_regularization(logits: Tensor) -> Tensor:
    """Mean opacity of logits [N, 1], a scalar: what no picture needs fades and is moved; zero without Gaussians."""
    return torch.sigmoid(logits).mean() if len(logits) else logits.sum()


def size_regularization(log_scales: Tensor) -> Tensor:
    """Mean axis in world units of the logarithms [N, 3], a scalar: Gaussians shrink; zero without Gaussians."""
    return torch.exp(log_scales).mean() if len(log_scales) else log_scales.sum()


def color_corrected(pred: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """A render with the colours of its photograph: nerfstudio's quadratic warp, fitted to the unmasked pixels.

    Args:
        pred: Rendered image.  # [H, W, 3]
        target: Photograph.  # [H, W, 3]
        mask: True where a pixel counts, or None; other pixels stay as they are.  # [H, W, 1]

    Returns:
        [H, W, 3]; NaN where no warp can be fitted: a render of one colour, or fewer pixels than coefficients.
    """
    _check_pair(pred, target, mask)
    counts = (
        torch.ones(pred.shape[:2], dtype=torch.bool, device=pred.device) if mask is None else mask[..., 0]
    )  # [H, W]
    corrected = pred.detach().clone()
    pixels = corrected[counts]  # [M, 3]
    if len(pixels) < WARP_COEFFICIENTS:
        corrected[counts] = float("nan")
        return corrected
    try:
        corrected[counts] = color_correct(pixels, target[counts])
    except AssertionError:  # nerfstudio's own check of the fit
        corrected[counts] = float("nan")
    return corrected


def psnr(pred: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Peak signal-to-noise ratio in dB of [H, W, 3] images over the unmasked pixels; NaN if there are none."""
    _check_pair(pred, target, mask)
    if mask is None:
        mse = torch.mean((pred - target) ** 2)
    else:
        error = torch.where(mask, (pred - target) ** 2, 0.0)
        mse = error.sum() / (mask.sum() * pred.shape[-1])
    return -10.0 * torch.log10(mse)


def ssim(pred: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean SSIM of [H, W, 3] images over the valid 11x11 windows that hold no masked pixel; NaN if there are none."""
    _check_pair(pred, target, mask)
    if min(pred.shape[:2]) < SSIM_WINDOW:
        return torch.tensor(float("nan"))
    if mask is not None:
        pred = torch.where(mask, pred, 0.0)
        target = torch.where(mask, target, 0.0)
    _, full = structural_similarity_index_measure(
        pred.permute(2, 0, 1)[None], target.permute(2, 0, 1)[None], data_range=1.0, return_full_image=True
    )
    border = SSIM_WINDOW // 2
    windows = full[0, :, border:-border, border:-border].mean(dim=0)  # [H - 10, W - 10]
    if mask is not None:
        holes = torch.nn.functional.max_pool2d((~mask).float().permute(2, 0, 1), SSIM_WINDOW, stride=1)[0]
        windows = windows[holes == 0]
    return windows.mean()


def alexnet_weights() -> Path:
    """The file LPIPS needs beside torchmetrics' own heads; torchvision keeps it in torch's hub folder."""
    return Path(torch.hub.get_dir()) / "checkpoints" / "alexnet-owt-7be5be79.pth"


def load_lpips() -> Any | None:
    """LPIPS (AlexNet) if its weights are already on this disk, else None: evaluation downloads nothing."""
    if not alexnet_weights().is_file():
        return None
    from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

    return LearnedPerceptualImagePatchSimilarity(net_type="alex", normalize=True).eval()


def lpips(metric: Any, pred: Tensor, target: Tensor, mask: Tensor | None = None) -> float:
    """LPIPS of [H, W, 3] images; masked pixels are black in both, the network has no notion of a mask."""
    if mask is not None:
        pred = torch.where(mask, pred, 0.0)
        target = torch.where(mask, target, 0.0)
    metric.to(pred.device)
    with torch.no_grad():
        value = float(metric(pred.permute(2, 0, 1)[None].clamp(0, 1), target.permute(2, 0, 1)[None].clamp(0, 1)))
    metric.reset()
    return value if math.isfinite(value) else float("nan")


def _check_pair(pred: Tensor, target: Tensor, mask: Tensor | None) -> None:
    if pred.shape != target.shape:
        raise ValueError(
            f"The rendered image is {tuple(pred.shape)}, the photograph {tuple(target.shape)}: the camera's width and "
            "height must be those of its file"
        )
    if mask is not None and mask.shape != (*pred.shape[:2], 1):
        raise ValueError(f"The mask is {tuple(mask.shape)}, but the image needs {(*pred.shape[:2], 1)}")
