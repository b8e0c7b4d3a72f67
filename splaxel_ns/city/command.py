"""`splaxel-city`: command line, processes that photograph, and a folder that appears only when it is whole."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from nerfstudio.utils.rich_utils import CONSOLE
from rich.progress import track

from splaxel_ns.city import layout
from splaxel_ns.city.cameras import Shot, aerial_shots, street_shots
from splaxel_ns.city.photograph import Light, Photographer, load_open3d
from splaxel_ns.city.streets import City, build_city
from splaxel_ns.dataparsers.matrixcity_depth import lift_depth

_LEAST_SIZE = 60.0  # metres: two streets and a block
_LEAST_PIXELS = 16  # the window of SSIM is 11
_FARTHEST_SEED = 650.0  # metres, as the dataparser's --max-depth
# What a process holds: measured 190 to 400 bytes for each triangle, 3 triangles per square metre, and the rest.
_BYTES_PER_AREA, _BYTES_PER_PROCESS = 1200, 3 << 28
Seeds = tuple[np.ndarray, np.ndarray]  # [M, 3] float64 metres, [M, 3] uint8


@dataclass(frozen=True)
class CityCommand:
    """Photograph a procedural city in MatrixCity's layout: aerial and street views, exact depth, seed points.

    Train on it with `ns-train splaxel --data OUT/small_city/aerial` (or street).
    """

    out: Annotated[Path, tyro.conf.Positional]
    """Folder for the data set. It must not exist or be empty."""
    size: float = 500.0
    """Metres along each side of the city; 500 are 0.25 square kilometres."""
    aerial_views: int = 100
    """Photographs from above, test ones included; 0 for none."""
    street_views: int = 100
    """Photographs in the streets, test ones included; 0 for none."""
    width: int = 480
    """Pixels."""
    height: int = 270
    """Pixels."""
    test_share: float = 0.1
    """Part of the photographs that is held out for testing: flights and stations of their own. 0 for none."""
    seed: int = 0
    """The city, its textures and all cameras are drawn from it."""
    samples: int = 2
    """Rays along each side of a pixel, against aliasing: 2 casts 2x2 rays."""
    points: int = 200_000
    """Seed points for each of aerial and street, lifted from the depth of training views."""
    aerial_height: float | None = None
    """Metres above the streets. Default: 150 to 500, higher for few views, less over a small city, above all roofs."""
    aerial_fov: float = 45.0
    """Degrees, horizontally."""
    street_fov: float = 90.0
    """Degrees, horizontally."""
    street_yaws: int = 4
    """Directions photographed at every station in a street."""
    street_spacing: float = 10.0
    """Metres between stations: streets are driven from the middle of the city outwards, as many as the views fill."""
    eye_height: float = 1.7
    """Metres of the street cameras above the street."""
    sun_elevation: float = 42.0
    """Degrees above the horizon."""
    sun_azimuth: float = 235.0
    """Degrees from east to north."""
    workers: int = 0
    """Processes that photograph; the result is the same for any number. 0: one a core, fewer if memory is short."""
    overwrite: bool = False
    """Replace a city that this command wrote to the same folder before."""

    def main(self) -> None:
        """Write the data set, or nothing.

        Raises:
            ValueError: an argument is wrong, or the folder must not be replaced.
            RuntimeError: a library is missing, or a process ended.
            OSError: something cannot be written.
        """
        check(self)
        out = self.out.expanduser().resolve()
        _check_folder(out, self.overwrite)
        load_open3d()
        start = time.monotonic()
        with _whole_folder(out) as root:
            shots = _write_city(self, root)
        counts = ", ".join(f"{sum(s.split == split for s in shots)} {split}" for split in ("train", "test"))
        CONSOLE.print(
            f"{len(shots)} photographs ({counts}) of {self.size:g} m x {self.size:g} m in {out}, "
            f"{time.monotonic() - start:.0f} s. Train with:",
            markup=False,
            soft_wrap=True,
        )
        for view in dict.fromkeys(shot.view for shot in shots):
            CONSOLE.print(f"  ns-train splaxel --data {layout.scene_folder(out, view)}", markup=False, soft_wrap=True)


def check(command: CityCommand) -> None:
    """Refuse what cannot be photographed.

    Raises:
        ValueError: names the option, its value and what it may be.
    """
    numbers = {k: v for k, v in asdict(command).items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    limits: dict[str, tuple[float, float]] = {
        "size": (_LEAST_SIZE, 1e5),
        "aerial_views": (0, 1e6),
        "street_views": (0, 1e6),
        "width": (_LEAST_PIXELS, 1 << 14),
        "height": (_LEAST_PIXELS, 1 << 14),
        "test_share": (0, 0.5),
        "seed": (0, (1 << 63) - 1),
        "samples": (1, 16),
        "points": (1, 1e8),
        "aerial_height": (10, 1e4),
        "aerial_fov": (5, 150),
        "street_fov": (5, 150),
        "street_yaws": (1, 360),
        "street_spacing": (0.1, 1e4),
        "eye_height": (0.3, 20),
        "sun_elevation": (5, 90),
        "sun_azimuth": (-360, 360),
        "workers": (0, 1024),
    }
    for name, value in numbers.items():
        low, high = limits[name]
        if not low <= value <= high:  # False for NaN too
            raise ValueError(f"--{name.replace('_', '-')} is {value:g}; it must lie between {low:g} and {high:g}")
    for name in ("aerial_views", "street_views"):
        if numbers[name] == 1 and command.test_share > 0:
            raise ValueError(
                f"--{name.replace('_', '-')} is 1, which leaves none to train on beside one for testing: give 2 or "
                "more, or --test-share 0"
            )
    if command.aerial_views + command.street_views == 0:
        raise ValueError(
            "--aerial-views and --street-views are both 0: nothing to photograph, give one of them 2 or more"
        )
    needed, memory = num_workers(command) * _memory_of_process(command.size), _memory_of_machine()
    if needed > memory:
        raise ValueError(
            f"--size {command.size:g} with {num_workers(command)} processes needs about {needed / 2**30:.0f} GB, this "
            f"machine has {memory / 2**30:.0f} GB: give a smaller --size or fewer --workers"
        )


def num_workers(command: CityCommand) -> int:
    """Processes to photograph with: as asked for, or as many as cores and memory allow; no more than photographs."""
    fitting = max(1, int(_memory_of_machine() / _memory_of_process(command.size)))
    wanted = command.workers or min(len(os.sched_getaffinity(0)), fitting)
    return min(wanted, command.aerial_views + command.street_views)


def _memory_of_process(size: float) -> float:  # bytes
    return size**2 * _BYTES_PER_AREA + _BYTES_PER_PROCESS


def _memory_of_machine() -> int:  # bytes
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def plan_shots(command: CityCommand, city: City) -> list[Shot]:
    """All photographs to take.

    Raises:
        ValueError: the cameras would be inside buildings.
    """
    lowest = city.tallest + 5.0
    if command.aerial_views and command.aerial_height is not None and command.aerial_height < lowest:
        raise ValueError(
            f"--aerial-height is {command.aerial_height:g}, among the roofs of this city: give {np.ceil(lowest):g} or "
            "more"
        )
    aerial, street = np.radians(command.aerial_fov), np.radians(command.street_fov)
    share, seed = command.test_share, command.seed
    shots = aerial_shots(city, command.aerial_views, share, float(aerial), command.aerial_height, seed)
    return shots + street_shots(
        city,
        command.street_views,
        share,
        float(street),
        command.eye_height,
        command.street_spacing,
        command.street_yaws,
        seed,
    )


def _check_folder(out: Path, overwrite: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"{out} is a file: give a folder")
    if not any(out.iterdir()):
        return
    if not (out / layout.MARK).is_file():
        raise ValueError(f"{out} is not empty and holds no city of this command: give another folder")
    if not overwrite:
        raise ValueError(f"{out} holds a city already: give another folder, or --overwrite to replace it")


@contextmanager
def _whole_folder(out: Path) -> Iterator[Path]:
    """A new folder beside `out` that takes its place at the end, or vanishes."""
    out.parent.mkdir(parents=True, exist_ok=True)
    box = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        root = box / "city"
        root.mkdir()
        yield root
        old = box / "old"
        if out.exists():
            out.rename(old)
        try:
            root.rename(out)
        except OSError:
            if old.exists():
                old.rename(out)
            raise
    finally:
        shutil.rmtree(box, ignore_errors=True)


def _write_city(command: CityCommand, root: Path) -> list[Shot]:
    """Everything, into an empty folder."""
    city = build_city(command.size, command.seed)
    CONSOLE.print(f"City: {len(city.mesh.corners):,} triangles, the tallest building {city.tallest:.0f} m")
    shots = plan_shots(command, city)
    layout.make_folders(root, shots)
    layout.write_cameras(root, shots, command.width, command.height)
    seeds: dict[str, list[Seeds]] = {}
    jobs = _jobs(command, root, shots)
    with closing(_take_all(command, city, jobs)) as results:
        for shot, found in zip(shots, track(results, "Photographing", len(jobs), console=CONSOLE), strict=True):
            if shot.split == "train":
                seeds.setdefault(shot.view, []).append(found)
    for view, found in seeds.items():
        points, colors = (np.concatenate(parts) for parts in zip(*found, strict=True))
        if len(points) == 0:
            raise ValueError(
                f"No {view} photograph shows anything nearer than {_FARTHEST_SEED:g} m: choose other cameras, or more"
            )
        layout.write_cloud(layout.cloud_path(root, view), points, colors)
    facts = {name: value for name, value in asdict(command).items() if name not in ("out", "workers", "overwrite")}
    layout.write_mark(root, {"made_by": "splaxel-city", **facts, "triangles": len(city.mesh.corners)})
    return shots


@dataclass(frozen=True)
class _Job:
    """One photograph, for a process."""

    root: Path
    shot: Shot
    size: tuple[int, int]  # width, height
    samples: int
    points: int  # seed points to lift
    seed: tuple[int, int]


def _jobs(command: CityCommand, root: Path, shots: Sequence[Shot]) -> list[_Job]:
    """Seed points are shared out evenly among the training photographs of a view."""
    jobs, number = [], {"aerial": 0, "street": 0}
    totals = {view: sum(s.view == view and s.split == "train" for s in shots) for view in number}
    for k, shot in enumerate(shots):
        quota = 0
        if shot.split == "train":
            total, i = totals[shot.view], number[shot.view]
            quota = command.points * (i + 1) // total - command.points * i // total
            number[shot.view] = i + 1
        size = (command.width, command.height)
        jobs.append(_Job(root, shot, size, command.samples, quota, (command.seed, 4 + k)))
    return jobs


def _take_all(command: CityCommand, city: City, jobs: Sequence[_Job]) -> Generator[Seeds, None, None]:
    """Take photographs in order, in processes of which each builds the city anew."""
    light = Light(command.sun_elevation, command.sun_azimuth)
    workers = num_workers(command)
    if workers == 1:
        photographer = Photographer(city, command.seed, light)
        for job in jobs:
            yield _take(photographer, job)
        return
    # Not forked: the threads of Open3D and torch do not survive that.
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _start_process, (command.size, command.seed, light)
    )
    try:
        yield from pool.map(_take_in_process, jobs)
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"one of {workers} processes ended, maybe for lack of memory: give a smaller --size or fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_photographers: list[Photographer] = []  # of a process, filled once


def _start_process(size: float, seed: int, light: Light) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process hears it and ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _photographers.append(Photographer(build_city(size, seed), seed, light))


def _end_with_parent() -> None:
    """A process whose parent was killed would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _take_in_process(job: _Job) -> Seeds:
    return _take(_photographers[0], job)


