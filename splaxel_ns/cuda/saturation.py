"""Which (pixel, partition) pairs of a view are saturated, decided after it was drawn (paper, sections 4.3 and 8.2).

With W_1 = 1 and W_{k+1} = W_k T_k over the partitions that draw a pixel, front to back: a pair with W_k < eps is
pruned, and its budget W_k (1 - T_k), what it took of the light, is kept in 8 bits. A pair pruned earlier is not drawn,
T_k = 1. While the residual, the transmittance behind the last partition that draws, exceeds eps, the budgets of the
pruned pairs are subtracted from it in order of depth; those that it covers are flips and come back.

Shapes: K partitions whose region has pixels, Q of them drawn, M pruned pairs, H x W pixels, B = ceil(W / 8) bytes.
Bits: pixel x of a row is bit x % 8 of its byte x // 8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from splaxel_ns.cuda import _device
from splaxel_ns.cuda._backend import load

_WEIGHTS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


@dataclass(frozen=True)
class SaturationCounts:
    """Pairs of one visit, per partition, front to back."""

    pairs: Tensor  # [K] int64, pixels in the region
    pruned: Tensor  # [K] int64, of those, left out at this visit
    flipped: Tensor  # [K] int64, of the pruned, those that come back
    left: Tensor  # [K] int64, to be drawn from now on


def pack_bits(pixels: Tensor) -> Tensor:
    """[..., W] bool -> [..., B] uint8; the bits beyond W are zero."""
    padding = -pixels.shape[-1] % 8
    padded = torch.nn.functional.pad(pixels.to(torch.uint8), (0, padding))
    return (padded.unflatten(-1, (-1, 8)) * _weights(pixels.device)).sum(dim=-1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, width: int) -> Tensor:
    """[..., B] uint8 -> [..., W] bool."""
    return ((bits[..., None] & _weights(bits.device)) != 0).flatten(-2)[..., :width]


def _weights(device: torch.device) -> Tensor:
    return _device.upload(_WEIGHTS, device)


def update_saturation(
    transmittances: Tensor,  # [Q, H, W] float32, of the partial images as drawn
    slots: Tensor,  # [K] int32: which of the Q each partition is, front to back; -1: not drawn
    spans: Tensor,  # [K, H, 2] int32, the regions: columns spans[k, y, 0] <= x < spans[k, y, 1]
    bits: Tensor,  # [K, H, B] uint8, the pairs that were left out
    budgets: Tensor,  # [M] uint8, one per pair left out: partition by partition, row by row
    eps: float,
) -> tuple[Tensor, Tensor, SaturationCounts]:
    """Prune what became saturated at this visit and bring back what flipped. No gradients.

    Masks live on the CPU, and so do all arguments and results; only transmittances may be on a GPU, which then does the
    work (and is waited for).

    A pair outside its region is no pair: its bit is forgotten. A pair in the region of a partition that is not drawn,
    but not left out by its bit, stays unpruned.

    Returns:
        bits [K, H, B] and budgets [M'] from now on, and counts.

    Raises:
        ValueError: a tensor has the wrong shape or type, or eps is no transmittance.
    """
    if transmittances.ndim != 3:
        raise ValueError(f"transmittances must have the shape [Q, H, W], not {list(transmittances.shape)}.")
    height, width = transmittances.shape[1:]
    count = len(slots)
    if transmittances.dtype != torch.float32:
        raise ValueError(f"transmittances must be float32, not {str(transmittances.dtype)[6:]}.")
    _check("slots", slots, (count,), torch.int32)
    _check("spans", spans, (count, height, 2), torch.int32)
    _check("bits", bits, (count, height, (width + 7) // 8), torch.uint8)
    _check("budgets", budgets, (len(budgets),), torch.uint8)
    if count and not -1 <= int(slots.min()) <= int(slots.max()) < len(transmittances):
        raise ValueError(f"slots are {slots.tolist()}, but {len(transmittances)} partitions were drawn.")
    if not 0 < eps < 1:
        raise ValueError(f"eps is {eps}; it must be a transmittance between 0 and 1.")
    update = _update_on_gpu if _device.on_gpu(transmittances) else load().update_saturation
    new_bits, new_budgets, counts = update(
        transmittances.detach().contiguous(),
        slots.contiguous(),
        spans.contiguous(),
        bits.contiguous(),
        budgets.contiguous(),
        eps,
    )
    return new_bits, new_budgets, SaturationCounts(*counts.unbind(dim=1))


def _update_on_gpu(
    transmittances: Tensor, slots: Tensor, spans: Tensor, bits: Tensor, budgets: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The op update_saturation where the transmittances are; csrc/saturation.cpp says what it does."""
    device, (height, width) = transmittances.device, transmittances.shape[1:]
    steps = 255.0
    x = torch.arange(width, device=device)
    span = _device.upload(spans, device)
    region = (x >= span[..., :1]) & (x < span[..., 1:])  # [K, H, W]
    was = unpack_bits(_device.upload(bits, device), width)
    budget = torch.zeros(was.shape, dtype=torch.uint8, device=device)
    budget.masked_scatter_(was, _device.upload(budgets, device))
    pruned, now = was & region, torch.zeros_like(was)
    in_front = torch.ones(height, width, device=device)
    for k, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        behind = in_front * transmittances[slot]
        fresh = region[k] & ~was[k] & (in_front < eps)
        taken = ((in_front - behind) / eps * steps + 0.5).clamp_max(steps).to(torch.uint8)
        budget[k] = torch.where(fresh, taken, budget[k])
        now[k] |= fresh
        in_front = behind
    residual = in_front
    for k in range(len(slots)):
        share = budget[k].float() * (eps / steps)
        flips = pruned[k] & (residual > eps) & (residual >= share)
        now[k] |= pruned[k] & ~flips
        residual = torch.where(flips, residual - share, torch.where(pruned[k], 0.0, residual))
    counts = torch.stack([region, pruned, pruned & ~now, region & ~now], dim=1).flatten(2).sum(dim=2)  # [K, 4]
    return pack_bits(now).cpu(), budget[now].cpu(), counts.cpu()


def _check(name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(value.shape) != shape or value.dtype != dtype or value.device.type != "cpu":
        raise ValueError(
            f"{name} must be a {str(dtype)[6:]} tensor of shape {list(shape)} on the CPU, got "
            f"{str(value.dtype)[6:]} {list(value.shape)} on {value.device}."
        )
