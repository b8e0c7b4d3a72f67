"""The model behind nerfstudio's interface: first Gaussians, options, masks, empty views, state."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from nerfstudio.cameras.camera_optimizers import CameraOptimizerConfig
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.data.scene_box import OrientedBox, SceneBox
from nerfstudio.models.splatfacto import SplatfactoModel, SplatfactoModelConfig
from torch import Tensor

from splaxel_ns import loss
from splaxel_ns.model import SplaxelModel, SplaxelModelConfig
from splaxel_ns.seeding import automatic_near_plane, initial_log_scales

WIDTH, HEIGHT = 48, 36


def make_cameras(num: int = 3, distance: float = 4.0, **changes) -> Cameras:
    """Cameras on the z axis that look down at the origin, OpenGL axes."""
    poses = torch.eye(4)[None, :3].repeat(num, 1, 1)
    poses[:, 2, 3] = distance
    poses[:, 0, 3] = torch.linspace(-0.5, 0.5, num) if num > 1 else 0.0
    intrinsics: dict[str, Any] = {"fx": 50.0, "fy": 50.0, "cx": WIDTH / 2, "cy": HEIGHT / 2}
    intrinsics |= {"width": WIDTH, "height": HEIGHT} | changes
    return Cameras(camera_to_worlds=poses, **intrinsics)


def one_camera(index: int = 0, **changes) -> Cameras:
    camera = make_cameras(**changes)[index : index + 1]
    camera.metadata = {"cam_idx": index}
    return camera


def seeds(num: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num)
    points = torch.rand(num, 3, generator=generator) * 2 - 1
    return points, (torch.rand(num, 3, generator=generator) * 255).to(torch.uint8)


def make_model(seed_points: tuple[Tensor, Tensor] | None = None, batch_size: int = 1, **options) -> SplaxelModel:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"num_downscales": 0, "num_random": 20}
    model = SplaxelModelConfig(**(settings | options)).setup(
        scene_box=SceneBox(aabb=torch.tensor([[-1.0] * 3, [1.0] * 3])), num_train_data=3, seed_points=seed_points
    )
    assert isinstance(model, SplaxelModel)
    model.set_training_views(make_cameras(), batch_size)
    return model


def batch(seed: int = 0, channels: int = 3, **more) -> dict:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randint(0, 256, (HEIGHT, WIDTH, channels), generator=generator).to(torch.uint8)
    return {"image": image, "image_idx": 0} | more


def train_view(model: SplaxelModel, data: dict, camera: Cameras | None = None) -> dict[str, Tensor]:
    outputs = model.get_outputs(camera or one_camera())
    terms = model.get_loss_dict(outputs, data)
    torch.stack(list(terms.values())).sum().backward()
    model.after_backward()
    return terms


def test_is_splatfacto_to_viewer_and_exporter() -> None:
    model = make_model(seeds(10))
    assert isinstance(model, SplatfactoModel)
    assert set(model.get_param_groups()) == {"means", "scales", "quats", "features_dc", "features_rest", "opacities"}
    assert not any("lpips" in name for name in model.state_dict())


@pytest.mark.parametrize("num", [0, 1, 3, 4])
def test_few_seed_points(num: int) -> None:
    """No cloud: random points in the cameras' box; fewer than four: finite scales."""
    model = make_model(seeds(num), num_partitions=3)
    assert model.num_points == (num or 20)
    for name, tensor in model.gauss_params.items():
        assert bool(tensor.isfinite().all()), name
    train_view(model, batch())
    assert all(p.grad is not None for p in model.gauss_params.values())


def test_no_seeds_start_in_the_cameras_box() -> None:
    model = make_model(None, num_random=500)
    low, high = model.means.amin(dim=0), model.means.amax(dim=0)
    assert bool((low >= torch.tensor([-1.0, -0.5, 3.5])).all()) and bool((high <= torch.tensor([1.0, 0.5, 4.5])).all())


