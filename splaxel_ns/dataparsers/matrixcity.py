"""`matrixcity`: the MatrixCity data set in every layout it is found in, with its own split into train and test.

The world frame depends on the training cameras that the camera files list, never on which photographs are present: a
trained model opens without them. Everything is float64 until the centre has been subtracted.

Shapes: N frames, M points.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Optional, Tuple, Type  # noqa: UP035  (tyro shows these on the command line)

import numpy as np
from nerfstudio.data.dataparsers.base_dataparser import DataParser, DataParserConfig
from nerfstudio.plugins.registry_dataparser import DataParserSpecification
from nerfstudio.utils.rich_utils import CONSOLE

from splaxel_ns.dataparsers.matrixcity_depth import (
    CENTIMETRES_PER_METRE,
    depth_folders,
    find_depth_files,
    points_from_depth,
    stock_reader_gain,
)
from splaxel_ns.dataparsers.matrixcity_frames import (
    METRES_PER_HECTOMETRE,
    FrameTable,
    check_one_unit,
    complete_intrinsics,
    read_frames,
)
from splaxel_ns.dataparsers.matrixcity_layout import (
    Layout,
    PhotographFinder,
    Selection,
    archive_of,
    find_layout,
    packed_message,
)
from splaxel_ns.dataparsers.matrixcity_points import (
    SeedPoints,
    choose_rows,
    crop_to_cameras,
    find_point_clouds,
    packed_point_clouds,
    random_points,
    read_point_clouds,
    searched_folders,
)
from splaxel_ns.dataparsers.normalise import NormalisedOutputs, WorldFrame, fit_world_frame, make_cameras, make_outputs
from splaxel_ns.dataparsers.photos import check_photographs, reconcile_intrinsics

_AERIAL_SIZE, _STREET_SIZE = (1920.0, 1080.0), (1000.0, 1000.0)  # pixels, as distributed
_AERIAL_FOV, _STREET_FOV = np.pi / 4, np.pi / 2
_DEFAULT_DATA = Path("matrixcity/small_city/aerial")
_MAX_SEED_POINTS = 1_000_000
_CROP_OVERSAMPLING = 8  # a cloud of a whole city is read this much denser than one block of it needs
_LEAST_MARGIN = 100.0  # metres around the cameras: in a street they see that far
_FEWEST_IN_VIEW = 0.001  # share of a cloud around the cameras below which it is not theirs


@dataclass
class MatrixCityDataParserConfig(DataParserConfig):
    """The MatrixCity data set."""

    _target: Type = field(default_factory=lambda: MatrixCityDataParser)  # noqa: UP006
    """target class to instantiate"""
    data: Path = _DEFAULT_DATA
    """Folder of a scene (matrixcity/small_city/aerial), of a city, of the whole data set, or of one block
    (.../pose/block_A, .../train/block_1)."""
    scene: str = "auto"
    """Which scene below the data folder: aerial, street, small_city/aerial, fusion, ... auto takes the only one, or of
    a city the aerial one."""
    block: Tuple[str, ...] = ()  # noqa: UP006
    """Blocks to use: A, block_all, 1 2, down, ... (names of folders, long or short). If empty: pose/block_all where it
    is there, else every raw block."""
    dense: bool = False
    """Street: train on the dense cameras (train_dense, every metre) instead of every five metres."""
    road_outside: bool = False
    """Street, raw blocks: also use the roads outside the city (small_city_road_outside), which the paper leaves out."""
    all_frames: bool = False
    """Raw blocks: use every rendered frame (transforms_origin.json), also those that look outside the map."""
    on_problem: Literal["stop", "skip"] = "stop"
    """What to do when photographs are missing, empty, cut off or unreadable: stop with a summary, or go on without
    them."""
    seed_points: Literal["auto", "ply", "depth", "random"] = "auto"
    """Where training starts: a point cloud, pixels of depth maps, or random points around the cameras. auto takes the
    first of these that is there and says which."""
    point_cloud: Optional[Path] = None  # noqa: UP045
    """Point cloud (.ply) to start from. If not set: Block_*.ply in <city>_pointcloud/point_cloud_ds20/<view>/."""
    point_cloud_unit: float = METRES_PER_HECTOMETRE
    """Metres per unit of the point cloud: 100 as distributed, 1 for a cloud that was converted to metres."""
    max_seed_points: int = _MAX_SEED_POINTS
    """Use a random subset of that many seed points; 0 for all of a point cloud."""
    num_random_points: int = 100_000
    """Number of random points, with seed_points random or where there is nothing else."""
    seed: int = 42
    """Seed of the random numbers that choose seed points."""
    depth_seed_frames: int = 400
    """Seed points come from at most that many depth maps, spread evenly over the training cameras; 0 for all."""
    max_depth: float = 650.0
    """Depth in metres beyond which depth maps are not used (float16 maps end at 655 m, and the sky has a depth)."""
    depth_edge_threshold: float = 0.05
    """Leave out depth pixels next to a jump of more than this part of the depth: anti-aliased edges lie in the air. 0
    uses all pixels."""
    load_depth: bool = False
    """Hand depth maps to methods that train on them (metadata depth_filenames, depth_unit_scale_factor). Every
    photograph must have one."""
    auto_scale_poses: bool = True
    """Whether to scale the world (cameras, points and depth alike) so that the training cameras fit into +/- 1."""
    scale_factor: float = 1.0
    """How much to scale the world, after auto_scale_poses."""


@dataclass(frozen=True, eq=False)
class _Photographs:
    """The usable frames of one split."""

    table: FrameTable  # N frames
    files: list[Path]  # [N]
    intrinsics: np.ndarray  # [N, 4] float64, for `sizes`
    sizes: np.ndarray  # [N, 2] float64, pixels


class MatrixCityDataParser(DataParser):
    """Finds the camera files once, and hands out the splits."""

    config: MatrixCityDataParserConfig
    photographs_needed: bool = True
    """Set to False to open a trained model where its photographs are not: then none is looked at."""

    def __init__(self, config: MatrixCityDataParserConfig):
        super().__init__(config)
        self._layout: Layout | None = None
        self._tables: dict[str, FrameTable] = {}
        self._found: dict[str, _Photographs] = {}
        self._finder = PhotographFinder()
        self._said: set[str] = set()

    def _generate_dataparser_outputs(self, split: str = "train", **kwargs) -> NormalisedOutputs:
        """Cameras and files of "train" (with seed points) or of the test cameras ("val" and "test", maybe none).

        Raises:
            ValueError: the data cannot be used as it is; names file, value and remedy.
            RuntimeError: depth maps are wanted and no library here reads them.
        """
        if split not in ("train", "val", "test"):
            raise ValueError(f"Unknown split '{split}': MatrixCity has train, and test (also called val).")
        if self.config.max_seed_points < 0 or self.config.num_random_points < 0 or self.config.depth_seed_frames < 0:
            raise ValueError("max_seed_points, num_random_points and depth_seed_frames must not be negative.")
        layout = self._find_layout()
        train = self._read_table("train")
        if len(train) == 0:
            raise ValueError(f"No training camera in {', '.join(map(str, layout.train))}.")
        table = train if split == "train" else self._read_table("test")
        metres_per_unit = check_one_unit(train, table)
        frame = fit_world_frame(train.poses[:, :3, 3], self.config.auto_scale_poses, self.config.scale_factor)
        photographs = self._photographs(table, "train" if split == "train" else "test")
        points = self._seed_points(photographs, metres_per_unit) if split == "train" else None
        with_depth = self.config.load_depth and self.photographs_needed
        metadata = self._depth_metadata(photographs, metres_per_unit) if with_depth else {}
        return self._outputs(frame, photographs, points, metadata)

    def _outputs(
        self, frame: WorldFrame, photographs: _Photographs, points: SeedPoints | None, metadata: dict
    ) -> NormalisedOutputs:
        table = photographs.table
        cameras = make_cameras(
            frame.poses_to_model(table.poses),
            *photographs.intrinsics.T,
            widths=photographs.sizes[:, 0],
            heights=photographs.sizes[:, 1],
            distortion=table.distortion if table.distortion.any() else None,
        )
        return make_outputs(frame, photographs.files, cameras, points, metadata=metadata)

    def _find_layout(self) -> Layout:
        if self._layout is None:
            config = self.config
            selection = Selection(
                config.scene, tuple(config.block), config.dense, config.road_outside, config.all_frames
            )
            if config.data == _DEFAULT_DATA and not config.data.exists() and archive_of(config.data) is None:
                raise ValueError(
                    f"--data was not given (or is its default): {config.data} does not exist in {Path.cwd()}. Give the "
                    "folder of a scene; other data than MatrixCity needs the name of its dataparser as well "
                    "(ns-train splaxel splaxel-colmap --data FOLDER)."
                )
            self._layout = find_layout(config.data, selection)
            for note in self._layout.notes:
                self._say(note)
        return self._layout

    def _read_table(self, split: Literal["train", "test"]) -> FrameTable:
        """The frames of a split that have a finite pose; the names of the others are printed."""
        if split not in self._tables:
            layout = self._find_layout()
            files = layout.train if split == "train" else layout.test
            self._tables[split], dropped = read_frames(files, layout.root)
            if dropped:
                shown = ", ".join(dropped[:5]) + (", ..." if len(dropped) > 5 else "")
                self._say(f"Warning: {len(dropped)} {split} camera(s) without a finite pose left out: {shown}")
            names = [os.path.relpath(path, layout.root) for path in files]
            where = ", ".join(names[:4]) + (f", ... ({len(names)} files)" if len(names) > 4 else "")
            self._say(f"{split}: {len(self._tables[split])} cameras of {layout.root} ({where})")
        return self._tables[split]

    def _photographs(self, table: FrameTable, split: Literal["train", "test"]) -> _Photographs:
        """The usable frames of a split; files are looked at once."""
        if not self.photographs_needed:
            return self._without_photographs(table)
        if split not in self._found:
            self._found[split] = self._find_photographs(table, optional=split == "test")
        return self._found[split]

    def _find_photographs(self, table: FrameTable, optional: bool) -> _Photographs:
        """Match cameras with files, and intrinsics with the files' sizes.

        `optional` photographs may all be missing when problems are skipped: training needs none to evaluate on.
        """
        layout = self._find_layout()
        files = [self._finder.find(path) for path in table.paths]
        if optional and self.config.on_problem == "skip" and not any(map(self._finder.exists, files)):
            if files:
                self._say(f"Warning: none of the {len(files)} test photographs is there: nothing to evaluate on")
            table, files = table.take(np.zeros(len(table), dtype=bool)), []
        self._check_folders(list(table.paths), files)
        report = check_photographs(files, on_problem=self.config.on_problem, root=layout.root)
        if report.problems:
            self._say(f"Warning: {report.summary}")
        table = table.take(report.kept)
        files = [files[row] for row in report.kept]
        file_sizes = report.sizes.astype(np.float64)
        camera_sizes = np.where(np.isnan(table.sizes), file_sizes, table.sizes)
        intrinsics, note = reconcile_intrinsics(
            complete_intrinsics(table.intrinsics, table.angles, camera_sizes),
            camera_sizes,
            file_sizes,
            [os.path.relpath(path, layout.root) for path in files],
            report.orientations,
        )
        if note:
            self._say(f"Warning: {note}")
        return _Photographs(table, files, intrinsics, file_sizes)

    def _check_folders(self, nominals: Sequence[Path], files: Sequence[Path]) -> None:
        """Speak of folders, not of thousands of files, where a whole block is packed, moved or not downloaded."""
        missing: dict[Path, list[bool]] = {}
        for nominal, file in zip(nominals, files, strict=True):
            missing.setdefault(nominal.parent, []).append(not self._finder.exists(file))
        strict = self.config.on_problem == "stop"
        lacking = [folder for folder, gaps in missing.items() if all(gaps) or (strict and any(gaps))]
        packed = [(archive, folder) for folder in lacking if (archive := archive_of(folder)) is not None]
        if packed:
            raise ValueError(packed_message(packed))
        empty = [folder for folder, gaps in missing.items() if all(gaps)]
        if empty and (strict or len(empty) == len(missing)):
            example = next(path for path in nominals if path.parent == empty[0])
            there = sorted({folder.name for folder in missing} - {folder.name for folder in empty})
            remedy = f", or choose what is there with --block (found: {' '.join(there[:12])})" if there else ""
            raise ValueError(
                f"No photographs for {len(empty)} of {len(missing)} block folders, the first {empty[0]}: looked for "
                f"{example.name} (or its stem with another image suffix) there and in its subfolders input, rgb and "
                f"images, and for {empty[0].name}.tar. Download and unpack them{remedy}, or go on without them with "
                f"--on-problem skip."
            )

    def _without_photographs(self, table: FrameTable) -> _Photographs:
        """Sizes from the camera files, else those of the data set as distributed."""
        street = self._find_layout().view == "street"
        known = np.tile(_STREET_SIZE if street else _AERIAL_SIZE, (len(table), 1))
        known[np.abs(table.angles - _AERIAL_FOV) < 1e-3] = _AERIAL_SIZE
        known[np.abs(table.angles - _STREET_FOV) < 1e-3] = _STREET_SIZE
        sizes = np.where(np.isnan(table.sizes), known, table.sizes)
        intrinsics = complete_intrinsics(table.intrinsics, table.angles, sizes)
        return _Photographs(table, list(table.paths), intrinsics, np.rint(sizes))

    def _seed_points(self, photographs: _Photographs, metres_per_unit: float) -> SeedPoints | None:
        """Positions in input units and colours, from the first source that is there or the one that is asked for."""
        config, layout = self.config, self._find_layout()
        wanted = config.seed_points
        if config.point_cloud is not None and wanted not in ("auto", "ply"):
            raise ValueError(f"--point-cloud is given but --seed-points is {wanted}. Leave one of them out.")
        if wanted in ("auto", "ply"):
            clouds, more = ([config.point_cloud], False) if config.point_cloud else find_point_clouds(layout)
            if clouds and (self.photographs_needed or clouds[0].is_file()):
                return self._points_from_clouds(clouds, more, metres_per_unit)
            if self.photographs_needed:
                self._miss_point_cloud()
        if not self.photographs_needed:
            return None  # a trained model brings its own points
        if wanted in ("auto", "depth"):
            points = self._points_from_depth(photographs, metres_per_unit)
            if points is not None:
                return points
        return self._random_points(photographs, metres_per_unit)

    def _miss_point_cloud(self) -> None:
        """Say how to get one; stop if one was asked for."""
        layout = self._find_layout()
        archives = packed_point_clouds(layout)
        help_text = "Give its path with --point-cloud, or choose other --seed-points."
        if archives:
            folder = shlex.quote(str(archives[0].parent))
            help_text = f"{archives[0]} is not unpacked: unzip {shlex.quote(str(archives[0]))} -d {folder}"
        if self.config.seed_points == "ply":
            raise ValueError(f"No Block_*.ply for {layout.root} in {searched_folders(layout)}. {help_text}")
        if archives:
            self._say(f"Warning: no point cloud used. {help_text}")

    def _points_from_clouds(self, clouds: Sequence[Path], more: bool, metres_per_unit: float) -> SeedPoints:
        """Read clouds; from a cloud of more than the selected blocks take what lies around the cameras."""
        config = self.config
        limit = config.max_seed_points
        points, colors = read_point_clouds(clouds, limit * _CROP_OVERSAMPLING if more else limit, config.seed)
        points = points * (config.point_cloud_unit / metres_per_unit)
        margin = _LEAST_MARGIN / metres_per_unit
        around = crop_to_cameras(points, self._tables["train"].poses[:, :3, 3], margin)
        names = ", ".join(map(str, clouds))
        if not around.any() or (not more and around.mean() < _FEWEST_IN_VIEW):
            raise ValueError(
                f"{names}: only {int(around.sum())} of {len(around)} points lie around the cameras. Is it the cloud of "
                f"another part, or in other units? --point-cloud-unit is {config.point_cloud_unit:g} metres per unit; "
                f"--seed-points random starts without a cloud."
            )
        if more:
            points, colors = points[around], colors[around]
            rows = choose_rows(len(points), limit, config.seed)
            points, colors = points[rows], colors[rows]
        self._say(f"Seed points: {len(points)} from {names}")
        return points, colors

    def _points_from_depth(self, photographs: _Photographs, metres_per_unit: float) -> SeedPoints | None:
        """Lift pixels of depth maps; None if there is no map and it need not be."""
        config = self.config
        files = find_depth_files(photographs.files, list(photographs.table.paths))
        rows = np.flatnonzero([file is not None for file in files])
        if len(rows) == 0:
            if config.seed_points == "depth":
                folder = photographs.table.paths[0].parent
                raise ValueError(
                    f"No depth map for any training camera: looked in {depth_folders(folder)}, and likewise for the "
                    f"other blocks. Unpack the depth archives there, or choose other --seed-points."
                )
            return None
        if config.depth_seed_frames:
            rows = rows[choose_rows(len(rows), config.depth_seed_frames, config.seed)]
        points, colors = points_from_depth(
            [file for row in rows if (file := files[row]) is not None],
            [photographs.files[row] for row in rows],
            photographs.table.poses[rows],
            photographs.intrinsics[rows],
            photographs.sizes[rows],
            metres_per_unit=metres_per_unit,
            limit=config.max_seed_points or _MAX_SEED_POINTS,
            max_depth=config.max_depth,
            edge_threshold=config.depth_edge_threshold,
            seed=config.seed,
        )
        if len(points) == 0:
            raise ValueError(f"No valid pixel in {len(rows)} depth maps, the first {files[rows[0]]}: see --max-depth.")
        self._say(f"Seed points: {len(points)} pixels of {len(rows)} depth maps")
        return points, colors

    def _random_points(self, photographs: _Photographs, metres_per_unit: float) -> SeedPoints | None:
        config = self.config
        count = min(config.num_random_points, config.max_seed_points or config.num_random_points)
        if config.seed_points == "auto":
            searched = searched_folders(self._find_layout())
            self._say(f"Warning: no point cloud in {searched} and no depth maps: starting from {count} random points")
        else:
            self._say(f"Seed points: {count} random ones around the cameras")
        roofs = 50.0 / metres_per_unit  # metres: most roofs of MatrixCity are lower
        return random_points(photographs.table.poses, count, config.seed, roofs)

    def _depth_metadata(self, photographs: _Photographs, metres_per_unit: float) -> dict:
        """What nerfstudio's DepthDataset reads; it multiplies the factor with `dataparser_scale`."""
        files = find_depth_files(photographs.files, list(photographs.table.paths))
        lacking = [path for path, file in zip(photographs.table.paths, files, strict=True) if file is None]
        if lacking:
            raise ValueError(
                f"--load-depth needs a depth map for every photograph; {len(lacking)} of {len(files)} have none, the "
                f"first {lacking[0]}. Looked in {depth_folders(lacking[0].parent)}."
            )
        if not files:
            return {}
        gain = stock_reader_gain([file for file in files if file is not None][0])
        return {
            "depth_filenames": files,
            "depth_unit_scale_factor": 1.0 / (CENTIMETRES_PER_METRE * metres_per_unit * gain),
        }

    def _say(self, text: str) -> None:
        """Print once; paths may hold brackets, which must not be read as markup."""
        if text not in self._said:
            self._said.add(text)
            style = "bold yellow" if text.startswith("Warning") else None
            CONSOLE.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


matrixcity = DataParserSpecification(
    config=MatrixCityDataParserConfig(),
    description="MatrixCity: small and big city, aerial, street and fusion, as distributed or unpacked by others",
)
