"""What is done to a trace before it is simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.plan_support import write_requests
from twofold.plan.scenario import Workload
from twofold.plan.workload import requests_of, scaled, summary
from twofold.trace import TraceError, TraceRequest

S = 1_000_000_000


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """One request a second for 100 s, of many lengths, every other one of class "b"."""
    rows = [
        TraceRequest(i * S, 129 + i % 60, 10, (i // 50, 1000 + i, 2000 + i), 64, "ab"[i % 2])
        for i in range(100)
    ]
    return str(write_requests(tmp_path, rows))


def read(trace: str, seed: int = 0, **changes: object) -> tuple[TraceRequest, ...]:
    return requests_of(Workload(trace=trace, **changes), seed).rows  # type: ignore[arg-type]


def test_filters_apply_in_the_order_that_is_promised(trace: str) -> None:
    assert len(read(trace)) == 100
    found = read(trace, klass="b", window_s=(10.0, 20.0), requests=3, length_divide=2)
    assert [r.input_tokens for r in found] == [140 // 2, 142 // 2, 144 // 2]
    assert [r.arrival_ns for r in found] == [S, 3 * S, 5 * S]
    assert found[0].block_tokens == 32
    assert read(trace, drop_hashes=True)[0].hash_ids is None


def test_arrivals_drawn_anew_keep_the_lengths(trace: str) -> None:
    for kind, cv in (("poisson", 1.0), ("gamma", 3.0)):
        one = read(trace, 1, arrivals=kind, rate_rps=50.0, cv=cv)
        assert [r.input_tokens for r in one] == [r.input_tokens for r in read(trace)]
        assert one != read(trace, 2, arrivals=kind, rate_rps=50.0, cv=cv)
        assert one == read(trace, 1, arrivals=kind, rate_rps=50.0, cv=cv)
        assert 0.5 < one[-1].arrival_ns / S < 6


def test_samples_and_resamples_come_last(trace: str) -> None:
    some = read(trace, sample=20)
    assert 15 <= len(some) <= 25
    drawn = [read(trace, sample=20, resample=number) for number in (1, 2)]
    assert drawn[0] != drawn[1]
    assert all(15 <= len(found) <= 25 for found in drawn)
    assert len(read(trace, resample=1)) > 80


def test_the_rate_scale_keeps_all_but_the_gaps(trace: str) -> None:
    rows = read(trace)
    assert [r.arrival_ns for r in scaled(rows, 4.0)][:3] == [0, S // 4, S // 2]
    assert scaled(rows, 1.0) is rows


def test_nothing_left_and_nothing_timed_are_one_line(trace: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no request is left; --window, --requests or --class"):
        read(trace, klass="c")
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("input_tokens,output_tokens\n10,5\n20,5\n")
    with pytest.raises(TraceError, match="has no arrival times"):
        read(str(lengths))
    assert len(read(str(lengths), arrivals="poisson", rate_rps=1.0)) == 2


def test_a_summary_counts_reuse_up_to_the_first_new_block(trace: str) -> None:
    found = summary(read(trace))
    assert (found.requests, found.input_p50, found.longest_input) == (100, 153, 188)
    assert found.rate_rps == pytest.approx(100 / 99)
    # 49 of each 50 find their first block of 64 again, nobody the second.
    tokens = sum(129 + i % 60 for i in range(100))
    assert found.reuse_share == pytest.approx(98 * 64 / tokens)
