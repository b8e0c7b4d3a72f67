"""Growing and pruning: schedule in images, statistics per view, the cap, what is never pruned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from splaxel_ns.strategy import SplaxelStrategy, covers_any, crosses, derived_seed, within_room


def make_params(num: int) -> tuple[torch.nn.ParameterDict, dict[str, torch.optim.Optimizer]]:
    """Gaussians with Adam's moments in place, one optimiser each, as nerfstudio has them."""
    torch.manual_seed(num)
    params = torch.nn.ParameterDict(
        {
            "means": torch.nn.Parameter(torch.randn(num, 3)),
            "scales": torch.nn.Parameter(torch.full((num, 3), -6.0)),
            "quats": torch.nn.Parameter(torch.randn(num, 4)),
            "features_dc": torch.nn.Parameter(torch.randn(num, 3)),
            "features_rest": torch.nn.Parameter(torch.randn(num, 15, 3)),
            "opacities": torch.nn.Parameter(torch.zeros(num, 1)),
        }
    )
    optimizers: dict[str, torch.optim.Optimizer] = {name: torch.optim.Adam([p], lr=0.0) for name, p in params.items()}
    for name, p in params.items():
        p.grad = torch.randn_like(p)
        optimizers[name].step()
    return params, optimizers


def make_strategy(**changes) -> SplaxelStrategy:
    options: dict[str, Any] = {
        "prune_opa": 0.1,
        "grow_grad2d": 0.5,
        "refine_start_iter": 0,
        "refine_every": 10,
        "reset_every": 100,
        "refine_stop_iter": 1000,
        "absgrad": True,
    }
    return SplaxelStrategy(**(options | changes))


def statistics(strategy: SplaxelStrategy, grads: list[float]) -> dict:
    state = strategy.initialize_state()
    state["grad2d"], state["count"] = torch.tensor(grads), torch.ones(len(grads))
    return state


