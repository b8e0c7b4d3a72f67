"""The build of the CUDA kernels: what it says is missing, which libraries it takes, and the check of CI."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from splaxel_ns.cuda import __main__ as command
from splaxel_ns.cuda import _backend, _build, _gpu_backend


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a torch for CUDA 13.0 as far as the build can tell."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_gpu_backend, "_loaded", False)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def toolkit(folder: Path, release: str) -> Path:
    """A CUDA toolkit that can say its version and nothing else."""
    (folder / "bin").mkdir(parents=True)
    (folder / "include").mkdir()
    (folder / "include" / "cuda_runtime.h").touch()
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    return folder


def test_torch_without_cuda(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match="was built without CUDA.*CPU kernels work without"):
        _gpu_backend.build(["9.0"])


def test_no_device(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="finds no CUDA device"):
        _gpu_backend.load()


def test_no_toolkit(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(cache / "nowhere"))
    with pytest.raises(RuntimeError, match="no CUDA toolkit .* in CUDA_HOME .*nowhere.*install version 13.0"):
        _gpu_backend.build(["9.0"])


def test_toolkit_of_another_version(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(cache / "cuda", "12.4")))
    with pytest.raises(RuntimeError, match="is CUDA 12.4, but this torch was built for CUDA 13.0"):
        _gpu_backend.build(["9.0"])


def test_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(cache / "cuda", "13.0")))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="'no-such-compiler' is not on PATH"):
        _gpu_backend.build(["9.0"])


def test_unusable_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(cache / "cuda", "13.0")))
    (cache / "cache").touch()
    with pytest.raises(RuntimeError, match="set TORCH_EXTENSIONS_DIR"):
        _gpu_backend.build(["9.0"])


@pytest.mark.parametrize("archs", [["sm_90"], ["7.5"], []])
def test_architectures_are_checked(archs: list[str]) -> None:
    with pytest.raises(ValueError, match="9.0"):
        _gpu_backend.build(archs)


def test_built_libraries_are_found(cache: Path) -> None:
    folder = _gpu_backend.build_folder()
    folder.mkdir(parents=True)
    library = folder / f"splaxel_gpu_{_gpu_backend._source_hash()}_8.0-9.0.so"
    library.touch()
    (folder / "splaxel_gpu_000000000000_12.0.so").touch()  # of other sources
    assert {arch: _gpu_backend.find(arch) == library for arch in ("8.0", "8.6", "9.0", "10.0", "12.0")} == {
        "8.0": True, "8.6": True, "9.0": True, "10.0": False, "12.0": False,
    }  # fmt: skip
    assert _gpu_backend.build(["9.0", "8.0"]) == library  # nothing to do


def test_command(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_backend, "load", lambda: None)
    assert command.main(["build", "--arch", "7.0"]) == 1
    assert "compute capabilities from 8.0" in capsys.readouterr().err


@pytest.fixture
def check() -> ModuleType:
    """`.ci/cuda_check.py`."""
    path = Path(__file__).parents[2] / ".ci" / "cuda_check.py"
    spec = importlib.util.spec_from_file_location("cuda_check", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkey = pytest.MonkeyPatch()
    monkey.setitem(__import__("sys").modules, "cuda_check", module)  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    monkey.undo()
    return module


REPORT = """ptxas info    : Compiling entry function '_ZN7splaxel3gpu11adam_kernelEv' for 'sm_90'
ptxas info    : Function properties for _ZN7splaxel3gpu11adam_kernelEv
    {stack} bytes stack frame, {spill} bytes spill stores, {spill} bytes spill loads
ptxas info    : Used 22 registers, used 1 barriers, 1024 bytes smem
"""


def test_check_reads_what_ptxas_says(check: ModuleType) -> None:
    (usage,) = check.usages(REPORT.format(stack=16, spill=4))
    assert (usage.name, usage.registers, usage.shared, usage.stack, usage.spilled) == ("adam_kernel", 22, 1024, 16, 8)
    assert usage.is_hot


@pytest.mark.parametrize(("stack", "error", "status"), [(0, "", 0), (16, "", 1), (0, "warning #177", 1)])
def test_check_fails_on_local_memory_and_warnings(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any, stack: int, error: str, status: int
) -> None:
    found = check.usages(REPORT.format(stack=stack, spill=0))
    monkeypatch.setattr(check, "find_nvcc", lambda: "true")
    monkeypatch.setattr(check, "compile_one", lambda *_: (error, [] if error else found))
    assert check.main(["9.0"]) == status
    assert ("passed" if status == 0 else "failed") in capsys.readouterr().out


def test_check_without_nvcc(check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(check, "find_nvcc", lambda: None)
    assert check.main(["9.0"]) == 0
    assert "skipped, there is no nvcc" in capsys.readouterr().out


def test_sources_are_all_packaged() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert all(f'"cuda/{part}/*"' in text for part in ("gpu", "csrc", "include"))
    assert {path.parent for path in _gpu_backend._sources()} == {_build.HERE / "gpu"}
