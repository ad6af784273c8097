"""Percentiles, SLO figures and the digest, on records made by hand."""

from __future__ import annotations

import math
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.metrics.digest import digest
from twofold.metrics.record import RequestRecord
from twofold.metrics.slo import Slo, figures, meets, percentiles

MS = 1_000_000


def record(request_id: int = 0, at_ms: int = 0, **changes: Any) -> RequestRecord:
    """Finished, TTFT 10 ms, gaps of 2 and 4 ms."""
    times = [(at_ms + ms) * MS for ms in (10, 12, 16)]
    fields: dict[str, Any] = {
        "request_id": request_id,
        "arrival_ns": at_ms * MS,
        "end_ns": (at_ms + 20) * MS,
        "input_tokens": 5,
        "output_tokens": 3,
        "outcome": "finished",
        "token_times_ns": times,
        "phases_ns": {"prefill": 6 * MS, "relay": 4 * MS},
    }
    return RequestRecord(**{**fields, **changes})


def test_percentiles_are_nearest_rank() -> None:
    hundred = percentiles([ms * MS for ms in range(100, 0, -1)])
    assert (hundred.p50, hundred.p90, hundred.p95, hundred.p99, hundred.max) == (
        50,
        90,
        95,
        99,
        100,
    )
    assert hundred.mean == 50.5
    three = percentiles([3 * MS, 1 * MS, 2 * MS])
    assert (three.p50, three.p90, three.p99) == (2, 3, 3)
    assert math.isnan(percentiles([]).p50)


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=60), st.integers(0, 20))
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(
    values: list[int], n_never: int
) -> None:
    found = percentiles(values, n_never)
    n = len(values) + n_never
    for percent, got in ((50, found.p50), (90, found.p90), (95, found.p95), (99, found.p99)):
        enough = [
            v / MS for v in values if 100 * sum(other <= v for other in values) >= percent * n
        ]
        assert got == min(enough, default=math.inf)


def test_what_never_came_is_infinitely_late() -> None:
    records = [record(i) for i in range(9)]
    records.append(record(9, outcome="failed", token_times_ns=(), phases_ns={}))
    shown = figures(records)
    assert (shown.ttft_ms.p90, shown.ttft_ms.p95, shown.ttft_ms.max) == (10, math.inf, math.inf)
    assert shown.ttft_ms.mean == 10
    assert shown.e2e_ms.max == math.inf
    assert shown.itl_ms.max == 4  # it had no gaps
    assert msgspec.json.decode(msgspec.json.encode(shown))["ttft_ms"]["p99"] is None


def test_a_cut_stream_has_one_endless_gap() -> None:
    cut = record(1, outcome="failed", token_times_ns=[10 * MS, 12 * MS])
    shown = figures([record(0), cut])
    assert shown.ttft_ms.max == 10
    assert shown.tpot_ms.max == math.inf
    assert shown.tpot_ms.p50 == 3
    assert (shown.itl_ms.p50, shown.itl_ms.max) == (2, math.inf)


def test_a_cancelled_request_counts_with_what_it_got() -> None:
    left = record(1, outcome="cancelled", token_times_ns=[30 * MS], end_ns=31 * MS)
    early = record(2, outcome="cancelled", token_times_ns=(), phases_ns={}, end_ns=1 * MS)
    shown = figures([record(0), left, early], Slo(ttft_ms=10, tpot_ms=3))
    assert (shown.completed, shown.cancelled, shown.slo_attainment) == (1, 2, 1.0)
    assert shown.ttft_ms.max == 30
    assert shown.e2e_ms.max == 20


def test_attainment_goodput_and_throughput() -> None:
    slow = record(1, at_ms=40, token_times_ns=[60 * MS, 61 * MS, 62 * MS])
    refused = record(2, at_ms=80, outcome="refused", token_times_ns=(), end_ns=80 * MS)
    late = record(3, at_ms=80, end_ns=100 * MS)
    shown = figures([record(0), slow, refused, late], Slo(ttft_ms=10, tpot_ms=3))
    assert (shown.requests, shown.completed, shown.refused, shown.failed) == (4, 3, 1, 0)
    assert shown.slo_attainment == 0.5
    assert shown.goodput_rps == pytest.approx(2 / 0.1)
    assert shown.throughput_rps == pytest.approx(3 / 0.1)
    assert shown.output_tokens_per_s == pytest.approx(9 / 0.1)
    assert shown.offered_rps == pytest.approx(4 / 0.08)
    assert shown.phases_ms["prefill"].p50 == 6
    assert list(shown.phases_ms) == ["prefill", "relay"]


def test_meeting_the_slo_needs_both_goals() -> None:
    assert meets(record(), Slo(ttft_ms=10, tpot_ms=3))
    assert not meets(record(), Slo(ttft_ms=9.999, tpot_ms=3))
    assert not meets(record(), Slo(ttft_ms=10, tpot_ms=2.999))
    assert meets(record(token_times_ns=[MS], output_tokens=1), Slo(ttft_ms=1, tpot_ms=0))
    assert not meets(record(outcome="failed"), Slo())


def test_a_run_without_requests_has_figures() -> None:
    shown = figures([])
    assert (shown.requests, shown.offered_rps, shown.goodput_rps) == (0, 0.0, 0.0)
    assert math.isnan(shown.slo_attainment)


def test_the_digest_depends_on_every_field_and_on_order() -> None:
    changes: list[dict[str, Any]] = [
        {"request_id": 7},
        {"klass": "chat"},
        {"arrival_ns": 1},
        {"end_ns": 1},
        {"input_tokens": 6},
        {"output_tokens": 4},
        {"outcome": "failed"},
        {"reason": "x"},
        {"token_times_ns": [10 * MS, 12 * MS, 17 * MS]},
        {"phases_ns": {"prefill": 5 * MS, "relay": 5 * MS}},
        {"prefill": "p"},
        {"decode": "d"},
        {"n_cached": 1},
        {"n_preempted": 1},
        {"n_bytes": 1},
        {"recoveries": ("retried",)},
    ]
    assert {key for change in changes for key in change} == set(RequestRecord.__struct_fields__)
    digests = [digest([record(**change)]) for change in ({}, *changes)]
    assert len(set(digests)) == len(digests)
    a, b = record(0), record(1)
    assert digest([a, b]) != digest([b, a])


def test_the_digest_does_not_depend_on_how_the_fields_are_held() -> None:
    other = record(
        token_times_ns=array("q", [10 * MS, 12 * MS, 16 * MS]),
        phases_ns={"relay": 4 * MS, "prefill": 6 * MS},
    )
    assert digest([record()]) == digest([other])
    # Pinned: a digest that is published must be found again by a later version.
    pinned = "197850dc5177f8939add0953ccebc901a94b87c4ae2ed918799c4f9df3a64e0c"
    assert digest([record()]) == pinned
