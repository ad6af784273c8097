"""The clock of one simulated worker, which may jump ahead, and its one timer."""

from __future__ import annotations

from collections.abc import Callable

from twofold.sim.events import Events, Kind


class WorkerClock:
    """Calls `fire(engine_id)` when the timer runs out; setting it anew replaces it."""

    def __init__(self, events: Events, number: int, fire: Callable[[str], None]) -> None:
        self._events = events
        self._number = number
        self._fire = fire
        self._ahead_ns = 0
        self._armed = 0
        self._wake_ns = 0  # by this clock; 0: not set
        self._engine_id = ""

    @property
    def now_ns(self) -> int:
        """Nanoseconds since some point in the past."""
        return self._events.now_ns + self._ahead_ns

    def set(self, engine_id: str, wake_ns: int) -> None:
        """Run out at `wake_ns` by this clock, in the life `engine_id`."""
        self._armed += 1
        self._wake_ns, self._engine_id = wake_ns, engine_id
        at_ns = max(wake_ns - self._ahead_ns, self._events.now_ns)
        self._events.at(at_ns, Kind.WAKE, self._number, self._run_out, engine_id, self._armed)

    def jump(self, by_ns: int) -> None:
        """Go forward at once: a timer that would have run out meanwhile does so now."""
        self._ahead_ns += by_ns
        if self._wake_ns:
            self.set(self._engine_id, self._wake_ns)

    def _run_out(self, engine_id: str, armed: int) -> None:
        if armed == self._armed:
            self._wake_ns = 0
            self._fire(engine_id)
