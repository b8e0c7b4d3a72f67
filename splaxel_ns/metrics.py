"""How well a view of the evaluation split is drawn.

Shapes: H x W pixels. Images are RGB in [0, 1]; a mask is true where a pixel counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rich.markup import escape
from torch import Tensor

from splaxel_ns import loss


class ImageMetrics:
    """PSNR, SSIM and, where its weights are on disk, LPIPS of single views.

    Args:
        color_corrected: Also those of the render in the photograph's colours, as cc_psnr and so on.
        say_once: Tells the user a message, unless it has told one of that topic already: (topic, message).
    """

    def __init__(self, color_corrected: bool, say_once: Callable[[str, str], None]) -> None:
        self._color_corrected = color_corrected
        self._say_once = say_once
        self._lpips: Any | None = None
        self._lpips_sought = False

    def __call__(self, rgb: Tensor, target: Tensor, mask: Tensor | None, view: Any) -> dict[str, float]:
        """Metrics of one view over its unmasked pixels.

        Args:
            rgb: The render.  # [H, W, 3]
            target: Its photograph.  # [H, W, 3]
            mask: True where a pixel counts, or None.  # [H, W, 1]
            view: Its name or number in messages.

        Returns:
            Plain floats. A view that is masked entirely has none, and one whose unmasked pixels are too few for some
            lacks those.
        """
        if mask is not None and not bool(mask.any()):
            self._say_once(
                "masked in evaluation",
                f"[yellow]Evaluation view {view} is masked entirely: it has no part in the "
                "metrics, nor have others like it.",
            )
            return {}
        pictures = {"": rgb}
        if self._color_corrected:
            pictures["cc_"] = loss.color_corrected(rgb, target, mask)
        lpips = self._find_lpips()
        metrics = {}
        for prefix, picture in pictures.items():
            metrics[f"{prefix}psnr"] = float(loss.psnr(picture, target, mask))
            metrics[f"{prefix}ssim"] = float(loss.ssim(picture, target, mask))
            if lpips is not None:
                metrics[f"{prefix}lpips"] = loss.lpips(lpips, picture, target, mask)
        missing = [name for name, value in metrics.items() if math.isnan(value)]
        if missing and not math.isnan(metrics["psnr"]):  # otherwise the picture is not a number itself
            self._say_once(
                f"no {missing}",
                f"[yellow]Evaluation view {view} has no part in {', '.join(missing)}: too few "
                "pixels are left by its mask, or all have one colour. Nor have others like it.",
            )
            metrics = {name: value for name, value in metrics.items() if name not in missing}
        return metrics

    def _find_lpips(self) -> Any | None:
        if not self._lpips_sought:
            self._lpips, self._lpips_sought = loss.load_lpips(), True
        if self._lpips is None:
            weights = escape(str(loss.alexnet_weights()))
            self._say_once(
                "lpips",
                f"LPIPS is left out: its AlexNet weights are not at {weights}. On a machine with internet, "
                "torchvision.models.alexnet(weights='DEFAULT') fetches them.",
            )
        return self._lpips
