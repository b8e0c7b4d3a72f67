"""The files of a checkpoint that several ranks wrote: where they lie, whether they are whole, which may go.

A sharded checkpoint is `nerfstudio_models/step-XXXXXXXXX.ckpt`, which commits it, and the folder that its entry
`shards` (the manifest) names, `shards/step-XXXXXXXXX` beside `nerfstudio_models`: nerfstudio takes every name in there
for a step. The manifest:

    folder  name below `shards`
    counts  Gaussians of each of the R ranks that wrote it
    tables  by name: dtype and row, the shape of one Gaussian's entry; T of them
    places  [R, T, 2] int64: offset and length of each table in each rank's file, bytes
    files   by name: size in bytes and crc32

Shapes: R ranks that wrote, T tables.
"""

from __future__ import annotations

import math
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = "shards"
METADATA = ".metadata"
_NAME = re.compile(r"step-(\d{9}|[1-9]\d{9,})(-\d+)?")
_PARTIAL = re.compile(r"\.step-\d+(-\d+)?-[0-9a-f]+\.partial")
_PIECE = 1 << 22


def shards_root(directory: Path) -> Path:
    """The folder of all shards of the run whose checkpoints are in `directory`."""
    return directory.resolve().parent / ROOT


def shard_name(rank: int) -> str:
    """What torch.distributed.checkpoint calls a rank's only file."""
    return f"__{rank}_0.distcp"


def free_name(directory: Path, step: int) -> str:
    """A name for the shards of `step` that no earlier ones have, so that those stay whole until the new ones are."""
    root = shards_root(directory)
    names = [f"step-{step:09d}"] + [f"step-{step:09d}-{number}" for number in range(2, 1000)]
    return next(name for name in names if not (root / name).exists())


def checksum(path: Path) -> tuple[int, int]:
    """Size in bytes and crc32 of a file.

    Raises:
        OSError: It cannot be read.
    """
    size, crc = 0, 0
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
    return size, crc


def check_manifest(manifest: Any) -> None:
    """Refuse a manifest that could not have been written by splaxel; what it says is used without further questions.

    Raises:
        ValueError: What is wrong with it.
    """
    kinds = {"folder": str, "counts": list, "tables": dict, "places": Tensor, "files": dict}
    if not isinstance(manifest, dict) or any(not isinstance(manifest.get(k), kind) for k, kind in kinds.items()):
        raise ValueError(f"its list of shards lacks one of {', '.join(kinds)}")
    if not _NAME.fullmatch(manifest["folder"]):
        raise ValueError(f"its shards are said to lie in {manifest['folder']!r}, which is no folder of shards")
    counts, tables, places, files = (manifest[name] for name in ("counts", "tables", "places", "files"))
    if not counts or any(type(count) is not int or count < 0 for count in counts):
        raise ValueError(f"the numbers of Gaussians of its shards are {counts}")
    if set(files) != {METADATA, *(shard_name(rank) for rank in range(len(counts)))}:
        raise ValueError(f"it has {len(counts)} ranks but the shards {', '.join(map(str, files))}")
    if any(not isinstance(pair, list) or [type(v) for v in pair] != [int, int] for pair in files.values()):
        raise ValueError("the sizes or checksums of its shards are no numbers")
    if places.dtype != torch.int64 or tuple(places.shape) != (len(counts), len(tables), 2):
        raise ValueError(f"the places in its shards are {places.dtype} {list(places.shape)}")
    for position, (name, table) in enumerate(tables.items()):
        if not _is_table(name, table):
            raise ValueError(f"its table {name!r} is described as {table!r}")
        width = math.prod(table["row"]) * dtype_of(table).itemsize
        for rank, count in enumerate(counts):
            offset, length = places[rank, position].tolist()
            if not 0 <= offset <= offset + length <= files[shard_name(rank)][0] or count * width > length:
                raise ValueError(f"its table {name!r} of rank {rank} lies outside its shard")


def _is_table(name: Any, table: Any) -> bool:
    if not isinstance(name, str) or not isinstance(table, dict):
        return False
    row = table.get("row")
    fine = isinstance(row, list) and len(row) < 8 and all(type(size) is int and 0 <= size < 2**31 for size in row)
    return fine and isinstance(table.get("dtype"), str) and isinstance(dtype_of(table), torch.dtype)


def described(table: Tensor) -> dict[str, Any]:
    """What the manifest says of a table."""
    return {"dtype": str(table.dtype).removeprefix("torch."), "row": list(table.shape[1:])}


def dtype_of(table: Mapping[str, Any]) -> torch.dtype:
    """The type of a table of the manifest."""
    return getattr(torch, table["dtype"], None)  # type: ignore[return-value]


def check_files(folder: Path, manifest: Mapping[str, Any], part: tuple[int, int] = (0, 1)) -> None:
    """See to it that shards are those that the checkpoint was committed with, every byte.

    Args:
        folder: Where they lie.
        manifest: What `check_manifest` has let pass.
        part: Which of how many ranks this is: they share the files among themselves.

    Raises:
        ValueError: What is missing, truncated or corrupted.
    """
    if not folder.is_dir():
        raise ValueError(f"its shards, the folder {folder}, are missing: restore them, or move the checkpoint away too")
    for name, (size, crc) in list(manifest["files"].items())[part[0] :: part[1]]:
        path = folder / name
        try:
            found = checksum(path)
        except OSError as error:
            raise ValueError(f"its shard {path} cannot be read ({error.strerror})") from error
        if found[0] != size:
            raise ValueError(f"its shard {path} is truncated or foreign: it has {found[0]} bytes instead of {size}")
        if found[1] != crc:
            raise ValueError(f"its shard {path} is corrupted or foreign: it does not match its checksum")


def remove_unused(directory: Path, steps: list[int], keep: str | None = None) -> None:
    """Delete the shards of steps that have no checkpoint any more, and what a killed save left.

    Args:
        directory: The run's `nerfstudio_models` folder.
        steps: Those that have one.
        keep: Of several folders of one step the one that is in use; None: all are kept.
    """
    root = shards_root(directory)
    if not root.is_dir():
        return
    kept = None if keep is None else _NAME.fullmatch(keep)
    for path in root.iterdir():
        match = _NAME.fullmatch(path.name)
        replaced = match and kept and path.name != keep and match.group(1) == kept.group(1)
        if _PARTIAL.fullmatch(path.name) or replaced or (match and int(match.group(1)) not in steps):
            shutil.rmtree(path, ignore_errors=True)
    if not any(root.iterdir()):
        root.rmdir()
