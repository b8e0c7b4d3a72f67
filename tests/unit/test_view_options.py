"""What belongs to single views: pose corrections, bilateral grids, colour correction, depth in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nerfstudio.cameras.camera_optimizers import CameraOptimizerConfig
from nerfstudio.cameras.lie_groups import exp_map_SE3, exp_map_SO3xR3
from nerfstudio.model_components.lib_bilagrid import color_correct
from test_model import HEIGHT, WIDTH, batch, make_cameras, make_model, one_camera, seeds, train_view
from test_oracle import Scene, dense
from torch import Tensor

from splaxel_ns import loss
from splaxel_ns.model import SplaxelModel

EXP_MAPS = {"SO3xR3": exp_map_SO3xR3, "SE3": exp_map_SE3}


def posed_model(mode: str, num: int = 150, **options: Any) -> SplaxelModel:
    """Gaussians one can see, all SH degrees on, poses already corrected a little."""
    model = make_model(
        seeds(num),
        camera_optimizer=CameraOptimizerConfig(mode=mode),  # pyright: ignore[reportArgumentType]
        sh_degree_interval=1,
        **options,
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        model.gauss_params["opacities"].copy_(3.0 * torch.randn(num, 1, generator=generator))
        model.gauss_params["scales"].copy_(-2.5 + 0.5 * torch.randn(num, 3, generator=generator))
        model.gauss_params["features_rest"].copy_(0.2 * torch.randn(num, 15, 3, generator=generator))
        if mode != "off":
            model.camera_optimizer.pose_adjustment.copy_(0.03 * torch.randn(3, 6, generator=generator))
    model.step = 3
    return model


def viewmat_of(mode: str, camera_to_world: Tensor, adjustment: Tensor) -> Tensor:
    """World to camera, OpenCV axes, of a corrected pose in float64: [3, 4], [6] -> [4, 4]."""
    change = EXP_MAPS[mode](adjustment[None])[0]
    pose = camera_to_world.double()
    rotation = (change[:, :3] @ pose[:, :3]) * torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64)
    center = pose[:, 3:] + change[:, 3:]
    last = torch.tensor([[0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    return torch.cat([torch.cat([rotation.T, -rotation.T @ center], dim=1), last])


@pytest.mark.parametrize(("mode", "num_partitions"), [("SO3xR3", 1), ("SE3", 4)])
def test_gradient_of_pose_and_depth_end_to_end(mode: str, num_partitions: int) -> None:
    """Colour, depth and accumulation of a training view against a dense float64 blend: values, gradients to the pose
    and to all parameters; the reference's pose gradient by finite differences."""
    model = posed_model(
        mode,
        num_partitions=num_partitions,
        boundary="exact",
        transmittance_stop=0.0,
        output_depth_during_training=True,
    )
    camera = one_camera(1)
    outputs = model.get_outputs(camera)
    background = outputs["background"].double()
    K = torch.tensor([[50.0, 0.0, WIDTH / 2], [0.0, 50.0, HEIGHT / 2], [0.0, 0.0, 1.0]])
    adjustment = model.camera_optimizer.pose_adjustment[1].detach().double().requires_grad_()
    raw = {name: p.detach().double().requires_grad_() for name, p in model.gauss_params.items()}
    depths32 = model.info["depths"].detach()
    weights = torch.randn(HEIGHT, WIDTH, 5, generator=torch.Generator().manual_seed(6), dtype=torch.float64)

    def reference(pose: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        leaves = {
            "means": raw["means"],
            "quats": raw["quats"],
            "scales": torch.exp(raw["scales"]),
            "opacities": torch.sigmoid(raw["opacities"])[:, 0],
            "sh": torch.cat([raw["features_dc"][:, None], raw["features_rest"]], dim=1),
            "background": background,
        }
        viewmat = viewmat_of(mode, camera.camera_to_worlds[0], pose)
        rgb, alpha, depth, decided = dense(Scene({}, viewmat, K, WIDTH, HEIGHT), leaves, depths32)
        # Behind a few faint splats the quotient's float32 rounding is all there is.
        return rgb.clamp(0, 1), depth / alpha.clamp_min(1e-10), alpha, decided & (alpha > 0.01)

    rgb, depth, alpha, sure = reference(adjustment)
    assert float(sure.double().mean()) > 0.5

    def weighed(rgb: Tensor, depth: Tensor, alpha: Tensor) -> Tensor:
        together = torch.cat([rgb, depth[..., None], alpha[..., None]], dim=-1).double()
        return torch.where(sure.detach()[..., None], weights * together, 0.0).sum()

    torch.testing.assert_close(outputs["rgb"].double()[sure], rgb[sure], rtol=0, atol=2e-5)
    torch.testing.assert_close(outputs["depth"][..., 0].double()[sure], depth[sure], rtol=1e-4, atol=1e-4)
    weighed(outputs["rgb"], outputs["depth"][..., 0], outputs["accumulation"][..., 0]).backward()
    weighed(rgb, depth, alpha).backward()
    ours, others = model.camera_optimizer.pose_adjustment.grad, [0, 2]
    assert ours is not None and adjustment.grad is not None
    assert bool((ours[others] == 0).all()) and float(adjustment.grad.abs().min()) > 0
    bound = 1e-3
    assert float((ours[1] - adjustment.grad).abs().max() / adjustment.grad.abs().max()) < bound
    for name, p in model.gauss_params.items():
        expected = raw[name].grad
        assert expected is not None and p.grad is not None
        assert float((p.grad - expected).abs().max() / expected.abs().max()) < bound, name
    with torch.no_grad():
        for axis in range(6):
            step = torch.zeros(6, dtype=torch.float64)
            step[axis] = 1e-7
            up, down = (weighed(*reference(adjustment + sign * step)[:3]) for sign in (1, -1))
            assert float((up - down) / 2e-7) == pytest.approx(float(adjustment.grad[axis]), rel=1e-3, abs=1e-3)


def test_views_follow_the_optimised_pose_in_training_only() -> None:
    """Centre, order and participants are those of the corrected pose; evaluation and the viewer keep the given one."""
    model = posed_model("SO3xR3", num_partitions=4)
    plain = posed_model("off", num_partitions=4)
    camera = one_camera(0)
    given = plain.view_of(camera)
    corrected = model.view_of(camera)
    assert corrected.cam_center.requires_grad and not given.cam_center.requires_grad
    change = model.camera_optimizer.pose_adjustment[0, :3].detach()
    torch.testing.assert_close(corrected.cam_center.detach(), given.cam_center + change, rtol=0, atol=1e-5)
    assert torch.equal(model.view_of(make_cameras()[:1]).world_to_cam, given.world_to_cam), "a viewer's camera"
    with torch.no_grad():
        model.camera_optimizer.pose_adjustment[1, 4] = 3.14159  # turned about y: it looks away
    assert model.participants_for(make_cameras()) == [{0, 1, 2, 3}, set(), {0, 1, 2, 3}]
    with torch.no_grad():
        model.camera_optimizer.pose_adjustment[0, 2] = -8.0  # behind the scene: the boxes come in reverse
        model.camera_optimizer.pose_adjustment[0, 4] = 3.14159
    order = model.render(model.view_of(camera), torch.zeros(3)).plan.order
    assert order == tuple(model.tree.order([-0.5, 0.0, -4.0])) != tuple(model.tree.order([-0.5, 0.0, 4.0]))
    model.eval()
    assert torch.equal(model.view_of(camera).world_to_cam, given.world_to_cam)


@pytest.mark.parametrize("mode", ["SO3xR3", "SE3"])
def test_wrong_poses_are_recovered(mode: str) -> None:
    """Photographs drawn from the true poses, training from others: loss and pose errors fall."""
    truth = posed_model("off", background_color="black", num_partitions=2)
    model = posed_model(mode, background_color="black", num_partitions=2)
    with torch.no_grad():
        photographs = [truth.get_outputs(one_camera(index, distance=2.0))["rgb"] for index in range(3)]
    optimizer = torch.optim.Adam([model.camera_optimizer.pose_adjustment])

    def errors() -> Tensor:  # [3, 2], world units and radians
        change = model.camera_optimizer.get_correction_matrices().detach()
        angle = torch.arccos(((change[:, :3, :3].diagonal(dim1=1, dim2=2).sum(dim=1) - 1) / 2).clamp(-1, 1))
        return torch.stack([change[:, :, 3].norm(dim=1), angle], dim=1)

    before, losses = errors(), []
    for turn in range(60):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - turn / 60)
        optimizer.zero_grad()
        total = torch.zeros(())
        for index, photograph in enumerate(photographs):
            outputs = model.get_outputs(one_camera(index, distance=2.0))
            term = model.get_loss_dict(outputs, {"image": photograph})["main_loss"]
            term.backward()
            total += term.detach()
        losses.append(float(total))
        optimizer.step()
    after = errors()
    assert losses[-1] < 0.1 * losses[0]
    assert bool((after.sum(dim=0) < 0.2 * before.sum(dim=0)).all()), (before, after)


