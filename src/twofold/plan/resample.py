"""Traces that might as well have been: blocks of a trace drawn anew, so that its bursts stay.

A trace is cut into stretches of equal time. A resample draws as many stretches with replacement;
gaps inside one stay as they were. What is drawn is a hash of (seed, number), so that a resample
is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from twofold.trace import TraceRequest
from twofold.trace.hashing import hash64

STRETCHES: Final = 20
"""The fewest stretches that a trace is cut into: fewer would leave little to draw from."""
_MOST: Final = 200
_REQUESTS: Final = 150
"""Requests of a stretch on average, of a long trace: fewer would cut through the bursts."""


def stretches(requests: Sequence[TraceRequest]) -> tuple[list[list[TraceRequest]], int]:
    """`requests` in stretches of equal time, and the length of one in ns."""
    n = min(max(STRETCHES, len(requests) // _REQUESTS), _MOST)
    first_ns = requests[0].arrival_ns if requests else 0
    span_ns = (requests[-1].arrival_ns - first_ns if requests else 0) // n + 1
    cut: list[list[TraceRequest]] = [[] for _ in range(n)]
    for request in requests:
        cut[(request.arrival_ns - first_ns) // span_ns].append(request)
    return cut, span_ns


def resample(
    requests: Sequence[TraceRequest], seed: int, number: int, most: int = 0
) -> list[TraceRequest]:
    """Resample `number` (from 1 on) of `requests`, of about as many or `most`; 0 is the trace.

    Prompts keep their hashes, so a stretch that is drawn twice hits the prefixes it made before.
    """
    if number == 0 or len(requests) < 2:
        return list(requests)
    cut, span_ns = stretches(requests)
    filled = [stretch for stretch in cut if stretch]
    drawn = [
        cut[hash64(seed, number, place) % len(cut)]
        for place in range(_n_drawn(cut, requests, most))
    ]
    if not any(drawn):
        drawn[0] = filled[0]
    return _joined(cut, drawn, span_ns, requests[0].arrival_ns)


def sample(requests: Sequence[TraceRequest], most: int) -> list[TraceRequest]:
    """About `most` requests: whole stretches taken evenly from all over the trace, in order."""
    if len(requests) <= most:
        return list(requests)
    cut, span_ns = stretches(requests)
    n = _n_drawn(cut, requests, most)
    drawn = [cut[(2 * i + 1) * len(cut) // (2 * n)] for i in range(n)]
    if not any(drawn):
        return list(requests[:most])
    return _joined(cut, drawn, span_ns, requests[0].arrival_ns)


def _n_drawn(cut: Sequence[list[TraceRequest]], requests: Sequence[TraceRequest], most: int) -> int:
    """Stretches that make about `most` requests; 0: as many as there are."""
    return max(1, min(len(cut), len(cut) * (most or len(requests)) // len(requests)))


def _joined(
    cut: Sequence[list[TraceRequest]],
    drawn: Sequence[list[TraceRequest]],
    span_ns: int,
    first_ns: int,
) -> list[TraceRequest]:
    """The stretches drawn, one after the other."""
    begins = {id(stretch): first_ns + i * span_ns for i, stretch in enumerate(cut)}
    found: list[TraceRequest] = []
    for place, stretch in enumerate(drawn):
        shift_ns = place * span_ns - begins.get(id(stretch), first_ns)
        found += [request.at(request.arrival_ns + shift_ns) for request in stretch]
    early_ns = found[0].arrival_ns
    return [request.at(request.arrival_ns - early_ns) for request in found]
