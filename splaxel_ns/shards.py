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
import json
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
from splaxel_ns.migration import move_rows
from splaxel_ns.partition import PartitionTree
from splaxel_ns.shard_files import (
    METADATA,
    check_manifest,
    checksum,
    dtype_of,
    free_name,
    remove_unused,
    shard_name,
    shards_root,
)

if TYPE_CHECKING:
    from splaxel_ns.distributed import DistributedGaussians

GAUSSIANS = "_model.gauss_params."
"""How the names of the Gaussians' parameters begin in a checkpoint's entry `pipeline`."""
MOMENT = "optimizers."
STATISTIC = "strategy."


# What belongs to single Gaussians


def split_rows(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take what belongs to single Gaussians out of a run's state.

    Args:
        state: As of `resume.run_state`; not changed.

    Returns:
        The rest, and the tables [N, ...] by name: parameters, moments, statistics.
    """
    pipeline = {name: value for name, value in state["pipeline"].items() if not name.startswith(GAUSSIANS)}
    tables = {name: value for name, value in state["pipeline"].items() if name.startswith(GAUSSIANS)}
    num = len(tables[f"{GAUSSIANS}means"])
    optimizers = dict(state["optimizers"])
    for name, parameter in list(tables.items()):
        group = name.removeprefix(GAUSSIANS)
        if group not in optimizers:
            continue
        kept: dict[str, Any] = {}
        for entry, value in optimizers[group]["state"].get(0, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                tables[f"{MOMENT}{group}.{entry}"] = value
            else:
                kept[entry] = value
        optimizers[group] = optimizers[group] | {"state": {0: kept} if kept else {}}
    model = dict(state["model"])
    statistics = dict(model.get("strategy", {}))
    for name, value in list(statistics.items()):
        if isinstance(value, Tensor) and value.dim() and len(value) == num:
            tables[f"{STATISTIC}{name}"] = statistics.pop(name)
    rest = {**state, "pipeline": pipeline, "optimizers": optimizers, "model": model | {"strategy": statistics}}
    return rest, {name: tables[name].detach() for name in sorted(tables)}


def join_rows(rest: Mapping[str, Any], tables: Mapping[str, Tensor]) -> dict[str, Any]:
    """A run's state with these Gaussians: the reverse of `split_rows`, for other rows too.

    Raises:
        ValueError: A table belongs to nothing in the state.
    """
    state = {**rest, "pipeline": dict(rest["pipeline"]), "optimizers": dict(rest["optimizers"])}
    state["model"] = rest["model"] | {"strategy": dict(rest["model"].get("strategy", {}))}
    for name, value in tables.items():
        group, _, entry = name.removeprefix(MOMENT).rpartition(".")
        if name.startswith(GAUSSIANS):
            state["pipeline"][name] = value
        elif name.startswith(STATISTIC):
            state["model"]["strategy"][name.removeprefix(STATISTIC)] = value
        elif name.startswith(MOMENT) and group in state["optimizers"]:
            optimizer = state["optimizers"][group]
            kept = optimizer["state"].get(0, {}) | {entry: value}
            state["optimizers"][group] = optimizer | {"state": {0: kept}}
        else:
            raise ValueError(f"The checkpoint's table {name!r} belongs to nothing in it: it is damaged")
    return state


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
    rest, tables, layout = _agree_on_tables(world, rest, tables)
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


def _agree_on_tables(
    world: World, rest: dict[str, Any], tables: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor], _Layout]:
    """Give every rank the same tables, zeros where a rank that saw nothing yet has none, and say who has how many rows.

    Adam's count of steps is that of the job: the rest gets the highest.
    """
    num = len(tables[f"{GAUSSIANS}means"])
    own = {
        "num": num,
        "tables": {
            name: {"dtype": str(value.dtype).removeprefix("torch."), "row": list(value.shape[1:])}
            for name, value in tables.items()
        },
        "steps": {
            name: float(optimizer["state"][0]["step"])
            for name, optimizer in rest["optimizers"].items()
            if f"{GAUSSIANS}{name}" in tables and "step" in optimizer["state"].get(0, {})
        },
    }
    said = [json.loads(text) for text in _texts(world, json.dumps(own))]
    agreed: dict[str, dict[str, Any]] = {}
    steps: dict[str, float] = {}
    for one in said:
        for name, table in one["tables"].items():
            assert agreed.setdefault(name, table) == table, f"Ranks hold {name} of different kinds"
        for name, step in one["steps"].items():
            steps[name] = max(step, steps.get(name, 0.0))
    optimizers = dict(rest["optimizers"])
    for name, step in steps.items():
        kept = optimizers[name]["state"].get(0, {}) | {"step": torch.tensor(step)}
        optimizers[name] = optimizers[name] | {"state": {0: kept}}
    agreed = {name: agreed[name] for name in sorted(agreed)}
    full = {
        name: tables[name] if name in tables else torch.zeros(num, *table["row"], dtype=dtype_of(table))
        for name, table in agreed.items()
    }
    statistics = {
        name: value for name, value in rest["model"]["strategy"].items() if f"{STATISTIC}{name}" not in agreed
    }
    rest = rest | {"optimizers": optimizers, "model": rest["model"] | {"strategy": statistics}}
    return rest, full, _Layout([one["num"] for one in said], agreed)


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
    place, name = world.text_from_main(name).split("\n")
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
        shutil.rmtree(final, ignore_errors=True)
        raise
    remove_unused(directory, checkpoint_steps(directory), keep=manifest["folder"])
    return path


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
    planner = _IntoRows(manifest, ranks, [name for name in manifest["tables"] if name.startswith(prefix)])
    reader = FileSystemReader(manifest["path"])
    reader.set_up_storage_reader(Metadata({}, storage_data=_places(manifest)), is_coordinator=False)
    try:
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
        rest = copy.deepcopy(rest)  # what stays must not hang on the file
    failures = world.failures(error)
    if failures:
        raise ValueError("; ".join(failures) if world.size > 1 else error)
    if world.size > 1 and (manifest is None or len(manifest["counts"]) != world.size):
        names = ("axis", "threshold", "children")
        model.take_tree(PartitionTree.from_state_dict({n: rest["pipeline"][f"_model.tree_{n}"] for n in names}))
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


def _texts(world: World, text: str) -> list[str]:
    """Everybody's string."""
    own = torch.tensor(list(text.encode()), dtype=torch.uint8)
    return [bytes(part.tolist()).decode() for part in world.gather_uneven(own, "agreement")]
