"""Builds the CUDA kernels on first use, or ahead (`python -m splaxel_ns.cuda build`), and loads them.

One library per source text, torch, CUDA and list of architectures, beside the CPU ops' in torch's extension cache. It
adds implementations for CUDA tensors to the ops that `_backend` loads. Importing this module compiles nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from splaxel_ns.cuda import _build

ARCHS = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
"""Compute capabilities that a library for any supported GPU is built for."""
_NAME = "splaxel_gpu"
_CXX_FLAGS = ["-O3", "-fvisibility=hidden"]
_CUDA_FLAGS = ["-O3", "-lineinfo"]
_STILL = "Splaxel's CPU kernels work without: keep tensors on the CPU."

_mutex = threading.Lock()
_loaded = False


def load() -> None:
    """Adds the GPU's kernels to the ops, compiling them for it (with a message) if they never were.

    `_backend.load` calls this; it defines the ops first.

    Raises:
        RuntimeError: torch without CUDA, no GPU, no nvcc or C++ compiler, or the compilation failed. The message says
            which, and what still works.
    """
    global _loaded
    with _mutex:
        if _loaded:
            return
        if not torch.cuda.is_available():
            _check_torch()
            raise RuntimeError(f"torch finds no CUDA device (is the driver installed?). {_STILL}")
        major, minor = torch.cuda.get_device_capability()
        library = find(f"{major}.{minor}") or build([f"{major}.{minor}"])
        if not _loaded:  # compiling also loads
            _load_library(library)
            _loaded = True


def find(arch: str) -> Path | None:
    """A library of these sources that runs on a GPU of this compute capability, if one was built."""
    for library in sorted(build_folder().glob(f"{_NAME}_{_source_hash()}_*.so")):
        built_for = library.stem.rsplit("_", 1)[1].split("-")
        if any(_runs_on(one, arch) for one in built_for):
            return library
    return None


def build(archs: Sequence[str] = ARCHS) -> Path:
    """Compiles the kernels for some compute capabilities and returns the library; nothing is done if it is there.

    Raises:
        RuntimeError: as `load`, but for the GPU, which is not needed.
        ValueError: an architecture is not of the form 9.0, or older than 8.0.
    """
    for arch in archs:
        if not re.fullmatch(r"\d+\.\d", arch) or float(arch) < 8.0:
            raise ValueError(
                f"architectures are compute capabilities from 8.0, such as {', '.join(ARCHS)}; got {arch!r}"
            )
    if not archs:
        raise ValueError("name at least one architecture, such as 9.0")
    _check_torch()
    archs = sorted(set(archs), key=float)
    folder = build_folder()
    library = folder / f"{_NAME}_{_source_hash()}_{'-'.join(archs)}.so"
    if library.is_file():
        return library
    home = _cuda_home()
    compiler, path = _build.compiler()
    if not path:
        raise RuntimeError(f"the CUDA kernels need a C++ compiler, and {compiler!r} is not on PATH. {_STILL}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _build.exclusive(folder / "splaxel.lock"):
            if not library.is_file():  # another process may have built it while this one waited
                (folder / "lock").unlink(missing_ok=True)  # torch's own, stale: see _backend
                _compile(folder, library, archs, home)
    except OSError as error:
        raise RuntimeError(
            f"Splaxel cannot use {folder} for the compiled kernels ({error}): set TORCH_EXTENSIONS_DIR to a writable "
            "folder."
        ) from error
    return library


def build_folder() -> Path:
    """The folder of this checkout's libraries for this torch and its CUDA."""
    parts = [*_build.environment(*_CXX_FLAGS, *_CUDA_FLAGS), str(torch.version.cuda)]
    return _build.cache_root() / f"{_NAME}_{_build.digest(*parts)}"


def _runs_on(built_for: str, arch: str) -> bool:
    """Binaries run on the same major version from their minor version on."""
    return built_for.split(".")[0] == arch.split(".")[0] and int(built_for.split(".")[1]) <= int(arch.split(".")[1])


