"""nerfstudio's datamanager for views: batches in the scheduler's order, photographs decoded ahead of use.

Nothing is loaded at the start. Photographs are decoded in background threads, in the order in which they will be
used, and kept as uint8 under a limit, so that a city's photographs need not fit in memory.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.configs.dataparser_configs import AnnotatedDataParserUnion
from nerfstudio.data.datamanagers.full_images_datamanager import FullImageDatamanager, FullImageDatamanagerConfig
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.utils.rich_utils import CONSOLE

from splaxel_ns import comm, cuda
from splaxel_ns.dataparsers.matrixcity import MatrixCityDataParserConfig
from splaxel_ns.dataset import SplaxelDataset
from splaxel_ns.photo_cache import AUTOMATIC_SHARE, GIB, PhotoCache, available_memory
from splaxel_ns.schedule import ViewScheduler

TrainView = tuple[Cameras, dict[str, Any]]
"""One camera (batch shape [1]) and image_idx, image uint8 [H, W, 3 | 4], optionally mask bool [H, W, 1]."""


@dataclass
class SplaxelDatamanagerConfig(FullImageDatamanagerConfig):
    """Views for training and evaluation."""

    _target: type = field(default_factory=lambda: SplaxelDatamanager)
    dataparser: AnnotatedDataParserUnion = field(default_factory=MatrixCityDataParserConfig)
    """How the data is read."""
    batch_size: int = 1
    """Views per training step. All schedules are stated in images, so batch 4 for a quarter of the steps follows the
    same schedule as batch 1."""
    cache_gib: float | None = None
    """Main memory for decoded photographs in GiB. By default half of what is free at the start. Photographs beyond it
    are decoded again in every epoch."""
    decode_ahead: int = 8
    """Photographs decoded in the background before they are used, at least one step's."""
    max_thread_workers: int | None = None
    """Threads that decode photographs. By default half of the cores, 8 at most."""
    cache_images: Literal["cpu", "gpu"] = "cpu"
    """Photographs stay in main memory; "gpu" is refused."""
    cache_images_type: Literal["uint8", "float32"] = "uint8"
    """Photographs are kept as uint8; "float32" is refused."""


def _refuse_unsupported(config: SplaxelDatamanagerConfig) -> None:
    """Options of nerfstudio's datamanager that would be ignored end here instead.

    Raises:
        ValueError: Such an option is set, or a value is out of range.
    """
    prefix = "--pipeline.datamanager."
    in_memory = "photographs are decoded on demand and kept as uint8 in main memory"
    every_view = "evaluation goes through all its views"
    supported = (
        ("train_cameras_sampling_strategy", "random", "the scheduler draws each view once per epoch, in buckets"),
        ("cache_images", "cpu", in_memory),
        ("cache_images_type", "uint8", in_memory),
        ("images_on_gpu", False, in_memory),
        ("masks_on_gpu", False, in_memory),
        ("eval_num_images_to_sample_from", -1, every_view),
        ("eval_num_times_to_repeat_images", -1, every_view),
    )
    for name, only, reason in supported:
        value = getattr(config, name)
        if value != only:
            flag = prefix + name.replace("_", "-")
            raise ValueError(f"{flag} {value} is not supported by splaxel: {reason}. Use {only}.")
    if config.batch_size < 1:
        raise ValueError(f"{prefix}batch-size must be at least 1, not {config.batch_size}.")
    if config.cache_gib is not None and not config.cache_gib > 0:
        raise ValueError(f"{prefix}cache-gib must be positive, not {config.cache_gib}; leave it out for automatic.")
    if config.decode_ahead < 0:
        raise ValueError(f"{prefix}decode-ahead must not be negative, not {config.decode_ahead}.")
    if config.max_thread_workers is not None and config.max_thread_workers < 1:
        raise ValueError(f"{prefix}max-thread-workers must be at least 1, not {config.max_thread_workers}.")
    if not 0 < config.camera_res_scale_factor <= 1:
        raise ValueError(f"{prefix}camera-res-scale-factor must lie in (0, 1], not {config.camera_res_scale_factor}.")


class EvalViews(Sequence[TrainView]):
    """All views of the evaluation split, each decoded when its turn comes."""

    def __init__(self, datamanager: SplaxelDatamanager):
        self._datamanager = datamanager

    def __len__(self) -> int:
        return len(self._datamanager.eval_dataset)

    def __getitem__(self, index: int) -> TrainView:  # type: ignore[override]
        if not -len(self) <= index < len(self):
            raise IndexError(f"evaluation view {index} of {len(self)}")
        return self._datamanager.eval_view(index % len(self))

    def __iter__(self) -> Iterator[TrainView]:
        ahead = self._datamanager.num_ahead
        for index in range(len(self)):
            self._datamanager.eval_dataset.announce(list(range(index, min(index + ahead, len(self)))))
            yield self[index]


