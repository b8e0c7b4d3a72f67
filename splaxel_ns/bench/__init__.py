"""`splaxel-bench`: what is measured, one subcommand each."""

from __future__ import annotations

import tyro


def entrypoint() -> None:
    """The `splaxel-bench` command."""
    from splaxel_ns.bench.kernels import Kernels
    from splaxel_ns.bench.pictures import Pictures
    from splaxel_ns.bench.quality import Quality
    from splaxel_ns.bench.saturation import Saturation

    tyro.extras.set_accent_color("bright_yellow")
    try:
        commands = {"kernels": Kernels, "quality": Quality, "pictures": Pictures, "saturation": Saturation}
        tyro.extras.subcommand_cli_from_dict(commands).main()
    except (OSError, RuntimeError, ValueError) as error:
        raise SystemExit(f"splaxel-bench: {error}") from error
