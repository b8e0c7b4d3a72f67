"""The Gaussians of a model in their partitions: where they start, which box holds them, how they are saved.

Shapes: N Gaussians, P partitions, K SH coefficients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.models.splatfacto import RGB2SH, SplatfactoModel, num_sh_bases, random_quat_tensor
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor
from torch.nn import Parameter

from splaxel_ns import seeding
from splaxel_ns.cuda import StepGradients
from splaxel_ns.model_checks import check_state, check_view_parameters
from splaxel_ns.partition import PartitionTree
from splaxel_ns.render import Gaussians, Partitions, partitions_of
from splaxel_ns.strategy import STATISTICS
from splaxel_ns.types import View

if TYPE_CHECKING:
    from splaxel_ns.model import SplaxelModelConfig

GAUSS_PARAMS = ("means", "scales", "quats", "features_dc", "features_rest", "opacities")
CHECKPOINT_KEYS = (
    *(f"gauss_params.{name}" for name in GAUSS_PARAMS),
    "tree_axis",
    "tree_threshold",
    "tree_children",
    "near_plane",
    "device_indicator_param",
)
VIEW_PARAMS = ("camera_optimizer.pose_adjustment", "bil_grids.grids", "bil_grids.rgb2gray_weight")
"""What a model with a camera optimiser or bilateral grids also has, one row per training view (the last one apart)."""
TREE = ("axis", "threshold", "children")


@dataclass(frozen=True)
class Repartition:
    """What new boxes change."""

    before: PartitionTree
    after: PartitionTree
    num_moved: int
    """Gaussians whose partition has another number now."""
    counts_before: list[int]
    counts_after: list[int]


class PartitionedGaussians(SplatfactoModel):
    """splatfacto's parameters in the boxes of a KD-tree; `SplaxelModel` draws and trains them."""

    config: SplaxelModelConfig
    tree_axis: Tensor
    tree_threshold: Tensor
    tree_children: Tensor
    near_plane: Tensor

    def start(self) -> None:
        """Make the first Gaussians, from the seed points or at random, and the boxes over them."""
        config = self.config
        self.batch_size = 1
        self._said: set[str] = set()
        self._partitions_made: tuple[Tensor, Tensor, tuple[Any, ...], Partitions] | None = None
        self.step_gradients: StepGradients | None = None
        self.notes_shown = False
        """Whether `shown` is wanted."""
        self.shown: Tensor | None = None
        """Gaussians that some view of the step saw.  # [N] bool"""
        self._detached_made: tuple[list[Tensor], list[int], Gaussians] | None = None
        half = 0.5 * config.random_scale
        if config.random_init:
            self._start(*seeding.random_gaussians(torch.full((3,), -half), torch.full((3,), half), config.num_random))
        else:  # without seed points the cameras say where to start
            self._start(*seeding.seed_gaussians(self.seed_points))
        near = seeding.NEAR_WITHOUT_SCENE if config.near_plane is None else config.near_plane
        self.register_buffer("near_plane", torch.tensor(float(near)))

    def set_training_views(self, cameras: Cameras, batch_size: int) -> None:
        """Tell a new model what it is trained with, before its optimisers are made and any checkpoint is loaded.

        Args:
            cameras: All training cameras: they give the near plane and, without seed points, where to start.
            batch_size: Views per step, the factor between steps and images.
        """
        self.batch_size = batch_size
        if self.num_points == 0:
            config = self.config
            self._start(*seeding.random_gaussians(*seeding.camera_box(cameras, config.random_scale), config.num_random))
        if self.config.near_plane is None:
            self.near_plane.fill_(seeding.automatic_near_plane(self.means.detach(), cameras))

    def _start(self, means: Tensor, colors: Tensor | None) -> None:
        """The first Gaussians and the boxes over them."""
        self.gauss_params = torch.nn.ParameterDict(self._first_parameters(means, colors))
        self._set_tree(PartitionTree.build(means, self.partitions_wanted()))

    def _first_parameters(self, means: Tensor, colors: Tensor | None) -> dict[str, Parameter]:
        num = len(means)
        if colors is None:
            features_dc = torch.rand(num, 3)
        elif self.config.sh_degree > 0:
            features_dc = RGB2SH(colors)
        else:
            features_dc = torch.logit(colors, eps=1e-10)
        tensors = {
            "means": means.clone(),
            "scales": seeding.initial_log_scales(means),
            "quats": random_quat_tensor(num),
            "features_dc": features_dc,
            "features_rest": torch.zeros(num, num_sh_bases(self.config.sh_degree) - 1, 3),
            "opacities": torch.logit(torch.full((num, 1), 0.1)),
        }
        indicator = getattr(self, "device_indicator_param", None)  # made after the first Gaussians
        device = "cpu" if indicator is None else indicator.device
        return {name: Parameter(tensors[name].to(device)) for name in GAUSS_PARAMS}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move what is drawn. What plans views (boxes, near plane, poses) stays on the CPU: it is read all the time,
        and nobody is to wait for a GPU to read it."""
        modules, buffers = self._modules, self._buffers
        stay = {"near_plane", "camera_optimizer", *(f"tree_{part}" for part in TREE)}
        self._modules = {name: module for name, module in modules.items() if name not in stay}
        self._buffers = {name: buffer for name, buffer in buffers.items() if name not in stay}
        try:
            super()._apply(fn, recurse)
            buffers.update(self._buffers)
        finally:
            self._modules, self._buffers = modules, buffers
        return self

    def partitions_wanted(self) -> int:
        """Boxes of a new model."""
        return 1 if self.config.num_partitions is None else self.config.num_partitions

    # Boxes

    def _set_tree(self, tree: PartitionTree) -> None:
        self.tree = tree
        self._partitions_made = None
        for name in TREE:
            self.register_buffer(f"tree_{name}", getattr(tree, name))

    @contextmanager
    def using_tree(self, tree: PartitionTree) -> Iterator[None]:
        """Draw with other boxes for a while."""
        before = self.tree
        self._set_tree(tree)
        try:
            yield
        finally:
            self._set_tree(before)

    def as_one_partition(self) -> Any:
        """Draw as one model without boxes for a while, as other programs do."""
        return self.using_tree(PartitionTree.build(self.means, 1))

    def repartition(self, num_partitions: int | None = None) -> Repartition:
        """Cut space anew at the medians of the current means. Pictures change under `boundary filter`.

        Args:
            num_partitions: Boxes, 1 to 16; None: as many as before.

        Returns:
            What changed; compare the PSNR before and after.
        """
        before = self.tree
        after = PartitionTree.build(self.means, num_partitions or before.num_partitions)
        old, new = before.locate(self.means), after.locate(self.means)
        self._set_tree(after)
        return Repartition(
            before,
            after,
            int((old != new).sum()),
            torch.bincount(old.long(), minlength=before.num_partitions).tolist(),
            torch.bincount(new.long(), minlength=after.num_partitions).tolist(),
        )

    def _partitions(self, gaussians: Gaussians, view: View) -> Partitions:
        """Owners and content boxes of all Gaussians, worked out once for the views between two changes of them."""
        means, scales = self.means, self.scales
        # In-place steps of an optimiser raise the version; refinement and loading make new tensors.
        state = (means._version, scales._version, self.config.boundary)
        made = self._partitions_made
        if made is None or made[0] is not means or made[1] is not scales or made[2] != state:
            made = (means, scales, state, partitions_of(gaussians, self.tree, self.config.boundary, view))
            self._partitions_made = made
        return made[3]

    def activated(self, keep: Tensor | None = None) -> Gaussians:
        """The Gaussians with activated parameters, all or those of [N] bool `keep`."""
        if self.step_gradients is not None and self.training and keep is None and torch.is_grad_enabled():
            return self.detached(self.step_gradients)
        params = {name: self.gauss_params[name] for name in GAUSS_PARAMS} | {"features_dc": self.shs_0}
        if keep is not None:
            params = {name: value[keep] for name, value in params.items()}
        return Gaussians(
            params["means"],
            params["quats"],
            torch.exp(params["scales"]),
            torch.sigmoid(params["opacities"]).squeeze(-1),
            params["features_dc"][:, None, :],
            params["features_rest"],
        )

    @torch.no_grad()
    def detached(self, gradients: StepGradients) -> Gaussians:
        """All Gaussians with activated parameters, worked out once for the views of a step.

        Args:
            gradients: Where the views' gradients wait for the step; the parameters get none from rendering.
        """
        params = [self.gauss_params[name] for name in GAUSS_PARAMS]
        # As for the boxes: steps raise the versions, refinement and loading make new tensors.
        versions = [param._version for param in params]
        made = self._detached_made
        if (
            made is None
            or made[1] != versions
            or made[2].gradients is not gradients
            or any(old is not new for old, new in zip(made[0], params, strict=True))
        ):
            made = (params, versions, replace(self.activated(), gradients=gradients))
            self._detached_made = made
        return made[2]

    # State

    def training_state(self) -> dict[str, Any]:
        """What resuming needs beside the tensors of `state_dict`: plain numbers and tensors."""
        statistics = {key: self.strategy_state[key] for key in STATISTICS if self.strategy_state.get(key) is not None}
        return {"step": self.step, "batch_size": self.batch_size, "strategy": statistics}

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Take over `training_state` of the run that is continued; `load_state_dict` comes first.

        Raises:
            ValueError: It does not belong to the loaded Gaussians.
        """
        statistics = state.get("strategy")
        if not isinstance(statistics, Mapping) or not isinstance(state.get("step"), int):
            raise ValueError("The checkpoint's training state is damaged: it lacks step or strategy")
        for key in STATISTICS:
            value = statistics.get(key)
            if value is not None and (not isinstance(value, Tensor) or value.shape != (self.num_points,)):
                raise ValueError(
                    f"The checkpoint's densification statistics do not fit its Gaussians: {key} is "
                    f"{list(getattr(value, 'shape', []))} for {self.num_points}"
                )
            if key in self.strategy_state:
                self.strategy_state[key] = None if value is None else value.to(self.device, copy=True)
        self.step = state["step"]

    def load_state_dict(self, dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take over any number of Gaussians and partitions.

        Parameters are new objects afterwards (their number changes): make the optimisers after this, or again.

        Args:
            dict: Tensors by name.
            strict: Whether unknown names are an error; missing ones always are.
            assign: As for `torch.nn.Module`.

        Raises:
            ValueError: Not the state of a splaxel model of this SH degree and these options.
        """
        state = {key: value for key, value in dict.items() if key in CHECKPOINT_KEYS + VIEW_PARAMS or strict}
        check_state(state, self.config.sh_degree)
        check_view_parameters(state, self.state_dict())
        tree = PartitionTree.from_state_dict({name: state[f"tree_{name}"] for name in TREE})
        if self.config.num_partitions not in (None, tree.num_partitions):
            self._say_once(
                "tree",
                f"The checkpoint's {tree.num_partitions} partitions are used (num_partitions is "
                f"{self.config.num_partitions}): a model is drawn in the boxes it was trained in.",
            )
        num = len(state["gauss_params.means"])
        for name in GAUSS_PARAMS:
            old = self.gauss_params[name]
            self.gauss_params[name] = Parameter(old.new_zeros(num, *old.shape[1:]))
        self._set_tree(tree)
        for key in STATISTICS:  # of other Gaussians
            if key in self.strategy_state:
                self.strategy_state[key] = None
        result = super(SplatfactoModel, self).load_state_dict(state, strict=strict, assign=assign)
        if self.config.near_plane is not None:  # an option given outranks the checkpoint
            self.near_plane.fill_(self.config.near_plane)
        return result

    def _say_once(self, topic: str, message: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            CONSOLE.print(message)