def _sources() -> list[Path]:
    folder = _build.HERE / "gpu"
    return [*sorted(folder.glob("*.cpp")), *sorted(folder.glob("*.cu"))]


def _source_hash() -> str:
    everything = hashlib.sha256()
    headers = [path for part in ("gpu", "csrc", "include") for path in sorted((_build.HERE / part).glob("*.h"))]
    for path in [*_sources(), *headers]:
        everything.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return everything.hexdigest()[:12]


def _check_torch() -> None:
    if torch.version.cuda is None:
        raise RuntimeError(
            f"this torch ({torch.__version__}) was built without CUDA; install one that was, see pytorch.org. {_STILL}"
        )


def _cuda_home() -> str:
    """The CUDA toolkit, whose nvcc must be of torch's major version."""
    wanted = str(torch.version.cuda)
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc")
    # An nvcc on PATH may be a wrapper outside its toolkit.
    around = [Path(on_path).resolve().parents[1]] if on_path else []
    candidates = [Path(home)] if home else [*around, Path("/usr/local/cuda")]
    found = [
        each for each in candidates if (each / "bin" / "nvcc").exists() and (each / "include/cuda_runtime.h").exists()
    ]
    if not found:
        where = f"in CUDA_HOME ({home})" if home else "on PATH or in /usr/local/cuda"
        raise RuntimeError(
            f"the CUDA kernels are compiled on first use, and there is no CUDA toolkit (nvcc and its headers) {where}: "
            f"install version {wanted}, or set CUDA_HOME. {_STILL}"
        )
    nvcc = found[0] / "bin" / "nvcc"
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", text)
    if release is None or release[1] != wanted.split(".")[0]:
        version = f"{release[1]}.{release[2]}" if release else "of unknown version"
        raise RuntimeError(
            f"{nvcc} is CUDA {version}, but this torch was built for CUDA {wanted}: install that toolkit, or set "
            f"CUDA_HOME to it. {_STILL}"
        )
    return str(found[0])


def _compile(folder: Path, library: Path, archs: Sequence[str], home: str) -> None:
    global _loaded
    start = time.monotonic()
    _build.say(f"compiling the CUDA kernels for {', '.join(archs)} (once, a minute or two) in {folder}")
    with _environment(CUDA_HOME=home, TORCH_CUDA_ARCH_LIST=";".join(archs)), _build.ninja_on_path():
        from torch.utils import cpp_extension

        home_before, cpp_extension.CUDA_HOME = cpp_extension.CUDA_HOME, home
        try:
            cpp_extension.load(
                name=_NAME,
                sources=[str(source) for source in _sources()],
                extra_cflags=[*_CXX_FLAGS],  # torch appends to its arguments
                extra_cuda_cflags=[*_CUDA_FLAGS],
                extra_include_paths=[str(_build.HERE / part) for part in ("gpu", "include", "csrc")],
                build_directory=str(folder),
                is_python_module=False,
                is_standalone=False,
                with_cuda=True,
            )
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            said = [line for line in str(error).splitlines() if "-DTORCH_EXTENSION_NAME" not in line]
            text = "\n".join(said)
            raise RuntimeError(
                f"Splaxel's CUDA kernels did not compile in {folder} with {home}/bin/nvcc:\n{text}"
            ) from error
        finally:
            cpp_extension.CUDA_HOME = home_before
    _loaded = True
    partial = library.with_suffix(f".{os.getpid()}")
    shutil.copy2(folder / f"{_NAME}.so", partial)
    partial.replace(library)
    for old in folder.glob(f"{_NAME}_*.so"):
        if not old.name.startswith(f"{_NAME}_{_source_hash()}_"):
            old.unlink(missing_ok=True)
    _build.say(f"compiled the CUDA kernels in {time.monotonic() - start:.0f} s")


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _load_library(library: Path) -> None:
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise RuntimeError(f"Splaxel cannot load {library} ({error}): delete it to compile it again.") from error
