"""Settings for all tests: hypothesis draws the same examples in every run."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "twofold",
    derandomize=True,
    deadline=None,
    print_blob=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("twofold")


@pytest.fixture(autouse=True, scope="module")
def _nothing_left_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a module leaves open is found at its end.

    Otherwise it is found whenever garbage happens to be collected next, as the failure of a test
    that has nothing to do with it.
    """
    yield
    if {"asyncio", "socket", "subprocess"} & set(vars(request.module)):
        gc.collect()
