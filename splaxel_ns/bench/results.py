"""Result files: what was measured, and how, with what and where it came about."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def provenance() -> dict[str, Any]:
    """Command, commit and machine, for the head of every result file."""
    here = Path(__file__).parent

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=here, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    models = (line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name"))
    cpu = next(models, platform.machine())
    return {
        "command": "splaxel-bench " + shlex.join(sys.argv[1:]),
        "commit": git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else ""),
        "machine": f"{os.cpu_count()} cores, {cpu}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


class ResultFile:
    """A result file of what is in the tree now: by the time of writing, the commit may be another.

    Args:
        path: The file; its folder is made if missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._provenance = provenance()

    def write(self, result: dict[str, Any]) -> None:
        """Write the file whole or not at all; may be called again with more results."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".part")
        partial.write_text(json.dumps({**self._provenance, **result}, indent=1) + "\n")
        partial.replace(self._path)
