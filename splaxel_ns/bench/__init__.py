"""`splaxel-bench`: what is measured, one subcommand each. Every result says how, with what and where it came about."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import tyro


def provenance() -> dict[str, Any]:
    """Command, commit and machine, for the head of every result file."""
    here = Path(__file__).parent

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=here, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    import torch

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


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Writes a result file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps({**provenance(), **result}, indent=1) + "\n")
    partial.replace(path)


def entrypoint() -> None:
    """The `splaxel-bench` command."""
    from splaxel_ns.bench.quality import Quality

    tyro.extras.set_accent_color("bright_yellow")
    try:
        command = tyro.extras.subcommand_cli_from_dict({"quality": Quality})
        command.main()
    except (RuntimeError, ValueError) as error:
        raise SystemExit(f"splaxel-bench: {error}") from error
