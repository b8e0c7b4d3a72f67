"""Pixels of partial images as flat streams, and the composition of streams (paper, section 4; design 5).

A stream holds the pixels of a region, row after row, C = 4 or 5 numbers each: red, green, blue (premultiplied),
transmittance and, with 5, depth (sum of weight times depth); float32 or float16. It has no indices: both sides know the
region, row spans [H, 2] int32 of columns spans[y, 0] <= x < spans[y, 1].

The active-pixel encoding leaves out what nobody needs to send: one bit says of each pixel of a stream whether something
was drawn there, and only those are kept.

Shapes: H x W pixels, Q layers, M pixels of a stream, A of them active. On the CPU or all on one GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from splaxel_ns.cuda import _backend
from splaxel_ns.cuda._device import upload
from splaxel_ns.cuda.splats import _checked


@dataclass(frozen=True)
class Region:
    """Row spans, and where each row starts in a stream.

    Args:
        spans: on the CPU, so that the number of pixels is known without waiting for a device.  # [H, 2] int32
        width: W.
    """

    spans: Tensor
    width: int

    def __post_init__(self) -> None:
        spans = self.spans
        if spans.ndim != 2 or spans.shape[1] != 2 or spans.dtype != torch.int32 or spans.device.type != "cpu":
            raise ValueError(f"spans must be int32 [H, 2] on the CPU, got {spans.dtype} {list(spans.shape)}")
        if len(spans) and not (0 <= int(spans.min()) and int(spans.max()) <= self.width):
            raise ValueError(f"spans reach from {int(spans.min())} to {int(spans.max())}, outside 0..{self.width}")

    @cached_property
    def row_starts(self) -> Tensor:  # [H] int64
        """Pixels of the stream before each row."""
        ends = self._lengths.cumsum(0)
        return ends - self._lengths

    @cached_property
    def num_pixels(self) -> int:
        """M."""
        return int(self._lengths.sum())

    @property
    def _lengths(self) -> Tensor:  # [H] int64
        return (self.spans[:, 1] - self.spans[:, 0]).clamp_min(0).long()


def pack_pixels(
    colors: Tensor,  # [H, W, 3]
    depths: Tensor,  # [H, W]
    transmittances: Tensor,  # [H, W]
    region: Region,
    with_depth: bool = True,
    half: bool = False,
) -> Tensor:  # [M, C]
    """The pixels of a region of one partial image; as float16, numbers beyond its range become its largest.

    Raises:
        ValueError: a tensor has the wrong shape, type or device.
    """
    height, device = len(region.spans), colors.device
    return _backend.load(device).pack_pixels(
        _checked("colors", colors.detach(), (height, region.width, 3), device=device),
        _checked("depths", depths.detach(), (height, region.width), device=device),
        _checked("transmittances", transmittances.detach(), (height, region.width), device=device),
        upload(region.spans, device),
        upload(region.row_starts, device),
        region.num_pixels,
        with_depth,
        half,
    )


def unpack_pixels(stream: Tensor, region: Region) -> tuple[Tensor, Tensor, Tensor]:
    """The partial image of a stream [M, C]: colors [H, W, 3], depths and transmittances [H, W]; empty elsewhere.

    Raises:
        ValueError: the stream has the wrong shape or type.
    """
    _check_stream(stream, region.num_pixels)
    device = stream.device
    return _backend.load(device).unpack_pixels(
        stream.contiguous(),
        upload(region.spans, device),
        upload(region.row_starts, device),
        region.width,
    )


def pack_active(stream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The active pixels of a stream [M, C].

    Returns:
        bits [ceil(M / 32)] int32: bit i % 32 of word i // 32 is pixel i; values [M, C], of which the first A rows are
        filled; and A, int64 [1], on the stream's device. To send: the bits and the A rows.

    Raises:
        ValueError: the stream has the wrong shape or type.
    """
    _check_stream(stream, len(stream))
    return _backend.load(stream.device).pack_active(stream.contiguous())


def unpack_active(bits: Tensor, values: Tensor, num_pixels: int) -> Tensor:
    """The stream [M, C] of `pack_active`'s bits and (at least) A rows of values; empty pixels elsewhere.

    Raises:
        ValueError: a tensor has the wrong shape, type or device, or on the CPU there are fewer values than bits.
    """
    _check_stream(values, len(values))
    if bits.shape != ((num_pixels + 31) // 32,) or bits.dtype != torch.int32 or bits.device != values.device:
        raise ValueError(f"bits must be int32 [{(num_pixels + 31) // 32}] on {values.device}, got {list(bits.shape)}")
    if bits.device.type == "cpu":
        wanted = int(_POPCOUNT[bits.contiguous().view(torch.uint8).long()].sum())
        if wanted > len(values):
            raise ValueError(f"the bits name {wanted} active pixels, but there are {len(values)} values")
    return _backend.load(values.device).unpack_active(bits.contiguous(), values.contiguous(), num_pixels)


_POPCOUNT = torch.tensor([bin(octet).count("1") for octet in range(256)])


def composite_streams(
    stream: Tensor,  # [M, C] float32
    regions: Sequence[Region],
    background: Tensor,  # [3]
) -> tuple[Tensor, Tensor, Tensor]:
    """Lays partial images over each other and the background, from streams as they arrived.

    Args:
        stream: the streams of all layers, front to back, one behind the other.
        regions: of each layer, Q of them, at least one; all of the same image.

    Returns:
        rgb [H, W, 3], depth [H, W] (undivided; 0 if the stream has none) and alpha [H, W]. Gradients flow to stream
        and background.

    Raises:
        ValueError: a tensor has the wrong shape, type or device, or there is no region.
    """
    if not regions:
        raise ValueError("composite_streams needs the region of at least one layer")
    _check_stream(stream, sum(region.num_pixels for region in regions))
    if stream.dtype != torch.float32:
        raise ValueError(f"stream must be float32, got {stream.dtype}; convert it with .float()")
    first = regions[0]
    if any(len(region.spans) != len(first.spans) or region.width != first.width for region in regions):
        raise ValueError("all regions must be of images of the same size")
    starts, total = [], 0
    for region in regions:
        starts.append(region.row_starts + total)
        total += region.num_pixels
    spans = upload(torch.stack([region.spans for region in regions]), stream.device)
    row_starts = upload(torch.stack(starts), stream.device)
    background = _checked("background", background, (3,), device=stream.device)
    return _CompositeStreams.apply(stream.contiguous(), spans, row_starts, background, first.width)


class _CompositeStreams(Function):
    @staticmethod
    def forward(ctx: Any, stream, spans, row_starts, background, width):
        ctx.save_for_backward(stream, spans, row_starts, background)
        ctx.width = width
        return _backend.load(stream.device).composite_streams(stream, spans, row_starts, background, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *v_results):
        ops = _backend.load(v_results[0].device)
        v_stream, v_background = ops.composite_streams_backward(
            *ctx.saved_tensors, ctx.width, *(v.contiguous() for v in v_results)
        )
        return v_stream, None, None, v_background, None


def _check_stream(stream: Tensor, num_pixels: int) -> None:
    if stream.ndim != 2 or stream.shape[0] != num_pixels or stream.shape[1] not in (4, 5):
        raise ValueError(f"the stream must be [{num_pixels}, 4 or 5], got {list(stream.shape)}")
    if stream.dtype not in (torch.float32, torch.float16):
        raise ValueError(f"the stream must be float32 or float16, got {stream.dtype}")
