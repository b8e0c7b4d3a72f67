"""splatfacto's model, rendered in convex partitions by our own ops.

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
from nerfstudio.model_components.lib_bilagrid import BilateralGrid, color_affine_transform
from nerfstudio.utils.colors import get_color
from nerfstudio.utils.rich_utils import CONSOLE
from rich.markup import escape
from torch import Tensor
from torch.func import functional_call

from splaxel_ns import cameras as camera_views
from splaxel_ns import cuda
from splaxel_ns.agreement import LiveView
from splaxel_ns.compared import ComparedGaussians
from splaxel_ns.compositing import expected_depth
from splaxel_ns.flight import Flight
from splaxel_ns.mcmc import SplaxelMCMCStrategy
from splaxel_ns.metrics import ImageMetrics
from splaxel_ns.model_checks import check_config
from splaxel_ns.model_options import SplaxelModelOptions
from splaxel_ns.overlay import Overlay
from splaxel_ns.partition import PartitionTree
from splaxel_ns.rank_saturation import RankSaturationMasks
from splaxel_ns.render import Rendered, RenderOptions, render_view, view_info
from splaxel_ns.saturation import GIB, SaturationMasks
from splaxel_ns.strategy import RefineReport, SplaxelStrategy, derived_seed
from splaxel_ns.types import View, ViewPlan
from splaxel_ns.visibility import participants

VIEWER_BACKGROUND = torch.tensor([0.1490, 0.1647, 0.2157])
"""What evaluation composes over where training uses random colours: the viewer's dark grey, as in splatfacto."""


@dataclass
class SplaxelModelConfig(SplaxelModelOptions):
    """Configuration of `SplaxelModel`."""

    _target: type = field(default_factory=lambda: SplaxelModel)


UNSEEN = -1
"""Instead of a view's partitions: it has not been drawn with these boxes."""


def in_viewer() -> bool:
    """Whether this is one of the viewer's threads: its choices must not reach training or evaluation."""
    return threading.current_thread() is not threading.main_thread()


