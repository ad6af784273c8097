"""Faults that people meet in split serving, one test for each, in all three handoff modes.

The table in docs/reference/field-faults.md names them. After every message blocks, slots and ends
are counted, KV is compared where it is read, and at the end everything must be back.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.sim.support import BLOCK, MS, audited, mixture, one
from twofold.messages import (
    CancelLeg,
    Claim,
    Closed,
    Done,
    Grant,
    PrefillDone,
    Read,
    ToPeer,
    Write,
    Written,
)
from twofold.metrics.record import RequestRecord
from twofold.sim import Crash, SeededFaults
from twofold.sim.faults import AS_SENT, Again, Fate, Stray
from twofold.trace import TraceRequest

MODES: Final = ("pull", "push", "layerwise")
SECOND: Final = 1000 * MS
in_all_modes = pytest.mark.parametrize("handoff", MODES)


def settings(handoff: str, **more: int) -> dict[str, Any]:
    return {"handoff": handoff, "min_layerwise_tokens": 20, **more}


def outcomes(records: list[RequestRecord]) -> dict[str, int]:
    found: dict[str, int] = {}
    for record in records:
        found[record.outcome] = found.get(record.outcome, 0) + 1
    return found


class First:
    """The fate of the first messages of some kinds; the rest is as sent."""

    def __init__(self, kinds: tuple[type[object], ...], fate: Fate, n: int = 1) -> None:
        self._kinds = kinds
        self._fate = fate
        self.left = n

    def fate(self, sequence: int, message: object) -> Fate:
        inner = message.message if isinstance(message, ToPeer) else message
        if isinstance(inner, self._kinds) and self.left:
            self.left -= 1
            return self._fate
        return AS_SENT


# --------------------------------------------------------------------- leaks and lost answers


@in_all_modes
def test_a_completion_that_never_comes_holds_no_block_for_ever(handoff: str) -> None:
    """Aborted while decode waits for KV of which no end is ever told."""
    lost = First((Written, Grant, Closed), (), n=10**6)
    requests = [one(40, 3, at_ns=i * MS) for i in range(20)]
    records, _ = audited(
        "1P1D",
        requests,
        settings=settings(handoff),
        faults=lost,
        gone_after_ns=lambda i: 30 * MS,
        time_left_ns=3 * SECOND,
    )
    assert outcomes(records) == {"cancelled": 20}


@in_all_modes
def test_what_decode_refuses_prefill_does_not_keep(handoff: str) -> None:
    """Its queue is full: refused at the gateway at once, and nothing is stranded on prefill."""
    requests = [one(40, 60, at_ns=i) for i in range(40)]
    records, made = audited(
        "1P1D",
        requests,
        settings=settings(handoff),
        by_role={"decode": {"max_waiting": 2, "max_num_seqs": 2}},
    )
    refused = [r for r in records if r.outcome == "refused"]
    assert len(refused) > 10
    assert {r.reason for r in refused} == {"queue_full"}
    assert made.workers["prefill-0"].core is not None
    assert made.workers["prefill-0"].core.source.counts.expired == 0, "a lease had to clean up"


@in_all_modes
def test_a_client_that_leaves_between_the_legs_frees_prefill(handoff: str) -> None:
    records, made = audited(
        "1P1D",
        [one(40, 3)],
        settings=settings(handoff),
        gone_after_ns=lambda i: 2_700_000,  # the prefill has just ended
        digest_ns=5 * MS,
    )
    assert outcomes(records) == {"cancelled": 1}
    assert made.workers["prefill-0"].core is not None
    assert made.workers["prefill-0"].core.source.counts.expired == 0


@in_all_modes
def test_300_at_once_all_cancelled_five_times_over_leave_a_worker_that_serves(handoff: str) -> None:
    bursts = [one(40, 50, at_ns=b * SECOND + i) for b in range(5) for i in range(300)]
    probe = one(40, 3, at_ns=6 * SECOND)
    records, _ = audited(
        "1P1D",
        [*bursts, probe],
        settings=settings(handoff, max_waiting=512),
        gone_after_ns=lambda i: 20 * MS if i < 1500 else 0,
    )
    assert records[-1].outcome == "finished"
    assert records[-1].e2e_ns < 50 * MS
    assert outcomes(records)["cancelled"] > 1400


@in_all_modes
def test_one_lost_answer_does_not_stop_the_others(handoff: str) -> None:
    lost = First((Closed, Written), ())
    requests = [one(40, 3, at_ns=i * 10 * MS) for i in range(12)]
    records, _ = audited(
        "1P1D", requests, settings=settings(handoff), faults=lost, time_left_ns=3 * SECOND
    )
    assert lost.left == 0
    assert outcomes(records[1:]) == {"finished": 11}
    assert all(record.e2e_ns < 50 * MS for record in records[1:])


# ------------------------------------------------------------------------------------- races


@in_all_modes
def test_blocks_of_an_aborted_handoff_are_not_used_while_bytes_still_land(handoff: str) -> None:
    """A tiny pool and a slow link: the next request comes while the aborted one's KV arrives."""
    requests = [one(60, 3, at_ns=i * 8 * MS) for i in range(20)]
    records, _ = audited(
        "1P1D",
        requests,
        settings=settings(handoff),
        by_role={"decode": {"n_blocks": 8}},
        link_bytes_per_s=10**6,
        gone_after_ns=lambda i: 9 * MS if i % 2 == 0 else 0,
    )
    assert outcomes(records)["cancelled"] == 10
    assert outcomes(records)["finished"] == 10


