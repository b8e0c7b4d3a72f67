"""One scene's data and model behind nerfstudio's pipeline interface, trained B views at a time.

Shapes: B views of a step, H x W pixels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import torch
from nerfstudio.pipelines.base_pipeline import VanillaPipelineConfig
from torch import Tensor
from torch.cuda.amp.grad_scaler import GradScaler

from splaxel_ns import comm, cuda
from splaxel_ns.checkpoint import MAX_STEP, read_verified_before, verify_for_evaluation
from splaxel_ns.comm import FailedTogether
from splaxel_ns.devices import choose_device
from splaxel_ns.evaluation import EvaluatedPipeline
from splaxel_ns.gaussian_rows import GAUSSIANS
from splaxel_ns.shards import read_rows
from splaxel_ns.stats import StepStats
from splaxel_ns.viewer_panel import PartitionPanel

if TYPE_CHECKING:
    from nerfstudio.cameras.cameras import Cameras

    from splaxel_ns.flight import Flight


@dataclass
class SplaxelPipelineConfig(VanillaPipelineConfig):
    """Configuration of `SplaxelPipeline`."""

    _target: type = field(default_factory=lambda: SplaxelPipeline)
    stats_file: Path | None = None
    """JSON lines about every step and rank: bytes by kind, messages, times, pixels, Gaussians, how many were added and
    pruned and why. They are appended."""

    # Not a field: no option, and no part of config.yml.
    _to_be_loaded = None

    def expect_checkpoint(self, directory: Path, load_step: int | None) -> None:
        """Take note of where an evaluation will load its checkpoint from: this folder's newest, or that of a step."""
        self._to_be_loaded = (directory, load_step)

    def gaussians_of(self, step: int) -> dict[str, Tensor]:
        """The Gaussians of the checkpoint that an evaluation loads, which `eval_setup` does not find: they are in
        shards.

        Raises:
            ValueError: It is not known where the checkpoint lies, or a shard cannot be read.
        """
        if self._to_be_loaded is None:
            raise ValueError("The checkpoint's Gaussians are in shards: load it by the config.yml of its run.")
        path = self._to_be_loaded[0] / f"step-{step:09d}.ckpt"
        content = read_verified_before(path)
        if "shards" not in content:
            raise ValueError(f"{path} is not one of splaxel: it holds no Gaussians.")
        return read_rows(content["shards"], prefix=GAUSSIANS)

    def setup(self, **kwargs: Any) -> SplaxelPipeline:
        """Build the pipeline; to evaluate, only if the checkpoint that `eval_setup` loads into it next is sound.

        Raises:
            ValueError: It is missing, damaged or foreign; the message names the file.
        """
        if self._to_be_loaded is not None and kwargs.get("test_mode") != "val":  # the trainer looks for itself
            verify_for_evaluation(*self._to_be_loaded)
        return super().setup(**kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_to_be_loaded"}


class SplaxelPipeline(EvaluatedPipeline):
    """Datamanager and model of one process; never wrapped in DistributedDataParallel.

    Args:
        config: What to build.
        device: Where nerfstudio would like it: "cpu", or "cuda", which is taken where it can be (`choose_device`).
        test_mode: nerfstudio's: "val" to train, "test" to evaluate, "inference" to need no photographs.
        world_size: Number of processes; 1.
        local_rank: This process on its machine; 0.
        grad_scaler: Not used, there is no mixed precision.
    """

    config: SplaxelPipelineConfig

    def __init__(
        self,
        config: SplaxelPipelineConfig,
        device: str | torch.device,
        test_mode: Literal["test", "val", "inference"] = "val",
        world_size: int = 1,
        local_rank: int = 0,
        grad_scaler: GradScaler | None = None,
    ) -> None:
        # Kernels are compiled here, if need be: the viewer's first picture would be drawn in its thread, which an error
        # ends.
        own = str(choose_device(device, comm.world()))
        # A world of one: the stock pipeline would wrap the model in DistributedDataParallel on the GPU `local_rank`.
        super().__init__(config, own, test_mode, world_size=1, local_rank=0, grad_scaler=grad_scaler)
        self.world_size = world_size
        self.model.set_training_views(self.datamanager.train_dataset.cameras, self.datamanager.config.batch_size)
        self.model.keep_own_share()
        self.partitions = PartitionPanel(self.model)
        self.stats = StepStats(self.model, config.stats_file)

    def train_step(self, step: int) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Render the step's B views one after the other and accumulate the gradients of their mean loss.

        Args:
            step: The step, from 0.

        Returns:
            loss, its terms, and the metrics, each the mean over those of the B views that have it, without graph.

        Raises:
            FloatingPointError: A view's loss is not finite; the message names step and view.
            ValueError: A photograph cannot be read; the message names it.
            FailedTogether: The same of several ranks, on all of them.
        """
        new_epoch = self.datamanager.new_epoch_next(step)
        self.model.take_saturation_snapshot(new_epoch)
        if new_epoch:
            # Participants decide which views may share a bucket; they only change between epochs (design: ranks agree).
            self.datamanager.set_participants(self.model.participants_for(self.datamanager.train_dataset.cameras))
        views = self._next_views(step)
        landed: list[Callable[[], dict[str, Tensor]]] = [dict for _ in views]
        flights: deque[tuple[int, Flight | None]] = deque()
        depth = self.model.config.in_flight if self.model.is_shared else 1
        for number, (camera, _) in enumerate(views):
            flights.append((number, self.model.begin(camera)))
            if len(flights) == depth:
                number, flight = flights.popleft()
                landed[number] = self._land(step, *views[number], flight, len(views))
        for number, flight in flights:
            landed[number] = self._land(step, *views[number], flight, len(views))
        # Of a GPU's views only here: it has the last backward pass to do meanwhile.
        results = [read() for read in landed]
        if self.model.is_shared:
            results = self._together(step, results, views)
        terms = [name for name in results[0] if name.startswith("loss")]
        means = _mean(results)
        losses = {name.removeprefix("loss "): means.pop(name) for name in terms}
        return losses.pop("loss"), losses, means

    def _next_views(self, step: int) -> list[tuple[Cameras, dict[str, Any]]]:
        """The step's views. A photograph that one of several ranks cannot read fails at the end of the step, on all of
        them: the others wait for this one's pixels, and none may leave before. So does a loss that is not finite."""
        self._unread: str | None = None
        self._diverged: str | None = None
        try:
            return self.datamanager.next_train_batch(step, self.model.shows)
        except (OSError, ValueError) as error:
            if not self.model.is_shared:
                raise
            self._unread = str(error)
        return self.datamanager.next_train_batch(step, lambda _: False)

    def _photograph_of(self, camera: Cameras) -> dict[str, Any]:
        """A photograph that did not come with its view; black in a step that fails."""
        if self._unread is None:
            try:
                return self.datamanager.photograph_of(camera)
            except (OSError, ValueError) as error:
                if not self.model.is_shared:
                    raise
                self._unread = str(error)
        size = (int(camera.height[0]), int(camera.width[0]), 3)
        black = torch.zeros(size, dtype=torch.uint8, device=self.model.device)
        return {"image": black, "image_idx": int((camera.metadata or {})["cam_idx"])}

    def _land(
        self, step: int, camera: Cameras, batch: dict[str, Any], flight: Flight | None, num_views: int
    ) -> Callable[[], dict[str, Tensor]]:
        """Loss and gradients of a view that has begun.

        Returns:
            A function that waits for what they have come to: "loss", "loss TERM" and metrics, or of several ranks
            shares; on the CPU.
        """
        outputs = self.model.finish(camera, flight)
        result: dict[str, Any] = {}
        read: Callable[[], dict[str, Tensor]] = dict
        if outputs:
            if "image" not in batch:
                batch = self._photograph_of(camera)
            metrics_dict = self.model.get_metrics_dict(outputs, batch)
            loss_dict = self.model.get_loss_dict(outputs, batch, metrics_dict)
            loss = _total(loss_dict, outputs["rgb"].device)
            result = {"loss": loss} | {f"loss {name}": term for name, term in loss_dict.items()} | metrics_dict
            read = self._on_the_way(result, step, batch)
            if loss.requires_grad:  # a view without a single Gaussian has no graph
                start = perf_counter()
                (loss / num_views).backward()
                if self.model.renderer is not None:
                    self.model.renderer.times.backward += perf_counter() - start
        self.model.after_backward(camera)
        return read

    def _on_the_way(self, result: dict[str, Any], step: int, batch: dict[str, Any]) -> Callable[[], dict[str, Tensor]]:
        """A view's numbers; those of a GPU set out before its backward pass does, and are looked at when they are read.

        Raises:
            FloatingPointError: The loss is not finite; here or, if it comes from a GPU, when it is read.
        """
        values = _detached(result)
        name = self._view_name(batch)
        far = [key for key, value in values.items() if cuda.on_gpu(value)]
        if not far:
            self._require_finite(values, step, name)
            return lambda: values
        later = cuda.Later(torch.stack([values[key] for key in far]))

        def read() -> dict[str, Tensor]:
            here = values | dict(zip(far, later.get().unbind(), strict=True))
            self._require_finite(here, step, name)
            return here

        return read

    def _together(
        self, step: int, shares: list[dict[str, Tensor]], views: list[tuple[Cameras, dict[str, Any]]]
    ) -> list[dict[str, Tensor]]:
        """Add what belongs to no view, sum gradients and results over the ranks.

        Args:
            shares: Of each view, what this rank counts.
            views: The step's.

        Returns:
            The results of each view, the same on all ranks.

        Raises:
            FloatingPointError: The loss of some rank is not finite; on all ranks.
            FailedTogether: Some rank could not read a photograph; the views are still to come.
        """
        model, world = self.model, self.model.world
        world.check()
        regularizers = model.regularizers()
        if regularizers:
            total = _total(regularizers, model.device)
            terms = {"loss": total} | {f"loss {name}": term for name, term in regularizers.items()}
            self._require_finite(_detached(terms), step, self._view_name({}))
            if total.requires_grad:
                total.backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not name.startswith("gauss_params."):  # all ranks have the same
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                world.sum(parameter.grad, "gradients of views")
        names = ("loss", "squared_error")
        zero = torch.zeros(())
        rows = [torch.stack([share.get(name, zero) for name in names]) for share in shares]  # B x [2]
        extra = [torch.as_tensor(term).detach().float().cpu() for term in regularizers.values()]
        failed = torch.tensor([float(self._unread is not None), float(self._diverged is not None)])
        table = world.sum(torch.cat([torch.stack(rows).flatten(), *[value.reshape(1) for value in extra], failed]))
        if table[-1] > 0:
            raise FloatingPointError("; ".join(world.failures(self._diverged)))
        if table[-2] > 0:
            self.datamanager.take_back(views)
            raise FailedTogether("; ".join(world.failures(self._unread)))
        table = table[:-2]
        summed = dict(zip(regularizers, table[2 * len(rows) :], strict=True))
        shared = {"gaussian_count": float(model.num_total)} | (model.saturation.metrics() if model.prunes else {})
        results = []
        for main_loss, squared_error in table[: 2 * len(rows)].view(-1, 2):
            result = {"loss": main_loss + sum(summed.values()), "loss main_loss": main_loss}
            result |= {f"loss {name}": value for name, value in summed.items()}
            if squared_error > 0:
                result["psnr"] = -10.0 * torch.log10(squared_error)
            results.append(result | {name: torch.tensor(value) for name, value in shared.items()})
        return results

    def _require_finite(self, result: dict[str, Tensor], step: int, view: str) -> None:
        """Refuse a loss that is not finite, among its terms "loss TERM"; of several ranks all learn of it together."""
        if torch.isfinite(result["loss"]) or self._diverged is not None:
            return
        terms = {name.removeprefix("loss "): value for name, value in result.items() if name.startswith("loss ")}
        shown = ", ".join(f"{name} {value.item():g}" for name, value in terms.items())
        self._diverged = (
            f"The loss became {result['loss'].item():g} at step {step}, view {view} ({shown}). Training stops; "
            "checkpoints written before are untouched. Look at this photograph and its mask, or lower the learning "
            "rates (--optimizers.NAME.optimizer.lr)."
        )
        if not self.model.is_shared:
            raise FloatingPointError(self._diverged)

    def _view_name(self, batch: dict[str, Any]) -> str:
        index = int(batch.get("image_idx", -1))
        names = self.datamanager.train_dataset.image_filenames
        return f"{str(names[index])!r}" if 0 <= index < len(names) else f"number {index}"

    def load_pipeline(self, loaded_state: dict[str, Any], step: int) -> None:
        """Fill the model from a checkpoint's `pipeline` entry.

        Args:
            loaded_state: Tensors by name; without Gaussians if those are in shards.
            step: The last step of that run.

        Raises:
            ValueError: Names or shapes are not those of this model.
        """
        state = _checked_state(loaded_state, step)
        model_state = {key.removeprefix("_model."): value for key, value in state.items() if key.startswith("_model.")}
        if not model_state:
            raise ValueError("The checkpoint is not one of splaxel: it holds no model.")
        if not any(key.startswith(GAUSSIANS) for key in state) and "tree_axis" in model_state:
            rows = self.config.gaussians_of(step)
            model_state |= {key.removeprefix("_model."): value for key, value in rows.items()}
        self.model.update_to_step(step)
        try:
            self.model.load_state_dict(model_state, strict=True)
        except RuntimeError as error:
            raise ValueError(f"The checkpoint does not fit this model: {error}") from error
        self.partitions = PartitionPanel(self.model)  # its list of partitions follows the boxes just loaded


def _checked_state(loaded_state: Any, step: Any) -> dict[str, Tensor]:
    """The state as a mapping of names to tensors, or a clear error."""
    if not isinstance(loaded_state, dict) or type(step) is not int or not 0 <= step <= MAX_STEP:
        raise ValueError(f"The checkpoint is not one of splaxel: its model state or its step ({step!r}) is none.")
    for key, value in loaded_state.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise ValueError(f"The checkpoint is not one of splaxel: its entry {key!r} is no tensor.")
    return loaded_state


def _total(terms: dict[str, Tensor], device: torch.device) -> Tensor:
    """The sum of a loss's terms; those of poses are on the CPU."""
    return torch.stack([cuda.upload(torch.as_tensor(term), device) for term in terms.values()]).sum()


def _detached(values: dict[str, Any]) -> dict[str, Tensor]:
    return {key: torch.as_tensor(value, dtype=torch.float32).detach() for key, value in values.items()}


def _mean(dicts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    keys = dict.fromkeys(key for item in dicts for key in item)
    return {key: torch.stack([item[key] for item in dicts if key in item]).mean() for key in keys}