class SplaxelModel(ComparedGaussians):
    """3D Gaussians in P convex partitions, each drawn into a partial image, composed front to back.

    A `SplatfactoModel`, so that nerfstudio's viewer and exporter know what it is; its parameters have the same names.

    Args:
        seed_points: Points [N, 3] in world units and colours [N, 3] in 0..255, or None.
        others: As for nerfstudio's `Model`.

    Raises:
        ValueError: An option is out of range.
    """

    config: SplaxelModelConfig

    def populate_modules(self) -> None:
        """Make the Gaussians, the boxes and the strategy; nothing is downloaded or moved to a GPU."""
        check_config(self.config)
        self.join()
        self.step = 0
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.info: dict[str, Any] = {}
        self.flight: Flight | None = None
        self.seen = torch.full((self.num_train_data,), UNSEEN, dtype=torch.int32)  # bits of partitions, per view
        self.live_view: LiveView | None = None
        self._for_viewer = False  # a picture is drawn by the main thread for the viewer
        self.crop_box: OrientedBox | None = None
        self.shown_partition: int | None = None
        self.overlay: Overlay | None = None
        self.camera_optimizer: CameraOptimizer = self.config.camera_optimizer.setup(
            num_cameras=self.num_train_data, device="cpu"
        )
        self.background_color = VIEWER_BACKGROUND
        self._image_metrics = ImageMetrics(self.config.color_corrected_metrics, self._say_once)
        self._target_made: tuple[Tensor, Tensor, Tensor, Tensor | None] | None = None
        self.start()
        config = self.config
        if config.use_bilateral_grid:
            grid_x, grid_y, grid_w = config.grid_shape
            self.bil_grids = BilateralGrid(self.num_train_data, grid_X=grid_x, grid_Y=grid_y, grid_W=grid_w)
        self.strategy: Any = (
            SplaxelMCMCStrategy.of(config, self.world)
            if config.strategy == "mcmc"
            else SplaxelStrategy.of(config, self.num_train_data, self.world)
        )
        self.strategy_state = self.strategy.initialize_state(scene_scale=1.0)
        eps, limit = config.saturation_threshold, int(config.saturation_gib * GIB)
        self.saturation = RankSaturationMasks(eps, limit, self.world) if self.is_shared else SaturationMasks(eps, limit)
        if config.saturation and self.partitions_wanted() > 1 and config.camera_optimizer.mode != "off":
            CONSOLE.print("Saturated pixels are drawn all the same: the camera optimiser moves the poses every step.")

    def participants_for(self, cameras: Cameras) -> list[set[int]]:
        """The partitions with a non-empty region in each training camera's view, for the scheduler.

        Args:
            cameras: All training cameras, in their order.
        """
        if self.by_gaussians:  # there is one box, and what a rank holds of it says nothing about the others
            return [{0} for _ in range(len(cameras))]
        with torch.no_grad():
            views = []
            for index in range(len(cameras)):
                camera = cameras[index : index + 1]
                camera.metadata = {**(camera.metadata or {}), "cam_idx": index}
                views.append(self.view_of(camera))
            if not views:
                return []
            partitions = self._partitions(self.activated(), views[0])
        taking_part = participants(views, self.tree, partitions.boxes, float(self.near_plane))
        if self.training:
            taking_part = [boxes & self._seen_in(index, boxes) for index, boxes in enumerate(taking_part)]
        if self.prunes and self.training:
            for index, view in enumerate(views):
                absent = self.saturation.absent(index, view, self.tree)
                if self.is_shared:  # they are ranks
                    absent = [leaf for rank in absent for leaf in self.runs[rank]]
                taking_part[index] -= set(absent)
        return taking_part

    def _note(self, camera: Cameras, plan: ViewPlan) -> None:
        """Remember which partitions had something to show in a training view; the same on all ranks."""
        index = int((camera.metadata or {}).get("cam_idx", -1))
        if self.training and 0 <= index < len(self.seen):
            shows = (plan.spans[..., 1] > plan.spans[..., 0]).any(dim=1).tolist()
            self.seen[index] = sum(1 << leaf for leaf, some in enumerate(shows) if some)

    def _seen_in(self, index: int, boxes: set[int]) -> set[int]:
        """The partitions that drew a view at its last visit; where there was none, those whose boxes it meets."""
        bits = int(self.seen[index]) if index < len(self.seen) else UNSEEN
        return boxes if bits == UNSEEN else {leaf for leaf in range(self.tree.num_partitions) if bits >> leaf & 1}

    def take_tree(self, tree: PartitionTree) -> None:
        """Use other boxes from now on; views have not been seen with them."""
        super().take_tree(tree)
        self.seen.fill_(UNSEEN)

    @property
    def prunes(self) -> bool:
        """Whether saturated pixels are left out of training. Masks belong to poses, which a camera optimiser moves."""
        if self.is_shared and self.config.exchange not in ("selective", "owner"):
            return False
        return self.config.saturation and self.tree.num_partitions > 1 and self.config.camera_optimizer.mode == "off"

    def take_saturation_snapshot(self, new_epoch: bool) -> None:
        """Put in force which pixels were found saturated, if a new epoch begins or this one is long.

        Every rank calls this at the same moments.
        """
        if self.prunes and (new_epoch or self.saturation.snapshot_due(self.images, self.config.saturation_every)):
            self.saturation.take_snapshot(self.images)

    # Rendering

    def view_of(self, camera: Cameras) -> View:
        """The view of one pinhole camera, at the resolution training has reached; the camera is left as it is.

        In training the pose is the one the camera optimiser has reached, with its gradient: order, regions and near
        plane go by it too.

        Raises:
            ValueError: More than one camera, or not a pinhole.
        """
        d = self.downscale_factor(int(camera.height.flatten()[0]), int(camera.width.flatten()[0]))
        pose = self.camera_optimizer.apply_to_camera(camera) if self.training else None
        return camera_views.view_of(camera, d, pose)

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
            absgrad=self.strategy.absgrad and self.training,
        )

    def render(self, view: View, background: Tensor, index: int | None = None) -> Rendered:
        """Draw a view of all Gaussians, or outside training of those in the crop box.

        Boxes are always those of all Gaussians: what `filter` drops depends on them.

        Args:
            view: The camera.
            background: Colour behind everything.  # [3]
            index: Which training view it is, to leave out its saturated pixels; None: leave out nothing.
        """
        gaussians = self.activated()
        partitions = self._partitions(gaussians, view)
        if self.crop_box is not None and not self.training:
            keep = self.crop_box.within(self.means).reshape(-1)  # [N] bool
            gaussians = self.activated(keep)
            partitions = replace(partitions, owner=partitions.owner[keep])
        mask = None if index is None else self.saturation.mask_of(index, view, self.tree)
        rendered = render_view(gaussians, view, partitions, background, self.render_options(), mask)
        if index is not None:
            self.saturation.update(index, view, rendered.plan, rendered.partials.transmittances, self.tree)
        if self.training and not cuda.on_gpu(rendered.rgb):  # there it is too early to ask
            self._say_if_empty(rendered.stats)
        return rendered

    def _say_if_empty(self, stats: cuda.RasterStats) -> None:
        if stats.num_splats == 0:
            self._say_once(
                "empty",
                f"[yellow]A view sees none of the {self.num_points} Gaussians; its picture is the background. The near "
                f"plane is at {float(self.near_plane):.4g}: set --pipeline.model.near-plane if the scene is nearer, "
                "else check the poses and the point cloud.",
            )

    def get_outputs(self, camera: Cameras) -> dict[str, Any]:
        """Draw one camera's view.

        Args:
            camera: One pinhole camera.

        Returns:
            rgb [H, W, 3], clamped to 0..1 (before the bilateral grid of a training view); accumulation [H, W, 1];
            depth [H, W, 1] (expected, world units; the farthest where nothing was drawn; None in training unless
            `output_depth_during_training`); background, [3] in training, else [H, W, 3]. A training view that several
            ranks draw is a crop of the image, valid where this rank needs it, with `crop` and `share` (what of the
            loss this rank counts); empty if the rank has no part in it.
        """
        if self.is_shared:
            return self.finish(camera, self.begin(camera))
        view = self.view_of(camera)
        background = self._background_for(camera)
        index = (camera.metadata or {}).get("cam_idx") if self.training and self.prunes else None
        rendered = self.render(view, background, index)
        self._note(camera, rendered.plan)
        if self.training:
            self.info = view_info(rendered.splats, view, rendered.stats) | {"n_cameras": self.batch_size}
            means2d = rendered.splats.means2d
            if self.strategy.uses_grad and torch.is_grad_enabled() and means2d.requires_grad:
                means2d.retain_grad()
        outputs = self._outputs(rendered.rgb, rendered.alpha, rendered.depth, background)
        if self.training and self.config.use_bilateral_grid:
            outputs["rgb"] = self._in_colors_of(camera, outputs["rgb"])
        return outputs

    def begin(self, camera: Cameras) -> Flight | None:
        """Draw this rank's part of a view and send pixels; other views can begin before `finish`. None: one rank."""
        if not self.is_shared:
            return None
        index = int((camera.metadata or {}).get("cam_idx", -1))
        view, mask = self.view_of(camera), None
        if self.training and self.prunes and index >= 0:
            mask = self.saturation.mask_of(index, view, self.tree)
        flight = self.begin_flight(view, index, self.render_options(), mask, everything=not self.training)
        self._note(camera, flight.plan)
        return flight

    def finish(self, camera: Cameras, flight: Flight | None) -> dict[str, Any]:
        """What `get_outputs` returns, for a view that has begun."""
        if flight is None or self.renderer is None:
            return self.get_outputs(camera)
        background = self._background_for(camera)
        canvas = self.renderer.finish(flight, background)
        self.flight = flight if self.training else None
        if isinstance(self.saturation, RankSaturationMasks) and self._finds_saturation(flight):
            self.saturation.update_together(flight.tag.view, flight, canvas, self.tree, self.runs)
        if canvas is None:
            return {}
        outputs = self._outputs(canvas.rgb, canvas.alpha, canvas.depth, background)
        if self.training:
            share = flight.share(self.world.rank)
            outputs |= {"crop": canvas.crop, "share": share}
            if self.config.use_bilateral_grid:
                # Every pixel's part of the grid's gradient is counted by one rank, that of the colour by all that
                # draw it.
                rgb = outputs["rgb"]
                alike = self._in_colors_of(camera, rgb, flight, self.bil_grids.grids.detach())
                counted = self._in_colors_of(camera, rgb.detach(), flight, self.bil_grids.grids)
                outputs["rgb"] = alike + share.pixels[..., None] * (counted - counted.detach())
        return outputs

    def _finds_saturation(self, flight: Flight) -> bool:
        return self.training and self.prunes and not flight.everything and flight.tag.view >= 0

    def _in_colors_of(
        self, camera: Cameras, rgb: Tensor, flight: Flight | None = None, grids: Tensor | None = None
    ) -> Tensor:
        """A training view as its photograph's camera would have developed it: through its bilateral grid.

        Args:
            camera: The view's.
            rgb: The picture, or the crop of it that a flight composed.  # [H, W, 3] or [h, w, 3]
            flight: Of a view that several ranks draw.
            grids: Values to use instead of the grids' own.
        """
        index = (camera.metadata or {}).get("cam_idx")
        if index is None:
            return rgb
        whole = rgb.shape[:2] if flight is None else (flight.view.height, flight.view.width)
        rows, columns = (torch.linspace(0, 1, length, device=rgb.device) for length in whole)
        y, x = rows[:, None].expand(whole), columns.expand(whole)
        if flight is not None and flight.crop is not None:
            y, x = flight.crop.of(y), flight.crop.of(x)
        # What nerfstudio's `slice` does for one view, but that waits for a GPU to find out that it is one.
        values = {"grids": self.bil_grids.grids if grids is None else grids}
        xy, chosen = torch.stack([x, y], dim=-1)[None, None], cuda.upload(torch.tensor([int(index)]), rgb.device)
        affine = functional_call(self.bil_grids, values, (xy, rgb[None, None], chosen))
        return color_affine_transform(affine, rgb[None, None])[0, 0]

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
        return cuda.upload(self._background_color(camera), self.device)

    def _background_color(self, camera: Cameras) -> Tensor:
        if self.config.background_color != "random":
            return get_color(self.config.background_color)
        if not self.training:
            return self.background_color if in_viewer() or self._for_viewer else VIEWER_BACKGROUND
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
        try:
            return self._outputs_for_viewer(camera) if in_viewer() else self.get_outputs(camera)
        finally:
            self.set_crop(None)  # training's evaluation also calls `get_outputs` directly

    def _outputs_for_viewer(self, camera: Cameras) -> dict[str, Any]:
        """What the viewer's panel asks for: the whole picture, or one partition's partial image over black."""
        empty = torch.zeros(int(camera.height.flatten()[0]), int(camera.width.flatten()[0]), device=self.device)
        black = torch.zeros(3, device=self.device)
        try:
            view = self.view_of(camera)
        except ValueError as error:  # raised, it would end the viewer's thread
            self._say_once("lens", f"[yellow]{escape(str(error))}")
            return self._outputs(empty[..., None].expand(-1, -1, 3), empty, empty, black)
        if self.is_shared:
            outputs = None if self.live_view is None else self.live_view.ask(camera, self.crop_box)
            return self._outputs(empty[..., None].expand(-1, -1, 3), empty, empty, black) if not outputs else outputs
        shown = self.shown_partition
        if self.overlay is not None:
            rendered = self.render(view, self._background_for(camera))
            painted = self.overlay.paint(rendered, shown, self.config.saturation_threshold)
            return self._outputs(painted, rendered.alpha, rendered.depth, black)
        if shown is None:
            return self.get_outputs(camera)
        rendered = self.render(view, black)
        if shown not in rendered.plan.order:
            return self._outputs(empty[..., None].expand(-1, -1, 3), empty, empty, black)
        index = rendered.plan.order.index(shown)
        partials = rendered.partials
        alpha = 1.0 - partials.transmittances[index]
        return self._outputs(partials.colors[index], alpha, partials.depths[index], black)

    def draw_for_viewer(self, camera: Cameras, crop: OrientedBox | None) -> dict[str, Any]:
        """Several ranks: draw a picture together that the viewer of rank 0 asked for; all call this at once."""
        self.set_crop(crop)
        self._for_viewer = True
        try:
            with torch.no_grad():
                return self.get_outputs(camera)
        finally:
            self._for_viewer = False
            self.set_crop(None)

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
            ),
            TrainingCallback([TrainingCallbackLocation.AFTER_TRAIN], self._report_saturation),
        ]

    def _report_saturation(self, step: int) -> None:
        if self.prunes and self.world.is_main:
            CONSOLE.print(self.saturation.summary())

    def after_backward(self, camera: Cameras | None = None) -> None:
        """Take the densification statistics of the view that was drawn last; its backward pass must be done."""
        if self.flight is not None and self.renderer is not None:
            flight, self.flight = self.flight, None
            self.renderer.settle(flight)
            if flight.cut is None:  # no Gaussian of this rank was looked at
                self.info, self._target_made = {}, None
                return
            self.info |= view_info(flight.cut, flight.view, flight.stats) | {"n_cameras": self.batch_size}
        if self.notes_shown:
            seen = self.info["extents"][:, 0] > 0
            self.shown = seen if self.shown is None else self.shown | seen
        self.strategy.update(self.strategy_state, self.info, self.images, self.info.get("mask"))
        if not self.is_shared and cuda.on_gpu(self.means):
            self._say_if_empty(self.info["stats"])
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
            if report.opacities_reset:  # nothing is opaque any more
                self.saturation.drop()
        self.keep_in_place(by_name, (step + 1) * self.batch_size, report is not None)
        return report

    def training_state(self) -> dict[str, Any]:
        """What resuming needs beside the tensors of `state_dict`: plain numbers and tensors."""
        return super().training_state() | {"saturation": self.saturation.state_dict(), "seen": self.seen.clone()}

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Take over `training_state` of the run that is continued; `load_state_dict` comes first.

        Raises:
            ValueError: It does not belong to the loaded Gaussians.
        """
        super().load_training_state(state)
        seen = state.get("seen")  # older checkpoints have none
        if isinstance(seen, Tensor) and seen.shape == self.seen.shape and seen.dtype == self.seen.dtype:
            self.seen.copy_(seen)
        if self.prunes and "saturation" in state:
            self.saturation.load_state_dict(state["saturation"])

    def update_to_step(self, step: int) -> None:
        """Where a loaded checkpoint stands."""
        self.step = step
