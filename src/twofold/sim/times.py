"""When an answer's tokens came: single times, and stretches that a whole batch shares.

A stretch of k steps is kept as how to compute its k times, once for all requests that were in
it, and only if somebody looks.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right

from twofold.cost.step import StepTime


class Stretch:
    """`k` decode steps from `start_ns` on, of `batch` sequences with `context` tokens at first.

    `latency_ns` is added to every time: how long tokens take to the gateway.
    """

    __slots__ = ("_batch", "_context", "_k", "_latency_ns", "_start_ns", "_step", "_times")

    def __init__(
        self, step: StepTime, start_ns: int, batch: int, context: int, k: int, latency_ns: int
    ) -> None:
        self._step = step
        self._start_ns = start_ns
        self._batch = batch
        self._context = context
        self._k = k
        self._latency_ns = latency_ns
        self._times: bytes | None = None

    def times_ns(self) -> bytes:
        """When each step's tokens reached the gateway, as 64-bit integers."""
        if self._times is None:
            times = self._step.decode_steps_ns(self._batch, self._context, self._k)
            times[0] += self._start_ns + self._latency_ns
            times.cumsum(out=times)
            self._times = times.tobytes()
        return self._times


class TokenTimes:
    """Times of one answer's tokens, in order."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[int | Stretch] = []

    def add(self, at_ns: int) -> None:
        """One token at `at_ns`."""
        self._parts.append(at_ns)

    def add_stretch(self, stretch: Stretch) -> None:
        """One token for each step of `stretch`."""
        self._parts.append(stretch)

    def until(self, end_ns: int) -> array[int]:
        """All times up to and including `end_ns`, as 64-bit integers."""
        times = array("q")
        for part in self._parts:
            if isinstance(part, int):
                times.append(part)
            else:
                times.frombytes(part.times_ns())
        if times and times[-1] > end_ns:
            del times[bisect_right(times, end_ns) :]
        return times
