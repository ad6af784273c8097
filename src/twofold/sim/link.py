"""A link between two workers whose bandwidth its transfers share fairly."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from twofold.sim.events import Events, Kind
from twofold.types import NS_PER_S, ceil_div


class Transfer:
    """`n_bytes` to move; `finish` is called once they are over."""

    __slots__ = ("finish", "n_bytes")

    def __init__(self, n_bytes: int, finish: Callable[[], None]) -> None:
        self.n_bytes = n_bytes
        self.finish = finish


class FairLink:
    """k transfers at a time get 1/k of `bytes_per_s` each, and each ends when its bytes are over.

    Kept as one number: the bytes that a transfer present from the start would have got so far.
    A transfer ends when that number has grown by its size, so joining and leaving cost
    O(log k). In units of a byte / NS_PER_S, so that integers lose nothing that matters.
    """

    def __init__(self, events: Events, bytes_per_s: int) -> None:
        if bytes_per_s < 1:
            raise ValueError(f"a link moves 1 byte/s or more, not {bytes_per_s}")
        self._events = events
        self._bytes_per_s = bytes_per_s
        self._served = 0
        self._at_ns = 0
        self._heap: list[tuple[int, int, Transfer]] = []
        self._sequence = 0
        self._armed = 0

    def start(self, transfer: Transfer) -> None:
        """Begin moving `transfer.n_bytes`; its `finish` is called when they are over."""
        self._advance()
        self._sequence += 1
        ends = self._served + transfer.n_bytes * NS_PER_S
        heappush(self._heap, (ends, self._sequence, transfer))
        self._arm()

    def stop(self, transfer: Transfer) -> None:
        """Take a transfer off, its bytes not over. The others get faster."""
        self._advance()
        self._heap = [item for item in self._heap if item[2] is not transfer]
        heapify(self._heap)
        self._arm()

    def _advance(self) -> None:
        now_ns = self._events.now_ns
        if self._heap:
            self._served += self._bytes_per_s * (now_ns - self._at_ns) // len(self._heap)
        self._at_ns = now_ns

    def _arm(self) -> None:
        self._armed += 1
        if self._heap:
            left = (self._heap[0][0] - self._served) * len(self._heap)
            wait_ns = max(0, ceil_div(left, self._bytes_per_s))
            self._events.after(wait_ns, Kind.RESULT, self._wake, self._armed)

    def _wake(self, armed: int) -> None:
        if armed != self._armed:
            return
        self._advance()
        done: list[Transfer] = []
        while self._heap and self._heap[0][0] <= self._served:
            done.append(heappop(self._heap)[2])
        self._arm()
        for transfer in done:
            transfer.finish()
