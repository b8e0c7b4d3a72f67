"""Training steps of the whole model on the GPU's path against the CPU's.

In the emulator, gsplat's projection and harmonics are its own reference in torch.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from gpu_ops import Gpu

gpu_models = pytest.importorskip("gpu_models", reason="nerfstudio and gsplat are needed")

OPTIONS: dict[str, dict[str, Any]] = {
    "one partition": {},
    "filter and saturation": {"num_partitions": 3, "saturation": True, "saturation_every": 2},
    "exact": {"num_partitions": 3, "boundary": "exact"},
    "antialiased": {"rasterize_mode": "antialiased", "use_absgrad": False},
    "pose": {"camera_optimizer": "SO3xR3"},
    "bilateral grid": {"use_bilateral_grid": True, "grid_shape": (4, 4, 2)},
    "mcmc": {"strategy": "mcmc", "warmup_length": 1, "refine_every": 2},
    "masks": {"masked": True},
}


def run(gpu: Gpu | None, options: dict[str, Any], **more: Any) -> Any:
    from nerfstudio.cameras.camera_optimizers import CameraOptimizerConfig

    options = options | more
    if "camera_optimizer" in options:
        options["camera_optimizer"] = CameraOptimizerConfig(mode=options["camera_optimizer"])
    if gpu is None:
        return gpu_models.train("cpu", **options)
    path = gpu_models.gpu_path(torch.ops.splaxel_emulated) if gpu.emulated else contextlib.nullcontext()
    with path:
        return gpu_models.train(gpu.device, **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_is_the_cpus(gpu: Gpu, name: str) -> None:
    """Loss, gradients and what densification is told. Compiled, gsplat's arithmetic is the fast and rough one."""
    tolerance = 2e-5 if gpu.emulated else 5e-3
    here, there = run(None, OPTIONS[name], steps=1, fused=False), run(gpu, OPTIONS[name], steps=1)
    assert there.losses[0] == pytest.approx(here.losses[0], rel=0.1 * tolerance)
    assert set(there.gradients) == set(here.gradients) and len(here.gradients) >= 6
    for parameter, gradient in here.gradients.items():
        bound = tolerance * float(gradient.abs().max())
        assert float((there.gradients[parameter] - gradient).abs().max()) <= bound, parameter
    for key, expected in here.model.strategy_state.items():
        if torch.is_tensor(expected):
            difference = (there.model.strategy_state[key].cpu() - expected).abs().max()
            assert float(difference) <= tolerance * float(expected.abs().max()), key


@pytest.mark.parametrize("updates", ["all", "visible"])
def test_updates_are_the_cpus(gpu: Gpu, updates: str) -> None:
    """Parameters and moments after steps of a camera that sees a part of the Gaussians only."""
    options: dict[str, Any] = {"steps": 2, "batch_size": 1, "updates": updates, "distance": 1.2}
    here, there = run(None, options), run(gpu, options)
    for name, parameter in here.model.gauss_params.items():
        moments = there.optimizers.optimizers[name].state[there.model.gauss_params[name]]
        expected = here.optimizers.optimizers[name].state[parameter]
        assert float(moments["step"]) == float(expected["step"]) == 2
        found, wanted = moments["exp_avg"].cpu(), expected["exp_avg"]
        close = (found - wanted).abs() <= 1e-3 * wanted.abs().max()
        moved = (there.model.gauss_params[name].detach().cpu() - parameter.detach()).abs()
        # gsplat leaves out some Gaussians beyond the border, and a step of Adam is as long for tiny gradients.
        assert float(close.float().mean()) > 0.97, name
        assert float((moved <= 0.05 * here.optimizers.learning_rates()[name]).float().mean()) > 0.9, name


def test_evaluation_is_the_cpus(gpu: Gpu) -> None:
    camera, tolerance = gpu_models.make_cameras()[:1], 1e-4 if gpu.emulated else 5e-3
    here = gpu_models.make_model("cpu", 200, 1, num_partitions=3).eval()
    path = gpu_models.gpu_path(torch.ops.splaxel_emulated) if gpu.emulated else contextlib.nullcontext()
    with path, torch.no_grad():
        there = gpu_models.make_model(gpu.device, 200, 1, num_partitions=3).eval()
        there.load_state_dict(here.state_dict())
        outputs = there.get_outputs_for_camera(camera)
    for name, expected in here.get_outputs_for_camera(camera).items():
        assert outputs[name].device.type == gpu.device.type
        assert float((outputs[name].cpu() - expected).abs().max()) < tolerance * max(
            1.0, float(expected.abs().max())
        ), name
