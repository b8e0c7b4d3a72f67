"""Where the parts of MatrixCity lie on a disk: scenes, blocks, camera files and photographs.

The tree as distributed, and what is called what here:

    <city>/<view>/                                       a scene (small_city/aerial, big_city/street, ...)
        pose/<block>/transforms_{train,train_dense,test}.json      pose files
        {train,train_dense,test}/<block>/transforms{,_origin}.json raw files, photographs beside them
    aerial_street_fusion/{aerial,street/train,street/test}/        raw files without block folders

Nothing is opened here but the first bytes of archives that were not unpacked.
"""

from __future__ import annotations

import os
import re
import shlex
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from splaxel_ns.dataparsers.photos import PHOTOGRAPH_SUFFIXES, is_junk

View = Literal["aerial", "street", "fusion"]
_SPLITS = ("train", "train_dense", "test")
_SUBFOLDERS = ("", "input", "rgb", "images")  # where people move a block's photographs; the distributed place first
_ARCHIVES = (".tar", ".tar.gz", ".tgz")
# Siblings of a city that have the city's folders but hold no cameras.
_NO_SCENE = re.compile(r"_(depth(_float32)?|normal|pointcloud|diffuse|metallic|roughness|specular)$")
# Which raw blocks of small_city/aerial make up a block of the paper. B and C are cut by position, so not here.
_PAPER_BLOCKS = {"A": {"1", "2"}, "D": {"9"}, "E": {"10"}, "all": {str(k) for k in range(1, 11)}}


@dataclass(frozen=True)
class Layout:
    """The camera files of one run."""

    root: Path  # the folder that names in messages are relative to
    scenes: tuple[Path, ...]  # one folder, or aerial and street of a fusion
    view: View
    train: tuple[Path, ...]  # JSON files
    test: tuple[Path, ...]
    block: str  # the paper's name of the selected part ("A", ..., "all"), for the point cloud
    notes: tuple[str, ...]  # choices that were made for the user


@dataclass(frozen=True)
class Selection:
    """What the user asked for; see the options of the same names."""

    scene: str = "auto"
    block: tuple[str, ...] = ()
    dense: bool = False
    road_outside: bool = False
    all_frames: bool = False


@dataclass
class _Start:
    """What the path given as `--data` already decides."""

    scenes: dict[str, tuple[Path, ...]]
    block: tuple[str, ...] = ()
    source: Literal["any", "pose", "raw"] = "any"
    dense: bool = False
    all_frames: bool = False
    pose_folder: Path | None = None
    notes: list[str] = field(default_factory=list)


def find_layout(data: Path, selection: Selection) -> Layout:
    """Find the camera files for `--data`: a scene, a city, the data set, `pose`, a block, or one camera file.

    Raises:
        ValueError: there is nothing we know, it is still packed, or it is not clear which scene or block is meant.
    """
    start = _start(Path(os.path.abspath(data.expanduser())))  # also without .., which would hide a folder's name
    name, scenes = _choose_scene(start, selection.scene, data)
    first, *others = scenes
    merged = not others and _has_pose_files(first)  # by the authors' merge_aerial_street.py
    view: View = "fusion" if merged or others else ("street" if _is_street(first) else "aerial")
    if merged or start.pose_folder is not None:
        folder = start.pose_folder or first
        train, test = _pose_files([folder], selection.dense, start.notes)
        block = "all" if merged else _short(folder.name)
    else:
        train, test, block = _scene_files(scenes, selection, start)
    if not test:
        start.notes.append(f"{name}: no test cameras on disk, so there is nothing to evaluate on")
    root = first.parent if others else first
    return Layout(root, scenes, view, tuple(train), tuple(test), block, tuple(start.notes))


def _start(data: Path) -> _Start:
    """Read the kind of folder off its contents."""
    if data.suffix == ".json" and data.is_file():
        start = _start(data.parent)
        start.all_frames = data.name == "transforms_origin.json"
        return start
    if data.name.endswith(_ARCHIVES) or not data.exists():
        archive = data if data.exists() else archive_of(data)
        if archive is not None:
            folder = data if archive != data else data.parent / data.name.split(".")[0]
            raise ValueError(packed_message([(archive, folder)]))
        raise ValueError(f"{data} does not exist. --data takes a folder such as matrixcity/small_city/aerial.")
    if not data.is_dir():
        raise ValueError(
            f"{data} is a file. --data takes a folder such as matrixcity/small_city/aerial, or one of its camera files "
            "(.json)."
        )
    if _has_pose_files(data):
        scene = data.parent.parent if data.parent.name == "pose" else data
        return _Start({scene.name: (scene,)}, source="pose", pose_folder=data)
    if data.name == "pose" and _pose_blocks(data.parent):
        return _Start({data.parent.name: (data.parent,)}, source="pose")
    if _raw_file(data, False) is not None:
        if data.parent.name in _SPLITS:
            scene, dense = data.parent.parent, data.parent.name == "train_dense"
            return _Start({scene.name: (scene,)}, (_base(data.name),), "raw", dense)
        scene = data.parent if data.name in _SPLITS else data
        return _Start({scene.name: (scene,)}, source="raw")
    if data.name in _SPLITS and _raw_blocks(data):
        return _Start({data.parent.name: (data.parent,)}, source="raw", dense=data.name == "train_dense")
    if _is_scene(data):
        return _Start({data.name: (data,)})
    scenes = _scenes_below(data)
    if not scenes:
        raise ValueError(_unknown_layout(data))
    return _Start(scenes)