def test_pose_regulariser_and_metrics() -> None:
    model = posed_model("SO3xR3")
    terms = train_view(model, batch())
    adjustment = model.camera_optimizer.pose_adjustment.detach()
    expected = 1e-2 * adjustment[:, :3].norm(dim=1).mean() + 1e-3 * adjustment[:, 3:].norm(dim=1).mean()
    assert float(terms["camera_opt_regularizer"].detach()) == pytest.approx(float(expected), rel=1e-5)
    metrics = model.get_metrics_dict(model.get_outputs(one_camera()), batch())
    assert float(metrics["camera_opt_translation_max"]) == pytest.approx(float(adjustment[:, :3].norm(dim=1).max()))
    assert set(model.get_param_groups()) - set(model.gauss_params) == {"camera_opt"}
    fresh = make_model(seeds(20), camera_optimizer=CameraOptimizerConfig(mode="SE3"))
    train_view(fresh, batch())
    gradient = fresh.camera_optimizer.pose_adjustment.grad
    assert gradient is not None and bool(gradient.isfinite().all()), "also where nothing is corrected yet"


def test_bilateral_grid_develops_training_views_only() -> None:
    """An untouched grid changes nothing; a gain along x of one view's grid shows there, left to right, nowhere else."""
    plain = make_model(seeds(40))
    model = make_model(seeds(40), use_bilateral_grid=True, grid_shape=(5, 4, 3))
    assert model.bil_grids.grids.shape == (3, 12, 3, 4, 5)
    expected = plain.get_outputs(one_camera(1))["rgb"].detach()
    torch.testing.assert_close(model.get_outputs(one_camera(1))["rgb"].detach(), expected, rtol=0, atol=1e-6)
    with torch.no_grad():
        model.bil_grids.grids[1, [0, 5, 10]] = torch.linspace(1.0, 2.0, 5)
    gain = torch.linspace(1.0, 2.0, WIDTH)[:, None]
    torch.testing.assert_close(model.get_outputs(one_camera(1))["rgb"].detach(), expected * gain, rtol=1e-5, atol=1e-6)
    others = plain.get_outputs(one_camera(2))["rgb"].detach()
    torch.testing.assert_close(model.get_outputs(one_camera(2))["rgb"].detach(), others, rtol=0, atol=1e-6)
    a, b = (m.eval().get_outputs_for_camera(one_camera(1))["rgb"] for m in (model, plain))
    assert torch.equal(a, b)


