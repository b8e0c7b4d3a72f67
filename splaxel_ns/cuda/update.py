"""Training without gradients of parameters: splats whose gradients wait for the step, and the step that uses them.

A step's views leave only gradients with respect to their splats (10 floats per Gaussian). Those of the 59 parameters
are computed from them block by block while Adam runs, in the first caches, and never written: memory traffic, which
bounds this part of an iteration, halves, and Gaussians that no view saw cost nothing.

Shapes: N Gaussians, K spherical-harmonics bases, H x W pixels. Everything is float32 on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from splaxel_ns.cuda import _backend
from splaxel_ns.cuda.splats import _check_camera, _checked, _rows

PARAMETERS = ("means", "quats", "scales", "opacities", "sh0", "shN")
"""The order of every list of parameters here; scales are logarithms and opacities logits."""


@dataclass
class StepGradients:
    """Gradients of the views of one step with respect to their splats."""

    tensors: list[Tensor] = field(default_factory=list)
    """Per view: viewmat, K, camera centre, extents, and gradients of means2d, depths, conics, opacities, colors."""
    settings: list[int] = field(default_factory=list)
    """Per view: width, height, SH degree, antialiased."""

    def __len__(self) -> int:
        return len(self.settings) // 4

    def clear(self) -> None:
        """Forget the views, after the parameters moved."""
        self.tensors.clear()
        self.settings.clear()


def project_and_color(
    gaussians: Sequence[Tensor],
    viewmat: Tensor,  # [4, 4], world to camera
    K: Tensor,  # [3, 3], pixels
    cam_center: Tensor,  # [3], world units
    width: int,
    height: int,
    near: float,
    far: float,
    degree: int,
    antialiased: bool,
    gradients: StepGradients,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`project` and `spherical_harmonics` of one view, whose backward pass adds the view to `gradients`.

    Args:
        gaussians: means [N, 3], quats [N, 4], scales [N, 3], opacities [N] (both activated), sh0 [N, 1, 3] and
            shN [N, K - 1, 3]; none gets a gradient, `update_gaussians` moves what they were made from.
        gradients: where the backward pass leaves what `update_gaussians` needs.

    Returns:
        means2d [N, 2], depths [N], conics [N, 3], opacities [N], extents [N, 2] as `project`, and colors [N, 3] as
        `spherical_harmonics`. Beside `gradients`, viewmat and cam_center get theirs if they want any.

    Raises:
        ValueError: a tensor has the wrong shape, type or device, or the camera is no pinhole camera.
    """
    means, quats, scales, opacities, sh0, shN = (tensor.detach() for tensor in gaussians)
    count = _rows("means", means)
    if not 0 <= degree <= 3 or shN.dim() != 3 or shN.shape[1] < (degree + 1) ** 2 - 1:
        raise ValueError(f"shN must hold the bases of a degree of 0 to 3, got degree {degree} and {list(shN.shape)}")
    tensors = [
        _checked("means", means, (count, 3)),
        _checked("quats", quats, (count, 4)),
        _checked("scales", scales, (count, 3)),
        _checked("opacities", opacities, (count,)),
        _checked("sh0", sh0, (count, 1, 3)),
        _checked("shN", shN, (count, shN.shape[1], 3)),
        _checked("viewmat", viewmat, (4, 4)),
        _checked("K", K, (3, 3)),
        _checked("cam_center", cam_center, (3,)),
    ]
    _check_camera(viewmat, K, width, height)
    if not 0 <= near < far:
        raise ValueError(f"near and far must satisfy 0 <= near < far, got near={near}, far={far}")
    # No input needs a gradient, yet the backward pass has to reach this view.
    anchor = torch.zeros((), requires_grad=True)
    settings = (int(width), int(height), int(degree), bool(antialiased))
    return _ProjectAndColor.apply(anchor, *tensors, float(near), float(far), settings, gradients)