def _scenes_below(data: Path) -> dict[str, tuple[Path, ...]]:
    """Scenes one or two levels below, by their path; aerial and street of a fusion are one scene and also two."""
    scenes: dict[str, tuple[Path, ...]] = {}
    for folder in [data, *_folders(data)]:
        if _NO_SCENE.search(folder.name) or (folder != data and _is_scene(folder)):
            continue
        prefix = "" if folder == data else f"{folder.name}/"
        merged = [child for child in _folders(folder) if _has_pose_files(child)]
        children = {child.name: child for child in _folders(folder) if _is_scene(child)}
        scenes.update({prefix + name: (child,) for name, child in children.items()})
        fused = "fusion" in folder.name or any(_raw_file(child, False) for child in children.values())
        if fused and {"aerial", "street"} <= set(children):
            scenes[prefix + "fusion"] = (children["aerial"], children["street"])
        for child in merged:
            scenes[prefix + child.name] = (child,)
    return scenes


def _choose_scene(start: _Start, wanted: str, data: Path) -> tuple[str, tuple[Path, ...]]:
    """One scene of those found."""
    scenes = start.scenes
    listed = ", ".join(sorted(scenes))
    if wanted != "auto":
        scenes = {k: v for k, v in scenes.items() if k == wanted or k.endswith("/" + wanted)} or {
            k: v for k, v in scenes.items() if k.startswith(wanted + "/")
        }
        if not scenes:
            raise ValueError(f"There is no scene '{wanted}' in {data}. Give --scene one of {listed}.")
    if len(scenes) == 1:
        return next(iter(scenes.items()))
    cities = {name.rpartition("/")[0] for name in scenes}
    if len(cities) > 1:
        raise ValueError(f"{data} has several scenes: {listed}. Give --scene one of these names.")
    for last in ("fusion", "aerial"):
        for name, folders in scenes.items():
            if name.rpartition("/")[2] == last:
                start.notes.append(f"{data} has {listed}; using {name} (--scene chooses another)")
                return name, folders
    raise ValueError(f"{data} has several scenes: {listed}. Give --scene one of these names.")


def _scene_files(scenes: Sequence[Path], selection: Selection, start: _Start) -> tuple[list[Path], list[Path], str]:
    """Camera files for train and test, and the paper's name of the part."""
    wanted = selection.block or start.block
    pose = _pose_blocks(scenes[0]) if len(scenes) == 1 and start.source != "raw" else {}
    if wanted:
        chosen = [pose[key] for name in wanted for key in pose if name in (key, _short(key))]
        if len(chosen) == len(wanted):
            block = _short(chosen[0].name) if len(chosen) == 1 else "all"
            return *_pose_files(chosen, selection.dense, start.notes), block
    elif "block_all" in pose:
        return *_pose_files([pose["block_all"]], selection.dense, start.notes), "all"
    train, test, block = _raw_files(scenes, wanted, selection, start) if start.source != "pose" else ([], [], "all")
    if train:
        if pose and not wanted:
            start.notes.append(
                f"{scenes[0]} has no pose/block_all; using every raw block (--block chooses one of {', '.join(pose)})"
            )
        return train, test, block
    if wanted:
        names = [*pose, *(name for scene in scenes for name in _raw_blocks(scene / "train"))]
        raise ValueError(f"Block {', '.join(wanted)} is not in {scenes[0]}: it has {', '.join(names) or 'none'}.")
    if len(pose) == 1:
        only = next(iter(pose.values()))
        return *_pose_files([only], selection.dense, start.notes), _short(only.name)
    if pose:
        raise ValueError(f"{scenes[0]}/pose has {', '.join(pose)}. Give --block one of these names.")
    raise ValueError(_unknown_layout(scenes[0]))