def _take(photographer: Photographer, job: _Job) -> Seeds:
    """Write one photograph and its depth; its share of the seed points."""
    (width, height), shot = job.size, job.shot
    pixels, depth = photographer.photograph(shot.pose, shot.fov, width, height, job.samples)
    layout.write_photograph(layout.photograph_path(job.root, shot), pixels)
    layout.write_depth(layout.depth_path(job.root, shot), depth)
    near = np.flatnonzero(depth <= _FARTHEST_SEED)
    chosen = np.random.default_rng(job.seed).choice(near, min(job.points, len(near)), replace=False)
    rows, columns = np.divmod(chosen, width)
    focal = 0.5 * width / np.tan(0.5 * shot.fov)
    intrinsics = np.array([focal, focal, 0.5 * width, 0.5 * height])
    return lift_depth(depth, rows, columns, shot.pose, intrinsics, 1.0), pixels[rows, columns]


def _terminate(*_: object) -> None:
    raise SystemExit("splaxel-city: ended by a signal; nothing was written")


def entrypoint() -> None:
    """The `splaxel-city` command."""
    tyro.extras.set_accent_color("bright_yellow")
    command = tyro.cli(CityCommand)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        command.main()
    except KeyboardInterrupt:
        raise SystemExit("splaxel-city: interrupted; nothing was written") from None
    except (OSError, RuntimeError, ValueError) as error:
        raise SystemExit(f"splaxel-city: {error}") from error
