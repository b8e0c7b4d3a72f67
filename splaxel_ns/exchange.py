"""Which pixels of a view travel between ranks, and the picture that a rank composes of its own and of those it got.

Paper, section 4: rank s draws the pixels of its region; rank k needs the composed colour of its own region and of what
its gradients depend on around it. So s sends k the pixels of region_s inside k's need, in row order, without indices:
both sides know all regions (design 5).

Regions are row spans [H, 2] int32: columns spans[y, 0] <= x < spans[y, 1] of row y; empty rows hold 0, 0.
Regions are worked out on the CPU, on all ranks alike; what has the size of a picture or a stream is made where pictures
are, from a few numbers per row.

Shapes: R ranks, P partitions, Q ranks that draw a view, H x W pixels, h x w of a crop, M pixels of a stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from splaxel_ns import cuda
from splaxel_ns.comm import World
from splaxel_ns.compositing import compose
from splaxel_ns.cuda.saturation import pack_bits, unpack_bits
from splaxel_ns.cuda.splats import SSIM_WINDOW, LossShare
from splaxel_ns.pixel_streams import PixelSwap, Tag
from splaxel_ns.saturation import ViewMask
from splaxel_ns.types import PartialImages, ViewPlan

HALO = SSIM_WINDOW - 1
"""A pixel's gradient depends on composed pixels up to this far away on each axis (design 2): a square of 21 x 21."""
NOBODY = 255
CPU = torch.device("cpu")


@dataclass(frozen=True)
class RankRegions:
    """Who draws and who needs which pixels of one view; the same on all ranks."""

    order: tuple[int, ...]  # Q ranks that draw something, nearest first
    spans: Tensor  # [R, H, 2] int32, what each rank draws
    needs: Tensor  # [R, H, 2] int32, what each rank needs composed
    width: int
    saturated: Tensor | None = None  # [R, H, ceil(W / 8)] uint8, pixels that a rank leaves out, as in `ViewPlan`
    needed: Tensor | None = None  # [R, H, ceil(W / 8)] uint8, what of `needs` is left then

    @property
    def height(self) -> int:
        """H."""
        return self.spans.shape[1]

    def stream(self, source: int, target: int, device: torch.device = CPU) -> Tensor:
        """Pixels [M] int64 (row by row, y W + x) that `source` sends `target`, on `device`."""
        shared = intersection(self.spans[source], self.needs[target])
        if self.saturated is None or self.needed is None:
            return pixels_of(shared, self.width, device)
        if device != CPU:
            sent = pack_bits(covered(shared, self.width)) & self.needed[target] & ~self.saturated[source]
            there = unpack_bits(cuda.upload(sent, device), self.width).flatten()
            count = int(unpack_bits(sent, self.width).sum())  # known here, so that nobody waits for it
            return torch.nonzero_static(there, size=count).flatten()
        pixels = pixels_of(shared, self.width)
        sent = (self.needed[target] & ~self.saturated[source]).flatten()
        y = torch.div(pixels, self.width, rounding_mode="floor")
        x = pixels - y * self.width
        octets = sent[y * self.saturated.shape[2] + torch.div(x, 8, rounding_mode="floor")]
        return pixels[(octets >> (x % 8).to(torch.uint8)) & 1 == 1]

    def drawn_by(self, rank: int, device: torch.device = CPU) -> Tensor:
        """The pixels [H, W] bool that `rank` draws, if it is one of `order`."""
        drawn = covered(self.spans[rank], self.width, device)
        if self.saturated is None:
            return drawn
        return drawn & ~unpack_bits(cuda.upload(self.saturated[rank], device), self.width)

    def composed_by(self, rank: int) -> Tensor:
        """The pixels [H, W] bool whose colour, loss and gradients `rank` works out: here all that it draws."""
        return self.drawn_by(rank)

    def lowest_composing(self, reach: int = 0, device: torch.device = CPU) -> Tensor:
        """The lowest-numbered rank that composes something at most `reach` pixels away on each axis from a pixel.

        Returns:
            [H, W] uint8, `NOBODY` where there is none.
        """
        if self.saturated is None:
            drawn = torch.zeros_like(self.spans)
            drawn[list(self.order)] = self.spans[list(self.order)]
            return lowest_covering(dilated(drawn, reach, self.width) if reach else drawn, self.width, device)
        label = torch.full((self.height, self.width), NOBODY, dtype=torch.uint8, device=device)
        for rank in sorted(self.order, reverse=True):
            drawn = self.drawn_by(rank, device)
            label.masked_fill_(unpack_bits(grown(pack_bits(drawn), reach), self.width) if reach else drawn, rank)
        return label

    def without(self, mask: ViewMask) -> RankRegions:
        """The regions less the saturated pixels of a mask whose partitions are ranks.

        A rank needs composed pixels only around what it still draws.
        """
        saturated = mask.bits_of(tuple(range(len(self.spans))))
        spans, needs = self.spans.clone(), self.needs.clone()
        needed = torch.full_like(saturated, 255)
        x = torch.arange(self.width, dtype=torch.int32)
        for rank in mask.partitions:
            kept = covered(spans[rank], self.width) & ~unpack_bits(saturated[rank], self.width)
            some = kept.any(dim=1)
            start = torch.where(some, torch.where(kept, x, self.width).amin(dim=1), 0)
            stop = torch.where(some, torch.where(kept, x + 1, 0).amax(dim=1), 0)
            spans[rank] = torch.stack([start, stop], dim=-1)
            needs[rank] = intersection(needs[rank], dilated(spans[rank], HALO, self.width))
            needed[rank] = grown(pack_bits(kept), HALO)
        order = tuple(rank for rank in self.order if rank not in mask.absent)
        return RankRegions(order, spans, needs, self.width, saturated, needed)

    def active(self, rank: int) -> bool:
        """Whether this rank draws or needs anything of the view."""
        return rank in self.order or bool((self.needs[rank, :, 1] > self.needs[rank, :, 0]).any())


