"""`python -m splaxel_ns.cuda build [--arch 9.0 ...]`: compiles the kernels ahead of their first use."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from splaxel_ns.cuda import _backend, _gpu_backend


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status; the library's path goes to the standard output."""
    parser = argparse.ArgumentParser(prog="python -m splaxel_ns.cuda", description="Compile the kernels ahead of use.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("build", help="compile the CPU's kernels and the GPU's")
    command.add_argument(
        "--arch",
        nargs="+",
        default=list(_gpu_backend.ARCHS),
        metavar="CAPABILITY",
        help=f"compute capabilities of the GPUs; default: {' '.join(_gpu_backend.ARCHS)}",
    )
    options = parser.parse_args(arguments)
    try:
        _backend.load()
        print(_gpu_backend.build(options.arch))
    except (RuntimeError, ValueError) as error:
        print(f"splaxel: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
