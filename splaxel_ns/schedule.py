"""The order of training views: buckets of views with disjoint participants, in steps of fixed size.

Paper section 4.4 (conflict-free view consolidation). Shapes: V views, P partitions, W 64-bit words of a bit mask.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_WORD_BITS = 64


class ViewScheduler:
    """Hands out every view once per epoch, `batch_size` at a time, bucket after bucket.

    At an epoch's start the views are shuffled, put first-fit into buckets of views that share no participant, and
    the buckets are shuffled. The last bucket of a batch may be split: its rest opens the next batch. A batch that
    reaches the epoch's end goes on with the next epoch. All draws come from a generator of its own, so that every
    rank with the same participants arrives at the same buckets.
    """

    def __init__(self, num_views: int, seed: int, batch_size: int) -> None:
        """Args:
            num_views: V >= 1.
            seed: of the generator.
            batch_size: views per step, >= 1.

        Raises:
            ValueError: no views, or no views per step.
        """
        if num_views < 1:
            raise ValueError("There is no view to schedule.")
        if batch_size < 1:
            raise ValueError(f"The batch size is {batch_size}; a step takes at least one view.")
        self.num_views = num_views
        self.batch_size = batch_size
        self._generator = torch.Generator().manual_seed(seed)
        self._masks: Tensor | None = None  # [V, W] int64: bit p % 64 of word p // 64 is partition p
        self._order = torch.empty(0, dtype=torch.int64)  # the epoch's views, bucket after bucket
        self._lengths = torch.empty(0, dtype=torch.int64)  # views of each of its buckets
        self._ends: list[int] = []
        self._cursor = 0
        self._num_epochs = 0
        self._occupied = 0  # participants summed over the epoch's views

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next view belongs to, from 0."""
        return self._num_epochs - (self._cursor < len(self._order))

    @property
    def views_done(self) -> int:
        """Views handed out so far, over all epochs."""
        return max(0, self._num_epochs - 1) * self.num_views + self._cursor

    @property
    def new_epoch_next(self) -> bool:
        """Whether the next batch opens an epoch: the moment to call `set_participants`."""
        return len(self._order) - self._cursor < self.batch_size

    def set_participants(self, participants: Sequence[Collection[int]] | None) -> None:
        """State each view's partitions, for the epochs to come; None: every view meets every other.

        Raises:
            ValueError: not one set per view, or a negative partition.
        """
        if participants is None:
            self._masks = None
            return
        if len(participants) != self.num_views:
            raise ValueError(f"{len(participants)} sets of participants were given for {self.num_views} views.")
        highest = max((max(leaves) for leaves in participants if leaves), default=0)
        if any(min(leaves) < 0 for leaves in participants if leaves):
            raise ValueError("Partitions are numbered from 0; a view names a negative one.")
        masks = np.zeros((self.num_views, highest // _WORD_BITS + 1), dtype=np.uint64)
        for view, leaves in enumerate(participants):
            for leaf in leaves:
                masks[view, leaf // _WORD_BITS] |= np.uint64(1 << leaf % _WORD_BITS)
        self._masks = torch.from_numpy(masks.view(np.int64))

    def next_batch(self) -> list[int]:
        """The next `batch_size` views, bucket after bucket."""
        return [view for bucket in self.next_buckets() for view in bucket]

    def next_buckets(self) -> list[list[int]]:
        """The next `batch_size` views as buckets: those of one inner list share no participant."""
        batch: list[list[int]] = []
        missing = self.batch_size
        while missing:
            if self._cursor == len(self._order):
                self._draw_epoch()
            end = self._ends[bisect.bisect_right(self._ends, self._cursor)]
            stop = min(end, self._cursor + missing)
            batch.append(self._order[self._cursor : stop].tolist())
            missing -= stop - self._cursor
            self._cursor = stop
        return batch

    def peek(self, count: int) -> list[int]:
        """Up to `count` views that come next in this epoch; fewer at its end, since the next is not drawn yet."""
        return self._order[self._cursor : self._cursor + count].tolist()

    def utilisation(self, num_partitions: int) -> tuple[float, float]:
        """Mean part of the partitions that have work at a time in this epoch (paper, section 4.4).

        Returns:
            One view at a time, and one bucket at a time.
        """
        if not len(self._order):
            self._draw_epoch()
        return (
            self._occupied / (self.num_views * num_partitions),
            self._occupied / (len(self._lengths) * num_partitions),
        )

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers from which `load_state_dict` continues with the same views."""
        return {
            "num_views": self.num_views,
            "generator": self._generator.get_state(),
            "masks": self._masks,
            "order": self._order,
            "lengths": self._lengths,
            "cursor": self._cursor,
            "num_epochs": self._num_epochs,
            "occupied": self._occupied,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called; the batch size may differ.

        Raises:
            ValueError: the state is for another number of views, or damaged.
        """
        missing = set(self.state_dict()) - set(state)
        if missing:
            raise ValueError(f"The saved view order lacks {', '.join(sorted(missing))}; the checkpoint is damaged.")
        if state["num_views"] != self.num_views:
            raise ValueError(
                f"The checkpoint's view order is for {state['num_views']} views, but the data has {self.num_views}."
            )
        order, lengths, masks, cursor = state["order"], state["lengths"], state["masks"], int(state["cursor"])
        tensors = [order, lengths] if masks is None else [order, lengths, masks]
        if not all(isinstance(tensor, Tensor) and tensor.dtype == torch.int64 for tensor in tensors):
            raise ValueError("The saved view order is not made of whole numbers; the checkpoint is damaged.")
        complete = len(order) in (0, self.num_views) and torch.equal(order.sort().values, torch.arange(len(order)))
        if not complete or int(lengths.sum()) != len(order) or (lengths < 1).any() or not 0 <= cursor <= len(order):
            raise ValueError("The saved view order does not hold every view once; the checkpoint is damaged.")
        if masks is not None and (masks.ndim != 2 or len(masks) != self.num_views):
            raise ValueError("The saved participants are not one set per view; the checkpoint is damaged.")
        self._generator.set_state(state["generator"])
        self._masks = masks
        self._cursor, self._num_epochs = cursor, int(state["num_epochs"])
        self._occupied = int(state["occupied"])
        self._set_order(order, lengths)

    def _draw_epoch(self) -> None:
        shuffled = torch.randperm(self.num_views, generator=self._generator)
        if self._masks is None:
            self._set_order(shuffled, torch.ones_like(shuffled))
            self._occupied = 0
        else:
            masks = self._masks[shuffled]
            bucket = torch.from_numpy(first_fit(masks.numpy().view(np.uint64)))
            self._occupied = sum(int(word).bit_count() for word in masks.numpy().view(np.uint64).ravel())
            num_buckets = int(bucket.max()) + 1
            place = torch.randperm(num_buckets, generator=self._generator)[bucket]
            by_place = torch.sort(place, stable=True)
            self._set_order(shuffled[by_place.indices], torch.bincount(place, minlength=num_buckets))
        self._cursor = 0
        self._num_epochs += 1

    def _set_order(self, order: Tensor, lengths: Tensor) -> None:
        self._order, self._lengths = order, lengths
        self._ends = lengths.cumsum(0).tolist()


def first_fit(masks: np.ndarray) -> np.ndarray:
    """Put each view into the oldest bucket none of whose views shares a participant with it.

    Buckets with equal unions are alike, so one scan over the distinct unions (a few thousand) finds the oldest that
    fits; unions that no view can join are never scanned.

    Args:
        masks: [V, W] uint64, the views' participants as bits, in the order in which they are placed.

    Returns:
        [V] int64, the bucket of each view; buckets are numbered by age.
    """
    distinct, kind = np.unique(masks, axis=0, return_inverse=True)
    kind = kind.ravel()
    index = _UnionIndex(distinct)
    has_partner = [index.can_be_joined(mask) for mask in distinct]
    bucket_of = np.empty(len(masks), dtype=np.int64)
    num_buckets = 0
    for view, mask in enumerate(map(distinct.__getitem__, kind)):
        found = index.pop_oldest(mask) if has_partner[kind[view]] else None
        if found is None:
            bucket, union = num_buckets, mask
            num_buckets += 1
        else:
            bucket, union = found[0], found[1] | mask
        bucket_of[view] = bucket
        index.push(bucket, union)
    return bucket_of


class _UnionIndex:
    """Open buckets, grouped by the union of their views' participants."""

    _NONE = np.iinfo(np.int64).max

    def __init__(self, distinct: np.ndarray) -> None:  # [D, W] uint64, the views' masks
        self._columns = np.ascontiguousarray(distinct.T)
        self._unions = np.empty((distinct.shape[1], 64), dtype=np.uint64)
        self._oldest = np.empty(64, dtype=np.int64)  # per union, or _NONE if no bucket has it now
        self._heaps: list[list[int]] = []
        self._slot: dict[bytes, int] = {}
        self._joinable: dict[bytes, bool] = {}
        self._num_vacant = 0

    def can_be_joined(self, mask: np.ndarray) -> bool:
        """Whether any view at all is disjoint from it."""
        key = mask.tobytes()
        if key not in self._joinable:
            self._joinable[key] = bool((self._shared(self._columns, mask) == 0).any())
        return self._joinable[key]

    def pop_oldest(self, mask: np.ndarray) -> tuple[int, np.ndarray] | None:
        """Take out the oldest bucket disjoint from `mask`, with its union."""
        count = len(self._heaps)
        if not count:
            return None
        ages = np.where(self._shared(self._unions[:, :count], mask) == 0, self._oldest[:count], self._NONE)
        slot = int(ages.argmin())
        if ages[slot] == self._NONE:
            return None
        heap = self._heaps[slot]
        bucket = heapq.heappop(heap)
        self._oldest[slot] = heap[0] if heap else self._NONE
        self._num_vacant += not heap
        return bucket, self._unions[:, slot].copy()

    def push(self, bucket: int, union: np.ndarray) -> None:
        """File a bucket, unless no view can ever join it."""
        if not self.can_be_joined(union):
            return
        if self._num_vacant > 64 + len(self._heaps) // 2:
            self._compact()
        slot = self._slot.get(union.tobytes())
        if slot is None:
            slot = self._add_slot(union)
        heap = self._heaps[slot]
        self._num_vacant -= not heap
        heapq.heappush(heap, bucket)
        self._oldest[slot] = heap[0]

    @staticmethod
    def _shared(columns: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Non-zero where a column of [W, n] masks has a bit in common with `mask`."""
        shared = columns[0] & mask[0]
        for word in range(1, len(columns)):
            shared |= columns[word] & mask[word]
        return shared

    def _add_slot(self, union: np.ndarray) -> int:
        slot = len(self._heaps)
        if slot == len(self._oldest):
            self._unions = np.concatenate([self._unions, np.empty_like(self._unions)], axis=1)
            self._oldest = np.concatenate([self._oldest, np.empty_like(self._oldest)])
        self._unions[:, slot] = union
        self._oldest[slot] = self._NONE
        self._heaps.append([])
        self._slot[union.tobytes()] = slot
        self._num_vacant += 1
        return slot

    def _compact(self) -> None:
        kept = [slot for slot, heap in enumerate(self._heaps) if heap]
        self._unions[:, : len(kept)] = self._unions[:, kept]
        self._oldest[: len(kept)] = self._oldest[kept]
        self._heaps = [self._heaps[slot] for slot in kept]
        self._slot = {self._unions[:, slot].tobytes(): slot for slot in range(len(kept))}
        self._num_vacant = 0