def _pose_files(folders: Sequence[Path], dense: bool, notes: list[str]) -> tuple[list[Path], list[Path]]:
    """The train and test files of pose folders."""
    train = []
    for folder in folders:
        sparse, full = folder / "transforms_train.json", folder / "transforms_train_dense.json"
        first, other = (full, sparse) if dense else (sparse, full)
        if dense and not full.is_file():
            raise ValueError(f"{full} does not exist. Leave out --dense to train on transforms_train.json.")
        if not first.is_file():
            notes.append(f"{first} does not exist; using {other.name}")
        train.append(first if first.is_file() else other)
    tests = [folder / "transforms_test.json" for folder in folders]
    return train, [path for path in tests if path.is_file()]


def _raw_files(
    scenes: Sequence[Path], wanted: Sequence[str], selection: Selection, start: _Start
) -> tuple[list[Path], list[Path], str]:
    """The train and test files of raw blocks; empty lists if the wanted blocks are not there."""
    train: dict[str, Path] = {}
    test: dict[str, Path] = {}
    outside = selection.road_outside or any("outside" in name for name in wanted)
    for scene in scenes:
        dense = selection.dense or start.dense
        folder = scene / ("train_dense" if dense else "train")
        if dense and not _raw_blocks(folder):
            raise ValueError(f"{folder} holds no block. Leave out --dense to train on the sparse streets.")
        if not _raw_blocks(folder) and _raw_blocks(scene / "train_dense"):
            start.notes.append(f"{folder} holds no block; using train_dense")
            folder = scene / "train_dense"
        own = {"": scene} if _raw_file(scene, False) is not None else _raw_blocks(folder)
        orphans = [path for path in sorted(folder.glob("*.tar")) if not (folder / path.stem).is_dir() and own]
        if not wanted and any(outside or "outside" not in path.name for path in orphans):
            raise ValueError(packed_message([(path, folder / path.stem) for path in orphans]))
        for blocks, split in ((own, train), (_raw_blocks(scene / "test"), test)):
            split.update({f"{scene.name}/{name}": path for name, path in blocks.items()})
    if not outside:
        left_out = [key for key in train if "outside" in key]
        if left_out:
            start.notes.append(f"left out {', '.join(left_out)} (--road-outside takes them in)")
        train = {key: path for key, path in train.items() if "outside" not in key}
        test = {key: path for key, path in test.items() if "outside" not in key}
    block = "all"
    if wanted:
        keys = set()
        for name in wanted:
            parts = _PAPER_BLOCKS.get(_short(name), set()) if scenes[0].name == "aerial" else set()
            if not any(_names(key) & {name, *parts} for key in train):
                return [], [], "all"
            keys |= {name, *parts}
        train, test = ({k: p for k, p in split.items() if _names(k) & keys} for split in (train, test))
        numbers = {_short(_base(key.rpartition("/")[2])) for key in train}
        block = next((name for name, parts in _PAPER_BLOCKS.items() if numbers <= parts), "all")
    files = []
    for split in (train, test):
        found = [
            _raw_file(path, selection.all_frames or start.all_frames)
            for _, path in sorted(split.items(), key=lambda i: _natural(i[0]))
        ]
        files.append([path for path in found if path is not None])
    return files[0], files[1], block


def _names(key: str) -> set[str]:
    """Every name a user may give a raw block: block_1_test, block_1, 1; small_city_road_down, down."""
    name = key.rpartition("/")[2]
    return {name, _base(name), _short(_base(name))}


def _base(name: str) -> str:
    """A block's name without what its split adds."""
    return re.sub(r"_(test|dense)$", "", name)


def _short(name: str) -> str:
    return re.sub(r"^(big_high_block_|block_|small_city_road_)|_area$", "", name)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorting key that puts block_2 before block_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: _natural(path.name))


def _has_pose_files(folder: Path) -> bool:
    return any((folder / f"transforms_{name}.json").is_file() for name in ("train", "train_dense"))


def _pose_blocks(scene: Path) -> dict[str, Path]:
    return {folder.name: folder for folder in _folders(scene / "pose") if _has_pose_files(folder)}


def _raw_file(folder: Path, all_frames: bool) -> Path | None:
    """transforms.json leaves out the frames that look outside the map; transforms_origin.json has them all."""
    names = ("transforms.json", "transforms_origin.json")
    return next((folder / name for name in (names[::-1] if all_frames else names) if (folder / name).is_file()), None)


def _raw_blocks(split: Path) -> dict[str, Path]:
    """Block folders of a split; the split's own folder, under the name "", in a fusion."""
    if _raw_file(split, False) is not None:
        return {"": split}
    return {folder.name: folder for folder in _folders(split) if _raw_file(folder, False) is not None}


