"""Projection, spherical harmonics, composition and loss: the ops around the rasteriser.

Shapes: N Gaussians, K spherical-harmonics bases, Q participants of a view, H x W pixels. Everything is float32, on the
CPU or all on one GPU (cameras may stay on the CPU); pixel centres lie at +0.5; world_to_cam matrices and cameras are
OpenCV's (x right, y down, z forward).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from splaxel_ns.cuda import _backend, _device, _gsplat, _ssim

SSIM_WINDOW = 11  # pixels, side of the SSIM window


def project(
    means: Tensor,  # [N, 3], world units
    quats: Tensor,  # [N, 4], wxyz, any length
    scales: Tensor,  # [N, 3], world units, activated
    opacities: Tensor,  # [N], activated
    viewmat: Tensor,  # [4, 4], world to camera
    K: Tensor,  # [3, 3], pixels
    width: int,
    height: int,
    near: float,
    far: float,
    antialiased: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Projects all Gaussians into one view (EWA splatting, as gsplat 1.4.0).

    A Gaussian is culled where it is outside near..far, reaches alpha 1/255 nowhere in the image, has a zero
    quaternion, or where any of its values, or what they lead to, is not finite. All results of a culled Gaussian and
    all its gradients are zero.

    Args:
        near: smallest depth kept, world units, at least 0.
        far: largest depth kept, world units.
        antialiased: scale opacities by sqrt(det / det of the blurred covariance), as gsplat's "antialiased" mode.

    Returns:
        means2d [N, 2] in pixels, depths [N] in world units, conics [N, 3] (upper triangle of the inverse 2D
        covariance), opacities [N], and extents [N, 2] in pixels: half sizes of the box around means2d that holds
        every pixel with alpha >= 1/255. Gradients flow from all but extents to the four Gaussian tensors and to
        viewmat (its last row excepted).

    Raises:
        ValueError: a tensor has the wrong shape, type or device, or the camera is no pinhole camera.
    """
    count, device = _rows("means", means), means.device
    tensors = [
        _checked("means", means, (count, 3), device=device),
        _checked("quats", quats, (count, 4), device=device),
        _checked("scales", scales, (count, 3), device=device),
        _checked("opacities", opacities, (count,), device=device),
        _checked("viewmat", viewmat, (4, 4), device=viewmat.device),
        _checked("K", K, (3, 3), device=K.device),
    ]
    _check_camera(viewmat, K, width, height)
    if not 0 <= near < far:
        raise ValueError(f"near and far must satisfy 0 <= near < far, got near={near}, far={far}")
    if _device.on_gpu(means):
        near, far = float(near), float(far)
        return _gsplat.project(means, quats, scales, opacities, viewmat, K, width, height, near, far, antialiased)
    return _Project.apply(*tensors, int(width), int(height), float(near), float(far), bool(antialiased))


class _Project(Function):
    @staticmethod
    def forward(ctx: Any, means, quats, scales, opacities, viewmat, K, width, height, near, far, antialiased):
        results = _backend.load().project(
            means, quats, scales, opacities, viewmat, K, width, height, near, far, antialiased
        )
        extents = results[4]
        ctx.save_for_backward(means, quats, scales, opacities, viewmat, K, extents)
        ctx.image = (width, height, antialiased)
        ctx.mark_non_differentiable(extents)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *v_results):
        v_inputs = _backend.load().project_backward(
            *ctx.saved_tensors, *ctx.image, *(v.contiguous() for v in v_results[:4])
        )
        return *v_inputs, None, None, None, None, None, None


