"""splatfacto's model, rendered in convex partitions by our own ops on the CPU.

Shapes: N Gaussians, P partitions, K SH coefficients, H x W pixels.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from nerfstudio.cameras.camera_optimizers import CameraOptimizer
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackAttributes, TrainingCallbackLocation
from nerfstudio.models.splatfacto import SplatfactoModelConfig
from nerfstudio.utils.colors import get_color
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from splaxel_ns import cameras as camera_views
from splaxel_ns import loss
from splaxel_ns.compositing import expected_depth
from splaxel_ns.model_checks import check_config
from splaxel_ns.render import Rendered, RenderOptions, render_view, view_info
from splaxel_ns.scene import PartitionedGaussians
from splaxel_ns.strategy import RefineReport, SplaxelStrategy, crosses, derived_seed
from splaxel_ns.targets import over_background, shrink_mask, shrink_photograph
from splaxel_ns.types import Boundary, View
from splaxel_ns.visibility import participants

VIEWER_BACKGROUND = torch.tensor([0.1490, 0.1647, 0.2157])
"""What evaluation composes over where training uses random colours: the viewer's dark grey, as in splatfacto."""


@dataclass
class SplaxelModelConfig(SplatfactoModelConfig):
    """splatfacto's options, whose intervals and schedules count images here (steps times batch size), and ours."""

    _target: type = field(default_factory=lambda: SplaxelModel)
    num_partitions: int = 1
    """Convex boxes that space is cut into, 1 to 16. A checkpoint brings its own."""
    boundary: Boundary = "filter"
    """Gaussians that straddle two boxes: filter (the paper; drop them on rays where both boxes are rendered), exact (as
    one model on one device) or none (ablation)."""
    near_plane: float | None = None
    """Gaussians nearer to the camera are not drawn, in the scene's unit. None: one hundredth of the depth at which the
    training cameras see the nearest seed points; kept in the checkpoint."""
    max_gaussians: int = 0
    """Growth stops at this many Gaussians, those with the largest gradients first. 0: no limit."""
    transmittance_stop: float = 1e-4
    """A pixel is finished once so little light from behind would reach it. 0: never."""
    seed: int = 42
    """Seed of the random backgrounds (a function of seed, step and view) and of splitting."""


def in_viewer() -> bool:
    """Whether this is one of the viewer's threads: its choices must not reach training or evaluation."""
    return threading.current_thread() is not threading.main_thread()


