"""Exchange `owner`: of pixels that many ranks share, one composes, and the others send to it alone.

Direct-send compositing of sort-last rendering (design 5). `selective` sends every rank's partial pixel to every other
rank that shares it; n sharers swap n (n - 1) of them. Here the image is cut into blocks of 64 x 64 pixels, and where it
pays, a block's shared pixels belong to one of the ranks that draw them. The others send it theirs, it composes, and
sends back what the loss says of each: 2 (n - 1) pixels and the composed colour for the 10 pixels around, which the
gradients of other ranks depend on. Where it does not pay, as for two sharers, all sharers compose as in `selective`.

So every drawn pixel has composers: all the ranks that draw it, or one of them. All that follows, streams, halo, loss
and gradients, goes by them. All ranks derive them from the shared regions.

Shapes: R ranks, Q of them draw a view, H x W pixels, h x w of a crop, Y x X blocks, M pixels of a list. Bit r of an
int32 stands for rank r.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

from splaxel_ns import cuda
from splaxel_ns.comm import World
from splaxel_ns.compositing import compose
from splaxel_ns.exchange import CPU, HALO, NOBODY, Canvas, Crop, RankRegions, pixels_of, stacked_layers
from splaxel_ns.pixel_streams import PixelSwap, Tag
from splaxel_ns.types import PartialImages

BLOCK = 64
"""Pixels on a side of what has one owner."""
GRADIENT_BYTES = 16
"""Of one pixel of one rank: three of colour and one of transmittance, float32: they are as small as 1 / (3 H W)."""
ALIKE = 0.9
"""Ranks that draw at least this share of what the one with most of a block draws are as good as owners."""


@dataclass(frozen=True, kw_only=True)
class OwnerRegions(RankRegions):
    """Regions of which some pixels have one owner."""

    drawn: Tensor  # [H, W] int32, who draws a pixel
    composers: Tensor  # [H, W] int32, who composes a pixel
    wanted: Tensor  # [H, W] int32, who needs its composed colour
    halo: Tensor  # [M] int64, pixels y W + x whose colour travels, ascending
    halo_source: Tensor  # [M] int32, who sends it: the lowest composer
    halo_targets: Tensor  # [M] int32, who gets it

    def stream(self, source: int, target: int, device: torch.device = CPU) -> Tensor:
        """Pixels [M] int64 (row by row, y W + x) that `source` sends `target`: which this one composes."""
        pixels = pixels_of(self.spans[source], self.width)
        drawn, composers = self.drawn.flatten()[pixels], self.composers.flatten()[pixels]
        return cuda.upload(pixels[has(drawn, source) & has(composers, target)], device)

    def one_way(self, source: int, pixels: Tensor) -> Tensor:
        """Of pixels [M] that `source` sends, those that it does not compose itself, whose gradients come back: bool."""
        return ~has(cuda.upload(self.composers, pixels.device).flatten()[pixels], source)

    def halo_stream(self, source: int, target: int, device: torch.device = CPU) -> Tensor:
        """Pixels [M] int64 whose composed colour `source` sends `target`."""
        return cuda.upload(self.halo[has(self.halo_source, source) & has(self.halo_targets, target)], device)

    def composed_by(self, rank: int) -> Tensor:
        """The pixels [H, W] bool that `rank` composes."""
        return has(self.composers, rank)

    def lowest_composing(self, reach: int = 0, device: torch.device = CPU) -> Tensor:
        """The lowest-numbered rank that composes something at most `reach` pixels away on each axis: [H, W] uint8."""
        bits = spread(cuda.upload(self.composers, device), reach)
        label = torch.full(bits.shape, NOBODY, dtype=torch.uint8, device=device)
        for rank in sorted(self.order, reverse=True):
            label.masked_fill_(has(bits, rank), rank)
        return label


def has(bits: Tensor, rank: int) -> Tensor:
    """Whether bit `rank` is set."""
    return (bits & (1 << rank)) != 0


def spread(bits: Tensor, reach: int) -> Tensor:
    """All bits [H, W] int32 of the pixels at most `reach` away on each axis."""
    for dim in (0, 1):
        length = bits.shape[dim]
        bits = pad(bits, (0, 0, reach, reach) if dim == 0 else (reach, reach))
        done, window = 1, 2 * reach + 1
        while done < window:
            step = min(done, window - done)
            left = bits.shape[dim] - step
            bits = bits.narrow(dim, 0, left) | bits.narrow(dim, step, left)
            done += step
        assert bits.shape[dim] == length
    return bits


def with_owners(regions: RankRegions, pixel_bytes: int) -> OwnerRegions:
    """Decide who composes which pixel.

    Args:
        regions: What the ranks draw.
        pixel_bytes: Size of a pixel of a partial image on its way.
    """
    drawn = torch.zeros(regions.height, regions.width, dtype=torch.int32)
    sharers = torch.zeros(regions.height, regions.width, dtype=torch.uint8)
    layers = {rank: regions.drawn_by(rank) for rank in regions.order}
    for rank, pixels in layers.items():
        drawn |= pixels.int() << rank
        sharers += pixels
    composers = _with_one_owner(drawn, sharers, layers, pixel_bytes)
    wanted = spread(composers, HALO)
    travels = torch.where(composers != 0, wanted & ~composers, 0).flatten()
    halo = travels.nonzero().flatten()
    source = composers.flatten()[halo]
    needs = torch.stack([_row_spans(has(wanted, rank)) for rank in range(len(regions.spans))])
    return OwnerRegions(
        regions.order,
        regions.spans,
        needs,
        regions.width,
        regions.saturated,
        drawn=drawn,
        composers=composers,
        wanted=wanted,
        halo=halo,
        halo_source=source & -source,
        halo_targets=travels[halo],
    )


def _with_one_owner(drawn: Tensor, sharers: Tensor, layers: dict[int, Tensor], pixel_bytes: int) -> Tensor:
    """Composers [H, W] int32 of pixels that these ranks draw.

    Args:
        drawn: Who draws a pixel.  # [H, W] int32
        sharers: How many do.  # [H, W] uint8
        layers: What each rank draws.  # Q x [H, W] bool
        pixel_bytes: As for `with_owners`.
    """
    height, width = drawn.shape
    others = torch.arange(len(layers) + 1).sub(1).clamp_min(0)  # than the owner
    saving = (others * (others * pixel_bytes - GRADIENT_BYTES)).clamp_min(0).float()
    saved = saving[sharers.int()]  # [H, W], bytes; with two sharers there is nothing to gain
    # Worth more than the composed colours all around the block, which at worst have to travel.
    pays = block_sums(saved) > 3 * pixel_bytes / 4 * _halo_sizes(height, width)  # [Y, X] bool
    if not bool(pays.any()):
        return drawn
    owned = (saved > 0) & pays.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:height, :width]
    ranks = sorted(layers)
    parts = torch.stack([block_sums((layers[rank] & owned).float()) for rank in ranks], dim=-1)  # [Y, X, Q]
    load = [int((layers[rank] & ~owned).sum()) for rank in ranks]
    preferred = torch.zeros(parts.shape, dtype=torch.int32)  # [Y, X, Q], bits of ranks
    for y, x in pays.nonzero().tolist():
        part = parts[y, x].tolist()
        enough = ALIKE * max(part)
        slots = sorted(range(len(ranks)), key=lambda slot: (part[slot] < enough, load[slot], slot))
        load[slots[0]] += int(part[slots[0]])
        preferred[y, x] = torch.tensor([1 << ranks[slot] for slot in slots], dtype=torch.int32)
    composers = drawn.clone()
    pixels = owned.flatten().nonzero().flatten()
    block = pixels // width // BLOCK * parts.shape[1] + pixels % width // BLOCK
    preferred, level = preferred.flatten(0, 1), 0
    while len(pixels):  # an owner draws what it owns: the first in the block's list that does
        candidate = preferred[block, level]
        draws = (drawn.flatten()[pixels] & candidate) != 0
        composers.view(-1)[pixels[draws]] = candidate[draws]
        pixels, block, level = pixels[~draws], block[~draws], level + 1
    return composers


def block_sums(values: Tensor) -> Tensor:
    """Sums [Y, X] over blocks of values [H, W] float."""
    return avg_pool2d(values[None], BLOCK, ceil_mode=True, divisor_override=1)[0]


def _halo_sizes(height: int, width: int) -> Tensor:
    """Pixels around each block that gradients in it depend on: [Y, X]."""
    inner, outer = [], []
    for size in (height, width):
        first = torch.arange(0, size, BLOCK)
        inner.append((first + BLOCK).clamp_max(size) - first)
        outer.append((first + BLOCK + HALO).clamp_max(size) - (first - HALO).clamp_min(0))
    return outer[0][:, None] * outer[1] - inner[0][:, None] * inner[1]


def _row_spans(pixels: Tensor) -> Tensor:
    """The smallest spans [H, 2] int32 that hold pixels [H, W] bool."""
    values = pixels.to(torch.uint8)
    some = pixels.any(dim=1)
    start, stop = values.argmax(dim=1), pixels.shape[1] - values.flip(1).argmax(dim=1)
    return torch.stack([torch.where(some, start, 0), torch.where(some, stop, 0)], dim=-1).int()


# A view under way


def compose_owned(
    world: World,
    regions: OwnerRegions,
    own: PartialImages | None,
    values: dict[int, Tensor],
    streams: dict[int, Tensor],
    tag: Tag,
    half: bool,
    background: Tensor,
    crop: Crop | None,
) -> tuple[Canvas, PartialImages] | None:
    """Compose the pixels of this rank, and swap composed colours for the halo of everybody's loss.

    Args:
        values: Of the others' partial images, by source.  # [M, 4]
        streams: The pixels that they belong to.  # [M]
        crop: As of `exchange.crop_for`.

    Returns:
        The canvas, whose gradient stops at the partial images of all ranks in the crop, and these; None without crop.

    Raises:
        LostRank: A peer is gone.
        Disagreement: A message belongs to another view or step.
    """
    rank, width, device = world.rank, regions.width, background.device
    others = [other for other in regions.order if other != rank]
    incoming = {other: regions.halo_stream(other, rank, device) for other in others}
    sends: dict[int, Tensor] = {}
    leaves = rgb = depth = alpha = None
    if crop is not None:
        own = None if own is None else PartialImages(own.colors.detach(), own.depths, own.transmittances.detach())
        layers = stacked_layers(world, regions, own, values, streams, crop, device)
        grad = torch.is_grad_enabled() and len(layers.colors) > 0
        leaves = PartialImages(
            layers.colors.requires_grad_(grad), layers.depths.detach(), layers.transmittances.requires_grad_(grad)
        )
        rgb, depth, alpha = compose(leaves, background)
        for other in others:
            sends[other] = rgb.detach().reshape(-1, 3)[crop.flat(regions.halo_stream(rank, other, device), width)]
    counts = {other: len(pixels) for other, pixels in incoming.items()}
    received = PixelSwap(world, tag, "halo", sends, counts, 3, half, device=device).wait()
    if crop is None or leaves is None or rgb is None or depth is None or alpha is None:
        return None
    known = rgb.detach().reshape(-1, 3).clone()
    for other, colors in received.items():
        known[crop.flat(incoming[other], width)] = colors
    mine = cuda.upload(crop.of(regions.composed_by(rank)).contiguous(), device)[..., None]
    rgb = torch.where(mine, rgb, known.view(rgb.shape))
    return Canvas(rgb, alpha, depth, leaves.transmittances.detach(), crop), leaves


def return_gradients(
    world: World,
    regions: OwnerRegions,
    own: PartialImages | None,
    leaves: PartialImages | None,
    crop: Crop | None,
    swap: PixelSwap,
    streams: dict[int, Tensor],
    sent: dict[int, Tensor],
    tag: Tag,
    device: torch.device,
) -> None:
    """After the loss's backward pass: swap the gradients of partial pixels, and carry this rank's on to its splats.

    Args:
        leaves: What `compose_owned` returned, with gradients by now.
        swap: Of the partial pixels.
        streams: Pixels received in it, by source.  # [M]
        sent: Pixels sent in it, by destination.  # [M]

    Raises:
        LostRank: A peer is gone.
        Disagreement: A message belongs to another view or step.
    """
    gradients = _gradients_of(leaves)  # [Q, h, w, 4]
    sends, receives = {}, {}
    for source, pixels in streams.items():
        assert crop is not None
        back = pixels[regions.one_way(source, pixels) & swap.arrived[source]]
        sends[source] = gradients[regions.order.index(source)].view(-1, 4)[crop.flat(back, regions.width)]
    for target, pixels in sent.items():
        receives[target] = pixels[regions.one_way(world.rank, pixels) & swap.filled[target]]
    counts = {target: len(pixels) for target, pixels in receives.items()}
    received = PixelSwap(world, tag, "pixel gradients", sends, counts, 4, device=device).wait()
    if own is None:
        return
    whole = torch.zeros(regions.height, regions.width, 4, device=device)
    if crop is not None and world.rank in regions.order:
        crop.of(whole).copy_(gradients[regions.order.index(world.rank)])
    for target, values in received.items():
        whole.view(-1, 4)[receives[target]] = values
    outputs = [(own.colors, whole[None, ..., :3]), (own.transmittances, whole[None, ..., 3])]
    outputs = [(value, gradient) for value, gradient in outputs if value.requires_grad]
    if outputs:
        torch.autograd.backward([value for value, _ in outputs], [gradient for _, gradient in outputs])


def _gradients_of(leaves: PartialImages | None) -> Tensor:
    """Of colours and transmittances: [Q, h, w, 4], zero where the loss says nothing."""
    if leaves is None:
        return torch.zeros(0, 0, 0, 4)
    parts = [leaves.colors, leaves.transmittances[..., None]]
    grads = [leaves.colors.grad, None if leaves.transmittances.grad is None else leaves.transmittances.grad[..., None]]
    return torch.cat([torch.zeros_like(p) if g is None else g for p, g in zip(parts, grads, strict=True)], dim=-1)
