"""Saturated pixels of views that several ranks draw: who decides them, and how all ranks come to hold the same masks.

As `saturation.py`, with ranks in the place of partitions: a rank sends one partial image, and what lies behind it is
left out by whole ranks. A pixel is decided once per visit, from the transmittances as sent, by the lowest-numbered rank
that draws it: it has those of all others. What ranks decide stays with them until the next snapshot, where they swap
what changed and all end with the same masks (design 5).

Shapes: R ranks, Q of them that draw a view, K of them with a region or pruned pixels in it, H x W pixels,
B = ceil(W / 8) bytes of a row of bits, M pruned pairs, C changes of a rank.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from splaxel_ns import cuda
from splaxel_ns.comm import Disagreement, World
from splaxel_ns.cuda.saturation import pack_bits, unpack_bits
from splaxel_ns.exchange import Canvas, RankRegions, covered
from splaxel_ns.flight import Flight
from splaxel_ns.partition import PartitionTree
from splaxel_ns.saturation import PairCounts, SaturationMasks, ViewMask, in_order
from splaxel_ns.types import View

KIND = "saturation"
"""What the counters of `comm` call the swaps."""


@dataclass(frozen=True)
class Change:
    """What one rank decided anew about the pixels of one rank in one view."""

    bits: Tensor  # [H, B] uint8, the pixels whose bit in force is turned
    budgets: Tensor  # uint8, one per bit that is turned on, row by row


@dataclass
class Visit:
    """The last visit of a view since the snapshot; alike on all ranks but for what this one decided."""

    view: View
    base: ViewMask | None  # in force at the visit
    pairs: list[int]  # R, pixels in the region of each rank
    changes: dict[int, Change] = field(default_factory=dict)  # by rank whose pixels they are
    full: bool = False  # no room for the changes: the view is to be drawn in full

    @property
    def num_bytes(self) -> int:
        """Memory of what this rank decided."""
        return sum(change.bits.nbytes + change.budgets.nbytes for change in self.changes.values())


class RankSaturationMasks(SaturationMasks):
    """The masks of all training views, the same on every rank; their partitions are ranks.

    Memory per rank: the masks of all views, at most `limit` bytes, and within what they leave of it the rank's own
    decisions since the last snapshot. A view for which one of the ranks, or the merged masks, have no room stays
    unmasked on all. While ranks swap, their messages come on top, and the new masks beside the old ones.

    Every rank calls `mask_of`, `update_together`, `absent`, `take_snapshot`, `drop` and `state_dict` for the same views
    at the same moments; only `take_snapshot` and `state_dict` communicate.

    Args:
        eps: As for `SaturationMasks`.
        limit: Bytes, the same on all ranks.
        world: The ranks.
    """

    unit = "rank"

    def __init__(self, eps: float, limit: int, world: World) -> None:
        super().__init__(eps, limit)
        self.num_ranks = world.size
        self._world = world
        self._visits: dict[int, Visit] = {}
        self._waiting_bytes = 0
        self._checksum = 0  # of all changes of masks so far

    def update_together(
        self, index: int, flight: Flight, canvas: Canvas | None, tree: PartitionTree, runs: list[range]
    ) -> None:
        """Take what a visit of training view `index` shows; it counts from the next snapshot on.

        Args:
            flight: Of the view, with the mask of `mask_of`.
            canvas: What this rank composed of it, None if nothing.
            tree: The boxes.
            runs: The partitions of each rank.
        """
        view, regions, spans = flight.view, flight.regions, flight.spans
        mask = self.mask_of(index, view, tree)
        if mask is not flight.mask:  # dropped while the view was under way
            return
        pairs = (spans[..., 1] - spans[..., 0]).sum(dim=1).tolist()
        concerned = {rank for rank, count in enumerate(pairs) if count} | set(() if mask is None else mask.partitions)
        rank_of = {leaf: rank for rank, run in enumerate(runs) for leaf in run}
        front_to_back = dict.fromkeys(rank_of[leaf] for leaf in tree.order(view.cam_center.detach()))
        order = tuple(rank for rank in front_to_back if rank in concerned)
        if not order:  # nobody is in view
            self._keep_visit(index, Visit(view_without_graph(view), mask, pairs))
            return
        old_bits, old_budgets = in_order(mask, order, view)
        transmittances, drawn = _whole_transmittances(canvas, regions)
        slots = torch.tensor([drawn.index(rank) if rank in drawn else -1 for rank in order], dtype=torch.int32)
        bits, budgets, counts = cuda.update_saturation(
            transmittances, slots, spans[list(order)], old_bits, old_budgets, self.eps
        )
        decided = decided_by(self._world.rank, regions, spans)
        visit = Visit(view_without_graph(view), mask, pairs)
        turned = (bits ^ old_bits) & pack_bits(decided)  # [K, H, B]
        parts = budgets.split((counts.pairs - counts.left).tolist())  # K x [M]
        for slot, rank in enumerate(order):
            if bool(turned[slot].any()):
                pruned = unpack_bits(bits[slot], view.width)  # [H, W]
                fresh = unpack_bits(turned[slot], view.width)[pruned]
                visit.changes[rank] = Change(turned[slot].clone(), parts[slot][fresh])
            self._count(spans[rank], decided, old_bits[slot], bits[slot], view.width)
        self._keep_visit(index, visit)

    def take_snapshot(self, images: int) -> None:
        """Swap what the ranks decided since the last snapshot, and put it in force on all of them.

        Raises:
            Disagreement: The ranks visited other views or end with other masks.
            LostRank: A peer is gone.
        """
        messages = self._swap(images)
        resumed, self._next = self._next, {}
        for index, mask in resumed.items():
            if mask is not None and mask is not self._masks.get(index):
                self.num_bytes -= mask.num_bytes
        for index in {*resumed, *self._visits}:
            old = self._masks.pop(index, None)
            self.num_bytes -= 0 if old is None else old.num_bytes
        no_room = any(len(message["full"]) for message in messages)
        for index, mask in chain(sorted(resumed.items()), self._merge(messages)):
            if mask is not None and self.num_bytes + mask.num_bytes > self.limit:
                no_room = True
            elif mask is not None:
                self._masks[index] = mask
                self.num_bytes += mask.num_bytes
            self._checksum = _checksum(self._masks.get(index), self._checksum)
        if no_room:
            self._say_full()
        self._visits = {}
        self._waiting_bytes = 0
        self.version += 1
        self._snapshot_images = images
        counts = _counts_of(messages)
        if counts.pairs:
            self.last_epoch, self.now = counts, PairCounts()
        self._require_same("masks", self._checksum, self.version, len(self._masks), self.num_bytes)

    def drop(self) -> None:
        """Forget all masks, and what was decided since the last snapshot."""
        super().drop()
        self._visits, self._waiting_bytes = {}, 0

    def metrics(self) -> dict[str, float]:
        """Shares for the log: of all ranks' visits between the two last snapshots, the same on all ranks."""
        counts = self.last_epoch
        return {"saturation_pruned": counts.pruned_share, "saturation_flip_rate": counts.flip_rate}

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values from which `load_state_dict` continues, on any of the ranks.

        Every rank calls this at the same moment: what waits for the next snapshot is swapped and merged for the state,
        but put in force no earlier than without it.

        Raises:
            Disagreement: The ranks visited other views.
            LostRank: A peer is gone.
        """
        messages = self._swap(self._snapshot_images)
        resumed = self._next
        self._next = resumed | dict(self._merge(messages))
        try:
            return super().state_dict() | {"now": vars(_counts_of(messages))}
        finally:
            self._next = resumed

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called. Masks found with another eps or by other ranks are left out.

        Raises:
            KeyError, RuntimeError, TypeError: The state is damaged.
        """
        super().load_state_dict(state)
        if not self._world.is_main:  # they are the sums of all ranks
            self.now = PairCounts()
        self._checksum = 0
        for by_index in (self._masks, self._next):
            for index in sorted(by_index):
                self._checksum = _checksum(by_index[index], self._checksum)

    # Parts of it

    def _count(self, spans: Tensor, decided: Tensor, before: Tensor, after: Tensor, width: int) -> None:
        """Add up the pairs of one rank: region [H, 2], pixels decided here [H, W], bits [H, B] before and after."""
        own = covered(spans, width) & decided
        self.now.pairs += int(own.sum())
        if bool(before.any()):
            own &= unpack_bits(before, width)
            self.now.pruned += int(own.sum())
            self.now.flipped += int((own & ~unpack_bits(after, width)).sum())

    def _keep_visit(self, index: int, visit: Visit) -> None:
        self._forget_waiting(index)
        if self.num_bytes + self._waiting_bytes + visit.num_bytes > self.limit:
            visit = replace(visit, changes={}, full=True)
        self._visits[index] = visit
        self._waiting_bytes += visit.num_bytes

    def _forget_waiting(self, index: int) -> None:
        super()._forget_waiting(index)  # from a checkpoint
        visit = self._visits.pop(index, None)
        self._waiting_bytes -= 0 if visit is None else visit.num_bytes

    def _say_full(self) -> None:
        if self._world.is_main:
            super()._say_full()

    def _swap(self, images: int) -> list[dict[str, Tensor]]:
        """What each rank decided: R messages, this rank's among them."""
        visits = sorted(self._visits.items())
        entries = [(index, rank, change) for index, visit in visits for rank, change in visit.changes.items()]
        nothing = torch.zeros(0, dtype=torch.uint8)
        message = {
            "counts": torch.tensor([self.now.pairs, self.now.pruned, self.now.flipped]),
            "full": torch.tensor([index for index, visit in visits if visit.full], dtype=torch.int64),
            # View, rank, number of budgets.
            "entries": torch.tensor([(i, rank, len(c.budgets)) for i, rank, c in entries]).view(-1, 3).long(),  # [C, 3]
            "bits": torch.cat([nothing, *(change.bits.flatten() for _, _, change in entries)]),
            "budgets": torch.cat([nothing, *(change.budgets for _, _, change in entries)]),
        }
        visited = zlib.crc32(torch.tensor([index for index, _ in visits], dtype=torch.int64).numpy().data)
        self._require_same("views", visited, self.version, len(visits), images)
        buffer = io.BytesIO()
        torch.save(message, buffer)
        packed = torch.frombuffer(bytearray(zlib.compress(buffer.getvalue(), 1)), dtype=torch.uint8)
        return [
            torch.load(io.BytesIO(zlib.decompress(part.numpy().data)), weights_only=True)
            for part in self._world.gather_uneven(packed, KIND)
        ]

    def _merge(self, messages: list[dict[str, Tensor]]) -> Iterator[tuple[int, ViewMask | None]]:
        """The views visited since the last snapshot, ascending, and their masks after what all ranks decided."""
        changes = [_changes_of(message, self._visits) for message in messages]
        full = {index for message in messages for index in message["full"].tolist()}
        for index, visit in sorted(self._visits.items()):
            parts = [part.get(index, {}) for part in changes]
            yield index, None if index in full else _merged(visit, parts)

    def _require_same(self, what: str, *numbers: int) -> None:
        """All ranks must come with the same numbers.

        Raises:
            Disagreement: They do not.
        """
        everyone = self._world.gather(torch.tensor(numbers), KIND).tolist()
        for rank, said in enumerate(everyone):
            if said != everyone[0]:
                raise Disagreement(
                    f"Ranks 0 and {rank} do not have the same {what} at saturation snapshot {self.version} "
                    f"({everyone[0]} and {said}): the ranks have come apart. Continue from the last checkpoint with "
                    "--resume auto, and report this."
                )