@pytest.mark.parametrize("batch_size", [1, 4, 7, 250])
def test_intervals_count_images(batch_size: int) -> None:
    """Any batch size refines about as often per image, and never misses an interval it stepped over."""
    images = 3000
    due = [step for step in range(1, images // batch_size) if crosses(step, batch_size, 100)]
    passed = {step * batch_size // 100 for step in due}
    assert len(passed) == len(due)
    assert passed == {step * batch_size // 100 for step in range(1, images // batch_size)} - {0}


def test_optimizer_state_moves_with_its_gaussians() -> None:
    """Duplicates and children start with zero moments, survivors keep theirs; optimisers hold the new tensors."""
    params, optimizers = make_params(4)
    with torch.no_grad():
        params["opacities"][3] = -5.0
        params["scales"][1] = 0.0  # large: split
    optimizer = optimizers["means"]
    moments = optimizer.state[params["means"]]["exp_avg"].clone()
    means = params["means"].detach().clone()
    strategy = make_strategy(prune_scale3d=1e9)
    report = strategy.refine(params, optimizers, statistics(strategy, [1.0, 1.0, 0.0, 0.0]), 10)
    assert report is not None and (report.num_duplicated, report.num_split) == (1, 1)
    assert report.pruned["transparent"] == 1 and report.num_gaussians == 5
    for name, p in params.items():
        assert optimizers[name].param_groups[0]["params"][0] is p and p.requires_grad
        assert len(p) == 5 and optimizers[name].state[p]["exp_avg"].shape == p.shape
    kept = optimizer.state[params["means"]]["exp_avg"]
    # Order after gsplat's ops: 0, 2 survive, then the copy of 0, then the two children of 1.
    torch.testing.assert_close(params["means"][:2].detach(), means[[0, 2]])
    torch.testing.assert_close(kept[:2], moments[[0, 2]])
    assert bool((kept[2:] == 0).all())


def test_growth_stops_at_the_cap_with_the_largest_gradients() -> None:
    params, optimizers = make_params(6)
    means = params["means"].detach().clone()
    strategy = make_strategy(max_gaussians=8)
    report = strategy.refine(params, optimizers, statistics(strategy, [0.6, 0.9, 0.1, 0.8, 0.7, 0.0]), 10)
    assert report is not None and report.num_gaussians == 8 and report.num_held_back == 2
    torch.testing.assert_close(params["means"][6:].detach(), means[[1, 3]])


def test_no_room_grows_nothing() -> None:
    growth = torch.tensor([1, 0, 2])
    assert within_room(torch.tensor([0.1, 9.0, 0.2]), growth, -3).tolist() == [False, False, False]
    assert within_room(torch.tensor([0.1, 9.0, 0.2]), growth, 2).tolist() == [False, False, True]


def test_the_last_gaussians_are_never_pruned() -> None:
    params, optimizers = make_params(3)
    with torch.no_grad():
        params["opacities"].fill_(-9.0)
    strategy = make_strategy()
    report = strategy.refine(params, optimizers, statistics(strategy, [0.0] * 3), 10)
    assert report is not None and report.spared == 3 and len(params["means"]) == 3
    assert "kept" in str(report)


def test_reasons_of_pruning_are_counted_once_each() -> None:
    params, optimizers = make_params(5)
    with torch.no_grad():
        params["means"][0, 1] = float("nan")
        params["opacities"][:2] = -9.0
        params["scales"][2] = 3.0
    strategy = make_strategy(reset_every=5, grow_grad2d=1e9)
    report = strategy.refine(params, optimizers, statistics(strategy, [0.0] * 5), 10)
    assert report is not None and report.pruned == {"not finite": 1, "transparent": 1, "too large": 1}
    assert len(params["means"]) == 2
    assert report.own == {"duplicated": 0, "split": 0} | {f"pruned {name}": num for name, num in report.pruned.items()}
    assert "3 pruned (1 not finite, 1 transparent, 1 too large); opacities reset; now 2 Gaussians" in str(report)
    assert "now 2 Gaussians (2, 0 by rank)" in str(replace(report, shares=[2, 0]))


def test_pause_only_after_a_reset() -> None:
    """A long epoch pauses densification for half the interval at most, and not before the first reset."""
    strategy = make_strategy(pause_refine_after_reset=50)
    refined = []
    for step in range(5, 300, 5):
        params, optimizers = make_params(2)
        report = strategy.refine(params, optimizers, statistics(strategy, [0.0, 0.0]), step)
        if report is not None and report.refined:
            refined.append(step)
    assert refined == [*range(10, 100, 10), *range(150, 200, 10), *range(250, 300, 10)]


def test_reset_caps_opacities() -> None:
    params, optimizers = make_params(3)
    strategy = make_strategy()
    report = strategy.refine(params, optimizers, statistics(strategy, [0.0] * 3), 100)
    assert report is not None and report.opacities_reset
    torch.testing.assert_close(torch.sigmoid(params["opacities"]).detach(), torch.full((3, 1), 0.2))
    assert optimizers["opacities"].state[params["opacities"]]["exp_avg"].abs().sum() == 0


def test_splitting_does_not_depend_on_other_draws() -> None:
    """A resumed run whose global generator stands elsewhere splits alike, and its generator is left alone."""
    results = []
    for draws in (0, 5):
        params, optimizers = make_params(3)
        with torch.no_grad():
            params["scales"].fill_(0.0)
        torch.manual_seed(1)
        torch.rand(draws)
        before = torch.random.get_rng_state()
        strategy = make_strategy(prune_scale3d=1e9)
        strategy.refine(params, optimizers, statistics(strategy, [1.0] * 3), 10)
        assert torch.equal(before, torch.random.get_rng_state())
        results.append(params["means"].detach())
    assert torch.equal(results[0], results[1])


def view(means2d: list[list[float]], extents: list[list[float]], absgrad: list[list[float]]) -> dict:
    tensor = torch.tensor(means2d, requires_grad=True)
    tensor.absgrad = torch.tensor(absgrad)  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "means2d": tensor,
        "extents": torch.tensor(extents),
        "conics": torch.tensor([[0.25, 0.0, 1.0]]).repeat(len(means2d), 1),
        "width": 20,
        "height": 10,
        "n_cameras": 2,
    }


def test_statistics_per_view() -> None:
    strategy = make_strategy(refine_scale2d_stop_iter=100)
    state = strategy.initialize_state()
    info = view([[5.0, 5.0], [15.0, 5.0]], [[2.0, 2.0], [0.0, 0.0]], [[0.3, 0.4], [7.0, 7.0]])
    strategy.update(state, info, images=0)
    strategy.update(state, info, images=0)
    # Gradients in half images, times the views of the batch: 0.3 * 10 * 2 and 0.4 * 5 * 2; culled ones add nothing.
    torch.testing.assert_close(state["grad2d"], torch.tensor([2 * (6.0**2 + 4.0**2) ** 0.5, 0.0]))
    assert state["count"].tolist() == [2.0, 0.0]
    torch.testing.assert_close(state["radii"], torch.tensor([6.0 / 20, 0.0]))  # 3 sigma, sigma = 2 px


def test_masked_pixels_add_nothing() -> None:
    strategy = make_strategy()
    state = strategy.initialize_state()
    mask = torch.ones(10, 20, 1, dtype=torch.bool)
    mask[:, 10:] = False
    info = view([[5.0, 5.0], [15.0, 5.0]], [[2.0, 2.0], [2.0, 2.0]], [[0.3, 0.4], [0.0, 0.0]])
    strategy.update(state, info, 0, mask)
    assert state["count"].tolist() == [1.0, 0.0]


def test_no_view_no_statistics() -> None:
    """A view in which nothing was drawn leaves no gradient; refinement goes on."""
    params, optimizers = make_params(2)
    strategy = make_strategy()
    state = strategy.initialize_state()
    info = view([[5.0, 5.0], [15.0, 5.0]], [[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0]] * 2)
    del info["means2d"].absgrad
    strategy.update(state, info, 0)
    assert strategy.refine(params, optimizers, state, 10) is not None
    assert strategy.refine(params, optimizers, strategy.initialize_state(), 10) is not None


def test_covers_any_counts_pixel_centres() -> None:
    mask = torch.zeros(8, 8, 1, dtype=torch.bool)
    mask[3, 4] = True  # centre (4.5, 3.5)
    means2d = torch.tensor([[4.5, 3.5], [2.0, 3.5], [2.0, 3.5], [100.0, -7.0], [float("nan"), 0.0]])
    extents = torch.tensor([[0.1, 0.1], [2.4, 9.0], [2.6, 9.0], [1.0, 1.0], [1.0, 1.0]])
    assert covers_any(means2d, extents, mask).tolist() == [True, False, True, False, False]


def test_derived_seeds_differ() -> None:
    seeds = {derived_seed(a, b, c) for a in range(3) for b in range(50) for c in range(50)}
    assert len(seeds) > 7490
