"""What the ranks of a test do: the same view drawn by any number of them, with its loss and gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from test_oracle import NEAR, Scene, make_scene
from torch import Tensor

from splaxel_ns import comm, loss
from splaxel_ns.exchange import HALO, RankRegions, rank_regions
from splaxel_ns.flight import RankRenderer
from splaxel_ns.partition import PartitionTree
from splaxel_ns.pixel_streams import Tag
from splaxel_ns.render import Gaussians, RenderOptions, partitions_of, project_view, render_view
from splaxel_ns.types import View
from splaxel_ns.visibility import plan_view, tightened


@dataclass(frozen=True)
class Task:
    """One view of one scene, and how it is drawn."""

    kind: str
    num_partitions: int
    boundary: Any = "exact"
    exchange: Any = "selective"
    stop: float = 0.0
    masked: bool = False
    side: str = "whole"
    """"whole": Gaussians everywhere; "half": only on one side, so that some ranks own nothing; "away": none in view;
    "flat": in one plane across the view, all at one depth."""
    scale: int = 1
    """Pixels per pixel of the scene."""
    half: bool = False
    active: bool = False


NAMES = ("means", "quats", "scales", "opacities", "sh")


def scene_of(task: Task) -> Scene:
    scene = make_scene(task.kind)
    if task.side == "half":
        scene.tensors["means"][:, 0] = scene.tensors["means"][:, 0].abs() * 0.2 + 0.7
    if task.side == "away":
        turned = torch.diag(torch.tensor([-1.0, 1.0, -1.0, 1.0])) @ scene.viewmat
        scene = replace(scene, viewmat=turned)
    if task.side == "flat":
        scene.tensors["means"][:, 2] = 0.0
        facing = torch.eye(4)
        facing[2, 3] = 3.0
        scene = replace(scene, viewmat=facing)
    K = scene.K.clone()
    K[:2] *= task.scale
    return replace(scene, K=K, width=scene.width * task.scale, height=scene.height * task.scale)


def tree_of(task: Task, scene: Scene) -> PartitionTree:
    means = scene.tensors["means"]
    if task.side == "half":  # boxes of a time when there was more
        means = torch.cat([means, means * torch.tensor([-3.0, 1.0, 1.0])])
    return PartitionTree.build(means, 1 if task.exchange == "gaussian" else task.num_partitions)


def photograph(scene: Scene) -> Tensor:
    return torch.rand(scene.height, scene.width, 3, generator=torch.Generator().manual_seed(9))


def mask_of(task: Task, scene: Scene) -> Tensor | None:
    if not task.masked:
        return None
    mask = torch.ones(scene.height, scene.width, 1, dtype=torch.bool)
    mask[5:20, 10:30] = False
    return mask


def gaussians_of(leaves: dict[str, Tensor]) -> Gaussians:
    sh = leaves["sh"]
    means, quats, scales, opacities = (leaves[name] for name in NAMES[:4])
    return Gaussians(means, quats, scales, opacities, sh[:, :1].contiguous(), sh[:, 1:].contiguous())


def options_of(task: Task) -> RenderOptions:
    boundary = "none" if task.exchange == "gaussian" else task.boundary
    return RenderOptions(near=NEAR, boundary=boundary, stop=task.stop, absgrad=True)


def draw_alone(task: Task) -> dict[str, Any]:
    """The picture, the loss and the gradients of one process."""
    scene = scene_of(task)
    leaves = {name: scene.tensors[name].clone().requires_grad_() for name in NAMES}
    view = View(scene.viewmat.clone().requires_grad_(), scene.K, scene.width, scene.height)
    gaussians = gaussians_of(leaves)
    tree, options = tree_of(task, scene), options_of(task)
    partitions = partitions_of(gaussians, tree, options.boundary, view)
    rendered = render_view(gaussians, view, partitions, scene.tensors["background"], options)
    value = loss.photometric_loss(rendered.rgb.clamp(0, 1), photograph(scene), mask_of(task, scene), 0.2)
    if value.requires_grad:
        value.backward()
    grads = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    pose = view.world_to_cam.grad
    absgrad = getattr(rendered.splats.means2d, "absgrad", torch.zeros(len(gaussians), 2))
    return {
        "rgb": rendered.rgb.detach(),
        "depth": rendered.depth.detach(),
        "loss": float(value.detach()),
        "pose": torch.zeros(4, 4) if pose is None else pose,
        "absgrad": absgrad,
        **grads,
    }


def regions_of(task: Task, num_ranks: int) -> RankRegions:
    """Who draws and needs what with exchange `selective`."""
    scene = scene_of(task)
    tree, options = tree_of(task, scene), options_of(task)
    view = View(scene.viewmat, scene.K, scene.width, scene.height)
    gaussians = gaussians_of(scene.tensors)
    partitions = partitions_of(gaussians, tree, options.boundary, view)
    plan = plan_view(view, tree, partitions.boxes, options.near)
    plan = tightened(plan, project_view(gaussians, view, options), partitions.owner, options.boundary, view.width)
    return rank_regions(plan, tree.runs_of(num_ranks), view.width, HALO)


def draw_together(task: Task) -> dict[str, Any]:
    """This rank's part of `draw_alone`: where it composed and what it got, its share of the loss, its gradients."""
    world, scene = comm.world(), scene_of(task)
    renderer = RankRenderer(world, task.exchange, task.half, task.active)
    tree, options = tree_of(task, scene), options_of(task)
    view = View(scene.viewmat.clone().requires_grad_(), scene.K, scene.width, scene.height)
    if task.exchange == "gaussian":
        runs = [range(0, 1)] * world.size
        mine = torch.arange(len(scene.tensors["means"])) % world.size == world.rank
    else:
        runs = tree.runs_of(world.size)
        owner = tree.locate(scene.tensors["means"])
        mine = torch.isin(owner, torch.tensor(list(runs[world.rank]), dtype=torch.int32))
    leaves = {name: scene.tensors[name][mine].clone().requires_grad_() for name in NAMES}
    gaussians = gaussians_of(leaves)
    partitions = partitions_of(gaussians, tree, options.boundary, view, runs[world.rank])
    if task.exchange != "gaussian":
        partitions = replace(partitions, boxes=renderer.gather_boxes(partitions.boxes, runs))
    background = scene.tensors["background"]
    world.take_counters()
    flight = renderer.begin(gaussians, view, partitions, runs, options, Tag(1, 2, 3))
    canvas = renderer.finish(flight, background)
    result: dict[str, Any] = {
        "mine": mine.nonzero().flatten(),
        "loss": 0.0,
        "rgb": None,
        "takes_part": flight.own is not None,
    }
    if canvas is not None:
        crop, mask = canvas.crop, mask_of(task, scene)
        value = loss.photometric_loss(
            canvas.rgb.clamp(0, 1),
            crop.of(photograph(scene)),
            None if mask is None else crop.of(mask),
            0.2,
            flight.share(world.rank),
        )
        result |= {"loss": float(value.detach()), "rgb": canvas.rgb.detach(), "crop": vars(crop)}
        result["composed"] = flight.regions.composed_by(world.rank)
        if value.requires_grad:
            value.backward()
    renderer.settle(flight)
    absgrad = torch.zeros(len(gaussians), 2) if flight.cut is None else flight.cut.means2d.absgrad  # type: ignore
    pose = view.world_to_cam.grad
    result |= {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    result |= {"absgrad": absgrad, "pose": torch.zeros(4, 4) if pose is None else pose}
    result["counters"] = vars(world.take_counters())
    with torch.no_grad():
        flight = renderer.begin(gaussians, view, partitions, runs, options, Tag(2, 2, 3), everything=True)
        everything = renderer.finish(flight, background)
    assert everything is not None
    result |= {"whole": everything.rgb, "whole_depth": everything.depth}
    return result