class SplaxelModel(PartitionedGaussians):
    """3D Gaussians in P convex partitions, each drawn into a partial image, composed front to back.

    A `SplatfactoModel`, so that nerfstudio's viewer and exporter know what it is; its parameters have the same names.

    Args:
        seed_points: Points [N, 3] in world units and colours [N, 3] in 0..255, or None.
        others: As for nerfstudio's `Model`.

    Raises:
        ValueError: An option is out of range or not available.
    """

    config: SplaxelModelConfig

    def populate_modules(self) -> None:
        """Make the Gaussians, the boxes and the strategy; nothing is downloaded or moved to a GPU."""
        check_config(self.config)
        self.step = 0
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.info: dict[str, Any] = {}
        self.crop_box: OrientedBox | None = None
        self.shown_partition: int | None = None
        self.camera_optimizer: CameraOptimizer = self.config.camera_optimizer.setup(
            num_cameras=self.num_train_data, device="cpu"
        )
        self.background_color = VIEWER_BACKGROUND
        self._lpips: tuple[Any] | None = None  # in a tuple: no part of the state
        self._target_made: tuple[Tensor, Tensor, Tensor, Tensor | None] | None = None
        self.start()
        config = self.config
        reset_every = config.reset_alpha_every * config.refine_every
        self.strategy = SplaxelStrategy(
            prune_opa=config.cull_alpha_thresh,
            grow_grad2d=config.densify_grad_thresh,
            grow_scale3d=config.densify_size_thresh,
            grow_scale2d=config.split_screen_size,
            prune_scale3d=config.cull_scale_thresh,
            prune_scale2d=config.cull_screen_size,
            refine_scale2d_stop_iter=config.stop_screen_size_at,
            refine_start_iter=config.warmup_length,
            refine_stop_iter=config.stop_split_at,
            reset_every=reset_every,
            refine_every=config.refine_every,
            # splatfacto's rule (an epoch, however long) ends densification for good where an epoch is longer than the
            # interval between two resets.
            pause_refine_after_reset=min(self.num_train_data, reset_every // 2),
            absgrad=config.use_absgrad,
            max_gaussians=config.max_gaussians,
            seed=config.seed,
        )
        self.strategy_state = self.strategy.initialize_state(scene_scale=1.0)

    def participants_for(self, cameras: Cameras) -> list[set[int]]:
        """The partitions with a non-empty region in each camera's view, for the scheduler."""
        views = [self.view_of(cameras[index : index + 1]) for index in range(len(cameras))]
        if not views:
            return []
        with torch.no_grad():
            partitions = self._partitions(self.activated(), views[0])
        return participants(views, self.tree, partitions.boxes, float(self.near_plane))

    # Rendering

    def view_of(self, camera: Cameras) -> View:
        """The view of one pinhole camera, at the resolution training has reached; the camera is left as it is.

        Raises:
            ValueError: More than one camera, or not a pinhole.
        """
        d = self.downscale_factor(int(camera.height.flatten()[0]), int(camera.width.flatten()[0]))
        return camera_views.view_of(camera, d)

    def downscale_factor(self, height: int, width: int) -> int:
        """1 outside training; else splatfacto's resolution schedule, ended early for images SSIM's window outgrows."""
        if not self.training:
            return 1
        d = 2 ** max(self.config.num_downscales - self.images // self.config.resolution_schedule, 0)
        while d > 1 and min(height, width) // d < loss.SSIM_WINDOW:
            d //= 2
        return d

    @property
    def images(self) -> int:
        """Images seen before this step."""
        return self.step * self.batch_size

    def render_options(self) -> RenderOptions:
        """How views are drawn at this step."""
        config = self.config
        degree = config.sh_degree
        if self.training:  # coefficients of higher degrees are still zero then
            degree = min(self.images // config.sh_degree_interval, degree)
        return RenderOptions(
            sh_degree=degree,
            near=float(self.near_plane),
            antialiased=config.rasterize_mode == "antialiased",
            boundary=config.boundary,
            stop=config.transmittance_stop,
            absgrad=config.use_absgrad and self.training,
        )

    def render(self, view: View, background: Tensor) -> Rendered:
        """Draw a view of all Gaussians, or outside training of those in the crop box.

        Boxes are always those of all Gaussians: what `filter` drops depends on them.
        """
        gaussians = self.activated()
        partitions = self._partitions(gaussians, view)
        if self.crop_box is not None and not self.training:
            keep = self.crop_box.within(self.means).reshape(-1)  # [N] bool
            gaussians = self.activated(keep)
            partitions = replace(partitions, owner=partitions.owner[keep])
        rendered = render_view(gaussians, view, partitions, background, self.render_options())
        if self.training and rendered.stats.num_splats == 0:
            self._say_once(
                "empty",
                f"[yellow]A view sees none of the {len(gaussians)} Gaussians; its picture is the background. The near "
                f"plane is at {float(self.near_plane):.4g}: set --pipeline.model.near-plane if the scene is nearer, "
                "else check the poses and the point cloud.",
            )
        return rendered

    def get_outputs(self, camera: Cameras) -> dict[str, Any]:
        """Draw one camera's view.

        Args:
            camera: One pinhole camera.

        Returns:
            rgb [H, W, 3], clamped to 0..1; accumulation [H, W, 1]; depth [H, W, 1] (expected, world units; the farthest
            where nothing was drawn; None in training unless `output_depth_during_training`); background, [3] in
            training, else [H, W, 3].
        """
        view = self.view_of(camera)
        background = self._background_for(camera)
        rendered = self.render(view, background)
        if self.training:
            self.info = view_info(rendered, view) | {"n_cameras": self.batch_size}
            if torch.is_grad_enabled() and rendered.splats.means2d.requires_grad and not self.strategy.absgrad:
                rendered.splats.means2d.retain_grad()
        return self._outputs(rendered.rgb, rendered.alpha, rendered.depth, background)

    def _outputs(self, rgb: Tensor, alpha: Tensor, depth: Tensor, background: Tensor) -> dict[str, Any]:
        depth_image = None
        if self.config.output_depth_during_training or not self.training:
            expected = expected_depth(depth, alpha)
            depth_image = torch.where(alpha > 0, expected, expected.detach().max())[..., None]
        return {
            "rgb": rgb.clamp(0.0, 1.0),
            "depth": depth_image,
            "accumulation": alpha[..., None],
            "background": background if self.training else background.expand(*alpha.shape, 3),
        }

    def _background_for(self, camera: Cameras) -> Tensor:
        """[3]. Random ones are a function of seed, step and view: any rank and any resumed run draws the same."""
        if self.config.background_color != "random":
            return get_color(self.config.background_color)
        if not self.training:
            return self.background_color if in_viewer() else VIEWER_BACKGROUND
        index = int((camera.metadata or {}).get("cam_idx", 0))
        generator = torch.Generator().manual_seed(derived_seed(self.config.seed, self.step, index))
        return torch.rand(3, generator=generator)

    @torch.no_grad()
    def get_outputs_for_camera(self, camera: Cameras, obb_box: OrientedBox | None = None) -> dict[str, Any]:
        """Draw one camera's view for evaluation, the viewer and the render commands.

        Args:
            camera: One pinhole camera.
            obb_box: Only Gaussians inside it are drawn.
        """
        self.set_crop(obb_box)
        shown = self.shown_partition
        if shown is None or not in_viewer():
            return self.get_outputs(camera)
        view = self.view_of(camera)
        black = torch.zeros(3)
        rendered = self.render(view, black)
        if shown not in rendered.plan.order:
            empty = torch.zeros(view.height, view.width)
            return self._outputs(empty[..., None].expand(-1, -1, 3), empty, empty, black)
        index = rendered.plan.order.index(shown)
        partials = rendered.partials
        alpha = 1.0 - partials.transmittances[index]
        return self._outputs(partials.colors[index], alpha, partials.depths[index], black)

    # Loss and metrics

    def get_gt_img(self, image: Tensor) -> Tensor:
        """A photograph at the resolution training has reached; premultiplied if it has an alpha channel.

        Args:
            image: uint8, or float in 0..1.  # [H, W, 3 | 4]
        """
        return shrink_photograph(image, self.downscale_factor(*image.shape[:2]))

    def composite_with_background(self, image: Tensor, background: Tensor) -> Tensor:
        """A photograph of `get_gt_img` over a background: [H, W, 3 | 4] -> [H, W, 3]."""
        return over_background(image, background)

    def _target(self, outputs: Mapping[str, Any], batch: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """The photograph [H, W, 3] over the outputs' background, and the mask [H, W, 1] bool or None.

        Loss and metrics of a view both ask; the second gets what the first made.
        """
        image, background = batch["image"], outputs["background"]
        made = self._target_made
        if made is None or made[0] is not image or made[1] is not background:
            mask = batch.get("mask")
            if mask is not None:
                mask = shrink_mask(mask, self.downscale_factor(*mask.shape[:2]))
            made = (image, background, over_background(self.get_gt_img(image), background), mask)
            self._target_made = made
        return made[2], made[3]

    def get_loss_dict(
        self, outputs: dict[str, Any], batch: dict[str, Any], metrics_dict: dict[str, Any] | None = None
    ) -> dict[str, Tensor]:
        """The photometric loss over the unmasked pixels, and the regularisers, of one view."""
        target, mask = self._target(outputs, batch)
        terms = {"main_loss": loss.photometric_loss(outputs["rgb"], target, mask, self.config.ssim_lambda)}
        if self.training:
            self.info["mask"] = mask
        if self.config.use_scale_regularization and crosses(self.step, self.batch_size, 10):
            terms["scale_reg"] = loss.scale_regularization(self.scales, self.config.max_gauss_ratio)
        return terms

    def get_metrics_dict(self, outputs: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
        """PSNR of one view over its unmasked pixels, and the number of Gaussians."""
        with torch.no_grad():
            target, mask = self._target(outputs, batch)
            return {"psnr": loss.psnr(outputs["rgb"], target, mask), "gaussian_count": self.num_points}

    @torch.no_grad()
    def get_image_metrics_and_images(
        self, outputs: dict[str, Any], batch: dict[str, Any]
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """PSNR, SSIM and, where its weights are on disk, LPIPS of one view; photograph and render side by side."""
        target, mask = self._target(outputs, batch)
        rgb = outputs["rgb"]
        metrics = {"psnr": float(loss.psnr(rgb, target, mask)), "ssim": float(loss.ssim(rgb, target, mask))}
        if self._lpips is None:
            self._lpips = (loss.load_lpips(),)
        if self._lpips[0] is not None:
            metrics["lpips"] = loss.lpips(self._lpips[0], rgb, target, mask)
        else:
            self._say_once("lpips", f"LPIPS is left out: its AlexNet weights are not at {loss.alexnet_weights()}")
        return metrics, {"img": torch.cat([target, rgb], dim=1)}

    # Training

    def get_training_callbacks(
        self, training_callback_attributes: TrainingCallbackAttributes
    ) -> list[TrainingCallback]:
        """Tell the model its step; statistics and refinement are called by pipeline and trainer."""
        return [
            TrainingCallback(
                [TrainingCallbackLocation.BEFORE_TRAIN_ITERATION],
                self.step_cb,
                args=[training_callback_attributes.optimizers],
            )
        ]

    def after_backward(self, camera: Cameras | None = None) -> None:
        """Take the densification statistics of the view that was drawn last; its backward pass must be done."""
        self.strategy.update(self.strategy_state, self.info, self.images, self.info.get("mask"))
        self.info = {}
        self._target_made = None

    def refine(self, step: int, optimizers: Any = None) -> RefineReport | None:
        """Grow, prune and reset once after a step, where the schedule says so.

        Args:
            step: The step just done, from 0.
            optimizers: nerfstudio's Optimizers, or a dict of optimisers by parameter group; None: those of `step_cb`.

        Returns:
            What was done, or None.
        """
        by_name = self.optimizers if optimizers is None else getattr(optimizers, "optimizers", optimizers)
        by_name = {name: by_name[name] for name in self.gauss_params}
        report = self.strategy.refine(self.gauss_params, by_name, self.strategy_state, step, self.batch_size)
        if report is not None:
            CONSOLE.print(f"Refinement after {report}")
        return report

    def update_to_step(self, step: int) -> None:
        """Where a loaded checkpoint stands."""
        self.step = step
