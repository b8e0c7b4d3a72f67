"""`splaxel-export`: every Gaussian of a trained model into one PLY, in the frame its photographs came in.

Stock `ns-export gaussian-splat` works on our models too; it stays in the model's frame and drops faint Gaussians.

Shapes: N Gaussians, K spherical harmonics coefficients per colour.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from nerfstudio.utils.eval_utils import eval_setup
from nerfstudio.utils.rich_utils import CONSOLE
from rich.progress import track

from splaxel_ns.model import SplaxelModel

CHUNK = 1 << 16
"""Gaussians converted and written at a time: bounds the memory beside the model itself."""


@dataclass(frozen=True)
class Similarity:
    """input = (1 / scale) * rotation^T @ model + centre."""

    rotation: np.ndarray  # [3, 3] float64, input axes to model axes
    centre: np.ndarray  # [3] float64, input units
    scale: float  # model units per input unit

    @staticmethod
    def of(dataparser_outputs: Any) -> Similarity:
        """The frame of any nerfstudio dataparser: `dataparser_transform`, then `dataparser_scale`."""
        transform = dataparser_outputs.dataparser_transform.double().numpy(force=True)
        rotation = transform[:3, :3]
        return Similarity(rotation, -(rotation.T @ transform[:3, 3]), float(dataparser_outputs.dataparser_scale))

    def points_to_input(self, points: np.ndarray) -> np.ndarray:  # [N, 3] -> [N, 3] float64
        return (points.astype(np.float64) / self.scale) @ self.rotation + self.centre


def rotate_quats(quats: np.ndarray, rotation: np.ndarray) -> np.ndarray:  # [N, 4] wxyz -> [N, 4]
    """Orientations seen from axes turned by `rotation` (new from old, [3, 3])."""
    from viser.transforms import SO3

    turn = SO3.from_matrix(rotation)
    return np.asarray((turn @ SO3(quats / np.linalg.norm(quats, axis=-1, keepdims=True))).wxyz)


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


def rows(model: SplaxelModel, frame: Similarity, offset: np.ndarray) -> Iterator[np.ndarray]:
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


def choose_offset(model: SplaxelModel, frame: Similarity) -> np.ndarray:  # [3] float64
    """What to subtract before the cast to float32: nothing, unless the coordinates are too large for it.

    Float32 has 24 bits: at UTM's 3.3 million metres neighbours lie 0.25 m apart. The offset is whole units, so that
    it can be typed into other programs.
    """
    if model.num_points == 0:
        return np.zeros(3)
    sizes = torch.exp(model.scales.detach()).amax(dim=-1) / frame.scale
    largest = np.abs(frame.points_to_input(model.means.detach().numpy(force=True))).max()
    spacing = float(np.spacing(np.float32(largest)))
    return np.zeros(3) if spacing < 0.01 * float(sizes.median()) else np.round(frame.centre)


def write_ply(path: Path, model: SplaxelModel, frame: Similarity, offset: np.ndarray) -> None:
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
    partial = path.with_name(path.name + ".part")
    try:
        with open(partial, "wb") as file:
            file.write(header.encode())
            num_chunks = -(-model.num_points // CHUNK)
            for chunk in track(rows(model, frame, offset), "Writing Gaussians", total=num_chunks, transient=True):
                assert chunk.shape[1] == len(names)
                file.write(chunk.tobytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RuntimeError(
            f"cannot write {path}: {error.strerror}; free space or choose another --output-dir"
        ) from error


@torch.no_grad()
def photo_psnr(pipeline: Any) -> tuple[float, float] | None:
    """PSNR (dB) on the held-out photographs with the boxes and without; None where the photographs are absent."""
    files = pipeline.datamanager.eval_dataset.image_filenames
    if not files or not all(Path(file).exists() for file in files):
        return None
    boxed = pipeline.get_average_eval_image_metrics()["psnr"]
    with pipeline.model.as_one_partition():
        return boxed, pipeline.get_average_eval_image_metrics()["psnr"]


@torch.no_grad()
def merge_psnr(model: SplaxelModel, cameras: Any, num_views: int) -> float | None:
    """PSNR (dB) between the model drawn in its boxes and as one: what another program will show, without boxes.

    Views are spread evenly over the training cameras. None where there is nothing to compare (one box, no camera);
    infinite where all pictures are equal.
    """
    if model.tree.num_partitions == 1 or len(cameras) == 0:
        return None
    squared = 0.0
    picks = np.unique(np.linspace(0, len(cameras) - 1, num_views, dtype=int))
    for index in track(picks, "Drawing with and without boxes", transient=True):
        camera = cameras[int(index) : int(index) + 1]
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
    """Training views drawn with and without the partitions' boxes, to say what other programs will show."""

    def main(self) -> None:
        config, pipeline, checkpoint, step = eval_setup(self.load_config, test_mode="inference")
        model = pipeline.model
        if not isinstance(model, SplaxelModel):
            raise ValueError(f"{self.load_config} holds method {config.method_name!r}, not splaxel; use ns-export")
        outputs = pipeline.datamanager.train_dataparser_outputs
        frame = Similarity.of(outputs)
        offset = choose_offset(model, frame) if self.offset is None else np.array(self.offset, np.float64)
        self.output_dir.mkdir(parents=True, exist_ok=True)
        path = self.output_dir / "splat.ply"
        write_ply(path, model, frame, offset)
        psnr = merge_psnr(model, pipeline.datamanager.train_dataset.cameras, self.check_views)
        photo = None if psnr is None else photo_psnr(pipeline)
        summary = {
            "gaussians": model.num_points,
            "checkpoint": checkpoint.name,
            "step": step,
            "offset": offset.tolist(),
            "partitions": model.tree.num_partitions,
            "boundary": model.config.boundary,
            "rasterize_mode": model.config.rasterize_mode,
            "psnr_boxes_against_merged": psnr if psnr is None or np.isfinite(psnr) else "equal",
            "psnr_photographs_boxes_merged": photo,
        }
        (self.output_dir / "splat.json").write_text(json.dumps(summary, indent=2) + "\n")
        CONSOLE.print(f"{model.num_points} Gaussians in {path}; add {offset.tolist()} to get input coordinates.")
        if psnr is not None:
            CONSOLE.print(
                f"Drawn without its {model.tree.num_partitions} boxes (boundary {model.config.boundary}) the model "
                f"differs from itself (PSNR {psnr:.1f} dB): programs that read the PLY know no boxes."
            )
        if photo is not None:
            CONSOLE.print(f"Against the held-out photographs: {photo[0]:.2f} dB with boxes, {photo[1]:.2f} dB without.")


def entrypoint() -> None:
    """The `splaxel-export` command."""
    tyro.extras.set_accent_color("bright_yellow")
    try:
        tyro.cli(Export).main()
    except (RuntimeError, ValueError) as error:
        raise SystemExit(f"splaxel-export: {error}") from error
