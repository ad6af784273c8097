"""Percentiles, attainment, goodput and throughput of a run, live or simulated. Pure.

Percentiles are by nearest rank: the smallest observed value that at least q % of the values do
not exceed, so each is a time that some request really had.

A request that failed or was refused stays in the figures as infinitely late in whatever it did
not reach: TTFT when no token came; TPOT, and one more gap of ITL, when its stream was cut; E2E
in any case. A percentile whose rank falls among those is infinite (null in JSON). Means are of
the finite values, since one failure would make any mean infinite. A cancelled request counts
with what it had got when its client left, and neither for nor against the SLO.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from twofold.metrics.ledger import PHASES
from twofold.metrics.record import RequestRecord
from twofold.types import NS_PER_MS, NS_PER_S, ceil_div

Ns = npt.NDArray[np.int64]

_PERCENTS: Final = (50, 90, 95, 99)


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one measure in milliseconds; NaN (null in JSON) when there is no value."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Goals for one request, both of which it must meet, in milliseconds."""

    ttft_ms: float = math.inf
    tpot_ms: float = math.inf


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A run in numbers. Rates are per second from the first arrival to the last end.

    `offered_rps` is arrivals over the time between the first and the last of them (0 for one).
    `slo_attainment` is the share of requests, cancelled ones left out, that finished within the
    SLO, NaN when there are none; `goodput_rps` is those per second.
    """

    requests: int
    completed: int
    refused: int
    failed: int
    cancelled: int
    offered_rps: float
    slo_attainment: float
    goodput_rps: float
    throughput_rps: float
    output_tokens_per_s: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    itl_ms: Percentiles
    e2e_ms: Percentiles
    phases_ms: dict[str, Percentiles]


def percentiles(
    values_ns: Sequence[int] | Ns, n_never: int = 0, *, reorder: bool = False
) -> Percentiles:
    """Nearest-rank percentiles of `values_ns` and of `n_never` values that are infinite.

    With `reorder` an array is put into another order rather than copied.
    """
    values = np.asarray(values_ns, dtype=np.int64)
    n_finite = len(values)
    n = n_finite + n_never
    if n == 0:
        return Percentiles(
            mean=math.nan, p50=math.nan, p90=math.nan, p95=math.nan, p99=math.nan, max=math.nan
        )

    ranks = [*(ceil_div(percent * n, 100) for percent in _PERCENTS), n]
    # Millions of gaps between tokens are not sorted for the five of them that are wanted.
    wanted = sorted({rank - 1 for rank in ranks if rank <= n_finite})
    sorted_there = values if reorder else values.copy()
    if wanted:
        sorted_there.partition(wanted)

    def at_rank(rank: int) -> float:
        return int(sorted_there[rank - 1]) / NS_PER_MS if rank <= n_finite else math.inf

    # Integer sums: exact, and so the same whatever the order or the machine.
    mean = int(values.sum()) / n_finite / NS_PER_MS if n_finite else math.inf
    p50, p90, p95, p99, most = map(at_rank, ranks)
    return Percentiles(mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, max=most)


def meets(record: RequestRecord, slo: Slo) -> bool:
    """Whether `record` finished within `slo`. An answer of one token has no TPOT to miss."""
    ttft_ns, tpot_ns = record.ttft_ns, record.tpot_ns
    return (
        record.outcome == "finished"
        and ttft_ns is not None
        and ttft_ns <= slo.ttft_ms * NS_PER_MS
        and (tpot_ns is None or tpot_ns <= slo.tpot_ms * NS_PER_MS)
    )


def figures(records: Sequence[RequestRecord], slo: Slo | None = None) -> Figures:
    """All figures of a run. Without `slo` every finished request counts as good."""
    goal = Slo() if slo is None else slo
    ends = {"finished": 0, "refused": 0, "failed": 0, "cancelled": 0}
    for record in records:
        ends[record.outcome] += 1
    good = sum(meets(record, goal) for record in records)
    counted = len(records) - ends["cancelled"]
    arrivals = [record.arrival_ns for record in records]
    first_ns = min(arrivals, default=0)
    span_ns = max((record.end_ns for record in records), default=0) - first_ns
    n_tokens = sum(len(record.token_times_ns) for record in records)
    return Figures(
        requests=len(records),
        completed=ends["finished"],
        refused=ends["refused"],
        failed=ends["failed"],
        cancelled=ends["cancelled"],
        offered_rps=_per_s(len(records), max(arrivals, default=0) - first_ns),
        slo_attainment=good / counted if counted else math.nan,
        goodput_rps=_per_s(good, span_ns),
        throughput_rps=_per_s(ends["finished"], span_ns),
        output_tokens_per_s=_per_s(n_tokens, span_ns),
        ttft_ms=_ttft(records),
        tpot_ms=_tpot(records),
        itl_ms=_itl(records),
        e2e_ms=_e2e(records),
        phases_ms=_phases(records),
    )


def _per_s(n: int, span_ns: int) -> float:
    return n * NS_PER_S / span_ns if span_ns > 0 else 0.0


def _lost(record: RequestRecord) -> bool:
    return record.outcome in ("failed", "refused")


def _cut(record: RequestRecord) -> bool:
    return _lost(record) and len(record.token_times_ns) > 0


def _ttft(records: Sequence[RequestRecord]) -> Percentiles:
    values = [r.ttft_ns for r in records if r.ttft_ns is not None]
    return percentiles(values, sum(_lost(r) and r.ttft_ns is None for r in records))


def _tpot(records: Sequence[RequestRecord]) -> Percentiles:
    values = [r.tpot_ns for r in records if r.tpot_ns is not None and not _lost(r)]
    return percentiles(values, sum(map(_cut, records)))


def _itl(records: Sequence[RequestRecord]) -> Percentiles:
    answers = [r.token_times_ns for r in records if r.token_times_ns]
    # One array for all: of a long run these are most of the memory.
    gaps = np.empty(sum(map(len, answers)) - len(answers), dtype=np.int64)
    end = 0
    for answer in answers:
        times = np.asarray(answer, dtype=np.int64)
        start, end = end, end + len(times) - 1
        np.subtract(times[1:], times[:-1], out=gaps[start:end])
    return percentiles(gaps, sum(map(_cut, records)), reorder=True)


def _e2e(records: Sequence[RequestRecord]) -> Percentiles:
    values = [r.e2e_ns for r in records if r.outcome == "finished"]
    return percentiles(values, sum(map(_lost, records)))


def _phases(records: Sequence[RequestRecord]) -> dict[str, Percentiles]:
    begun = [r.phases_ns for r in records if r.phases_ns]
    return {
        name: percentiles([phases.get(name, 0) for phases in begun])
        for name in PHASES
        if any(phases.get(name, 0) for phases in begun)
    }
