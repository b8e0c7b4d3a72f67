"""`splaxel-colmap`: COLMAP models as people have them, with their photographs, checked before training starts.

Differs from nerfstudio's `colmap` parser in what goes wrong there: it finds the model by itself, keeps names and
coordinates exact, drops unusable poses by name, compares the sizes of files and cameras, and never asks questions.
Options of the same name mean the same.

The world frame and the split depend on the model alone, never on which photographs are present: a trained model
opens without them.

Letters: N registered images, M seed points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from nerfstudio.cameras.cameras import CameraType
from nerfstudio.data.dataparsers.base_dataparser import DataParser, DataParserConfig
from nerfstudio.plugins.registry_dataparser import DataParserSpecification
from nerfstudio.utils.rich_utils import CONSOLE

from splaxel_ns.dataparsers.colmap_cameras import Lenses, camera_to_world, pinhole_lenses, usable_rows
from splaxel_ns.dataparsers.colmap_model import find_model, read_cameras, read_images, read_points
from splaxel_ns.dataparsers.normalise import NormalisedOutputs, WorldFrame, fit_world_frame, make_cameras, make_outputs
from splaxel_ns.dataparsers.orientation import CenterMethod, OrientationMethod, choose_center, choose_rotation
from splaxel_ns.dataparsers.photos import check_photographs, list_photographs, match_names, reconcile_intrinsics
from splaxel_ns.dataparsers.splits import EvalMode, split_images

_IMAGE_FOLDERS = ("images", "input", "image")


@dataclass
class SplaxelColmapDataParserConfig(DataParserConfig):
    """A COLMAP model and its photographs."""

    _target: type = field(default_factory=lambda: SplaxelColmapDataParser)
    """target class to instantiate"""
    data: Path = Path()
    """Folder that holds the model (found by itself: sparse/0, sparse, colmap/sparse/0, dense/sparse, or the folder
    itself; of several numbered models the one with most images) and the photographs."""
    colmap_path: Path | None = None
    """Folder of the COLMAP model, relative to the data folder. If not set, it is looked for."""
    images_path: Path | None = None
    """Folder of the photographs, relative to the data folder. If not set: images/, input/ or image/ beside the model
    or above it, else the data folder."""
    masks_path: Path | None = None
    """Folder of masks, relative to the data folder: one per photograph at the same path below it, with .png appended
    or in place of the extension; black is left out. If not set, masks are not used."""
    on_problem: Literal["stop", "skip"] = "stop"
    """What to do when photographs are missing, empty, cut off or unreadable: stop with a summary, or go on without
    them."""
    downscale_factor: int | None = None
    """Use the photographs in <images folder>_<factor>, for example images_2. To scale while loading instead, use
    --pipeline.datamanager.camera-res-scale-factor."""
    scale_factor: float = 1.0
    """How much to scale the world, after auto_scale_poses."""
    orientation_method: OrientationMethod = "auto"
    """How to turn the world so that z points up. auto keeps the model's axes where z points up already (georeferenced
    models), lays surveys from above level, and is up otherwise; the others are nerfstudio's."""
    center_method: CenterMethod = "poses"
    """What becomes the origin: the mean camera, what the cameras look at, or the model's origin."""
    auto_scale_poses: bool = True
    """Whether to scale the world so that the cameras fit into +/- 1."""
    assume_colmap_world_coordinate_convention: bool = True
    """Turn COLMAP's guess of gravity (y down) to z up: the result of orientation_method none, a matter of the heading
    for the others, without effect where auto keeps the axes."""
    eval_mode: EvalMode = "interval"
    """How to hold out images for evaluation: every nth; a fraction, spread evenly; those with eval in their name;
    or all, which trains on them too."""
    eval_interval: int = 8
    """Hold out every nth image, in the order of their ids in the model; 0 holds out none."""
    train_split_fraction: float = 0.9
    """Share of images that is trained on, with eval_mode fraction."""
    eval_images: tuple[str, ...] = ()
    """Names of the images to hold out, as in the model, or the file name alone where only one image has it. Overrides
    eval_mode."""
    load_3D_points: bool = True
    """Whether to start from the model's points. Without them the method starts from random ones."""


