"""`splaxel-bench`: what is measured, one subcommand each."""

from __future__ import annotations


def entrypoint() -> None:
    """The `splaxel-bench` command."""
    import tyro  # here, so that `python -m splaxel_ns.bench.gpu` needs no more than torch

    from splaxel_ns.bench.comm import Comm
    from splaxel_ns.bench.gpu import Gpu
    from splaxel_ns.bench.kernels import Kernels
    from splaxel_ns.bench.link import Link
    from splaxel_ns.bench.pictures import Pictures
    from splaxel_ns.bench.quality import Quality
    from splaxel_ns.bench.saturation import Saturation
    from splaxel_ns.bench.soak import Soak
    from splaxel_ns.bench.viewer import Viewer

    tyro.extras.set_accent_color("bright_yellow")
    commands = {
        "kernels": Kernels,
        "gpu": Gpu,
        "quality": Quality,
        "pictures": Pictures,
        "saturation": Saturation,
        "soak": Soak,
        "comm": Comm,
        "link": Link,
        "viewer": Viewer,
    }
    try:
        tyro.extras.subcommand_cli_from_dict(commands).main()
    except (OSError, RuntimeError, ValueError) as error:
        raise SystemExit(f"splaxel-bench: {error}") from error
