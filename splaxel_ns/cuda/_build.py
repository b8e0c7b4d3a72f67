"""What the builds of the CPU's and the GPU's kernels share: the cache, the compiler, a lock and messages."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent


def cache_root() -> Path:
    """The folder of torch's extension cache."""
    # torch's own default root; torch.utils.cpp_extension is slow to import and warns where CUDA is half installed.
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions")
    return Path(root)


def environment(*flags: str) -> list[str]:
    """What a library depends on apart from its sources and the compiler."""
    return [str(HERE), torch.__version__, sys.version, *flags]


def digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def compiler() -> tuple[str, str]:
    """The compiler torch will call, and where it is ("" if nowhere)."""
    name = os.environ.get("CXX", "c++")
    return name, shutil.which(name.split()[0]) or ""


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds a lock that the kernel releases when its holder dies, however it dies; its folder is where ninja works."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that compiles the CPU kernels")
            fcntl.flock(file, fcntl.LOCK_EX)
        # The ninja of a build that was killed goes on without it, and two would write the same files.
        if _works_in(path.parent):
            say("waiting for the compiler of a build that was interrupted")
            while _works_in(path.parent):
                time.sleep(0.2)
        yield


def _works_in(folder: Path) -> bool:
    """Whether some other process has its working directory there."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if process.name != str(os.getpid()) and (process / "cwd").samefile(folder):
                return True
    return False


@contextlib.contextmanager
def ninja_on_path() -> Iterator[None]:
    """Lets torch find the ninja of this environment even if the environment was not activated."""
    before = os.environ.get("PATH", "")
    try:
        import ninja
    except ImportError:
        folders = [before]
    else:
        folders = [before, ninja.BIN_DIR]
    os.environ["PATH"] = os.pathsep.join(folders)
    try:
        yield
    finally:
        os.environ["PATH"] = before


def say(text: str) -> None:
    print(f"splaxel: {text}", file=sys.stderr, flush=True)