@dataclass(frozen=True)
class _Scene:
    """What all splits share. Rows are the registered images that can be used, in the order of their ids."""

    frame: WorldFrame
    poses: np.ndarray  # [N, 3, 4] float64, camera to world (OpenGL), model frame
    lenses: Lenses  # [N]
    paths: list[Path]  # [N]
    masks: list[Path] | None  # [N]
    train: np.ndarray  # [N] bool
    held_out: np.ndarray  # [N] bool
    points: tuple[np.ndarray, np.ndarray] | None  # [M, 3] float64 input frame, [M, 3] uint8


class SplaxelColmapDataParser(DataParser):
    """Reads a COLMAP dataset once and hands out its splits."""

    config: SplaxelColmapDataParserConfig
    photographs_needed: bool = True
    """Set to False to open a trained model where its photographs are not."""

    def __init__(self, config: SplaxelColmapDataParserConfig):
        super().__init__(config)
        self._scenes: dict[bool, _Scene] = {}

    def _generate_dataparser_outputs(self, split: str = "train", **kwargs) -> NormalisedOutputs:
        """Cameras, files and seed points of "train", or of the images held out ("val", "test"; may be none).

        Raises:
            ValueError: model or photographs cannot be used; names file, value and remedy.
        """
        if split not in ("train", "val", "test"):
            raise ValueError(f"split is '{split}'; it must be train, val or test.")
        if self.photographs_needed not in self._scenes:
            self._scenes[self.photographs_needed] = self._read_scene()
        scene = self._scenes[self.photographs_needed]
        rows = np.flatnonzero(scene.train if split == "train" else scene.held_out)
        lenses = scene.lenses.take(rows)
        cameras = make_cameras(
            scene.poses[rows],
            *lenses.intrinsics.T,
            widths=lenses.sizes[:, 0],
            heights=lenses.sizes[:, 1],
            distortion=lenses.distortion if scene.lenses.distortion.any() else None,
        )
        # The dataset undistorts, after which every camera is a pinhole.
        kinds = np.where(lenses.fisheye, CameraType.FISHEYE.value, CameraType.PERSPECTIVE.value)
        cameras.camera_type = torch.from_numpy(kinds)[:, None]
        return make_outputs(
            scene.frame,
            [scene.paths[row] for row in rows],
            cameras,
            points=scene.points,
            mask_filenames=None if scene.masks is None else [scene.masks[row] for row in rows],
        )

    def _read_scene(self) -> _Scene:
        config = self.config
        data = config.data.expanduser()
        with CONSOLE.status("Reading the COLMAP model"):
            model, note = find_model(data / config.colmap_path if config.colmap_path else data)
            images, cameras = read_images(model), read_cameras(model)
            points = read_points(model) if config.load_3D_points else None
        if note:
            _say(note)
        train, held_out = split_images(
            images.names, config.eval_mode, config.eval_interval, config.train_split_fraction, config.eval_images
        )
        rows, notes = usable_rows(images)
        for note in notes:
            _say(note)
        if not len(rows):
            raise ValueError(f"The COLMAP model {model} has {len(images.names)} images and none with a usable pose.")
        folder, paths = self._find_photographs(data, model, images.names)
        images, paths = images.take(rows), [paths[row] for row in rows]
        train, held_out = train[rows], held_out[rows]
        lenses = pinhole_lenses(images, cameras, model)
        poses = camera_to_world(images)
        frame = self._fit_frame(poses)

        masks = None
        rows = np.arange(len(paths))
        if self.photographs_needed:
            rows, lenses = self._check_photographs(folder, paths, images.names, lenses)
            if config.masks_path is not None:
                mask_folder = self._mask_folder(data)
                masks = self._find_masks(mask_folder, folder, [paths[row] for row in rows])
                kept = self._check_masks(mask_folder, masks, lenses.sizes)
                rows, lenses, masks = rows[kept], lenses.take(kept), [masks[k] for k in kept]
        elif config.downscale_factor:
            lenses = lenses.resized(np.maximum(lenses.sizes // config.downscale_factor, 1))
        if not train[rows].any():
            raise ValueError(
                f"All usable photographs in {folder} are held out for evaluation; none is left to train on."
            )
        return _Scene(
            frame=frame,
            poses=frame.poses_to_model(poses[rows]),
            lenses=lenses,
            paths=[paths[row] for row in rows],
            masks=masks,
            train=train[rows],
            held_out=held_out[rows],
            points=None if points is None else _finite_points(*points),
        )

    def _fit_frame(self, poses: np.ndarray) -> WorldFrame:
        """The model frame of all cameras, whether or not their photographs are present."""
        config = self.config
        rotation = choose_rotation(poses, config.orientation_method, config.assume_colmap_world_coordinate_convention)
        centre = choose_center(poses, config.center_method)
        # Mirrored about the origin to be, the positions have it as their mean (up to rounding).
        mirrored = np.concatenate([poses[:, :, 3], 2.0 * centre - poses[:, :, 3]])
        frame = fit_world_frame(mirrored, config.auto_scale_poses, config.scale_factor, rotation)
        return replace(frame, centre=centre)

    def _scaled(self, folder: Path) -> Path:
        """The folder of the copies that `downscale_factor` asks for."""
        factor = self.config.downscale_factor
        if factor is not None and factor < 1:
            raise ValueError(f"downscale_factor is {factor}; it must be a whole number from 1.")
        return folder.with_name(f"{folder.name}_{factor}") if factor is not None and factor > 1 else folder

    def _find_photographs(self, data: Path, model: Path, names: Sequence[str]) -> tuple[Path, list[Path]]:
        """The image folder, and where each named photograph is or would be.

        Raises:
            ValueError: photographs are needed and no folder holds any of them.
        """
        folders = [self._scaled(folder) for folder in self._image_folders(data, model)]
        if not self.photographs_needed:
            usual = self._scaled(data / (self.config.images_path or _IMAGE_FOLDERS[0]))
            folder = next((folder for folder in folders[:-1] if folder.is_dir()), usual)
            return folder, [folder / name.replace("\\", "/") for name in names]
        for folder in folders:
            if folder.is_dir():
                listing = list_photographs(folder)
                paths = match_names(names, listing, folder)
                if any(path.is_file() for path in paths):
                    extra = len(set(listing.values()) - set(paths))
                    if extra:
                        _say(f"Photographs in {folder} that the COLMAP model does not have, and are not used: {extra}.")
                    return folder, paths
        looked = ", ".join(str(folder) for folder in folders if folder.is_dir()) or f"{folders[0]} (not there)"
        there = ", ".join(sorted(child.name for child in data.iterdir() if child.is_dir()))
        remedy = (
            f"Folders in {data}: {there}. Name the right one with --images-path, or --downscale-factor N for images_N."
        )
        if self.config.downscale_factor:
            remedy += " To scale full-size photographs while loading, leave out --downscale-factor and use"
            remedy += " --pipeline.datamanager.camera-res-scale-factor before the parser's name."
        raise ValueError(f"None of the {len(names)} registered photographs (first '{names[0]}') in {looked}. {remedy}")

    def _image_folders(self, data: Path, model: Path) -> list[Path]:
        """Where photographs may lie, most likely first."""
        if self.config.images_path is not None:
            return [data / self.config.images_path]
        data, folder = data.absolute(), model.absolute()
        parents = [folder]
        while folder != data and data in folder.parents:
            folder = folder.parent
            parents.append(folder)
        while folder.name.isdecimal() or folder.name in ("sparse", "colmap"):  # --data is the model itself
            folder = folder.parent
            parents.append(folder)
        folders = []
        for parent in parents:
            spelled = {child.name.lower(): child for child in sorted(parent.iterdir(), reverse=True)}  # Images/
            folders += [spelled.get(name, parent / name) for name in _IMAGE_FOLDERS]
        return [*folders, data]

    def _check_photographs(
        self, folder: Path, paths: list[Path], names: Sequence[str], lenses: Lenses
    ) -> tuple[np.ndarray, Lenses]:
        """Rows whose photographs can be used, and their lenses at the size of the files."""
        report = check_photographs(paths, on_problem=self.config.on_problem, root=folder)
        _say(f"Photographs in {folder}: {report.summary}")
        lenses = lenses.take(report.kept)
        kept_names = [names[int(row)] for row in report.kept]
        intrinsics, note = reconcile_intrinsics(
            lenses.intrinsics, lenses.sizes, report.sizes, kept_names, report.orientations
        )
        if note:
            _say(note)
        return report.kept, replace(lenses, intrinsics=intrinsics, sizes=report.sizes)

    def _mask_folder(self, data: Path) -> Path:
        assert self.config.masks_path is not None
        folder = data / self.config.masks_path
        scaled = self._scaled(folder)
        folder = scaled if scaled.is_dir() else folder
        if not folder.is_dir():
            raise ValueError(f"The mask folder {folder} is not there. Correct or leave out --masks-path.")
        return folder

    def _find_masks(self, root: Path, folder: Path, paths: Sequence[Path]) -> list[Path]:
        """The mask of each photograph: the same path below the mask folder, .png appended or instead."""
        below = [path.relative_to(folder) if path.is_relative_to(folder) else path for path in paths]
        forms = (
            [f"{path.as_posix()}.png" for path in below],
            [path.with_suffix(".png").as_posix() for path in below],
            [path.as_posix() for path in below],
        )
        listing = list_photographs(root)
        candidates = [match_names(names, listing, root) for names in forms]
        return [next((mask for mask in masks if mask.is_file()), masks[0]) for masks in zip(*candidates, strict=True)]

    def _check_masks(self, root: Path, masks: Sequence[Path], sizes: np.ndarray) -> np.ndarray:
        """Rows whose masks can be used; sizes [N, 2] are those of the photographs.

        Raises:
            ValueError: a mask is missing or damaged and the option says to stop, or has other proportions than its
                photograph (the dataset resizes those of the same proportions).
        """
        report = check_photographs(masks, on_problem=self.config.on_problem, root=root, what="Masks")
        if report.problems:
            _say(f"Masks in {root}: {report.summary} Photographs without one are left out.")
        kept = sizes[report.kept]
        wrong = np.flatnonzero(np.abs(report.sizes[:, 0] * kept[:, 1] - report.sizes[:, 1] * kept[:, 0]) >= kept.max(1))
        if len(wrong):
            mask, photo = report.sizes[wrong[0]], kept[wrong[0]]
            raise ValueError(
                f"The mask {masks[report.kept[wrong[0]]]} has {mask[0]}x{mask[1]} pixels, its photograph "
                f"{photo[0]}x{photo[1]} ({len(wrong)} such masks). Make masks of the proportions of the photographs."
            )
        return report.kept


def _finite_points(xyz: np.ndarray, rgb: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # [M, 3], [M, 3]
    """Points with finite positions; says what was dropped and when none is left."""
    finite = np.isfinite(xyz).all(axis=1)
    if not finite.all():
        _say(f"Left out {int((~finite).sum())} of {len(xyz)} points: their positions are not finite.")
    if not finite.any():
        _say("The COLMAP model has no usable points to start from.")
    return xyz[finite], rgb[finite]


def _say(text: str) -> None:
    """Print as it is: names may hold square brackets, which are markup to rich."""
    CONSOLE.print(text, markup=False, highlight=False, soft_wrap=True)


splaxel_colmap = DataParserSpecification(
    config=SplaxelColmapDataParserConfig(),
    description="COLMAP models, binary or text, found by themselves and checked before training",
)
