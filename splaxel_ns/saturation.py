"""Which (pixel, partition) pairs of the training views are saturated and left out, from one visit to the next.

Paper, sections 4.3 and 8.2; the rule for one visit is in `cuda/saturation.py`. A pair is left out of rendering,
exchange and supervision. Membership in a region, which decides what the boundary `filter` drops, is not affected.

All bits that a visit changes wait for the next snapshot: between two of them everybody who draws or schedules a view
goes by the same bits. Masks belong to a view's pose and resolution and to the boxes; whatever changes those drops them.

Shapes: P partitions, K of them with pruned pairs in a view, M pruned pairs, H x W pixels, B = ceil(W / 8) bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from splaxel_ns import cuda
from splaxel_ns.partition import PartitionTree
from splaxel_ns.types import View, ViewPlan

GIB = 2**30


@dataclass(frozen=True)
class ViewMask:
    """The pruned pairs of one view."""

    world_to_cam: Tensor  # [4, 4], of the visit that found them
    K: Tensor  # [3, 3], pixels
    width: int
    height: int
    partitions: tuple[int, ...]  # K, ascending
    bits: Tensor  # [K, H, B] uint8: pixel x of a row is bit x % 8 of byte x // 8
    budgets: tuple[Tensor, ...]  # K x [pruned pairs of the partition] uint8, row by row
    absent: tuple[int, ...]  # of the partitions, those with nothing left to draw

    @property
    def num_bytes(self) -> int:
        """Memory that it takes: H B per partition and one byte per pruned pair."""
        return self.bits.nbytes + sum(budgets.nbytes for budgets in self.budgets)

    def fits(self, view: View) -> bool:
        """Whether it was made for this pose, lens and resolution."""
        return (
            (self.width, self.height) == (view.width, view.height)
            and torch.equal(self.world_to_cam, view.world_to_cam.detach())
            and torch.equal(self.K, view.K.detach())
        )

    def says_the_same(self, other: ViewMask | None) -> bool:
        """Whether another mask of the same view leaves out the same, with the same budgets."""
        return (
            other is not None
            and (self.partitions, self.absent) == (other.partitions, other.absent)
            and torch.equal(self.bits, other.bits)
            and all(torch.equal(a, b) for a, b in zip(self.budgets, other.budgets, strict=True))
        )

    def applied_to(self, plan: ViewPlan) -> ViewPlan:
        """The plan of the view without the pruned pairs; the regions stay as they are."""
        order = tuple(leaf for leaf in plan.order if leaf not in self.absent)
        return replace(plan, order=order, saturated=self.bits_of(order) if order else None)

    def bits_of(self, order: tuple[int, ...]) -> Tensor:
        """[Q, H, B] uint8, zero for partitions without pruned pairs."""
        bits = torch.zeros(len(order), *self.bits.shape[1:], dtype=torch.uint8)
        for slot, leaf in enumerate(order):
            if leaf in self.partitions:
                bits[slot] = self.bits[self.partitions.index(leaf)]
        return bits


@dataclass
class PairCounts:
    """(pixel, partition) pairs of some visits."""

    pairs: int = 0
    pruned: int = 0
    flipped: int = 0

    @property
    def pruned_share(self) -> float:
        """Pruned pairs in parts of all whose pixel is in the partition's region."""
        return self.pruned / max(self.pairs, 1)

    @property
    def flip_rate(self) -> float:
        """Pairs that came back in parts of the pruned ones (paper, section 8.2)."""
        return self.flipped / max(self.pruned, 1)