def spherical_harmonics(
    degree: int,
    means: Tensor,  # [N, 3], world units
    cam_center: Tensor,  # [3], world units
    sh0: Tensor,  # [N, 1, 3]
    shN: Tensor,  # [N, K - 1, 3]
    visible: Tensor,  # [N], bool
) -> Tensor:  # [N, 3]
    """Colours of the visible Gaussians: max(0, 0.5 + harmonics in the direction from the camera); zeros elsewhere.

    `degree` (0 to 3) may be lower than what shN stores; the rest is then neither read nor trained. Gradients flow to
    means and cam_center (through the direction), sh0 and shN.

    Raises:
        ValueError: a tensor has the wrong shape, type or device, or shN holds too few bases for the degree.
    """
    if not 0 <= degree <= 3:
        raise ValueError(f"spherical harmonics of degree 0 to 3 are supported, got {degree}")
    count = _rows("means", means)
    if shN.dim() != 3 or shN.shape[1] < (degree + 1) ** 2 - 1:
        raise ValueError(
            f"shN must be [N, K - 1, 3] with K - 1 >= {(degree + 1) ** 2 - 1} for degree {degree}, got "
            f"{list(shN.shape)}"
        )
    device = means.device
    tensors = [
        _checked("means", means, (count, 3), device=device),
        _checked("cam_center", cam_center, (3,), device=cam_center.device),
        _checked("sh0", sh0, (count, 1, 3), device=device),
        _checked("shN", shN, (count, shN.shape[1], 3), device=device),
        _checked("visible", visible, (count,), torch.bool, device),
    ]
    if _device.on_gpu(means):
        return _gsplat.spherical_harmonics(degree, means, cam_center, sh0, shN, visible)
    return _SphericalHarmonics.apply(int(degree), *tensors)


class _SphericalHarmonics(Function):
    @staticmethod
    def forward(ctx: Any, degree, means, cam_center, sh0, shN, visible):
        ctx.degree = degree
        ctx.save_for_backward(means, cam_center, sh0, shN, visible)
        return _backend.load().spherical_harmonics(degree, means, cam_center, sh0, shN, visible)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *v_results):
        v_inputs = _backend.load().spherical_harmonics_backward(
            ctx.degree, *ctx.saved_tensors, v_results[0].contiguous()
        )
        return None, *v_inputs, None


def composite(
    colors: Tensor,  # [Q, H, W, 3], premultiplied, front to back
    depths: Tensor,  # [Q, H, W], sum of weight times depth
    transmittances: Tensor,  # [Q, H, W]
    background: Tensor,  # [3]
) -> tuple[Tensor, Tensor, Tensor]:
    """Lays partial images over each other and the background.

    Returns:
        rgb [H, W, 3], depth [H, W] (undivided), alpha [H, W]. Gradients flow to all four tensors. Without
        participants (Q = 0) the image is the background.

    Raises:
        ValueError: a tensor has the wrong shape, type or device.
    """
    if colors.dim() != 4:
        raise ValueError(f"colors must be [Q, H, W, 3], got {list(colors.shape)}")
    layers = tuple(colors.shape[:3])
    device = colors.device
    tensors = [
        _checked("colors", colors, (*layers, 3), device=device),
        _checked("depths", depths, layers, device=device),
        _checked("transmittances", transmittances, layers, device=device),
        _checked("background", background, (3,), device=device),
    ]
    return _Composite.apply(*tensors)


class _Composite(Function):
    @staticmethod
    def forward(ctx: Any, colors, depths, transmittances, background):
        # Images of zeros would be read by the passes behind this one; only a leaf is to have its zeros.
        ctx.set_materialize_grads(False)
        ctx.depths_are_leaf = depths.is_leaf
        ctx.save_for_backward(colors, depths, transmittances, background)
        return _backend.load(colors.device).composite(colors, depths, transmittances, background)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *v_results):
        v_rgb, v_depth, v_alpha = (None if v is None else v.contiguous() for v in v_results)
        image = ctx.saved_tensors[1].shape[1:]  # H, W
        if v_rgb is None:
            v_rgb = ctx.saved_tensors[0].new_zeros(*image, 3)
        if v_depth is None and ctx.depths_are_leaf:
            v_depth = ctx.saved_tensors[0].new_zeros(image)
        return _backend.load(ctx.saved_tensors[0].device).composite_backward(
            *ctx.saved_tensors, v_rgb, v_depth, v_alpha
        )


@dataclass(frozen=True)
class LossShare:
    """Which part of an image's loss a crop of it stands for. The shares of an image add up to its loss."""

    pixels: Tensor  # [h, w], 1 where the crop's pixel counts, else 0
    windows: Tensor  # [h - 10, w - 10], the same for windows, by their upper left pixel
    height: int  # of the whole image
    width: int


