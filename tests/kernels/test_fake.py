"""The ops on tensors without data: torch.compile and tests of shapes need no kernel, and no GPU for a GPU's shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_rasterize import make_scene
from test_streams import make_layers, make_region
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from splaxel_ns.cuda import _backend


def op(name: str) -> Any:
    return getattr(_backend.load(), name).default


def examples() -> dict[str, tuple[Any, ...]]:
    colors, depths, transmittances, background = make_layers(2, 12, 20)
    rgb, flat = torch.rand(12, 20, 3), torch.rand(12, 20)
    region = make_region(12, 20, 1)
    place = (region.spans, region.row_starts)
    stream = torch.rand(region.num_pixels, 5)
    n = 7
    means, quats, scales, opacities = torch.randn(n, 3), torch.randn(n, 4), torch.rand(n, 3), torch.rand(n)
    means[:, 2] += 5
    view, K = torch.eye(4), torch.tensor([[20.0, 0, 10], [0, 20, 6], [0, 0, 1]])
    sh = (torch.zeros(3), torch.rand(n, 1, 3), torch.rand(n, 3, 3), torch.ones(n, dtype=torch.bool))
    splat_grads = (torch.rand(n, 2), torch.rand(n), torch.rand(n, 3), torch.rand(n))
    boxes = torch.tensor([[-1.0, -1, 3], [1, 1, 6]]).expand(2, 4, 2, 3).contiguous()
    return {
        "composite": (colors, depths, transmittances, background),
        "composite_backward": (colors, depths, transmittances, background, rgb, flat, flat),
        "l1_ssim": (rgb, rgb.flip(0), 0.2, True, None, None, 12, 20),
        "project": (means, quats, scales, opacities, view, K, 20, 12, 0.1, 100.0, False),
        "project_backward": (
            means, quats, scales, opacities, view, K, torch.rand(n, 2), 20, 12, False, *splat_grads,
        ),
        "spherical_harmonics": (1, means, *sh),
        "spherical_harmonics_backward": (1, means, *sh, torch.rand(n, 3)),
        "region_spans": (boxes, None, view, K, 20, 12, 0.1),
        "regions_present": (boxes, None, view[None], K[None], torch.tensor([[20, 12]], dtype=torch.int32), 0.1),
        "content_bounds": (
            means, scales, torch.zeros(n, dtype=torch.int32), torch.tensor([[[-1.0] * 3, [1.0] * 3]]),
            torch.zeros(1, dtype=torch.int32), 1.0,
        ),
        "locate": (
            means, torch.zeros(1, dtype=torch.int32), torch.zeros(1), torch.tensor([[-1, -2]], dtype=torch.int32),
        ),
        "bulk_boxes": (means, torch.zeros(n, dtype=torch.int32), 2, 1, 0.1, 0.1),
        "add_statistics": (
            torch.rand(n, 2), torch.rand(n, 2), torch.rand(n, 3), 9.0, 9.0, 18.0, *(torch.rand(n) for _ in range(3)),
        ),
        "pack_pixels": (colors[0], depths[0], transmittances[0], *place, region.num_pixels, True, True),
        "unpack_pixels": (stream, *place, 20),
        "pack_active": (stream,),
        "unpack_active": (
            torch.full(((len(stream) + 31) // 32,), -1, dtype=torch.int32), torch.rand(256, 5), len(stream),
        ),
        "composite_streams": (stream, region.spans[None], region.row_starts[None], background, 20),
        "composite_streams_backward": (
            stream, region.spans[None], region.row_starts[None], background, 20, rgb, flat, flat,
        ),
        "adam_rows": (
            *(torch.rand(n, 3) for _ in range(4)), torch.ones(n, dtype=torch.bool), 0.1, 0.9, 0.999, 1e-8, 1.0,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(examples()))
def test_as_the_kernels(name: str) -> None:
    """The schema's promises (what is changed in place, what is new) and the shapes are those of the kernels."""
    torch.library.opcheck(op(name), examples()[name], test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rasterizer_shapes(device: str) -> None:
    scene = make_scene(3, seed=1)
    tree = scene.tree
    splats: list[Any] = [scene.means2d, scene.depths, scene.conics, scene.opacities, scene.colors, scene.extents]
    view = [scene.viewmat, scene.K, tree.axis, tree.threshold, tree.children, tree.lo, tree.hi]
    order = torch.tensor(scene.order, dtype=torch.int32)
    rasterize, backward = op("rasterize_partials"), op("rasterize_partials_backward")
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as mode:

        def fake(tensors: list[Any]) -> list[Any]:
            there = [mode.from_tensor(tensor) for tensor in tensors]
            return there if device == "cpu" else [torch.empty_like(tensor, device="cuda") for tensor in there]

        splats, view, rest = fake(splats), fake(view), fake([order, scene.spans])
        owner, means = fake([scene.owner, scene.means])
        images = rasterize(*splats, owner, means, None, *view, *rest, None, scene.width, 0, 1e-4, False)
        assert [list(image.shape) for image in images[:3]] == [[3, 45, 61, 3], [3, 45, 61], [3, 45, 61]]
        assert images[-1].shape == (7,) and images[3].shape[1] == 16 and images[0].device.type == device
        gradients = backward(
            splats[2], splats[3], *view, *rest, None, scene.width, 0, 1e-4, *images[3:-1], *images[:3], True
        )
        assert [list(gradient.shape) for gradient in gradients] == [
            [199, 2],
            [199],
            [199, 3],
            [199],
            [199, 3],
            [199, 2],
        ]


def test_compiles_without_a_break() -> None:
    ops = _backend.load()

    def picture(colors: Tensor, depths: Tensor, transmittances: Tensor, background: Tensor) -> Tensor:
        rgb, _, alpha = ops.composite(colors, depths, transmittances, background)
        return rgb * alpha[..., None] + 1

    arguments = make_layers(2, 9, 8)
    compiled = torch.compile(picture, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*arguments), picture(*arguments))
