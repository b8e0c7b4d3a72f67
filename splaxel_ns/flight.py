"""One view drawn by all ranks together: project, draw, swap pixels, compose, and bring gradients home.

A flight begins when this rank has drawn its part and its pixels are on their way, and is finished when those of the
others have arrived; between the two the next view can begin. All ranks begin, finish and settle the same flights in
the same order, also those they have no part in.

Shapes: R ranks, P partitions, N Gaussians of this rank, M visitors, Q ranks that draw a view, H x W pixels.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import get_args

import torch
from torch import Tensor

from splaxel_ns import cuda
from splaxel_ns.comm import World
from splaxel_ns.exchange import (
    HALO,
    NOBODY,
    Canvas,
    Crop,
    RankRegions,
    compose_canvas,
    counts_rest,
    covered,
    crop_for,
    dilated,
    loss_share,
    merged,
    rank_regions,
    send_pixels,
    whole,
)
from splaxel_ns.owner_exchange import OwnerRegions, compose_owned, return_gradients, with_owners
from splaxel_ns.partition import PartitionTree
from splaxel_ns.pixel_streams import PixelSwap, Tag
from splaxel_ns.render import Gaussians, Partitions, RenderOptions, draw_partials, project_view
from splaxel_ns.saturation import ViewMask
from splaxel_ns.splat_exchange import (
    FIELDS,
    Visitors,
    concatenated,
    cut_off,
    straddlers,
    strip_of,
    swap_splats,
    touching_strips,
)
from splaxel_ns.types import ContentBoxes, Exchange, PartialImages, Splats, View, ViewPlan
from splaxel_ns.visibility import met_by, plan_view, spans_of


@dataclass
class Flight:
    """A view under way."""

    view: View
    plan: ViewPlan  # of all partitions
    regions: RankRegions
    tag: Tag
    crop: Crop | None  # in which this rank composes; None: it has no part in the picture
    options: RenderOptions
    everything: bool
    mask: ViewMask | None  # what of it the ranks leave out
    spans: Tensor  # [R, H, 2] int32, what each rank would draw without the mask
    splats: Splats | None = None  # of this rank's Gaussians, with their graph
    cut: Splats | None = None  # the same, where the pixels' graph ends
    visitors: Visitors | None = None
    drawn: Splats | None = None  # what was drawn: `cut` and the visitors
    own: PartialImages | None = None  # this rank's part of the picture
    stats: cuda.RasterStats | None = None
    pending: PixelSwap | None = None
    streams: dict[int, Tensor] = field(default_factory=dict)  # pixels [M] that come, by source
    sent: dict[int, Tensor] = field(default_factory=dict)  # pixels [M] that go, by destination
    leaves: PartialImages | None = None  # exchange owner: of all ranks inside the crop, where the loss's graph ends
    learns: bool = False  # gradients are wanted
    means2d: Tensor | None = None  # [N, 2], with `grad` and `absgrad` once settled
    device: torch.device = torch.device("cpu")  # where Gaussians and pictures are

    def share(self, rank: int) -> cuda.LossShare:
        """What of the view's loss this rank counts; only for a rank with a crop."""
        assert self.crop is not None
        return loss_share(self.regions, rank, self.crop, self.device)


@dataclass
class Times:
    """Seconds of this rank, by what it did, since they were taken last; the host's, which a GPU lags behind."""

    render: float = 0.0
    compose: float = 0.0
    backward: float = 0.0
    active_pixels: int = 0
    """Pixels of the regions that this rank drew."""
    views: int = 0
    """Views that it drew a part of."""


