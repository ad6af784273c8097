"""Filters over requests: pure generators that chain, stream and give the same on every run.

Each takes requests in order of arrival and gives them in order of arrival.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Iterator
from fractions import Fraction
from typing import Final

from twofold.trace.hashing import uniform
from twofold.trace.request import TraceRequest
from twofold.types import ceil_div, seconds_to_ns

MOONCAKE_TICK_S: Final = 3.0
"""Mooncake's traces put arrivals on ticks of three seconds."""


def head(requests: Iterable[TraceRequest], n: int) -> Iterator[TraceRequest]:
    """The first `n` requests. Raises ValueError if n < 0."""
    if n < 0:
        raise ValueError(f"head takes a count from 0 on, not {n}")
    return itertools.islice(requests, n)


def window(
    requests: Iterable[TraceRequest], start_s: float, end_s: float = math.inf
) -> Iterator[TraceRequest]:
    """Arrivals in [start_s, end_s), with `start_s` as the new time 0.

    Reading stops at the first arrival from `end_s` on. Raises ValueError for an empty window.
    """
    if not 0 <= start_s < end_s:
        raise ValueError(f"a window runs from 0 or later to a later time, not {start_s} to {end_s}")
    start_ns = seconds_to_ns(start_s)
    end_ns = None if end_s == math.inf else seconds_to_ns(end_s)
    return _window(requests, start_ns, end_ns)


def _window(
    requests: Iterable[TraceRequest], start_ns: int, end_ns: int | None
) -> Iterator[TraceRequest]:
    for request in requests:
        if end_ns is not None and request.arrival_ns >= end_ns:
            return
        if request.arrival_ns >= start_ns:
            yield request.at(request.arrival_ns - start_ns)


def rate_scale(requests: Iterable[TraceRequest], factor: float) -> Iterator[TraceRequest]:
    """Gaps divided by `factor`: 2 doubles the request rate. Rounded down to the ns, in order.

    `factor` is taken as its shortest decimal (0.1 is one tenth). Raises ValueError unless > 0.
    """
    if not (factor > 0 and math.isfinite(factor)):
        raise ValueError(f"a rate scale is a number above 0, not {factor}")
    exact = Fraction(str(factor))
    times, per = exact.denominator, exact.numerator
    return (request.at(request.arrival_ns * times // per) for request in requests)


def length_scale(requests: Iterable[TraceRequest], divisor: int) -> Iterator[TraceRequest]:
    """Lengths divided by `divisor`, rounded down, at least 1 token; arrivals stay.

    Hashes stay too, on blocks that shrink alike. Raises ValueError if divisor < 1, or where
    `divisor` does not divide the block size (see `drop_hashes`).
    """
    if divisor < 1:
        raise ValueError(f"a length divisor is a whole number from 1 on, not {divisor}")
    return (_shrink(request, divisor) for request in requests)


def _shrink(request: TraceRequest, divisor: int) -> TraceRequest:
    input_tokens = max(1, request.input_tokens // divisor)
    hashes, block = request.hash_ids, request.block_tokens
    if hashes is not None:
        block, rest = divmod(block, divisor)
        if rest or not block:
            raise ValueError(
                f"hashes of {request.block_tokens}-token blocks cannot be scaled by {divisor}; "
                "a divisor of the block size can, or drop the hashes"
            )
        hashes = hashes[: ceil_div(input_tokens, block)]
    return TraceRequest(
        request.arrival_ns,
        input_tokens,
        max(1, request.output_tokens // divisor),
        hashes,
        block,
        request.klass,
    )


def drop_hashes(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """The same requests with nothing known of shared prefixes."""
    return (
        TraceRequest(r.arrival_ns, r.input_tokens, r.output_tokens, None, 0, r.klass)
        for r in requests
    )


def only_class(
    requests: Iterable[TraceRequest], klasses: Collection[str]
) -> Iterator[TraceRequest]:
    """Requests whose class is one of `klasses`; arrivals stay."""
    return (request for request in requests if request.klass in klasses)


def jitter(
    requests: Iterable[TraceRequest], seed: int, tick_s: float = MOONCAKE_TICK_S
) -> Iterator[TraceRequest]:
    """Spreads arrivals that share a coarse tick uniformly over it, in the order drawn.

    An arrival belongs to the nearest tick (published ticks are a millisecond off at times) and
    moves to tick + u * tick_s, u in (0, 1) a hash of (seed, index in the trace). Memory is one
    tick's requests. Raises ValueError unless tick_s > 0.
    """
    if not tick_s > 0:
        raise ValueError(f"a tick is longer than 0 s, not {tick_s}")
    return _jitter(requests, seed, seconds_to_ns(tick_s))


def _jitter(requests: Iterable[TraceRequest], seed: int, tick_ns: int) -> Iterator[TraceRequest]:
    numbered = enumerate(requests)
    for tick, group in itertools.groupby(
        numbered, key=lambda pair: (2 * pair[1].arrival_ns + tick_ns) // (2 * tick_ns)
    ):
        drawn = [
            (tick * tick_ns + int(uniform(seed, index) * tick_ns), index, request)
            for index, request in group
        ]
        drawn.sort(key=lambda item: item[:2])
        for arrival_ns, _index, request in drawn:
            yield request.at(arrival_ns)


def merge(*streams: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """Several traces as one, by arrival; at equal times the earlier argument goes first."""
    return heapq.merge(*streams, key=lambda request: request.arrival_ns)
