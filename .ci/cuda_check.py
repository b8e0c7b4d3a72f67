#!/usr/bin/env python3
"""Compiles every CUDA kernel with nvcc, warnings being errors, and prints what each one needs of a multiprocessor.

    .ci/cuda_check.py [ARCH ...]        8.0 8.6 8.9 9.0 10.0 12.0 are those that releases are built for; default 9.0

Fails on a warning, and where a hot kernel spills registers or has local memory. Needs nvcc and g++, no GPU, no torch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

OPS = Path(__file__).resolve().parents[1] / "splaxel_ns" / "cuda"
HOT = ("draw_kernel", "draw_backward_kernel", "composite_kernel", "composite_backward_kernel", "pack_kernel",
       "unpack_kernel", "adam_kernel")  # fmt: skip
FLAGS = ["-std=c++17", "-O3", "-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror", "-Xptxas", "-v"]
# CUB's kernels are not ours to judge: sort.cu is compiled, its kernels are left out of the table.
LIBRARY = "cub"


@dataclass(frozen=True)
class Usage:
    """What ptxas says of one kernel; bytes."""

    name: str
    registers: int
    shared: int
    stack: int
    spilled: int

    @property
    def is_hot(self) -> bool:
        return self.name.split("<")[0] in HOT


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")


def short(mangled: str, demangled: str) -> str | None:
    """splaxel::gpu::<unnamed>::draw_kernel<(splaxel::Boundary)0>(...) -> draw_kernel<0>; None for others' kernels."""
    if LIBRARY in mangled:
        return None
    name = demangled.replace("(anonymous namespace)::", "").replace("splaxel::gpu::", "").replace("splaxel::", "")
    name = re.sub(r"\(Boundary\)(\d)", lambda m: ("filter", "exact", "none")[int(m[1])], name)
    name = re.sub(r"\((?:int|bool)\)(\d+)", r"\1", name).replace("void ", "")
    depth = 0
    for at, letter in enumerate(name):  # up to the list of parameters
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return name[:at]
    return name


def usages(report: str) -> list[Usage]:
    """The kernels of one file's ptxas report."""
    found = []
    entry = re.compile(
        r"Compiling entry function '(\S+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers([^\n]*)",
        re.DOTALL,
    )
    for mangled, stack, stores, loads, registers, rest in entry.findall(report):
        demangled = subprocess.run(["c++filt", mangled], capture_output=True, text=True).stdout.strip()
        name = short(mangled, demangled or mangled)
        if name is not None:
            shared = re.search(r"(\d+) bytes smem", rest)
            found.append(
                Usage(name, int(registers), int(shared[1]) if shared else 0, int(stack), int(stores) + int(loads))
            )
    return found


def compile_one(nvcc: str, source: Path, arch: str, folder: Path) -> tuple[str, list[Usage]]:
    """What nvcc said if it failed, else nothing; and the kernels."""
    number = arch.replace(".", "")
    command = [nvcc, *FLAGS, f"-gencode=arch=compute_{number},code=sm_{number}", "-I", str(OPS / "include"), "-I",
               str(OPS / "csrc"), "-c", str(source), "-o", str(folder / f"{source.stem}_{number}.o")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    report = done.stdout + done.stderr
    return (report, []) if done.returncode != 0 else ("", usages(report))


def main(archs: list[str]) -> int:
    nvcc = find_nvcc()
    if nvcc is None:
        print("cuda-check: skipped, there is no nvcc here (not on PATH, nor in CUDA_HOME or /usr/local/cuda)")
        return 0
    release = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"release ([\d.]+)", release)
    print(f"cuda-check: nvcc {version[1] if version else '?'}, architectures {' '.join(archs)}")
    sources = sorted((OPS / "gpu").glob("*.cu"))
    failed = False
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        jobs = [(arch, source) for arch in archs for source in sources]
        results = list(pool.map(lambda job: compile_one(nvcc, job[1], job[0], Path(folder)), jobs))
    for (arch, source), (error, kernels) in zip(jobs, results, strict=True):
        if error:
            print(f"{source.name} for {arch} does not compile:\n{error}")
            failed = True
        for kernel in kernels:
            bad = kernel.is_hot and (kernel.spilled > 0 or kernel.stack > 0)
            failed |= bad
            print(
                f"{arch:>5} {source.stem:<10} {kernel.name:<52} {kernel.registers:>3} registers "
                f"{kernel.shared:>6} B shared {kernel.stack:>4} B local {kernel.spilled:>4} B spilled"
                f"{'  <- hot, must be 0' if bad else ''}"
            )
    print("cuda-check: failed" if failed else "cuda-check: passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["9.0"]))
