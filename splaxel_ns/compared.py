"""What a model's pictures are compared with: photographs at the resolution training has reached, loss and metrics.

Shapes: H x W pixels; h x w of the crop that this rank composed of a view that several ranks draw.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from nerfstudio.cameras.camera_optimizers import CameraOptimizer
from nerfstudio.model_components.lib_bilagrid import BilateralGrid, total_variation_loss
from torch import Tensor

from splaxel_ns import loss
from splaxel_ns.distributed import DistributedGaussians
from splaxel_ns.metrics import ImageMetrics
from splaxel_ns.saturation import SaturationMasks
from splaxel_ns.strategy import crosses
from splaxel_ns.targets import over_background, shrink_mask, shrink_photograph

if TYPE_CHECKING:
    from splaxel_ns.model import SplaxelModelConfig

COLOR_CORRECTION_EVERY = 10
"""Steps between two colour-corrected PSNR values in training: the fit takes several times as long as a view."""
TOTAL_VARIATION_WEIGHT = 10.0
"""Of the bilateral grids in the loss, as in splatfacto."""


class ComparedGaussians(DistributedGaussians):
    """`DistributedGaussians` with the photographs' side of training and evaluation."""

    config: SplaxelModelConfig
    camera_optimizer: CameraOptimizer
    bil_grids: BilateralGrid
    saturation: SaturationMasks
    info: dict[str, Any]
    prunes: bool
    _image_metrics: ImageMetrics
    _target_made: tuple[Tensor, Tensor, Tensor, Tensor | None] | None

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
            mask = self._mask_of(batch)
            target = over_background(self.get_gt_img(image), background)
            crop = outputs.get("crop")
            if crop is not None:
                target, mask = crop.of(target), None if mask is None else crop.of(mask)
            made = (image, background, target, mask)
            self._target_made = made
        return made[2], made[3]

    def _mask_of(self, batch: Mapping[str, Any]) -> Tensor | None:
        """[H, W, 1] bool at the resolution training has reached, or None."""
        mask = batch.get("mask")
        return None if mask is None else shrink_mask(mask, self.downscale_factor(*mask.shape[:2]))

    def get_loss_dict(
        self, outputs: dict[str, Any], batch: dict[str, Any], metrics_dict: dict[str, Any] | None = None
    ) -> dict[str, Tensor]:
        """The photometric loss over the unmasked pixels, and the regularisers, of one view."""
        target, mask = self._target(outputs, batch)
        share = outputs.get("share")
        terms = {"main_loss": loss.photometric_loss(outputs["rgb"], target, mask, self.config.ssim_lambda, share)}
        if self.training:
            self.info["mask"] = self._mask_of(batch) if share is not None else mask
            if mask is not None and share is None and not bool(mask.any()):
                self._say_once(
                    "masked",
                    f"[yellow]Training view {batch.get('image_idx', '')} is masked entirely at this resolution: "
                    "nothing is learnt from it, nor from others like it.",
                )
        return terms if share is not None else terms | self.regularizers()

    def regularizers(self) -> dict[str, Tensor]:
        """What the options of training add to the loss, each independent of the view; this rank's share of it."""
        config, terms = self.config, {}
        part = self.own_part()  # of means over all Gaussians
        if config.use_scale_regularization and crosses(self.step, self.batch_size, 10):
            terms["scale_reg"] = part * loss.scale_regularization(self.scales, config.max_gauss_ratio)
        if not self.training:
            return terms
        if config.strategy == "mcmc":
            if config.mcmc_opacity_reg > 0:
                terms["mcmc_opacity_reg"] = config.mcmc_opacity_reg * part * loss.opacity_regularization(self.opacities)
            if config.mcmc_scale_reg > 0:
                terms["mcmc_scale_reg"] = config.mcmc_scale_reg * part * loss.size_regularization(self.scales)
        of_views: dict[str, Tensor] = {}
        self.camera_optimizer.get_loss_dict(of_views)
        if config.use_bilateral_grid:
            of_views["tv_loss"] = TOTAL_VARIATION_WEIGHT * total_variation_loss(self.bil_grids.grids)
        return terms | {name: term / self.world.size for name, term in of_views.items()}  # all ranks have the same

    def get_metrics_dict(self, outputs: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
        """PSNR of one view over its unmasked pixels, if there are any; the number of Gaussians; how far poses moved."""
        with torch.no_grad():
            target, mask = self._target(outputs, batch)
            metrics: dict[str, Any] = {"gaussian_count": self.num_points}
            share = outputs.get("share")
            if share is not None:
                full = self._mask_of(batch)
                pixels = share.height * share.width if full is None else int(full.sum())
                counted = share.pixels[..., None] if mask is None else share.pixels[..., None] * mask
                return {"squared_error": (counted * (outputs["rgb"] - target) ** 2).sum() / max(3 * pixels, 1)}
            if mask is None or bool(mask.any()):
                metrics["psnr"] = loss.psnr(outputs["rgb"], target, mask)
                if self.config.color_corrected_metrics and self.step % COLOR_CORRECTION_EVERY == 0:
                    corrected = loss.psnr(loss.color_corrected(outputs["rgb"], target, mask), target, mask)
                    metrics |= {} if bool(corrected.isnan()) else {"cc_psnr": corrected}
            self.camera_optimizer.get_metrics_dict(metrics)
        if self.training and self.prunes:
            metrics |= self.saturation.metrics()
        return metrics

    @torch.no_grad()
    def get_image_metrics_and_images(
        self, outputs: dict[str, Any], batch: dict[str, Any]
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """What `ImageMetrics` says of one view; photograph and render side by side."""
        target, mask = self._target(outputs, batch)
        metrics = self._image_metrics(outputs["rgb"], target, mask, batch.get("image_idx", ""))
        return metrics, {"img": torch.cat([target, outputs["rgb"]], dim=1)}
