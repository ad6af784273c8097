"""A short soak: the long one is `python -m tests.live.soak`."""

from __future__ import annotations

import asyncio

from tests.live.soak import soak


def test_a_short_soak_leaves_nothing_behind() -> None:
    found = asyncio.run(
        soak("1P1D", 60, 3, handoff="push", transport="shm", kill_every_ends=(8, 16))
    )
    assert sum(found["kills"].values()) >= 2
    assert found["ends"]["whole"] >= 20
    assert found["processes_left"] == found["memory_left"] == 0
