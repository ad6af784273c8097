"""Timers of a core: many deadlines, one `WakeAt`.

Entries leave in the order (time, key), so ties never depend on when something was set.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

TimerKey = tuple[str, int]


class Timers:
    """A set of named deadlines in nanoseconds; setting a key again moves it."""

    def __init__(self) -> None:
        self._at: dict[TimerKey, int] = {}
        self._heap: list[tuple[int, TimerKey]] = []
        self._armed_ns: int | None = None
        self._may_arm = False  # whether anything has come that could need an earlier wake

    def __len__(self) -> int:
        return len(self._at)

    def set(self, key: TimerKey, at_ns: int) -> None:
        """(Re)set `key` to run out at `at_ns`."""
        if self._at.get(key) == at_ns:
            return
        self._at[key] = at_ns
        self._may_arm = True
        heappush(self._heap, (at_ns, key))
        # Moved timers leave their old entries behind; without this, a lease that is renewed for
        # an hour would keep an hour of them.
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._at):
            self._heap = [(at, k) for k, at in self._at.items()]
            heapify(self._heap)

    def cancel(self, key: TimerKey) -> None:
        """Forget `key`; unknown keys are ignored."""
        self._at.pop(key, None)

    def due(self, now_ns: int) -> list[TimerKey]:
        """Remove and return the keys that have run out by `now_ns`.

        Called when the driver's timer has fired. Its clock may be a hair early, so that nothing
        is due yet: the timer is spent all the same and has to be armed again.
        """
        keys: list[TimerKey] = []
        while self._heap and self._heap[0][0] <= now_ns:
            at, key = heappop(self._heap)
            if self._at.get(key) == at:
                del self._at[key]
                keys.append(key)
        self._armed_ns = None
        self._may_arm = True
        return keys

    def rearm(self, now_ns: int) -> int | None:
        """The next deadline, armed anew, if it is later than `now_ns`.

        For a driver whose timer has fired: what `due` and `arm` come to when nothing is due.
        """
        next_ns = self.next_ns()
        if next_ns is None or next_ns <= now_ns:
            return None
        self._armed_ns = next_ns
        return next_ns

    def next_ns(self) -> int | None:
        """When the first key runs out, or None."""
        heap, at = self._heap, self._at
        while heap and at.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def arm(self) -> int | None:
        """Time for the driver's timer if it must be set anew, else None.

        A timer that is armed too early is left alone: it fires, finds nothing due and is armed
        for the right time then. So pushing a deadline back costs nothing.
        """
        if not self._may_arm:
            return None
        self._may_arm = False
        next_ns = self.next_ns()
        armed_ns = self._armed_ns
        if next_ns is None or (armed_ns is not None and armed_ns <= next_ns):
            return None
        self._armed_ns = next_ns
        return next_ns