def test_bilateral_grid_gradients_and_total_variation() -> None:
    model = make_model(seeds(40), use_bilateral_grid=True, grid_shape=(4, 3, 2))
    generator = torch.Generator().manual_seed(2)
    grids = model.bil_grids.grids
    with torch.no_grad():
        grids += 0.1 * torch.randn(grids.shape, generator=generator)
    g = grids.detach().double()
    variation = sum(
        (((high - low) ** 2).sum(dim=(1, 2, 3, 4)) / high[0].numel()).mean()
        for high, low in ((g[:, :, 1:], g[:, :, :-1]), (g[:, :, :, 1:], g[:, :, :, :-1]), (g[..., 1:], g[..., :-1]))
    )
    terms = model.get_loss_dict(model.get_outputs(one_camera(1)), batch())
    assert float(terms["tv_loss"].detach()) == pytest.approx(10 * float(variation), rel=1e-4)
    terms["main_loss"].backward()
    gradient = grids.grad
    assert gradient is not None and bool((gradient[[0, 2]] == 0).all())
    direction = torch.randn(grids.shape, generator=generator)
    values = []
    with torch.no_grad():
        for sign in (1, -1):
            grids += sign * 1e-3 * direction
            values.append(model.get_loss_dict(model.get_outputs(one_camera(1)), batch())["main_loss"].item())
            grids -= sign * 1e-3 * direction
    slope = float((gradient * direction).sum())
    assert (values[0] - values[1]) / 2e-3 == pytest.approx(slope, rel=0.02)
    assert model.means.grad is not None and float(model.means.grad.abs().max()) > 0
    assert set(model.get_param_groups()) - set(model.gauss_params) == {"bilateral_grid"}


