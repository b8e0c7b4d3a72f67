"""Growing by sampling: the relocation's formula, the draws, the noise, the schedule, moments, caps, few Gaussians."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from test_model import batch, make_model, one_camera, seeds, train_view
from test_strategy import make_params

from splaxel_ns import mcmc
from splaxel_ns.mcmc import MAX_COPIES, SplaxelMCMCStrategy, draw, mixed, normal_noise, shared_out

EPS = torch.finfo(torch.float32).eps


def make_strategy(**changes: Any) -> SplaxelMCMCStrategy:
    options: dict[str, Any] = {"refine_start_iter": 0, "refine_every": 10, "refine_stop_iter": 1000, "noise_lr": 0.0}
    return SplaxelMCMCStrategy(**(options | changes))


def with_opacities(values: list[float]) -> tuple[torch.nn.ParameterDict, dict[str, torch.optim.Optimizer]]:
    params, optimizers = make_params(len(values))
    with torch.no_grad():
        params["opacities"].copy_(torch.logit(torch.tensor(values))[:, None])
    return params, optimizers


def directly(opacity: float, n: int) -> tuple[float, float]:
    """Opacity and scale factor by the paper's double sum, in rational numbers but for the roots."""
    after = 1 - (1 - opacity) ** (1 / n)
    exact = Fraction(after)
    # Rational approximations of 1 / sqrt(k + 1) to 60 digits: the sum loses up to 15.
    roots = [Fraction(10**60, math.isqrt((k + 1) * 10**120)) for k in range(n)]
    total = sum(
        (-1) ** k * math.comb(i - 1, k) * roots[k] * exact ** (k + 1) for i in range(1, n + 1) for k in range(i)
    )
    return after, opacity / float(total)


@pytest.mark.parametrize("opacity", [0.0051, 0.1, 0.5, 0.9, 0.999, 1 - EPS])
def test_relocation_is_equation_9(opacity: float) -> None:
    """In float64 against the double sum; the float32 result is that one, rounded."""
    counts = torch.tensor([1, 2, 3, 10, 50, 51])
    opacities, scales = torch.full((6,), opacity, dtype=torch.float64), torch.rand(6, 3, dtype=torch.float64)
    new_opacities, new_scales = shared_out(opacities, scales, counts)
    for row, n in enumerate(counts.tolist()):
        after, factor = directly(opacity, n)
        assert float(new_opacities[row]) == pytest.approx(after, rel=1e-9)
        torch.testing.assert_close(new_scales[row], scales[row] * factor, rtol=1e-8, atol=0)
    rounded = shared_out(opacities.float(), scales.float(), counts)
    torch.testing.assert_close(rounded[0].double(), new_opacities, rtol=1e-5, atol=0)
    torch.testing.assert_close(rounded[1].double(), new_scales, rtol=1e-3 if opacity > 0.9999 else 1e-5, atol=0)


@pytest.mark.parametrize(("opacity", "n"), [(0.2, 2), (0.8, 5), (0.99, 51)])
def test_relocated_gaussians_look_as_the_one_did(opacity: float, n: int) -> None:
    """The same alpha at the centre, and the same integral along a line through it."""
    new_opacity, scale = shared_out(
        torch.tensor([opacity], dtype=torch.float64), torch.ones(1, 3, dtype=torch.float64), torch.tensor([n])
    )
    x = torch.linspace(-40, 40, 400_001, dtype=torch.float64)
    together = 1 - (1 - new_opacity * torch.exp(-0.5 * (x / scale[0, 0]) ** 2)) ** n
    assert float(together[200_000]) == pytest.approx(opacity, rel=1e-9)
    alone = opacity * torch.exp(-0.5 * x**2)
    assert float(torch.trapezoid(together, x)) == pytest.approx(float(torch.trapezoid(alone, x)), rel=1e-6)


def test_relocation_at_the_edges() -> None:
    nothing = shared_out(torch.zeros(0), torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    assert nothing[0].shape == (0,) and nothing[1].shape == (0, 3)
    opacities, scales = shared_out(torch.tensor([0.0, 1.0, 0.5]), torch.ones(3, 3), torch.tensor([2, 51, 400]))
    assert bool(opacities.isfinite().all()) and bool((scales > 0).all()) and bool(scales.isfinite().all())
    capped = shared_out(torch.tensor([0.5]), torch.ones(1, 3), torch.tensor([MAX_COPIES]))
    assert torch.equal(opacities[2:], capped[0]) and torch.equal(scales[2:], capped[1])


def test_draws_follow_the_weights() -> None:
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0, 4.0, 0.0])
    drawn = draw(weights, 80_000, torch.Generator().manual_seed(1))
    shares = torch.bincount(drawn, minlength=6) / 80_000
    torch.testing.assert_close(shares, weights / 8, rtol=0, atol=0.01)
    assert shares[[0, 3, 5]].tolist() == [0, 0, 0]
    assert torch.equal(drawn, draw(weights, 80_000, torch.Generator().manual_seed(1)))