def test_coinciding_points_have_finite_scales() -> None:
    scales = initial_log_scales(torch.zeros(7, 3))
    assert scales.shape == (7, 3) and bool(scales.isfinite().all())


def test_seed_colors_and_broken_points() -> None:
    points, colors = seeds(6)
    points[2, 0] = float("nan")
    model = make_model((points, colors))
    assert model.num_points == 5
    torch.testing.assert_close(model.colors.detach(), colors[[0, 1, 3, 4, 5]].float() / 255, rtol=0, atol=1e-5)
    flat = make_model((points, colors), sh_degree=0)
    torch.testing.assert_close(flat.colors.detach(), colors[[0, 1, 3, 4, 5]].float() / 255, rtol=0, atol=1e-5)
    assert bool((train_view(flat, batch())["main_loss"]).isfinite())


@pytest.mark.parametrize("unit", [1.0, 100.0, 1e-3])
def test_near_plane_follows_the_unit_of_the_scene(unit: float) -> None:
    cameras = make_cameras(distance=4.0 * unit)
    near = automatic_near_plane(seeds(500)[0] * unit, cameras)
    assert 0.02 * unit < near < 0.05 * unit  # one hundredth of 3 to 5 units


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"camera_optimizer": CameraOptimizerConfig(mode="so3")}, "camera-optimizer.mode is 'so3'"),  # pyright: ignore
        ({"strategy": "sampling"}, "strategy"),
        ({"grid_shape": (16, 0, 8)}, "grid-shape"),
        ({"max_gs_num": 0}, "max-gs-num"),
        ({"num_partitions": 17}, "num-partitions is 17"),
        ({"boundary": "sharp"}, "boundary"),
        ({"sh_degree": 4}, "sh-degree"),
    ],
)
def test_what_is_not_there_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_model(seeds(4), **options)


def test_cameras_are_left_alone_and_pinholes_only() -> None:
    model = make_model(seeds(30), num_downscales=2, resolution_schedule=10)
    camera = one_camera(width=49, height=37)
    outputs = model.get_outputs(camera)
    assert (int(camera.width), int(camera.height)) == (49, 37)
    # 1/4 would leave 9 rows, fewer than a window of SSIM.
    assert outputs["rgb"].shape == (18, 24, 3)
    assert outputs["background"].shape == (3,) and outputs["depth"] is None
    model.step = 20
    assert model.get_outputs(camera)["rgb"].shape == (37, 49, 3)
    with pytest.raises(ValueError, match="FISHEYE"):
        model.get_outputs(one_camera(camera_type=CameraType.FISHEYE))


def test_schedules_count_images() -> None:
    model = make_model(seeds(10), batch_size=4, sh_degree_interval=100, num_downscales=1, resolution_schedule=40)
    model.step = 9
    assert model.images == 36 and model.downscale_factor(400, 400) == 2
    model.step = 50
    assert model.downscale_factor(400, 400) == 1 and model.render_options().sh_degree == 2
    model.eval()
    assert model.render_options().sh_degree == 3


def test_random_background_is_a_function_of_step_and_view() -> None:
    model = make_model(seeds(10))
    first = model.get_outputs(one_camera(1))["background"]
    torch.rand(7)
    assert torch.equal(first, model.get_outputs(one_camera(1))["background"])
    assert not torch.equal(first, model.get_outputs(one_camera(2))["background"])
    model.step = 1
    assert not torch.equal(first, model.get_outputs(one_camera(1))["background"])


