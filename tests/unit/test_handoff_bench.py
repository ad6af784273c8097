"""What the handoff benchmark makes of journals, times and results."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from benchmarks.handoff.conditions import Config
from benchmarks.handoff.interference import (
    QUICK,
    WINDOWS,
    _cycle,
    interference_row,
    loop_row,
    median_interval,
)
from benchmarks.handoff.journals import Handoff, handoffs
from benchmarks.handoff.pairs import mean_step_ms, tokens_of
from benchmarks.handoff.residual import residual_row, slots_row
from benchmarks.handoff.table import write_tables
from msgspec import structs

from tests.unit.harness import LAYOUT
from twofold.core import journal
from twofold.messages import (
    Claim,
    Closed,
    Digested,
    Done,
    Ended,
    FromPeer,
    Grant,
    Read,
    ReadDone,
    RunStep,
    StepDone,
    Submit,
    ToPeer,
    WorkerEffect,
    WorkerMessage,
    Write,
    Written,
)
from twofold.types import NS_PER_MS, KVHandle

PULL, PUSH = Config("pull", "shm"), Config("push", "tcp")
Entry = tuple[int, WorkerMessage, list[WorkerEffect]]
IDS = tuple(range(5))


def _journal(*entries: Entry) -> bytes:
    frames = [journal.entry(*entry) for entry in entries]
    return journal.header("worker", {}) + b"".join(frames)


def _ended(request_id: int) -> Ended:
    return Ended(
        request_id=request_id,
        outcome="finished",
        reason="length",
        n_prompt=5,
        n_output=1,
        n_cached=0,
        n_preempted=0,
        held=True,
    )


def _source(transfer: int) -> KVHandle:
    return KVHandle(
        engine_id="P", host="h", port=1, request_id=transfer, generation=0, n_tokens=len(IDS)
    )


def _pulled(grant_heard_ns: int = 60) -> tuple[bytes, bytes]:
    """Journals of one pull; the grant left at 50. On decode the request has another number."""
    grant = Grant(3, 0, IDS, (4, 5, 9), (1, 1, 1), "seg", 0, 1)
    pairs = ((4, 0), (5, 1), (9, 2))
    prefill = _journal(
        (5, Submit(request_id=3, tokens=IDS, max_tokens=1, hold=True), []),
        (10, StepDone(0, ()), [RunStep(1, ((3, 0, 3),))]),
        (20, StepDone(1, ()), [RunStep(2, ((3, 3, 2),))]),
        (30, StepDone(2, ((3, 7),)), [_ended(3)]),
        (50, FromPeer("D", Claim(3, 0, LAYOUT)), [ToPeer("D", grant)]),
        (90, FromPeer("D", Done(3, 0, ok=True)), [ToPeer("D", Closed(3, 0, valid=True))]),
    )
    decode = _journal(
        (
            40,
            Submit(request_id=8, tokens=(), max_tokens=2, source=_source(3)),
            [ToPeer("P", Claim(3, 0, LAYOUT), "h", 1)],
        ),
        (grant_heard_ns, FromPeer("P", grant), [Read(8, "P", "seg", pairs)]),
        (80, ReadDone(8, ok=True), [ToPeer("P", Done(3, 0, ok=True))]),
        (100, FromPeer("P", Closed(3, 0, valid=True)), [RunStep(1, ((8, 4, 1),))]),
    )
    return prefill, decode


def test_times_of_a_pull() -> None:
    (found,) = handoffs(*_pulled())
    assert found == Handoff(
        n_tokens=5,
        prefill_began_ns=10,
        prefilled_ns=30,
        came_ns=40,
        granted_ns=60,
        placed_ns=60,
        copied_ns=80,
        ready_ns=100,
        stepped_ns=100,
        n_blocks=3,
        n_ranges=2,
    )
    assert (found.prefill_ns, found.residual_ns, found.reserved_ns) == (20, 70, 40)


def test_a_message_heard_before_it_was_sent_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="clocks differ"):
        handoffs(*_pulled(grant_heard_ns=49))


def test_times_of_a_push() -> None:
    """Decode is ready with its own checksums; what is closed afterwards changes nothing."""
    claim = Claim(77, 0, LAYOUT, "win", 0, (0, 1, 2))
    written = Written(77, 0, (1, 1, 1), 1, 0, 0, 0, 0)
    prefill = _journal(
        (5, Submit(request_id=3, tokens=IDS, max_tokens=1, hold=True, transfer=77), []),
        (10, FromPeer("D", claim), [RunStep(1, ((3, 0, 5),))]),
        (
            30,
            StepDone(1, ((3, 7),)),
            [
                _ended(3),
                Write(3, 1, "D", "win", ((4, 0), (5, 1)), (0, 2)),
                Write(3, 2, "D", "win", ((4, 0), (5, 1)), (2, 4)),
                Write(3, 3, "D", "win", ((9, 2),), (0, 4)),
            ],
        ),
        (50, Digested(3, (1, 1, 1)), [ToPeer("D", written)]),
        (80, FromPeer("D", Done(77, 0, ok=True)), [ToPeer("D", Closed(77, 0, valid=True))]),
    )
    submit = Submit(request_id=8, tokens=IDS, max_tokens=2, source=_source(77))
    decode = _journal(
        (7, submit, [ToPeer("P", claim, "h", 1)]),
        (60, FromPeer("P", written), []),
        (70, Digested(8, (1, 1, 1)), [ToPeer("P", Done(77, 0, ok=True))]),
        (75, StepDone(1, ()), [RunStep(2, ((8, 4, 1),))]),
        (90, FromPeer("P", Closed(77, 0, valid=True)), []),
    )
    (found,) = handoffs(prefill, decode)
    assert (found.placed_ns, found.prefilled_ns, found.ready_ns) == (7, 30, 70)
    assert (found.stepped_ns, found.n_blocks, found.n_ranges) == (75, 3, 2)
    assert found.reserved_ns == 63


def test_one_that_never_became_ready_is_left_out() -> None:
    prefill, decode = _pulled()
    whole = list(journal.worker_entries(decode))
    assert handoffs(prefill, _journal(*whole[:-1])) == []


def test_only_a_workers_journal_is_read() -> None:
    data = journal.header("router", {})
    with pytest.raises(journal.JournalError, match="router"):
        list(journal.worker_entries(data))
    with pytest.raises(journal.JournalError):
        list(journal.worker_entries(b""))


def _ms(residual: int, prefill: int) -> Handoff:
    return Handoff(
        prefilled_ns=prefill * NS_PER_MS,
        ready_ns=(prefill + residual) * NS_PER_MS,
        placed_ns=prefill * NS_PER_MS,
        n_blocks=4,
        n_ranges=1,
    )


def test_the_share_is_each_handoffs_own() -> None:
    row = residual_row(PUSH, 64, [_ms(2, 10), _ms(9, 90), _ms(30, 100)])
    assert (row["residual_ms"], row["prefill_ms"], row["of_prefill"]) == (9.0, 90.0, 0.2)
    assert row["residual_ms_least"] == 2.0
    assert "steps_ms" not in row
    assert "steps_ms" in residual_row(PULL, 64, [_ms(2, 10)])


def test_what_waits_is_averaged_over_time() -> None:
    """Two that wait 5 and 15 ms, of 4 blocks each, in 40 ms: half a slot, two blocks."""
    row = slots_row(PUSH, [_ms(5, 10), _ms(15, 10)], (0, 40 * NS_PER_MS))
    assert (row["slots_waiting"], row["blocks_waiting"]) == (0.5, 2.0)


def test_a_mean_step_is_between_two_tokens() -> None:
    times = [at * NS_PER_MS for at in (0, 10, 20, 40, 100)]
    assert mean_step_ms(times, 1, 3) == 15.0
    assert mean_step_ms(times, 3, 4) == 60.0


class _Written:
    """A probe whose tokens are all there."""

    def __init__(self, n: int) -> None:
        self.times_ns = [i * NS_PER_MS for i in range(n)]

    async def has(self, n: int) -> None:
        assert len(self.times_ns) > n

    def step_ms(self, first: int, last: int) -> float:
        return mean_step_ms(self.times_ns, first, last)


def test_each_cycle_has_windows_of_its_own() -> None:
    sizes = structs.replace(QUICK, window_tokens=3, gap_tokens=1)
    probe: Any = _Written(500)
    with pytest.raises(RuntimeError, match="tokens 28 to 31 were written before"):
        asyncio.run(_cycle(probe, 1, sizes, {"idle": None}))


def test_windows_are_the_same_there_and_back() -> None:
    """So that a step that grows with each token is the same in each kind."""
    assert WINDOWS[::-1] == WINDOWS
    at = {kind: [i for i, each in enumerate(WINDOWS) if each == kind] for kind in WINDOWS}
    assert {sum(places) for places in at.values()} == {len(WINDOWS) - 1}


@pytest.mark.parametrize(("n", "left_out"), [(5, 0), (6, 0), (9, 1), (12, 2), (20, 5), (30, 9)])
def test_where_a_median_lies_by_order(n: int, left_out: int) -> None:
    """As tables of the sign test have it, at 95 %."""
    values = [float(i) for i in range(n)]
    assert median_interval(values[::-1]) == (left_out, n - 1 - left_out)


def test_tokens_of_a_stream_are_those_with_logprobs() -> None:
    head = b'data: {"choices":[{"index":0,"text":"","logprobs":{"tokens":'
    assert tokens_of(head + b'["a","b"]}}]}\n') == 2
    assert tokens_of(head + b"[]}}]}\n") == 0
    for line in (b"data: [DONE]\n", b"\n", b"HTTP/1.1 200 OK\r\n"):
        assert tokens_of(line) == 0


def test_shares_of_step_time_are_each_cycles_own() -> None:
    runs = [
        {"idle": 10.0, "local": 11.0, "handoff": 12.1},
        {"idle": 20.0, "local": 20.0, "handoff": 20.0},
        {"idle": 30.0, "local": 30.0, "handoff": 60.0},
    ]
    row = interference_row(PULL, runs)
    assert (row["idle_ms"], row["local_ms"], row["handoff_ms"]) == (20.0, 20.0, 20.0)
    assert (row["handoff_over_local"], row["handoff_over_local_range"]) == (0.1, [0.0, 1.0])
    assert (row["local_over_idle"], row["handoff_over_idle"]) == (0.0, 0.21)
    assert (row["cycles"], row["handoff_over_local_interval"]) == (3, [0.0, 1.0])


def test_loop_time_is_all_that_a_handoff_takes() -> None:
    row = loop_row(PUSH, 257, 8, [(400.0, 1000.0, 1500.0, 4000.0)])
    assert (row["own_us"], row["own_us_all_threads"]) == (1100, 3000)
    assert row["loop_time_lost"] == pytest.approx(0.012)


def test_tables_go_between_their_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- loop -->\nold\n<!-- /loop -->\nafter\n")
    row = loop_row(PUSH, 257, 8, [(400.0, 1000.0, 1500.0, 4000.0)])
    part: dict[str, Any] = {
        "conditions": {
            "cpu": "C",
            "cpus": 2,
            "load_average": [1.5, 1, 1],
            "load_average_after": [2, 1, 1],
            "also_running": "tests",
            "python": "3",
            "torch": "2",
            "seconds": 3.0,
            "quick": False,
        },
        "result": {"rate_per_s": 8, "rows": [row]},
    }
    for _ in range(2):
        write_tables(page, {"loop": part})
        text = page.read_text()
        assert text.startswith("before\n<!-- loop -->\n| tokens |")
        assert text.endswith("<!-- /loop -->\nafter\n")
        assert "old" not in text
        assert text.count("load average 1.5 before and 2 after; also running: tests") == 1
        assert "| 257 | push | tcp | 400 | 1500 | 1100 | 3000 | 1.2 % |" in text
    with pytest.raises(ValueError, match="no markers"):
        write_tables(page, {"slots": part})
