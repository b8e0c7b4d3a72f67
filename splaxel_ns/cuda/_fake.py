"""What the ops return, by shape and type alone: for torch.compile and for tests of shapes without data.

Registered when the ops are loaded. Sizes that depend on data (visible splats, their pairs with tiles) are unknown here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def register() -> None:
    """Tells torch about all ops; once per process."""
    for name, function in _FAKES.items():
        torch.library.register_fake(f"splaxel::{name}", function)


def _unknown() -> Any:
    return torch.library.get_ctx().new_dynamic_size()


def _rasterize_partials(means2d: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    spans, (width, _, _, _) = arguments[16], arguments[18:]
    count, height = len(arguments[15]), spans.shape[1]
    tiles = -(-width // 16) * -(-height // 16)
    integer, short = torch.int32, torch.int16
    items, pairs = _unknown(), _unknown()
    if means2d.device.type == "cuda":  # see gpu/bind_raster.cpp
        lists: tuple[Tensor, ...] = (
            means2d.new_empty((pairs,), dtype=integer),
            means2d.new_empty((0,), dtype=integer),
            means2d.new_empty((count, height, width, 2), dtype=integer),
            means2d.new_empty((0,), dtype=integer),
        )
    else:  # see csrc/rasterize.cpp
        lists = (
            means2d.new_empty((pairs, 2), dtype=integer),
            means2d.new_empty((pairs,), dtype=short),
            means2d.new_empty(_unknown(), 16, 16),
            means2d.new_empty((items + 1,), dtype=integer),
        )
    lists = (means2d.new_empty(items, 16), *lists, means2d.new_empty((count * tiles + 1,), dtype=integer))
    stats = means2d.new_empty((7,), dtype=torch.int64)
    colors = means2d.new_empty(count, height, width, 3)
    return colors, means2d.new_empty(count, height, width), means2d.new_empty(count, height, width), *lists, stats


def _rasterize_partials_backward(conics: Tensor, opacities: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    num, absgrad = len(conics), arguments[-1]
    shapes: tuple[tuple[int, ...], ...] = ((num, 2), (num,), (num, 3), (num,), (num, 3), (num if absgrad else 0, 2))
    return tuple(conics.new_empty(shape) for shape in shapes)


def _bulk_boxes(means, owner, num_partitions, stride, quantile, margin) -> tuple[Tensor, Tensor]:
    return means.new_empty(num_partitions, 2, 3), means.new_empty((num_partitions,), dtype=torch.int32)


def _content_bounds(means, scales, owner, bulk, slice_axis, slope) -> tuple[Tensor, Tensor]:
    boxes = 11  # of a partition: kBoxes in csrc/region.cpp
    return means.new_empty(len(bulk), boxes, 2, 3), means.new_empty(len(bulk), boxes)


def _splat_spans(means2d, extents, owner, num_partitions, width, height) -> Tensor:
    return owner.new_empty((num_partitions, height, 2))


def _region_spans(boxes, leaves, viewmat, K, width, height, near) -> Tensor:
    return boxes.new_empty((len(boxes), height, 2), dtype=torch.int32)


def _regions_present(boxes, leaves, viewmats, Ks, sizes, near) -> Tensor:
    return boxes.new_empty((len(viewmats), len(boxes)), dtype=torch.bool)


def _project(means, *_: Any) -> tuple[Tensor, ...]:
    num = len(means)
    shapes: tuple[tuple[int, ...], ...] = ((num, 2), (num,), (num, 3), (num,), (num, 2))
    return tuple(means.new_empty(shape) for shape in shapes)


def _project_backward(means, quats, scales, opacities, viewmat, *_: Any) -> tuple[Tensor, ...]:
    return tuple(_like(tensor) for tensor in (means, quats, scales, opacities, viewmat))


def _spherical_harmonics(degree, means, *_: Any) -> Tensor:
    return means.new_empty(len(means), 3)


def _spherical_harmonics_backward(degree, means, cam_center, sh0, shN, visible, v_colors) -> tuple[Tensor, ...]:
    return tuple(_like(tensor) for tensor in (means, cam_center, sh0, shN))


def _nothing(*_: Any) -> None:
    return None


def _composite(colors, depths, transmittances, background) -> tuple[Tensor, Tensor, Tensor]:
    height, width = colors.shape[1:3]
    return colors.new_empty(height, width, 3), colors.new_empty(height, width), colors.new_empty(height, width)


def _composite_backward(colors, depths, transmittances, background, v_rgb, v_depth, v_alpha) -> tuple[Any, ...]:
    return _like(colors), None if v_depth is None else _like(depths), _like(transmittances), _like(background)


def _l1_ssim(pred, gt, ssim_lambda, need_grad, *_: Any) -> tuple[Tensor, ...]:
    v_pred = pred.new_empty(pred.shape if need_grad else (0,))
    return pred.new_empty(()), pred.new_empty(()), pred.new_empty(()), v_pred


def _update_saturation(transmittances, slots, spans, bits, budgets, eps) -> tuple[Tensor, Tensor, Tensor]:
    counts = bits.new_empty((len(spans), 4), dtype=torch.int64)
    return _like(bits), budgets.new_empty(_unknown()), counts


def _pack_pixels(colors, depths, transmittances, spans, row_starts, count, with_depth, half) -> Tensor:
    return colors.new_empty((count, 5 if with_depth else 4), dtype=torch.float16 if half else torch.float32)


def _unpack_pixels(stream, spans, row_starts, width) -> tuple[Tensor, Tensor, Tensor]:
    height = len(spans)
    shapes: tuple[tuple[int, ...], ...] = ((height, width, 3), (height, width), (height, width))
    colors, depths, transmittances = (stream.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return colors, depths, transmittances


def _pack_active(stream) -> tuple[Tensor, Tensor, Tensor]:
    words = (len(stream) + 31) // 32
    count = stream.new_empty((1,), dtype=torch.int64)
    return stream.new_empty((words,), dtype=torch.int32), _like(stream), count


def _unpack_active(bits, values, count) -> Tensor:
    return values.new_empty(count, values.shape[1])


def _composite_streams(stream, spans, row_starts, background, width) -> tuple[Tensor, Tensor, Tensor]:
    height = spans.shape[1]
    return stream.new_empty(height, width, 3), stream.new_empty(height, width), stream.new_empty(height, width)


def _composite_streams_backward(stream, spans, row_starts, background, *_: Any) -> tuple[Tensor, Tensor]:
    return _like(stream), _like(background)


def _like(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.shape)


_FAKES: dict[str, Callable[..., Any]] = {
    "rasterize_partials": _rasterize_partials,
    "rasterize_partials_backward": _rasterize_partials_backward,
    "locate": lambda points, *_: points.new_empty((len(points),), dtype=torch.int32),
    "bulk_boxes": _bulk_boxes,
    "content_bounds": _content_bounds,
    "region_spans": _region_spans,
    "splat_spans": _splat_spans,
    "regions_present": _regions_present,
    "project": _project,
    "project_backward": _project_backward,
    "spherical_harmonics": _spherical_harmonics,
    "spherical_harmonics_backward": _spherical_harmonics_backward,
    "update_gaussians": _nothing,
    "add_statistics": _nothing,
    "composite": _composite,
    "composite_backward": _composite_backward,
    "l1_ssim": _l1_ssim,
    "update_saturation": _update_saturation,
    "pack_pixels": _pack_pixels,
    "unpack_pixels": _unpack_pixels,
    "pack_active": _pack_active,
    "unpack_active": _unpack_active,
    "composite_streams": _composite_streams,
    "composite_streams_backward": _composite_streams_backward,
    "adam_rows": _nothing,
}