class RankRenderer:
    """Draws views together with the other ranks.

    Args:
        world: The ranks.
        exchange: What they swap.
        half: Whether pixels travel as float16.
        active: Whether empty pixels stay at home.
        rest_sees_all: Whether the rank that counts the pixels nobody draws needs the gradients of these too (they
            reach a bilateral grid), and so the whole picture.
    """

    def __init__(
        self,
        world: World,
        exchange: Exchange,
        half: bool = False,
        active: bool = False,
        rest_sees_all: bool = False,
    ) -> None:
        if exchange not in get_args(Exchange):
            raise ValueError(f"exchange is {exchange!r}; it must be one of {', '.join(get_args(Exchange))}")
        self.world = world
        self.exchange = exchange
        self.half = half
        self.active = active
        self.rest_sees_all = rest_sees_all
        self.times = Times()
        self._announced: deque[PixelSwap] = deque()  # of which only the bits are known to be on their way

    def take_numbers(self) -> dict[str, float]:
        """`times` since the last call, by name."""
        taken, self.times = self.times, Times()
        return {
            "render_s": taken.render,
            "compose_s": taken.compose,
            "backward_s": taken.backward,
            "active_pixels": taken.active_pixels,
            "participants": taken.views,
        }

    def gather_boxes(self, boxes: ContentBoxes, runs: list[range]) -> ContentBoxes:
        """The content boxes of all partitions from each rank's own. Every rank calls this at the same moment.

        Raises:
            LostRank: A peer is gone.
        """
        packed = torch.cat([boxes.bounds.flatten(2), boxes.radii[..., None]], dim=-1)  # [P, S, 7]
        everyone = self.world.gather(packed, "boxes")  # [R, P, S, 7]
        own = torch.cat([everyone[rank, run.start : run.stop] for rank, run in enumerate(runs)])
        return replace(boxes, bounds=own[..., :6].unflatten(-1, (2, 3)).contiguous(), radii=own[..., 6].contiguous())

    # A flight

    def begin(
        self,
        gaussians: Gaussians,
        view: View,
        partitions: Partitions,
        runs: list[range],
        options: RenderOptions,
        tag: Tag,
        mask: ViewMask | None = None,
        everything: bool = False,
    ) -> Flight:
        """Draw this rank's part of a view and start swapping.

        Args:
            gaussians: N Gaussians of this rank.
            view: The camera, the same on all ranks.
            partitions: Boxes of all partitions, owners of these Gaussians.
            runs: The partitions of each rank.
            options: How to draw.
            tag: Which view this is.
            mask: Saturated pixels of the ranks.
            everything: Every rank is to have the whole picture, as for evaluation.

        Raises:
            LostRank: A peer is gone.
        """
        while self._announced:  # so that their values travel while this view is drawn
            self._announced.popleft().post()
        start = perf_counter()
        visits = self.exchange == "gaussian" or options.boundary == "exact"
        plan, splats = self._look(gaussians, view, partitions, runs, options, visits)
        flight = self._plan(plan, view, partitions, runs, options, tag, mask, everything)
        flight.device = gaussians.means.device
        takes_part = self.world.rank in flight.regions.order
        if splats is not None and (takes_part or visits):
            flight.splats = splats
            flight.cut = flight.drawn = cut_off(splats)
            flight.means2d = flight.cut.means2d
        means, owner = gaussians.means.detach(), partitions.owner
        if visits:
            assert flight.cut is not None
            waited = self.world.counters.wait_s
            flight.visitors = swap_splats(self.world, flight.cut, self._wanted(flight, means, partitions, runs), view)
            start += self.world.counters.wait_s - waited
            flight.drawn = concatenated(flight.cut, flight.visitors.splats)
            means = torch.cat([means, flight.visitors.means])
            first = torch.tensor([run.start for run in runs] if self.exchange != "gaussian" else [0] * self.world.size)
            owner = torch.cat([owner, cuda.upload(first, owner.device)[flight.visitors.source].int()])
        if takes_part:
            plan, tree = self._to_draw(flight, partitions.tree, runs)
            if plan.order:
                assert flight.drawn is not None
                partials, flight.stats = draw_partials(flight.drawn, means, owner, view, tree, plan, options)
                flight.own = merged(partials)
            else:  # dense: the others wait for pixels of every rank
                flight.own = _nothing(view, flight.device)
            spans = flight.regions.spans[self.world.rank]
            self.times.active_pixels += int((spans[:, 1] - spans[:, 0]).sum())
            self.times.views += 1
        self.times.render += perf_counter() - start
        if self.exchange != "gaussian" or everything:
            flight.pending, flight.streams, flight.sent = send_pixels(
                self.world,
                flight.regions,
                flight.own,
                tag,
                with_depth=everything,
                half=self.half and not everything,
                active=self.active and not everything,
                device=flight.device,
            )
            if self.active and not everything:
                self._announced.append(flight.pending)
        return flight

    def finish(self, flight: Flight, background: Tensor) -> Canvas | None:
        """Wait for the pixels of the others and compose; None for a rank that has no part in the picture.

        Raises:
            LostRank: A peer is gone.
            Disagreement: A peer sent another view.
        """
        values = {} if flight.pending is None else flight.pending.wait()
        regions = flight.regions
        if isinstance(regions, OwnerRegions):
            return self._finish_owned(flight, regions, values, background)
        if flight.crop is None:
            return None
        start = perf_counter()
        if flight.pending is None:  # strips: what this rank has drawn is all that it needs
            regions = replace(regions, order=tuple(rank for rank in regions.order if rank == self.world.rank))
        canvas = compose_canvas(self.world, regions, flight.own, values, flight.streams, background, flight.crop)
        if flight.pending is None and torch.is_grad_enabled():
            # The rows around the strip are there for the loss; their own gradients are other ranks' business.
            strip = flight.crop.of(covered(regions.spans[self.world.rank], regions.width, flight.device))[..., None]
            canvas = replace(canvas, rgb=torch.where(strip, canvas.rgb, canvas.rgb.detach()))
        self.times.compose += perf_counter() - start
        return canvas

    def _finish_owned(
        self, flight: Flight, regions: OwnerRegions, values: dict[int, Tensor], background: Tensor
    ) -> Canvas | None:
        start, waited = perf_counter(), self.world.counters.wait_s
        composed = compose_owned(
            self.world,
            regions,
            flight.own,
            values,
            flight.streams,
            flight.tag,
            self.half,
            background,
            flight.crop,
        )
        self.times.compose += perf_counter() - start - (self.world.counters.wait_s - waited)
        if composed is None:
            return None
        canvas, flight.leaves = composed
        return canvas

    def settle(self, flight: Flight) -> None:
        """After the loss's backward pass: add the gradients that other ranks found, and carry them to the Gaussians.

        Raises:
            LostRank: A peer is gone.
        """
        start = perf_counter()
        if isinstance(flight.regions, OwnerRegions) and flight.learns:
            assert flight.pending is not None
            waited = self.world.counters.wait_s
            return_gradients(
                self.world,
                flight.regions,
                flight.own,
                flight.leaves,
                flight.crop,
                flight.pending,
                flight.streams,
                flight.sent,
                flight.tag,
                flight.device,
            )
            start += self.world.counters.wait_s - waited
        if flight.splats is None or flight.cut is None:
            return
        cut, num = flight.cut, len(flight.cut.depths)
        grads = {
            name: torch.zeros_like(getattr(cut, name)) if getattr(cut, name).grad is None else getattr(cut, name).grad
            for name, _ in FIELDS
        }
        absgrad = getattr(flight.drawn.means2d, "absgrad", None) if flight.drawn is not None else None
        own_absgrad = torch.zeros(num, 2, device=flight.device) if absgrad is None else absgrad[:num].clone()
        if flight.visitors is not None:
            visiting = None
            if flight.options.absgrad:
                size = (sum(flight.visitors.counts), 2)
                visiting = torch.zeros(size, device=flight.device) if absgrad is None else absgrad[num:]
            waited = self.world.counters.wait_s
            for rows, returned in flight.visitors.send_back(self.world, visiting):
                for (name, size), part in zip(FIELDS, returned[:, :10].split([s for _, s in FIELDS], 1), strict=True):
                    grads[name].index_add_(0, rows, part.squeeze(1) if size == 1 else part)
                if flight.options.absgrad:
                    own_absgrad.index_add_(0, rows, returned[:, 10:])
            start += self.world.counters.wait_s - waited
        outputs = [(getattr(flight.splats, name), grads[name]) for name, _ in FIELDS]
        outputs = [(value, grad) for value, grad in outputs if value.requires_grad]
        if outputs:
            torch.autograd.backward([value for value, _ in outputs], [grad for _, grad in outputs])
        cut.means2d.grad = grads["means2d"]
        cut.means2d.absgrad = own_absgrad  # type: ignore[attr-defined]
        self.times.backward += perf_counter() - start

    # Parts of it

    def _look(
        self,
        gaussians: Gaussians,
        view: View,
        partitions: Partitions,
        runs: list[range],
        options: RenderOptions,
        visits: bool,
    ) -> tuple[ViewPlan, Splats | None]:
        """Regions of all partitions, and this rank's splats where it has any to show."""
        if self.exchange == "gaussian":
            return ViewPlan((0,), torch.zeros(1, view.height, 2, dtype=torch.int32)), project_view(
                gaussians, view, options
            )
        plan = plan_view(view, partitions.tree, partitions.boxes, options.near)
        run = runs[self.world.rank]
        looks = visits or any(leaf in run for leaf in plan.order)
        splats = project_view(gaussians, view, options) if looks else None
        if options.boundary == "exact":
            return plan, splats
        # Each rank knows where its splats end, which boxes tell only roughly.
        longest = max(len(other) for other in runs)
        kind = torch.int16 if view.width < 2**15 else torch.int32
        own = torch.zeros(longest, view.height, 2, dtype=kind)
        if splats is not None:
            own[: len(run)] = spans_of(splats, partitions.owner, plan, view.width)[run.start : run.stop]
        # As bytes: Gloo knows no int16.
        everyone = self.world.gather(own.view(torch.uint8), "regions").view(kind).int()  # [R, longest, H, 2]
        return met_by(plan, torch.cat([everyone[k, : len(other)] for k, other in enumerate(runs)])), splats

    def _plan(
        self,
        plan: ViewPlan,
        view: View,
        partitions: Partitions,
        runs: list[range],
        options: RenderOptions,
        tag: Tag,
        mask: ViewMask | None,
        everything: bool,
    ) -> Flight:
        rank, size = self.world.rank, self.world.size
        if self.exchange == "gaussian":
            strips = torch.zeros(size, view.height, 2, dtype=torch.int32)
            for other in range(size):
                first, last = strip_of(other, size, view.height)
                strips[other, first:last, 1] = view.width
            order = tuple(other for other in range(size) if bool((strips[other, :, 1] > 0).any()))
            needs = (
                whole(view.height, view.width).expand_as(strips) if everything else dilated(strips, HALO, view.width)
            )
            regions = RankRegions(order, strips, needs, view.width)
        else:
            regions = rank_regions(plan, runs, view.width, None if everything else HALO)
            if self.exchange == "dense" and not everything:
                full = whole(view.height, view.width).expand(size, -1, -1)
                rank_of = {leaf: other for other, run in enumerate(runs) for leaf in run}
                order = tuple(dict.fromkeys(rank_of[leaf] for leaf in partitions.tree.order(view.cam_center.detach())))
                regions = RankRegions(order, full, full, view.width)
        spans = regions.spans
        if mask is not None:
            regions = regions.without(mask)
        if self.rest_sees_all and bool((regions.lowest_composing() == NOBODY).any()):
            rest, needs, needed = counts_rest(regions), regions.needs.clone(), regions.needed
            needs[rest] = whole(view.height, view.width)
            if needed is not None:
                needed = needed.clone()
                needed[rest] = 255
            regions = replace(regions, needs=needs, needed=needed)
        if self.exchange == "owner" and not everything:
            regions = with_owners(regions, 8 if self.half else 16)
        crop = crop_for(regions, rank)
        learns = torch.is_grad_enabled()
        return Flight(view, plan, regions, tag, crop, options, everything, mask, spans, learns=learns)

    def _to_draw(self, flight: Flight, tree: PartitionTree, runs: list[range]) -> tuple[ViewPlan, PartitionTree]:
        """What of the plan falls to this rank."""
        rank = self.world.rank
        if self.exchange == "gaussian":
            spans = flight.regions.spans if flight.everything else flight.regions.needs
            return ViewPlan((0,), spans[rank : rank + 1].contiguous()), _ONE_BOX
        run = runs[rank]
        order = tuple(leaf for leaf in flight.plan.order if leaf in run)
        saturated = flight.regions.saturated
        if saturated is not None:
            saturated = saturated[rank][None].expand(len(order), -1, -1).contiguous()
        return replace(flight.plan, order=order, saturated=saturated), tree

    def _wanted(self, flight: Flight, means: Tensor, partitions: Partitions, runs: list[range]) -> Tensor:
        """Which of this rank's splats [N] the others draw too: [R, N] bool."""
        assert flight.cut is not None
        if self.exchange == "gaussian":
            halo = 0 if flight.everything else HALO
            wanted = touching_strips(flight.cut, self.world.size, flight.view.height, halo)
        else:
            wanted = straddlers(flight.cut, means, flight.view, partitions.tree, runs)
            drawing = [rank in flight.regions.order for rank in range(self.world.size)]
            wanted &= cuda.upload(torch.tensor(drawing), wanted.device)[:, None]
        wanted[self.world.rank] = False
        return wanted


def _nothing(view: View, device: torch.device) -> PartialImages:
    """The partial image of a rank without Gaussians in view."""
    height, width = view.height, view.width
    colors = torch.zeros(1, height, width, 3, device=device)
    return PartialImages(colors, torch.zeros_like(colors[..., 0]), torch.ones_like(colors[..., 0]))


_ONE_BOX = PartitionTree.build(torch.zeros(0, 3), 1)