def test_color_correction_is_nerfstudios_over_the_unmasked_pixels() -> None:
    generator = torch.Generator().manual_seed(3)
    photograph = torch.rand(HEIGHT, WIDTH, 3, generator=generator)
    render = (0.8 * photograph + 0.1).clamp(0, 1)
    whole = loss.color_corrected(render, photograph)
    torch.testing.assert_close(whole, color_correct(render, photograph), rtol=0, atol=1e-5)
    assert float(loss.psnr(whole, photograph)) > 50 > 30 > float(loss.psnr(render, photograph))
    mask = torch.zeros(HEIGHT, WIDTH, 1, dtype=torch.bool)
    mask[4:30, 5:40] = True
    spoilt = torch.where(mask, photograph, torch.rand(HEIGHT, WIDTH, 3, generator=generator))
    corrected = loss.color_corrected(render, spoilt, mask)
    cut = (slice(4, 30), slice(5, 40))
    torch.testing.assert_close(corrected[cut], color_correct(render[cut], photograph[cut]), rtol=0, atol=1e-5)
    assert torch.equal(corrected[0], render[0])


@pytest.mark.parametrize("kind", ["one colour", "few pixels", "no pixels"])
def test_color_correction_that_is_not_determined(kind: str) -> None:
    render = torch.full((HEIGHT, WIDTH, 3), 0.4)
    mask = torch.ones(HEIGHT, WIDTH, 1, dtype=torch.bool)
    if "pixels" in kind:
        render = torch.rand(HEIGHT, WIDTH, 3)
        mask[:] = False
        mask[0, : 9 if kind == "few pixels" else 0] = True
    corrected = loss.color_corrected(render, torch.rand(HEIGHT, WIDTH, 3), mask)
    assert bool(corrected[mask[..., 0]].isnan().all())


def test_color_corrected_metrics() -> None:
    model = make_model(seeds(60), color_corrected_metrics=True)
    mask = torch.ones(HEIGHT, WIDTH, 1, dtype=torch.bool)
    mask[:9] = False
    data = batch(mask=mask)
    metrics = model.get_metrics_dict(model.get_outputs(one_camera()), data)
    assert float(metrics["cc_psnr"]) > float(metrics["psnr"])
    model.step = 1
    assert "cc_psnr" not in model.get_metrics_dict(model.get_outputs(one_camera()), data)
    model.eval()
    outputs = model.get_outputs_for_camera(one_camera())
    metrics, images = model.get_image_metrics_and_images(outputs, data)
    assert set(metrics) - {"lpips", "cc_lpips"} == {"psnr", "ssim", "cc_psnr", "cc_ssim"}
    assert metrics["cc_psnr"] > metrics["psnr"] and all(type(value) is float for value in metrics.values())
    assert torch.equal(images["img"][:, WIDTH:], outputs["rgb"]), "the picture itself is not corrected"


def view_model(num_train_data: int = 3, **options: Any) -> SplaxelModel:
    settings: dict[str, Any] = {
        "camera_optimizer": CameraOptimizerConfig(mode="SO3xR3"),
        "use_bilateral_grid": True,
        "grid_shape": (3, 3, 2),
    }
    model = make_model(seeds(10), **(settings | options))
    assert model.num_train_data == num_train_data
    return model


def test_state_of_views_round_trip() -> None:
    source, target = view_model(), view_model()
    with torch.no_grad():
        source.camera_optimizer.pose_adjustment.normal_()
        source.bil_grids.grids.normal_()
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.camera_optimizer.pose_adjustment, source.camera_optimizer.pose_adjustment)
    assert torch.equal(target.bil_grids.grids, source.bil_grids.grids)


def test_states_with_other_options_or_views_end_in_one_sentence() -> None:
    state = dict(view_model().state_dict())
    off = CameraOptimizerConfig(mode="off")
    cases = [
        (state, view_model(camera_optimizer=off), "with camera_optimizer.*camera-optimizer.mode SO3xR3"),
        (state, view_model(use_bilateral_grid=False), "with bil_grids.*use-bilateral-grid True"),
        (dict(view_model(camera_optimizer=off).state_dict()), view_model(), "without camera_optimizer.*mode off"),
        (dict(view_model(use_bilateral_grid=False).state_dict()), view_model(), "without bil_grids.*grid False"),
        (
            state,
            view_model(grid_shape=(3, 3, 4)),
            r"grids is \[3, 12, 2, 3, 3\], expected \[3, 12, 4, 3, 3\]",
        ),
        (state | {"camera_optimizer.pose_adjustment": torch.zeros(7, 6)}, view_model(), "training views"),
        (state | {"camera_optimizer.pose_adjustment": torch.full((3, 6), torch.nan)}, view_model(), "not finite"),
    ]
    for given, model, message in cases:
        with pytest.raises(ValueError, match=message):
            model.load_state_dict(given)
