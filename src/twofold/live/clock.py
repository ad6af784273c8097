"""The clock of the live drivers: three methods, so that a test can put its own in their place.

Nothing else in `live` asks what time it is. Points in time are integer nanoseconds of this
clock and mean nothing in another process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from twofold.types import NS_PER_S


class Timer(Protocol):
    """A call that is due later."""

    def cancel(self) -> None:
        """Do not make the call. Harmless once it has been made."""
        ...


class Clock(Protocol):
    """Tells the time, waits for a time, and calls at a time; never early."""

    def now_ns(self) -> int:
        """Nanoseconds since some fixed point; never goes back."""
        ...

    async def sleep_until(self, at_ns: int) -> None:
        """Return once `now_ns() >= at_ns`."""
        ...

    def call_at(self, at_ns: int, call: Callable[[], None]) -> Timer:
        """Run `call` in the event loop once `now_ns() >= at_ns`, unless it is cancelled."""
        ...


class _LoopTimer:
    """A timer of the running event loop, set anew when the loop fires it too soon."""

    __slots__ = ("_at_ns", "_call", "_handle")

    def __init__(self, at_ns: int, call: Callable[[], None]) -> None:
        self._at_ns = at_ns
        self._call = call
        self._handle: asyncio.TimerHandle | None = None
        self._arm()

    def _arm(self) -> None:
        delay_s = max(0, self._at_ns - time.monotonic_ns()) / NS_PER_S
        self._handle = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def _fire(self) -> None:
        # uvloop rounds delays to whole milliseconds, down as well as up.
        if time.monotonic_ns() < self._at_ns:
            self._arm()
        else:
            self._call()

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()


class LoopClock:
    """The machine's monotonic clock, with the running event loop's timers."""

    def now_ns(self) -> int:
        """Nanoseconds of CLOCK_MONOTONIC."""
        return time.monotonic_ns()

    async def sleep_until(self, at_ns: int) -> None:
        """Return once `now_ns() >= at_ns`; always lets other tasks run."""
        await asyncio.sleep(0)
        while (left_ns := at_ns - time.monotonic_ns()) > 0:
            await asyncio.sleep(left_ns / NS_PER_S)

    def call_at(self, at_ns: int, call: Callable[[], None]) -> Timer:
        """Run `call` in the running loop once `now_ns() >= at_ns`, unless it is cancelled."""
        return _LoopTimer(at_ns, call)