def test_masked_pixels_change_nothing() -> None:
    """Not the loss, nor its gradients, nor the densification statistics, nor the metrics: in full and reduced size."""
    mask = torch.ones(HEIGHT, WIDTH, 1, dtype=torch.bool)
    mask[8:31, 14:41] = False
    for downscales in (0, 1):
        results = []
        for seed in (0, 1):
            model = make_model(seeds(40), num_downscales=downscales, background_color="black")
            data = batch(0, mask=mask)
            if seed:
                data["image"] = torch.where(mask, data["image"], batch(1)["image"])
            outputs = model.get_outputs(one_camera())
            metrics = model.get_metrics_dict(outputs, data)
            terms = train_view(model, data)
            grads = torch.cat([p.grad.flatten() for p in model.gauss_params.values() if p.grad is not None])
            model.eval()
            evaluated = model.get_image_metrics_and_images(model.get_outputs_for_camera(one_camera()), data)[0]
            statistics = torch.stack([model.strategy_state["grad2d"], model.strategy_state["count"]])
            results.append(
                [metrics["psnr"], terms["main_loss"], grads, statistics, torch.tensor(list(evaluated.values()))]
            )
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b) and bool(a.isfinite().all())
        assert float(results[0][3].sum()) > 0


def test_a_fully_masked_view_has_no_gradient_and_no_psnr() -> None:
    model = make_model(seeds(40), color_corrected_metrics=True)
    data = batch(mask=torch.zeros(HEIGHT, WIDTH, 1, dtype=torch.bool))
    assert not {"psnr", "cc_psnr"} & set(model.get_metrics_dict(model.get_outputs(one_camera()), data))
    terms = train_view(model, data)
    assert float(terms["main_loss"].detach()) == pytest.approx(0.0, abs=1e-6)
    assert all(float(p.grad.abs().max()) == 0.0 for p in model.gauss_params.values() if p.grad is not None)
    assert float(model.strategy_state["count"].sum()) == 0


