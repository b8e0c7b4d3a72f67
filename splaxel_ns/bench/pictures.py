"""What a trained model draws, on one sheet: a held-out photograph, the render, and every partition's partial image."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torchvision.utils
from nerfstudio.utils.eval_utils import eval_setup
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from splaxel_ns.model import SplaxelModel
from splaxel_ns.pipeline import SplaxelPipeline
from splaxel_ns.viewer_panel import partition_colors

TINT = 0.25
"""Share of the partition's colour in its partial image."""


@dataclass
class Pictures:
    """Write photograph | render | partial images in their partitions' colours of one held-out view as one PNG."""

    load_config: Path
    """config.yml of the run."""
    out: Path
    """The PNG."""
    view: int = 0
    """Number of the held-out view."""
    enlarge: int = 1
    """Each pixel becomes so many on a side."""

    def main(self) -> None:
        _, pipeline, _, _ = eval_setup(self.load_config, test_mode="test")
        if not isinstance(pipeline, SplaxelPipeline):
            raise ValueError(f"{self.load_config} is no run of splaxel")
        num_views = len(pipeline.datamanager.eval_dataset)
        if not 0 <= self.view < num_views:
            raise ValueError(f"--view is {self.view}; there are {num_views} held-out views, numbered from 0")
        picture = sheet(pipeline, self.view)
        picture = picture.repeat_interleave(self.enlarge, dim=0).repeat_interleave(self.enlarge, dim=1)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        torchvision.utils.save_image(picture.permute(2, 0, 1), self.out)
        CONSOLE.print(
            f"{self.out}: photograph, render, partial images of {pipeline.model.tree.num_partitions} partitions"
        )


@torch.no_grad()
def sheet(pipeline: SplaxelPipeline, index: int) -> Tensor:  # [H, 3 W, 3], 0 to 1
    """Photograph, render and the partial images of one held-out view, side by side."""
    camera, batch = pipeline.datamanager.eval_view(index)
    model = pipeline.model
    outputs = model.get_outputs_for_camera(camera)
    photograph = batch["image"][..., :3].float() / 255.0
    return torch.cat([photograph, outputs["rgb"], tinted_partials(model, camera)], dim=1)


def tinted_partials(model: SplaxelModel, camera: object) -> Tensor:  # [H, W, 3], 0 to 1
    """The composed picture with each partial image tinted in its partition's colour, as the viewer's boxes are."""
    view = model.view_of(camera)  # type: ignore[arg-type]
    rendered = model.render(view, torch.zeros(3))
    picture = torch.zeros(view.height, view.width, 3)
    light = torch.ones(view.height, view.width, 1)  # [H, W, 1], what those in front let through
    colors = torch.tensor(partition_colors(model.tree.num_partitions)) / 255.0  # [P, 3]
    for position, partition in enumerate(rendered.plan.order):
        passed = rendered.partials.transmittances[position, ..., None]  # [H, W, 1]
        tint = (1.0 - passed) * colors[partition]
        picture += light * ((1.0 - TINT) * rendered.partials.colors[position] + TINT * tint)
        light = light * passed
    return picture.clamp(0.0, 1.0)