@in_all_modes
def test_prefill_keeps_what_a_slow_transfer_still_reads(handoff: str) -> None:
    """Many prompts over a pool that is too small for them, and a link that cannot keep up."""
    requests = mixture(40, 5, gap_ns=MS, longest=80)
    records, _ = audited(
        "1P1D",
        requests,
        settings=settings(handoff),
        by_role={"prefill": {"n_blocks": 14}},
        link_bytes_per_s=2 * 10**6,
    )
    assert outcomes(records) == {"finished": 40}


# ------------------------------------------------------------------------------------- hangs


@in_all_modes
def test_a_prefill_that_fails_is_told_within_a_second(handoff: str) -> None:
    faults = SeededFaults(seed=1, fail_step=1.0)
    records, _ = audited("1P1D", [one(40, 3)], settings=settings(handoff), faults=faults)
    assert outcomes(records) == {"failed": 1}
    assert records[0].e2e_ns < SECOND


@in_all_modes
def test_a_transfer_that_fails_on_an_idle_worker_is_told_within_a_second(handoff: str) -> None:
    """No later arrival is needed, and the next request is served."""
    failed = First((Read, Write), ())
    requests = [one(40, 3), one(40, 3, at_ns=SECOND)]
    records, _ = audited("1P1D", requests, settings=settings(handoff), faults=failed)
    assert failed.left == 0
    assert [r.outcome for r in records] == ["failed", "finished"]
    assert records[0].e2e_ns < SECOND


def test_one_layers_range_that_fails_ends_its_request_only() -> None:
    failed = First((Write,), ())
    requests = [one(200, 3, at_ns=i * 50 * MS) for i in range(4)]
    records, _ = audited("1P1D", requests, settings=settings("layerwise"), faults=failed)
    assert [r.outcome for r in records] == ["failed", *["finished"] * 3]
    assert records[0].reason.startswith("handoff refused: transfer failed")


@in_all_modes
def test_far_more_at_once_than_decode_can_hold_all_complete(handoff: str) -> None:
    requests = [one(40 + i % 9, 5, at_ns=i) for i in range(64)]
    records, _ = audited(
        "1P1D", requests, settings=settings(handoff), by_role={"decode": {"n_blocks": 24}}
    )
    assert outcomes(records) == {"finished": 64}


@in_all_modes
def test_a_full_hit_on_decode_transfers_nothing_and_finishes(handoff: str) -> None:
    hashes = (1, 2, 3)
    requests = [TraceRequest(i * 50 * MS, 3 * BLOCK, 3, hashes, BLOCK) for i in range(2)]
    records, _ = audited("1P1D", requests, settings=settings(handoff))
    assert outcomes(records) == {"finished": 2}
    assert records[0].n_bytes > 0
    # The last prompt token is computed anew, so its block is no hit.
    assert records[1].n_bytes <= records[0].n_bytes // 3


@in_all_modes
def test_every_length_around_multiples_of_a_block(handoff: str) -> None:
    requests = [one(n, 2, at_ns=n * 20 * MS) for n in range(1, 4 * BLOCK + 3)]
    records, _ = audited("1P1D", requests, settings=settings(handoff))
    assert outcomes(records) == {"finished": len(requests)}


# ---------------------------------------------------------------------------------- recovery


