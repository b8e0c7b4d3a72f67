"""Two runs with one seed and one number of threads are the same run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from splaxel_ns.config import splaxel

DATA = Path(__file__).parents[1] / "data" / "matrixcity_caliterra" / "small_city" / "aerial"
STEPS = 20


def losses(folder: Path, updates: str, threads: int) -> tuple[list[float], torch.Tensor]:
    """The loss of each step, and the means at the end, with refinement on the way and two views per step."""
    config: Any = copy.deepcopy(splaxel.config)
    config.output_dir = folder
    config.experiment_name, config.timestamp = "aerial", "run"
    config.vis = "tensorboard"
    config.max_num_iterations = STEPS
    config.updates = updates
    config.steps_per_eval_image = config.steps_per_eval_all_images = 0
    config.pipeline.datamanager.data = DATA
    config.pipeline.datamanager.batch_size = 2
    config.pipeline.datamanager.camera_res_scale_factor = 0.25
    config.pipeline.datamanager.dataparser.max_seed_points = 3000
    model = config.pipeline.model
    model.num_partitions, model.num_downscales = 4, 0
    model.warmup_length, model.refine_every, model.sh_degree_interval = 4, 10, 8
    torch.manual_seed(7)
    np.random.seed(7)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        trainer = config.setup(local_rank=0, world_size=1)
        trainer.setup()
        seen: list[float] = []
        once = trainer.train_iteration

        def iteration(step: int) -> Any:
            result = once(step)
            seen.append(float(result[0]))
            return result

        trainer.train_iteration = iteration
        trainer.train()
    finally:
        torch.set_num_threads(before)
    return seen, trainer.pipeline.model.means.detach()


@pytest.mark.parametrize("updates, threads", [("visible", 2), ("all", 1)])
def test_losses_are_equal_to_the_bit(tmp_path: Path, updates: str, threads: int) -> None:
    first, means = losses(tmp_path / "first", updates, threads)
    second, same = losses(tmp_path / "second", updates, threads)
    assert len(first) == STEPS and first == second
    assert means.shape == same.shape and torch.equal(means, same)
    assert first[-1] < first[0]
