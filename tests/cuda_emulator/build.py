"""Compiles the package's CUDA kernels and their bindings against the emulator, for tensors on the CPU."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
OPS = HERE.parents[1] / "splaxel_ns" / "cuda"
NOT_EMULATED = ("sort.cu",)  # calls CUB; sort_emulated.cpp stands in
FLAGS = [
    "-std=c++20", "-O1", "-g1", "-fPIC", "-fno-omit-frame-pointer", "-Wall", "-Wextra", "-Werror", "-DSPLAXEL_EMULATED",
    "-I", str(HERE), "-I", str(OPS / "gpu"), "-I", str(OPS / "include"), "-I", str(OPS / "csrc"),
]  # fmt: skip
SANITIZER = "-fsanitize=address"


def sources() -> list[Path]:
    """What the library is made of."""
    kernels = [path for path in sorted((OPS / "gpu").glob("*.cu")) if path.name not in NOT_EMULATED]
    return [*sorted((OPS / "gpu").glob("*.cpp")), *kernels, HERE / "sort_emulated.cpp"]


def op_names() -> list[str]:
    """The ops that the bindings implement."""
    text = "".join(path.read_text() for path in (OPS / "gpu").glob("*.cpp"))
    return sorted(re.findall(r'm\.impl\(\s*"(\w+)"', text))


def run(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} {command[-1]}:\n{done.stderr}")


def build(folder: Path) -> Path:
    """Compiles everything into `folder`, two files at a time; returns the library."""
    root = Path(torch.__file__).parent
    headers = ["-isystem", root / "include", "-isystem", root / "include" / "torch" / "csrc" / "api" / "include"]

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.name}.o"
        run("g++", *FLAGS, SANITIZER, *headers, "-c", "-o", target, "-x", "c++", source)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources()))
    library = folder / "libsplaxel_emulated.so"
    run(
        "g++", "-shared", SANITIZER, *objects, "-L", root / "lib", "-ltorch", "-ltorch_cpu", "-lc10",
        f"-Wl,-rpath,{root / 'lib'}", "-o", library,
    )  # fmt: skip
    return library


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
