"""The GPU's path without a GPU: gsplat's seam in torch, what stays where, and who waits for the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gpu_models
import pytest
import torch
from nerfstudio.cameras.camera_optimizers import CameraOptimizerConfig
from nerfstudio.data.scene_box import OrientedBox
from pretend_gpu import PretendGpu, backward, backward_of
from torch import Tensor
from torch.utils._pytree import tree_leaves

from splaxel_ns.checkpoint import plain
from splaxel_ns.comm import Pending, World
from splaxel_ns.cuda import _gsplat, _ssim
from splaxel_ns.overlay import Overlay


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendGpu]:
    """A GPU without a driver, on which models train."""
    _ssim._weights.cache_clear()
    mode = PretendGpu()
    torch._C._ensureCUDADeviceGuardSet()
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", mode.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(_gsplat, "functions", lambda: gpu_models.IN_TORCH)
    monkeypatch.setattr("splaxel_ns.cuda._gpu_backend.load", lambda: None)
    kept: list[Tensor] = []
    monkeypatch.setattr(Tensor, "retain_grad", lambda tensor: kept.append(tensor))
    monkeypatch.setattr(Tensor, "backward", lambda tensor: backward(tensor, kept.pop() if kept else None))
    with mode:
        yield mode
    _ssim._weights.cache_clear()


OPTIONS: dict[str, dict[str, Any]] = {
    "one partition": {},
    "visible": {"updates": "visible", "background_color": "random"},
    "filter": {"num_partitions": 3, "saturation": False},
    "saturation": {"num_partitions": 3, "saturation": True},
    "exact": {"num_partitions": 3, "boundary": "exact", "saturation": False},
    "antialiased": {"rasterize_mode": "antialiased", "use_absgrad": False},
    "pose": {"camera_optimizer": CameraOptimizerConfig(mode="SO3xR3")},
    "bilateral grid": {"use_bilateral_grid": True, "grid_shape": (4, 4, 2)},
    "mcmc": {"strategy": "mcmc"},
    "masks": {"masked": True, "num_downscales": 1, "use_scale_regularization": True},
}


ALWAYS = {"rasterize.py: __getattr__", "pipeline.py: read", "optimization.py: step"}
"""Whether a view drew nothing, and its loss: asked for when its backward pass is under way. Adam's count of a run that
is continued: once. (The rasteriser waits once per view, inside its op, for the number of pairs.)"""
BOXES = {"visibility.py: content_boxes", "region.py: _float", "region.py: _int"}
"""Where several partitions lie, once per step: they decide who takes part in a view."""
ALSO = {
    "filter": BOXES | {"visibility.py: spans_of"},  # the region that each partition's splats touch
    "saturation": BOXES | {"visibility.py: spans_of", "saturation.py: _update_on_gpu"},  # masks are kept by the CPU
    "exact": BOXES,
    "pose": {"pipeline.py: _land"},  # the gradient of a pose, which lives on the CPU
    "masks": {"compared.py: get_loss_dict", "compared.py: get_metrics_dict"},  # whether anything is left of the view
}


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_of_a_step_strays(pretended: PretendGpu, name: str) -> None:
    """No tensor is on the wrong device, and the host waits for the GPU in the places named here and in no other."""
    run = gpu_models.train("cuda", steps=2, **OPTIONS[name])
    assert all(parameter.device.type == "cuda" for parameter in run.model.gauss_params.values())
    assert set(pretended.waits) - {"a test"} == ALWAYS | ALSO.get(name, set())
    assert pretended.waits["pipeline.py: read"] == 4  # once per view


@pytest.mark.parametrize("strategy", ["default", "mcmc"])
def test_growing_strays_nowhere(pretended: PretendGpu, strategy: str) -> None:
    """A refinement waits for the GPU, as gsplat's does; what it makes is on the GPU."""
    options: dict[str, Any] = {"strategy": strategy, "warmup_length": 1, "refine_every": 2, "reset_alpha_every": 1}
    model = gpu_models.train("cuda", steps=1, **options).model
    assert all(parameter.device.type == "cuda" for parameter in model.gauss_params.values())


