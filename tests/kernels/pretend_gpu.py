"""A GPU that is not there: tensors on "cuda" have shapes and devices but no values, everything else is real.

It shows what no emulator does: a tensor on the wrong device, and who waits for the GPU, for its values have to be made
up then. torch's fake tensors do the first; what they cannot do without a driver is done here.
"""

from __future__ import annotations

import inspect
import traceback
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map_only

aten = torch.ops.aten


class PretendGpu(TorchDispatchMode):
    """Within, factories and copies that name "cuda" make fake tensors, and so do all ops on these.

    What a GPU would be waited for is counted by the place in the package that asks, in `waits`; every value is 1 then,
    and one element is found wherever some are sought.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        far = tree_any(lambda value: isinstance(value, FakeTensor), (args, kwargs))
        wanted = kwargs.get("device")
        if func is aten._to_copy.default and far and wanted is not None and torch.device(wanted).type == "cpu":
            self._wait()
            return torch.ones(self._sizes(args[0]), dtype=kwargs.get("dtype") or args[0].dtype)
        if func is aten._local_scalar_dense.default and far:
            self._wait()
            return {torch.bool: True, torch.float32: 1.0, torch.float64: 1.0}.get(args[0].dtype, 1)
        if func is aten.copy_.default and isinstance(args[1], FakeTensor) and not isinstance(args[0], FakeTensor):
            if not (len(args) > 2 and args[2]):  # what does not block is waited for at its event
                self._wait()
            return args[0].fill_(1)
        if func is aten.nonzero.default and far:
            self._wait()
            with self.fake:
                return torch.zeros(1, args[0].dim(), dtype=torch.int64, device=args[0].device)
        if func is aten.index.Tensor and far and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self._wait()
            with self.fake:
                one = torch.zeros(1, dtype=torch.int64, device=args[0].device)
                chosen = [[one] * i.dim() if i is not None and i.dtype == torch.bool else [i] for i in args[1]]
                return func(args[0], sum(chosen, []))
        if not far and (wanted is None or torch.device(wanted).type != "cuda"):
            return func(*args, **kwargs)
        with self.fake:
            moves = func in (aten._to_copy.default, aten.copy_.default)
            args, kwargs = tree_map_only(Tensor, lambda t: self._within(t, func, moves), (args, kwargs))
            return func(*args, **kwargs)

    def event(self) -> Any:
        """In place of `torch.cuda.Event`."""
        return SimpleNamespace(record=lambda stream: None, synchronize=self._wait)

    def _within(self, tensor: Tensor, func: Any, moves: bool) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        number = tensor.dim() == 0 and func not in (aten.stack.default, aten.cat.default)
        assert moves or number, f"{func} mixes the GPU's tensors with one on the CPU: {list(tensor.shape)}"
        return self.fake.from_tensor(tensor.detach())

    def _sizes(self, tensor: Tensor) -> list[int]:
        """Unknown sizes are made up, too."""
        return [size if isinstance(size, int) else 1 for size in tensor.shape]

    def _wait(self) -> None:
        frames = traceback.extract_stack()
        here = [f for f in frames if "/splaxel_ns/" in f.filename and "/_device.py" not in f.filename]
        last = here[-1] if here else None
        self.waits["a test" if last is None else f"{last.filename.rpartition('/')[2]}: {last.name}"] += 1


def backward(root: Tensor, keep: Tensor | None = None) -> None:
    """The backward pass of a scalar; see `backward_of`."""
    backward_of([root], [torch.ones_like(root)], keep)


def backward_of(roots: list[Tensor], gradients: list[Tensor], keep: Tensor | None = None) -> None:
    """torch's backward pass without its engine, which asks the driver for streams.

    Args:
        roots: What is differentiated.
        gradients: With respect to them.
        keep: A tensor that is no leaf but is to have its `grad`.
    """
    order: list[Any] = []
    seen: set[Any] = set()
    stack: list[tuple[Any, bool]] = [(root.grad_fn, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            stack += [(node, True), *((following, False) for following, _ in node.next_functions)]
    grads: dict[Any, dict[int, Tensor]] = {}
    for root, gradient in zip(roots, gradients, strict=True):
        assert root.grad_fn is not None and root.device == gradient.device and root.shape == gradient.shape
        grads.setdefault(root.grad_fn, {})[root.output_nr] = gradient
    for node in reversed(order):
        found = grads.pop(node, None)
        if found is None:
            continue
        if hasattr(node, "variable"):
            leaf, grad = node.variable, found[0]
            assert grad.device == leaf.device and grad.shape == leaf.shape
            leaf.grad = grad if leaf.grad is None else leaf.grad + grad
            continue
        if keep is not None and node is keep.grad_fn:
            keep.grad = found[keep.output_nr]
        inputs = [found.get(k) for k in range(len(node._input_metadata))]
        results = _of_python(node, inputs) if hasattr(node, "_forward_cls") else node(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        for (following, k), grad in zip(node.next_functions, results, strict=False):
            if following is None or grad is None:
                continue
            meta = following._input_metadata[k]
            grad = grad if grad.shape == tuple(meta.shape) else grad.sum_to_size(tuple(meta.shape))  # was broadcast
            assert grad.device == meta.device, (node, following, grad.device, meta.device)
            sums = grads.setdefault(following, {})
            sums[k] = sums[k] + grad if k in sums else grad


def _of_python(node: Any, inputs: list[Tensor | None]) -> Any:
    """The backward pass of an `autograd.Function`, with zeros for missing gradients unless it wants them missing."""
    if "set_materialize_grads(False)" not in inspect.getsource(node._forward_cls.forward):
        shapes = [(meta.shape, meta.dtype, meta.device) for meta in node._input_metadata]
        inputs = [
            torch.zeros(tuple(shape), dtype=dtype, device=device) if value is None else value
            for value, (shape, dtype, device) in zip(inputs, shapes, strict=True)
        ]
    return node.apply(*inputs)
