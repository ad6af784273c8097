"""Pull, step by step between two cores: right text, nothing left behind, whatever goes missing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.harness import LAYOUT, B
from tests.unit.harness_pair import Pair
from twofold.core.handoff.layout import incompatibility
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
    ToPeer,
)
from twofold.types import KVHandle

LENGTHS = [1, B - 1, B, B + 1, 2 * B, 2 * B + 1, 3 * B, 3 * B + 5]


def prompt(n: int, first: int = 0) -> tuple[int, ...]:
    return tuple((first * 7 + i * i) % 11 for i in range(n))


def until_verifying(pair: Pair, n: int = 2 * B + 1, **kwargs: Any) -> int:
    """A decode request that has read everything and whose Done is on the network."""
    request_id = pair.decode(pair.prefilled(prompt(n)), **kwargs)
    pair.deliver()  # Claim
    pair.deliver()  # Grant
    pair.complete_read(request_id)
    assert [type(packet.message) for packet in pair.net] == [Done]
    return request_id


# ------------------------------------------------------------------------- the good way


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("max_tokens", [1, 2, B + 1])
def test_every_length_is_handed_over_right(n: int, max_tokens: int) -> None:
    pair = Pair()
    request_id = pair.decode(pair.prefilled(prompt(n)), max_tokens=max_tokens)
    pair.settle()
    assert pair.d.ended[request_id].outcome == "finished"
    assert len(pair.d.outputs[request_id]) == max_tokens
    steps_on_d = [work for step in pair.d.steps for work in step.work]
    assert steps_on_d[0] == (request_id, n - 1, 1), "decode computed what prefill had"
    pair.quiesce()
    pair.verify_end()
    assert pair.p.core.source.counts.received == 1


def test_only_blocks_before_the_last_token_are_read() -> None:
    for n in LENGTHS:
        pair = Pair()
        request_id = pair.decode(pair.prefilled(prompt(n)))
        pair.deliver()
        pair.deliver()
        reading = pair.d.reads.get(request_id)
        assert len(reading.effect.pairs if reading else ()) == -(-(n - 1) // B)
        pair.quiesce()
        pair.verify_end()


def test_full_hit_on_decode_reads_nothing_and_finishes() -> None:
    pair = Pair()
    tokens = prompt(2 * B + 1)
    pair.decode(pair.prefilled(tokens))
    pair.settle()
    second = pair.decode(pair.prefilled(tokens))
    pair.deliver()
    pair.deliver()
    assert not pair.d.reads
    pair.settle()
    assert pair.d.ended[second].outcome == "finished"
    assert pair.d.ended[second].n_cached == 2 * B
    pair.quiesce()
    pair.verify_end()
    assert pair.p.core.source.counts.received == 2


def test_part_hit_on_decode_reads_the_rest_with_its_own_checksums() -> None:
    pair = Pair()
    pair.decode(pair.prefilled(prompt(2 * B + 1)))
    pair.settle()
    second = pair.decode(pair.prefilled((*prompt(2 * B), 5, 5, 5, 5, 5, 5)))
    pair.deliver()
    pair.deliver()
    assert len(pair.d.reads[second].effect.pairs) == 2
    pair.quiesce()
    assert pair.d.ended[second].outcome == "finished"
    pair.verify_end()


def test_decode_waits_for_checksums_that_are_not_ready() -> None:
    pair = Pair()
    pair.prefill(prompt(B + 2))
    pair.finish_step(pair.p)
    request_id = pair.decode(pair.handles[0])
    pair.deliver()
    assert not pair.net, "granted without checksums"
    pair.digest(pair.p)
    assert isinstance(pair.net[0].message, Grant)
    pair.quiesce()
    assert pair.d.ended[request_id].outcome == "finished"
    pair.verify_end()


def test_nothing_is_believed_before_closed() -> None:
    pair = Pair()
    until_verifying(pair)
    assert len(pair.d.steps) == 0
    assert len(pair.d.core.pool.cache) == 0, "unverified blocks in the prefix cache"
    pair.deliver()
    assert len(pair.d.steps) == 0
    pair.deliver()
    assert len(pair.d.steps) == 1
    pair.quiesce()
    pair.verify_end()


def test_decode_preempts_and_computes_again_itself() -> None:
    pair = Pair(d={"n_blocks": 6, "prefix_caching": False})
    ids = [pair.decode(pair.prefilled(prompt(B + 1, i)), max_tokens=3 * B) for i in range(3)]
    pair.quiesce()
    assert all(pair.d.ended[i].outcome == "finished" for i in ids)
    assert sum(pair.d.ended[i].n_preempted for i in ids) > 0
    pair.verify_end()


def test_phases_name_where_the_time_went() -> None:
    pair = Pair()
    request_id = pair.decode(pair.prefilled(prompt(2 * B)))
    pair.now_ns += 3
    pair.deliver()
    pair.deliver()
    pair.now_ns += 5
    pair.complete_read(request_id)
    pair.deliver()
    pair.deliver()
    step = pair.d.in_flight.pop(0)
    pair.now_ns += 7
    effects = pair.d.send(pair.d.memory.run(pair.d.core, step), pair.now_ns)
    phases = next(e.phases for e in effects if type(e).__name__ == "Token")  # type: ignore[union-attr]
    assert phases is not None
    got = (phases.handoff_wait_ns, phases.transfer_ns, phases.queue_ns, phases.compute_ns)
    assert got == (3, 5, 0, 7)
    assert phases.n_bytes == 64 * 2


# ------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("field", LAYOUT.__struct_fields__)
def test_every_layout_field_that_differs_is_named(field: str) -> None:
    value = getattr(LAYOUT, field)
    other = msgspec.structs.replace(
        LAYOUT, **{field: value + (1 if isinstance(value, int) else "x")}
    )
    reason = incompatibility(LAYOUT, other)
    assert reason is not None
    assert reason.startswith(f"{field} differs: ")
    assert incompatibility(LAYOUT, LAYOUT) is None


def test_other_layout_is_refused_and_the_field_named() -> None:
    pair = Pair(d={"layout": msgspec.structs.replace(LAYOUT, dtype="float16")})
    handle = pair.prefilled(prompt(9))
    request_id = pair.decode(handle)
    pair.settle()
    assert pair.d.ended[request_id].outcome == "failed"
    assert "dtype differs: float32 and float16" in pair.d.ended[request_id].reason
    pair.release(handle)
    pair.quiesce()
    pair.verify_end()


def test_stale_generation_is_refused_and_changes_nothing() -> None:
    pair = Pair()
    handle = pair.prefilled(prompt(9), generation=2)
    late = pair.decode(msgspec.structs.replace(handle, generation=1))
    pair.settle()
    assert "stale" in pair.d.ended[late].reason
    assert pair.p.core.source.holds(handle.request_id)
    for message in (
        Done(handle.request_id, 1, ok=True),
        Done(handle.request_id, 1, ok=False),
        Heartbeat(((handle.request_id, 1),)),
    ):
        out = pair.p.send(FromPeer("D", message))
        pair.p.outbox.clear()
        answers = [e.message for e in out if isinstance(e, ToPeer)]
        assert answers == [Closed(handle.request_id, 1, valid=False)]
    pair.p.send(Release(handle.request_id, 1))
    assert pair.p.core.source.holds(handle.request_id)
    request_id = pair.decode(handle)
    pair.quiesce()
    assert pair.d.ended[request_id].outcome == "finished"
    pair.verify_end()


def test_late_messages_of_another_generation_are_not_acted_on_by_decode() -> None:
    pair = Pair()
    handle = pair.prefilled(prompt(9), generation=1)
    request_id = pair.decode(handle)
    for message in (
        Refusal(handle.request_id, 0, "old"),
        Closed(handle.request_id, 0, valid=False),
        Closed(handle.request_id, 0, valid=True),
        Grant(handle.request_id, 0, (1,), (), (), "", 0, 1),
    ):
        pair.send(pair.d, FromPeer("P", message))
        pair.send(pair.d, FromPeer("somebody", msgspec.structs.replace(message, generation=1)))
    pair.quiesce()
    assert pair.d.ended[request_id].outcome == "finished"
    pair.verify_end()


def test_unknown_request_is_refused() -> None:
    pair = Pair()
    handle = KVHandle(engine_id="P", host="p", port=1, request_id=99, generation=0, n_tokens=9)
    request_id = pair.decode(handle)
    pair.quiesce()
    assert pair.d.ended[request_id].outcome == "failed"
    assert "unknown" in pair.d.ended[request_id].reason
    pair.d.verify_idle()


def test_duplicate_handle_is_refused_and_the_first_lives() -> None:
    pair = Pair()
    handle = pair.prefilled(prompt(9))
    first = pair.decode(handle)
    second = pair.decode(handle)
    assert pair.d.ended[second].reason == "duplicate_handle"
    pair.quiesce()
    assert pair.d.ended[first].outcome == "finished"
    pair.verify_end()


def test_handle_used_up_is_refused() -> None:
    pair = Pair()
    handle = pair.prefilled(prompt(9))
    pair.decode(handle)
    pair.quiesce()
    second = pair.decode(handle)
    pair.quiesce()
    assert pair.d.ended[second].outcome == "failed"
    pair.verify_end()


def test_second_decode_worker_is_refused_while_the_first_reads() -> None:
    pair = Pair()
    handle = pair.prefilled(prompt(9))
    pair.decode(handle)
    pair.deliver()
    out = pair.p.send(FromPeer("E", Claim(handle.request_id, 0, LAYOUT)))
    refusals = [e.message for e in out if isinstance(e, ToPeer) and e.peer == "E"]
    assert refusals == [Refusal(handle.request_id, 0, "another worker is reading it")]
    pair.p.send(FromPeer("E", Done(handle.request_id, 0, ok=False)))
    assert pair.p.core.source.holds(handle.request_id)
    pair.p.outbox.clear()
    pair.quiesce()
    pair.verify_end()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_model_len": 10}, "too_long"),
        ({"n_blocks": 2}, "never_fits"),
        ({"max_waiting": 0}, "queue_full"),
    ],
)
def test_refusal_at_submit_frees_the_source(settings: dict[str, Any], reason: str) -> None:
    pair = Pair(d=settings)
    request_id = pair.decode(pair.prefilled(prompt(9)))
    assert (pair.d.ended[request_id].outcome, pair.d.ended[request_id].reason) == (
        "refused",
        reason,
    )
    pair.settle()
    assert pair.p.core.pool.counts().held == 0, "held although nobody will come"
    pair.quiesce()
    pair.verify_end()


def test_abort_before_the_claim_arrives_frees_the_source() -> None:
    pair = Pair()
    request_id = pair.decode(pair.prefilled(prompt(9)))
    pair.net.clear()
    pair.send(pair.d, Abort(request_id))
    pair.settle()
    assert pair.p.core.pool.counts().held == 0
    pair.quiesce()
    pair.verify_end()


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": (1, 2)},
        {"blocks": ()},
        {"checksums": (1,)},
    ],
)
def test_a_grant_that_does_not_fit_its_handle_is_not_used(change: dict[str, Any]) -> None:
    pair = Pair()
    request_id = pair.decode(pair.prefilled(prompt(9)))
    pair.deliver()
    packet = pair.net.pop()
    pair.net.append(packet._replace(message=msgspec.structs.replace(packet.message, **change)))
    pair.quiesce()
    assert "does not fit" in pair.d.ended[request_id].reason
    pair.verify_end()


def test_claims_that_wait_for_their_ids_fill_the_queue_too() -> None:
    pair = Pair(d={"max_waiting": 3})
    ids = [
        pair.decode(
            KVHandle(engine_id="P", host="p", port=1, request_id=900 + i, generation=0, n_tokens=5)
        )
        for i in range(5)
    ]
    assert [pair.d.ended[i].reason for i in ids[3:]] == ["queue_full", "queue_full"]
    assert not any(i in pair.d.ended for i in ids[:3])
    pair.quiesce()
    pair.d.verify_idle()
