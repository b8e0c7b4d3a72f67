"""The oracle: with `boundary exact`, image and gradients of any number of partitions are those of one (design 2, 9).

One model is a dense blend in float64 of every Gaussian with every pixel, without tiles, regions or boxes.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import splaxel_ns
from splaxel_ns.cuda import _reference, _reference_splats

NEAR, FAR = 0.01, 1e10
ALPHA_MIN, ALPHA_MAX = 1.0 / 255.0, 0.999


@dataclass
class Scene:
    """Leaf tensors and the rest of `rasterize`'s arguments."""

    tensors: dict[str, Tensor]
    viewmat: Tensor
    K: Tensor
    width: int
    height: int

    def leaves(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {name: value.to(dtype, copy=True).requires_grad_() for name, value in self.tensors.items()}


def look_at(eye: list[float], target: list[float]) -> Tensor:
    """World to camera, OpenCV axes, the camera's y as far down the world's z as it goes."""
    eye_, target_ = torch.tensor(eye, dtype=torch.float64), torch.tensor(target, dtype=torch.float64)
    forward = torch.nn.functional.normalize(target_ - eye_, dim=0)
    right = torch.nn.functional.normalize(torch.linalg.cross(forward, torch.tensor([0.1, 0.2, 1.0]).double()), dim=0)
    rotation = torch.stack([right, torch.linalg.cross(forward, right), forward])
    viewmat = torch.eye(4, dtype=torch.float64)
    viewmat[:3, :3], viewmat[:3, 3] = rotation, -rotation @ eye_
    return viewmat.float()


def make_scene(kind: str) -> Scene:
    """Gaussians of which many straddle and many are opaque.

    "plain": an ordinary lens from outside; "wide": 90 degrees from inside; "huge": some Gaussians larger than the
    scene, seen through a wide lens with its principal point off centre.
    """
    generator = torch.Generator().manual_seed({"plain": 1, "wide": 2, "huge": 3}[kind])
    num, width, height = 250, 45, 38

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    scales = 0.02 + 0.25 * rand(num, 3) ** 2
    focal, eye, target = 60.0, [2.2, -1.8, 1.1], [0.0, 0.0, 0.0]
    center = (width / 2, height / 2)
    if kind != "plain":
        focal, eye, target = width / 2, [0.13, -0.21, 0.32], [0.7, 0.5, 0.2]
    if kind == "huge":
        scales[:20] *= 12.0
        center = (0.3 * width, 0.65 * height)
    opacities = torch.where(rand(num) < 0.4, 0.95 + 0.05 * rand(num), 0.05 + 0.9 * rand(num))
    tensors = {
        "means": 2.0 * rand(num, 3) - 1.0,
        "quats": torch.randn(num, 4, generator=generator),
        "scales": scales,
        "opacities": opacities,
        "sh": 0.4 * torch.randn(num, 16, 3, generator=generator),
        "background": rand(3),
    }
    K = torch.tensor([[focal, 0.0, center[0]], [0.0, focal, center[1]], [0.0, 0.0, 1.0]])
    return Scene(tensors, look_at(eye, target), K, width, height)


def render(scene: Scene, leaves: dict[str, Tensor], **options):
    return splaxel_ns.rasterize(
        leaves["means"],
        leaves["quats"],
        leaves["scales"],
        leaves["opacities"],
        leaves["sh"],
        scene.viewmat,
        scene.K,
        scene.width,
        scene.height,
        leaves["background"],
        count_clipped=True,
        **options,
    )


def dense(scene: Scene, leaves: dict[str, Tensor], depths32: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One model without boxes or stop in float64: rgb, alpha, undivided depth, and the pixels float32 decides alike.

    The order is by float32 depth, as defined. Where an alpha is within rounding of a threshold, float32 may draw a
    pair that float64 leaves out: such pixels are not compared.
    """
    viewmat, K = scene.viewmat.double(), scene.K.double()
    means2d, depths, conics, opacities, extents = _reference_splats.project(
        leaves["means"],
        leaves["quats"],
        leaves["scales"],
        leaves["opacities"],
        viewmat,
        K,
        scene.width,
        scene.height,
        NEAR,
        FAR,
    )
    visible = extents[:, 0] > 0
    center = -(viewmat[:3, :3].T @ viewmat[:3, 3])
    colors = _reference_splats.spherical_harmonics(
        3, leaves["means"], center, leaves["sh"][:, :1], leaves["sh"][:, 1:], visible
    )
    order = _reference.nearest_first(depths32, means2d.detach())
    order = order[visible[order]]
    y, x = torch.meshgrid(
        torch.arange(scene.height, dtype=torch.float64) + 0.5,
        torch.arange(scene.width, dtype=torch.float64) + 0.5,
        indexing="ij",
    )
    dx = x - means2d[order, 0, None, None]
    dy = y - means2d[order, 1, None, None]
    a, b, c = (conics[order, i, None, None] for i in range(3))
    raw = opacities[order, None, None] * torch.exp(-0.5 * (a * dx * dx + c * dy * dy) - b * dx * dy)  # [M, H, W]
    decided = ((raw / ALPHA_MIN - 1).abs() > 1e-4) & ((raw / ALPHA_MAX - 1).abs() > 1e-5)
    alpha = torch.where(raw >= ALPHA_MIN, raw.clamp_max(ALPHA_MAX), 0.0)
    through = torch.cumprod(torch.cat([torch.ones_like(alpha[:1]), 1 - alpha]), dim=0)
    weights = through[:-1] * alpha
    rgb = torch.einsum("mhw,mc->hwc", weights, colors[order]) + through[-1][..., None] * leaves["background"]
    depth = torch.einsum("mhw,m->hw", weights, depths[order])
    return rgb, 1 - through[-1], depth, decided.all(dim=0).detach()


def gradients(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: leaf.grad.double() for name, leaf in leaves.items() if leaf.grad is not None}


def assert_gradients_close(ours: dict[str, Tensor], reference: dict[str, Tensor], bound: float) -> None:
    """Within `bound` of the largest entry of each tensor."""
    assert ours.keys() == reference.keys()
    for name, value in reference.items():
        error = float((ours[name] - value).abs().max() / value.abs().max())
        assert error <= bound, f"{name}: {error:.2e} of the largest gradient"


@pytest.mark.parametrize("kind", ["plain", "wide", "huge"])
@pytest.mark.parametrize("num_partitions", [1, 2, 3, 5, 8, 16])
def test_exact_equals_the_dense_blend(kind: str, num_partitions: int) -> None:
    scene = make_scene(kind)
    ours, doubles = scene.leaves(torch.float32), scene.leaves(torch.float64)
    rgb, alpha, depth, info = render(scene, ours, stop=0.0, num_partitions=num_partitions, boundary="exact")
    reference = dense(scene, doubles, info["depths"].detach())
    decided = reference[3]
    assert decided.float().mean() > 0.95
    weight = torch.rand(*rgb.shape, generator=torch.Generator().manual_seed(0)) * decided[..., None]
    for value, expected in ((rgb, reference[0]), (alpha, reference[1]), (depth, reference[2] / reference[1])):
        assert float((value - expected)[decided].detach().abs().max()) <= 1e-5 * max(
            1.0, float(expected[decided].detach().abs().max())
        )
    ((rgb * weight).sum() + (alpha * weight[..., 0]).sum()).backward()
    ((reference[0] * weight).sum() + (reference[1] * weight[..., 0]).sum()).backward()
    assert_gradients_close(gradients(ours), gradients(doubles), 1e-5)


@pytest.mark.parametrize("kind", ["plain", "wide", "huge"])
@pytest.mark.parametrize("num_partitions", [2, 3, 5, 8, 16])
def test_exact_equals_one_partition(kind: str, num_partitions: int) -> None:
    scene = make_scene(kind)
    one, many = scene.leaves(torch.float32), scene.leaves(torch.float32)
    expected = render(scene, one, stop=0.0)
    result = render(scene, many, stop=0.0, num_partitions=num_partitions, boundary="exact")
    stats = result[3]["stats"]
    assert stats.clipped_pairs == 0 and stats.straddling > 0.2 * stats.num_splats
    generator = torch.Generator().manual_seed(1)
    weights = [torch.rand(*value.shape, generator=generator) for value in expected[:3]]
    for value, reference in zip(result[:3], expected[:3], strict=True):
        assert float((value - reference).abs().max()) <= 1e-5 * max(1.0, float(reference.abs().max()))
    for values in (result, expected):
        torch.stack([(v * w).sum() for v, w in zip(values[:3], weights, strict=True)]).sum().backward()
    assert_gradients_close(gradients(many), gradients(one), 1e-5)


STOP_BOUNDS = {"plain": 1e-3, "wide": 1e-3, "huge": 3e-3}
"""What the stop at T <= 1e-4 may change, in parts of the largest gradient of each tensor.

It leaves out less than 1e-4 of each pixel. That is 1e-3 of the gradients (design 2) unless opaque splats larger than
the scene cover every pixel: in "huge" the largest gradient of a shape is so small that what one partition leaves out is
2.6e-3 of it, while three partitions, each of which has a stop of its own, leave out nearly nothing.
"""


def assert_stop_is_harmless(
    kind: str, images: tuple[Tensor, Tensor], ours: dict[str, Tensor], reference: dict[str, Tensor], weight: Tensor
) -> None:
    """Image within 2e-4 of the largest colour, gradients within `STOP_BOUNDS`."""
    assert float((images[0] - images[1]).abs().max()) <= 2e-4 * max(1.0, float(images[1].abs().max()))
    # The background's gradient is what shines through, which the stop may change by 1e-4 in each pixel.
    background = (ours.pop("background") - reference.pop("background")).abs()
    assert float(background.max()) <= 1e-4 * float(weight.sum())
    assert_gradients_close(ours, reference, STOP_BOUNDS[kind])


@pytest.mark.parametrize("kind", ["plain", "wide", "huge"])
def test_the_stop_of_one_partition_against_the_dense_blend(kind: str) -> None:
    scene = make_scene(kind)
    ours, doubles = scene.leaves(torch.float32), scene.leaves(torch.float64)
    rgb, _, _, info = render(scene, ours)
    expected, _, _, decided = dense(scene, doubles, info["depths"].detach())
    weight = torch.rand(*rgb.shape, generator=torch.Generator().manual_seed(2)) * decided[..., None]
    (rgb * weight).sum().backward()
    (expected * weight).sum().backward()
    images = (rgb.detach()[decided], expected.detach()[decided])
    assert_stop_is_harmless(kind, images, gradients(ours), gradients(doubles), weight)


@pytest.mark.parametrize("kind", ["plain", "wide", "huge"])
@pytest.mark.parametrize("num_partitions", [2, 3, 5, 8, 16])
def test_exact_equals_one_partition_with_the_stop(kind: str, num_partitions: int) -> None:
    """Each partition's stop ends pixels elsewhere than the stop of one partition."""
    scene = make_scene(kind)
    weight = torch.rand(scene.height, scene.width, 3, generator=torch.Generator().manual_seed(2))
    one, many = scene.leaves(torch.float32), scene.leaves(torch.float32)
    expected = render(scene, one)[0]
    rgb = render(scene, many, num_partitions=num_partitions, boundary="exact")[0]
    for image in (expected, rgb):
        (image * weight).sum().backward()
    assert_stop_is_harmless(kind, (rgb.detach(), expected.detach()), gradients(many), gradients(one), weight)


@pytest.mark.parametrize("boundary", ["filter", "none"])
def test_approximations_draw_each_pair_at_most_once(boundary: str) -> None:
    """`filter` drops pairs of straddlers, `none` drops nothing; neither cuts a pair at a region's edge."""
    scene = make_scene("plain")
    with torch.no_grad():
        one = render(scene, scene.tensors, stop=0.0)
        many = render(scene, scene.tensors, stop=0.0, num_partitions=8, boundary=boundary)
    stats = many[3]["stats"]
    assert stats.clipped_pairs == 0
    if boundary == "none":
        # Products commute: opacity is exact, only the order of the colours is not.
        assert stats.dropped_pairs == 0
        torch.testing.assert_close(many[1], one[1], rtol=0, atol=1e-5)
    else:
        assert stats.dropped_pairs > 0
        assert bool((many[1] <= one[1] + 1e-5).all())


def test_directional_derivative_by_finite_differences() -> None:
    """The whole chain against itself: central differences of a smooth functional of the image in float32."""
    scene = make_scene("wide")
    leaves = scene.leaves(torch.float32)
    options = {"stop": 0.0, "num_partitions": 1}
    render(scene, leaves, **options)[0].square().mean().backward()
    generator = torch.Generator().manual_seed(5)
    for name in ("sh", "background"):
        direction = torch.randn(*leaves[name].shape, generator=generator)
        step = 1e-2
        values = []
        for sign in (1.0, -1.0):
            moved = dict(scene.tensors)
            moved[name] = moved[name] + sign * step * direction
            values.append(render(scene, moved, **options)[0].double().square().mean())
        numeric = float(values[0] - values[1]) / (2 * step)
        analytic = float((leaves[name].grad * direction).sum())  # pyright: ignore[reportOptionalOperand]
        assert abs(numeric - analytic) <= 1e-2 * abs(analytic) + 1e-5


def test_nothing_to_see_is_the_background_with_zero_gradients() -> None:
    """Behind the camera, beyond the near plane, and no Gaussians at all."""
    scene = make_scene("plain")
    cases = [({}, {"near_plane": 100.0}), ({"means": scene.tensors["means"] + 100.0}, {})]
    for changed, options in cases:
        moved = Scene({**scene.tensors, **changed}, scene.viewmat, scene.K, scene.width, scene.height)
        leaves = moved.leaves(torch.float32)
        rgb, alpha, depth, info = render(moved, leaves, num_partitions=3, **options)
        torch.testing.assert_close(rgb, leaves["background"].detach().expand_as(rgb))
        assert float(alpha.abs().max()) == 0.0 and float(depth.abs().max()) == 0.0 and info["stats"].num_splats == 0
        rgb.sum().backward()
        for name in ("means", "quats", "scales", "opacities", "sh"):
            grad = leaves[name].grad
            assert grad is not None and float(grad.abs().max()) == 0.0
    empty = Scene(
        {name: value if name == "background" else value[:0] for name, value in scene.tensors.items()},
        scene.viewmat,
        scene.K,
        scene.width,
        scene.height,
    )
    rgb = render(empty, empty.leaves(torch.float32), num_partitions=4)[0]
    torch.testing.assert_close(rgb, scene.tensors["background"].expand_as(rgb))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gaussians_with_colours_that_are_none_are_not_drawn(value: float) -> None:
    scene = make_scene("plain")
    without = make_scene("plain")
    without.tensors = {name: tensor if name == "background" else tensor[1:] for name, tensor in scene.tensors.items()}
    scene.tensors["sh"][0, 5, 1] = value
    leaves = scene.leaves(torch.float32)
    rgb, _, _, info = render(scene, leaves)
    torch.testing.assert_close(rgb, render(without, without.tensors)[0], rtol=0, atol=0)
    assert info["owner"].shape == (250,)
    rgb.sum().backward()
    assert all(bool(leaf.grad.isfinite().all()) for leaf in leaves.values() if leaf.grad is not None)


@pytest.mark.parametrize("size", [(0, 38), (45, 10**9), (2**15, 2**15), (4.5, 38)])
def test_sizes_of_images_are_checked(size: tuple) -> None:
    scene = make_scene("plain")
    scene.width, scene.height = size
    with pytest.raises(ValueError, match="width"):
        render(scene, scene.tensors)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("means", torch.zeros(3, 2), "means"),
        ("opacities", torch.zeros(250, 1), "opacities"),
        ("sh", torch.zeros(250, 5, 3), "sh"),
        ("quats", torch.zeros(250, 4, dtype=torch.float64), "quats must be float32"),
        ("means", torch.zeros(()), "means"),
        ("sh", torch.zeros(250, 3), "sh"),
        ("scales", [1.0], "scales must be a tensor, not list"),
        ("background", torch.full((3,), float("inf")), "background must be finite"),
    ],
)
def test_wrong_tensors_are_named(name: str, value: Tensor, message: str) -> None:
    scene = make_scene("plain")
    with pytest.raises(ValueError, match=message):
        render(scene, {**scene.tensors, name: value})


@pytest.mark.parametrize(
    "options",
    [
        {"boundary": "sharp"},
        {"num_partitions": 0},
        {"num_partitions": 17},
        {"num_partitions": 2.5},
        {"tree": "oak"},
        {"sh_degree": 4},
        {"near_plane": 2.0, "far_plane": 1.0},
        {"rasterize_mode": "blurry"},
        {"stop": 1.0},
    ],
)
def test_wrong_options_are_named(options: dict) -> None:
    scene = make_scene("plain")
    with pytest.raises(ValueError, match=next(iter(options))):
        render(scene, scene.tensors, **options)
