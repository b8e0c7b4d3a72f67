"""Splaxel: 3D Gaussian Splatting in convex partitions that exchange pixels, as a nerfstudio method.

Importing this package compiles nothing and needs no compiler and no GPU: nerfstudio imports every installed
method, so a plugin that fails here would break all of them. The two public functions load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["composite", "rasterize"]

if TYPE_CHECKING:
    from splaxel_ns.compositing import composite
    from splaxel_ns.render import rasterize


def __getattr__(name: str) -> Any:
    if name == "rasterize":
        from splaxel_ns.render import rasterize

        return rasterize
    if name == "composite":
        from splaxel_ns.compositing import composite

        return composite
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
