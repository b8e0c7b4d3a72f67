"""The build of the ops: it survives killed builds, is not repeated, and says what is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from splaxel_ns.cuda import _backend

# Builds one small file instead of the ops: what is tested is everything around the compiler.
_BUILD = """
import sys
from pathlib import Path
from splaxel_ns.cuda import _backend
_backend._sources = lambda: [Path(sys.argv[1])]
try:
    _backend.load()
except RuntimeError as error:
    sys.exit(f"RuntimeError: {error}")
print("loaded")
"""


@pytest.fixture
def build(tmp_path: Path):
    """Starts a build in a process of its own; its compiler hangs while `tmp_path/hang` exists."""
    source = tmp_path / "probe.cpp"
    source.write_text('extern "C" int splaxel_probe() { return 1; }\n')
    compiler = tmp_path / "cxx"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *probe.cpp*) echo x >> {tmp_path}/calls; '
        f'while [ -e {tmp_path}/hang ]; do sleep 0.1; done;; esac\nexec c++ "$@"\n'
    )
    compiler.chmod(0o755)

    def start(**environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", _BUILD, str(source)],
            env={**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path), "CXX": str(compiler), **environment},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    return start


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return out, err


def test_killed_build_does_not_block_the_next(build, tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    killed = build()
    deadline = time.monotonic() + 60
    while not (tmp_path / "calls").exists():
        assert time.monotonic() < deadline and killed.poll() is None
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    (folder,) = tmp_path.glob("splaxel_*/")
    (folder / "lock").touch()  # what torch before 2.14 leaves behind, and then waits for
    (tmp_path / "hang").unlink()
    out, err = finish(build())
    assert out.startswith("loaded"), err
    assert "compiling the CPU kernels" in err

    calls = (tmp_path / "calls").read_text()
    out, err = finish(build())  # the second process compiles nothing and says nothing
    assert out.startswith("loaded") and "splaxel" not in err
    assert (tmp_path / "calls").read_text() == calls


def test_what_a_killed_build_left_running_is_waited_for(build, tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    killed = build()
    deadline = time.monotonic() + 60
    while not (tmp_path / "calls").exists():
        assert time.monotonic() < deadline and killed.poll() is None
        time.sleep(0.05)
    killed.kill()  # not its compiler
    second = build()
    assert second.stderr is not None
    while "was interrupted" not in second.stderr.readline():
        assert time.monotonic() < deadline
    time.sleep(0.5)
    assert (tmp_path / "calls").read_text().count("x") == 1
    (tmp_path / "hang").unlink()
    out, err = finish(second)
    assert out.startswith("loaded"), err


def test_processes_that_start_together_build_once(build, tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    first, second = build(), build()
    time.sleep(4)  # both have reached the lock, or will find the library
    (tmp_path / "hang").unlink()
    for process in (first, second):
        out, err = finish(process)
        assert out.startswith("loaded"), err
    assert (tmp_path / "calls").read_text().count("x") == 1


def test_no_compiler(build) -> None:
    out, err = finish(build(CXX="no-such-compiler"))
    assert not out and "no C++ compiler ('no-such-compiler' is not on PATH)" in err and "apt install" in err


def test_finished_library_needs_no_compiler(build, tmp_path: Path) -> None:
    out, err = finish(build())
    assert out.startswith("loaded"), err
    # From here on the compiler is not found; what it built is, though the folder's name depends on it.
    (tmp_path / "cxx").unlink()
    out, err = finish(build())
    assert out.startswith("loaded") and "splaxel" not in err
    (tmp_path / "probe.cpp").write_text('extern "C" int splaxel_other() { return 2; }\n')
    out, err = finish(build())
    assert not out and "no C++ compiler" in err


@pytest.mark.parametrize("variable", ["TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"])
def test_unusable_cache_is_named(build, tmp_path: Path, variable: str) -> None:
    file = tmp_path / "file"
    file.touch()
    environment = {"TORCH_EXTENSIONS_DIR": "", variable: str(file)}
    out, err = finish(build(**environment))
    message = err[err.index("RuntimeError:") :]
    assert not out and f"cannot use {file}" in message and "set TORCH_EXTENSIONS_DIR" in message


def test_compiler_error_is_shown(build, tmp_path: Path) -> None:
    (tmp_path / "probe.cpp").write_text("int broken = ;\n")
    out, err = finish(build())
    message = err[err.index("RuntimeError:") :]
    assert not out and "did not compile" in message and "probe.cpp:1" in message
    assert "-DTORCH_EXTENSION_NAME" not in message


def test_other_platforms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backend, "_loaded", False)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(RuntimeError, match="x86-64"):
        _backend.load()