def test_mixing_is_splitmix64() -> None:
    """The reference sequence for state 1234567, in Python's integers and in int64."""
    gamma, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    expected = []
    for number in range(1, 6):
        z = (1234567 + number * gamma) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        expected.append(z ^ (z >> 31))
    assert expected[0] == 6457827717110365317
    states = torch.tensor([mcmc._signed((1234567 + number * gamma) & mask) for number in range(1, 6)])
    assert [value & mask for value in mixed(states).tolist()] == expected


def test_noise_is_normal_and_each_gaussian_has_its_own() -> None:
    noise = normal_noise(3, 17, torch.arange(60_000))
    assert noise.shape == (60_000, 3) and noise.dtype == torch.float32
    torch.testing.assert_close(noise.mean(dim=0), torch.zeros(3), rtol=0, atol=0.02)
    torch.testing.assert_close(torch.cov(noise.T), torch.eye(3), rtol=0, atol=0.03)
    assert float((noise**4).mean()) == pytest.approx(3.0, abs=0.1)
    assert len(noise.flatten().unique()) > 170_000
    some = torch.tensor([59_999, 4, 123])
    assert torch.equal(normal_noise(3, 17, some), noise[some]), "whichever others are asked for"
    for seed, step in ((3, 18), (4, 17)):
        other = normal_noise(seed, step, torch.arange(60_000))
        assert abs(float((noise * other).mean())) < 0.01
    assert float((noise[1:] * noise[:-1]).mean()) == pytest.approx(0.0, abs=0.01)


