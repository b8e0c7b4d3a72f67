"""update_gaussians: against torch's Adam on the gradients of autograd, on every level of instructions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from splaxel_ns import cuda
from splaxel_ns.cuda import _reference_splats as reference

WIDTH, HEIGHT = 120, 90
K = torch.tensor([[110.0, 0.0, 55.0], [0.0, 105.0, 47.0], [0.0, 0.0, 1.0]])
SETTINGS = [
    cuda.AdamSettings(lr, 0.9, 0.999, eps)
    for lr, eps in ((1e-3, 1e-15), (2e-3, 1e-15), (5e-3, 1e-8), (5e-2, 1e-15), (3e-3, 1e-15), (1e-4, 1e-15))
]


def parameters(count: int, bases: int, seed: int = 0) -> list[Tensor]:
    """Half of them in front of the cameras, in runs, so that whole blocks are out of sight."""
    g = torch.Generator().manual_seed(seed)
    means = torch.randn(count, 3, generator=g) * 0.6 + torch.tensor([0.0, 0.0, 4.0])
    means[count // 3 : count // 3 + count // 2, 2] -= 20.0
    shapes = ((4,), (3,), (1,), (3,), (bases - 1, 3))
    others = [torch.randn(count, *shape, generator=g) for shape in shapes]
    others[1] = others[1] * 0.3 - 2.5
    return [means, *others[:4], others[4] * 0.2]


def viewmats(num: int) -> list[Tensor]:
    views = []
    for k in range(num):
        view = torch.eye(4)
        view[:3, :3] = reference.rotation_matrices(torch.tensor([[1.0, 0.03 * k, -0.05 * k, 0.02 * k]]))[0]
        view[0, 3] = 0.4 * k
        views.append(view)
    return views


def draw(params: Sequence[Tensor], viewmat: Tensor, degree: int, antialiased: bool, gradients: Any) -> list[Tensor]:
    means, quats, log_scales, logits, sh0, shN = params
    center = -viewmat[:3, :3].T @ viewmat[:3, 3]
    scales, opacities, sh0 = log_scales.exp(), logits.sigmoid()[:, 0], sh0[:, None].contiguous()
    if gradients is not None:
        detached = [tensor.detach() for tensor in (means, quats, scales, opacities, sh0, shN)]
        results = cuda.project_and_color(
            detached, viewmat, K, center, WIDTH, HEIGHT, 0.1, 100.0, degree, antialiased, gradients
        )
        return [*results[:4], results[5], results[4]]
    *splats, extents = cuda.project(means, quats, scales, opacities, viewmat, K, WIDTH, HEIGHT, 0.1, 100.0, antialiased)
    colors = cuda.spherical_harmonics(degree, means, center, sh0, shN, extents[:, 0] > 0)
    return [*splats, colors, extents]


def backward(results: list[Tensor], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    torch.autograd.backward(results[:5], [torch.randn(each.shape, generator=g) for each in results[:5]])


def stepped(
    start: list[Tensor], degree: int, antialiased: bool, num_views: int, only_visible: bool, steps: int = 3
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Parameters and second moments after some steps of ours, and which Gaussians some view saw."""
    params = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    gradients = cuda.StepGradients()
    seen = torch.zeros(len(start[0]), dtype=torch.bool)
    for step in range(steps):
        for k, viewmat in enumerate(viewmats(num_views)):
            results = draw(params, viewmat, degree, antialiased, gradients)
            seen |= results[5][:, 0] > 0
            backward(results, 10 * step + k)
        (0.01 * params[2].square().sum()).backward()  # a regulariser, through autograd
        with torch.no_grad():
            scales, opacities = params[2].exp(), params[3].sigmoid()[:, 0]
        assert len(gradients) == num_views
        cuda.update_gaussians(
            params, moments[0], moments[1], SETTINGS, scales, opacities, gradients, step + 1, only_visible
        )
        gradients.clear()
        for param in params:
            assert param.grad is None or param is params[2]
            param.grad = None
    return [p.detach() for p in params], moments[1], seen


