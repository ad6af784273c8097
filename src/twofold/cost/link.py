"""What moving a KV cache takes: one transfer alone, and many that share a link."""

from __future__ import annotations

import heapq
from typing import Final, Literal

import msgspec

from twofold.cost.errors import CostError
from twofold.types import NS_PER_S, ceil_div

HostBounce = Literal["none", "pipelined", "serial"]
_SCALE: Final = NS_PER_S
"""Progress is kept in 1/_SCALE of a byte, so that bytes/s times ns is whole."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A way between two workers.

    `prepare_ns` is what each request costs before its first byte (descriptors, metadata);
    `prepare_on_loop` says that decode's step loop stands still meanwhile. `bounce`: bytes pass
    through host memory at `bounce_bytes_per_s` on each side, overlapped with the wire
    ("pipelined": the slowest counts) or one after the other ("serial").
    """

    bytes_per_s: int
    latency_ns: int = 0
    prepare_ns: int = 0
    prepare_on_loop: bool = False
    bounce: HostBounce = "none"
    bounce_bytes_per_s: int = 0

    def __post_init__(self) -> None:
        if self.bytes_per_s < 1:
            raise CostError(f"a link of {self.bytes_per_s} bytes/s; 1 or more is right")
        if self.bounce != "none" and self.bounce_bytes_per_s < 1:
            raise CostError("a bounce through host memory needs bounce_bytes_per_s")

    @property
    def wire_bytes_per_s(self) -> int:
        """What k transfers share: the wire's rate, or the host copies' where they are slower."""
        if self.bounce == "pipelined":
            return min(self.bytes_per_s, self.bounce_bytes_per_s)
        return self.bytes_per_s

    def fixed_ns(self, nbytes: int) -> int:
        """Time beside the shared wire: preparation, latency, serial host copies."""
        return self.prepare_ns + self.latency_ns + self.copies_ns(nbytes)

    def copies_ns(self, nbytes: int) -> int:
        """Time of serial copies to host memory at one end and from it at the other."""
        if self.bounce != "serial":
            return 0
        return 2 * ceil_div(nbytes * NS_PER_S, self.bounce_bytes_per_s)

    def transfer_ns(self, nbytes: int, sharers: int = 1) -> int:
        """Time of one transfer while `sharers` transfers, itself among them, share the wire."""
        wire = ceil_div(nbytes * NS_PER_S * sharers, self.wire_bytes_per_s)
        return self.fixed_ns(nbytes) + wire

    def loop_ns(self) -> int:
        """Time that decode's loop loses to one request's preparation."""
        return self.prepare_ns if self.prepare_on_loop else 0


class SharedLink:
    """Transfers that share one link evenly, driven event by event in integer ns.

    The sum of rates is the link's; a transfer alone has it whole. Progress is a virtual clock of
    bytes per transfer, so that adding and ending cost O(log n) whatever is in flight; each event
    rounds a transfer's progress down by less than a billionth of a byte. Calls must not go back
    in time. Equal ends are in order of id.
    """

    def __init__(self, bytes_per_s: int) -> None:
        if bytes_per_s < 1:
            raise CostError(f"a link of {bytes_per_s} bytes/s; 1 or more is right")
        self._rate = bytes_per_s
        self._now_ns = 0
        self._done = 0
        self._ends: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    @property
    def active(self) -> int:
        """Transfers in flight."""
        return len(self._ends)

    def add(self, transfer: int, nbytes: int, now_ns: int) -> None:
        """Starts a transfer. Raises ValueError if its id is in flight or nbytes < 0."""
        if transfer in self._ends:
            raise ValueError(f"transfer {transfer} is in flight already")
        if nbytes < 0:
            raise ValueError(f"a transfer of {nbytes} bytes")
        self._advance(now_ns)
        end = self._done + nbytes * _SCALE
        self._ends[transfer] = end
        heapq.heappush(self._heap, (end, transfer))

    def cancel(self, transfer: int, now_ns: int) -> int:
        """Takes a transfer out; returns the bytes it still had to move, rounded up.

        Raises KeyError if it is not in flight.
        """
        self._advance(now_ns)
        left = self._ends.pop(transfer) - self._done
        return max(ceil_div(left, _SCALE), 0)

    def next_completion(self) -> tuple[int, int] | None:
        """(time in ns, id) of the transfer that ends next if nothing changes, or None."""
        self._drop_cancelled()
        if not self._heap:
            return None
        end, transfer = self._heap[0]
        left = max(end - self._done, 0)
        return self._now_ns + ceil_div(left * len(self._ends), self._rate), transfer

    def pop_completed(self, now_ns: int) -> list[int]:
        """Takes out all transfers that have ended by `now_ns`, in order of their end, then id.

        Call at each time that `next_completion` gives: a transfer that ends frees its share.
        """
        ended: list[int] = []
        while True:
            following = self.next_completion()
            if following is None or following[0] > now_ns:
                self._advance(now_ns)
                return ended
            self._advance(following[0])
            del self._ends[following[1]]
            heapq.heappop(self._heap)
            ended.append(following[1])

    def _advance(self, now_ns: int) -> None:
        if now_ns < self._now_ns:
            raise ValueError(f"time {now_ns} ns is before {self._now_ns} ns")
        if self._ends:
            self._done += self._rate * (now_ns - self._now_ns) // len(self._ends)
        self._now_ns = now_ns

    def _drop_cancelled(self) -> None:
        while self._heap and self._ends.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
