"""A tiny model and its training steps, on the CPU's path or the GPU's: on a GPU, or on the CPU with stand-ins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from gsplat.cuda import _torch_impl
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import SceneBox
from torch import Tensor

from splaxel_ns.config import splaxel
from splaxel_ns.cuda import _backend, _device, _gsplat
from splaxel_ns.model import SplaxelModel, SplaxelModelConfig
from splaxel_ns.optimization import BatchOptimizers
from splaxel_ns.pipeline import SplaxelPipeline

WIDTH, HEIGHT, NUM_VIEWS = 48, 32, 3
FIRST_STEP = 3
"""All degrees of the harmonics have come into use."""


def _projection(
    means: Tensor, covars: None, quats: Tensor, scales: Tensor, viewmats: Tensor, Ks: Tensor, width: int, height: int,
    eps2d: float, near_plane: float, far_plane: float, calc_compensations: bool,
) -> Any:  # fmt: skip
    covariances, _ = _torch_impl._quat_scale_to_covar_preci(quats, scales, True, False)
    assert covariances is not None
    return _torch_impl._fully_fused_projection(
        means, covariances, viewmats, Ks, width, height, eps2d, near_plane, far_plane, calc_compensations
    )


def _harmonics(degree: int, directions: Tensor, coefficients: Tensor, masks: Tensor) -> Tensor:
    return _torch_impl._spherical_harmonics(degree, directions, coefficients)


IN_TORCH = _gsplat.Functions(_projection, _harmonics)
"""gsplat's own reference in place of what it compiles."""


@contextlib.contextmanager
def gpu_path(ops: Any) -> Iterator[None]:
    """Within, tensors on the CPU go the GPU's way: `ops` for the kernels, gsplat's reference for gsplat's."""
    load, on_gpu, functions = _backend.load, _device.on_gpu, _gsplat.functions
    _backend.load = lambda device=None: load() if device is None else ops
    _device.on_gpu = lambda tensor: True
    _gsplat.functions = lambda: IN_TORCH
    try:
        yield
    finally:
        _backend.load, _device.on_gpu, _gsplat.functions = load, on_gpu, functions


def make_cameras(distance: float = 6.0) -> Cameras:
    """On the z axis, looking down at the origin. Unless they are near, no centre is outside, where gsplat sees less."""
    poses = torch.eye(4)[None, :3].repeat(NUM_VIEWS, 1, 1)
    poses[:, 2, 3] = distance
    poses[:, 0, 3] = torch.linspace(-0.5, 0.5, NUM_VIEWS)
    return Cameras(poses, fx=50.0, fy=50.0, cx=WIDTH / 2 + 1.5, cy=HEIGHT / 2 - 2.0, width=WIDTH, height=HEIGHT)


def make_model(device: torch.device | str, num: int, batch_size: int, **options: Any) -> SplaxelModel:
    """A model of `num` Gaussians, the same on every device; every view sees most of them."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(num)
    points = torch.rand(num, 3, generator=generator) * 2 - 1
    colors = (20 + torch.rand(num, 3, generator=generator) * 215).to(torch.uint8)  # none is at the clamp
    settings: dict[str, Any] = {"num_downscales": 0, "near_plane": 0.2, "sh_degree_interval": 1}
    config = SplaxelModelConfig(**(settings | options))
    box = SceneBox(aabb=torch.tensor([[-1.0] * 3, [1.0] * 3]))
    model = config.setup(scene_box=box, num_train_data=NUM_VIEWS, seed_points=(points, colors))
    assert isinstance(model, SplaxelModel)
    with torch.no_grad():
        model.gauss_params["opacities"].add_(2.0 * torch.randn(num, 1, generator=generator))
        model.gauss_params["scales"].add_(0.5 * torch.randn(num, 3, generator=generator))
        model.gauss_params["features_rest"].add_(0.1 * torch.randn(num, 15, 3, generator=generator))
    model.to(device)
    model.set_training_views(make_cameras(), batch_size)
    return model


@dataclass
class Views:
    """What a pipeline asks of a datamanager: views in turn, with photographs on the device."""

    device: torch.device | str
    batch_size: int
    masked: bool = False
    cameras: Cameras = field(default_factory=make_cameras)
    done: int = 0

    @property
    def train_dataset(self) -> Views:
        return self

    @property
    def image_filenames(self) -> list[str]:
        return ["photograph"] * NUM_VIEWS

    def new_epoch_next(self, step: int) -> bool:
        return self.done % NUM_VIEWS == 0

    def set_participants(self, participants: Any) -> None:
        self.participants = participants

    def next_train_batch(self, step: int, wanted: Any = None) -> list[tuple[Cameras, dict[str, Any]]]:
        views = []
        for _ in range(self.batch_size):
            index = self.done % NUM_VIEWS
            camera = self.cameras[index : index + 1]
            camera.metadata = {"cam_idx": index}
            generator = torch.Generator().manual_seed(index)
            image = (torch.rand(HEIGHT, WIDTH, 3, generator=generator) * 255).to(torch.uint8)
            batch: dict[str, Any] = {"image": image.to(self.device), "image_idx": index}
            if self.masked:
                batch["mask"] = (torch.rand(HEIGHT, WIDTH, 1, generator=generator) < 0.8).to(self.device)
            views.append((camera, batch))
            self.done += 1
        return views


class Steps(SplaxelPipeline):
    """The pipeline's training steps, without its data."""

    def __init__(self, model: SplaxelModel, views: Views) -> None:
        torch.nn.Module.__init__(self)
        self._model = model
        self.datamanager = views  # type: ignore[assignment]


@dataclass
class Run:
    """A model after some training steps."""

    model: SplaxelModel
    losses: list[float]
    gradients: dict[str, Tensor]  # of the first step
    optimizers: BatchOptimizers


def train(
    device: torch.device | str, steps: int = 2, updates: str = "all", batch_size: int = 2, num: int = 200,
    fused: bool = True, masked: bool = False, distance: float = 6.0, **options: Any,
) -> Run:  # fmt: skip
    """Take training steps: views, loss, gradients, optimisers, refinement.

    Args:
        fused: With our own update of the Gaussians; the CPU's leaves no gradients.
    """
    model = make_model(device, num, batch_size, **options)
    pipeline = Steps(model, Views(device, batch_size, masked, make_cameras(distance)))
    groups = model.get_param_groups()
    optimizers = BatchOptimizers({name: splaxel.config.optimizers[name] for name in groups}, groups, batch_size)
    if fused:
        assert optimizers.fuse(model, only_visible=updates == "visible") is None
    model.train()
    model.optimizers = optimizers.optimizers
    losses, gradients = [], {}
    for step in range(FIRST_STEP, FIRST_STEP + steps):
        model.step = step
        optimizers.zero_grad_all()
        loss, _, _ = pipeline.train_step(step)
        losses.append(float(loss))
        if step == FIRST_STEP:
            named = [(name, parameter.grad) for name, parameter in model.named_parameters()]
            gradients = {name: grad.detach().cpu().clone() for name, grad in named if grad is not None}
        optimizers.optimizer_step_all()
        optimizers.scheduler_step_all(step)
        model.refine(step)
    return Run(model, losses, gradients, optimizers)
