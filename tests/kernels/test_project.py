"""project: values and gradients against a float64 reference and gsplat's, and every reason to cull."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from splaxel_ns import cuda
from splaxel_ns.cuda import _reference_splats as reference

WIDTH, HEIGHT = 160, 120
NEAR, FAR = 0.2, 50.0
# fx != fy and a principal point far from the middle.
K = torch.tensor([[210.0, 0.0, 95.0], [0.0, 170.0, 41.0], [0.0, 0.0, 1.0]])


def camera(seed: int = 0) -> Tensor:  # [4, 4]
    generator = torch.Generator().manual_seed(seed)
    viewmat = torch.eye(4)
    viewmat[:3, :3] = reference.rotation_matrices(torch.randn(1, 4, generator=generator, dtype=torch.float64))[0]
    viewmat[:3, 3] = torch.randn(3, generator=generator)
    return viewmat


def scene(count: int, viewmat: Tensor, seed: int = 0) -> list[Tensor]:
    """Gaussians in front of, behind and beside the camera, some beyond the clamp of the Jacobian."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    in_camera = random(count, 3) * torch.tensor([3.0, 2.0, 3.0]) + torch.tensor([0.0, 0.0, 3.0])
    means = (in_camera - viewmat[:3, 3]) @ viewmat[:3, :3]
    return [means, random(count, 4) * 3, torch.exp(random(count, 3) * 0.8 - 2.2), torch.sigmoid(random(count) * 2)]


Project = Callable[..., tuple[Tensor, ...]]
project: Project = cuda.project
reference_project: Project = reference.project


