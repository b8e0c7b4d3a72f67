"""Saturated pixels of training views from visit to visit: when they are left out, come back, and are forgotten."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_model import HEIGHT, WIDTH, batch, make_cameras, make_model, one_camera, train_view
from torch import Tensor

from splaxel_ns.checkpoint import plain
from splaxel_ns.model import SplaxelModel
from splaxel_ns.overlay import TINT, Overlay
from splaxel_ns.render import Rendered
from splaxel_ns.saturation import SaturationMasks
from splaxel_ns.types import View, ViewPlan
from splaxel_ns.viewer_panel import OVERLAYS, PartitionPanel

FRONT, BEHIND = 1, 0  # numbers of the two partitions: the cut is across z, the camera looks down from above


def walls(front_side: float = 2.4, **options: Any) -> SplaxelModel:
    """Two opaque walls across the z axis, in a box each; the front one hides the middle of the other."""
    grids = []
    for side, z in ((front_side, 0.0), (6.0, -8.0)):
        steps = torch.linspace(-side / 2, side / 2, 14)
        grids.append(torch.cartesian_prod(steps, steps, torch.tensor([z, z - 0.05, z - 0.1])))
    points = torch.cat(grids)
    model = make_model(
        (points, torch.full((len(points), 3), 128, dtype=torch.uint8)), **{"num_partitions": 2} | options
    )
    with torch.no_grad():
        model.scales.copy_(torch.log(torch.where(points[:, 2] > -4, front_side / 14, 6.0 / 14))[:, None].expand(-1, 3))
        model.opacities.fill_(5.0)
        model.features_dc.copy_(torch.where(points[:, 2:] > -4, torch.tensor([1.0, 0, 0]), torch.tensor([0, 0, 1.0])))
    model.train()
    return model


def visit(model: SplaxelModel, index: int = 0) -> Rendered:
    """Draw a training view as `get_outputs` does."""
    return model.render(model.view_of(one_camera(index)), torch.zeros(3), index)


def left_out(rendered: Rendered) -> Tensor:
    """Pixels that are left out of the wall behind.  # [H, W] bool"""
    from splaxel_ns import cuda

    plan = rendered.plan
    if BEHIND not in plan.order:
        return torch.ones(HEIGHT, WIDTH, dtype=torch.bool)
    if plan.saturated is None:
        return torch.zeros(HEIGHT, WIDTH, dtype=torch.bool)
    return cuda.unpack_bits(plan.saturated[plan.order.index(BEHIND)], WIDTH)


def behind_region(rendered: Rendered) -> Tensor:
    """Pixels of the wall behind.  # [H, W] bool"""
    x, spans = torch.arange(WIDTH), rendered.plan.spans[BEHIND]
    return (x >= spans[:, :1]) & (x < spans[:, 1:])


def test_left_out_from_the_next_snapshot_on() -> None:
    model = walls()
    first, again = visit(model), visit(model)
    assert first.plan.order == (FRONT, BEHIND)
    assert again.plan.saturated is None and torch.equal(again.rgb, first.rgb)
    model.take_saturation_snapshot(new_epoch=False)
    assert visit(model).plan.saturated is None
    model.take_saturation_snapshot(new_epoch=True)
    masked = visit(model)
    pruned = left_out(masked)
    assert torch.equal(pruned, (first.partials.transmittances[0] < model.saturation.eps) & behind_region(first))
    assert 500 < int(pruned.sum()) < HEIGHT * WIDTH - 500
    assert masked.stats.num_pairs < first.stats.num_pairs
    assert (masked.partials.transmittances[1][pruned] == 1).all() and not masked.partials.colors[1][pruned].any()
    # Behind a transmittance below eps nothing weighs more than eps, times a colour of about 1.
    torch.testing.assert_close(masked.rgb, first.rgb, rtol=0, atol=2e-4)
    counts = model.saturation.now
    assert counts.pruned == int(pruned.sum()) and counts.flipped == 0
    assert visit(model, index=1).plan.saturated is None  # each view has a mask of its own


def test_pruned_pairs_get_no_gradient() -> None:
    model = walls(front_side=6.0)  # hides the other from all views
    for _ in range(2):
        model.gauss_params.zero_grad()
        train_view(model, batch())
        model.take_saturation_snapshot(new_epoch=True)
    grad = model.features_dc.grad
    assert grad is not None
    behind = model.tree.locate(model.means.detach()) == BEHIND
    assert not grad[behind].any() and grad[~behind].any()