@dataclass(frozen=True)
class Crop:
    """A rectangle of an image: rows top..bottom, columns left..right, ends excluded."""

    top: int
    bottom: int
    left: int
    right: int

    def of(self, image: Tensor) -> Tensor:
        """The crop of an image [H, W, ...] -> [h, w, ...]."""
        return image[self.top : self.bottom, self.left : self.right]

    def flat(self, pixels: Tensor, width: int) -> Tensor:
        """Where pixels [M] int64, y W + x of an image of this width, are in the flattened crop."""
        y = torch.div(pixels, width, rounding_mode="floor")
        return (y - self.top) * (self.right - self.left) + (pixels - y * width - self.left)


@dataclass(frozen=True)
class Canvas:
    """What a rank knows of a view's picture, inside a crop; valid where its need was."""

    rgb: Tensor  # [h, w, 3]
    alpha: Tensor  # [h, w]
    depth: Tensor  # [h, w], undivided
    transmittances: Tensor  # [Q, h, w], of the ranks, nearest first
    crop: Crop


def hull(spans: Tensor, width: int) -> Tensor:
    """The union of regions [L, H, 2], row by row without gaps: [H, 2]."""
    some = spans[..., 1] > spans[..., 0]  # [L, H]
    if not len(spans):
        return spans.new_zeros(spans.shape[1:])
    start = torch.where(some, spans[..., 0], width).amin(dim=0)
    stop = torch.where(some, spans[..., 1], 0).amax(dim=0)
    return torch.stack([torch.where(stop > start, start, 0), stop], dim=-1)


def intersection(a: Tensor, b: Tensor) -> Tensor:
    """Pixels in both regions, [..., H, 2]."""
    start, stop = torch.maximum(a[..., 0], b[..., 0]), torch.minimum(a[..., 1], b[..., 1])
    some = stop > start
    return torch.stack([torch.where(some, start, 0), torch.where(some, stop, 0)], dim=-1)


def dilated(spans: Tensor, reach: int, width: int) -> Tensor:
    """All pixels at most `reach` away on each axis from a region [..., H, 2], clipped to the image."""
    some = spans[..., 1] > spans[..., 0]
    start = torch.where(some, spans[..., 0] - reach, width).float()  # [..., H]
    stop = torch.where(some, spans[..., 1] + reach, 0).float()
    rows = spans.shape[-2]

    def spread(values: Tensor) -> Tensor:
        flat = values.reshape(-1, 1, rows)
        return torch.nn.functional.max_pool1d(flat, 2 * reach + 1, stride=1, padding=reach).reshape(values.shape)

    start, stop = (-spread(-start)).clamp_min(0).int(), spread(stop).clamp_max(width).int()
    some = stop > start
    return torch.stack([torch.where(some, start, 0), torch.where(some, stop, 0)], dim=-1)


def grown(bits: Tensor, reach: int) -> Tensor:
    """All pixels at most `reach` away on each axis from those of [..., H, B] uint8; bits beyond W may be set too."""
    done = 0
    while done < reach:
        step = min(done + 1, reach - done, 7)  # leaves no gap at the border, and shifts by less than a byte
        to_right, to_left = bits << step, bits >> step
        to_right[..., 1:] |= bits[..., :-1] >> 8 - step
        to_left[..., :-1] |= bits[..., 1:] << 8 - step
        bits = bits | to_right | to_left
        spread = bits.clone()
        spread[..., step:, :] |= bits[..., :-step, :]
        spread[..., :-step, :] |= bits[..., step:, :]
        bits, done = spread, done + step
    return bits


