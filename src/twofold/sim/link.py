"""A link between two workers, whose transfers share its bandwidth, as events."""

from __future__ import annotations

from collections.abc import Callable

from twofold.cost.link import SharedLink
from twofold.sim.events import Events, Kind


class Lane:
    """One direction between two workers: k transfers at a time get 1/k of `bytes_per_s` each."""

    def __init__(self, events: Events, bytes_per_s: int, origin: int = 0) -> None:
        self._origin = origin
        self._events = events
        self._link = SharedLink(bytes_per_s)
        self._finish: dict[int, Callable[[], None]] = {}
        self._next = 0
        self._armed = 0

    def start(self, n_bytes: int, finish: Callable[[], None]) -> int:
        """Begin to move `n_bytes`; `finish` is called when they are over. Returns its id."""
        self._next += 1
        self._finish[self._next] = finish
        self._link.add(self._next, n_bytes, self._events.now_ns)
        self._arm()
        return self._next

    def stop(self, transfer: int) -> None:
        """Take a transfer off, unless its bytes are over. The others get faster."""
        if self._finish.pop(transfer, None) is None:
            return
        self._link.cancel(transfer, self._events.now_ns)
        self._arm()

    def _arm(self) -> None:
        self._armed += 1
        following = self._link.next_completion()
        if following is not None:
            at_ns = max(following[0], self._events.now_ns)
            self._events.at(at_ns, Kind.RESULT, self._origin, self._wake, self._armed)

    def _wake(self, armed: int) -> None:
        if armed != self._armed:
            return  # the transfers have changed since
        done = [
            self._finish.pop(transfer) for transfer in self._link.pop_completed(self._events.now_ns)
        ]
        self._arm()
        for finish in done:
            finish()
