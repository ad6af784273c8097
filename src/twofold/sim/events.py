"""Virtual clock and event heap with a total order: (time, kind, origin, sequence).

The origin is who caused the event: 0 the trace and the gateway, then the workers by number. Ties
between two workers so never depend on which of them was simulated first, and a run of decode
steps may be crossed at once (see `worker`) without changing anything.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Final

from twofold.sim.errors import StuckError


class Kind:
    """What happens first among events of one nanosecond.

    A death comes before all else. Steps and other results free resources, so they come before
    messages that want some, and new requests after both. Timers are last: what arrives in the
    nanosecond of its deadline is in time.
    """

    FAULT: Final = 0
    STEP: Final = 1
    RESULT: Final = 2
    PEER: Final = 3
    LEG: Final = 4
    ARRIVAL: Final = 5
    WAKE: Final = 6


class Events:
    """Calls to make at points in virtual time, in nanoseconds from 0."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.n_run = 0
        self._heap: list[tuple[int, int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, at_ns: int, kind: int, origin: int, call: Callable[..., None], *args: Any) -> None:
        """Call `call(*args)` at `at_ns`, which must not be past."""
        assert at_ns >= self.now_ns, f"an event at {at_ns} ns, {self.now_ns} ns is past"
        self._sequence += 1
        heappush(self._heap, (at_ns, kind, origin, self._sequence, call, args))

    def after(
        self, delay_ns: int, kind: int, origin: int, call: Callable[..., None], *args: Any
    ) -> None:
        """Call `call(*args)` in `delay_ns`, 0 or more."""
        assert delay_ns >= 0, f"an event {-delay_ns} ns ago"
        self._sequence += 1
        heappush(self._heap, (self.now_ns + delay_ns, kind, origin, self._sequence, call, args))

    def run(self, most: int | None = None) -> None:
        """Run until nothing is left. Raises StuckError after `most` events."""
        heap, pop = self._heap, heappop
        last = most if most is not None else 1 << 62
        while heap:
            if self.n_run >= last:
                raise StuckError(f"{most} events have run and {len(heap)} are waiting")
            self.now_ns, _, _, _, call, args = pop(heap)
            self.n_run += 1
            call(*args)
