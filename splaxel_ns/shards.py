"""Checkpoints of several ranks: each writes its Gaussians with torch.distributed.checkpoint (DCP), any number reads.

What DCP writes is one tensor per table, [all Gaussians, ...], of which each rank's file holds a run of rows; its other
tools read the folder too. Agreement between ranks goes through `comm`, not through DCP.

Nothing that is read can execute code. DCP's `.metadata` is a pickle, which its reader unpickles whatever it contains:
it is written for other tools and never opened here. What it says (which rows of which table lie where in which file)
stands as plain values in the .ckpt, which `torch.load(weights_only=True)` reads, and the tensors in the shards are read
by DCP with `weights_only=True`.

Shapes: R ranks, T tables, N Gaussians of this rank.
"""

from __future__ import annotations

import copy
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from splaxel_ns.checkpoint import checkpoint_steps, failed_writes, sync_folder, write_checkpoint
from splaxel_ns.comm import World
from splaxel_ns.gaussian_rows import GAUSSIANS, agree_on_tables, join_rows, split_rows
from splaxel_ns.migration import move_rows
from splaxel_ns.partition import PartitionTree
from splaxel_ns.shard_files import (
    METADATA,
    check_manifest,
    checksum,
    described,
    dtype_of,
    free_name,
    remove_unused,
    shard_name,
    shards_root,
)

if TYPE_CHECKING:
    from splaxel_ns.distributed import DistributedGaussians


# Writing


def write_sharded(world: World, directory: Path, step: int, state: Mapping[str, Any]) -> Path:
    """Write one checkpoint of all ranks, whole or not at all; every rank calls this at once.

    Shards grow in a temporary folder, reach the disk, get their final name, and count from the moment when the .ckpt
    that lists them gets its own. Whatever fails before leaves the checkpoints before it as they were.

    Args:
        world: The ranks.
        directory: The run's `nerfstudio_models` folder, on a file system that all ranks share; made if missing.
        step: The last finished step.
        state: This rank's, as of `resume.run_state`. What does not belong to single Gaussians is rank 0's.

    Returns:
        The .ckpt.

    Raises:
        OSError: Some rank could not write; raised on all of them, with what happened on which.
        LostRank: A peer is gone.
    """
    rest, tables = split_rows(state)
    rest, tables, counts = agree_on_tables(world, rest, tables)
    layout = _Layout(counts, {name: described(value) for name, value in tables.items()})
    folder, name = _make_folder(world, directory, step)
    try:
        written = _together(world, lambda: _write_shard(folder, world.rank, layout, tables))
        assert written is not None
        places = world.gather(written.places)  # [R, T, 2]
        checksums = world.gather(torch.tensor(written.checksum)).tolist()  # R x [2]
        manifest = {
            "folder": name,
            "counts": layout.counts,
            "tables": layout.tables,
            "places": places,
            "files": {shard_name(rank): pair for rank, pair in enumerate(checksums)},
        }
        path = _together(world, lambda: _commit(folder, directory, step, rest, manifest), main_only=True)
    except BaseException:
        if world.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return directory / f"step-{step:09d}.ckpt" if path is None else path


@dataclass
class _Layout:
    """What all ranks know of the shards before they are written."""

    counts: list[int]
    tables: dict[str, dict[str, Any]]

    def plans(self) -> list[SavePlan]:
        """DCP's plan of each rank: its rows of every table. Tables without rows or columns are not written."""
        total, starts = sum(self.counts), [0, *accumulate(self.counts)]
        plans = []
        for start, count in zip(starts, self.counts, strict=False):
            items = []
            for name, table in self.tables.items():
                row = table["row"]
                if count == 0 or 0 in row:
                    continue
                offset = torch.Size([start] + [0] * len(row))
                data = TensorWriteData(
                    ChunkStorageMetadata(offset, torch.Size([count, *row])),
                    TensorProperties(dtype=dtype_of(table)),
                    torch.Size([total, *row]),
                )
                items.append(WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data))
            plans.append(SavePlan(items))
        return plans


@dataclass
class _Written:
    """What one rank wrote."""

    places: Tensor  # [T, 2] int64
    checksum: tuple[int, int]