def test_a_checkpoint_is_on_the_cpu(pretended: PretendGpu) -> None:
    run = gpu_models.train("cuda", steps=1, num_partitions=2)
    saved = plain({"model": dict(run.model.state_dict()), "training": run.model.training_state()})
    states = plain({name: optimizer.state_dict() for name, optimizer in run.optimizers.optimizers.items()})
    assert not any(isinstance(value, Tensor) and value.device.type == "cuda" for value in tree_leaves([saved, states]))
    again = gpu_models.train("cuda", steps=0, num_partitions=2)
    again.model.load_state_dict(
        {name: torch.ones_like(v) if "gauss" in name else v for name, v in saved["model"].items()}
    )
    again.model.load_training_state(saved["training"])
    values = [*again.model.gauss_params.values(), *again.model.strategy_state.values()]
    assert all(value.device.type == "cuda" for value in values if isinstance(value, Tensor))


@pytest.mark.parametrize("shown", [None, 1])
def test_the_viewer_strays_nowhere(pretended: PretendGpu, shown: int | None) -> None:
    model = gpu_models.make_model("cuda", 200, 1, num_partitions=3).eval()
    camera = gpu_models.make_cameras()[:1]
    box = OrientedBox.from_params((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    with torch.no_grad():
        outputs = model.get_outputs_for_camera(camera, box)
        assert all(value.device.type == "cuda" for value in outputs.values())
        model.shown_partition, model.overlay = shown, Overlay([(255, 0, 0), (0, 255, 0), (0, 0, 255)], True)
        assert model._outputs_for_viewer(camera)["rgb"].device.type == "cuda"
        model.overlay = None
        assert model._outputs_for_viewer(camera)["rgb"].device.type == "cuda"
        target = {"image": torch.zeros(32, 48, 3, device="cuda"), "image_idx": 0}
        model.get_image_metrics_and_images(model.get_outputs_for_camera(camera), target)


class Echo(World):
    """Rank 1 of two, whose peer says and sends just what it does; nothing leaves the process."""

    def __init__(self) -> None:
        super().__init__(1, 2)
        self.on_gpu: set[str] = set()

    def gather(self, tensor: Tensor, kind: str = "agreement") -> Tensor:
        assert tensor.device.type == "cpu", f"{kind} is agreed on by the hosts"
        return torch.stack([tensor, tensor])

    def gather_uneven(self, tensor: Tensor, kind: str) -> list[Tensor]:
        assert tensor.device.type == "cpu", kind
        return [tensor, tensor]

    def sum(self, tensor: Tensor, kind: str = "sums") -> Tensor:
        return tensor

    def from_main(self, tensor: Tensor, kind: str = "agreement") -> Tensor:
        return tensor

    def start(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], kind: str) -> Pending:
        assert all(tensor.device.type == "cuda" for tensor in (*sends.values(), *receives.values())), kind
        self.on_gpu.add(kind)
        return Pending(self, dict(receives), [], [], kind)


SPLATS, PIXELS = {"splats", "splat gradients"}, {"pixels"}
EXACT = {"boundary": "exact", "saturation": False}
EXCHANGES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "dense": ({"exchange": "dense"}, PIXELS),
    "half": ({"exchange": "dense", "half_pixels": True}, PIXELS),
    "active": ({"exchange": "dense", "active_pixels": True}, PIXELS),
    "grid": ({"exchange": "dense", "use_bilateral_grid": True, "grid_shape": (4, 4, 2)}, PIXELS),
    "gaussian": ({"exchange": "gaussian"}, SPLATS),
    "selective": ({"exchange": "selective", **EXACT}, PIXELS | SPLATS),
    "owner": ({"exchange": "owner", **EXACT}, PIXELS | SPLATS | {"halo", "pixel gradients"}),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_exchange_strays_nowhere(pretended: PretendGpu, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels, splats and gradients travel between GPUs; what ranks agree on comes from the hosts."""
    world, (options, kinds) = Echo(), EXCHANGES[name]
    monkeypatch.setattr("splaxel_ns.comm.world", lambda: world)
    monkeypatch.setattr("splaxel_ns.pixel_streams.PixelSwap._compare", lambda *_: None)
    monkeypatch.setattr(torch.autograd, "backward", backward_of)
    run = gpu_models.train("cuda", steps=1, **options)
    assert all(parameter.device.type == "cuda" for parameter in run.model.gauss_params.values())
    assert world.on_gpu == kinds and len(run.gradients) >= 6
