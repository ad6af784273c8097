"""When an answer's tokens came: single times, and stretches that a whole batch shares.

A stretch of k steps is kept as how to compute its k times, once for all requests that were in
it, and only if somebody looks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twofold.cost.step import StepTime

Ns = npt.NDArray[np.int64]


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
        self._times: Ns | None = None

    def times_ns(self) -> Ns:
        """When each step's tokens reached the gateway."""
        if self._times is None:
            steps = self._step.decode_steps_ns(self._batch, self._context, self._k)
            self._times = np.cumsum(steps)
            self._times += self._start_ns + self._latency_ns
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

    def until(self, end_ns: int) -> Ns:
        """All times up to and including `end_ns`."""
        arrays = [
            np.array((part,), dtype=np.int64) if isinstance(part, int) else part.times_ns()
            for part in self._parts
        ]
        if not arrays:
            return np.empty(0, dtype=np.int64)
        times = np.concatenate(arrays)
        if times[-1] > end_ns:
            times = times[: np.searchsorted(times, end_ns, side="right")]
        return times