def _is_scene(folder: Path) -> bool:
    if _pose_blocks(folder) or _raw_file(folder, False) is not None:
        return True
    return any(_raw_blocks(folder / split) for split in _SPLITS)


def _is_street(scene: Path) -> bool:
    return "street" in scene.name or any("road" in name for name in _raw_blocks(scene / "train"))


def _unknown_layout(data: Path) -> str:
    """What was looked for where, what is there, and what helps."""
    archives = [path for folder in (data, *_folders(data)) for path in sorted(folder.glob("*.tar*"))]
    if archives:
        return packed_message([(path, path.parent / path.name.split(".")[0]) for path in archives])
    if (data / "sparse").is_dir() or (data / "colmap").is_dir():
        hint = "This looks like a COLMAP model: use the splaxel-colmap dataparser."
    else:
        hint = "Give --data the folder of a scene, such as matrixcity/small_city/aerial."
    there = ", ".join(sorted(path.name for path in data.iterdir())[:8]) or "nothing"
    return (
        f"No MatrixCity layout in {data}. Looked for pose/<block>/transforms_train.json and "
        f"{{train,train_dense,test}}/<block>/transforms.json (or transforms_origin.json) there and up to two levels "
        f"below; found {there}. {hint}"
    )


class PhotographFinder:
    """Finds photographs where the camera files put them, or where people move them. Lists every folder once."""

    def __init__(self) -> None:
        self._listed: dict[Path, dict[str, str]] = {}

    def find(self, nominal: Path) -> Path:
        """The file for `<block>/0001.png`; the nominal path if there is none."""
        for sub in (*_SUBFOLDERS, nominal.parent.name):
            folder = nominal.parent / sub
            files = self._list(folder)
            name = files.get(nominal.stem) or files.get(_number(nominal.stem))
            if name is not None:
                return folder / name
        return nominal

    def exists(self, path: Path) -> bool:
        """Whether `path`, a result of `find`, is there."""
        return path.name in self._list(path.parent).values()

    def _list(self, folder: Path) -> dict[str, str]:
        """Names by stem and by number ("#1" for 0001 and 00001); PNG wins where a stem has several suffixes."""
        if folder not in self._listed:
            names: dict[str, str] = {}
            try:
                entries = sorted(os.listdir(folder), key=lambda name: (not name.lower().endswith(".png"), name))
            except (FileNotFoundError, NotADirectoryError):
                entries = []
            for name in entries:
                stem, suffix = os.path.splitext(name)
                if suffix.lower() in PHOTOGRAPH_SUFFIXES and not is_junk(Path(name)):
                    names.setdefault(stem, name)
                    names.setdefault(_number(stem), name)
            self._listed[folder] = names
        return self._listed[folder]


def _number(stem: str) -> str:
    return f"#{int(stem)}" if stem.isascii() and stem.isdigit() else stem


def archive_of(folder: Path) -> Path | None:
    """The archive that holds a block's folder: beside it or inside it."""
    places = [parent / (folder.name + suffix) for parent in (folder.parent, folder) for suffix in _ARCHIVES]
    return next((path for path in places if path.is_file()), None)


def packed_message(packed: Sequence[tuple[Path, Path]]) -> str:
    """One message with the commands that unpack archives into (archive, folder of the block)."""
    commands = []
    for archive, folder in packed:
        target = _unpack_target(archive, folder)
        if target is None:
            return (
                f"{archive} ({archive.stat().st_size} bytes) is not a readable archive: an interrupted download, or "
                f"the place holder that git leaves without `git lfs pull`. Download it again."
            )
        make = "" if target.is_dir() else f"mkdir -p {shlex.quote(str(target))} && "
        commands.append(f"  {make}tar -xf {shlex.quote(str(archive))} -C {shlex.quote(str(target))}")
    noun = "archive is" if len(commands) == 1 else "archives are"
    return f"{len(commands)} {noun} not unpacked yet. Unpack with:\n" + "\n".join(commands)


def _unpack_target(archive: Path, folder: Path) -> Path | None:
    """Where to unpack so that files end up in `folder`, read off the first file's path; None if unreadable."""
    try:
        with tarfile.open(archive) as tar:
            member = next((item for item in tar if item.isfile()), None)
    except (tarfile.TarError, OSError, EOFError):
        return None
    parents = [] if member is None else [part for part in Path(member.name).parts[:-1] if part != "."]
    if folder.name not in parents:
        return folder if not parents else folder.parent
    depth = parents.index(folder.name)
    return folder.parents[depth]
