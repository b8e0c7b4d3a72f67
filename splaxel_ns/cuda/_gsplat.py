"""Projection and spherical harmonics on a GPU: gsplat 1.4.0's kernels behind the signatures of `splats`.

What differs from the CPU's, which draws every pair with alpha >= 1/255:

- gsplat leaves out a Gaussian whose square of 3 standard deviations along the longer axis lies outside the image, the
  CPU one whose box of sqrt(2 ln(255 opacity)) <= 3.33 standard deviations does. At the border, pairs with an alpha of
  at most exp(-4.5) = 0.011 are missing here; nothing is missing inside the image, for extents are worked out here and
  gsplat's radii only say what it culled.
- gsplat's determinant is a difference, ours a sum of positive terms: needles have conics of fewer digits.

Shapes: N Gaussians, K spherical-harmonics bases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from splaxel_ns.cuda import _build
from splaxel_ns.cuda._backend import thresholds
from splaxel_ns.cuda._device import upload


@dataclass(frozen=True)
class Functions:
    """gsplat's functions, compiled or in plain torch."""

    fully_fused_projection: Callable[..., Any]
    spherical_harmonics: Callable[..., Any]


@cache
def functions() -> Functions:
    """Those compiled for the GPU; on first use gsplat compiles them, one process at a time.

    Raises:
        RuntimeError: gsplat is missing, or its kernels were not compiled.
    """
    folder = _build.cache_root() / "gsplat_lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _build.exclusive(folder / "splaxel.lock"), _build.ninja_on_path():
            from gsplat.cuda import _backend, _wrapper
    except Exception as error:  # its build on import can fail in any way
        raise RuntimeError(f"gsplat 1.4.0, which projects Gaussians on a GPU, cannot be used ({error})") from error
    if _backend._C is None:
        raise RuntimeError("gsplat found no CUDA toolkit (nvcc on PATH) to compile its kernels with")
    return Functions(_wrapper.fully_fused_projection, _wrapper.spherical_harmonics)


def project(
    means: Tensor,  # [N, 3]
    quats: Tensor,  # [N, 4]
    scales: Tensor,  # [N, 3]
    opacities: Tensor,  # [N]
    viewmat: Tensor,  # [4, 4], here or on the CPU
    K: Tensor,  # [3, 3], here or on the CPU
    width: int,
    height: int,
    near: float,
    far: float,
    antialiased: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `splats.project`. Nothing waits for the device."""
    radii, means2d, depths, conics, compensations = functions().fully_fused_projection(
        means,
        None,
        quats,
        scales,
        upload(viewmat, means.device)[None],
        upload(K, means.device)[None],
        width,
        height,
        eps2d=thresholds()["blur"],
        near_plane=near,
        far_plane=far,
        calc_compensations=antialiased,
    )
    seen = radii[0] > 0  # [N]; elsewhere gsplat's values were never written
    means2d, depths, conics = means2d[0], depths[0], conics[0]
    if antialiased:
        opacities = opacities * torch.where(seen, compensations[0], 0.0)
    with torch.no_grad():
        extents = torch.where(seen[:, None], extents_of(conics, opacities, thresholds()["extent_slack"]), 0.0)
        size = upload(torch.tensor([width, height], dtype=torch.float32), means.device)
        inside = ((means2d + extents > 0) & (means2d - extents < size)).all(dim=1)
        # A NaN or an infinity anywhere makes this sum one, and the comparison false.
        total = means2d.abs().sum(dim=1) + conics.abs().sum(dim=1) + extents.sum(dim=1)
        drawn = seen & inside & (total < torch.inf) & (extents > 0).all(dim=1)
        extents = torch.where(drawn[:, None], extents, 0.0)
    columns = drawn[:, None]
    return (
        torch.where(columns, means2d, 0.0),
        torch.where(drawn, depths, 0.0),
        torch.where(columns, conics, 0.0),
        torch.where(drawn, opacities, 0.0),
        extents,
    )


@torch.no_grad()
def extents_of(conics: Tensor, opacities: Tensor, slack: float) -> Tensor:
    """Half sizes [N, 2] in pixels of the boxes that hold every pixel with alpha >= 1/255, never too small; 0: none.

    In double, for the determinant is a difference: they hold for the conics as they are, whatever made them.

    Args:
        conics: Upper triangle of the inverse 2D covariance.  # [N, 3]
        opacities: 0 to 1.  # [N]
        slack: Relative, for rounding.
    """
    a, b, c = conics.double().unbind(dim=1)
    reach = 2.0 * torch.log(opacities.double() / thresholds()["alpha_min"]).clamp_min(0.0)
    reach = reach / (a * c - b * b).clamp_min(1e-30)
    return (torch.stack([torch.sqrt(reach * c), torch.sqrt(reach * a)], dim=1) * (1.0 + slack)).float()


def spherical_harmonics(
    degree: int,
    means: Tensor,  # [N, 3]
    cam_center: Tensor,  # [3], here or on the CPU
    sh0: Tensor,  # [N, 1, 3]
    shN: Tensor,  # [N, K - 1, 3]
    visible: Tensor,  # [N] bool
) -> Tensor:  # [N, 3]
    """As `splats.spherical_harmonics`."""
    directions = means - upload(cam_center, means.device)
    colors = functions().spherical_harmonics(degree, directions, torch.cat([sh0, shN], dim=1), visible)
    return torch.where(visible[:, None], (colors + 0.5).clamp_min(0.0), 0.0)
