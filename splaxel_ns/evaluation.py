"""How a pipeline is evaluated: one protocol for training and `ns-eval`, said with the numbers.

Shapes: H x W pixels.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torchvision.utils
from nerfstudio.pipelines.base_pipeline import VanillaPipeline
from nerfstudio.utils import profiler
from nerfstudio.utils.rich_utils import CONSOLE
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from splaxel_ns import cuda

if TYPE_CHECKING:
    from splaxel_ns.datamanager import SplaxelDatamanager
    from splaxel_ns.model import SplaxelModel


class EvaluatedPipeline(VanillaPipeline):
    """Evaluates all views of a split, each at its own size, and names pictures after photographs."""

    datamanager: SplaxelDatamanager
    _protocol_printed = False

    @property
    def model(self) -> SplaxelModel:
        """The model itself; there is no wrapper around it."""
        return self._model  # type: ignore[return-value]

    @torch.no_grad()
    def get_eval_loss_dict(self, step: int) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """The loss of one evaluation view, without graph."""
        self._require_eval_views()
        return super().get_eval_loss_dict(step)

    @torch.no_grad()
    def get_eval_image_metrics_and_images(self, step: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Metrics and pictures of one evaluation view, as nerfstudio's trainer logs them."""
        self._require_eval_views()
        return super().get_eval_image_metrics_and_images(step)

    def get_average_eval_image_metrics(
        self, step: int | None = None, output_path: Path | None = None, get_std: bool = False
    ) -> dict[str, float]:
        """Mean metrics over all evaluation views.

        Raises:
            ValueError: The evaluation split is empty.
        """
        self._require_eval_views()
        return super().get_average_eval_image_metrics(step, output_path, get_std)

    @profiler.time_function
    @torch.no_grad()
    def get_average_image_metrics(
        self,
        data_loader: Any,
        image_prefix: str,
        step: int | None = None,
        output_path: Path | None = None,
        get_std: bool = False,
    ) -> dict[str, float]:
        """Mean metrics over the views of `data_loader`.

        Args:
            data_loader: (camera, batch) pairs of the evaluation split.
            image_prefix: Not used: pictures are named after the photographs.
            step: The step of the training that evaluates; None for an evaluation by itself.
            output_path: Folder for one picture per view, named by the photograph's path below their common folder.
            get_std: Also give `<metric>_std`, the standard deviation over the views; 0 for a single view.

        Returns:
            Plain floats, ready for JSON.

        Raises:
            ValueError: All views are masked entirely; a training goes on, without their metrics.
        """
        num_views = len(data_loader)
        self._print_protocol(num_views)
        names = picture_names(self.datamanager.eval_dataset.image_filenames)
        results: list[dict[str, float]] = []
        self.eval()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), MofNCompleteColumn())
        with Progress(*columns, console=CONSOLE, transient=True) as progress:
            task = progress.add_task("Evaluating", total=num_views)
            for position, (camera, batch) in enumerate(data_loader):
                started = perf_counter()
                outputs = self.model.get_outputs_for_camera(camera)
                if cuda.on_gpu(outputs["rgb"]):
                    torch.cuda.synchronize(outputs["rgb"].device)
                seconds = max(perf_counter() - started, 1e-9)
                metrics, images = self.model.get_image_metrics_and_images(outputs, batch)
                num_pixels = outputs["rgb"].shape[0] * outputs["rgb"].shape[1]
                results.append(metrics | {"num_rays_per_sec": num_pixels / seconds, "fps": 1.0 / seconds})
                if output_path is not None:
                    path = output_path / names[int(batch.get("image_idx", position))]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    torchvision.utils.save_image(images["img"].permute(2, 0, 1).cpu(), path)
                progress.advance(task)
        self.train()
        if step is None and not any("psnr" in result for result in results):
            raise ValueError(
                f"There is nothing to evaluate: all {num_views} views of the {self.datamanager.test_split} split of "
                f"{self.datamanager.get_datapath()} are masked entirely. Look at their masks, or choose other views."
            )
        return average_metrics(results, get_std)

    def _require_eval_views(self) -> None:
        dataset = self.datamanager.eval_dataset
        if dataset is None or len(dataset) == 0:
            raise ValueError(
                f"There is no view to evaluate: the {self.datamanager.test_split} split of "
                f"{self.datamanager.get_datapath()} is empty. Choose the split with the dataparser's flags, "
                "or hold photographs out."
            )

    def _print_protocol(self, num_views: int) -> None:
        """Say once what the numbers compare: protocols differ by up to 1.5 dB between papers."""
        if self._protocol_printed:
            return
        self._protocol_printed = True
        cameras = self.datamanager.eval_dataset.cameras
        sizes = sorted(
            {(int(w), int(h)) for w, h in zip(cameras.width.flatten(), cameras.height.flatten(), strict=True)}
        )
        shown = ", ".join(f"{w}x{h}" for w, h in sizes[:3]) + (f" and {len(sizes) - 3} more" if len(sizes) > 3 else "")
        config = self.model.config
        num_partitions = self.model.tree.num_partitions
        background = "dark grey" if config.background_color == "random" else config.background_color
        CONSOLE.print(
            f"Evaluation protocol: mean over {num_views} views of the {self.datamanager.test_split} split at full "
            f"resolution ({shown}); renders in float32, not rounded to 8 bits, against photographs as stored; "
            f"pixels outside a view's mask left out; {background} background; partitions: {num_partitions}, "
            f"boundary {config.boundary}."
        )


def picture_names(filenames: list[Path]) -> list[Path]:
    """One distinct relative name per photograph: its path below the folder common to all, as PNG.

    Base names repeat across the blocks of a city, so the folders are part of the name; two photographs that differ
    only in their suffix keep it.
    """
    if not filenames:
        return []
    root = os.path.commonpath([str(path.parent) for path in filenames])
    relative = [Path(os.path.relpath(path, root)) for path in filenames]
    names = [path.with_suffix(".png") for path in relative]
    count = Counter(names)
    return [
        name if count[name] == 1 else path.with_name(path.name + ".png")
        for name, path in zip(names, relative, strict=True)
    ]


def average_metrics(results: list[dict[str, float]], with_std: bool) -> dict[str, float]:
    """Mean, and on request standard deviation (0 for one view), of each metric over the views that have it."""
    averages: dict[str, float] = {}
    for key in dict.fromkeys(key for result in results for key in result):
        values = torch.tensor([float(result[key]) for result in results if key in result], dtype=torch.float64)
        values = values[~values.isnan()]  # of a view that is masked entirely
        averages[key] = float(values.mean())
        if with_std:
            averages[f"{key}_std"] = float(values.std()) if len(values) > 1 else 0.0
    return averages
