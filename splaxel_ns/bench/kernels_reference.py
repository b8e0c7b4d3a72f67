"""A renderer in vectorised torch, tile by tile with autograd, for the kernels to be compared with.

It calls no kernel. Shapes: N Gaussians, P (splat, tile) pairs, H x W pixels.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from splaxel_ns.cuda import _reference_splats as splats

TILE = 16  # pixels


def tile_lists(means2d: Tensor, extents: Tensor, depths: Tensor, width: int, height: int) -> tuple[Tensor, Tensor]:
    """Which splats each tile draws.

    Returns:
        The splats of all tiles one after the other, nearest first [P], and how many each tile has [tiles].
    """
    order = torch.argsort(torch.where(extents[:, 0] > 0, depths, torch.inf), stable=True)
    order = order[: int((extents[:, 0] > 0).sum())]
    center, half = means2d[order], extents[order]
    size = torch.tensor([-(-width // TILE), -(-height // TILE)])
    pixels = torch.tensor([width, height])
    first = (center - half - 0.5).ceil().long().clamp_min(0)  # [M, 2], pixels whose centres lie inside
    last = (center + half - 0.5).floor().long().minimum(pixels - 1)
    low, high = first // TILE, torch.where((last >= first).all(dim=1, keepdim=True), last // TILE + 1, 0)
    extent = (high - low).clamp_min(0)
    counts = extent.prod(dim=1)
    owner = torch.repeat_interleave(torch.arange(len(order)), counts)  # [P]
    within = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
    columns = extent[owner, 0]
    tile = (low[owner, 1] + within // columns) * size[0] + low[owner, 0] + within % columns
    by_tile = torch.argsort(tile, stable=True)
    return order[owner[by_tile]], torch.bincount(tile, minlength=int(size.prod()))


def draw_tile(pairs: Tensor, tile: int, width: int, height: int) -> Tensor:
    """One tile's pixels from its splats: pairs [P, 9] of centre 2, conic 3, opacity, colour 3 -> [pixels, 3]."""
    columns = -(-width // TILE)
    x0, y0 = tile % columns * TILE, tile // columns * TILE
    y, x = torch.meshgrid(
        torch.arange(y0, min(y0 + TILE, height)) + 0.5, torch.arange(x0, min(x0 + TILE, width)) + 0.5, indexing="ij"
    )
    dx = x.reshape(1, -1) - pairs[:, 0:1]  # [P, pixels]
    dy = y.reshape(1, -1) - pairs[:, 1:2]
    sigma = 0.5 * (pairs[:, 2:3] * dx * dx + pairs[:, 4:5] * dy * dy) + pairs[:, 3:4] * dx * dy
    alpha = (pairs[:, 5:6] * torch.exp(-sigma)).clamp_max(0.999)
    alpha = torch.where((alpha >= splats.ALPHA_MIN) & (sigma >= 0), alpha, 0.0)
    through = torch.cumprod(1 - alpha, dim=0)
    weights = alpha * torch.cat([torch.ones_like(through[:1]), through[:-1]])
    return weights.T @ pairs[:, 6:9]


def forward_backward_ms(
    gaussians: list[Tensor], viewmat: Tensor, K: Tensor, v_rgb: Tensor, num_pairs: int
) -> tuple[float, float]:
    """Times forward and backward pass; large images are drawn in part.

    Args:
        gaussians: means [N, 3], quats [N, 4], scales [N, 3], opacities [N], sh0 [N, 1, 3], shN [N, K - 1, 3].
        v_rgb: gradient of the image.  # [H, W, 3]
        num_pairs: tiles are drawn, evenly spread, until they hold about so many pairs; all others count as much by
            their pairs.

    Returns:
        The share of the pairs that was drawn, and milliseconds for all of them.
    """
    height, width = v_rgb.shape[:2]
    start = time.perf_counter()
    means, quats, scales, alphas, sh0, shN = (tensor.detach().requires_grad_() for tensor in gaussians)
    means2d, depths, conics, opacities, extents = splats.project(
        means, quats, scales, alphas, viewmat, K, width, height, 0.01, 1e10
    )
    center = -viewmat[:3, :3].T @ viewmat[:3, 3]
    colors = splats.spherical_harmonics(3, means, center, sh0, shN, extents[:, 0] > 0)
    listed, counts = tile_lists(means2d.detach(), extents.detach(), depths.detach(), width, height)
    pairs = torch.cat([means2d, conics, opacities[:, None], colors], dim=1)[listed]  # [P, 9]
    rest = time.perf_counter() - start
    stride = max(1, round(len(listed) / num_pairs))
    begins = counts.cumsum(0) - counts
    v_pairs = torch.zeros_like(pairs)
    drawn, seconds = 0, 0.0
    for tile in range(stride // 2, len(counts), stride):
        begin, count = int(begins[tile]), int(counts[tile])
        if count == 0:
            continue
        y, x = tile // -(-width // TILE) * TILE, tile % -(-width // TILE) * TILE
        v_tile = v_rgb[y : y + TILE, x : x + TILE].reshape(-1, 3)
        start = time.perf_counter()
        piece = pairs[begin : begin + count].detach().requires_grad_()
        (v_pairs[begin : begin + count],) = torch.autograd.grad(draw_tile(piece, tile, width, height), piece, v_tile)
        seconds += time.perf_counter() - start
        drawn += count
    start = time.perf_counter()
    pairs.backward(v_pairs)
    rest += time.perf_counter() - start
    share = drawn / max(len(listed), 1)
    return share, 1e3 * (rest + seconds / max(share, 1e-9))