def test_noise_follows_covariance_and_opacity() -> None:
    """Sigma times noise times sigmoid(100 (0.005 - opacity)), as gsplat; opaque Gaussians stay where they are."""
    params, optimizers = with_opacities([0.001, 0.005, 0.05, 0.9])
    with torch.no_grad():
        params["scales"].copy_(torch.rand(4, 3) - 1)
    before = params["means"].detach().double()
    optimizers["means"].param_groups[0]["lr"] = 1e-3
    assert make_strategy(noise_lr=200.0).refine(params, optimizers, {}, 3) is None
    q = torch.nn.functional.normalize(params["quats"].detach().double(), dim=1)
    w, vector = q[:, 0], q[:, 1:]
    eye = torch.eye(3, dtype=torch.float64)
    skew = torch.stack([torch.linalg.cross(vector, axis.expand(4, 3)) for axis in eye], dim=2)  # [4, 3, 3]
    rotation = eye + 2 * w[:, None, None] * skew + 2 * skew @ skew
    covariance = rotation @ torch.diag_embed(torch.exp(2 * params["scales"].detach().double())) @ rotation.mT
    gate = 1 / (1 + torch.exp(-100 * ((1 - torch.sigmoid(params["opacities"].detach().double()[:, 0])) - 0.995)))
    noise = normal_noise(0, 3, torch.arange(4)).double() * (gate * 0.2)[:, None]
    expected = before + (covariance @ noise[..., None])[..., 0]
    torch.testing.assert_close(params["means"].detach().double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(params["means"][3].detach().double(), before[3])
    assert float((params["means"][0].detach() - before[0]).abs().max()) > 1e-3


def check_consistent(params: Any, optimizers: Any, num: int) -> None:
    for name, p in params.items():
        assert optimizers[name].param_groups[0]["params"] == [p] and p.requires_grad and p.is_leaf
        assert len(p) == num and bool(p.isfinite().all()), name
        assert optimizers[name].state[p]["exp_avg"].shape == p.shape


def test_dead_gaussians_move_onto_opaque_ones_with_their_moments() -> None:
    params, optimizers = with_opacities([0.9, 0.001, 0.004, 0.5, 0.3])
    with torch.no_grad():
        params["means"][4, 1] = float("nan")  # not finite: as dead
    before = {name: p.detach().clone() for name, p in params.items()}
    moments = optimizers["means"].state[params["means"]]["exp_avg"].clone()
    report = make_strategy(cap_max=5).refine(params, optimizers, {}, 10)
    assert report is not None and (report.num_relocated, report.num_added, report.num_gaussians) == (3, 0, 5)
    assert "3 relocated, 0 added" in str(report)
    check_consistent(params, optimizers, 5)
    groups: dict[int, list[int]] = {0: [0], 3: [3]}
    for index in (1, 2, 4):
        source = 0 if torch.equal(params["means"][index], before["means"][0]) else 3
        groups[source].append(index)
    for source, members in groups.items():
        opacity, scales = shared_out(
            torch.sigmoid(before["opacities"][source]),
            torch.exp(before["scales"][source])[None],
            torch.tensor([len(members)]),
        )
        for index in members:
            for name in ("means", "quats", "features_dc", "features_rest"):
                assert torch.equal(params[name][index], before[name][source])
            torch.testing.assert_close(torch.sigmoid(params["opacities"][index]).detach(), opacity)
            torch.testing.assert_close(torch.exp(params["scales"][index]).detach(), scales[0])
            kept = optimizers["means"].state[params["means"]]["exp_avg"][index]
            assert torch.equal(kept, moments[index] if len(members) == 1 else torch.zeros(3))


def test_growth_by_five_percent_up_to_the_cap() -> None:
    params, optimizers = with_opacities([0.5] * 100)
    strategy = make_strategy(cap_max=108)
    before = params["means"].detach().clone()
    moments = optimizers["scales"].state[params["scales"]]["exp_avg"].clone()
    counts = []
    for step in range(1, 40):
        report = strategy.refine(params, optimizers, {}, step)
        if report is not None:
            counts.append((step, report.num_added, report.num_gaussians))
    assert counts == [(10, 5, 105), (20, 3, 108), (30, 0, 108)]
    check_consistent(params, optimizers, 108)
    assert torch.equal(params["means"][:100], before)
    assert all(bool((params["means"][i] == before).all(dim=1).any()) for i in range(100, 108))
    kept = optimizers["scales"].state[params["scales"]]["exp_avg"]
    assert torch.equal(kept[:100], moments) and bool((kept[100:] == 0).all())


def test_a_cap_below_the_start_removes_nothing() -> None:
    params, optimizers = with_opacities([0.5] * 40)
    report = make_strategy(cap_max=10).refine(params, optimizers, {}, 10)
    assert report is not None and report.num_added == 0 and len(params["means"]) == 40


@pytest.mark.parametrize("opacities", [[], [0.5], [0.001], [0.001, 0.002], [float("nan")]])
def test_few_gaussians_and_none_alive(opacities: list[float]) -> None:
    """Nothing to move onto: all stay; the one there is stays."""
    params, optimizers = with_opacities(opacities)
    strategy = make_strategy(noise_lr=5e5)
    for step in range(21):
        strategy.refine(params, optimizers, {}, step)
    assert len(params["means"]) == len(opacities)


def test_schedule_counts_images() -> None:
    params, optimizers = with_opacities([0.5] * 3)
    strategy = make_strategy(refine_start_iter=20, refine_stop_iter=90)
    done = [step for step in range(40) if strategy.refine(params, optimizers, {}, step, batch_size=4) is not None]
    assert [4 * step for step in done] == [32, 40, 52, 60, 72, 80]
    assert [step for step in range(120) if strategy.refine(params, optimizers, {}, step)] == [30, 40, 50, 60, 70, 80]


def test_draws_do_not_depend_on_other_draws() -> None:
    results = []
    for draws in (0, 5):
        params, optimizers = with_opacities([0.5, 0.001, 0.7] * 20)
        optimizers["means"].param_groups[0]["lr"] = 1e-4
        torch.manual_seed(1)
        torch.rand(draws)
        before = torch.random.get_rng_state()
        for step in range(25):
            make_strategy(noise_lr=1e5, seed=5).refine(params, optimizers, {}, step)
        assert torch.equal(before, torch.random.get_rng_state())
        results.append({name: p.detach() for name, p in params.items()})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_regularisers_are_the_papers() -> None:
    """Their values, and with them alone their gradients."""
    model = make_model(seeds(40), strategy="mcmc", mcmc_opacity_reg=0.3, mcmc_scale_reg=0.2)
    terms = train_view(model, batch(mask=torch.zeros(36, 48, 1, dtype=torch.bool)))
    opacities, scales = torch.sigmoid(model.opacities.detach()), torch.exp(model.scales.detach())
    assert float(terms["mcmc_opacity_reg"].detach()) == pytest.approx(0.3 * float(opacities.mean()), rel=1e-5)
    assert float(terms["mcmc_scale_reg"].detach()) == pytest.approx(0.2 * float(scales.mean()), rel=1e-5)
    torch.testing.assert_close(model.opacities.grad, 0.3 * opacities * (1 - opacities) / 40)
    torch.testing.assert_close(model.scales.grad, 0.2 * scales / 120)
    assert "mcmc_scale_reg" not in train_view(make_model(seeds(4)), batch())


@pytest.mark.parametrize("options", [{}, {"max_gs_num": 30}, {"max_gaussians": 30}])
def test_a_model_grows_and_trains(options: dict) -> None:
    points, colors = seeds(60)
    model = make_model((points, colors), strategy="mcmc", refine_every=5, warmup_length=1, num_partitions=3, **options)
    optimizers = {name: torch.optim.Adam([p], lr=1e-3) for name, p in model.gauss_params.items()}
    losses = []
    for step in range(31):
        model.step = step
        losses.append(float(train_view(model, batch())["main_loss"].detach()))
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        model.refine(step, optimizers)
    assert losses[-1] < losses[0]
    assert model.num_points == (60 if options else 60 + 3 + 3 + 3 + 3 + 3 + 3)
    assert model.training_state()["strategy"] == {}


def test_views_that_see_nothing() -> None:
    model = make_model(seeds(60), strategy="mcmc", refine_every=2, warmup_length=1, near_plane=50.0)
    optimizers: dict[str, torch.optim.Optimizer] = {
        name: torch.optim.Adam([p], lr=1e-3) for name, p in model.gauss_params.items()
    }
    for step in range(5):
        model.step = step
        train_view(model, batch(), one_camera())
        for optimizer in optimizers.values():
            optimizer.step()
        model.refine(step, optimizers)
    assert model.num_points > 60 and all(bool(p.isfinite().all()) for p in model.gauss_params.values())
