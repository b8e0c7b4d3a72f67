"""Writing and reading a run's checkpoints: whole or not at all, and without executing anything they contain.

A checkpoint is one file, `nerfstudio_models/step-XXXXXXXXX.ckpt`, in nerfstudio's layout (`step`, `pipeline`,
`optimizers`, `schedulers`, `scalers`) with entries of our own beside it. It holds tensors, numbers, strings, lists,
tuples and dictionaries only, so that `torch.load(weights_only=True)` reads it. Of several ranks the file holds all but
what belongs to single Gaussians; that is in the shards which its entry `shards` lists (`shard_files`).
"""

from __future__ import annotations

import os
import random
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from splaxel_ns.shard_files import check_files, check_manifest, remove_unused, shards_root

FORMAT = "splaxel"
VERSION = 1
SHARDED_VERSION = 2
"""Of a checkpoint whose Gaussians are in shards."""
REQUIRED = {
    "step": int,
    "pipeline": dict,
    "optimizers": dict,
    "schedulers": dict,
    "scalers": dict,
    "batch_size": int,
    "datamanager": dict,
    "model": dict,
    "generators": dict,
}
"""What a checkpoint must hold besides `format` and `version`, and of which type."""
MAX_STEP = 2**31 - 1
REMEDY = "Use another checkpoint (--load-checkpoint FILE, or --load-dir FOLDER with --load-step)."

_NAME = re.compile(r"step-(\d{9}|[1-9]\d{9,})\.ckpt")
_PARTIAL = ".ckpt.partial"


def write_checkpoint(directory: Path, step: int, content: dict[str, Any]) -> Path:
    """Write one checkpoint so that `directory` only ever holds complete ones.

    The file grows beside `directory`, not in it: nerfstudio takes every name in there for a step. It reaches the disk
    before it gets its final name, so a crash or a full disk leaves the checkpoints before it as they were.

    Args:
        directory: The run's `nerfstudio_models` folder; made if missing.
        step: The last finished step.
        content: The entries of `REQUIRED`, and `shards` if there are some.

    Raises:
        OSError: The folder or the file cannot be written, or the disk is full.
    """
    version = SHARDED_VERSION if "shards" in content else VERSION
    checked = plain({"format": FORMAT, "version": version, **content})
    directory.mkdir(parents=True, exist_ok=True)
    outside = directory.resolve().parent
    for orphan in outside.glob(f".step-*{_PARTIAL}"):
        orphan.unlink()
    partial = outside / f".step-{step:09d}{_PARTIAL}"
    final = directory / f"step-{step:09d}.ckpt"
    try:
        with failed_writes(partial), open(partial, "wb") as file:
            torch.save(checked, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, final)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(directory)
    return final


@contextmanager
def failed_writes(path: Path) -> Iterator[None]:
    """A failed write becomes an OSError that names the file; torch reports that of its archive as a RuntimeError."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(f"{path}: {error.strerror or error}") from error
    except RuntimeError as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        # The cause, where there is one, is the OSError.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OSError(f"{path}: {str(cause).splitlines()[0]}") from error


def remove_others(directory: Path, keep: Path) -> None:
    """Delete every checkpoint of `directory` but `keep`, and their shards; files with other names stay."""
    for step in checkpoint_steps(directory):
        path = directory / f"step-{step:09d}.ckpt"
        if path != keep:
            path.unlink(missing_ok=True)
    # After the files that name them: a crash in between leaves shards without a checkpoint, not the reverse.
    remove_unused(directory, checkpoint_steps(directory))


def checkpoint_steps(directory: Path) -> list[int]:
    """The steps of the checkpoints in `directory`, ascending. Names that are no checkpoint's are ignored."""
    if not directory.is_dir():
        return []
    matches = [_NAME.fullmatch(path.name) for path in directory.iterdir() if path.is_file()]
    return sorted(int(match.group(1)) for match in matches if match)


