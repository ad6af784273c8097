"""The JSON that stays put, runs from records, buckets, queues over time."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.metrics.digest import digest
from twofold.metrics.slo import Slo, figures
from twofold.report.buckets import INPUT_EDGES, OUTPUT_EDGES, buckets_of
from twofold.report.queues import MEASURES, QueueRecorder, Queues
from twofold.report.results import (
    Goal,
    Interval,
    Plan,
    header_of,
    plan_from_json,
    replay_from_json,
    replay_of,
    run_of,
    to_json,
)

from .report_support import GOAL, HEADER, MS, record, records, run, sweep

PERCENTILES = {"mean", "p50", "p90", "p95", "p99", "max"}


def test_a_replay_has_the_names_that_are_promised() -> None:
    found = json.loads(to_json(sweep([1.0, 4.0])))
    assert set(found["header"]) == {
        "twofold", "trace_sha256", "profile_sha256", "config_sha256", "seed",
    }  # fmt: skip
    assert len(found["digest"]) == 64
    assert len(found["runs"]) == 8
    for one in found["runs"]:
        assert {
            "pools", "rate_scale", "offered_rps", "completed", "refused", "failed",
            "slo_attainment", "goodput_rps", "throughput_rps", "output_tokens_per_s", "phases_ms",
            "buckets", "digest",
        } <= set(one)  # fmt: skip
        for measure in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
            assert set(one[measure]) == PERCENTILES


def test_figures_go_over_unchanged() -> None:
    found = records()
    shown = figures(found, GOAL.slo())
    made = run()
    assert (made.requests, made.completed, made.refused, made.lost) == (40, 40, 0, 0)
    assert made.slo_attainment == shown.slo_attainment
    assert made.goodput_rps == shown.goodput_rps
    assert made.ttft_ms.p99 == shown.ttft_ms.p99
    assert made.phases_ms["transfer"].mean == 6
    assert made.digest == digest(found)
    assert made.goodput_per_gpu == Interval(value=shown.goodput_rps / 4)
    phases = sum(phase.mean or 0.0 for phase in made.phases_ms.values())
    assert phases == pytest.approx(made.ttft_ms.mean)


def test_a_digest_that_is_known_is_not_computed_again() -> None:
    assert run_of(figures([]), [], pools="1M", digest="known").digest == "known"


def test_what_is_not_finite_is_null() -> None:
    lost = [record(i, 4.0, 9.0, "2P2D") for i in (9, 19, 29)]
    made = run_of(figures(lost), lost, pools="2P2D", goal=GOAL)
    assert (made.ttft_ms.p50, made.ttft_ms.mean, made.tpot_ms.max) == (None, None, None)
    empty = run_of(figures([]), [], pools="2P2D")
    assert (empty.slo_attainment, empty.goodput_per_gpu) == (None, None)
    text = to_json(replay_of(HEADER, [made, empty], GOAL)).decode()
    json.loads(text, parse_constant=pytest.fail)


def test_json_comes_back_as_it_went() -> None:
    replay = sweep([1.0, 4.0])
    assert replay_from_json(to_json(replay)) == replay
    best = run(goodput_per_gpu=Interval(value=2.0, low=1.8, high=2.1))
    plan = Plan(
        header=HEADER,
        goal=GOAL,
        verdict="split",
        because="it holds",
        best=best,
        best_unsplit=None,
        frontier=[best],
    )
    found = json.loads(to_json(plan))
    assert found["best"]["goodput_per_gpu"] == {"value": 2.0, "low": 1.8, "high": 2.1}
    assert found["best_unsplit"] is None
    assert plan_from_json(to_json(plan)) == plan
    with pytest.raises(msgspec.ValidationError):
        replay_from_json(b'{"header": 3}')


def test_the_digest_of_a_result_is_that_of_its_runs_in_order() -> None:
    a, b = run(rate=1.0), run(rate=3.0)
    assert replay_of(HEADER, [a]).digest == a.digest
    assert replay_of(HEADER, [a, b]).digest != replay_of(HEADER, [b, a]).digest
    expected = hashlib.sha256((a.digest + b.digest).encode()).hexdigest()
    assert replay_of(HEADER, [a, b]).digest == expected


def test_a_config_is_hashed_whatever_the_order_of_its_keys() -> None:
    def of(config: dict[str, Any]) -> str:
        return header_of(trace_sha256="", profile_sha256="", config=config, seed=0).config_sha256

    assert of({"a": 1, "b": {"c": 2, "d": 3}}) == of({"b": {"d": 3, "c": 2}, "a": 1})
    assert of({"a": 1}) != of({"a": 2})
    assert of({"a": 1}) == hashlib.sha256(b'{"a":1}').hexdigest()


def test_a_goal_without_limits_is_met_by_any_time() -> None:
    assert Goal().slo() == Slo(ttft_ms=math.inf, tpot_ms=math.inf)
    assert GOAL.slo() == Slo(ttft_ms=500, tpot_ms=40)


def test_buckets_hold_every_request_once_between_their_edges() -> None:
    found = records(4.0, 1.2)
    buckets = buckets_of(found, GOAL.slo())
    assert sum(bucket.requests for bucket in buckets) == len(found)
    assert sum(bucket.completed for bucket in buckets) == 36
    # Prompts are 100 to 2500 tokens.
    assert [bucket.input_from for bucket in buckets] == [0, 256, 512, 1024, 2048]
    edge = [msgspec.structs.replace(found[0], input_tokens=n, output_tokens=16) for n in (255, 256)]
    at_edge = buckets_of(edge, Slo())
    assert [(b.input_from, b.input_below) for b in at_edge] == [(0, 256), (256, 512)]
    assert {(b.output_from, b.output_below) for b in at_edge} == {(16, 64)}
    huge = msgspec.structs.replace(found[0], input_tokens=10**6, output_tokens=10**5)
    (last,) = buckets_of([huge], Slo())
    assert (last.input_from, last.input_below) == (INPUT_EDGES[-1], None)
    assert (last.output_from, last.output_below) == (OUTPUT_EDGES[-1], None)


def test_a_bucket_leaves_cancelled_requests_out_of_its_share() -> None:
    one = record(0, 1.0, 2.0, "2P2D")
    gone = msgspec.structs.replace(one, outcome="cancelled")
    (bucket,) = buckets_of([one, gone], GOAL.slo())
    assert (bucket.requests, bucket.completed, bucket.slo_attainment) == (2, 1, 1.0)
    (empty,) = buckets_of([gone], GOAL.slo())
    assert empty.slo_attainment is None


# -------------------------------------------------------------------------- queues


def test_a_queue_keeps_its_value_until_it_changes() -> None:
    recorder = QueueRecorder(["p", "d"], span_ns=MS, most_points=10)
    recorder.note(0, 0, 3, 1, 8)
    recorder.note(4 * MS, 0, 1, 2, 9)
    recorder.note(4 * MS, 1, 7, 0, 0)
    found = recorder.done(6 * MS)
    assert found.waiting == [[3, 3, 3, 3, 3, 1, 1], [0, 0, 0, 0, 7, 7, 7]]
    assert found.running == [[1, 1, 1, 1, 2, 2, 2], [0] * 7]
    assert found.blocks[0] == [8, 8, 8, 8, 9, 9, 9]
    assert (found.start_ms, found.span_ms, found.workers) == (0, 1, ["p", "d"])


@given(
    st.lists(
        st.tuples(st.integers(0, 50 * MS), st.integers(0, 1), st.integers(0, 99)), max_size=60
    ),
    st.integers(2, 9),
)
def test_a_span_shows_the_highest_value_in_it_however_long_the_run(
    changes: list[tuple[int, int, int]], most: int
) -> None:
    recorder = QueueRecorder(["a", "b"], span_ns=MS, most_points=most)
    now = 0
    history: list[list[tuple[int, int]]] = [[(0, 0)], [(0, 0)]]
    for gap, worker, depth in changes:
        now += gap
        recorder.note(now, worker, depth, depth, depth)
        history[worker].append((now, depth))
    found = recorder.done()
    span = round(found.span_ms * MS)
    assert span == MS or now // (span // 2) >= most  # no coarser than it must be
    for worker, of in enumerate(history):
        assert found.waiting[worker] == [
            _peak(of, i * span, (i + 1) * span) for i in range(now // span + 1)
        ]
    assert len(found.waiting[0]) <= most


def _peak(history: list[tuple[int, int]], start: int, end: int) -> int:
    """The highest depth at any time in [start, end): what held at its start, and each change."""
    held = [depth for t, depth in history if t <= start][-1:]
    # Several changes at the very start: each of them was true for a moment.
    held += [depth for t, depth in history if start <= t < end]
    before = [depth for t, depth in history if t < start][-1:]
    return max(held + before)


def test_a_merge_keeps_what_a_quiet_worker_has() -> None:
    recorder = QueueRecorder(["quiet", "busy"], span_ns=MS, most_points=4)
    recorder.note(0, 0, 5, 0, 0)
    recorder.note(2 * MS, 1, 9, 0, 0)
    recorder.note(3 * MS, 1, 2, 0, 0)
    found = recorder.done(7 * MS)
    assert found.span_ms == 2
    assert found.waiting == [[5, 5, 5, 5], [0, 9, 2, 2]]


def test_a_recorder_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="two points"):
        QueueRecorder(["a"], most_points=1)
    recorder = QueueRecorder(["a"])
    recorder.note(5, 0, 1, 1, 1)
    with pytest.raises(ValueError, match="4 ns is before 5 ns"):
        recorder.note(4, 0, 1, 1, 1)


def test_queues_without_workers_or_changes_are_empty() -> None:
    assert QueueRecorder([]).done(10**9 * 60).waiting == []
    empty = QueueRecorder(["a"]).done()
    assert isinstance(empty, Queues)
    assert [getattr(empty, name) for name in MEASURES] == [[[0]]] * 3
