"""How deep each worker's queues were over time, in bounded memory however long the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from twofold.types import NS_PER_MS, ns_to_ms

MEASURES: Final = ("waiting", "running", "blocks")


class Queues(msgspec.Struct, frozen=True, kw_only=True):
    """Peaks in equal spans of time: point i covers [i, i + 1) * `span_ms` from `start_ms`.

    `waiting`, `running` (requests) and `blocks` (KV blocks in use) have one list per worker, in
    the order of `workers`, each with one peak per span.
    """

    start_ms: float
    span_ms: float
    workers: list[str]
    waiting: list[list[int]]
    running: list[list[int]]
    blocks: list[list[int]]


class QueueRecorder:
    """Takes in changes as they happen and keeps at most `most_points` spans of peaks.

    When the run outgrows them, neighbours are merged and the span doubles, so a peak is never
    lost, only its time gets coarser.
    """

    def __init__(
        self,
        workers: Sequence[str],
        *,
        start_ns: int = 0,
        span_ns: int = NS_PER_MS,
        most_points: int = 240,
    ) -> None:
        if most_points < 2 or span_ns < 1:
            raise ValueError("a recorder needs two points and a span of 1 ns or more")
        self._workers = list(workers)
        self._start_ns = start_ns
        self._span_ns = span_ns
        self._most = most_points
        # Per worker and measure: the peak of every span up to the current one, and the latest.
        self._peaks = [[[0] for _ in MEASURES] for _ in self._workers]
        self._last = [[0] * len(MEASURES) for _ in self._workers]
        self._end_ns = start_ns

    def note(self, t_ns: int, worker: int, waiting: int, running: int, blocks: int) -> None:
        """From `t_ns` on, which never goes back, worker number `worker` has these."""
        span = self._reach(t_ns)
        last = self._last[worker]
        for of, value, i in zip(
            self._peaks[worker], (waiting, running, blocks), (0, 1, 2), strict=True
        ):
            if len(of) <= span:
                of.extend([last[i]] * (span + 1 - len(of)))
            if value > of[span]:
                of[span] = value
            last[i] = value

    def done(self, end_ns: int | None = None) -> Queues:
        """What was seen until `end_ns`, or until the last change."""
        span = self._reach(self._end_ns if end_ns is None else end_ns)
        found: list[list[list[int]]] = [[], [], []]
        for peaks, last in zip(self._peaks, self._last, strict=True):
            for of, value, into in zip(peaks, last, found, strict=True):
                into.append([*of, *[value] * (span + 1 - len(of))])
        return Queues(
            start_ms=ns_to_ms(self._start_ns),
            span_ms=ns_to_ms(self._span_ns),
            workers=list(self._workers),
            waiting=found[0],
            running=found[1],
            blocks=found[2],
        )

    def _reach(self, t_ns: int) -> int:
        """The span that `t_ns` is in, after making room for it."""
        if t_ns < self._end_ns:
            raise ValueError(f"{t_ns} ns is before {self._end_ns} ns")
        self._end_ns = t_ns
        span = (t_ns - self._start_ns) // self._span_ns
        while span >= self._most:
            self._halve()
            span = (t_ns - self._start_ns) // self._span_ns
        return span

    def _halve(self) -> None:
        # A list may end early: from there on its latest value holds, in the merged span as well.
        width = max(len(of) for peaks in self._peaks for of in peaks) if self._peaks else 0
        for peaks, last in zip(self._peaks, self._last, strict=True):
            for i, of in enumerate(peaks):
                whole = [*of, *[last[i]] * (width + width % 2 - len(of))]
                peaks[i] = [max(pair) for pair in zip(whole[::2], whole[1::2], strict=True)]
        self._span_ns *= 2


def queue_over_time(
    samples: Iterable[tuple[int, Mapping[str, tuple[int, int, int]]]],
    workers: Sequence[str],
    *,
    most_points: int = 240,
) -> Queues:
    """Queues from samples in order of time: (t_ns, worker -> (waiting, running, blocks))."""
    recorder = QueueRecorder(workers, most_points=most_points)
    for t_ns, depths in samples:
        for number, worker in enumerate(workers):
            if worker in depths:
                recorder.note(t_ns, number, *depths[worker])
    return recorder.done()
