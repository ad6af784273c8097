"""Resamples and samples of a trace: what stays of it, and that they are always the same."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plan_support import requests
from twofold.plan.resample import STRETCHES, resample, sample, stretches
from twofold.trace import TraceRequest

TRACE = requests(400, rate=10, input_tokens=100, output_tokens=10)


def key(request: TraceRequest) -> tuple[int, int]:
    return request.input_tokens, request.output_tokens


def test_number_0_is_the_trace_and_others_differ() -> None:
    assert resample(TRACE, 7, 0) == TRACE
    drawn = [resample(TRACE, 7, number) for number in (1, 2)]
    assert drawn[0] != drawn[1] != TRACE
    assert drawn[0] == resample(TRACE, 7, 1)
    assert resample(TRACE, 8, 1) != drawn[0]


@given(st.integers(1, 40), st.integers(2, 120), st.integers(0, 5))
def test_a_resample_is_in_order_from_0_and_about_as_long(number: int, n: int, seed: int) -> None:
    drawn = resample(TRACE[:n], seed, number)
    assert drawn[0].arrival_ns == 0
    assert all(a.arrival_ns <= b.arrival_ns for a, b in pairwise(drawn))
    assert drawn[-1].arrival_ns <= TRACE[n - 1].arrival_ns + STRETCHES
    assert {key(r) for r in drawn} <= {key(r) for r in TRACE[:n]}


def test_gaps_inside_a_stretch_stay() -> None:
    cut, _ = stretches(TRACE)
    first = {
        (key(a), key(b)): b.arrival_ns - a.arrival_ns for part in cut for a, b in pairwise(part)
    }
    drawn = resample(TRACE, 3, 1)
    known = [
        first[key(a), key(b)] == b.arrival_ns - a.arrival_ns
        for a, b in pairwise(drawn)
        if (key(a), key(b)) in first
    ]
    assert len(known) > len(drawn) * 0.9
    assert sum(known) > len(known) * 0.98


def test_a_sample_takes_stretches_from_all_over_the_trace() -> None:
    taken = sample(TRACE, 100)
    assert 60 <= len(taken) <= 140
    assert sample(TRACE, 400) == TRACE
    spread = [TRACE.index(next(r for r in TRACE if key(r) == key(one))) for one in taken]
    assert min(spread) < 60
    assert max(spread) > 300


def test_a_burst_and_nothing_else_can_be_resampled() -> None:
    burst = [TraceRequest(0, 5, 5), TraceRequest(0, 6, 5), TraceRequest(10**9, 7, 5)]
    for number in range(1, 20):
        assert resample(burst, 0, number)
