"""Pull when things go missing: messages, peers, leases, clients; nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.harness import MS, B
from tests.unit.harness_pair import Packet, Pair
from tests.unit.test_handoff import prompt, until_verifying
from twofold.messages import (
    Abort,
    Claim,
    Closed,
    Done,
    FromPeer,
    Grant,
    Heartbeat,
    Refusal,
    Release,
)
from twofold.policy import batch


def losing(pair: Pair, kind: type, times: int) -> None:
    """The network swallows the first `times` messages of `kind`."""
    left = [times]

    def lose(packet: Packet) -> bool:
        if isinstance(packet.message, kind) and left[0]:
            left[0] -= 1
            return True
        return False

    pair.lose = lose


@pytest.mark.parametrize("kind", [Done, Closed])
def test_lost_end_of_handoff_costs_a_retry_and_no_block(kind: type) -> None:
    pair = Pair()
    losing(pair, kind, 3)
    request_id = pair.decode(pair.prefilled(prompt(2 * B)))
    pair.quiesce()
    assert pair.d.ended[request_id].outcome == "finished"
    assert pair.p.core.source.counts.received == 1
    pair.verify_end()


@pytest.mark.parametrize("kind", [Claim, Grant, Done, Closed, Refusal, Heartbeat])
def test_lost_for_good_ends_within_the_timeouts(kind: type) -> None:
    pair = Pair(d={"claim_timeout_ns": 300 * MS, "verify_timeout_ns": 500 * MS})
    losing(pair, kind, 10**9)
    request_id = pair.decode(pair.prefilled(prompt(2 * B)))
    pair.settle()
    for _ in range(10):
        pair.advance(100 * MS)
        pair.settle()
    assert request_id in pair.d.ended
    assert pair.d.core.pool.counts().held == pair.d.core.pool.counts().active == 0
    pair.quiesce()
    pair.verify_end()


def test_heartbeat_that_crosses_the_end_does_not_undo_it() -> None:
    pair = Pair()
    request_id = until_verifying(pair)
    pair.deliver()  # Done; its answer is on the way, and now gets lost
    pair.net.clear()
    pair.send(pair.p, FromPeer("D", Heartbeat(((pair.handles[0].request_id, 0),))))
    pair.settle()
    pair.quiesce()
    assert pair.d.ended[request_id].outcome == "finished"
    pair.verify_end()


def test_flipped_bit_is_found_and_not_used() -> None:
    pair = Pair()
    request_id = pair.decode(pair.prefilled(prompt(3 * B + 5)))
    pair.deliver()
    pair.deliver()
    pair.land(request_id)
    pair.land(request_id, flip=1)
    pair.complete_read(request_id)
    assert pair.d.ended[request_id].reason == "transfer failed: checksum mismatch"
    assert pair.d.core.reader.n_failed == 1
    pair.settle()
    assert len(pair.d.core.pool.cache) == 0
    pair.quiesce()
    pair.verify_end()


def test_failed_read_names_its_reason() -> None:
    pair = Pair()
    request_id = pair.decode(pair.prefilled(prompt(9)))
    pair.deliver()
    pair.deliver()
    pair.end_read(request_id, ok=False)
    assert pair.d.ended[request_id].reason == "transfer failed: cut"
    pair.settle()
    assert pair.p.core.pool.counts().held == 0
    pair.quiesce()
    pair.verify_end()


def test_abort_in_a_read_keeps_the_blocks_until_nothing_writes_them() -> None:
    pair = Pair(d={"n_blocks": 3})
    request_id = pair.decode(pair.prefilled(prompt(2 * B + 1)))
    pair.deliver()
    pair.deliver()
    pair.land(request_id)
    pair.send(pair.d, Abort(request_id))
    assert pair.d.reads[request_id].cancelled
    second = pair.decode(pair.prefilled(prompt(2 * B + 1, 3)), max_tokens=2)
    while pair.net:
        pair.deliver()
    assert second not in pair.d.reads, "blocks reused under a write"
    pair.land(request_id)
    pair.end_read(request_id)
    pair.quiesce()
    assert pair.d.ended[second].outcome == "finished"
    pair.verify_end()


@pytest.mark.parametrize("when", ["claiming", "waiting", "loading", "verifying", "running"])
def test_abort_in_every_state_gives_everything_back_on_both_sides(when: str) -> None:
    pair = Pair(d={"max_num_seqs": 1} if when == "waiting" else {})
    if when == "waiting":
        pair.decode(pair.prefilled(prompt(5, 4)), max_tokens=30)
        while pair.net or pair.d.reads:
            pair.busy()
    request_id = pair.decode(pair.prefilled(prompt(9)), max_tokens=9)
    reached: dict[str, Callable[[], bool]] = {
        "claiming": lambda: True,
        "waiting": lambda: not pair.net,
        "loading": lambda: request_id in pair.d.reads,
        "verifying": lambda: any(isinstance(p.message, Done) for p in pair.net),
        "running": lambda: bool(pair.d.outputs[request_id]),
    }
    while not reached[when]():
        pair.busy()
    assert pair.d.core.engine.requests[request_id].state.name == when.upper()
    pair.send(pair.d, Abort(request_id))
    pair.settle()
    assert pair.p.core.pool.counts().held == 0
    assert pair.d.core.pool.counts().held == 0
    pair.quiesce()
    pair.verify_end()


def test_lease_that_runs_out_frees_the_blocks_with_no_traffic_at_all() -> None:
    pair = Pair(p={"lease_ns": 700 * MS})
    pair.prefilled(prompt(9))
    assert pair.p.core.pool.counts().held == 2
    pair.advance(699 * MS)
    assert pair.p.core.pool.counts().held == 2
    pair.advance(1 * MS)
    assert pair.p.core.pool.counts().held == 0
    assert pair.p.core.source.counts.expired == 1
    pair.verify_end()


def test_heartbeats_keep_a_slow_read_alive() -> None:
    pair = Pair(p={"lease_ns": 500 * MS}, d={"heartbeat_ns": 200 * MS})
    request_id = pair.decode(pair.prefilled(prompt(9)))
    pair.deliver()
    pair.deliver()
    for _ in range(20):
        pair.advance(200 * MS)
        while pair.net:
            pair.deliver()
    pair.quiesce()
    assert pair.d.ended[request_id].outcome == "finished"
    pair.verify_end()


def test_source_blocks_reused_in_the_middle_of_a_read_are_never_believed() -> None:
    # Checksums match, since all was copied before the reuse; the lease had run out all the same.
    pair = Pair(p={"lease_ns": 100 * MS, "n_blocks": 3})
    request_id = pair.decode(pair.prefilled(prompt(9)))
    pair.deliver()
    pair.deliver()
    pair.land(request_id)
    pair.land(request_id)
    pair.advance(100 * MS)
    assert pair.p.core.source.counts.expired == 1
    pair.end_read(request_id)
    while pair.net:
        pair.deliver()
    assert "lease was lost" in pair.d.ended[request_id].reason
    assert not pair.d.steps
    pair.quiesce()
    pair.verify_end()


def test_peer_lost_fails_what_was_to_come_at_once() -> None:
    pair = Pair()
    claiming = pair.decode(pair.prefilled(prompt(9)))
    verifying = pair.decode(pair.prefilled(prompt(9, 3)))
    running = pair.decode(pair.prefilled(prompt(1)), max_tokens=5)
    pair.net = [p for p in pair.net if getattr(p.message, "request_id", 0) != 1]
    while pair.net or pair.d.reads:
        pair.busy()
    pair.cut("D", "P")
    assert "prefill worker lost" in pair.d.ended[claiming].reason
    pair.quiesce()
    assert pair.d.ended[running].outcome == "finished"
    assert pair.d.ended[verifying].outcome == "finished"
    pair.verify_end()


def test_lost_decode_worker_holds_blocks_for_a_moment_only() -> None:
    pair = Pair(p={"lease_ns": 10_000 * MS, "lost_grace_ns": 500 * MS})
    pair.decode(pair.prefilled(prompt(9)))
    pair.prefilled(prompt(9, 2))  # not claimed: nobody's connection
    pair.deliver()
    pair.cut("P")
    pair.advance(500 * MS)
    assert pair.p.core.source.counts.expired == 1
    assert pair.p.core.source.counts.in_hand == 1
    pair.net.clear()
    pair.quiesce()
    pair.verify_end()


def test_decode_worker_that_comes_back_within_the_grace_keeps_its_claim() -> None:
    pair = Pair(p={"lease_ns": 10_000 * MS, "lost_grace_ns": 500 * MS})
    request_id = pair.decode(pair.prefilled(prompt(9)))
    pair.deliver()
    pair.deliver()
    pair.cut("P")
    pair.advance(400 * MS)
    pair.send(pair.p, FromPeer("D", Heartbeat(((1, 0),))))
    pair.advance(200 * MS)
    pair.quiesce()
    assert pair.d.ended[request_id].outcome == "finished"
    pair.verify_end()


def test_release_by_the_gateway_frees_at_once_or_stops_the_prefill() -> None:
    pair = Pair()
    pair.release(pair.prefilled(prompt(9)))
    assert pair.p.core.pool.counts().held == 0
    running = pair.prefill(prompt(9, 3), generation=4)
    pair.send(pair.p, Release(running, 3))
    assert running not in pair.p.ended
    pair.send(pair.p, Release(running, 4))
    assert pair.p.ended[running].outcome == "cancelled"
    pair.settle()
    pair.verify_end()


def test_deadline_ends_a_handoff_in_any_state() -> None:
    pair = Pair()
    request_id = pair.decode(pair.prefilled(prompt(9)), time_left_ns=50 * MS)
    pair.deliver()
    pair.deliver()
    pair.advance(50 * MS)
    assert (pair.d.ended[request_id].outcome, pair.d.ended[request_id].reason) == (
        "failed",
        "deadline",
    )
    pair.quiesce()
    pair.verify_end()


def test_big_waiting_handoff_is_not_starved_by_small_ones() -> None:
    pair = Pair(
        p={"n_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64},
        d={"n_blocks": 9, "max_num_seqs": 4, "max_num_batched_tokens": 16},
    )
    small = [pair.decode(pair.prefilled(prompt(5, i)), max_tokens=4 + i % 5) for i in range(4)]
    while pair.net or pair.d.reads:
        pair.busy()
    big = pair.decode(pair.prefilled(prompt(8 * B, 9)), max_tokens=2)
    for i in range(200):
        if big in pair.d.ended:
            break
        waiting = pair.d.core.engine.requests[big]
        assert waiting.bypassed <= batch.PREEMPT_AFTER + 4, "passed over without end"
        while len(pair.d.core.engine.waiting) < 4:
            small.append(pair.decode(pair.prefilled(prompt(5, i)), max_tokens=4 + i % 5))
            while pair.net:
                pair.deliver()
        while pair.net or pair.d.reads or pair.p.digests:
            pair.busy()
        if pair.d.step is not None:
            pair.finish_step(pair.d)
    assert big in pair.d.ended, "the big request starves"
    assert pair.d.ended[big].outcome == "finished"
    pair.quiesce()
    assert all(pair.d.ended[i].outcome == "finished" for i in small)
    pair.verify_end()


def test_concurrency_far_above_what_decode_can_hold_completes() -> None:
    pair = Pair(
        p={"n_blocks": 200, "max_num_seqs": 8, "max_num_batched_tokens": 64},
        d={"n_blocks": 12, "max_num_seqs": 8, "max_num_batched_tokens": 16},
    )
    ids = [pair.decode(pair.prefilled(prompt(B + i % 7, i)), max_tokens=5) for i in range(64)]
    pair.quiesce()
    assert all(pair.d.ended[i].outcome == "finished" for i in ids)
    pair.verify_end()
