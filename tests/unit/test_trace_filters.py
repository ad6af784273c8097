from __future__ import annotations

import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.published import published
from twofold.trace import (
    Lengths,
    RequestClass,
    Tokens,
    TraceRequest,
    drop_hashes,
    gamma_arrivals,
    head,
    jitter,
    length_scale,
    merge,
    only_class,
    open_trace,
    poisson,
    rate_scale,
    synthetic,
    window,
)

S = 10**9


def at(*seconds: float) -> list[TraceRequest]:
    return [TraceRequest(round(s * S), 100 + i, 10 + i) for i, s in enumerate(seconds)]


def test_window_is_half_open_and_moves_time() -> None:
    rows = list(window(at(0, 1, 2, 3), 1, 3))
    assert [r.arrival_ns for r in rows] == [0, S]
    assert [r.input_tokens for r in rows] == [101, 102]
    with pytest.raises(ValueError, match="window"):
        window(at(0), 3, 3)


def test_window_stops_reading() -> None:
    def endless() -> object:
        i = 0
        while True:
            yield TraceRequest(i * S, 1, 1)
            i += 1

    assert len(list(window(endless(), 0, 5))) == 5  # type: ignore[arg-type]


def test_rate_scale_is_exact() -> None:
    assert [r.arrival_ns for r in rate_scale(at(0, 3), 0.1)] == [0, 30 * S]
    assert [r.arrival_ns for r in rate_scale(at(0, 3), 2)] == [0, 3 * S // 2]
    for bad in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="rate scale"):
            rate_scale([], bad)


@given(st.lists(st.integers(0, 10**15)), st.floats(0.001, 1000))
def test_rate_scale_keeps_order(times: list[int], factor: float) -> None:
    scaled = rate_scale([TraceRequest(t, 1, 1) for t in sorted(times)], factor)
    assert all(a.arrival_ns <= b.arrival_ns for a, b in pairwise(list(scaled)))


def test_length_scale_never_reaches_zero_and_shrinks_blocks() -> None:
    row = TraceRequest(5, 1025, 8, (1, 2, 3), 512, "k")
    assert list(length_scale([row], 16)) == [TraceRequest(5, 64, 1, (1, 2), 32, "k")]
    with pytest.raises(ValueError, match="cannot be scaled by 3"):
        list(length_scale([row], 3))
    assert list(length_scale(drop_hashes([row]), 3)) == [TraceRequest(5, 341, 2, None, 0, "k")]
    with pytest.raises(ValueError, match="divisor"):
        length_scale([], 0)


def test_real_traces_scale_by_16() -> None:
    for name in ("azure2023_conv.csv", "mooncake_conversation_trace.jsonl"):
        for row in head(length_scale(open_trace(published(f"traces/{name}")), 16), 500):
            assert row.input_tokens >= 1
            assert row.output_tokens >= 1
            if row.hash_ids is not None:
                assert len(row.hash_ids) == -(-row.input_tokens // 32)


def test_class_head_and_merge() -> None:
    a = [TraceRequest(0, 1, 1, klass="a"), TraceRequest(4, 2, 1, klass="b")]
    b = [TraceRequest(0, 3, 1, klass="c"), TraceRequest(2, 4, 1, klass="a")]
    assert [r.input_tokens for r in merge(a, b)] == [1, 3, 4, 2]
    assert [r.input_tokens for r in only_class(merge(a, b), {"a"})] == [1, 4]
    assert len(list(head(merge(a, b), 3))) == 3


def test_jitter_spreads_ticks_and_nothing_else() -> None:
    rows = [TraceRequest(t, i + 1, 1) for i, t in enumerate([0] * 400 + [2_999 * 10**6] * 400)]
    spread = list(jitter(rows, seed=3))
    times = [r.arrival_ns for r in spread]
    assert times == sorted(times)
    assert sorted(r.input_tokens for r in spread) == [r.input_tokens for r in rows]
    # A tick published a millisecond early belongs to the tick at 3 s.
    assert all(0 <= t < 3 * S for t in times[:400])
    assert all(3 * S <= t < 6 * S for t in times[400:])
    assert statistics.mean(times[:400]) == pytest.approx(1.5 * S, rel=0.07)
    assert times == [r.arrival_ns for r in jitter(rows, seed=3)]
    assert times != [r.arrival_ns for r in jitter(rows, seed=4)]


def gaps(rows: list[TraceRequest]) -> list[int]:
    return [b.arrival_ns - a.arrival_ns for a, b in pairwise(rows)]


def cv(values: list[int]) -> float:
    return statistics.pstdev(values) / statistics.mean(values)


def test_poisson_has_its_mean_and_variation() -> None:
    rows = list(poisson([Lengths(7, 3)] * 20_000, 4.0, seed=1))
    assert statistics.mean(gaps(rows)) == pytest.approx(S / 4, rel=0.02)
    assert cv(gaps(rows)) == pytest.approx(1.0, rel=0.03)
    assert rows[0].input_tokens == 7
    assert rows == list(poisson([Lengths(7, 3)] * 20_000, 4.0, seed=1))
    assert [r.arrival_ns for r in rows[:3]] == [91_496_634, 210_786_685, 565_012_109]


@pytest.mark.parametrize("wanted", [0.4, 1.0, 3.0])
def test_gamma_has_its_mean_and_variation(wanted: float) -> None:
    rows = list(gamma_arrivals([Lengths(7, 3)] * 20_000, 4.0, wanted, seed=2))
    assert statistics.mean(gaps(rows)) == pytest.approx(S / 4, rel=0.08)
    assert cv(gaps(rows)) == pytest.approx(wanted, rel=0.06)


def test_arrivals_refuse_bad_rates() -> None:
    with pytest.raises(ValueError, match="rate"):
        poisson([], 0, 1)
    with pytest.raises(ValueError, match="variation"):
        gamma_arrivals([], 1, 0, 1)


def test_synthetic_mix_keeps_weights_and_shares_prefixes() -> None:
    mix = [
        RequestClass(
            klass="chat", weight=3, input=Tokens("uniform", 10, 20), output=Tokens("fixed", 5),
            prefixes=2, prefix_tokens=40,
        ),
        RequestClass(
            klass="long", weight=1, input=Tokens("lognormal", 1000, 8000),
            output=Tokens("fixed", 9),
        ),
    ]  # fmt: skip
    rows = list(synthetic(mix, 8000, seed=5))
    chats = [r for r in rows if r.klass == "chat"]
    assert len(chats) / 8000 == pytest.approx(0.75, abs=0.02)
    assert {r.input_tokens for r in chats} == set(range(50, 61))
    starts = {r.hash_ids[:2] for r in chats if r.hash_ids}
    assert len(starts) == 2
    own = [r.hash_ids[2] for r in chats if r.hash_ids]
    assert len(set(own)) == len(own)
    assert all(r.hash_ids and len(r.hash_ids) == -(-r.input_tokens // 16) for r in chats)
    longs = sorted(r.input_tokens for r in rows if r.klass == "long")
    assert longs[len(longs) // 2] == pytest.approx(1000, rel=0.1)
    assert rows == list(synthetic(mix, 8000, seed=5))
    with pytest.raises(ValueError, match="mix"):
        synthetic([], 1, 1)
