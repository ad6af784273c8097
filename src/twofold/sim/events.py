"""Virtual clock and event heap with a total order: (time, kind, origin, sequence).

The origin is who caused the event: 0 the trace and the gateway, then the workers by number. Ties
between two workers so never depend on which of them was simulated first, and a run of decode
steps may be crossed at once (see `worker`) without changing anything.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush
from typing import Any


class Kind(IntEnum):
    """What happens first among events of one nanosecond.

    A death comes before all else. Steps and other results free resources, so they come before
    messages that want some, and new requests after both. Timers are last: what arrives in the
    nanosecond of its deadline is in time.
    """

    FAULT = 0
    STEP = 1
    RESULT = 2
    PEER = 3
    LEG = 4
    ARRIVAL = 5
    WAKE = 6


class StuckError(RuntimeError):
    """More events than allowed: the simulated system makes no progress."""


class Events:
    """Calls to make at points in virtual time, in nanoseconds from 0."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.n_run = 0
        self._heap: list[tuple[int, int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(
        self, at_ns: int, kind: Kind, origin: int, call: Callable[..., None], *args: Any
    ) -> None:
        """Call `call(*args)` at `at_ns`, which must not be past."""
        assert at_ns >= self.now_ns, f"an event at {at_ns} ns, {self.now_ns} ns is past"
        self._sequence += 1
        heappush(self._heap, (at_ns, kind, origin, self._sequence, call, args))

    def after(
        self, delay_ns: int, kind: Kind, origin: int, call: Callable[..., None], *args: Any
    ) -> None:
        """Call `call(*args)` in `delay_ns`."""
        self.at(self.now_ns + delay_ns, kind, origin, call, *args)

    def run(self, most: int | None = None) -> None:
        """Run until nothing is left. Raises StuckError after `most` events."""
        heap = self._heap
        while heap:
            if most is not None and self.n_run >= most:
                raise StuckError(f"{most} events have run and {len(heap)} are waiting")
            self.now_ns, _, _, _, call, args = heappop(heap)
            self.n_run += 1
            call(*args)
