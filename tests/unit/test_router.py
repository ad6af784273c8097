"""The router, row by row of its table."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from tests.unit.harness import LAYOUT
from twofold.core.router import Router
from twofold.messages import (
    Arrive,
    CancelLeg,
    ClientGone,
    Cut,
    DecodeStarted,
    LegEnded,
    LegFailed,
    PrefillDone,
    ReleaseHeld,
    Reply,
    RouterEffect,
    SendDecode,
    SendPrefill,
    Terminal,
    Wake,
    WakeAt,
    WorkerGone,
    WorkerSeen,
)
from twofold.types import KVLayout

Role = Literal["prefill", "decode", "mixed"]


def seen(worker: str, role: Role, layout: KVLayout | None = LAYOUT) -> WorkerSeen:
    return WorkerSeen(worker=worker, role=role, engine_id=f"{worker}-1", layout=layout)


def router_of(*workers: WorkerSeen, max_inflight: int = 8) -> Router:
    router = Router(max_inflight=max_inflight)
    for worker in workers:
        assert router.handle(worker, 0) == []
    return router


def pair() -> Router:
    return router_of(seen("p", "prefill"), seen("d", "decode"))


def arrive(router: Router, request_id: int = 1, weight: int = 10) -> list[RouterEffect]:
    return router.handle(Arrive(request_id=request_id, weight=weight, time_left_ns=100), 0)


def at(state: str) -> Router:
    """A router with request 1 in `state`."""
    router = router_of(seen("m", "mixed")) if state == "ONLY" else pair()
    arrive(router)
    if state in ("HANDOFF", "STREAMING"):
        router.handle(PrefillDone(1, 0), 1)
    if state == "STREAMING":
        router.handle(DecodeStarted(1, 0), 1)
    assert router.requests[1].state.name == state
    return router


def assert_idle(router: Router) -> None:
    assert not router.requests
    assert all((w.tokens, w.requests) == (0, 0) for w in router.workers.values())
    counts = router.counts
    ends = counts.finished + counts.refused + counts.failed + counts.cancelled
    assert counts.received == ends


def test_two_legs_from_arrival_to_end() -> None:
    router = pair()
    assert arrive(router) == [SendPrefill(1, 0, "p"), WakeAt(100)]
    assert (router.workers["p"].tokens, router.workers["p"].requests) == (10, 1)
    assert router.handle(PrefillDone(1, 0), 1) == [SendDecode(1, 0, "d", remote=True)]
    assert (router.workers["p"].requests, router.workers["d"].requests) == (0, 1)
    assert router.handle(DecodeStarted(1, 0), 2) == []
    assert router.handle(LegEnded(1, 0), 3) == [Terminal(1, "finished", "")]
    assert_idle(router)
    assert (router.counts.remote, router.counts.local, router.counts.fallback) == (1, 0, 0)


def test_a_mixed_worker_is_the_only_leg() -> None:
    router = router_of(seen("m", "mixed"))
    assert arrive(router)[0] == SendDecode(1, 0, "m", remote=False)
    router.handle(DecodeStarted(1, 0), 1)
    assert router.handle(LegEnded(1, 0), 1) == [Terminal(1, "finished", "")]
    assert_idle(router)
    assert (router.counts.local, router.counts.fallback) == (1, 0)


def test_falling_back_to_a_mixed_worker_is_counted() -> None:
    router = router_of(seen("p", "prefill"), seen("m", "mixed"))
    assert arrive(router)[0] == SendDecode(1, 0, "m", remote=False)
    assert router.counts.fallback == 1


@pytest.mark.parametrize("field", LAYOUT.__struct_fields__)
def test_pair_of_other_layouts_is_refused_before_any_prefill(field: str) -> None:
    value = getattr(LAYOUT, field)
    changed = value + 1 if isinstance(value, int) else value + "x"
    other = msgspec.structs.replace(LAYOUT, **{field: changed})
    router = router_of(seen("p", "prefill"), seen("d", "decode", other))
    out = arrive(router)
    reply, end = out
    assert isinstance(reply, Reply)
    assert (reply.status, reply.code) == (503, "not_ready")
    assert f"p and d: {field} differs: {value} and {changed}" in reply.reason
    assert isinstance(end, Terminal)
    assert router.unready() == reply.reason
    assert_idle(router)


def test_only_a_decode_worker_of_equal_layout_is_chosen() -> None:
    other = msgspec.structs.replace(LAYOUT, dtype="float16")
    router = router_of(
        seen("p", "prefill"),
        seen("a", "decode", other),
        seen("b", "decode"),
        seen("c", "decode", None),
    )
    for i in range(3):
        arrive(router, i)
        assert router.handle(PrefillDone(i, 0), 0) == [SendDecode(i, 0, "b", remote=True)]


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        ([], "no prefill worker is up"),
        ([seen("p", "prefill")], "no decode worker is up"),
        ([seen("d", "decode")], "no prefill worker is up"),
        ([seen("p", "prefill", None), seen("d", "decode")], "p and d: a layout is not known"),
    ],
)
def test_not_ready_says_why(workers: list[WorkerSeen], reason: str) -> None:
    router = router_of(*workers)
    assert arrive(router)[0] == Reply(1, 503, "not_ready", reason, 1)
    assert_idle(router)


def test_too_many_in_flight_is_refused_with_429() -> None:
    router = router_of(seen("m", "mixed"), max_inflight=2)
    for i in (1, 2):
        arrive(router, i)
    out = arrive(router, 3)
    assert isinstance(out[0], Reply)
    assert (out[0].status, out[0].code, out[0].retry_after_s) == (429, "queue_full", 1)
    assert out[1:] == [Terminal(3, "refused", "queue_full")]
    for i in (1, 2):
        router.handle(ClientGone(i), 1)
    assert_idle(router)


CANCELS: dict[str, list[RouterEffect]] = {
    "PREFILLING": [CancelLeg(1, 0, "prefill", "p")],
    "HANDOFF": [CancelLeg(1, 0, "decode", "d"), ReleaseHeld(1, 0, "p")],
    "ONLY": [CancelLeg(1, 0, "decode", "m")],
    "STREAMING": [CancelLeg(1, 0, "decode", "d")],
}


@pytest.mark.parametrize("state", CANCELS)
def test_client_gone_reaches_both_legs(state: str) -> None:
    router = at(state)
    out = router.handle(ClientGone(1), 1)
    assert out == [*CANCELS[state], Terminal(1, "cancelled", "the client went away")]
    assert_idle(router)
    assert router.handle(ClientGone(1), 2) == []


@pytest.mark.parametrize("state", CANCELS)
def test_deadline_reaches_both_legs(state: str) -> None:
    router = at(state)
    assert router.handle(Wake(), 99) == [WakeAt(100)]
    reason = "the deadline passed"
    told: RouterEffect = Reply(1, 504, "deadline_exceeded", reason)
    if state == "STREAMING":
        told = Cut(1, reason)
    assert router.handle(Wake(), 100) == [*CANCELS[state], told, Terminal(1, "failed", reason)]
    assert_idle(router)


@pytest.mark.parametrize(
    ("status", "answer", "outcome"),
    [
        (0, Reply(1, 502, "decode_failed", "why"), "failed"),
        (500, Reply(1, 502, "decode_failed", "why"), "failed"),
        (504, Reply(1, 0, "", "why"), "failed"),
        (400, Reply(1, 0, "", "why"), "refused"),
        (429, Reply(1, 0, "", "why"), "refused"),
    ],
)
def test_failed_decode_leg_frees_the_kv_and_answers(
    status: int, answer: Reply, outcome: str
) -> None:
    router = at("HANDOFF")
    out = router.handle(LegFailed(1, 0, "decode", status, "why"), 1)
    assert out[:2] == [ReleaseHeld(1, 0, "p"), answer]
    assert isinstance(out[2], Terminal)
    assert out[2].outcome == outcome
    assert_idle(router)


def test_failed_prefill_leg_answers() -> None:
    router = at("PREFILLING")
    out = router.handle(LegFailed(1, 0, "prefill", 500, "why"), 1)
    assert out == [Reply(1, 502, "prefill_failed", "why"), Terminal(1, "failed", "why")]
    assert_idle(router)


def test_failure_after_the_first_byte_cuts_the_stream() -> None:
    router = at("STREAMING")
    out = router.handle(LegFailed(1, 0, "decode", 0, "why"), 1)
    assert out == [Cut(1, "why"), Terminal(1, "failed", "why")]
    assert_idle(router)


def test_a_leg_that_is_over_cannot_fail_any_more() -> None:
    for state in ("HANDOFF", "STREAMING"):
        router = at(state)
        assert router.handle(LegFailed(1, 0, "prefill", 500, "late"), 1) == []
        assert 1 in router.requests


def test_lost_worker_gets_nothing_new_until_seen_again() -> None:
    router = at("HANDOFF")
    router.handle(LegFailed(1, 0, "decode", 0, "reset", lost=True), 1)
    out = arrive(router, 2)
    assert isinstance(out[0], Reply)
    assert out[0].reason == "no decode worker is up"
    router.handle(seen("d", "decode"), 2)
    assert arrive(router, 3)[0] == SendPrefill(3, 0, "p")


@pytest.mark.parametrize("generation", [-1, 1, 7])
@pytest.mark.parametrize("state", CANCELS)
def test_messages_of_another_generation_change_nothing(state: str, generation: int) -> None:
    router = at(state)
    before = msgspec.structs.replace(router.requests[1])
    for message in (
        PrefillDone(1, generation),
        DecodeStarted(1, generation),
        LegEnded(1, generation),
        LegFailed(1, generation, "prefill", 500, "late", lost=True),
        LegFailed(1, generation, "decode", 0, "late", lost=True),
    ):
        assert router.handle(message, 1) == []
    assert router.requests[1] == before
    assert all(worker.up for worker in router.workers.values())


def test_decode_gone_between_the_legs_frees_the_kv() -> None:
    router = at("PREFILLING")
    router.handle(WorkerGone("d"), 1)
    out = router.handle(PrefillDone(1, 0), 1)
    assert out == [
        ReleaseHeld(1, 0, "p"),
        Reply(1, 502, "decode_unavailable", "no decode worker is up"),
        Terminal(1, "failed", "no decode worker is up"),
    ]
    assert_idle(router)


def test_decode_worker_is_chosen_by_its_load_at_the_handover() -> None:
    router = router_of(seen("p", "prefill"), seen("a", "decode"), seen("b", "decode"))
    for i in (1, 2, 3):
        arrive(router, i)
    chosen = []
    for i in (1, 2, 3):
        effect = router.handle(PrefillDone(i, 0), 1)[0]
        assert isinstance(effect, SendDecode)
        chosen.append(effect.worker)
    assert chosen == ["a", "b", "a"]


def test_prefill_goes_by_tokens_not_by_requests() -> None:
    router = router_of(seen("p", "prefill"), seen("q", "prefill"), seen("d", "decode"))
    arrive(router, 1, 1000)
    workers = []
    for i in range(2, 6):
        effect = arrive(router, i, 100)[0]
        assert isinstance(effect, SendPrefill)
        workers.append(effect.worker)
    assert workers == ["q", "q", "q", "q"]
