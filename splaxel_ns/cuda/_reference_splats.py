"""The ops of splats.py once more, in plain torch for any float type: what the kernels are tested against.

Shapes: N Gaussians, K spherical-harmonics bases, Q participants, H x W pixels. Written for clarity, calls no kernel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ALPHA_MIN = 1 / 255
BLUR = 0.3  # pixels^2
CLAMP = 0.3  # of half the field of view, beyond the image


def project(
    means: Tensor,  # [N, 3]
    quats: Tensor,  # [N, 4]
    scales: Tensor,  # [N, 3]
    opacities: Tensor,  # [N]
    viewmat: Tensor,  # [4, 4]
    K: Tensor,  # [3, 3]
    width: int,
    height: int,
    near: float,
    far: float,
    antialiased: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As splats.project. Gaussians that are not seen are cut out before any arithmetic that could spoil gradients."""
    fx, fy, cx, cy = K[0, 0], K[1, 1], K[0, 2], K[1, 2]

    def of(keep: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        rotation = viewmat[:3, :3]
        camera = means[keep] @ rotation.T + viewmat[:3, 3]  # [M, 3]
        x, y, z = camera.unbind(-1)
        u = (x / z).clamp(-(cx / fx + CLAMP * 0.5 * width / fx), (width - cx) / fx + CLAMP * 0.5 * width / fx)
        v = (y / z).clamp(-(cy / fy + CLAMP * 0.5 * height / fy), (height - cy) / fy + CLAMP * 0.5 * height / fy)
        zero = torch.zeros_like(z)
        jacobian = torch.stack([fx / z, zero, -fx * u / z, zero, fy / z, -fy * v / z], -1).reshape(-1, 2, 3)
        spread = rotation_matrices(quats[keep]) * scales[keep][:, None, :]  # [M, 3, 3]
        covariance = spread @ spread.transpose(1, 2)
        flat = jacobian @ rotation @ covariance @ rotation.T @ jacobian.transpose(1, 2)  # [M, 2, 2]
        blurred = flat + BLUR * torch.eye(2, dtype=flat.dtype)
        inverse = torch.linalg.inv(blurred)
        conics = torch.stack([inverse[:, 0, 0], inverse[:, 0, 1], inverse[:, 1, 1]], -1)
        alphas = opacities[keep]
        if antialiased:
            alphas = alphas * (torch.linalg.det(flat).clamp_min(0) / torch.linalg.det(blurred)).sqrt()
        reach = 2 * torch.log((alphas / ALPHA_MIN).clamp_min(1))
        extents = (reach[:, None] * blurred.diagonal(dim1=1, dim2=2)).sqrt()
        return torch.stack([fx * x / z + cx, fy * y / z + cy], -1), z, conics, alphas, extents

    with torch.no_grad():
        finite = torch.isfinite(torch.cat([means, quats, scales, opacities[:, None]], 1)).all(1)
        finite &= quats.square().sum(-1) > torch.finfo(torch.float32).tiny
        depths = means @ viewmat[2, :3] + viewmat[2, 3]
        keep = (finite & (depths >= near) & (depths <= far) & (depths > 0)).nonzero()[:, 0]
        means2d, _, conics, alphas, extents = of(keep)
        seen = (alphas >= ALPHA_MIN) & torch.isfinite(conics).all(1) & (extents > 0).all(1)
        size = torch.tensor([width, height], dtype=means2d.dtype)
        seen &= (means2d + extents > 0).all(1) & (means2d - extents < size).all(1)
        keep = keep[seen]
    count = means.shape[0]
    return tuple(  # pyright: ignore[reportReturnType]
        torch.zeros(count, *values.shape[1:], dtype=values.dtype).index_put((keep,), values) for values in of(keep)
    )


def rotation_matrices(quats: Tensor) -> Tensor:  # [N, 4] -> [N, 3, 3]
    """Rotation matrices of quaternions wxyz of any length but zero."""
    w, x, y, z = (quats / quats.norm(dim=-1, keepdim=True)).unbind(-1)
    rows = [
        [w * w + x * x - y * y - z * z, 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), w * w - x * x + y * y - z * z, 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), w * w - x * x - y * y + z * z],
    ]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def spherical_harmonics(
    degree: int,
    means: Tensor,  # [N, 3]
    cam_center: Tensor,  # [3]
    sh0: Tensor,  # [N, 1, 3]
    shN: Tensor,  # [N, K - 1, 3]
    visible: Tensor,  # [N], bool
) -> Tensor:  # [N, 3]
    """As splats.spherical_harmonics, in the closed form of each basis function."""
    keep = visible.nonzero()[:, 0]
    directions = means[keep] - cam_center
    x, y, z = (directions / directions.norm(dim=-1, keepdim=True)).unbind(-1)
    pi = math.pi
    bases = [torch.full_like(x, math.sqrt(1 / (4 * pi)))]
    if degree >= 1:
        c = math.sqrt(3 / (4 * pi))
        bases += [-c * y, c * z, -c * x]
    if degree >= 2:
        c = math.sqrt(15 / (4 * pi))
        bases += [c * x * y, -c * y * z, math.sqrt(5 / (16 * pi)) * (2 * z * z - x * x - y * y), -c * x * z]
        bases += [c / 2 * (x * x - y * y)]
    if degree >= 3:
        c = math.sqrt(35 / (32 * pi))
        d = math.sqrt(105 / (4 * pi))
        e = math.sqrt(21 / (32 * pi))
        bases += [-c * y * (3 * x * x - y * y), d * x * y * z, -e * y * (4 * z * z - x * x - y * y)]
        bases += [math.sqrt(7 / (16 * pi)) * z * (2 * z * z - 3 * x * x - 3 * y * y)]
        bases += [-e * x * (4 * z * z - x * x - y * y), d / 2 * z * (x * x - y * y), -c * x * (x * x - 3 * y * y)]
    coefficients = torch.cat([sh0, shN], 1)[keep, : len(bases)]
    colors = (torch.stack(bases, -1)[:, :, None] * coefficients).sum(1) + 0.5
    return torch.zeros(means.shape[0], 3, dtype=means.dtype).index_put((keep,), colors.clamp_min(0))


def composite(
    colors: Tensor,  # [Q, H, W, 3]
    depths: Tensor,  # [Q, H, W]
    transmittances: Tensor,  # [Q, H, W]
    background: Tensor,  # [3]
) -> tuple[Tensor, Tensor, Tensor]:
    """As splats.composite."""
    through = colors.new_ones(colors.shape[1:3])
    rgb, depth = colors.new_zeros(colors.shape[1:]), torch.zeros_like(through)
    for color, layer_depth, transmittance in zip(colors, depths, transmittances, strict=True):
        rgb = rgb + through[..., None] * color
        depth = depth + through * layer_depth
        through = through * transmittance
    return rgb + through[..., None] * background, depth, 1 - through
