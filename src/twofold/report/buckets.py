"""A run's figures by length of prompt and answer, so that it shows who misses the goal."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

import msgspec

from twofold.metrics.record import RequestRecord
from twofold.metrics.slo import Percentiles, Slo, meets, percentiles

# Chat prompts are mostly below 2 k tokens, code and retrieval around 2 to 8 k, agents up to 128 k.
INPUT_EDGES: Final = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
OUTPUT_EDGES: Final = (16, 64, 128, 256, 512, 1024, 4096)


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one measure in milliseconds; null where there is no finite value."""

    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    max: float | None


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """Requests with `input_from` <= prompt < `input_below` and the like of their answers.

    An open end is null. `slo_attainment` leaves cancelled requests out and is null without others.
    """

    input_from: int
    input_below: int | None
    output_from: int
    output_below: int | None
    requests: int
    completed: int
    slo_attainment: float | None
    ttft_ms: Measure
    tpot_ms: Measure


def finite(value: float) -> float | None:
    """`value`, or None for NaN and infinity, which JSON has no words for."""
    return value if math.isfinite(value) else None


def measure(found: Percentiles) -> Measure:
    """The same figures with None for what is not finite."""
    return Measure(
        mean=finite(found.mean),
        p50=finite(found.p50),
        p90=finite(found.p90),
        p95=finite(found.p95),
        p99=finite(found.p99),
        max=finite(found.max),
    )


def buckets_of(records: Sequence[RequestRecord], slo: Slo) -> list[Bucket]:
    """Figures of every bucket that has requests, by prompt and then by answer; at most 88."""
    found: dict[tuple[int, int], list[RequestRecord]] = {}
    for record in records:
        key = (
            bisect_right(INPUT_EDGES, record.input_tokens),
            bisect_right(OUTPUT_EDGES, record.output_tokens),
        )
        found.setdefault(key, []).append(record)
    return [_bucket(key, found[key], slo) for key in sorted(found)]


def _bucket(key: tuple[int, int], records: Sequence[RequestRecord], slo: Slo) -> Bucket:
    input_from, input_below = _edges(INPUT_EDGES, key[0])
    output_from, output_below = _edges(OUTPUT_EDGES, key[1])
    counted = [record for record in records if record.outcome != "cancelled"]
    lost = [record for record in counted if record.outcome != "finished"]
    kept = [record for record in records if record.outcome in ("finished", "cancelled")]
    ttfts = [record.ttft_ns for record in records if record.ttft_ns is not None]
    tpots = [record.tpot_ns for record in kept if record.tpot_ns is not None]
    good = sum(meets(record, slo) for record in counted)
    return Bucket(
        input_from=input_from,
        input_below=input_below,
        output_from=output_from,
        output_below=output_below,
        requests=len(records),
        completed=sum(record.outcome == "finished" for record in records),
        slo_attainment=good / len(counted) if counted else None,
        ttft_ms=measure(percentiles(ttfts, sum(r.ttft_ns is None for r in lost))),
        tpot_ms=measure(percentiles(tpots, sum(len(r.token_times_ns) > 0 for r in lost))),
    )


def _edges(edges: Sequence[int], index: int) -> tuple[int, int | None]:
    return (
        edges[index - 1] if index else 0,
        edges[index] if index < len(edges) else None,
    )
