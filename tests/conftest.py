"""Ops and the oracle are tested on every level of instructions of the processor; test_rasterize.py does so itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from splaxel_ns import cuda

LEVELS = ("portable", "avx2", "avx512")
ON_EVERY_LEVEL = (
    "test_composite",
    "test_loss",
    "test_oracle",
    "test_project",
    "test_spherical_harmonics",
    "test_update",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.path.stem in ON_EVERY_LEVEL:
        metafunc.parametrize("level", LEVELS, indirect=True)


@pytest.fixture(autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    """The level in use for one test."""
    if not hasattr(request, "param"):
        yield
        return
    try:
        cuda.set_cpu_level(request.param)
    except ValueError:
        pytest.skip(f"this processor has no {request.param}")
    yield
    cuda.set_cpu_level("best")