@pytest.mark.parametrize(("unmasked", "names"), [(0, set()), (5, {"psnr"}), (11, {"psnr", "ssim"})])
def test_metrics_that_a_mask_leaves_nothing_of_are_left_out(
    unmasked: int, names: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(seeds(40)).eval()
    mask = torch.zeros(HEIGHT, WIDTH, 1, dtype=torch.bool)
    mask[:unmasked, :unmasked] = True
    outputs = model.get_outputs_for_camera(one_camera())
    for _ in range(2):
        metrics, _images = model.get_image_metrics_and_images(outputs, batch(mask=mask))
        assert set(metrics) - {"lpips"} == names
        assert all(math.isfinite(value) for value in metrics.values())
    assert " ".join(capsys.readouterr().out.split()).count("has no part in") == (unmasked < 11)


def test_metrics_agree_with_their_usual_definitions() -> None:
    from pytorch_msssim import SSIM

    a, b = torch.rand(30, 40, 3), torch.rand(30, 40, 3)
    expected = SSIM(data_range=1.0, size_average=True, channel=3)(a.permute(2, 0, 1)[None], b.permute(2, 0, 1)[None])
    assert float(loss.ssim(a, b)) == pytest.approx(float(expected), abs=1e-5)
    mask = torch.zeros(30, 40, 1, dtype=torch.bool)
    mask[5:25, 10:30] = True
    cut = (slice(5, 25), slice(10, 30))
    assert float(loss.ssim(a, b, mask)) == pytest.approx(float(loss.ssim(a[cut], b[cut])), abs=1e-5)
    assert float(loss.psnr(a, b, mask)) == pytest.approx(float(loss.psnr(a[cut], b[cut])), abs=1e-4)


def test_transparent_photographs_are_composed_with_the_background() -> None:
    model = make_model(seeds(40), num_downscales=1)
    data = batch(channels=4)
    outputs = model.get_outputs(one_camera())
    target = model.composite_with_background(model.get_gt_img(data["image"]), outputs["background"])
    pixels = data["image"].float() / 255
    full = pixels[..., 3:] * pixels[..., :3] + (1 - pixels[..., 3:]) * outputs["background"]
    expected = full.reshape(HEIGHT // 2, 2, WIDTH // 2, 2, 3).mean(dim=(1, 3))
    torch.testing.assert_close(target, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("boundary", ["filter", "exact"])
def test_empty_views(boundary: str, capsys: pytest.CaptureFixture) -> None:
    """A near plane beyond the scene, and a camera that looks away: the background, zero gradients, one sentence."""
    model = make_model(seeds(40), near_plane=50.0, num_partitions=4, boundary=boundary, background_color="white")
    for _ in range(2):
        outputs = model.get_outputs(one_camera())
        assert bool((outputs["rgb"] == 1).all())
        train_view(model, batch())
    assert all(p.grad is not None and float(p.grad.abs().max()) == 0 for p in model.gauss_params.values())
    assert capsys.readouterr().out.count("near plane") <= 1
    model.eval()
    outputs = model.get_outputs_for_camera(one_camera())
    assert bool(outputs["depth"].isfinite().all()) and float(outputs["accumulation"].max()) == 0


def test_training_survives_points_behind_all_cameras() -> None:
    points, colors = seeds(30)
    model = make_model(
        (points + torch.tensor([0.0, 0.0, 100.0]), colors), refine_every=5, warmup_length=1, max_gaussians=50
    )
    optimizers = {name: torch.optim.Adam([p], lr=1e-3) for name, p in model.gauss_params.items()}
    for step in range(20):
        model.step = step
        train_view(model, batch())
        for optimizer in optimizers.values():
            optimizer.step()
        model.refine(step, optimizers)
    assert model.num_points > 0


def test_crop_box_and_keys_in_evaluation() -> None:
    model = make_model(seeds(40), num_partitions=4).eval()
    with torch.no_grad():
        model.gauss_params["opacities"].fill_(4.0)
        model.gauss_params["scales"].fill_(-2.0)
    whole = model.get_outputs_for_camera(one_camera())
    assert whole["rgb"].shape == whole["background"].shape == (HEIGHT, WIDTH, 3)
    assert whole["depth"].shape == whole["accumulation"].shape == (HEIGHT, WIDTH, 1)
    box = OrientedBox(torch.eye(3), torch.tensor([1.0, 0.0, 0.0]), torch.tensor([2.0, 4.0, 4.0]))
    cropped = model.get_outputs_for_camera(one_camera(1), box)
    assert (
        0
        < float(cropped["accumulation"].sum())
        < float(model.get_outputs_for_camera(one_camera(1))["accumulation"].sum())
    )
    nowhere = OrientedBox(torch.eye(3), torch.full((3,), 50.0), torch.ones(3))
    assert float(model.get_outputs_for_camera(one_camera(), nowhere)["accumulation"].max()) == 0


def test_one_partition_of_the_viewer_stays_in_the_viewer() -> None:
    model = make_model(seeds(40), num_partitions=2).eval()
    whole = model.get_outputs_for_camera(one_camera())["accumulation"]
    model.shown_partition = 1
    assert torch.equal(model.get_outputs_for_camera(one_camera())["accumulation"], whole)
    shown: list[Tensor] = []
    thread = threading.Thread(target=lambda: shown.append(model.get_outputs_for_camera(one_camera())["accumulation"]))
    thread.start()
    thread.join()
    assert 0 < float(shown[0].sum()) < float(whole.sum())


def test_participants() -> None:
    model = make_model(seeds(200), num_partitions=4)
    away = make_cameras(distance=-4.0)
    sets = model.participants_for(make_cameras())
    assert len(sets) == 3 and all(s == {0, 1, 2, 3} for s in sets)
    assert model.participants_for(away) == [set()] * 3


@pytest.mark.parametrize(("num", "num_partitions"), [(7, 1), (90, 5)])
def test_state_of_any_size(num: int, num_partitions: int) -> None:
    """Numbers of Gaussians and partitions come from the checkpoint; pictures are the same."""
    source = make_model(seeds(num), num_partitions=num_partitions)
    target = make_model(seeds(40), num_partitions=3)
    target.load_state_dict(source.state_dict())
    assert target.num_points == num and target.tree.num_partitions == num_partitions
    assert float(target.near_plane) == float(source.near_plane)
    for group in target.get_param_groups().values():
        assert group[0].requires_grad and group[0].is_leaf
    for name, p in target.gauss_params.items():
        assert torch.equal(p, source.gauss_params[name])
    a, b = (m.eval().get_outputs_for_camera(one_camera())["rgb"] for m in (source, target))
    assert torch.equal(a, b)


def test_near_plane_option_outranks_the_checkpoint() -> None:
    target = make_model(seeds(40), near_plane=0.5)
    target.load_state_dict(make_model(seeds(40)).state_dict())
    assert float(target.near_plane) == 0.5


def test_foreign_and_damaged_states_end_in_one_sentence() -> None:
    model = make_model(seeds(10), num_partitions=2)
    good = dict(model.state_dict())
    stock = {key: value for key, value in good.items() if key.startswith("gauss_params")}
    cases = [
        (stock, "splatfacto"),
        ({}, "gauss_params.means"),
        (good | {"gauss_params.quats": torch.zeros(9, 4)}, "quats"),
        (good | {"gauss_params.features_rest": torch.zeros(10, 8, 3)}, "sh-degree"),
        (good | {"tree_children": torch.zeros(1, 2, dtype=torch.int32)}, "damaged"),
        (good | {"near_plane": torch.tensor(float("nan"))}, "near_plane"),
        (good | {"gauss_params.means": torch.full((10, 3), float("nan"))}, "means is not finite for 10 of 10"),
        (good | {"gauss_params.scales": torch.zeros(10, 3).double()}, "scales is torch.float64"),
    ]
    for state, message in cases:
        with pytest.raises(ValueError, match=message):
            model.load_state_dict(state)
    assert model.num_points == 10


def test_training_state_round_trip(tmp_path) -> None:
    model = make_model(seeds(40))
    train_view(model, batch())
    model.step = 7
    torch.save(model.training_state(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    other = make_model(seeds(40))
    other.load_training_state(state)
    assert other.step == 7 and torch.equal(other.strategy_state["grad2d"], model.strategy_state["grad2d"])
    with pytest.raises(ValueError, match="statistics"):
        make_model(seeds(9)).load_training_state(state)
    with pytest.raises(ValueError, match="damaged"):
        other.load_training_state({})


def test_repartition_and_one_partition() -> None:
    model = make_model(seeds(60), num_partitions=4)
    with torch.no_grad():
        model.means[:, 0] *= 10.0
    result = model.repartition(8)
    assert model.tree.num_partitions == 8 and result.num_moved > 0
    assert sum(result.counts_before) == sum(result.counts_after) == 60 and max(result.counts_after) <= 8
    assert len(model.state_dict()["tree_axis"]) == 7
    with model.as_one_partition():
        assert model.tree.num_partitions == 1
    assert model.tree.num_partitions == 8


def test_scale_regularization_is_splatfactos() -> None:
    model = make_model(seeds(40), use_scale_regularization=True)
    with torch.no_grad():
        model.gauss_params["scales"][:, 0] += 4.0
    terms = train_view(model, batch())
    ratio = torch.exp(model.scales.detach()).amax(dim=-1) / torch.exp(model.scales.detach()).amin(dim=-1)
    assert float(terms["scale_reg"]) == pytest.approx(0.1 * float((ratio.clamp_min(10) - 10).mean()), rel=1e-5)
    model.step = 1
    assert "scale_reg" not in train_view(model, batch())


def test_old_configurations_load() -> None:
    """A field added later must be found on the class: an old config.yml does not set it."""
    config = object.__new__(SplaxelModelConfig)
    old = {name: value for name, value in vars(SplaxelModelConfig()).items() if name in vars(SplatfactoModelConfig())}
    vars(config).update(old)
    assert config.num_partitions is None and config.near_plane is None and config.max_gaussians == 0