class _ProjectAndColor(Function):
    @staticmethod
    def forward(
        ctx: Any, _, means, quats, scales, opacities, sh0, shN, viewmat, K, cam_center, near, far, settings, gradients
    ):
        ops = _backend.load()
        width, height, degree, antialiased = settings
        means2d, depths, conics, blended, extents = ops.project(
            means, quats, scales, opacities, viewmat, K, width, height, near, far, antialiased
        )
        colors = ops.spherical_harmonics(degree, means, cam_center, sh0, shN, extents[:, 0] > 0)
        ctx.save_for_backward(means, quats, scales, opacities, sh0, shN, viewmat, K, cam_center, extents)
        ctx.settings, ctx.gradients = settings, gradients
        ctx.mark_non_differentiable(extents)
        return means2d, depths, conics, blended, extents, colors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v_means2d, v_depths, v_conics, v_opacities, _, v_colors):
        *gaussians, viewmat, K, cam_center, extents = ctx.saved_tensors
        v_splats = [v.contiguous() for v in (v_means2d, v_depths, v_conics, v_opacities)]
        v_colors = v_colors.contiguous()
        ctx.gradients.tensors += [viewmat.detach(), K, cam_center.detach(), extents, *v_splats, v_colors]
        ctx.gradients.settings += [int(value) for value in ctx.settings]
        v_viewmat, v_cam_center = None, None
        width, height, degree, antialiased = ctx.settings
        means, quats, scales, opacities, sh0, shN = gaussians
        if ctx.needs_input_grad[7]:
            *_, v_viewmat = _backend.load().project_backward(
                means, quats, scales, opacities, viewmat, K, extents, width, height, antialiased, *v_splats
            )
        if ctx.needs_input_grad[9]:
            _, v_cam_center, *_ = _backend.load().spherical_harmonics_backward(
                degree, means, cam_center, sh0, shN, extents[:, 0] > 0, v_colors
            )
        return *[None] * 7, v_viewmat, None, v_cam_center, *[None] * 4


@dataclass(frozen=True)
class AdamSettings:
    """Adam's numbers for one parameter."""

    lr: float
    beta1: float
    beta2: float
    eps: float


@torch.no_grad()
def update_gaussians(
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    settings: Sequence[AdamSettings],
    scales: Tensor,  # [N, 3], activated
    opacities: Tensor,  # [N], activated
    gradients: StepGradients,
    step: int,
    only_visible: bool,
) -> None:
    """Moves the parameters and both moments in place: one step of Adam, as torch's, with the step's gradients.

    Args:
        params: means [N, 3], quats [N, 4], logarithms of scales [N, 3], logits of opacities [N, 1], sh0 [N, 3],
            shN [N, K - 1, 3]. What autograd left in their `.grad` is added to the views' part.
        exp_avgs: first moments, likewise.
        exp_avg_sqs: second moments, likewise.
        settings: Adam's numbers for each.
        scales: exp of the third parameter, as the views were drawn with.
        opacities: sigmoid of the fourth.
        gradients: the views of this step.
        step: how many steps there were, this one included: the bias correction is that of the whole run.
        only_visible: leave the parameters and moments of Gaussians as they are that no view of the step saw, and do
            not decay their moments. False: torch's Adam.

    Raises:
        ValueError: a tensor has the wrong shape, type or device, or is not contiguous.
    """
    count = _rows("means", params[0])
    bases = params[5].shape[1] if params[5].dim() == 3 else -1
    shapes = ((count, 3), (count, 4), (count, 3), (count, 1), (count, 3), (count, bases, 3))
    for kind, tensors in (("", params), ("first moment of ", exp_avgs), ("second moment of ", exp_avg_sqs)):
        for name, tensor, shape in zip(PARAMETERS, tensors, shapes, strict=True):
            if _checked(kind + name, tensor, shape).data_ptr() != tensor.data_ptr():
                raise ValueError(f"{kind}{name} is updated in place and must be contiguous")
    extra: list[Tensor | None] = [
        None if param.grad is None else _checked(f"gradient of {name}", param.grad, shape)
        for name, param, shape in zip(PARAMETERS, params, shapes, strict=True)
    ]
    for k in range(len(gradients)):
        if len(gradients.tensors[9 * k + 3]) != count:
            raise ValueError(
                f"view {k} of the step was drawn with {len(gradients.tensors[9 * k + 3])} Gaussians, but there are "
                f"{count} now"
            )
    numbers = [value for each in settings for value in (each.lr, each.beta1, each.beta2, each.eps)]
    _backend.load().update_gaussians(
        list(params),
        list(exp_avgs),
        list(exp_avg_sqs),
        extra,
        _checked("scales", scales, (count, 3)),
        _checked("opacities", opacities, (count,)),
        gradients.tensors,
        gradients.settings,
        numbers,
        float(step),
        not only_visible,
    )


