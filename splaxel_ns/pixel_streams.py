"""Values of pixels on their way between ranks.

A stream is a list of pixels that both sides know, in row order, and their values in one message, without indices
(design 5). With active pixels there are two messages: one bit per pixel that says whether it is empty, and the values
of those that are not; the bits tell the receiver how long the second message will be.

Shapes: M pixels of a stream, A of them not empty, C values per pixel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from splaxel_ns import cuda
from splaxel_ns.comm import Disagreement, Pending, World
from splaxel_ns.cuda.saturation import pack_bits, unpack_bits

HEADER = 16
"""Bytes."""


@dataclass(frozen=True)
class Tag:
    """What every stream says of itself, so that ranks which have come apart notice."""

    step: int
    view: int
    version: int

    def header(self, count: int) -> Tensor:
        """[4] int32."""
        return torch.tensor([self.step, self.view, self.version, count], dtype=torch.int32)


class PixelSwap:
    """The streams of one kind and one view, from and to this rank; every rank makes, posts and awaits the same ones
    in the same order.

    Args:
        world: The ranks.
        tag: Of the view.
        kind: What is sent, for the counters and for error messages.
        sends: By destination.  # [M, C]
        receives: By source, M.
        channels: C.
        half: As float16.
        device: Where values come to be.
        active: Leave out empty pixels: those whose first four values are 0, 0, 0, 1, and any others 0.
    """

    def __init__(
        self,
        world: World,
        tag: Tag,
        kind: str,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, int],
        channels: int,
        half: bool = False,
        active: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self._world, self._tag, self._kind, self._channels = world, tag, kind, channels
        self._device = torch.device(device)
        self._type = torch.float16 if half else torch.float32
        sends = {target: values for target, values in sends.items() if len(values)}
        self._counts = {source: count for source, count in receives.items() if count}
        self._bits: Pending | None = None
        self._values: Pending | None = None
        self.filled = {t: torch.ones(len(v), dtype=torch.bool, device=v.device) for t, v in sends.items()}
        """By destination, which of the pixels sent are not empty.  # [M] bool"""
        self.arrived = {s: torch.ones(n, dtype=torch.bool, device=self._device) for s, n in self._counts.items()}
        """By source, which of the pixels received are not empty, once awaited.  # [M] bool"""
        self._sends = sends
        if active:
            self.filled = {target: _filled(values) for target, values in sends.items()}
            heads = {t: self._message(len(filled), pack_bits(filled)) for t, filled in self.filled.items()}
            sizes = {source: HEADER + (count + 7) // 8 for source, count in self._counts.items()}
            self._bits = world.start(heads, self._buffers(sizes), kind)
        else:
            self.post()

    def post(self) -> None:
        """Have the values on their way too, if only bits are; waits for the bits of the others.

        Raises:
            LostRank: A peer is gone.
            Disagreement: A message belongs to another view or step.
        """
        if self._values is not None:
            return
        self._world.check()
        size = self._channels * self._type.itemsize
        if self._bits is None:
            sends = {
                target: self._message(len(values), values.to(self._type).view(torch.uint8).flatten())
                for target, values in self._sends.items()
            }
            sizes = {source: HEADER + count * size for source, count in self._counts.items()}
        else:
            for source, message in self._bits.wait().items():
                self._check_header(message, source)
                self.arrived[source] = unpack_bits(message[HEADER:], self._counts[source])
            left = {target: values[self.filled[target]] for target, values in self._sends.items()}
            sends = {t: values.to(self._type).view(torch.uint8).flatten() for t, values in left.items() if len(values)}
            sizes = {source: int(arrived.sum()) * size for source, arrived in self.arrived.items()}
        self._sends = {}
        self._values = self._world.start(sends, self._buffers(sizes), self._kind)

    def wait(self) -> dict[int, Tensor]:
        """What has come, by source.  # [M, C]

        Raises:
            LostRank: A peer is gone.
            Disagreement: A message belongs to another view or step.
        """
        self.post()
        assert self._values is not None
        messages, values = self._values.wait(), {}
        for source, count in self._counts.items():
            if self._bits is None:
                message = messages[source]
                self._check_header(message, source)
                values[source] = message[HEADER:].view(self._type).view(count, self._channels).float()
                continue
            values[source] = torch.zeros(count, self._channels, device=self._device)
            values[source][:, 3] = 1.0
            if source in messages:
                filled = messages[source].view(self._type).view(-1, self._channels)
                values[source][self.arrived[source]] = filled.float()
        return values

    def _buffers(self, sizes: Mapping[int, int]) -> dict[int, Tensor]:
        return {s: torch.empty(size, dtype=torch.uint8, device=self._device) for s, size in sizes.items() if size}

    def _message(self, count: int, content: Tensor) -> Tensor:
        return torch.cat([cuda.upload(self._tag.header(count).view(torch.uint8), content.device), content])

    def _check_header(self, message: Tensor, source: int) -> None:
        """At once, or where the message is on a GPU with the world's next checks, so that nobody waits for it."""
        later, expected = cuda.Later(message[:HEADER].view(torch.int32)), self._tag.header(self._counts[source])
        if cuda.on_gpu(message):
            self._world.checks.append(lambda: self._compare(later.get(), expected, source))
        else:
            self._compare(later.get(), expected, source)

    def _compare(self, found: Tensor, expected: Tensor, source: int) -> None:
        if not torch.equal(found, expected):
            names = ("step", "view", "version", "pixels")
            said = ", ".join(f"{name} {value}" for name, value in zip(names, found.tolist(), strict=True))
            wanted = ", ".join(f"{name} {value}" for name, value in zip(names, expected.tolist(), strict=True))
            raise Disagreement(
                f"Rank {self._world.rank} got pixels of {said} from rank {source} where {wanted} were due: the ranks "
                "have come apart. Continue from the last checkpoint with --resume auto, and report this."
            )


def _filled(values: Tensor) -> Tensor:
    """Which pixels [M, C] some Gaussian has left its trace in: [M] bool."""
    return (values[:, 3] != 1.0) | (values[:, :3] != 0.0).any(dim=1) | (values[:, 4:] != 0.0).any(dim=1)
