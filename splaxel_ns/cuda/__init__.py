"""The ops: one Python function each, with checks, shapes and autograd. The library is compiled on the first call."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splaxel_ns.cuda._backend import thresholds as thresholds
    from splaxel_ns.cuda._device import Later as Later
    from splaxel_ns.cuda._device import on_gpu as on_gpu
    from splaxel_ns.cuda._device import upload as upload
    from splaxel_ns.cuda._gsplat import extents_of as extents_of
    from splaxel_ns.cuda.rasterize import RasterStats as RasterStats
    from splaxel_ns.cuda.rasterize import rasterize_partials as rasterize_partials
    from splaxel_ns.cuda.rasterize import set_cpu_level as set_cpu_level
    from splaxel_ns.cuda.region import bulk_boxes as bulk_boxes
    from splaxel_ns.cuda.region import content_bounds as content_bounds
    from splaxel_ns.cuda.region import locate as locate
    from splaxel_ns.cuda.region import region_spans as region_spans
    from splaxel_ns.cuda.region import regions_present as regions_present
    from splaxel_ns.cuda.region import splat_spans as splat_spans
    from splaxel_ns.cuda.saturation import SaturationCounts as SaturationCounts
    from splaxel_ns.cuda.saturation import pack_bits as pack_bits
    from splaxel_ns.cuda.saturation import unpack_bits as unpack_bits
    from splaxel_ns.cuda.saturation import update_saturation as update_saturation
    from splaxel_ns.cuda.splats import LossShare as LossShare
    from splaxel_ns.cuda.splats import composite as composite
    from splaxel_ns.cuda.splats import l1_ssim as l1_ssim
    from splaxel_ns.cuda.splats import project as project
    from splaxel_ns.cuda.splats import spherical_harmonics as spherical_harmonics
    from splaxel_ns.cuda.streams import Region as Region
    from splaxel_ns.cuda.streams import composite_streams as composite_streams
    from splaxel_ns.cuda.streams import pack_active as pack_active
    from splaxel_ns.cuda.streams import pack_pixels as pack_pixels
    from splaxel_ns.cuda.streams import unpack_active as unpack_active
    from splaxel_ns.cuda.streams import unpack_pixels as unpack_pixels
    from splaxel_ns.cuda.update import AdamSettings as AdamSettings
    from splaxel_ns.cuda.update import StepGradients as StepGradients
    from splaxel_ns.cuda.update import adam_rows as adam_rows
    from splaxel_ns.cuda.update import add_statistics as add_statistics
    from splaxel_ns.cuda.update import project_and_color as project_and_color
    from splaxel_ns.cuda.update import screen_radii as screen_radii
    from splaxel_ns.cuda.update import update_gaussians as update_gaussians

# Each name and the module it comes from; loaded lazily, so that importing this package stays cheap.
_HOME = {
    "thresholds": "_backend",
    "Later": "_device",
    "on_gpu": "_device",
    "upload": "_device",
    "extents_of": "_gsplat",
    "RasterStats": "rasterize",
    "rasterize_partials": "rasterize",
    "set_cpu_level": "rasterize",
    "bulk_boxes": "region",
    "content_bounds": "region",
    "locate": "region",
    "region_spans": "region",
    "regions_present": "region",
    "splat_spans": "region",
    "SaturationCounts": "saturation",
    "pack_bits": "saturation",
    "unpack_bits": "saturation",
    "update_saturation": "saturation",
    "LossShare": "splats",
    "composite": "splats",
    "l1_ssim": "splats",
    "project": "splats",
    "spherical_harmonics": "splats",
    "Region": "streams",
    "composite_streams": "streams",
    "pack_active": "streams",
    "pack_pixels": "streams",
    "unpack_active": "streams",
    "unpack_pixels": "streams",
    "AdamSettings": "update",
    "adam_rows": "update",
    "add_statistics": "update",
    "StepGradients": "update",
    "project_and_color": "update",
    "screen_radii": "update",
    "update_gaussians": "update",
}

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"splaxel_ns.cuda.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