@torch.no_grad()
def adam_rows(
    param: Tensor,  # [N, ...]
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    settings: AdamSettings,
    step: int,
    visible: Tensor | None = None,  # [N] bool
) -> None:
    """Moves the visible rows of one parameter and of its moments in place: one step of Adam, as torch's.

    On the CPU or a GPU. Rows that are not visible keep their moments too; None: all rows.

    Raises:
        ValueError: a tensor has the wrong shape, type or device, or is not contiguous.
    """
    shape = tuple(param.shape)
    if not shape:
        raise ValueError("param must have rows, got a scalar")
    named = {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "grad": grad}
    for name, tensor in named.items():
        if tensor.shape != shape or tensor.dtype != torch.float32 or tensor.device != param.device:
            raise ValueError(
                f"{name} must be float32 {list(shape)} on {param.device}, got {tensor.dtype} {list(tensor.shape)} on "
                f"{tensor.device}"
            )
        if name != "grad" and not tensor.is_contiguous():
            raise ValueError(f"{name} is updated in place and must be contiguous")
    if visible is not None and (visible.shape != shape[:1] or visible.dtype != torch.bool):
        raise ValueError(f"visible must be bool [{shape[0]}], got {visible.dtype} {list(visible.shape)}")
    if visible is not None and visible.device != param.device:
        raise ValueError(f"visible is on {visible.device}, but param is on {param.device}")
    _backend.load(param.device).adam_rows(
        param,
        exp_avg,
        exp_avg_sq,
        grad.contiguous(),
        None if visible is None else visible.contiguous(),
        settings.lr,
        settings.beta1,
        settings.beta2,
        settings.eps,
        float(step),
    )
    increment_version(param)  # as every change in place; who keeps things made of it looks there


@torch.no_grad()
def add_statistics(
    grads: Tensor,
    extents: Tensor,
    conics: Tensor,
    half_size: tuple[float, float],
    longest_side: float,
    grad2d: Tensor,
    count: Tensor,
    radii: Tensor | None = None,
) -> None:
    """Add one view's part to the densification statistics of what it saw, in place.

    Args:
        grads: [N, 2], of the projected means or their absolute sums.
        extents: [N, 2], pixels; 0: not seen, nothing is added.
        conics: [N, 3], upper triangle of the inverse covariance on the image plane.
        half_size: Factors on the two components of `grads`.
        longest_side: Of the image, pixels.
        grad2d: [N] float32, gets the norms of the gradients.
        count: [N] float32, gets 1.
        radii: [N] float32 or None: the largest of gsplat's radii (`screen_radii`) so far, in parts of the longest side.

    Raises:
        ValueError: a tensor has the wrong shape.
    """
    num = len(extents)
    for name, value, shape in (
        ("grads", grads, (num, 2)),
        ("extents", extents, (num, 2)),
        ("conics", conics, (num, 3)),
        ("grad2d", grad2d, (num,)),
        ("count", count, (num,)),
        *([("radii", radii, (num,))] if radii is not None else []),
    ):
        if tuple(value.shape) != shape:
            raise ValueError(f"{name} must have the shape {list(shape)}, not {list(value.shape)}.")
    if extents.device.type == "cpu":
        views = (value.detach().float().contiguous() for value in (grads, extents, conics))
        _backend.load().add_statistics(*views, *map(float, (*half_size, longest_side)), grad2d, count, radii)
        return
    seen = extents.amin(dim=1) > 0
    grad2d += torch.where(seen, torch.hypot(grads[:, 0] * half_size[0], grads[:, 1] * half_size[1]), 0.0)
    count += seen
    if radii is not None:
        torch.maximum(radii, torch.where(seen, screen_radii(conics) / longest_side, 0.0), out=radii)


def screen_radii(conics: Tensor) -> Tensor:
    """Three standard deviations along the longer axis, rounded up, as gsplat's radii: conics [N, 3] -> [N] pixels."""
    a, b, c = conics.unbind(dim=-1)
    largest = 0.5 * (a + c) + torch.sqrt((0.5 * (a - c)) ** 2 + b * b)
    # The smaller eigenvalue as determinant over the larger one: the difference would cancel for needles.
    smallest = ((a * c - b * b) / largest).clamp_min(1e-12)
    return torch.ceil(3.0 / torch.sqrt(smallest))
