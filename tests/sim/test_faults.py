"""Runs in which things go wrong: everything ends once, and every block comes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.sim.support import LEG, MS, PEER, STEP, audited, mixture, one
from twofold.core.handoff.pull_source import PullSource
from twofold.core.router import Router
from twofold.messages import Claim, Closed, Done, FromPeer, Grant, Heartbeat, LegEnded, ToPeer
from twofold.metrics.record import RequestRecord
from twofold.sim import Crash, SeededFaults, plan_pools
from twofold.sim.faults import AS_SENT, Fate
from twofold.sim.network import _Moving
from twofold.trace.hashing import hash64

TIME_LEFT = 3000 * MS
LEASES: tuple[Mapping[str, int], ...] = (
    {},
    {
        "lease_ns": 8 * MS,
        "heartbeat_ns": 4 * MS,
        "lost_grace_ns": MS,
        "claim_timeout_ns": 20 * MS,
        "verify_timeout_ns": 15 * MS,
        "repeat_ns": 3 * MS,
    },
    # Heartbeats that come too late: leases run out in the middle of reads.
    {"lease_ns": 8 * MS, "heartbeat_ns": 30 * MS, "repeat_ns": 3 * MS},
)


def schedule(seed: int, handoff: str) -> tuple[str, dict[str, Any]]:
    """One set of faults and settings, all of it a hash of `seed`."""

    def pick(draw: int, choices: tuple[Any, ...]) -> Any:
        return choices[hash64(seed, 7, draw) % len(choices)]

    rates = (0.0, 0.02, 0.1, 0.3)
    pools = pick(8, ("1P1D", "2P1D", "1P2D", "1P1D1M"))
    names = tuple(plan.name for plan in plan_pools(pools, {}, STEP))
    crashes = [
        Crash(
            worker=pick(20 + i, names),
            at_ns=hash64(seed, 7, 30 + i) % (80 * MS),
            down_ns=pick(40 + i, (None, MS, 40 * MS)),
        )
        for i in range(pick(9, (0, 0, 1, 2)))
    ]
    return pools, {
        "faults": SeededFaults(
            seed=seed,
            drop=pick(1, rates),
            duplicate=pick(2, rates),
            delay=pick(3, rates),
            most_ns=pick(4, (MS, 50 * MS, 2000 * MS)),
            cut_leg=pick(5, rates) / 3,
            fail_read=pick(6, rates),
            fail_step=pick(7, rates) / 10,
        ),
        "crashes": crashes,
        "settings": {
            "n_blocks": pick(10, (12, 20, 400)),
            "handoff": handoff,
            "min_layerwise_tokens": 20,
            **pick(12, LEASES),
        },
        "link_bytes_per_s": pick(13, (10**9, 2 * 10**6, 10**5)),
        "gone_after_ns": lambda i: hash64(seed, i, 99) % (60 * MS) * (hash64(seed, i, 98) % 5 == 0),
        "time_left_ns": TIME_LEFT,
    }


@pytest.mark.parametrize("handoff", ["pull", "push", "layerwise"])
@pytest.mark.parametrize("part", range(4))
def test_whatever_goes_wrong_all_end_in_time_and_all_blocks_return(part: int, handoff: str) -> None:
    ends: dict[str, int] = {}
    for seed in range(100 * part, 100 * (part + 1)):
        pools, options = schedule(seed, handoff)
        try:
            records, _ = audited(pools, mixture(14, seed, gap_ns=2 * MS), **options)
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
        assert [r.request_id for r in records] == list(range(14))
        for record in records:
            assert record.e2e_ns <= TIME_LEFT
            assert all(ns <= record.end_ns for ns in record.token_times_ns)
            assert sum(record.phases_ns.values()) == (record.ttft_ns or 0)
            if record.outcome == "finished":
                assert len(record.token_times_ns) == record.output_tokens
            ends[record.outcome] = ends.get(record.outcome, 0) + 1
    assert min(ends[o] for o in ("finished", "failed", "cancelled")) > 30, ends


@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("at_us", [1, 1_000, 3_300, 4_200, 6_000, 9_000, 14_000])
@pytest.mark.parametrize("down_ns", [0, MS // 20, 5 * MS, None])
def test_a_killed_worker_takes_nothing_with_it(
    worker: str, at_us: int, down_ns: int | None
) -> None:
    crash = Crash(worker=worker, at_ns=at_us * 1000, down_ns=down_ns)
    early = mixture(12, 2, gap_ns=MS)
    late = [one(40, 3, at_ns=3000 * MS)]
    records, made = audited("1P1D", early + late, crashes=[crash], time_left_ns=TIME_LEFT)
    assert len(records) == 13
    back = down_ns is not None
    assert records[-1].outcome == ("finished" if back else "refused")
    assert (made.workers[worker].core is not None) == back
    if 3_000 < at_us < 10_000:
        assert any(r.outcome == "failed" for r in records)
    for record in records:
        assert record.e2e_ns < 1000 * MS, "a client waited for one that was dead"


def test_a_client_that_leaves_frees_both_workers() -> None:
    requests = mixture(40, 9, gap_ns=MS)
    records, _ = audited("1P1D", requests, gone_after_ns=lambda i: 1 + i * MS // 4 if i % 2 else 0)
    outcomes = [r.outcome for r in records]
    assert outcomes.count("cancelled") > 10
    assert all(o == "finished" for o in outcomes[::2])


def test_a_client_that_leaves_stops_the_work_at_once() -> None:
    gone_ns = 20 * MS + 1
    records, made = audited("1P1D", [one(40, 900)], gone_after_ns=lambda i: gone_ns)
    assert (records[0].outcome, records[0].end_ns) == ("cancelled", gone_ns)
    assert 5 < len(records[0].token_times_ns) < 10
    # Later there is only the timer of a heartbeat, which finds nothing to say.
    assert made.workers["decode-0"].core is not None
    assert made.workers["decode-0"].core.engine.n_steps < 12


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"link_bytes_per_s": 10**5}, "transfer failed: connection lost"),
        ({"digest_ns": 50 * MS}, "prefill worker lost: connection lost"),
    ],
)
def test_decode_does_not_wait_for_a_dead_prefill_worker(
    options: dict[str, int], reason: str
) -> None:
    """Killed while it is read from, or before it has granted: decode knows one latency later."""
    crash = Crash(worker="prefill-0", at_ns=10 * MS)
    records, _ = audited("1P1D", [one(40)], crashes=[crash], **options)
    assert (records[0].outcome, records[0].reason) == ("failed", reason)
    assert records[0].end_ns == crash.at_ns + PEER + LEG


class Only:
    """The fate of one kind of handoff message, and for the rest all as sent."""

    def __init__(self, kind: type[object], fate: Fate, first: int = 0) -> None:
        self._kind = kind
        self._fate = fate
        self._left = first or 1_000_000

    def fate(self, sequence: int, message: object) -> Fate:
        if isinstance(message, ToPeer) and isinstance(message.message, self._kind) and self._left:
            self._left -= 1
            return self._fate
        return AS_SENT


@pytest.mark.parametrize("kind", [Claim, Grant, Done, Closed, Heartbeat])
def test_a_repeated_message_changes_nothing(kind: type[object]) -> None:
    requests = mixture(30, 4)
    plain, _ = audited("1P1D", requests)
    twice, _ = audited("1P1D", requests, faults=Only(kind, (0, 0)))
    assert twice == plain


@pytest.mark.parametrize("kind", [Done, Closed])
def test_a_lost_end_of_a_handoff_is_repeated(kind: type[object]) -> None:
    records, _ = audited("1P1D", [one(40)], faults=Only(kind, (), first=3))
    plain, _ = audited("1P1D", [one(40)])
    assert records[0].outcome == "finished"
    assert records[0].e2e_ns == plain[0].e2e_ns + 3 * 250 * MS


@pytest.mark.parametrize("kind", [Claim, Grant])
def test_a_lost_beginning_of_a_handoff_fails_in_bounded_time(kind: type[object]) -> None:
    records, _ = audited("1P1D", [one(40)], faults=Only(kind, ()))
    assert records[0].outcome == "failed"
    assert records[0].reason.startswith("handoff: ")
    assert records[0].e2e_ns < 6000 * MS


def test_a_damaged_read_fails_and_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _Moving.copy

    def damaged(reading: _Moving) -> tuple[int, ...]:
        checksums = whole(reading)
        assert reading.ours is not None
        reading.ours._slots[reading.pairs[-1][1]][0] ^= 1
        return (*checksums[:-1], reading.ours.checksums([reading.pairs[-1][1]])[0])

    monkeypatch.setattr(_Moving, "copy", damaged)
    records, _ = audited("1P1D", [one(40)])
    assert (records[0].outcome, records[0].reason) == (
        "failed",
        "transfer failed: checksum mismatch",
    )


# ------------------------------------------------------------- the checks themselves can fail


def test_wrong_kv_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _Moving.copy

    def damaged(reading: _Moving) -> tuple[int, ...]:
        checksums = whole(reading)
        assert reading.ours is not None
        reading.ours._slots[reading.pairs[-1][1]][0] ^= 1
        return checksums

    monkeypatch.setattr(_Moving, "copy", damaged)
    with pytest.raises(AssertionError, match="would read wrong KV"):
        audited("1P1D", [one(40)])


def test_a_leak_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(source: PullSource, held: Any) -> None:
        del source._held[held.hold.owner]
        source._timers.cancel(("lease", held.hold.owner))
        source.counts.in_hand -= 1
        source._pool.unhold(held.hold.owner)

    monkeypatch.setattr(PullSource, "_free", forgets)
    with pytest.raises(AssertionError, match="leaks"):
        audited("1P1D", [one(40)])


def test_a_second_end_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Router._end

    def twice(router: Router, request: Any, outcome: Any, reason: str, *rest: Any) -> None:
        ends(router, request, outcome, reason, *rest)
        router._count_end(request.id, outcome, reason, rest[-1])

    monkeypatch.setattr(Router, "_end", twice)
    with pytest.raises(AssertionError, match="ended twice"):
        audited("1M", [one(40)])


def test_a_request_without_an_end_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    leg = Router._leg

    def deaf(router: Router, message: Any, *rest: Any) -> None:
        if not isinstance(message, LegEnded):
            leg(router, message, *rest)

    monkeypatch.setattr(Router, "_leg", deaf)
    with pytest.raises(AssertionError, match="never ended"):
        audited("1P1D", [one(40)])


def test_a_message_for_an_earlier_life_is_dropped() -> None:
    _, made = audited("1P1D", [one(40)])
    worker = made.workers["decode-0"]
    assert worker.core is not None
    worker.feed("decode-0.7", FromPeer("x", Done(0, 0, ok=True)))
    worker.core.check()


def test_records_name_their_ends() -> None:
    records, _ = audited("1M", [one(5000), one(40)], settings={"n_blocks": 400})
    refused, finished = records
    assert isinstance(refused, RequestRecord)
    assert (refused.outcome, refused.reason, refused.ttft_ns) == ("refused", "too_long", None)
    assert finished.outcome == "finished"