@in_all_modes
def test_a_load_that_fails_on_an_idle_worker_is_recomputed_at_once_and_right(handoff: str) -> None:
    """The right tokens, within a second, without a later arrival; contents are compared."""
    failed = First((Read, Write), ())
    records, made = audited(
        "1P1D",
        [one(40, 5)],
        settings=settings(handoff),
        faults=failed,
        router={"failure_policy": "recompute-on-decode"},
    )
    assert failed.left == 0
    assert (records[0].outcome, records[0].recoveries) == ("finished", ("recomputed",))
    assert (records[0].prefill, records[0].decode) == ("", "decode-0")
    assert len(records[0].token_times_ns) == 5
    assert records[0].e2e_ns < SECOND
    assert records[0].phases_ns["recovery"] > 0
    prefill = made.workers["prefill-0"].core
    assert prefill is not None
    assert prefill.source.counts.expired == 0, "a lease had to clean up"


@in_all_modes
@pytest.mark.parametrize(
    ("policy", "result"),
    [("retry-pair", "retried"), ("recompute-on-decode", "recomputed"), ("mixed-pool", "moved")],
)
def test_transfers_that_break_move_a_counter_and_are_no_mere_slowness(
    handoff: str, policy: str, result: str
) -> None:
    failed = First((Read, Write), (), n=4)
    requests = [one(40, 5, at_ns=i * 50 * MS) for i in range(8)]
    records, made = audited(
        "1P1D1M",
        requests,
        settings=settings(handoff),
        faults=failed,
        router={"failure_policy": policy},
    )
    again = [record for record in records if record.recoveries]
    assert failed.left == 0
    assert getattr(made.gateway.router.counts, result) == len(
        [r for r in again if result in r.recoveries]
    )
    assert 1 <= len(again) <= 4
    assert all(("recovery" in r.phases_ns) == bool(r.recoveries) for r in records if r.phases_ns)
    for record in records:
        assert record.outcome == ("failed" if "exhausted" in record.recoveries else "finished")


@in_all_modes
def test_a_network_that_fails_for_good_does_not_crush_decode(handoff: str) -> None:
    """No transfer works. Decode recomputes no more than its budget; the rest fails at once."""
    failed = First((Read, Write), (), n=10**6)
    requests = [one(100, 3, at_ns=i * 20 * MS) for i in range(100)]
    records, _ = audited(
        "1P1D",
        requests,
        settings=settings(handoff),
        faults=failed,
        router={"failure_policy": "recompute-on-decode", "recompute_tokens_per_s": 500},
    )
    recomputed = [r for r in records if r.recoveries == ("recomputed",)]
    over = [r for r in records if r.recoveries == ("over_budget",)]
    assert len(recomputed) + len(over) == 100
    assert 10 <= len(recomputed) <= (500 + 2 * 500) // 100  # one second's worth and two seconds
    assert all(r.outcome == "finished" for r in recomputed)
    assert all(r.reason.endswith("recomputed prompts is used up") for r in over)
    assert all(r.e2e_ns < 100 * MS for r in over)


@in_all_modes
def test_a_retry_goes_to_the_pair_that_lives(handoff: str) -> None:
    """A prefill worker dies while it reads; the other one serves, under a new generation."""
    crash = Crash(worker="prefill-0", at_ns=4 * MS)
    requests = [one(400, 4, at_ns=i) for i in range(6)]
    records, made = audited(
        "2P1D",
        requests,
        settings=settings(handoff),
        crashes=[crash],
        router={"failure_policy": "retry-pair"},
    )
    assert outcomes(records) == {"finished": 6}
    again = [record for record in records if record.recoveries]
    assert again
    assert {record.prefill for record in again} == {"prefill-1"}
    assert made.gateway.router.counts.retried == len(again)


@in_all_modes
def test_a_late_start_of_an_attempt_that_was_given_up_counts_for_nothing(handoff: str) -> None:
    """Prefill's answer and the cancellation are lost; where KV is pushed, the old leg starts yet.

    The client leaves at any moment, so that what the old attempt said would show.
    """
    for gone in range(80):
        lost = First((PrefillDone, CancelLeg), (), n=2 if handoff != "pull" else 1)
        records, _ = audited(
            "1P1D",
            [one(40, 3)],
            settings=settings(handoff),
            faults=lost,
            gone_after_ns=lambda i, gone=gone: (gone + 1) * MS // 4,
            router={"failure_policy": "retry-pair"},
        )
        (record,) = records
        assert sum(record.phases_ns.values()) == (record.ttft_ns or 0)
        assert (record.outcome == "finished") == (len(record.token_times_ns) == 3)
    assert (record.outcome, record.recoveries) == ("finished", ("retried",))


# -------------------------------------------------------------------------------- ids, restarts


