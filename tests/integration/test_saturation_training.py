"""Saturation in the real training loop: resume, event files, and the line at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_training import make_config, run

STOP, TOTAL = 60, 70  # of 52 views: every view that is drawn after the checkpoint was drawn before


def make(folder: Path, **changes: Any) -> Any:
    config = make_config(folder, total=TOTAL, **changes)
    # Partitions are never as opaque as the default asks for after so few steps.
    config.pipeline.model.saturation_threshold = 0.3
    config.pipeline.model.saturation_every = 20
    config.pipeline.model.num_downscales = 0
    config.pipeline.datamanager.camera_res_scale_factor = 0.1
    config.pipeline.datamanager.dataparser.max_seed_points = 2000
    config.logging.steps_per_log = 3
    return config


def test_resume_equals_the_uninterrupted_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Masks, what waits for the next snapshot, and the counts come from the checkpoint."""
    whole = run(make(tmp_path / "whole", steps_per_save=STOP, save_only_latest_checkpoint=False))
    masks = whole.trainer.pipeline.model.saturation
    assert masks.num_masked > 0 and masks.version >= 4
    assert "Saturation: " in capsys.readouterr().out
    events = EventAccumulator(str(whole.trainer.base_dir)).Reload()
    pruned, flips = (
        [item.value for item in events.Scalars(f"Train Metrics Dict/saturation_{name}")]
        for name in ("pruned", "flip_rate")
    )
    assert max(pruned) > 0.01 and 0 <= min(flips) <= max(flips) <= 1

    saved = whole.trainer.checkpoint_dir / f"step-{STOP:09d}.ckpt"
    config = make(tmp_path / "resumed", resume="auto")
    models = config.get_checkpoint_dir()
    models.mkdir(parents=True)
    (models / saved.name).write_bytes(saved.read_bytes())
    resumed = run(config, seed=7)
    assert list(resumed.losses) == list(range(STOP + 1, TOTAL))
    for step, loss in resumed.losses.items():
        assert loss == pytest.approx(whole.losses[step], abs=1e-4), step
    others = resumed.trainer.pipeline.model.saturation
    assert (others.num_masked, others.num_bytes, others.version) == (masks.num_masked, masks.num_bytes, masks.version)
    assert others.now == masks.now and others.last_epoch == masks.last_epoch