def l1_ssim(
    pred: Tensor,  # [H, W, 3]
    gt: Tensor,  # [H, W, 3]
    ssim_lambda: float,
    share: LossShare | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(1 - ssim_lambda) L1 + ssim_lambda (1 - SSIM), with the gradient computed in the same pass.

    SSIM is that of pytorch_msssim with data_range=1: 11x11 Gaussian windows (sigma 1.5) that lie inside the image.

    Args:
        share: what part of a larger image's loss the values are; its gradient stays that of the whole loss, for
            pixels whose windows lie inside `pred`. None: pred is the whole image, and all of it counts.

    Returns:
        The scalars loss, l1 and ssim. The gradient flows from loss to pred only.

    Raises:
        ValueError: a tensor has the wrong shape, type or device; the image is smaller than a window.
    """
    if pred.dim() != 3 or pred.shape[2] != 3:
        raise ValueError(f"pred must be [H, W, 3], got {list(pred.shape)}")
    height, width = pred.shape[:2]
    if min(height, width) < SSIM_WINDOW:
        raise ValueError(
            f"an image of {width}x{height} pixels holds no {SSIM_WINDOW}x{SSIM_WINDOW} window: SSIM is not defined "
            "for it; use larger images or a smaller downscale factor"
        )
    if not 0 <= ssim_lambda <= 1:
        raise ValueError(f"ssim_lambda must lie in 0..1, got {ssim_lambda}")
    device = pred.device
    tensors = [
        _checked("pred", pred, (height, width, 3), device=device),
        _checked("gt", gt, (height, width, 3), device=device),
    ]
    if _device.on_gpu(pred):
        parts = _share_tensors(share, height, width, device)
        return _ssim.l1_ssim(tensors[0], tensors[1], float(ssim_lambda), *parts)
    need_grad = torch.is_grad_enabled() and pred.requires_grad
    pixels, windows, *size = _share_tensors(share, height, width, device)
    if pixels is not None and windows is not None:
        pixels, windows = (part[..., None].expand(-1, -1, 3).contiguous() for part in (pixels, windows))
    return _L1Ssim.apply(*tensors, float(ssim_lambda), need_grad, (pixels, windows, *size))


def _share_tensors(
    share: LossShare | None, height: int, width: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Pixels [h, w] and windows [h - 10, w - 10] that count, or None for all; height and width of the whole image."""
    if share is None:
        return None, None, height, width
    border = SSIM_WINDOW - 1
    pixels = _checked("pixels", share.pixels, (height, width), device=device)
    windows = _checked("windows", share.windows, (height - border, width - border), device=device)
    return pixels, windows, share.height, share.width


class _L1Ssim(Function):
    @staticmethod
    def forward(ctx: Any, pred, gt, ssim_lambda, need_grad, parts):
        loss, l1, ssim, v_pred = _backend.load().l1_ssim(pred, gt, ssim_lambda, need_grad, *parts)
        ctx.save_for_backward(v_pred)
        ctx.mark_non_differentiable(l1, ssim)
        return loss, l1, ssim

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *v_results):
        (v_pred,) = ctx.saved_tensors
        return v_pred * v_results[0], None, None, None, None


def _rows(name: str, tensor: Tensor) -> int:
    if tensor.dim() == 0:
        raise ValueError(f"{name} must have one row per Gaussian, got a scalar")
    return tensor.shape[0]


def _checked(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:
    """The tensor, contiguous; device: that of the op's first tensor, for ops that also run on GPUs."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}; convert it with .to({dtype})")
    if device is not None and device.type == "cuda":
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, but the others are on {device}; move it there")
    elif tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}, but Splaxel's ops run on the CPU; move it with .cpu()")
    return tensor.contiguous()


def _check_camera(viewmat: Tensor, K: Tensor, width: int, height: int) -> None:
    """Looks at what is on the CPU; a camera on a GPU is taken as it is, for looking would wait for the device."""
    if width <= 0 or height <= 0:
        raise ValueError(f"the image must have pixels, got width={width}, height={height}")
    if K.device.type != "cpu" or viewmat.device.type != "cpu":
        return
    (fx, skew, cx), (_, fy, cy), _ = K.detach().tolist()
    if not (0 < fx < float("inf") and 0 < fy < float("inf") and abs(cx) + abs(cy) < float("inf")):
        raise ValueError(f"K must have positive focal lengths and finite entries, got fx={fx} fy={fy} cx={cx} cy={cy}")
    if skew != 0:
        raise ValueError(f"K has skew {skew}; only pinhole cameras without skew are supported")
    if not bool(torch.isfinite(viewmat.detach()).all()):
        raise ValueError(f"viewmat has entries that are not finite: {viewmat.detach().tolist()}")