def newest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint of the highest step in `directory`, None if there is none."""
    steps = checkpoint_steps(directory)
    return directory / f"step-{steps[-1]:09d}.ckpt" if steps else None


def load_checkpoint(path: Path, remedy: str = REMEDY, part: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """Read a checkpoint, every byte of it and of its shards verified, without executing code from it.

    Args:
        path: The file.
        remedy: What an error recommends, a sentence.
        part: Which of how many ranks this is: together they verify everything. Of several ranks none needs all
            tensors, so they stay on the disk until they are used.

    Returns:
        The content; what belongs to single Gaussians may be in shards, in the folder `content["shards"]["path"]`.

    Raises:
        ValueError: The file is missing, truncated, corrupted, not a splaxel checkpoint, or of another format version.
    """
    return _read_verified(path, remedy, mapped=part[1] > 1, part=part)


def read_verified_before(path: Path) -> dict[str, Any]:
    """Read a checkpoint that `verify_for_evaluation` has let pass, without looking through its bytes again.

    Raises:
        ValueError: As for `load_checkpoint`.
    """
    return _read_verified(path, REMEDY, mapped=True, part=None)


def verify_for_evaluation(directory: Path, load_step: int | None) -> None:
    """See to it that nerfstudio's `eval_setup`, which has no checks of its own, will load a sound checkpoint.

    Args:
        directory: The run's `nerfstudio_models` folder.
        load_step: The step to be loaded, None for the newest.

    Raises:
        ValueError: There is none, or what `load_checkpoint` refuses; nothing of it has been executed.
    """
    if load_step is not None:
        remedy = f"load_step in {directory.parent / 'config.yml'} asks for it: null there means the newest checkpoint."
        path = directory / f"step-{load_step:09d}.ckpt"
        if not path.is_file():
            raise ValueError(f"There is no checkpoint {path}. {remedy}")
        _read_verified(path, f"Restore it from a copy; {remedy}", mapped=True)
        return
    newest = newest_checkpoint(directory)
    if newest is None:
        raise ValueError(
            f"There is no checkpoint (step-XXXXXXXXX.ckpt) in {directory}: start the command in the folder the "
            f"training was started in, or correct output_dir in {directory.parent / 'config.yml'}."
        )
    strays = sorted(path.name for path in directory.iterdir() if not _NAME.fullmatch(path.name))
    if strays:
        raise ValueError(
            f"{directory / strays[0]} is no checkpoint, but nerfstudio takes every name in this folder for one: move "
            "it to another."
        )
    _read_verified(newest, "Move it to another folder to use the one before, if there is one.", mapped=True)


def _read_verified(path: Path, remedy: str, mapped: bool, part: tuple[int, int] | None = (0, 1)) -> dict[str, Any]:
    """`load_checkpoint`; mapped: large tensors stay on the disk until they are used; part None: nothing is verified."""
    if not path.is_file():
        raise ValueError(f"There is no checkpoint {path}.")
    if part is not None and part[0] == 0:
        _verify_archive(path, remedy)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # unpickling foreign bytes can raise nearly anything
        raise ValueError(
            f"{path} holds something other than tensors and plain values, so it was not loaded "
            f"({_first_line(error)}). {remedy}"
        ) from error
    _check_content(path, content, remedy)
    if "shards" in content:
        folder = shards_root(path.parent) / content["shards"]["folder"]
        if part is not None:
            try:
                check_files(folder, content["shards"], part)
            except ValueError as error:
                raise ValueError(f"{path} is damaged: {error}. {remedy}") from error
        content["shards"]["path"] = folder
    return content


def _verify_archive(path: Path, remedy: str) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            # torch.load does not look at the checksums of the tensors it reads.
            damaged = archive.testzip()
    except Exception as error:  # whatever a damaged archive makes zipfile raise
        raise ValueError(f"{path} is truncated, corrupted or no checkpoint ({_first_line(error)}). {remedy}") from error
    if damaged is not None:
        raise ValueError(f"{path} is corrupted: {damaged} does not match its checksum. {remedy}")


def load_newest_checkpoint(directory: Path) -> tuple[Path, dict[str, Any]]:
    """Read the newest checkpoint in a folder; one that cannot be read is reported, and the one before is tried.

    Returns:
        The file and its content.

    Raises:
        ValueError: There is none, or none can be read.
    """
    steps = checkpoint_steps(directory)
    if not steps:
        raise ValueError(f"There is no checkpoint (step-XXXXXXXXX.ckpt) in {directory}.")
    for step in reversed(steps[1:]):
        path = directory / f"step-{step:09d}.ckpt"
        try:
            return path, load_checkpoint(path)
        except ValueError as error:
            CONSOLE.print(f"{error} Trying the one before.", style="bold yellow", markup=False)
    path = directory / f"step-{steps[0]:09d}.ckpt"
    return path, load_checkpoint(path)


def _check_content(path: Path, content: Any, remedy: str) -> None:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is a checkpoint of another method, not of splaxel. {remedy}")
    version = content.get("version")
    if version not in (VERSION, SHARDED_VERSION) or isinstance(version, bool):
        raise ValueError(
            f"{path} has checkpoint version {version!r}, this splaxel reads versions {VERSION} and {SHARDED_VERSION}: "
            "use the splaxel that wrote it."
        )
    for name, kind in REQUIRED.items():
        value = content.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{path} is incomplete: its entry {name!r} is missing or no {kind.__name__}. {remedy}")
    if not 0 <= content["step"] <= MAX_STEP:
        raise ValueError(f"{path} is damaged: its step is {content['step']}, not from 0 to {MAX_STEP}. {remedy}")
    _check_generators(path, content["generators"], remedy)
    if (version == SHARDED_VERSION) != ("shards" in content):
        raise ValueError(f"{path} is damaged: its version is {version} and its list of shards is missing. {remedy}")
    if "shards" in content:
        try:
            check_manifest(content["shards"])
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}. {remedy}") from error


def _check_generators(path: Path, states: dict[Any, Any], remedy: str) -> None:
    for name, own in generator_states().items():
        state = states.get(name)
        fits = isinstance(state, Tensor) and state.dtype == own.dtype and state.shape == own.shape
        if isinstance(state, Tensor) and fits and name != "torch":  # 624 words of 32 bits and a position among them
            fits = bool(((state >= 0) & (state < 2**32)).all()) and int(state[-1]) <= len(state) - 1
        if not fits:
            raise ValueError(f"{path} is damaged: its state of the generator {name!r} is none. {remedy}")


def plain(value: Any, where: str = "checkpoint") -> Any:
    """`value` as it may stand in a checkpoint: numpy numbers become Python's, tensors no larger than they look.

    Raises:
        TypeError: Something in it is neither a tensor nor a plain value; the message says where.
    """
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        # A view would be written with the whole storage behind it.
        return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):  # OrderedDict and Counter too
        return {key: plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item, f"{where}[{index}]") for index, item in enumerate(value))
    raise TypeError(f"{where} is a {type(value).__name__}, which a checkpoint may not hold")


def generator_states() -> dict[str, Tensor]:
    """The states of the global generators of torch, numpy and Python, as tensors."""
    version, words, _ = random.getstate()
    assert version == 3
    numpy_state: Any = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.tensor([*numpy_state[1].tolist(), numpy_state[2]], dtype=torch.int64),
    }


def restore_generators(states: dict[str, Tensor]) -> None:
    """Put the global generators back to where `generator_states` found them."""
    torch.set_rng_state(states["torch"])
    random.setstate((3, tuple(states["python"].tolist()), None))
    *words, position = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), position, 0, 0.0))


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def sync_folder(directory: Path) -> None:
    """Make the new names in `directory` survive a power failure."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