def test_hidden_partitions_take_no_part() -> None:
    model = walls(front_side=6.0)
    cameras = make_cameras()
    assert model.participants_for(cameras) == [{0, 1}] * 3
    visit(model, 1)
    assert model.participants_for(cameras) == [{0, 1}] * 3
    model.take_saturation_snapshot(new_epoch=True)
    assert model.participants_for(cameras) == [{0, 1}, {FRONT}, {0, 1}]
    rendered = visit(model, 1)
    assert rendered.plan.order == (FRONT,) and rendered.partials.colors.shape[0] == 1
    model.eval()
    assert model.participants_for(cameras) == [{0, 1}] * 3
    model.train()
    assert model.participants_for(cameras) == [{0, 1}, {FRONT}, {0, 1}]


@pytest.mark.parametrize("front_side", [2.4, 6.0])
def test_flips_come_back_at_the_next_snapshot(front_side: float) -> None:
    model = walls(front_side)
    full = visit(model)
    model.take_saturation_snapshot(new_epoch=True)
    pruned = left_out(visit(model))
    with torch.no_grad():  # the front wall becomes clear
        model.opacities[model.tree.locate(model.means) == FRONT] = -20.0
    seen_through = visit(model)
    assert torch.equal(left_out(seen_through), pruned) and not seen_through.rgb[pruned].any()
    counts = model.saturation.now
    assert counts.flipped > 500 and counts.flip_rate == 0.5  # all of them, at the second of two visits
    model.take_saturation_snapshot(new_epoch=True)
    assert model.saturation.num_masked == 0 and model.saturation.num_bytes == 0
    back = visit(model)
    assert back.plan.saturated is None and bool((back.rgb[HEIGHT // 2, WIDTH // 2 - 8 : WIDTH // 2 + 8] > 0).all())
    assert full.plan.order[-1] in back.plan.order


def test_snapshots_within_long_epochs() -> None:
    model = walls(saturation_every=10)
    visit(model)
    for step, masked in ((9, False), (10, True)):
        model.step = step
        model.take_saturation_snapshot(new_epoch=False)
        assert bool(left_out(visit(model)).any()) == masked


def masked_model(**options: Any) -> SplaxelModel:
    model = walls(**options)
    visit(model)
    model.take_saturation_snapshot(new_epoch=True)
    assert model.saturation.num_masked == 1 and left_out(visit(model)).any()
    return model


def test_not_in_evaluation() -> None:
    model = masked_model()
    train = model.render(model.view_of(one_camera()), torch.zeros(3))
    assert train.plan.saturated is None  # without a view's number
    model.eval()
    before = model.saturation.state_dict()
    picture = model.get_outputs_for_camera(one_camera())["rgb"]
    with model.as_one_partition():
        model.get_outputs(one_camera())
    model.train()
    after = model.saturation.state_dict()
    assert before["entries"] == after["entries"] and torch.equal(before["bits"], after["bits"])
    assert left_out(visit(model)).any()
    with torch.no_grad():
        model.opacities[model.tree.locate(model.means) == FRONT] = -20.0
    model.eval()
    clear = model.get_outputs_for_camera(one_camera())["rgb"]
    assert float((clear[HEIGHT // 2, WIDTH // 2] - picture[HEIGHT // 2, WIDTH // 2]).abs().max()) > 0.2


def test_dropped_when_a_pose_changes() -> None:
    model = masked_model()
    view = model.view_of(one_camera())
    moved = replace(view, world_to_cam=view.world_to_cam + torch.tensor([[0, 0, 0, 1e-6]] * 3 + [[0.0] * 4]))
    assert model.render(moved, torch.zeros(3), 0).plan.saturated is None
    assert model.saturation.num_masked == 0


def test_dropped_when_the_resolution_changes() -> None:
    model = masked_model(num_downscales=1, resolution_schedule=100)
    model.step = 100
    rendered = visit(model)
    assert rendered.rgb.shape[:2] == (HEIGHT, WIDTH) and rendered.plan.saturated is None
    assert model.saturation.num_masked == 0


def test_dropped_with_new_boxes() -> None:
    model = masked_model()
    model.repartition(3)
    assert visit(model).plan.saturated is None and model.saturation.num_masked == 0
    model.take_saturation_snapshot(new_epoch=True)  # what the visit with the new boxes found
    assert model.saturation.num_masked == 1


def test_dropped_when_opacities_are_reset() -> None:
    model = masked_model(reset_alpha_every=1, refine_every=5, warmup_length=1000)
    optimizers = {name: torch.optim.Adam([value]) for name, value in model.gauss_params.items()}
    for step in range(6):
        report = model.refine(step, optimizers)
        assert model.saturation.num_masked == (step < 5)
    assert report is not None and report.opacities_reset
    assert visit(model).plan.saturated is None


def test_nothing_with_one_partition_or_moving_poses_or_switched_off() -> None:
    from nerfstudio.cameras.camera_optimizers import CameraOptimizerConfig

    choices: tuple[dict[str, Any], ...] = (
        {"num_partitions": 1},
        {"saturation": False},
        {"camera_optimizer": CameraOptimizerConfig(mode="SO3xR3")},
    )
    for options in choices:
        model = walls(**options)
        for _ in range(2):
            train_view(model, batch())
            model.take_saturation_snapshot(new_epoch=True)
        assert model.saturation.num_masked == 0 and model.saturation.version == 0
        metrics = model.get_metrics_dict(model.get_outputs(one_camera()), batch())
        assert "saturation_flip_rate" not in metrics


def test_metrics_and_summary() -> None:
    model = masked_model()
    metrics = model.get_metrics_dict(model.get_outputs(one_camera()), batch())
    assert 0 < metrics["saturation_pruned"] < 0.5 and metrics["saturation_flip_rate"] == 0
    model.take_saturation_snapshot(new_epoch=True)
    assert "flip rate 0.00%; 1 views are masked" in model.saturation.summary()


def test_memory_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    model = masked_model()
    masks = model.saturation
    per_view = masks.num_bytes
    pruned = int(left_out(visit(model)).sum())
    assert per_view == HEIGHT * WIDTH // 8 + pruned  # one bit per pixel and a byte per pruned pair
    limited = walls()
    limited.saturation = SaturationMasks(1e-4, int(2.5 * per_view))
    for _ in range(3):
        for index in range(3):
            visit(limited, index)
            assert limited.saturation.num_bytes <= 2.5 * per_view
        limited.take_saturation_snapshot(new_epoch=True)
    assert limited.saturation.num_masked == 2
    assert capsys.readouterr().out.count("--pipeline.model.saturation-gib") == 1


def test_state_continues_exactly() -> None:
    model = masked_model()
    for index in range(3):
        visit(model, index)
    state = plain(model.saturation.state_dict())
    other = SaturationMasks(1e-4, 2**30)
    other.load_state_dict(state)
    assert other.num_bytes == model.saturation.num_bytes and other.now == model.saturation.now
    again = other.state_dict()
    assert again["entries"] == state["entries"]
    assert all(torch.equal(again[name], state[name]) for name in ("bits", "budgets", "poses", "intrinsics"))
    for masks in (model.saturation, other):
        masks.take_snapshot(0)
    view = model.view_of(one_camera(2))
    mine, theirs = (masks.mask_of(2, view, model.tree) for masks in (model.saturation, other))
    assert mine is not None and mine.says_the_same(theirs)
    sharper = SaturationMasks(1e-3, 2**30)
    sharper.load_state_dict(state)
    assert sharper.num_masked == 0  # its budgets would mean something else


def test_same_masks_every_time() -> None:
    states = []
    for _ in range(2):
        model = masked_model()
        train_view(model, batch(), one_camera(1))
        states.append(model.saturation.state_dict())
    assert states[0]["entries"] == states[1]["entries"]
    assert torch.equal(states[0]["bits"], states[1]["bits"])
    assert torch.equal(states[0]["budgets"], states[1]["budgets"])


def test_pixels_that_enter_the_region_of_a_hidden_partition() -> None:
    """A partition without pixels to draw comes back when its region grows, from the next snapshot on."""
    model = masked_model(front_side=6.0)
    view, masks = model.view_of(one_camera()), model.saturation
    spans = torch.zeros(2, HEIGHT, 2, dtype=torch.int32)
    spans[:, 4:8, 1] = 10
    small = View(view.world_to_cam, view.K, view.width, view.height)
    dark = torch.stack([torch.zeros(HEIGHT, WIDTH), torch.ones(HEIGHT, WIDTH)])
    masks.update(7, small, ViewPlan((FRONT, BEHIND), spans), dark, model.tree)
    masks.take_snapshot(0)
    assert masks.absent(7, small, model.tree) == (BEHIND,)
    spans = spans.clone()
    spans[BEHIND, 8] = torch.tensor([0, 3])
    mask = masks.mask_of(7, small, model.tree)
    assert mask is not None
    plan = mask.applied_to(ViewPlan((FRONT, BEHIND), spans))
    assert plan.order == (FRONT,)
    masks.update(7, small, plan, dark[:1], model.tree)
    assert masks.absent(7, small, model.tree) == (BEHIND,)
    masks.take_snapshot(0)
    assert masks.absent(7, small, model.tree) == ()
    back = masks.mask_of(7, small, model.tree)
    assert back is not None and sum(len(part) for part in back.budgets) == 40


def test_overlay_paints_regions_and_saturated_pixels() -> None:
    model = walls()
    rendered = visit(model)
    rendered = replace(rendered, rgb=rendered.rgb.detach())
    dark = rendered.partials.transmittances[0] < model.saturation.eps
    colors = ((255, 0, 0), (0, 255, 0))
    centre, corner = (HEIGHT // 2, WIDTH // 2), (HEIGHT // 2, 4)
    assert dark[centre] and not dark[corner]
    for shown in (BEHIND, FRONT):
        regions = Overlay(colors, saturation=False).paint(rendered, shown, 1e-4)
        partial = rendered.partials.colors[rendered.plan.order.index(shown)]
        tint = TINT * torch.tensor(colors[shown]) / 255
        torch.testing.assert_close(regions[centre], (1 - TINT) * partial[centre] + tint)
        both = Overlay(colors, saturation=True).paint(rendered, shown, 1e-4)
        changed = (both - regions).abs().amax(dim=-1) > 1e-6
        assert torch.equal(changed, dark & behind_region(rendered)) if shown == BEHIND else not changed.any()
    grey = Overlay(colors, saturation=True).paint(rendered, BEHIND, 1e-4)[centre].detach()
    assert float(grey.max() - grey.min()) < 1e-6
    whole = Overlay(colors, saturation=False).paint(rendered, None, 1e-4)
    mean = TINT * torch.tensor([0.5, 0.5, 0.0])
    torch.testing.assert_close(whole[centre], (1 - TINT) * rendered.rgb[centre] + mean)
    hidden = replace(rendered, plan=replace(rendered.plan, order=(FRONT,)))
    assert not Overlay(colors, saturation=True).paint(hidden, BEHIND, 1e-4).any()
    empty = replace(rendered.partials, transmittances=rendered.partials.transmittances[:0])
    nobody = replace(rendered, plan=replace(rendered.plan, order=()), partials=empty)
    assert torch.equal(Overlay(colors, saturation=True).paint(nobody, None, 1e-4), rendered.rgb)


def test_the_panel_chooses_what_the_viewer_paints() -> None:
    model = walls().eval()
    panel = PartitionPanel(model)
    plain_picture = model.get_outputs_for_camera(one_camera())["rgb"]
    pictures = {}
    for name in OVERLAYS:
        panel.paint(name)
        # The viewer calls from a thread of its own; evaluation, in the main thread, sees no overlay.
        with ThreadPoolExecutor(1) as viewer:
            pictures[name] = viewer.submit(model.get_outputs_for_camera, one_camera()).result()["rgb"]
        assert torch.equal(model.get_outputs_for_camera(one_camera())["rgb"], plain_picture)
    none, regions, both = pictures.values()
    assert torch.equal(none, plain_picture)
    assert not torch.equal(regions, none) and not torch.equal(both, regions)


def test_wrong_options() -> None:
    for options in ({"saturation_threshold": 0.0}, {"saturation_every": -1}, {"saturation_gib": -1.0}):
        with pytest.raises(ValueError, match="saturation"):
            walls(**options)
