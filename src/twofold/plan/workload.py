"""The requests of a scenario: a trace, read once per process, through the filters it asks for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import msgspec

from twofold.plan.resample import resample, sample
from twofold.plan.scenario import Workload
from twofold.trace import (
    Lengths,
    TraceError,
    TraceInfo,
    TraceRequest,
    drop_hashes,
    gamma_arrivals,
    head,
    jitter,
    length_scale,
    only_class,
    open_trace,
    poisson,
    rate_scale,
    window,
)


class Requests(msgspec.Struct, frozen=True):
    """Requests of a workload at the trace's own rate, and what the file was taken for."""

    rows: tuple[TraceRequest, ...]
    info: TraceInfo


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A workload in numbers. `reuse_share`: of prompt tokens, those whose block came before."""

    requests: int
    rate_rps: float
    span_s: float
    input_mean: float
    input_p50: int
    input_p95: int
    output_mean: float
    output_p50: int
    longest_input: int
    longest: TraceRequest
    reuse_share: float


def requests_of(workload: Workload, seed: int) -> Requests:
    """All requests of `workload`. Raises TraceError or ValueError, in one line.

    Kept from one call to the next, as many runs of a process share a trace.
    """
    return _requests(workload, seed)


@lru_cache(maxsize=4)
def _requests(workload: Workload, seed: int) -> Requests:
    plain = msgspec.structs.replace(workload, sample=0, resample=0)
    if plain != workload:
        found = _requests(plain, seed)
        if workload.resample:
            drawn = resample(found.rows, seed, workload.resample, workload.sample)
        else:
            drawn = sample(found.rows, workload.sample)
        return Requests(tuple(drawn), found.info)
    trace = open_trace(workload.trace, sort=workload.sort, skip_bad=workload.skip_bad)
    rows = tuple(_filtered(workload, seed, trace, trace.lengths()))
    if not rows:
        raise TraceError(
            workload.trace,
            None,
            None,
            "no request is left; --window, --requests or --class is too narrow",
        )
    return Requests(rows, trace.info)


def _filtered(
    workload: Workload, seed: int, timed: Iterable[TraceRequest], lengths: Iterable[Lengths]
) -> Iterator[TraceRequest]:
    requests: Iterator[TraceRequest]
    if workload.arrivals:
        requests = (
            TraceRequest(0, r.input_tokens, r.output_tokens, r.hash_ids, r.block_tokens, r.klass)
            for r in lengths
        )
    else:
        requests = iter(timed)
    if workload.klass:
        requests = only_class(requests, (workload.klass,))
    if workload.window_s is not None and not workload.arrivals:
        requests = window(requests, *workload.window_s)
    if workload.requests:
        requests = head(requests, workload.requests)
    if workload.drop_hashes:
        requests = drop_hashes(requests)
    if workload.length_divide > 1:
        requests = length_scale(requests, workload.length_divide)
    if workload.jitter_s:
        requests = jitter(requests, seed, workload.jitter_s)
    if workload.arrivals == "poisson":
        requests = poisson(requests, workload.rate_rps, seed)
    elif workload.arrivals == "gamma":
        requests = gamma_arrivals(requests, workload.rate_rps, workload.cv, seed)
    if workload.arrivals and workload.window_s is not None:
        requests = window(requests, *workload.window_s)
    return requests


def scaled(requests: Sequence[TraceRequest], factor: float) -> Iterable[TraceRequest]:
    """`requests` at `factor` times their rate."""
    return requests if factor == 1 else rate_scale(requests, factor)


def summary(requests: Sequence[TraceRequest]) -> Summary:
    """What `requests` are like, at their own rate."""
    inputs = sorted(r.input_tokens for r in requests)
    outputs = sorted(r.output_tokens for r in requests)
    span_s = (requests[-1].arrival_ns - requests[0].arrival_ns) / 1e9
    n = len(requests)
    return Summary(
        requests=n,
        rate_rps=n / span_s if span_s > 0 else 0.0,
        span_s=span_s,
        input_mean=sum(inputs) / n,
        input_p50=_at(inputs, 0.5),
        input_p95=_at(inputs, 0.95),
        output_mean=sum(outputs) / n,
        output_p50=_at(outputs, 0.5),
        longest_input=inputs[-1],
        longest=max(requests, key=lambda r: r.input_tokens + r.output_tokens),
        reuse_share=_reuse(requests, sum(inputs)),
    )


def _at(values: Sequence[int], share: float) -> int:
    """Nearest rank."""
    return values[max(0, math.ceil(share * len(values)) - 1)]


def _reuse(requests: Sequence[TraceRequest], tokens: int) -> float:
    """An upper bound on prefix hits: one cache for all, nothing ever evicted."""
    seen: dict[int, None] = {}
    hits = 0
    for request in requests:
        fresh = False
        for block in request.hash_ids or ():
            fresh = fresh or block not in seen
            if not fresh:
                hits += request.block_tokens
            seen[block] = None
    return min(hits / tokens, 1.0) if tokens else 0.0