def run(
    function: Project, tensors: Sequence[Tensor], dtype: torch.dtype, antialiased: bool, weights: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Returns the results and the gradients of the weighted sum of all but the extents."""
    leaves = [tensor.to(dtype).clone().requires_grad_() for tensor in tensors]
    results = function(*leaves, K.to(dtype), WIDTH, HEIGHT, NEAR, FAR, antialiased)
    torch.autograd.backward(list(results[:4]), [weight.to(dtype) for weight in weights])
    return results, [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def error(ours: Tensor, expected: Tensor) -> float:
    return float((ours.double() - expected).detach().abs().max() / expected.detach().abs().max().clamp_min(1e-30))


def random_weights(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    shapes = [(count, 2), (count,), (count, 3), (count,)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("count", [1, 127, 1000])  # below, beside and above a multiple of the block
def test_values_and_gradients_match_float64(count: int, antialiased: bool) -> None:
    tensors = [*scene(count, camera()), camera()]
    weights = random_weights(count)
    results, gradients = run(project, tensors, torch.float32, antialiased, weights)
    expected, expected_gradients = run(reference_project, tensors, torch.float64, antialiased, weights)
    assert torch.equal(results[4] > 0, expected[4] > 0)
    if count == 1000:
        assert (expected[4][:, 0] > 0).sum() > 100 and (expected[4][:, 0] == 0).sum() > 100
    for ours, theirs in zip(results[:4], expected[:4], strict=True):
        assert error(ours, theirs) < 2e-6
    # Extents are enlarged by 1e-5, never smaller.
    assert bool((results[4].double() >= expected[4]).all()) and error(results[4], expected[4]) < 2e-5
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert error(ours, theirs) < 1e-5


def test_float64_reference_has_the_derivatives_of_its_values() -> None:
    tensors = [tensor.double() for tensor in scene(40, camera(1), seed=1)] + [camera(1).double()]
    seen = reference_project(*tensors, K.double(), WIDTH, HEIGHT, NEAR, FAR, True)[4][:, 0] > 0
    leaves = [tensor[seen][:2].requires_grad_() for tensor in tensors[:4]] + [tensors[4].requires_grad_()]
    assert len(leaves[0]) == 2

    def values(*inputs: Tensor) -> tuple[Tensor, ...]:
        return reference_project(*inputs, K.double(), WIDTH, HEIGHT, NEAR, FAR, True)[:4]

    assert torch.autograd.gradcheck(values, leaves, eps=1e-6, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("antialiased", [False, True])
def test_agrees_with_gsplat(antialiased: bool) -> None:
    torch_impl = pytest.importorskip("gsplat.cuda._torch_impl")
    viewmat = camera(2)
    means, quats, scales, opacities = scene(500, viewmat, seed=2)
    ours = project(means, quats, scales, opacities, viewmat, K, WIDTH, HEIGHT, NEAR, FAR, antialiased)
    covars, _ = torch_impl._quat_scale_to_covar_preci(quats.double(), scales.double(), True, False)
    _, means2d, depths, conics, compensations = torch_impl._fully_fused_projection(
        means.double(), covars, viewmat.double()[None], K.double()[None], WIDTH, HEIGHT, 0.3, NEAR, FAR, antialiased
    )
    seen = ours[4][:, 0] > 0
    theirs = [means2d[0], depths[0], conics[0], opacities * (compensations[0] if antialiased else 1)]
    for mine, other in zip(ours[:4], theirs, strict=True):
        assert error(mine[seen], other[seen]) < 2e-6


def test_extents_hold_every_pixel_that_reaches_the_threshold() -> None:
    viewmat = camera(3)
    means, quats, scales, opacities = scene(300, viewmat, seed=3)
    means2d, _, conics, alphas, extents = project(means, quats, scales, opacities, viewmat, K, WIDTH, HEIGHT, NEAR, FAR)
    seen = extents[:, 0] > 0
    angle = torch.linspace(0, 2 * math.pi, 721, dtype=torch.float64)
    circle = torch.stack([angle.cos(), angle.sin()], -1)  # [721, 2]
    a, b, c = conics[seen].double().unbind(-1)
    inverse = torch.stack([torch.stack([a, b], -1), torch.stack([b, c], -1)], -2)
    factor = torch.linalg.cholesky(torch.linalg.inv(inverse))
    ellipse = circle @ factor.transpose(1, 2) * (2 * (255 * alphas[seen].double()).log()).sqrt()[:, None, None]
    reach = ellipse.abs().amax(1) / extents[seen]
    assert 0.999 < float(reach.min()) and float(reach.max()) <= 1
    assert bool(torch.isfinite(means2d).all())


def one(changes: dict[str, list[float]]) -> tuple[Tensor, ...]:
    """Projects one harmless Gaussian, with the given fields changed, through the identity camera."""
    fields = {"means": [0.0, 0.0, 3.0], "quats": [1.0, 0.0, 0.0, 0.0], "scales": [0.1, 0.1, 0.1], "opacities": [0.8]}
    fields.update(changes)
    tensors = [torch.tensor([fields[name]]) for name in ("means", "quats", "scales")]
    return project(*tensors, torch.tensor(fields["opacities"]), torch.eye(4), K, WIDTH, HEIGHT, NEAR, FAR)


def test_harmless_gaussian_is_seen() -> None:
    assert float(one({})[4].min()) > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"means": [0.0, 0.0, -3.0]},
        {"means": [0.0, 0.0, 0.1999]},
        {"means": [0.0, 0.0, 50.01]},
        {"means": [0.0, 0.0, 0.0]},
        {"means": [30.0, 0.0, 3.0]},
        {"means": [0.0, -30.0, 3.0]},
        {"quats": [0.0, 0.0, 0.0, 0.0]},
        {"opacities": [0.0039]},
        {"opacities": [0.0]},
        {"opacities": [-1.0]},
        {"means": [math.nan, 0.0, 3.0]},
        {"means": [0.0, math.inf, 3.0]},
        {"means": [0.0, 0.0, math.nan]},
        {"quats": [1.0, math.nan, 0.0, 0.0]},
        {"quats": [math.inf, 0.0, 0.0, 0.0]},
        {"scales": [0.1, math.nan, 0.1]},
        {"scales": [math.inf, 0.1, 0.1]},
        {"scales": [1e30, 0.1, 0.1]},
        {"opacities": [math.nan]},
        {"opacities": [math.inf]},
    ],
    ids=str,
)
def test_culls(changes: dict[str, list[float]]) -> None:
    for result in one(changes):
        assert bool((result == 0).all())


def test_near_and_far_planes_are_inclusive() -> None:
    assert float(one({"means": [0.0, 0.0, NEAR]})[4].min()) > 0
    assert float(one({"means": [0.0, 0.0, FAR]})[4].min()) > 0


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-25])
def test_vanishing_scales_leave_the_blur(scale: float) -> None:
    _, _, conics, opacities, _ = one({"scales": [scale, scale, scale]})
    assert torch.allclose(conics, torch.tensor([[1 / 0.3, 0.0, 1 / 0.3]]))
    assert float(opacities) == pytest.approx(0.8)


@pytest.mark.parametrize("antialiased", [False, True])
def test_flat_needles_keep_their_digits(antialiased: bool) -> None:
    # Minor axes a millionth of the major one, in every direction: the determinant by its definition is all rounding.
    tensors = [*scene(400, camera(4), seed=4), camera(4)]
    tensors[2] = tensors[2] * torch.tensor([3.0, 1e-6, 3e-3])
    weights = random_weights(400)
    results, gradients = run(project, tensors, torch.float32, antialiased, weights)
    expected, expected_gradients = run(reference_project, tensors, torch.float64, antialiased, weights)
    assert torch.equal(results[4] > 0, expected[4] > 0)
    assert error(results[2], expected[2]) < 1e-5
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert error(ours, theirs) < 1e-5


def test_bad_gaussians_spoil_nobody_else() -> None:
    viewmat = camera(5)
    tensors = scene(200, viewmat, seed=5)
    weights = random_weights(200)
    _, clean = run(project, [*tensors, viewmat], torch.float32, True, weights)
    bad = [tensor.clone() for tensor in tensors]
    rows = torch.arange(0, 200, 7)
    for k, row in enumerate(rows.tolist()):
        bad[k % 4][row] = [math.nan, math.inf, -math.inf][k % 3]
    results, gradients = run(project, [*bad, viewmat], torch.float32, True, weights)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in [*results, *gradients])
    good = torch.ones(200, dtype=torch.bool)
    good[rows] = False
    for before, after in zip(clean[:4], gradients[:4], strict=True):
        assert torch.equal(before[good], after[good])
        assert bool((after[rows] == 0).all())


def test_gradients_that_arrive_at_culled_gaussians_are_ignored() -> None:
    means = torch.tensor([[0.0, 0.0, 3.0], [0.0, 0.0, -3.0]], requires_grad=True)
    viewmat = torch.eye(4, requires_grad=True)
    ones = torch.ones(2, 3) * 0.1
    results = project(means, torch.ones(2, 4), ones, torch.ones(2) * 0.5, viewmat, K, WIDTH, HEIGHT, NEAR, FAR)
    results[0].backward(torch.tensor([[1.0, 1.0], [math.nan, math.inf]]))
    assert means.grad is not None and viewmat.grad is not None
    assert bool(torch.isfinite(means.grad).all()) and bool((means.grad[1] == 0).all())
    assert bool(torch.isfinite(viewmat.grad).all()) and bool((viewmat.grad[3] == 0).all())


def test_no_gaussians() -> None:
    tensors = [torch.zeros(0, 3), torch.zeros(0, 4), torch.zeros(0, 3), torch.zeros(0)]
    results, gradients = run(project, [*tensors, torch.eye(4)], torch.float32, False, random_weights(0))
    assert [list(result.shape) for result in results] == [[0, 2], [0], [0, 3], [0], [0, 2]]
    assert bool((gradients[4] == 0).all())


def test_result_does_not_depend_on_threads() -> None:
    tensors = [*scene(5000, camera(6), seed=6), camera(6)]
    threads = torch.get_num_threads()
    outcomes = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        outcomes.append(run(project, tensors, torch.float32, False, random_weights(5000)))
    torch.set_num_threads(threads)
    for results, gradients in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0][0], results, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0][1], gradients, strict=True))


def test_thresholds_are_those_of_the_reference() -> None:
    values = cuda.thresholds()
    assert values["alpha_min"] == reference.ALPHA_MIN
    assert (values["blur"], values["clamp_margin"]) == (reference.BLUR, reference.CLAMP)
    assert (values["alpha_max"], values["stop"]) == (0.999, 1e-4)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(3, 2), r"means must have shape \[3, 3\], got \[3, 2\]"),
        (1, torch.zeros(2, 4), r"quats must have shape \[3, 4\], got \[2, 4\]"),
        (2, torch.zeros(3, 3, dtype=torch.float64), "scales must be torch.float32"),
        (5, torch.tensor([[10.0, 1.0, 5.0], [0.0, 10.0, 5.0], [0.0, 0.0, 1.0]]), "skew"),
        (5, torch.zeros(3, 3), "focal lengths"),
        (4, torch.full((4, 4), math.nan), "viewmat has entries that are not finite"),
        (6, 0, "the image must have pixels"),
        (8, -1.0, "near and far"),
    ],
)
def test_refuses(position: int, value, message: str) -> None:
    arguments: list[Any] = [
        torch.zeros(3, 3),
        torch.ones(3, 4),
        torch.ones(3, 3),
        torch.ones(3),
        torch.eye(4),
        K,
        8,
        8,
        0.1,
        9.0,
    ]
    arguments[position] = value
    with pytest.raises(ValueError, match=message):
        project(*arguments)
