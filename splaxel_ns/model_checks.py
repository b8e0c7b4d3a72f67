"""What a configuration and a checkpoint must satisfy before a model is made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

import torch
from nerfstudio.models.splatfacto import num_sh_bases
from torch import Tensor

from splaxel_ns.model_options import SplaxelModelOptions
from splaxel_ns.types import MAX_PARTITIONS, Boundary, Exchange

if TYPE_CHECKING:
    from splaxel_ns.model import SplaxelModelConfig

MAX_SH_DEGREE = 3
OF_BOXES = ("num_partitions", "boundary", "half_pixels", "active_pixels")
OF_BOXES += ("imbalance", "max_imbalance", "balance_every", "migrate_every")
"""Options that say nothing where ranks exchange Gaussians."""


def check_config(config: SplaxelModelConfig) -> None:
    """Refuse what is out of range.

    Raises:
        ValueError: Naming the option, its value and the remedy.
    """
    option = "--pipeline.model."
    choices = {
        "boundary": (config.boundary, get_args(Boundary)),
        "exchange": (config.exchange, get_args(Exchange)),
        "placement": (config.placement, ("random", "kdtree")),
        "rasterize-mode": (config.rasterize_mode, ("classic", "antialiased")),
        "strategy": (config.strategy, ("default", "mcmc")),
        "camera-optimizer.mode": (config.camera_optimizer.mode, ("off", "SO3xR3", "SE3")),
        "background-color": (config.background_color, ("random", "black", "white")),
    }
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ValueError(f"{option}{name} is {value!r}; it must be one of {', '.join(allowed)}")
    ranges = {
        "num-partitions": (1 if config.num_partitions is None else config.num_partitions, 1, MAX_PARTITIONS),
        "migrate-every": (config.migrate_every, 1, 2**31 - 1),
        "balance-every": (config.balance_every, 1, 2**31 - 1),
        "max-imbalance": (config.max_imbalance, 0.01, 1e6),
        "in-flight": (config.in_flight, 1, 1024),
        "sh-degree": (config.sh_degree, 0, MAX_SH_DEGREE),
        "ssim-lambda": (config.ssim_lambda, 0, 1),
        "transmittance-stop": (config.transmittance_stop, 0, 0.5),
        "saturation-threshold": (config.saturation_threshold, 1e-8, 0.5),
        "saturation-every": (config.saturation_every, 0, 2**31 - 1),
        "saturation-gib": (config.saturation_gib, 0, 2**20),
        "num-downscales": (config.num_downscales, 0, 16),
        "max-gaussians": (config.max_gaussians, 0, 2**31 - 1),
        "max-gs-num": (config.max_gs_num, 1, 2**31 - 1),
        "noise-lr": (config.noise_lr, 0, math.inf),
        "mcmc-min-opacity": (config.mcmc_min_opacity, 0, 0.5),
        "mcmc-opacity-reg": (config.mcmc_opacity_reg, 0, math.inf),
        "mcmc-scale-reg": (config.mcmc_scale_reg, 0, math.inf),
        "grid-shape": (min(config.grid_shape), 1, 256),
        "num-random": (config.num_random, 0, 2**31 - 1),
        "near-plane": (0 if config.near_plane is None else config.near_plane, 0, 1e10),
    }
    for name, (value, low, high) in ranges.items():
        if not low <= value <= high:
            raise ValueError(f"{option}{name} is {value}; it must be from {low} to {high}")
    by_gaussians = config.exchange == "gaussian"
    for name in OF_BOXES if by_gaussians else ("placement",):
        value, default = getattr(config, name), getattr(SplaxelModelOptions, name)
        if value != default:
            why = "there are no boxes and no pixels travel" if by_gaussians else "boxes say who holds which Gaussian"
            raise ValueError(
                f"{option}{name.replace('_', '-')} is {value}, but with {option}exchange {config.exchange} {why}; "
                f"leave it at {default} or choose another exchange"
            )
    for name in ("refine_every", "reset_alpha_every", "resolution_schedule", "sh_degree_interval"):
        if getattr(config, name) < 1:
            raise ValueError(f"{option}{name.replace('_', '-')} is {getattr(config, name)}; it must be at least 1")


def check_state(state: Mapping[str, Any], sh_degree: int) -> None:
    """Refuse the state of another method, another SH degree, or a damaged one.

    Raises:
        ValueError: Naming what is missing or does not fit.
    """
    shapes = {
        "gauss_params.means": (3,),
        "gauss_params.scales": (3,),
        "gauss_params.quats": (4,),
        "gauss_params.features_dc": (3,),
        "gauss_params.features_rest": (num_sh_bases(sh_degree) - 1, 3),
        "gauss_params.opacities": (1,),
    }
    needed = [*shapes, "tree_axis", "tree_threshold", "tree_children", "near_plane"]
    missing = [name for name in needed if not isinstance(state.get(name), Tensor)]
    if missing:
        hint = "; it may be one of splatfacto" if "gauss_params.means" not in missing else ""
        raise ValueError(f"This is not the checkpoint of a splaxel model{hint}: it lacks {', '.join(missing)}")
    num = state["gauss_params.means"].shape[0] if state["gauss_params.means"].dim() else 0
    for name, shape in shapes.items():
        if tuple(state[name].shape) != (num, *shape):
            raise ValueError(
                f"The checkpoint does not fit: {name} is {list(state[name].shape)}, expected {[num, *shape]}. Use the "
                f"config.yml of the run that wrote it (--pipeline.model.sh-degree is {sh_degree} here)"
            )
        if state[name].dtype != torch.float32:
            raise ValueError(f"The checkpoint is damaged: {name} is {state[name].dtype}, expected torch.float32")
        finite = state[name].isfinite().flatten(1).all(dim=1)
        if not finite.all():
            raise ValueError(f"The checkpoint is damaged: {name} is not finite for {int((~finite).sum())} of {num}")
    if state["near_plane"].numel() != 1 or not state["near_plane"].isfinite().all():
        raise ValueError(f"The checkpoint is damaged: near_plane is {state['near_plane'].tolist()}")


def check_view_parameters(state: Mapping[str, Any], own: Mapping[str, Tensor]) -> None:
    """Refuse a state whose pose corrections or bilateral grids are not those of the model.

    Args:
        state: The checkpoint's.
        own: The model's.

    Raises:
        ValueError: Naming the option that differs.
    """
    for name, option, off, on in (
        ("camera_optimizer.pose_adjustment", "camera-optimizer.mode", "off", "SO3xR3 (or SE3)"),
        ("bil_grids.grids", "use-bilateral-grid", "False", "True"),
    ):
        option = f"--pipeline.model.{option}"
        if name not in state and name not in own:
            continue
        if name not in state or name not in own:
            used, value = ("without", off) if name not in state else ("with", on)
            raise ValueError(f"The checkpoint was trained {used} {name.split('.')[0]}: use {option} {value}")
        theirs, ours = state[name], own[name]
        shape = list(theirs.shape) if isinstance(theirs, Tensor) else []
        if shape != list(ours.shape):
            raise ValueError(
                f"The checkpoint does not fit: {name} is {shape}, expected {list(ours.shape)}. Its first number counts "
                "the training views: use the data and the config.yml of the run that wrote it"
            )
        if not bool(theirs.isfinite().all()):
            raise ValueError(f"The checkpoint is damaged: {name} is not finite")