def decided_by(rank: int, regions: RankRegions, spans: Tensor) -> Tensor:
    """The pixels [H, W] bool whose bits `rank` decides; over the ranks every pixel of the image is decided once.

    The lowest-numbered rank that draws a pixel decides it. Where none draws any more, since Gaussians have moved, but
    some rank's bit says that it is hidden, nothing need be known: the lowest-numbered rank whose region it is in.

    Args:
        regions: As drawn, without the saturated pixels.
        spans: What each rank would draw without a mask.  # [R, H, 2]
    """
    height, width = regions.height, regions.width
    rest = torch.ones(height, width, dtype=torch.bool)
    mine = torch.zeros(height, width, dtype=torch.bool)
    for other in sorted(regions.order):
        draws = regions.composed_by(other) & rest
        if other == rank:
            mine |= draws
        rest &= ~draws
    for other in range(len(spans)):
        covers = covered(spans[other], width) & rest
        if other == rank:
            mine |= covers
        rest &= ~covers
    return mine | rest if rank == 0 else mine


def view_without_graph(view: View) -> View:
    """The view with tensors of its own."""
    return replace(view, world_to_cam=view.world_to_cam.detach().clone(), K=view.K.detach().clone())


def _whole_transmittances(canvas: Canvas | None, regions: RankRegions) -> tuple[Tensor, tuple[int, ...]]:
    """Transmittances [Q, H, W] of the ranks that draw, front to back, 1 beyond the crop; and which ranks they are."""
    if canvas is None:
        return torch.ones(0, regions.height, regions.width), ()
    passed = canvas.transmittances
    whole = torch.ones(len(regions.order), regions.height, regions.width, device=passed.device)
    for layer, part in zip(whole, passed, strict=True):
        canvas.crop.of(layer).copy_(part)
    return whole, regions.order