class SaturationMasks:
    """The masks of all training views of one process.

    Memory: per masked view ceil(W / 8) H bytes for each partition with pruned pairs and a byte for each pruned pair,
    for what is in force and for what waits to replace it where they differ; together at most `limit` bytes. A view
    whose mask would exceed it stays unmasked.

    Args:
        eps: Transmittance below which whatever lies behind is saturated.
        limit: Bytes for masks.
    """

    num_ranks = 1
    """Ranks that the masks belong to: what they leave out are pixels of partitions for one, of ranks for several."""
    unit = "partition"

    def __init__(self, eps: float, limit: int) -> None:
        self.eps = eps
        self.limit = limit
        self.version = 0  # number of the snapshot in force
        self.last_epoch = PairCounts()  # visits between the two last snapshots
        self.now = PairCounts()  # visits since the last snapshot
        self._masks: dict[int, ViewMask] = {}  # in force
        self._next: dict[int, ViewMask | None] = {}  # of the views visited since the last snapshot
        self._tree: PartitionTree | None = None
        self.num_bytes = 0  # of all masks
        self._snapshot_images = 0
        self._said_full = False

    @property
    def num_masked(self) -> int:
        """Views with a mask in force."""
        return len(self._masks)

    def mask_of(self, index: int, view: View, tree: PartitionTree) -> ViewMask | None:
        """The mask in force for training view `index`, None if it has none; one for another pose is dropped."""
        self._follow(tree)
        mask = self._masks.get(index)
        if mask is None or mask.fits(view):
            return mask
        self._forget_waiting(index)
        self.num_bytes -= self._masks.pop(index).num_bytes
        return None

    def update(self, index: int, view: View, plan: ViewPlan, transmittances: Tensor, tree: PartitionTree) -> None:
        """Take what a visit of training view `index` shows; it counts from the next snapshot on.

        Args:
            plan: As drawn, with the mask of `mask_of`.
            transmittances: Of the partial images in the plan's order.  # [Q, H, W]
        """
        mask = self.mask_of(index, view, tree)
        occupied = (plan.spans[..., 1] > plan.spans[..., 0]).any(dim=1).tolist()
        order = tuple(leaf for leaf in tree.order(view.cam_center.detach()) if occupied[leaf])
        slots = torch.tensor([plan.order.index(leaf) if leaf in plan.order else -1 for leaf in order])
        bits, budgets = in_order(mask, order, view)
        bits, budgets, counts = cuda.update_saturation(
            transmittances, slots.int(), plan.spans[list(order)], bits, budgets, self.eps
        )
        self.now.pairs += int(counts.pairs.sum())
        self.now.pruned += int(counts.pruned.sum())
        self.now.flipped += int(counts.flipped.sum())
        self._keep(index, mask, _mask_from(view, order, bits, budgets, counts))

    def absent(self, index: int, view: View, tree: PartitionTree) -> tuple[int, ...]:
        """Partitions that take no part in training view `index`, since all their pixels are saturated."""
        mask = self.mask_of(index, view, tree)
        return () if mask is None else mask.absent

    def take_snapshot(self, images: int) -> None:
        """Put everything in force that was found since the last snapshot.

        Args:
            images: Images seen so far.
        """
        for index, mask in self._next.items():
            old = self._masks.pop(index, None)
            if old is not None and old is not mask:
                self.num_bytes -= old.num_bytes
            if mask is not None:
                self._masks[index] = mask
        self._next = {}
        self.version += 1
        self._snapshot_images = images
        if self.now.pairs:
            self.last_epoch, self.now = self.now, PairCounts()

    def snapshot_due(self, images: int, every: int) -> bool:
        """Whether `every` images (0: never) have been seen since the last snapshot."""
        return 0 < every <= images - self._snapshot_images

    def drop(self) -> None:
        """Forget all masks: pixels that were opaque may not be any more."""
        self._masks, self._next, self.num_bytes = {}, {}, 0

    def metrics(self) -> dict[str, float]:
        """Shares for the log: of the visits since the last snapshot."""
        return {"saturation_pruned": self.now.pruned_share, "saturation_flip_rate": self.now.flip_rate}

    def summary(self) -> str:
        """One line about the last complete epoch."""
        counts = self.last_epoch if self.last_epoch.pairs else self.now
        return (
            f"Saturation: {counts.pruned_share:.1%} of the (pixel, {self.unit}) pairs were left out in the last epoch, "
            f"flip rate {counts.flip_rate:.2%}; {self.num_masked} views are masked, {self.num_bytes / 2**20:.1f} MiB."
        )

    def _follow(self, tree: PartitionTree) -> None:
        """Drop everything if the boxes are no longer those of the masks."""
        if self._tree is not tree:
            if self._tree is not None:
                self.drop()
            self._tree = tree

    def _keep(self, index: int, before: ViewMask | None, mask: ViewMask | None) -> None:
        """Let a view's new mask wait for the next snapshot, if there is room."""
        self._forget_waiting(index)
        if mask is not None and mask.says_the_same(before):
            mask = before  # no second copy
        elif mask is not None and self.num_bytes + mask.num_bytes > self.limit:
            mask = None
            self._say_full()
        elif mask is not None:
            self.num_bytes += mask.num_bytes
        self._next[index] = mask

    def _forget_waiting(self, index: int) -> None:
        mask = self._next.pop(index, None)
        if mask is not None and mask is not self._masks.get(index):
            self.num_bytes -= mask.num_bytes

    def _say_full(self) -> None:
        if not self._said_full:
            self._said_full = True
            CONSOLE.print(
                f"Saturation masks fill their {self.limit / GIB:.2f} GiB (--pipeline.model.saturation-gib): further "
                "views are drawn in full."
            )

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values from which `load_state_dict` continues; as large as the masks."""
        entries, masks = [], []
        for waiting, by_index in ((False, self._masks), (True, self._next)):
            for index, mask in by_index.items():
                known = waiting and mask is self._masks.get(index)
                entries.append({"index": index, "waiting": waiting, "same": known and mask is not None})
                if mask is not None and not known:
                    masks.append(mask)
                    entries[-1] |= {"size": (mask.width, mask.height), "partitions": mask.partitions}
                    entries[-1] |= {"pruned": [len(part) for part in mask.budgets], "absent": mask.absent}
        nothing = torch.zeros(0, dtype=torch.uint8)
        return {
            "eps": self.eps,
            "ranks": self.num_ranks,
            "version": self.version,
            "snapshot_images": self._snapshot_images,
            "last_epoch": vars(self.last_epoch).copy(),
            "now": vars(self.now).copy(),
            "entries": entries,
            "poses": torch.stack([mask.world_to_cam for mask in masks]) if masks else torch.zeros(0, 4, 4),
            "intrinsics": torch.stack([mask.K for mask in masks]) if masks else torch.zeros(0, 3, 3),
            "bits": torch.cat([nothing, *(mask.bits.flatten() for mask in masks)]),
            "budgets": torch.cat([nothing, *(part for mask in masks for part in mask.budgets)]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called. Masks found with another eps or by other ranks are left out.

        Raises:
            KeyError, RuntimeError, TypeError: The state is damaged.
        """
        self.drop()
        self._tree = None  # the boxes come from the same checkpoint
        self.version, self._snapshot_images = int(state["version"]), int(state["snapshot_images"])
        self.last_epoch, self.now = PairCounts(**state["last_epoch"]), PairCounts(**state["now"])
        if state["eps"] != self.eps or state.get("ranks", 1) != self.num_ranks:
            return
        stored = [entry for entry in state["entries"] if "size" in entry]
        areas = [len(e["partitions"]) * e["size"][1] * ((e["size"][0] + 7) // 8) for e in stored]
        all_bits = iter(state["bits"].split(areas) if areas else ())
        all_budgets = iter(state["budgets"].split([count for entry in stored for count in entry["pruned"]] or [0]))
        cameras = iter(zip(state["poses"], state["intrinsics"], strict=True))
        for entry in state["entries"]:
            mask = self._masks[entry["index"]] if entry["same"] else None
            if "size" in entry:
                (width, height), partitions = entry["size"], tuple(entry["partitions"])
                bits = next(all_bits).view(len(partitions), height, (width + 7) // 8)
                budgets = tuple(next(all_budgets) for _ in partitions)
                mask = ViewMask(*next(cameras), width, height, partitions, bits, budgets, tuple(entry["absent"]))
            if entry["waiting"]:
                self._next[entry["index"]] = mask
            elif mask is not None:
                self._masks[entry["index"]] = mask
            self.num_bytes += mask.num_bytes if mask is not None and not entry["same"] else 0


def _mask_from(
    view: View, order: tuple[int, ...], bits: Tensor, budgets: Tensor, counts: cuda.SaturationCounts
) -> ViewMask | None:
    """The mask that holds bits [K, H, B] and budgets [M], both in the order of depth."""
    pruned = (counts.pairs - counts.left).tolist()
    parts = budgets.split(pruned) if pruned else ()
    slots = sorted((slot for slot, count in enumerate(pruned) if count), key=lambda slot: order[slot])
    if not slots:
        return None
    return ViewMask(
        view.world_to_cam.detach().clone(),
        view.K.detach().clone(),
        view.width,
        view.height,
        tuple(order[slot] for slot in slots),
        bits[slots],
        tuple(parts[slot].clone() for slot in slots),
        tuple(order[slot] for slot in slots if counts.left[slot] == 0),
    )


def in_order(mask: ViewMask | None, order: tuple[int, ...], view: View) -> tuple[Tensor, Tensor]:
    """Bits [K, H, B] and budgets [M] of a mask for the partitions of `order`."""
    nothing = torch.zeros(0, dtype=torch.uint8)
    if mask is None:
        return torch.zeros(len(order), view.height, (view.width + 7) // 8, dtype=torch.uint8), nothing
    budgets = [mask.budgets[mask.partitions.index(leaf)] for leaf in order if leaf in mask.partitions]
    return mask.bits_of(order), torch.cat([nothing, *budgets])