def whole(height: int, width: int) -> Tensor:
    """The region [H, 2] that holds all pixels."""
    return torch.tensor([0, width], dtype=torch.int32).repeat(height, 1)


def pixels_of(spans: Tensor, width: int, device: torch.device = CPU) -> Tensor:
    """The pixels of a region [H, 2], row by row: [M] int64, y W + x; on `device`."""
    lengths = (spans[:, 1] - spans[:, 0]).long()
    ends = lengths.cumsum(0)
    first = spans[:, 0].long() + torch.arange(len(spans)) * width - (ends - lengths)
    count = int(ends[-1]) if len(ends) else 0
    first, lengths = cuda.upload(first, device), cuda.upload(lengths, device)
    return torch.repeat_interleave(first, lengths, output_size=count) + torch.arange(count, device=device)


def covered(spans: Tensor, width: int, device: torch.device = CPU) -> Tensor:
    """A region [H, 2] as a mask [H, W] bool, on `device`."""
    x, spans = torch.arange(width, dtype=torch.int32, device=device), cuda.upload(spans, device)
    return (x >= spans[:, :1]) & (x < spans[:, 1:])


def lowest_covering(spans: Tensor, width: int, device: torch.device = CPU) -> Tensor:
    """The lowest-numbered rank whose region [R, H, 2] holds a pixel: [H, W] uint8, `NOBODY` where none does."""
    label = torch.full((spans.shape[1], width), NOBODY, dtype=torch.uint8, device=device)
    for rank in reversed(range(len(spans))):
        if bool((spans[rank, :, 1] > spans[rank, :, 0]).any()):
            label.masked_fill_(covered(spans[rank], width, device), rank)
    return label


def bounding(spans: Tensor) -> Crop | None:
    """The smallest rectangle around a region [H, 2]; None if it is empty."""
    rows = (spans[:, 1] > spans[:, 0]).nonzero().flatten()
    if not len(rows):
        return None
    some = spans[rows]
    return Crop(int(rows[0]), int(rows[-1]) + 1, int(some[:, 0].min()), int(some[:, 1].max()))


def rank_regions(plan: ViewPlan, runs: list[range], width: int, halo: int | None) -> RankRegions:
    """Regions of ranks from those of partitions.

    Args:
        plan: Of the view, for all partitions.
        runs: The partitions of each rank.
        width: W.
        halo: How far around what it draws a rank needs composed pixels; None: every rank needs the whole picture.
    """
    rank_of = {leaf: rank for rank, run in enumerate(runs) for leaf in run}
    order = tuple(dict.fromkeys(rank_of[leaf] for leaf in plan.order))
    spans = torch.stack([hull(plan.spans[run.start : run.stop], width) for run in runs])
    if halo is None:
        needs = whole(plan.spans.shape[1], width).expand_as(spans)
    else:
        needs = dilated(spans, halo, width)
    return RankRegions(order, spans, needs, width)


def merged(partials: PartialImages) -> PartialImages:
    """The partial images of one rank's partitions, front to back, as one: a rank's union is convex too."""
    if len(partials.transmittances) == 1:
        return partials
    rgb, depth, alpha = compose(partials, torch.zeros(3, device=partials.colors.device))
    return PartialImages(rgb[None], depth[None], 1.0 - alpha[None])


# Streams


def send_pixels(
    world: World,
    regions: RankRegions,
    own: PartialImages | None,
    tag: Tag,
    with_depth: bool,
    half: bool,
    active: bool,
    device: torch.device = CPU,
) -> tuple[PixelSwap, dict[int, Tensor], dict[int, Tensor]]:
    """Start swapping a view's pixels.

    Args:
        own: What this rank draws, one partial image; None if it draws nothing.
        with_depth: Send depths too; a pixel has 5 numbers then, else 4.
        half: As float16.
        active: Leave out empty pixels.
        device: Where pictures are.

    Returns:
        The swap, the pixels [M] that it brings by source, and those that it takes by destination.
    """
    sends, sent, streams = {}, {}, {}
    channels = 5 if with_depth else 4
    if own is not None and cuda.on_gpu(own.colors):
        for target in range(world.size):
            pixels = None if target == world.rank else regions.stream(world.rank, target, device)
            if pixels is not None and len(pixels):
                sent[target], sends[target] = pixels, _packed(own, regions, world.rank, target, pixels, with_depth)
    elif own is not None:
        parts = [own.colors[0], own.transmittances[0, ..., None]] + ([own.depths[0, ..., None]] if with_depth else [])
        packed = torch.cat([part.detach() for part in parts], dim=-1).reshape(-1, channels)
        for target in range(world.size):
            pixels = regions.stream(world.rank, target) if target != world.rank else packed.new_zeros(0).long()
            if len(pixels):
                sent[target], sends[target] = pixels, packed.index_select(0, pixels)
    for source in regions.order:
        if source != world.rank and len(pixels := regions.stream(source, world.rank, device)):
            streams[source] = pixels
    counts = {source: len(pixels) for source, pixels in streams.items()}
    return PixelSwap(world, tag, "pixels", sends, counts, channels, half, active, device), streams, sent


