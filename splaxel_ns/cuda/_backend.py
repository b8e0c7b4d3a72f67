"""Builds the C++ ops on first use and loads them.

The library is compiled once per source text, compiler and torch version into torch's extension cache
(`TORCH_EXTENSIONS_DIR`, by default `~/.cache/torch_extensions`). Importing this module compiles nothing.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

from splaxel_ns.cuda._build import HERE, cache_root, compiler, digest, environment, exclusive, ninja_on_path, say

_CXX_FLAGS = ["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
_LINK_FLAGS = ["-fopenmp"]
_NAME = "splaxel_ops"

_mutex = threading.Lock()
_loaded = False
_failure: RuntimeError | None = None


def load(device: torch.device | None = None) -> Any:
    """Returns `torch.ops.splaxel`, compiling it (under a minute, with a message) if this source was never compiled.

    Args:
        device: where the op's tensors are; for a GPU its kernels are loaded too (`_gpu_backend`).

    Raises:
        RuntimeError: not Linux on x86-64, no C++ compiler, no folder to compile in, or the compilation failed.
    """
    global _loaded, _failure
    with _mutex:
        if _failure is not None:  # torch would not try again within this process
            raise _failure
        if not _loaded:
            _check_platform()
            folder = build_folder()
            try:
                _find_or_build(folder)
            except OSError as error:
                _failure = RuntimeError(
                    f"Splaxel cannot use {folder} for the compiled kernels ({error}): "
                    "set TORCH_EXTENSIONS_DIR to a writable folder."
                )
                raise _failure from error
            except RuntimeError as error:
                _failure = error
                raise
            if hasattr(torch.ops.splaxel, "composite"):  # tests of the build compile other things
                from splaxel_ns.cuda import _fake

                _fake.register()
            _loaded = True
    if device is not None and device.type == "cuda":
        from splaxel_ns.cuda import _gpu_backend

        _gpu_backend.load()
    return torch.ops.splaxel


@cache
def thresholds() -> dict[str, float]:
    """The constants of include/common.h: alpha_min, alpha_max, stop, blur (px^2), clamp_margin, extent_slack."""
    return dict(load().thresholds())


def build_folder() -> Path:
    """The folder that holds the objects, the libraries and the lock of this checkout's build."""
    return cache_root() / f"splaxel_{digest(*_environment(), *compiler())}"


def _environment() -> list[str]:
    return environment(*_CXX_FLAGS, *_LINK_FLAGS)


def _mark() -> str:
    """The name of the file by which a folder's libraries are recognised where no compiler is there to ask for."""
    return f"built_for_{digest(*_environment())}"


def _sources() -> list[Path]:
    return [HERE / "ext.cpp", *sorted((HERE / "csrc").glob("*.cpp"))]


def _source_hash() -> str:
    everything = hashlib.sha256()
    headers = [*(HERE / "csrc").glob("*.h"), *(HERE / "include").glob("*.h")]
    for path in [*_sources(), *sorted(headers)]:
        everything.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return everything.hexdigest()[:12]


def _check_platform() -> None:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise RuntimeError(
            f"Splaxel's kernels run on Linux on x86-64 (WSL2 included); this is {sys.platform} on {platform.machine()}."
        )


def _find_or_build(folder: Path) -> None:
    """Loads the library of these sources, from `folder`, or without a compiler from any that fits; or compiles it."""
    library = folder / f"{_NAME}_{_source_hash()}.so"
    folders = [folder]
    if not compiler()[1]:
        folders += sorted(mark.parent for mark in folder.parent.glob(f"splaxel_*/{_mark()}"))
    for candidate in folders:
        if (candidate / library.name).is_file():
            _load_library(candidate / library.name)
            return
    _build_and_load(folder, library)


def _load_library(library: Path) -> None:
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise RuntimeError(f"Splaxel cannot load {library} ({error}): delete it to compile it again.") from error


def _build_and_load(folder: Path, library: Path) -> None:
    """Compiles what changed and leaves the result as `library`; one process at a time, the others wait for it."""
    name, path = compiler()
    if not path:
        raise RuntimeError(
            f"Splaxel compiles its CPU kernels on first use and found no C++ compiler ({name!r} is not on PATH). "
            "Install one (Debian, Ubuntu: apt install g++) or name one in the environment variable CXX."
        )
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / "splaxel.lock"):
        if library.is_file():  # another process built it while this one waited
            _load_library(library)
            return
        # torch's own lock is the mere existence of this file: after a killed build it would be waited for for ever.
        # Whoever holds ours is alone here, so that one is stale.
        (folder / "lock").unlink(missing_ok=True)
        _compile_and_load(folder, library, path)


def _compile_and_load(folder: Path, library: Path, path: str) -> None:
    from torch.utils import cpp_extension

    start = time.monotonic()
    sources = _sources()
    say(f"compiling the CPU kernels ({len(sources)} files, once, about a minute) in {folder}")
    try:
        with ninja_on_path():
            cpp_extension.load(
                name=_NAME,
                sources=[str(source) for source in sources],
                extra_cflags=[*_CXX_FLAGS],  # torch appends to its arguments
                extra_ldflags=[*_LINK_FLAGS],
                extra_include_paths=[str(HERE / "include"), str(HERE / "csrc")],
                build_directory=str(folder),
                is_python_module=False,
                is_standalone=False,
                with_cuda=False,
            )
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        # Of ninja's output, what the compiler said: not the command lines, several kilobytes each.
        said = [line for line in str(error).splitlines() if "-DTORCH_EXTENSION_NAME" not in line]
        text = "\n".join(said)
        raise RuntimeError(f"Splaxel's CPU kernels did not compile in {folder} with {path}:\n{text}") from error
    # A copy under the sources' hash: later processes load it without asking ninja, and an edited checkout that
    # rebuilds beside a running one never changes the file under it.
    partial = library.with_suffix(f".{os.getpid()}")
    shutil.copy2(folder / f"{_NAME}.so", partial)
    partial.replace(library)
    (folder / _mark()).touch()
    for old in folder.glob(f"{_NAME}_*.so"):
        if old != library:
            old.unlink(missing_ok=True)
    say(f"compiled the CPU kernels in {time.monotonic() - start:.0f} s")