def expected(
    start: list[Tensor], degree: int, antialiased: bool, num_views: int, steps: int = 3
) -> tuple[list[Tensor], list[Tensor]]:
    params = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    adams = [
        torch.optim.Adam([p], lr=s.lr, betas=(s.beta1, s.beta2), eps=s.eps)
        for p, s in zip(params, SETTINGS, strict=True)
    ]
    for step in range(steps):
        for k, viewmat in enumerate(viewmats(num_views)):
            backward(draw(params, viewmat, degree, antialiased, None), 10 * step + k)
        (0.01 * params[2].square().sum()).backward()
        for adam in adams:
            adam.step()
            adam.zero_grad()
    return [p.detach() for p in params], [a.state[p]["exp_avg_sq"] for a, p in zip(adams, params, strict=True)]


def close(ours: list[Tensor], theirs: list[Tensor], start: list[Tensor], rows: Tensor) -> None:
    """Rounding may turn around a gradient of nearly zero, whose first step is still a whole learning rate."""
    for mine, other, begin in zip(ours, theirs, start, strict=True):
        scale = float((other - begin).abs().max())
        wrong = (mine - other)[rows].abs() > 1e-3 * scale
        assert float(wrong.float().mean()) < 1e-3, float(wrong.float().mean())


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("degree, num_views", [(3, 1), (3, 3), (1, 2), (0, 1)])
def test_all_is_torch_adam(degree: int, num_views: int, antialiased: bool) -> None:
    start = parameters(700, 16)
    ours, squares, _ = stepped(start, degree, antialiased, num_views, only_visible=False)
    theirs, their_squares = expected(start, degree, antialiased, num_views)
    everyone = torch.ones(700, dtype=torch.bool)
    close(ours, theirs, start, everyone)
    for mine, other in zip(squares, their_squares, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-6 * float(other.max()))


def test_visible_leaves_the_others_alone() -> None:
    start = parameters(1000, 9)
    ours, squares, seen = stepped(start, 2, False, 2, only_visible=True, steps=1)
    theirs, _ = expected(start, 2, False, 2, steps=1)
    assert 200 < int(seen.sum()) < 600
    close(ours, theirs, start, seen)
    for mine, begin, square in zip(ours, start, squares, strict=True):
        assert torch.equal(mine[~seen], begin[~seen]) and not square[~seen].any()


def test_versions_tell_that_parameters_moved() -> None:
    start = [torch.nn.Parameter(tensor) for tensor in parameters(10, 4)]
    zeros = [torch.zeros_like(p) for p in start]
    before = [p._version for p in start]
    scales, opacities = start[2].detach().exp(), start[3].detach().sigmoid()[:, 0]
    cuda.update_gaussians(
        start, zeros, [z.clone() for z in zeros], SETTINGS, scales, opacities, cuda.StepGradients(), 1, True
    )
    assert all(p._version > b for p, b in zip(start, before, strict=True))


def test_pose_gradients_as_of_the_separate_ops() -> None:
    start = parameters(300, 16)
    grads = []
    for gradients in (None, cuda.StepGradients()):
        viewmat = viewmats(2)[1].requires_grad_()
        backward(draw(start, viewmat, 3, False, gradients), 0)
        grads.append(viewmat.grad)
    assert torch.equal(grads[0], grads[1])


def test_views_of_other_gaussians_are_refused() -> None:
    gradients = cuda.StepGradients()
    backward(draw(parameters(20, 4), viewmats(1)[0], 1, False, gradients), 0)
    start = parameters(21, 4)
    zeros = [torch.zeros_like(p) for p in start]
    scales, opacities = start[2].exp(), start[3].sigmoid()[:, 0]
    with pytest.raises(ValueError, match="drawn with 20 Gaussians"):
        cuda.update_gaussians(start, zeros, zeros, SETTINGS, scales, opacities, gradients, 1, True)
