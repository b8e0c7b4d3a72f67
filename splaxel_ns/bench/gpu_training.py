"""Iterations per second of one method of nerfstudio on one scene, and its peak memory; in a process of its own.

`python -m splaxel_ns.bench.gpu_training METHOD SCENE STEPS [DEVICE]` prints one line of JSON. The scene is in
MatrixCity's layout, photographs are at full resolution from the first step on, nothing is evaluated; the first fifth of
the steps, in which kernels are compiled and caches fill, is not counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

METHODS = ("splaxel", "splatfacto")
NEVER = 10**9


def measure_apart(method: str, scene: Path, steps: int, seconds: float, device: str = "cuda") -> dict[str, Any]:
    """The result of a process that trains; `left_out` says why there is none.

    Args:
        method: One of `METHODS`.
        scene: A folder with MatrixCity's transforms.
        steps: Of training.
        seconds: It is ended after this time.
        device: nerfstudio's machine.device-type.
    """
    command = [sys.executable, "-m", __name__, method, str(scene.resolve()), str(steps), device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds, 1.0))
    except subprocess.TimeoutExpired:
        return {"left_out": f"{steps} steps of {method} took longer than {seconds:.0f} s"}
    if done.returncode != 0:
        return {"left_out": f"{method} did not train: {done.stderr.strip().splitlines()[-1:]}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(method: str, scene: Path, steps: int, device: str) -> dict[str, Any]:
    """Train in this process."""
    with tempfile.TemporaryDirectory() as folder:
        return _train(_trainer(method, scene, steps, device, Path(folder)), steps)


def _train(trainer: Any, steps: int) -> dict[str, Any]:
    trainer.setup()
    gpu = trainer.pipeline.device.type == "cuda"
    first, times = steps // 5, dict.fromkeys(("start", "end"), 0.0)
    iterate = trainer.train_iteration

    def timed(step: int) -> Any:
        if step == first:
            times["start"] = _now(gpu)
        result = iterate(step)
        if step == steps - 1:
            times["end"] = _now(gpu)
        return result

    trainer.train_iteration = timed
    trainer.train()
    return {
        "iterations_per_second": round((steps - first) / (times["end"] - times["start"]), 2),
        "steps": steps,
        "device": str(trainer.pipeline.device),
        "gaussians": len(trainer.pipeline.model.means),
        "peak_memory_gb": round(1e-9 * torch.cuda.max_memory_allocated(), 3) if gpu else None,
    }


def _trainer(method: str, scene: Path, steps: int, device: str, folder: Path) -> Any:
    from nerfstudio.configs.method_configs import all_methods

    from splaxel_ns.config import splaxel
    from splaxel_ns.dataparsers.matrixcity import MatrixCityDataParserConfig

    config: Any = splaxel.config if method == "splaxel" else all_methods[method]
    config.data = config.pipeline.datamanager.data = scene
    config.pipeline.datamanager.dataparser = MatrixCityDataParserConfig(data=scene)
    config.pipeline.model.num_downscales = 0
    config.max_num_iterations = steps
    config.machine.device_type = device
    config.mixed_precision = False
    config.steps_per_eval_batch = config.steps_per_eval_image = config.steps_per_eval_all_images = NEVER
    config.steps_per_save = NEVER
    config.vis = "tensorboard"
    config.output_dir = folder
    config.set_timestamp()
    return config.setup(local_rank=0, world_size=1)


def _now(gpu: bool) -> float:
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    _, _method, _scene, _steps, *_device = sys.argv
    print("\n" + json.dumps(measure(_method, Path(_scene), int(_steps), *(_device or ["cuda"]))))
