"""Where tensors are, and how values pass between the CPU and a GPU without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor's ops are the GPU's; every choice between the two goes through here."""
    return tensor.device.type == "cuda"


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on `device`. From the CPU it passes through pinned memory, so that nobody waits.

    One that wants gradients (a pose that is optimised) is copied by autograd, which waits on its way back.
    """
    if device.type != "cuda" or tensor.device.type != "cpu" or tensor.requires_grad:
        return tensor.to(device, non_blocking=True)
    return _pinned(tensor).to(device, non_blocking=True)


class Later:
    """Values of a tensor on their way to the host; `get` waits only for what was launched before this was made.

    Args:
        tensor: On a GPU, or on the CPU, where it is kept as it is.
    """

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._value = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._value.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._value = tensor

    def get(self) -> Tensor:
        """The values, on the CPU."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._value


def _pinned(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
