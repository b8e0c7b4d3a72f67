"""The Gaussians of one rank among R, and the views that all ranks draw together.

A rank owns the Gaussians in its boxes (or, in the Gaussian-level baseline, a random share), keeps its own moments and
statistics, and renders through `flight.py`. With one rank nothing here is used.

Shapes: R ranks, P partitions, N Gaussians of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor
from torch.nn import Parameter

from splaxel_ns import comm, cuda, migration
from splaxel_ns.flight import Flight, RankRenderer
from splaxel_ns.partition import PartitionTree
from splaxel_ns.pixel_streams import Tag
from splaxel_ns.render import Gaussians, Partitions, RenderOptions, partitions_of
from splaxel_ns.saturation import ViewMask
from splaxel_ns.scene import GAUSS_PARAMS, TREE, PartitionedGaussians
from splaxel_ns.types import View

if TYPE_CHECKING:
    from splaxel_ns.model import SplaxelModelConfig


class DistributedGaussians(PartitionedGaussians):
    """`PartitionedGaussians` of which each rank holds its part."""

    config: SplaxelModelConfig

    def join(self) -> None:
        """Find the other ranks; before the first Gaussians are made."""
        self.world = comm.world()
        self.revision = 0
        """Raised whenever Gaussians may have changed, on all ranks at once: what was agreed before is out of date."""
        self.num_total = 0
        """Gaussians of all ranks, when they were counted last."""
        self.renderer: RankRenderer | None = None
        self._agreed: tuple[int, Partitions] | None = None
        if self.world.size > 1:
            config = self.config
            self.renderer = RankRenderer(
                self.world, config.exchange, config.half_pixels, config.active_pixels, config.use_bilateral_grid
            )

    @property
    def is_shared(self) -> bool:
        """Whether other ranks hold Gaussians of this model too."""
        return self.world.size > 1

    @property
    def by_gaussians(self) -> bool:
        """Whether Gaussians travel instead of pixels: then boxes have no part in drawing."""
        return self.config.exchange == "gaussian"

    def partitions_wanted(self) -> int:
        """Boxes of a new model."""
        if self.by_gaussians:
            return 1
        return self.world.size if self.config.num_partitions is None else self.config.num_partitions

    @property
    def runs(self) -> list[range]:
        """The partitions of each rank.

        Raises:
            ValueError: More ranks than partitions.
        """
        if self.by_gaussians:
            return [range(0, 1)] * self.world.size
        return self.tree.runs_of(self.world.size)

    # Who holds what

    def keep_own_share(self) -> None:
        """Of Gaussians that all ranks have made alike, keep those of this one; count them.

        Raises:
            ValueError: More ranks than partitions.
        """
        if not self.is_shared:
            return
        if self.config.imbalance > 0 and not self.by_gaussians:
            self._set_tree(migration.uneven_tree(self.means.detach(), self.tree.num_partitions, self.config.imbalance))
        # Ranks that nerfstudio spawned draw from different generators.
        tree = {name: self.world.from_main(getattr(self.tree, name).clone()) for name in TREE}
        self._set_tree(PartitionTree.from_state_dict(tree))
        mine = self.rank_of(self.means.detach()) == self.world.rank
        for name in GAUSS_PARAMS:
            self.gauss_params[name] = Parameter(self.gauss_params[name].detach()[mine].clone())
        self.changed()
        self.count()

    def rank_of(self, means: Tensor) -> Tensor:
        """The rank that ought to hold each of these points [N, 3] of a new model: [N] int64."""
        if self.by_gaussians:
            if self.config.placement == "kdtree":
                return PartitionTree.build(means, self.world.size).locate(means).long()
            shuffled = torch.randperm(len(means), generator=torch.Generator().manual_seed(self.config.seed))
            return cuda.upload(shuffled % self.world.size, means.device)
        rank_of_leaf = torch.empty(self.tree.num_partitions, dtype=torch.int64)
        for rank, run in enumerate(self.runs):
            rank_of_leaf[run.start : run.stop] = rank
        return cuda.upload(rank_of_leaf, means.device)[self.tree.locate(means).long()]

    def take_tree(self, tree: PartitionTree) -> None:
        """Use other boxes from now on; every rank calls this at once, and moves its Gaussians afterwards."""
        self._set_tree(tree)
        self.changed()

    def changed(self) -> None:
        """Gaussians or boxes may have changed. Every rank calls this at the same moments."""
        self.revision += 1

    def count(self) -> list[int]:
        """Gaussians of each rank; every rank calls this at the same moments."""
        counts = self.world.gather(torch.tensor(self.num_points)).tolist()
        self.num_total = sum(counts)
        return counts

    def own_part(self) -> float:
        """What this rank's mean over its Gaussians contributes to the mean over all."""
        return self.num_points / max(self.num_total, 1) if self.is_shared else 1.0

    def _partitions(self, gaussians: Gaussians, view: View) -> Partitions:
        if not self.is_shared:
            return super()._partitions(gaussians, view)
        if self._agreed is None or self._agreed[0] != self.revision:
            assert self.renderer is not None
            runs = self.runs
            if self.by_gaussians:
                owner = torch.zeros(len(gaussians), dtype=torch.int32, device=gaussians.means.device)
                made = replace(partitions_of(gaussians, self.tree, "none", view), owner=owner)
            else:
                own = runs[self.world.rank]
                made = partitions_of(gaussians, self.tree, self.config.boundary, view, own)
                made = replace(made, boxes=self.renderer.gather_boxes(made.boxes, runs))
            self._agreed = (self.revision, made)
        return self._agreed[1]

    # Drawing together

    def begin_flight(
        self, view: View, index: int, options: RenderOptions, mask: ViewMask | None = None, everything: bool = False
    ) -> Flight:
        """Draw this rank's part of a view and start swapping pixels; every rank does so for every view.

        Args:
            view: The camera.
            index: Of the view among the training views; another number for other cameras.
            options: How to draw.
            mask: Saturated pixels of the ranks.
            everything: Every rank is to have the whole picture.
        """
        assert self.renderer is not None
        gaussians = self.activated()
        partitions = self._partitions(gaussians, view)
        if self.crop_box is not None and not self.training:
            keep = self.crop_box.within(self.means).reshape(-1)  # [N] bool
            gaussians, partitions = self.activated(keep), replace(partitions, owner=partitions.owner[keep])
        tag = Tag(self.step, index, self.revision)
        return self.renderer.begin(gaussians, view, partitions, self.runs, options, tag, mask, everything)

    def shows(self, participants: set[int]) -> bool:
        """Whether this rank draws a part of a view of these partitions."""
        return not self.is_shared or self.by_gaussians or not participants.isdisjoint(self.runs[self.world.rank])

    def say_shares(self) -> None:
        """Print who holds what; every rank calls this at once."""
        counts = self.count()
        shown = ", ".join(f"{count:,}" for count in counts)
        CONSOLE.print(f"{len(counts)} ranks hold {shown} Gaussians; exchange {self.config.exchange}.")

    def keep_in_place(self, optimizers: Mapping[str, torch.optim.Optimizer], images: int, refined: bool) -> None:
        """After a step: Gaussians move to the rank they are in, and space is cut anew where a rank has too many.

        Args:
            optimizers: Those of the Gaussians, by parameter.
            images: Seen so far, after the step.
            refined: Whether the step grew or pruned.
        """
        if not self.is_shared:
            return
        self.changed()
        config, before = self.config, images - self.batch_size
        if self.by_gaussians:
            if refined:
                self.count()
            return
        if images // config.balance_every != before // config.balance_every:
            done = migration.rebalance(self, optimizers)
            if done is not None:
                CONSOLE.print(f"After {images} images: {done}.")
                return
        if refined or images // config.migrate_every != before // config.migrate_every:
            migration.migrate(self, optimizers)