def _packed(
    own: PartialImages, regions: RankRegions, source: int, target: int, pixels: Tensor, with_depth: bool
) -> Tensor:
    """The values [M, 4 | 5] of a stream from a GPU's partial image, by a kernel where the stream is a region."""
    if type(regions) is RankRegions and regions.saturated is None:
        region = cuda.Region(intersection(regions.spans[source], regions.needs[target]), regions.width)
        return cuda.pack_pixels(own.colors[0], own.depths[0], own.transmittances[0], region, with_depth)
    parts = [own.colors[0].reshape(-1, 3), own.transmittances[0].reshape(-1, 1)]
    parts += [own.depths[0].reshape(-1, 1)] if with_depth else []
    return torch.cat([part.detach().index_select(0, pixels) for part in parts], dim=1)


def stacked_layers(
    world: World,
    regions: RankRegions,
    own: PartialImages | None,
    values: dict[int, Tensor],
    streams: dict[int, Tensor],
    crop: Crop,
    device: torch.device = CPU,
) -> PartialImages:
    """The ranks' partial images inside a crop, front to back: [Q, h, w]; empty where nothing has come.

    Args:
        own: What this rank draws.
        values: What has come, by source, colour, transmittance and perhaps depth.  # [M, 4 | 5]
        streams: The pixels that it belongs to.  # [M]
        device: Where pictures are.
    """
    height, width = crop.bottom - crop.top, crop.right - crop.left
    layers: list[tuple[Tensor, Tensor, Tensor]] = []
    for rank in regions.order:
        if rank == world.rank and own is not None:
            layers.append((crop.of(own.colors[0]), crop.of(own.depths[0]), crop.of(own.transmittances[0])))
            continue
        layer = torch.zeros(height * width, 5, device=device)
        layer[:, 3] = 1.0
        if rank in values:
            layer[crop.flat(streams[rank], regions.width), : values[rank].shape[1]] = values[rank]
        picture = layer.view(height, width, 5)
        layers.append((picture[..., :3], picture[..., 4], picture[..., 3]))
    if not layers:
        nothing = torch.zeros(0, height, width, device=device)
        return PartialImages(torch.zeros(0, height, width, 3, device=device), nothing, nothing.clone())
    colors, depths, transmittances = (torch.stack(part) for part in zip(*layers, strict=True))
    return PartialImages(colors, depths, transmittances)


def compose_canvas(
    world: World,
    regions: RankRegions,
    own: PartialImages | None,
    values: dict[int, Tensor],
    streams: dict[int, Tensor],
    background: Tensor,
    crop: Crop,
) -> Canvas:
    """Put the ranks' pixels in order and compose them (paper, Eq. 4-6); gradients flow to `own` only."""
    layers = stacked_layers(world, regions, own, values, streams, crop, background.device)
    rgb, depth, alpha = compose(layers, background)
    return Canvas(rgb, alpha, depth, layers.transmittances.detach(), crop)


# The loss


def loss_share(regions: RankRegions, rank: int, crop: Crop, device: torch.device = CPU) -> LossShare:
    """Which pixels and windows of the loss `rank` counts; over the ranks every one is counted once.

    A pixel is counted by the lowest-numbered rank that composes it; a window by the lowest-numbered rank that composes
    something at most five pixels from its centre, for that rank has all its pixels. What is left shows background
    only and is counted by the rank of `counts_rest`.
    """
    border = SSIM_WINDOW // 2
    rest = counts_rest(regions)
    labels = []
    for reach in (0, border):
        label = regions.lowest_composing(reach, device)
        labels.append(crop.of(torch.where(label == NOBODY, rest, label)) == rank)
    pixels, centers = (label.float() for label in labels)
    return LossShare(
        pixels.contiguous(), centers[border:-border, border:-border].contiguous(), regions.height, regions.width
    )


def counts_rest(regions: RankRegions) -> int:
    """The rank that counts the pixels nobody draws."""
    return min(regions.order, default=0)


def crop_for(regions: RankRegions, rank: int) -> Crop | None:
    """The rectangle in which `rank` composes; the whole image where it counts pixels that nobody draws."""
    if rank == counts_rest(regions):
        if bool((regions.lowest_composing() == NOBODY).any()):
            return Crop(0, regions.height, 0, regions.width)
    return bounding(regions.needs[rank])
