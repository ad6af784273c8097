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
"""Stretches that a trace is cut into. Fewer would leave little to draw from; more would cut
through the bursts."""


def stretches(
    requests: Sequence[TraceRequest], n: int = STRETCHES
) -> tuple[list[list[TraceRequest]], int]:
    """`requests` in `n` stretches of equal time, and the length of one in ns."""
    first_ns = requests[0].arrival_ns if requests else 0
    span_ns = (requests[-1].arrival_ns - first_ns if requests else 0) // n + 1
    cut: list[list[TraceRequest]] = [[] for _ in range(n)]
    for request in requests:
        cut[(request.arrival_ns - first_ns) // span_ns].append(request)
    return cut, span_ns


def resample(requests: Sequence[TraceRequest], seed: int, number: int) -> list[TraceRequest]:
    """Resample `number` (from 1 on) of `requests`; 0 is the trace itself.

    Prompts keep their hashes, so a stretch that is drawn twice hits the prefixes it made before.
    """
    if number == 0 or len(requests) < 2:
        return list(requests)
    cut, span_ns = stretches(requests)
    filled = [stretch for stretch in cut if stretch]
    drawn = [cut[hash64(seed, number, place) % len(cut)] for place in range(len(cut))]
    if not any(drawn):
        drawn[0] = filled[0]
    return _joined(cut, drawn, span_ns, requests[0].arrival_ns)


def sample(requests: Sequence[TraceRequest], most: int) -> list[TraceRequest]:
    """About `most` requests: whole stretches taken evenly from all over the trace, in order."""
    if len(requests) <= most:
        return list(requests)
    cut, span_ns = stretches(requests)
    n = max(1, len(cut) * most // len(requests))
    drawn = [cut[(2 * i + 1) * len(cut) // (2 * n)] for i in range(n)]
    if not any(drawn):
        return list(requests[:most])
    return _joined(cut, drawn, span_ns, requests[0].arrival_ns)


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
        found += [_at(request, request.arrival_ns + shift_ns) for request in stretch]
    early_ns = found[0].arrival_ns
    return [_at(request, request.arrival_ns - early_ns) for request in found]


def _at(request: TraceRequest, arrival_ns: int) -> TraceRequest:
    return TraceRequest(
        arrival_ns,
        request.input_tokens,
        request.output_tokens,
        request.hash_ids,
        request.block_tokens,
        request.klass,
    )