class _Rows(DefaultSavePlanner):
    """Hands DCP's writer the rows of this rank."""

    def __init__(self, tables: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tables = tables

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._tables[write_item.index.fqn].contiguous()


def _make_folder(world: World, directory: Path, step: int) -> tuple[Path, str]:
    """An empty temporary folder that all ranks see, and the name it will have.

    Raises:
        OSError: On all ranks.
    """
    name, error = "", None
    if world.is_main:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            root = shards_root(directory)
            root.mkdir(exist_ok=True)
            remove_unused(directory, checkpoint_steps(directory))
            root.mkdir(exist_ok=True)
            name = free_name(directory, step)
            partial = f".{name}-{secrets.token_hex(8)}.partial"
            (root / partial).mkdir()
            name = f"{root / partial}\n{name}"
        except OSError as failure:
            error = _said(failure)
    _raise(world.failures(error))
    place, _, name = world.text_from_main(name).rpartition("\n")
    folder = Path(place)
    # The random part of its name makes sure that it is rank 0's and no other machine's.
    failures = world.failures(
        None
        if folder.is_dir()
        else f"{folder}, made by rank 0, does not exist here: a run on several machines needs its folder on a file "
        "system that all of them share (--output-dir)"
    )
    if failures and world.is_main:
        shutil.rmtree(folder, ignore_errors=True)
    _raise(failures)
    return folder, name


def _write_shard(folder: Path, rank: int, layout: _Layout, tables: Mapping[str, Tensor]) -> _Written:
    """Write this rank's file and see to it that it has reached the disk.

    Raises:
        OSError: It cannot be written.
    """
    path = folder / shard_name(rank)
    writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
    plan = writer.prepare_global_plan(layout.plans())[rank]
    with failed_writes(path):
        results = writer.write_data(plan, _Rows(tables)).wait()
    places = torch.zeros(len(layout.tables), 2, dtype=torch.int64)
    position = {name: number for number, name in enumerate(layout.tables)}
    for result in results:
        stored = result.storage_data
        assert stored.relative_path == path.name
        places[position[result.index.fqn]] = torch.tensor([stored.offset, stored.length])
    return _Written(places, checksum(path))


def _commit(folder: Path, directory: Path, step: int, rest: dict[str, Any], manifest: dict[str, Any]) -> Path:
    """Rank 0, when all shards are written: their index, their final name, and the .ckpt that makes them count.

    Raises:
        OSError: Something cannot be written.
    """
    for name, (size, _) in manifest["files"].items():
        found = (folder / name).stat().st_size
        if found != size:
            raise OSError(f"{folder / name} has {found} bytes here and {size} on the rank that wrote it")
    with failed_writes(folder / METADATA):
        _write_metadata(folder, manifest)
    # Not opened again, but counted among the files: a folder that differs is not the one that was written.
    manifest["files"][METADATA] = list(checksum(folder / METADATA))
    check_manifest(manifest)
    sync_folder(folder)
    root = folder.parent
    final = root / manifest["folder"]
    os.rename(folder, final)
    try:
        sync_folder(root)
        path = write_checkpoint(directory, step, rest | {"shards": manifest})
    except BaseException:
        if not _is_committed(directory / f"step-{step:09d}.ckpt", final.name):
            shutil.rmtree(final, ignore_errors=True)
        raise
    remove_unused(directory, checkpoint_steps(directory), keep=manifest["folder"])
    return path


def _is_committed(path: Path, name: str) -> bool:
    """Whether a .ckpt lists the shards in the folder of this name: what came after its rename may have failed too."""
    try:
        return torch.load(path, weights_only=True)["shards"]["folder"] == name
    except Exception:  # another one's, of an earlier save, or none
        return False


def _write_metadata(folder: Path, manifest: Mapping[str, Any]) -> None:
    """DCP's own index, for other tools."""
    writer = FileSystemWriter(folder)
    plans, metadata = create_default_global_save_plan(_Layout(manifest["counts"], manifest["tables"]).plans())
    places = _places(manifest)
    results = [[SimpleNamespace(index=item.index, storage_data=places[item.index]) for item in p.items] for p in plans]
    writer.finish(metadata, results)  # type: ignore[arg-type]


def _places(manifest: Mapping[str, Any]) -> dict[MetadataIndex, Any]:
    """Where DCP finds each rank's rows of each table."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # the type that its reader wants in `.metadata`

    position = {name: number for number, name in enumerate(manifest["tables"])}
    return {
        item.index: _StorageInfo(shard_name(rank), *manifest["places"][rank, position[item.index.fqn]].tolist())
        for rank, plan in enumerate(_Layout(manifest["counts"], manifest["tables"]).plans())
        for item in plan.items
    }


# Reading


class _IntoRows(LoadPlanner):
    """Lets DCP's reader fill the tables of this rank with the shards that it reads, one below the other."""

    def __init__(self, manifest: Mapping[str, Any], ranks: Sequence[int], names: Sequence[str]) -> None:
        counts = manifest["counts"]
        num = sum(counts[rank] for rank in ranks)
        described = manifest["tables"]
        self.tables = {
            name: torch.zeros(num, *described[name]["row"], dtype=dtype_of(described[name])) for name in names
        }
        plans = _Layout(counts, described).plans()
        self._items: list[ReadItem] = []
        start = 0
        for rank in ranks:
            for item in plans[rank].items:
                if item.index.fqn not in self.tables or item.tensor_data is None:
                    continue
                lengths = item.tensor_data.chunk.sizes
                nowhere = torch.Size([0] * len(lengths))
                target = torch.Size([start, *nowhere[1:]])
                kind = LoadItemType.TENSOR
                self._items.append(ReadItem(kind, item.index, target, item.index, nowhere, lengths))
            start += counts[rank]

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(self._items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        start = read_item.dest_offsets[0]
        return self.tables[read_item.dest_index.fqn][start : start + read_item.lengths[0]]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """What `resolve_tensor` gave is where the rows belong."""


def read_rows(manifest: Mapping[str, Any], part: tuple[int, int] = (0, 1), prefix: str = "") -> dict[str, Tensor]:
    """The Gaussians of every R-th shard from the r-th on, in the shards' order.

    Args:
        manifest: A checkpoint's entry `shards`, as `load_checkpoint` returns it.
        part: r and R: which of how many ranks this is.
        prefix: Only tables whose names begin like this.

    Raises:
        ValueError: A shard cannot be read.
    """
    ranks = range(part[0], len(manifest["counts"]), part[1])
    names = [name for name in manifest["tables"] if name.startswith(prefix)]
    reader = FileSystemReader(manifest["path"])
    try:
        planner = _IntoRows(manifest, ranks, names)
        reader.set_up_storage_reader(Metadata({}, storage_data=_places(manifest)), is_coordinator=False)
        reader.read_data(planner.create_local_plan(), planner).wait()
    except Exception as error:  # foreign bytes can raise nearly anything
        raise ValueError(
            f"The shards in {manifest['path']} cannot be read ({type(error).__name__}: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else 'no reason given'})"
        ) from error
    return planner.tables


def with_gaussians(content: Mapping[str, Any]) -> dict[str, Tensor]:
    """The entry `pipeline` of a checkpoint with all its Gaussians, for one process that draws them.

    Raises:
        ValueError: A shard cannot be read.
    """
    if "shards" not in content:
        return content["pipeline"]
    return content["pipeline"] | read_rows(content["shards"], prefix=GAUSSIANS)


def own_state(content: dict[str, Any], model: DistributedGaussians) -> dict[str, Any]:
    """A checkpoint's content as this rank's own: with its Gaussians and what belongs to them; all ranks call this.

    With as many ranks as wrote it each gets what it had. Otherwise every Gaussian goes to the rank whose boxes hold it;
    one process gets all.

    Args:
        content: As of `load_checkpoint`, without the rows that are in shards.
        model: Takes the checkpoint's boxes if there are several ranks.

    Raises:
        ValueError: A shard cannot be read, or the checkpoint has fewer boxes than there are ranks; on all ranks.
        LostRank: A peer is gone.
    """
    world: World = getattr(model, "world", None) or World()
    manifest = content.get("shards")
    if manifest is None and world.size == 1:
        return content
    part = (world.rank, world.size)
    tables, error = {}, None
    if manifest is not None:
        rest = {name: value for name, value in content.items() if name != "shards"}
        try:
            tables = read_rows(manifest, part)
        except ValueError as failure:
            error = str(failure)
    else:
        rest, tables = split_rows(content)
        tables = {name: value.tensor_split(world.size)[world.rank] for name, value in tables.items()}
    failures = world.failures(error)
    if failures:
        raise ValueError("; ".join(failures) if world.size > 1 else error)
    if world.size > 1:
        rest = copy.deepcopy(rest)  # what stays must not hang on the file, which another rank may delete
    if world.size > 1 and (manifest is None or len(manifest["counts"]) != world.size):
        names = ("axis", "threshold", "children")
        model.take_tree(PartitionTree.from_state_dict({n: rest["pipeline"].get(f"_model.tree_{n}") for n in names}))
        tables = move_rows(world, _owners(model, tables[f"{GAUSSIANS}means"]), tables)
    return join_rows(rest, tables)


def _owners(model: DistributedGaussians, means: Tensor) -> Tensor:
    """The rank that each of these points [N, 3] of this rank belongs to: [N] int64."""
    if model.by_gaussians and model.config.placement == "kdtree":  # boxes over the points of all ranks
        everywhere = torch.cat(model.world.gather_uneven(means, "migration"))
        return PartitionTree.build(everywhere, model.world.size).locate(means).long()
    return model.rank_of(means)


# Agreement


def _together(world: World, work: Callable[[], Any], main_only: bool = False) -> Any:
    """Do something on every rank (or on rank 0) and go on only if it succeeded on all.

    Raises:
        OSError: On all ranks, naming those where it failed.
    """
    result, error = None, None
    if world.is_main or not main_only:
        try:
            result = work()
        except OSError as failure:
            error = _said(failure)
    _raise(world.failures(error))
    return result


def _raise(failures: list[str]) -> None:
    if failures:
        raise OSError("; ".join(failures))


def _said(error: OSError) -> str:
    return str(error) or type(error).__name__