class SplaxelDatamanager(FullImageDatamanager[SplaxelDataset]):
    """Hands out exactly `batch_size` views per step, each view once per epoch.

    Args:
        config: What to read and how.
        device: Where cameras and images are handed out.
        test_mode: "val" to train; "test" to evaluate or view; "inference" opens no photograph.
        world_size: Number of processes.
        local_rank: This process.

    Raises:
        ValueError: An unsupported option, no training view, or what dataparser and dataset raise.
    """

    config: SplaxelDatamanagerConfig
    train_dataset: SplaxelDataset
    eval_dataset: SplaxelDataset

    def __init__(
        self,
        config: SplaxelDatamanagerConfig,
        device: torch.device | str = "cpu",
        test_mode: Literal["test", "val", "inference"] = "val",
        world_size: int = 1,
        local_rank: int = 0,
        **kwargs: Any,
    ):
        _refuse_unsupported(config)
        self.config = config
        self.device = device
        self.world_size = world_size
        self.local_rank = local_rank
        self.sampler = None
        self.test_mode = test_mode
        self.test_split = "test" if test_mode in ["test", "inference"] else "val"
        self.dataparser_config = config.dataparser
        if config.data is not None:
            config.dataparser.data = Path(config.data)
        else:
            config.data = config.dataparser.data
        self.has_photographs = test_mode != "inference"
        self.train_dataparser_outputs, eval_outputs = self._read_data()
        self.includes_time = self.dataparser.includes_time
        if len(self.train_dataparser_outputs.image_filenames) == 0:
            raise ValueError(f"{config.data}: the training split holds no view.")
        self._photo_cache: PhotoCache | None = None
        self.train_dataset = self._dataset(self.train_dataparser_outputs)
        self.eval_dataset = self._dataset(eval_outputs)
        self.train_cameras = self.train_dataset.cameras
        self.exclude_batch_keys_from_device = self.train_dataset.exclude_batch_keys_from_device
        self._open_cache()
        self.scheduler = ViewScheduler(
            num_views=len(self.train_dataset), seed=config.train_cameras_sampling_seed, batch_size=config.batch_size
        )
        self._participants: Sequence[set[int]] | None = None
        self._cameras: dict[tuple[bool, int], Cameras] = {}
        self._rest: list[int] = []  # views of a batch that next_train has not handed out yet
        self._num_eval_drawn = 0
        super(FullImageDatamanager, self).__init__()  # the class between loads every photograph

    def _read_data(self) -> tuple[DataparserOutputs, DataparserOutputs]:
        """Run the dataparser for both splits.

        To view a trained model, photographs are welcome but not needed: where they are gone, say so and go on.
        """
        try:
            return self._parse(self.has_photographs)
        except (OSError, ValueError, RuntimeError) as error:
            if self.test_mode != "test":
                raise
            reason = error
        try:
            outputs = self._parse(False)
        except (OSError, ValueError, RuntimeError):
            raise reason from None
        self.has_photographs = False
        CONSOLE.print(
            f"{reason}\nGoing on without photographs: the model can be viewed and rendered, grey pictures stand in for "
            "the photographs; evaluation ends at the first missing one.",
            style="bold yellow",
            markup=False,
        )
        return outputs

    def _parse(self, photographs_needed: bool) -> tuple[DataparserOutputs, DataparserOutputs]:
        self.dataparser = self.dataparser_config.setup()
        self.dataparser.photographs_needed = photographs_needed  # read by our dataparsers
        if not photographs_needed:
            self.dataparser.downscale_factor = 1  # read by stock dataparsers, which open a photograph to choose one
        train = self.dataparser.get_dataparser_outputs(split="train")
        return train, self.dataparser.get_dataparser_outputs(split=self.test_split)

    def _dataset(self, outputs: DataparserOutputs) -> SplaxelDataset:
        return SplaxelDataset(
            outputs, self.config.camera_res_scale_factor, self._photo_cache, has_photographs=self.has_photographs
        )

    def create_train_dataset(self) -> SplaxelDataset:
        """Return a dataset of the training split that shares the cache."""
        return self._dataset(self.train_dataparser_outputs)

    def create_eval_dataset(self) -> SplaxelDataset:
        """Return a dataset of the evaluation split that shares the cache."""
        return self._dataset(self.dataparser.get_dataparser_outputs(split=self.test_split))

    def _open_cache(self) -> None:
        """Choose the cache's size and say in one line what it means for this data."""
        config, train, evaluation = self.config, self.train_dataset, self.eval_dataset
        sizes = [train.expected_bytes(i) for i in range(len(train))]
        eval_bytes = sum(evaluation.expected_bytes(i) for i in range(len(evaluation)))
        automatic = config.cache_gib is None
        limit = int(available_memory() * AUTOMATIC_SHARE if config.cache_gib is None else config.cache_gib * GIB)
        self.num_ahead = max(config.decode_ahead, config.batch_size)
        threads = config.max_thread_workers or max(1, min(8, len(os.sched_getaffinity(0)) // 2))
        self._photo_cache = PhotoCache(limit, self.num_ahead * max(sizes), threads, total=sum(sizes))
        self._keep_eval = sum(sizes) + eval_bytes <= limit  # training's photographs are wanted far more often
        train.cache = evaluation.cache = self._photo_cache
        if self.test_mode != "val":
            return
        share = min(1.0, self._photo_cache.keep_limit / sum(sizes))
        meaning = (
            "each is decoded once" if share == 1 else f"{share:.0%} stay in memory, the rest is decoded in every epoch"
        )
        origin = "half of the free memory" if automatic else "--pipeline.datamanager.cache-gib"
        CONSOLE.print(
            f"{len(train)} training photographs, {sum(sizes) / GIB:.2f} GiB decoded; cache of {limit / GIB:.2f} GiB "
            f"({origin}): {meaning}"
        )

    # Training

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next view belongs to, from 0."""
        return self.scheduler.epoch

    @property
    def views_done(self) -> int:
        """Number of training views handed out so far, over all epochs."""
        return self.scheduler.views_done - len(self._rest)

    def new_epoch_next(self, step: int) -> bool:
        """Whether the next step draws a new epoch's order: the time to call `set_participants`."""
        return self.scheduler.new_epoch_next

    def set_participants(self, participants: Sequence[set[int]] | None) -> None:
        """State which partitions every training view touches; used from the next epoch's order on.

        Args:
            participants: One set of partitions per training view, or None: every view touches all.

        Raises:
            ValueError: There is not one set per view.
        """
        self.scheduler.set_participants(participants)
        self._participants = participants

    def utilisation(self, num_partitions: int) -> float:
        """Mean part of the partitions that have work in a bucket of this epoch (paper, section 4.4)."""
        return self.scheduler.utilisation(num_partitions)[1]

    def next_train_batch(self, step: int, wanted: Callable[[set[int]], bool] | None = None) -> list[TrainView]:
        """Return the step's views: exactly `batch_size`, bucket by bucket.

        Args:
            step: Not used.
            wanted: Whether this rank will need the photograph of a view with these participants; the others come
                without (`photograph_of`). None: all come.

        Raises:
            ValueError: A photograph cannot be read; the message names it.
        """
        indices, self._rest = self._rest, []
        while len(indices) < self.config.batch_size:
            indices += self.scheduler.next_batch()
        self._rest = indices[self.config.batch_size :]
        try:
            return self._train_views(indices[: self.config.batch_size], wanted)
        except (OSError, ValueError):
            self._rest = indices  # the state saved now must not have these views behind it
            raise

    def take_back(self, views: Sequence[TrainView]) -> None:
        """The views that `next_train_batch` gave last are to come again: their step has failed."""
        self._rest = [int((camera.metadata or {})["cam_idx"]) for camera, _ in views] + self._rest

    def next_train(self, step: int) -> TrainView:
        """Return one training view, as nerfstudio's own pipeline asks for it."""
        if not self._rest:
            self._rest = self.scheduler.next_batch()
        return self._train_views([self._rest.pop(0)])[0]

    def photograph_of(self, camera: Cameras) -> dict[str, Any]:
        """The photograph of a training view that `next_train_batch` handed out without."""
        return self._view(self.train_dataset, int((camera.metadata or {})["cam_idx"]), keep=True)[1]

    def _train_views(self, indices: list[int], wanted: Callable[[set[int]], bool] | None = None) -> list[TrainView]:
        upcoming = indices + self._rest + list(self.scheduler.peek(self.num_ahead))
        needed = upcoming[: self.num_ahead + len(indices)]
        participants = self._participants
        if wanted is not None and participants is not None:
            needed = [index for index in needed if wanted(participants[index])]
        self.train_dataset.announce(needed)
        return [
            self._view(self.train_dataset, index, keep=True)
            if index in needed
            else (self._camera(self.train_dataset, index), {"image_idx": index})
            for index in indices
        ]

    def _view(self, dataset: SplaxelDataset, index: int, keep: bool) -> TrainView:
        data = dataset.get_data(index, "uint8", keep=keep)
        for name in ("image", "mask"):
            if name in data:
                data[name] = cuda.upload(data[name], torch.device(self.device))
        return self._camera(dataset, index), data

    def _camera(self, dataset: SplaxelDataset, index: int) -> Cameras:
        key = (dataset is self.train_dataset, index)
        if key not in self._cameras:  # taking one out of many costs more than a small kernel
            camera = dataset.cameras[index : index + 1].to("cpu")  # where views are planned
            camera.metadata = {**(camera.metadata or {}), "cam_idx": index}
            self._cameras[key] = camera
        return copy(self._cameras[key])

    def get_train_rays_per_batch(self) -> int:
        """Return the mean number of pixels per step. Opens no photograph."""
        cameras = self.train_dataset.cameras
        return round((cameras.width * cameras.height).double().mean().item()) * self.config.batch_size

    # Evaluation

    def eval_view(self, index: int) -> TrainView:
        """Return one view of the evaluation split; of several ranks all call this at once.

        Raises:
            ValueError: Its photograph cannot be read.
            FailedTogether: Some rank cannot read it; on all of them.
        """
        world = comm.world()
        if world.size == 1:
            return self._view(self.eval_dataset, index, keep=self._keep_eval)
        view, error = None, None
        try:
            view = self._view(self.eval_dataset, index, keep=self._keep_eval)
        except (OSError, ValueError) as failure:
            error = str(failure)
        failures = world.failures(error)
        if view is None or failures:
            raise comm.FailedTogether("; ".join(failures))
        return view

    @property
    def fixed_indices_eval_dataloader(self) -> EvalViews:  # type: ignore[override]
        """All evaluation views in order, decoded one after the other."""
        return EvalViews(self)

    def next_eval(self, step: int) -> TrainView:
        """Return a random evaluation view."""
        return self.next_eval_image(step)

    def next_eval_image(self, step: int) -> TrainView:
        """Return a random evaluation view; all come once before one comes again.

        Raises:
            ValueError: The evaluation split is empty.
        """
        num_views = len(self.eval_dataset)
        if num_views == 0:
            raise ValueError(f"{self.config.data}: the {self.test_split} split is empty, there is nothing to evaluate.")
        turn, position = divmod(self._num_eval_drawn, num_views)
        order = list(range(num_views))
        random.Random(f"{self.config.train_cameras_sampling_seed} {turn}").shuffle(order)
        self._num_eval_drawn += 1
        return self.eval_view(order[position])

    # State

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the place in the epoch, in plain numbers and tensors.

        A datamanager is a torch module without weights: called with arguments, as the pipeline's own `state_dict`
        does to collect weights, this adds nothing.
        """
        if args or kwargs:
            return super().state_dict(*args, **kwargs)
        return {
            "scheduler": self.scheduler.state_dict(),
            "rest": list(self._rest),
            "num_eval_drawn": self._num_eval_drawn,
            "views": self._fingerprint(),
        }

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Go on where `state_dict` was taken. With other training views than then, a new epoch begins instead.

        Raises:
            ValueError: The state is not one of `state_dict`.
        """
        missing = {"scheduler", "rest", "num_eval_drawn", "views"} - set(state_dict)
        if missing:
            raise ValueError(f"The saved datamanager lacks {', '.join(sorted(missing))}; the checkpoint is damaged.")
        self._num_eval_drawn = int(state_dict["num_eval_drawn"])
        if state_dict["views"] != self._fingerprint():
            CONSOLE.print(
                f"{self.config.data}: the training views are not those of the checkpoint; a new epoch begins.",
                style="bold yellow",
                markup=False,
            )
            return
        self.scheduler.load_state_dict(state_dict["scheduler"])
        self._rest = [int(index) for index in state_dict["rest"]]

    def _fingerprint(self) -> int:
        """A number for the training views' names and order, whatever folder they lie in today."""
        names = ["/".join(path.parts[-3:]) for path in self.train_dataset.image_filenames]
        return zlib.crc32("\n".join(names).encode())
