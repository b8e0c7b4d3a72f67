"""The method `splaxel` as `ns-train` knows it: splatfacto's recipe with our parts."""

from __future__ import annotations

from nerfstudio.configs.base_config import MachineConfig, ViewerConfig
from nerfstudio.engine.optimizers import AdamOptimizerConfig
from nerfstudio.engine.schedulers import ExponentialDecaySchedulerConfig
from nerfstudio.plugins.types import MethodSpecification

from splaxel_ns.datamanager import SplaxelDatamanagerConfig
from splaxel_ns.model import SplaxelModelConfig
from splaxel_ns.pipeline import SplaxelPipelineConfig
from splaxel_ns.trainer import SplaxelTrainerConfig
from splaxel_ns.types import Exchange

NUM_IMAGES = 30_000
"""Length of the recipe in images: the schedules below and in splatfacto's model end with it."""


def make_method(name: str, description: str, exchange: Exchange = "selective") -> MethodSpecification:
    """A method of this package.

    Args:
        name: Its subcommand of `ns-train`.
        description: One line for `ns-train --help`.
        exchange: What several ranks swap for a view.

    Returns:
        What nerfstudio's plugin registry takes.
    """
    config = SplaxelTrainerConfig(
        method_name=name,
        steps_per_eval_batch=0,
        steps_per_eval_image=1000,
        steps_per_eval_all_images=5000,
        steps_per_save=2000,
        max_num_iterations=NUM_IMAGES,
        mixed_precision=False,
        pipeline=SplaxelPipelineConfig(
            datamanager=SplaxelDatamanagerConfig(), model=SplaxelModelConfig(exchange=exchange)
        ),
        optimizers={
            "means": {
                "optimizer": AdamOptimizerConfig(lr=1.6e-4, eps=1e-15),
                "scheduler": ExponentialDecaySchedulerConfig(lr_final=1.6e-6, max_steps=NUM_IMAGES),
            },
            "features_dc": {"optimizer": AdamOptimizerConfig(lr=0.0025, eps=1e-15), "scheduler": None},
            "features_rest": {"optimizer": AdamOptimizerConfig(lr=0.0025 / 20, eps=1e-15), "scheduler": None},
            "opacities": {"optimizer": AdamOptimizerConfig(lr=0.05, eps=1e-15), "scheduler": None},
            "scales": {"optimizer": AdamOptimizerConfig(lr=0.005, eps=1e-15), "scheduler": None},
            "quats": {"optimizer": AdamOptimizerConfig(lr=0.001, eps=1e-15), "scheduler": None},
            # Of views rather than Gaussians; only used with --pipeline.model.camera-optimizer.mode and
            # --pipeline.model.use-bilateral-grid.
            "camera_opt": {
                "optimizer": AdamOptimizerConfig(lr=1e-4, eps=1e-15),
                "scheduler": ExponentialDecaySchedulerConfig(
                    lr_final=5e-7, max_steps=NUM_IMAGES, warmup_steps=1000, lr_pre_warmup=0
                ),
            },
            "bilateral_grid": {
                "optimizer": AdamOptimizerConfig(lr=2e-3, eps=1e-15),
                "scheduler": ExponentialDecaySchedulerConfig(
                    lr_final=1e-4, max_steps=NUM_IMAGES, warmup_steps=1000, lr_pre_warmup=0
                ),
            },
        },
        machine=MachineConfig(device_type="cuda"),  # a wish: where there is no GPU to use, the CPU is
        # More thumbnails than this would have all photographs decoded for the viewer alone.
        viewer=ViewerConfig(num_rays_per_chunk=1 << 15, max_num_display_images=64),
        vis="viewer+tensorboard",
    )
    return MethodSpecification(config=config, description=description)


splaxel = make_method("splaxel", "3D Gaussian Splatting in convex partitions that exchange pixels.")
splaxel_gaussian = make_method(
    "splaxel-gaussian", "The baseline beside splaxel: ranks exchange projected Gaussians instead of pixels.", "gaussian"
)
