"""Decoded photographs in main memory: bounded, shared by threads, decoded ahead of use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

Photo = dict[str, Tensor]
"""image uint8 [H, W, 3 | 4] and, where there is one, mask bool [H, W, 1]. Shared: never written to."""
GIB = 1 << 30
AUTOMATIC_SHARE = 0.5
"""Of the memory that is free at the start; the rest is for Gaussians, optimisers and images in work."""


def available_memory() -> int:
    """Bytes that this process may still take: the system's free memory, or less where a control group limits it."""
    available = 4 * GIB
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, usage = Path(limit_file).read_text().strip(), Path(usage_file).read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            available = min(available, max(0, int(limit) - int(usage)))
    return available


def photo_bytes(photo: Photo) -> int:
    """Bytes a decoded photograph occupies."""
    return sum(tensor.numel() * tensor.element_size() for tensor in photo.values())


class PhotoCache:
    """Keeps decoded photographs up to a limit and decodes announced ones in background threads.

    Every photograph is wanted once per epoch, in a new random order, so replacing one by another gains nothing:
    a full cache keeps what it holds (a share f of the photographs gives a share f of hits, while evicting the
    least recently used gives f + (1 - f) log(1 - f), 15 % instead of 50 % at one half). Only photographs that
    were announced and not yet used are held beyond that; `room` is set aside for them within the limit.

    Args:
        limit: Bytes for everything held.
        room: Bytes of the limit kept free for announced photographs.
        threads: Number of background threads.
        total: Bytes of all photographs decoded, if known. Where all fit, nothing needs to be set aside.
    """

    def __init__(self, limit: int, room: int = 0, threads: int = 1, total: int | None = None):
        self.limit = limit
        self.keep_limit = limit if total is not None and total <= limit else max(limit // 2, limit - room)
        self.num_decoded = 0
        self.num_bytes = 0
        self.peak_bytes = 0
        self._kept: dict[Hashable, Photo] = {}
        self._pending: dict[Hashable, Future[Photo]] = {}
        self._ahead: dict[Hashable, int] = {}  # bytes of what is being decoded or not yet fetched
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="splaxel-photo")

    def __len__(self) -> int:
        return len(self._kept)

    def announce(self, wanted: Sequence[tuple[Hashable, int, Callable[[], Photo]]]) -> None:
        """Decode in the background what will be asked for next, as far as the limit allows.

        What was announced before and is not wanted any more is given up.

        Args:
            wanted: (key, expected bytes, decoder) of the coming photographs, in the order of their use.
        """
        with self._lock:
            self._retract({key for key, _, _ in wanted})
            for key, size, decode in wanted:
                if key in self._kept or key in self._pending:
                    continue
                if self._pending and self._held() + size > self.limit:
                    return
                self._ahead[key] = size
                self._pending[key] = self._pool.submit(self._decode, key, decode)

    def get(self, key: Hashable, decode: Callable[[], Photo], keep: bool = True) -> Photo:
        """Return a photograph, from memory if it is there.

        Args:
            key: Names the photograph; equal keys are the same pixels.
            decode: Reads it; runs in this thread unless it was announced.
            keep: Whether to keep it if there is space.

        Raises:
            Exception: Whatever `decode` raised, here or in the background.
        """
        with self._lock:
            if key in self._kept:
                return self._kept[key]
            future = self._pending.get(key)
            mine: Future[Photo] | None = Future() if future is None else None
            if mine is not None:
                mine.set_running_or_notify_cancel()  # so that `announce` cannot give it up
                self._pending[key] = mine
                self._ahead[key] = 0
        try:
            if mine is None:
                assert future is not None
                photo = future.result()
            else:
                try:
                    photo = self._decode(key, decode)
                except BaseException as error:
                    mine.set_exception(error)
                    raise
                mine.set_result(photo)
        finally:
            with self._lock:
                self._pending.pop(key, None)
                self._ahead.pop(key, None)
        if keep:
            with self._lock:
                self._keep(key, photo)
        return photo

    def close(self) -> None:
        """Drop what has not been started and let the threads end. The cache is not used afterwards."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _held(self) -> int:
        return self.num_bytes + sum(self._ahead.values())

    def _keep(self, key: Hashable, photo: Photo) -> None:
        size = photo_bytes(photo)
        if key not in self._kept and self.num_bytes + size <= self.keep_limit:
            self._kept[key] = photo
            self.num_bytes += size

    def _retract(self, wanted: set[Hashable]) -> None:
        """Give up announced photographs outside `wanted`; those already decoded are kept if there is space."""
        for key in [key for key in self._ahead if key not in wanted]:
            future = self._pending[key]
            if not future.cancel() and not future.done():
                continue  # being decoded; the next call looks again
            del self._pending[key], self._ahead[key]
            if not future.cancelled() and future.exception() is None:
                self._keep(key, future.result())

    def _decode(self, key: Hashable, decode: Callable[[], Photo]) -> Photo:
        photo = decode()
        with self._lock:
            self.num_decoded += 1
            if key in self._ahead:
                self._ahead[key] = photo_bytes(photo)
            self.peak_bytes = max(self.peak_bytes, self._held())
        return photo
