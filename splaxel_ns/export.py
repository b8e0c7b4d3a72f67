"""`splaxel-export`: every Gaussian of a trained model into one PLY, in the frame its photographs came in.

Stock `ns-export gaussian-splat` works on our models too; it stays in the model's frame and drops faint Gaussians.

Shapes: N Gaussians, K spherical harmonics coefficients per colour.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import tyro
import yaml
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.utils.rich_utils import CONSOLE
from rich.progress import track

from splaxel_ns.checkpoint import load_checkpoint, newest_checkpoint
from splaxel_ns.dataparsers.normalise import WorldFrame
from splaxel_ns.model import SplaxelModel
from splaxel_ns.pipeline import SplaxelPipeline, SplaxelPipelineConfig
from splaxel_ns.shards import with_gaussians

CHUNK = 1 << 16
"""Gaussians converted and written at a time: bounds the memory beside the model itself."""


def load_config(path: Path) -> TrainerConfig:
    """The configuration of a splaxel run.

    Raises:
        ValueError: The file is missing, damaged, or that of another method.
    """
    remedy = "give the config.yml that the run wrote beside its nerfstudio_models, or a copy of it"
    try:
        config = yaml.load(path.read_text(), Loader=yaml.Loader)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): {remedy}") from error
    except Exception as error:  # its tags make objects, which can raise nearly anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{path} is damaged or no configuration ({reason}): {remedy}") from error
    if not isinstance(config, TrainerConfig):
        raise ValueError(f"{path} holds no configuration but a {type(config).__name__}: {remedy}")
    if not isinstance(getattr(config, "pipeline", None), SplaxelPipelineConfig):
        method = getattr(config, "method_name", None)
        raise ValueError(f"{path} is a run of {method}, not of splaxel, or damaged: use ns-export, or {remedy}")
    return config


def load_run(path: Path) -> tuple[SplaxelPipeline, Path, int]:
    """The model of a run with its data set's poses, as nerfstudio's `eval_setup` loads it, every byte verified.

    Args:
        path: The run's config.yml.

    Returns:
        pipeline, the newest checkpoint, its step.

    Raises:
        ValueError: Configuration or checkpoint is missing, damaged, or of another method; the message names the file.
    """
    config = load_config(path)
    try:
        folder = config.get_base_dir() / config.relative_model_dir
        checkpoint = newest_checkpoint(folder)
    except (AttributeError, TypeError, AssertionError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}): restore it from a copy") from error
    if checkpoint is None:
        raise ValueError(
            f"There is no checkpoint (step-XXXXXXXXX.ckpt) in {folder}, where {path} has them: start the command in "
            "the folder the training was started in, or correct output_dir in the file"
        )
    loaded = load_checkpoint(checkpoint, "Move it away to use the one before, if there is one.")
    try:
        pipeline = config.pipeline.setup(device="cpu", test_mode="inference")
    except (AttributeError, LookupError, TypeError, AssertionError) as error:
        raise ValueError(
            f"No model can be made of {path} ({type(error).__name__}: {error}): it is damaged, or the data set at "
            f"{getattr(config, 'data', None)} is; restore it from a copy"
        ) from error
    if not isinstance(pipeline, SplaxelPipeline) or not isinstance(pipeline.model, SplaxelModel):
        raise ValueError(f"{path} makes a {type(pipeline).__name__}, not a model of splaxel: use ns-export")
    pipeline.eval()
    try:
        pipeline.load_pipeline(with_gaussians(loaded), loaded["step"])
    except ValueError as error:
        raise ValueError(f"{checkpoint}: {error}") from error
    return pipeline, checkpoint, loaded["step"]


def frame_of(dataparser_outputs: Any) -> WorldFrame:
    """The frame of any nerfstudio dataparser: `dataparser_transform`, then `dataparser_scale`."""
    transform = dataparser_outputs.dataparser_transform.double().numpy(force=True)
    rotation = transform[:3, :3]
    return WorldFrame(-(rotation.T @ transform[:3, 3]), float(dataparser_outputs.dataparser_scale), rotation)


def rotate_quats(quats: np.ndarray, rotation: np.ndarray) -> np.ndarray:  # [N, 4] wxyz -> [N, 4]
    """Orientations seen from axes turned by `rotation` (new from old, [3, 3])."""
    from viser.transforms import SO3

    lengths = np.linalg.norm(quats, axis=-1, keepdims=True)
    unit = np.where(lengths > 0, quats / np.where(lengths > 0, lengths, 1.0), (1.0, 0.0, 0.0, 0.0))
    return np.asarray((SO3.from_matrix(rotation) @ SO3(unit)).wxyz)


def sh_rotation(rotation: np.ndarray, num_coeffs: int) -> np.ndarray:  # -> [K, K]
    """Matrix that turns the coefficients of a colour function into those of the same function in turned axes.

    Found by asking that both agree in more directions than there are coefficients: the basis is closed under
    rotation, so the least-squares solution is exact.
    """
    from gsplat.cuda._torch_impl import _spherical_harmonics

    degree = int(np.sqrt(num_coeffs)) - 1
    dirs = np.random.default_rng(0).normal(size=(8 * num_coeffs, 3))
    dirs /= np.linalg.norm(dirs, axis=-1, keepdims=True)

    def basis(d: np.ndarray) -> np.ndarray:  # [D, 3] -> [D, K]
        one_hot = torch.eye(num_coeffs, dtype=torch.float64)[:, :, None].expand(-1, -1, 3)  # [K, K, 3]
        columns = [
            _spherical_harmonics(degree, torch.from_numpy(d), one_hot[k].expand(len(d), -1, -1))[:, 0]
            for k in range(num_coeffs)
        ]
        return torch.stack(columns, dim=1).numpy()

    solution, *_ = np.linalg.lstsq(basis(dirs), basis(dirs @ rotation), rcond=None)
    return solution


def property_names(num_rest: int) -> list[str]:
    """Vertex properties in the order of the original 3DGS code, which viewers and editors read."""
    return [
        *("x", "y", "z", "nx", "ny", "nz"),
        *(f"f_dc_{i}" for i in range(3)),
        *(f"f_rest_{i}" for i in range(3 * num_rest)),
        "opacity",
        *(f"scale_{i}" for i in range(3)),
        *(f"rot_{i}" for i in range(4)),
    ]


def rows(model: SplaxelModel, frame: WorldFrame, offset: np.ndarray) -> Iterator[np.ndarray]:
    """Chunks of vertices [M, properties] float32, positions in the input frame minus `offset`."""
    num_rest = model.features_rest.shape[1]
    turn = frame.rotation.T  # model axes to input axes
    mix = sh_rotation(turn, 1 + num_rest).astype(np.float32)[1:, 1:]  # degree 0 does not turn
    for start in range(0, model.num_points, CHUNK):
        part = slice(start, start + CHUNK)
        means, scales, quats, opacities = (
            t[part].detach().numpy(force=True) for t in (model.means, model.scales, model.quats, model.opacities)
        )
        dc = model.shs_0[part].detach().numpy(force=True)
        rest = mix @ model.shs_rest[part].detach().numpy(force=True)  # [M, K-1, 3]
        yield np.concatenate(
            [
                frame.points_to_input(means) - offset,
                np.zeros_like(means),
                dc,
                rest.transpose(0, 2, 1).reshape(len(means), -1),
                opacities,
                scales - np.log(frame.scale),
                rotate_quats(quats.astype(np.float64), turn),
            ],
            axis=1,
        ).astype("<f4")


def choose_offset(model: SplaxelModel, frame: WorldFrame) -> np.ndarray:  # [3] float64
    """What to subtract before the cast to float32: nothing, unless the coordinates are too large for it.

    Float32 has 24 bits: at UTM's 3.3 million metres neighbours lie 0.25 m apart. The offset is whole units, so that
    it can be typed into other programs.
    """
    # An even sample: one Gaussian that ran away to infinity decides nothing.
    means = model.means.detach()[:: max(1, model.num_points // CHUNK)].numpy(force=True)
    scales = model.scales.detach()[:: max(1, model.num_points // CHUNK)].numpy(force=True)
    finite = np.isfinite(means).all(axis=-1) & np.isfinite(scales).all(axis=-1)
    if not finite.any():
        return np.zeros(3)
    positions = np.abs(frame.points_to_input(means[finite])).max(axis=-1)  # [M]
    spacing = float(np.spacing(np.float32(np.percentile(positions, 99))))
    size = float(np.exp(np.median(scales[finite].max(axis=-1)))) / frame.scale
    return np.zeros(3) if spacing < 0.01 * size else np.round(frame.centre)


def write_ply(path: Path, model: SplaxelModel, frame: WorldFrame, offset: np.ndarray) -> None:
    """Streams the model into `path`, which appears only once it is whole.

    Raises:
        RuntimeError: the file could not be written; what stood at `path` before is untouched.
    """
    names = property_names(model.features_rest.shape[1])
    header = "\n".join(
        [
            "ply",
            "format binary_little_endian 1.0",
            f"comment offset {' '.join(repr(float(v)) for v in offset)}",
            f"element vertex {model.num_points}",
            *(f"property float {name}" for name in names),
            "end_header\n",
        ]
    )
    with replacing(path) as file:
        file.write(header.encode())
        num_chunks = -(-model.num_points // CHUNK)
        for chunk in track(rows(model, frame, offset), "Writing Gaussians", total=num_chunks, transient=True):
            assert chunk.shape[1] == len(names)
            file.write(chunk.tobytes())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` once it is whole and on the disk; until then, and if that fails, `path`
    stays as it was.

    Raises:
        RuntimeError: The file cannot be written; the message names it and the reason.
    """
    partial = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise RuntimeError(
            f"cannot write {path}: {error.strerror}; free space, or choose another --output-dir"
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


@torch.no_grad()
def photo_psnr(pipeline: SplaxelPipeline, num_views: int) -> tuple[float, float] | None:
    """Mean PSNR (dB) on evenly chosen held-out photographs, with the boxes and without; None where they are absent
    or masked entirely."""
    data = pipeline.datamanager
    picks = even_picks(len(data.eval_dataset), num_views)
    if not picks or not all(data.eval_dataset.image_filenames[index].exists() for index in picks):
        return None
    boxed, merged = [], []
    for index in picks:
        camera, batch = data.eval_view(index)
        boxed += model_psnr(pipeline.model, camera, batch)
        with pipeline.model.as_one_partition():
            merged += model_psnr(pipeline.model, camera, batch)
    return (sum(boxed) / len(boxed), sum(merged) / len(merged)) if boxed else None


def model_psnr(model: SplaxelModel, camera: Cameras, batch: dict[str, Any]) -> list[float]:
    """PSNR (dB) of one view against its photograph; nothing if it is masked entirely."""
    metrics = model.get_metrics_dict(model.get_outputs_for_camera(camera), batch)
    return [float(metrics["psnr"])] if "psnr" in metrics else []


def even_picks(num: int, wanted: int) -> list[int]:
    """At most `wanted` of the numbers below `num`, evenly spaced."""
    return sorted({int(index) for index in np.linspace(0, num - 1, min(num, wanted))}) if min(num, wanted) > 0 else []


@torch.no_grad()
def merge_psnr(model: SplaxelModel, cameras: Cameras, num_views: int) -> float | None:
    """PSNR (dB) between the model drawn in its boxes and as one: what another program will show, without boxes.

    Views are spread evenly over the training cameras. None where there is nothing to compare (one box, no camera);
    infinite where all pictures are equal.
    """
    picks = even_picks(len(cameras), num_views)
    if model.tree.num_partitions == 1 or not picks:
        return None
    squared = 0.0
    for index in track(picks, "Drawing with and without boxes", transient=True):
        camera = cameras[index : index + 1]
        boxed = model.get_outputs_for_camera(camera)["rgb"]
        with model.as_one_partition():
            merged = model.get_outputs_for_camera(camera)["rgb"]
        squared += float(((boxed - merged).double() ** 2).mean()) / len(picks)
    return float("inf") if squared == 0 else -10 * float(np.log10(squared))


@dataclass
class Export:
    """Write every Gaussian of a trained splaxel model into one PLY, in the frame its photographs came in.

    Needs the run's folder and the data set's poses, not its photographs.
    """

    load_config: Path
    """config.yml of the run."""
    output_dir: Path
    """Folder for splat.ply and splat.json."""
    offset: tuple[float, float, float] | None = None
    """Subtracted from every position (input units). Default: nothing, or the scene's centre where coordinates are
    too large for float32; written to splat.json and into the PLY's comment."""
    check_views: int = 4
    """Views drawn with and without the partitions' boxes, and as many held-out photographs compared with both, to say
    what other programs will show. 0: none."""

    def main(self) -> None:
        if self.offset is not None and not np.isfinite(self.offset).all():
            raise ValueError(f"--offset is {' '.join(map(str, self.offset))}; it must be three finite numbers")
        path = self.output_dir / "splat.ply"
        _require_writable(path)
        pipeline, checkpoint, step = load_run(self.load_config)
        model = pipeline.model
        frame = frame_of(pipeline.datamanager.train_dataparser_outputs)
        offset = choose_offset(model, frame) if self.offset is None else np.array(self.offset, np.float64)
        write_ply(path, model, frame, offset)
        summary: dict[str, Any] = {
            "gaussians": model.num_points,
            "checkpoint": checkpoint.name,
            "step": step,
            "offset": offset.tolist(),
            "partitions": model.tree.num_partitions,
            "boundary": model.config.boundary,
            "rasterize_mode": model.config.rasterize_mode,
        }
        _write_summary(path.with_suffix(".json"), summary)
        CONSOLE.print(
            f"{model.num_points} Gaussians in {path}; add {offset.tolist()} to get input coordinates.", markup=False
        )
        psnr = merge_psnr(model, pipeline.datamanager.train_dataset.cameras, self.check_views)
        photo = None if psnr is None else photo_psnr(pipeline, self.check_views)
        summary["psnr_boxes_against_merged"] = psnr if psnr is None or np.isfinite(psnr) else "equal"
        summary["psnr_photographs_boxes_merged"] = photo
        _write_summary(path.with_suffix(".json"), summary)
        if psnr is not None:
            CONSOLE.print(
                f"Drawn without its {model.tree.num_partitions} boxes (boundary {model.config.boundary}) the model "
                f"differs from itself (PSNR {psnr:.1f} dB): programs that read the PLY know no boxes."
            )
        if photo is not None:
            CONSOLE.print(f"Against held-out photographs: {photo[0]:.2f} dB with boxes, {photo[1]:.2f} dB without.")
        if model.config.rasterize_mode == "antialiased":
            CONSOLE.print("The model was trained antialiased: programs that draw without compensation show it thicker.")


def _write_summary(path: Path, summary: dict[str, Any]) -> None:
    with replacing(path) as file:
        file.write(json.dumps(summary, indent=2).encode() + b"\n")


def _require_writable(path: Path) -> None:
    """An unwritable folder is found before the model is loaded."""
    with replacing(path.with_name(path.name + ".probe")):
        pass
    path.with_name(path.name + ".probe").unlink()


def entrypoint() -> None:
    """The `splaxel-export` command."""
    tyro.extras.set_accent_color("bright_yellow")
    try:
        tyro.cli(Export).main()
    except (OSError, RuntimeError, ValueError) as error:
        raise SystemExit(f"splaxel-export: {error}") from error