def _changes_of(message: Mapping[str, Tensor], visits: Mapping[int, Visit]) -> dict[int, dict[int, Change]]:
    """What a message says, by view and rank."""
    entries = message["entries"].tolist()
    shapes = [(visits[i].view.height, (visits[i].view.width + 7) // 8) for i, _, _ in entries]
    all_bits = message["bits"].split([height * octets for height, octets in shapes] or [0])
    all_budgets = message["budgets"].split([count for _, _, count in entries] or [0])
    changes: dict[int, dict[int, Change]] = {}
    for (index, rank, _), shape, bits, budgets in zip(entries, shapes, all_bits, all_budgets, strict=False):
        changes.setdefault(index, {})[rank] = Change(bits.view(shape), budgets)
    return changes


def _merged(visit: Visit, parts: list[dict[int, Change]]) -> ViewMask | None:
    """The mask of a view after the changes of all ranks, each by the rank whose pixels they are."""
    view, base = visit.view, visit.base
    shape = (view.height, (view.width + 7) // 8)
    known = () if base is None else base.partitions
    ranks, all_bits, all_budgets, absent = [], [], [], []
    for rank, num_pairs in enumerate(visit.pairs):
        changes = [part[rank] for part in parts if rank in part]
        bits, budgets = torch.zeros(shape, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)
        if base is not None and rank in known:
            bits, budgets = base.bits[known.index(rank)], base.budgets[known.index(rank)]
        if changes:
            bits, budgets = _turned(bits, budgets, changes, view.width)
        if len(budgets):
            ranks.append(rank)
            all_bits.append(bits)
            all_budgets.append(budgets)
            if len(budgets) == num_pairs:
                absent.append(rank)
    if not ranks:
        return None
    bits, size = torch.stack(all_bits), (view.width, view.height)
    mask = ViewMask(view.world_to_cam, view.K, *size, tuple(ranks), bits, tuple(all_budgets), tuple(absent))
    return base if mask.says_the_same(base) else mask  # no second copy


def _counts_of(messages: list[dict[str, Tensor]]) -> PairCounts:
    """The pairs of all ranks."""
    return PairCounts(*torch.stack([message["counts"] for message in messages]).sum(dim=0).tolist())


def _turned(bits: Tensor, budgets: Tensor, changes: list[Change], width: int) -> tuple[Tensor, Tensor]:
    """Bits [H, B] and budgets [M] of one rank in one view, after what several ranks decided about them."""
    dense = torch.zeros(len(bits), width, dtype=torch.uint8)
    dense[unpack_bits(bits, width)] = budgets
    turned = torch.zeros_like(bits)
    for change in changes:
        assert not bool((turned & change.bits).any()), "a pixel was decided twice"
        dense[unpack_bits(change.bits & ~bits, width)] = change.budgets
        turned |= change.bits
    bits = bits ^ turned
    return bits, dense[unpack_bits(bits, width)]


def _checksum(mask: ViewMask | None, before: int) -> int:
    """Of a mask and all that came before it."""
    if mask is None:
        return zlib.crc32(b"none", before)
    numbers = torch.tensor([mask.width, mask.height, *mask.partitions, -1, *mask.absent])
    for tensor in (numbers, mask.world_to_cam, mask.K, mask.bits, *mask.budgets):
        before = zlib.crc32(tensor.contiguous().numpy().data, before)
    return before
