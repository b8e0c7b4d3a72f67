"""What the ranks of `test_wire.py` do: draw views together, and look at their network interface meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from rank_scenes import NAMES, Task, gaussians_of, options_of, scene_of, tree_of

from splaxel_ns import comm
from splaxel_ns.bench.rank_job import bytes_sent_by
from splaxel_ns.flight import RankRenderer
from splaxel_ns.pixel_streams import Tag
from splaxel_ns.render import partitions_of
from splaxel_ns.types import View


def draw_views(exchange: Any, count: int, interface: str) -> tuple[int, int]:
    """Bytes that this rank counted as sent, and those that left its interface."""
    torch.set_num_threads(1)
    world = comm.world()
    task = Task("plain", world.size, exchange=exchange, scale=5)
    scene, options = scene_of(task), options_of(task)
    tree, runs = tree_of(task, scene), [range(rank, rank + 1) for rank in range(world.size)]
    mine = tree.locate(scene.tensors["means"]) == world.rank
    gaussians = gaussians_of({name: scene.tensors[name][mine] for name in NAMES})
    view = View(scene.viewmat, scene.K, scene.width, scene.height)
    renderer = RankRenderer(world, exchange)
    partitions = partitions_of(gaussians, tree, options.boundary, view, runs[world.rank])
    partitions = replace(partitions, boxes=renderer.gather_boxes(partitions.boxes, runs))
    world.barrier()
    world.take_counters()
    before = bytes_sent_by(interface)
    with torch.no_grad():
        for index in range(count):
            flight = renderer.begin(gaussians, view, partitions, runs, options, Tag(0, index, 0))
            renderer.finish(flight, scene.tensors["background"])
    counted = sum(world.take_counters().bytes_sent.values())
    world.barrier()
    return counted, bytes_sent_by(interface) - before