@in_all_modes
@pytest.mark.parametrize("worker", ["decode-0", "decode-1"])
@pytest.mark.parametrize("stale", [0, 1])
def test_a_handle_that_comes_twice_harms_nobody(handoff: str, worker: str, stale: int) -> None:
    twice = [Again(worker=worker, at_ns=t * MS, pick=t, stale=stale) for t in range(1, 60, 2)]
    requests = [one(40, 3, at_ns=i * 2 * MS) for i in range(30)]
    records, _ = audited(
        "1P2D", requests, settings=settings(handoff), crashes=twice, time_left_ns=3 * SECOND
    )
    assert len(records) == 30
    assert outcomes(records)["finished"] > 5


@in_all_modes
@pytest.mark.parametrize("release", [False, True])
def test_aborts_and_releases_of_anything_at_any_time(handoff: str, release: bool) -> None:
    strays = [
        Stray(worker=worker, at_ns=t * MS, request_id=(7 * t) % 40, release=release)
        for t in range(60)
        for worker in ("prefill-0", "decode-0")
    ]
    requests = [one(40, 3, at_ns=i * 2 * MS) for i in range(30)]
    records, _ = audited(
        "1P1D", requests, settings=settings(handoff), crashes=strays, time_left_ns=3 * SECOND
    )
    assert outcomes(records)["finished"] > 5


@in_all_modes
@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
def test_a_worker_back_on_its_address_serves_the_next_request(handoff: str, worker: str) -> None:
    at_ns = 2 * MS if worker == "prefill-0" else 4 * MS  # while it computes
    crash = Crash(worker=worker, at_ns=at_ns, down_ns=MS)
    requests = [one(40, 5), one(40, 5, at_ns=2 * SECOND)]
    records, made = audited(
        "1P1D", requests, settings=settings(handoff), crashes=[crash], time_left_ns=3 * SECOND
    )
    assert made.workers[worker].engine_id == f"{worker}.1"
    assert records[0].outcome == "failed"
    assert records[0].e2e_ns < SECOND
    assert records[1].outcome == "finished"


@in_all_modes
def test_a_prefill_worker_that_dies_amid_a_transfer_takes_nobody_with_it(handoff: str) -> None:
    crash = Crash(worker="prefill-0", at_ns=12 * MS)
    requests = [one(60, 4, at_ns=i * 4 * MS) for i in range(20)]
    records, made = audited(
        "2P1D",
        requests,
        settings=settings(handoff),
        crashes=[crash],
        link_bytes_per_s=10**6,
        time_left_ns=3 * SECOND,
    )
    assert made.workers["decode-0"].core is not None
    failed = [r for r in records if r.outcome == "failed"]
    assert failed
    assert {r.prefill for r in failed} == {"prefill-0"}
    assert all(r.outcome == "finished" for r in records if r.prefill == "prefill-1")


# -------------------------------------------------------------------------- wasted and shared work


@in_all_modes
def test_a_long_prompt_whose_client_left_makes_room_within_a_chunk(handoff: str) -> None:
    requests = [one(4000, 3), one(16, 1, at_ns=10 * MS)]
    alone, _ = audited("1P1D", [one(16, 1)], settings=settings(handoff))
    records, made = audited(
        "1P1D",
        requests,
        settings=settings(handoff),
        gone_after_ns=lambda i: 6 * MS if i == 0 else 0,
    )
    assert [r.outcome for r in records] == ["cancelled", "finished"]
    chunk_ns = 2 * MS + 256 * 10_000  # the base and the tokens of a whole step
    assert records[1].e2e_ns <= alone[0].e2e_ns + chunk_ns
    assert made.workers["prefill-0"].core is not None
    assert made.workers["prefill-0"].core.engine.n_steps < 6, "the prompt was read to its end"


@in_all_modes
def test_decode_that_preempts_still_gives_every_token(handoff: str) -> None:
    requests = [one(30, 40, at_ns=i) for i in range(6)]
    records, _ = audited(
        "1P1D", requests, settings=settings(handoff), by_role={"decode": {"n_blocks": 16}}
    )
    assert outcomes(records) == {"finished": 6}
    assert sum(record.n_preempted for record in records) > 0


@in_all_modes
@pytest.mark.parametrize("kind", [Claim, Done])
def test_a_late_copy_of_a_message_changes_nothing(handoff: str, kind: type[object]) -> None:
    """A second copy comes when all is over."""
    requests = [one(40, 3, at_ns=i * MS) for i in range(20)]
    plain, _ = audited("1P1D", requests, settings=settings(handoff))
    late = First((kind,), (0, 500 * MS), n=10**6)
    again, _ = audited("1P1D", requests, settings=settings(handoff), faults=late)
    assert again == plain
