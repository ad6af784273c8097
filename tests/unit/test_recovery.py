"""What the router makes of legs that fail, policy by policy and state by state."""

from __future__ import annotations

from typing import Any, Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_router import assert_idle, seen
from twofold.core.recovery import FAILURE_POLICIES, MOST_RETRIES, Budget
from twofold.core.routed import Outcome
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
    Recovery,
    RecoveryResult,
    ReleaseHeld,
    Reply,
    RouterEffect,
    SendDecode,
    SendPrefill,
    Terminal,
    Wake,
    WakeAt,
    WorkerGone,
)
from twofold.metrics.prometheus import RECOVERIES
from twofold.types import NS_PER_S

Kind = Literal["prefill", "decode"]
ROLES: dict[str, Literal["prefill", "decode", "mixed"]] = {
    "p": "prefill",
    "d": "decode",
    "m": "mixed",
}
RECOVERING = [policy for policy in FAILURE_POLICIES if policy != "fail"]


def router_of(names: str, policy: str, **settings: Any) -> Router:
    router = Router(max_inflight=8, failure_policy=policy, **settings)
    for name in names.split():
        assert router.handle(seen(name, ROLES[name[0]]), 0) == []
    return router


def arrive(router: Router, request_id: int = 1, weight: int = 10, left_ns: int = 100) -> Any:
    message = Arrive(request_id=request_id, weight=weight, time_left_ns=left_ns)
    return router.handle(message, 0)


def at(state: str, names: str, policy: str, **settings: Any) -> Router:
    """A router with request 1 in `state`, over p1 and d1, or at m1."""
    settings |= {"handoff": "push"} if state == "BOTH" else {}
    settings |= {"split_policy": "never"} if state == "ONLY" else {}
    router = router_of(names, policy, **settings)
    arrive(router)
    if state in ("HANDOFF", "STREAMING"):
        router.handle(PrefillDone(1, 0), 1)
    if state == "STREAMING":
        router.handle(DecodeStarted(1, 0), 1)
    assert router.requests[1].state.name == state
    return router


def fail(
    router: Router, leg: Kind, status: int = 500, generation: int = 0, lost: bool = False
) -> list[RouterEffect]:
    return router.handle(LegFailed(1, generation, leg, status, "why", lost), 2)


LEFT: dict[tuple[str, Kind], list[RouterEffect]] = {
    ("PREFILLING", "prefill"): [],
    ("HANDOFF", "decode"): [ReleaseHeld(1, 0, "p1")],
    ("BOTH", "prefill"): [CancelLeg(1, 0, "decode", "d1")],
    ("BOTH", "decode"): [CancelLeg(1, 0, "prefill", "p1")],
    ("ONLY", "decode"): [],
}
"""What is to be cleared away when this leg fails in this state."""

failures = pytest.mark.parametrize(("state", "leg"), list(LEFT))


@failures
def test_a_retry_leaves_nothing_behind_and_goes_elsewhere(state: str, leg: Kind) -> None:
    router = at(state, "p1 p2 d1 d2 m1 m2", "retry-pair")
    out = fail(router, leg)
    sent: list[RouterEffect] = [SendPrefill(1, 1, "p2")]
    if state == "BOTH":
        # A prefill leg's failure says nothing against decode; a handoff's may be either end's.
        sent.append(SendDecode(1, 1, "d1" if leg == "prefill" else "d2", remote=True))
    elif state == "ONLY":
        sent = [SendDecode(1, 1, "m2", remote=False)]
    assert out == [*LEFT[state, leg], Recovery(1, 0, "retried", "why"), *sent]
    router.handle(PrefillDone(1, 1), 3)
    if state == "HANDOFF":
        assert router.requests[1].decode == "d2"
    router.handle(DecodeStarted(1, 1), 4)
    assert router.handle(LegEnded(1, 1), 5) == [Terminal(1, "finished", "")]
    assert (router.counts.retried, router.counts.finished) == (1, 1)
    assert_idle(router)


@failures
@pytest.mark.parametrize(
    ("policy", "result", "where"),
    [("recompute-on-decode", "recomputed", ("d", "m")), ("mixed-pool", "moved", ("m",))],
)
def test_one_leg_takes_the_place_of_two(
    state: str, leg: Kind, policy: str, result: RecoveryResult, where: tuple[str, ...]
) -> None:
    router = at(state, "p1 d1 d2 m1 m2", policy)
    out = fail(router, leg)
    assert out[:-1] == [*LEFT[state, leg], Recovery(1, 0, result, "why")]
    sent = out[-1]
    assert isinstance(sent, SendDecode)
    assert (sent.generation, sent.remote) == (1, False)
    assert sent.worker[0] in where
    assert sent.worker != ("m1" if state == "ONLY" else "d1" if leg == "decode" else "")
    assert router.why(1)[-2:] == (f"{result} since why", router.why(1)[-1])
    router.handle(DecodeStarted(1, 1), 3)
    assert router.handle(LegEnded(1, 1), 4) == [Terminal(1, "finished", "")]
    assert getattr(router.counts, result) == 1
    assert_idle(router)


@failures
@pytest.mark.parametrize("policy", FAILURE_POLICIES)
@pytest.mark.parametrize("status", [400, 404, 413, 429, 499, 504])
def test_what_is_no_fault_of_the_worker_is_final(
    state: str, leg: Kind, policy: str, status: int
) -> None:
    router = at(state, "p1 p2 d1 d2 m1 m2", policy)
    out = fail(router, leg, status)
    outcome: Outcome = "failed" if status == 504 else "refused"
    assert out == [*LEFT[state, leg], Reply(1, 0, "", "why"), Terminal(1, outcome, "why")]
    assert_idle(router)


@failures
@pytest.mark.parametrize("status", [0, 200, 500, 502, 503])
def test_to_fail_is_the_default_and_says_nothing_more(state: str, leg: Kind, status: int) -> None:
    router = at(state, "p1 p2 d1 d2 m1 m2", "fail")
    out = fail(router, leg, status)
    assert out[len(LEFT[state, leg]) :] == [
        Reply(1, 502, f"{leg}_failed", "why"),
        Terminal(1, "failed", "why"),
    ]
    assert_idle(router)
    assert Router(max_inflight=1)._rescuer.policy == "fail"


@pytest.mark.parametrize("policy", FAILURE_POLICIES)
def test_after_the_first_byte_an_answer_is_cut(policy: str) -> None:
    router = at("STREAMING", "p1 p2 d1 d2 m1 m2", policy)
    assert fail(router, "decode", 0) == [Cut(1, "why"), Terminal(1, "failed", "why")]
    assert_idle(router)


@pytest.mark.parametrize("policy", RECOVERING)
def test_nothing_is_sent_again_when_the_deadline_has_passed(policy: str) -> None:
    router = at("PREFILLING", "p1 p2 d1 m1", policy)
    out = router.handle(LegFailed(1, 0, "prefill", 500, "why"), 100)  # its timer is late
    assert out == [Reply(1, 502, "prefill_failed", "why"), Terminal(1, "failed", "why")]


@pytest.mark.parametrize("policy", RECOVERING)
@pytest.mark.parametrize("end", ["deadline", "client"])
def test_deadline_and_client_hold_over_all_attempts(policy: str, end: str) -> None:
    router = at("PREFILLING", "p1 p2 d1 m1", policy)
    sent = fail(router, "prefill")[-1]
    assert isinstance(sent, SendPrefill | SendDecode)
    leg: Kind = "prefill" if isinstance(sent, SendPrefill) else "decode"
    cancelled = CancelLeg(1, 1, leg, sent.worker)
    if end == "client":
        wanted = [cancelled, Terminal(1, "cancelled", "the client went away")]
        assert router.handle(ClientGone(1), 3) == wanted
    else:
        assert router.handle(Wake(), 99) == [WakeAt(100)]
        out = router.handle(Wake(), 100)
        assert (out[0], out[-1]) == (cancelled, Terminal(1, "failed", "the deadline passed"))
    assert_idle(router)


@pytest.mark.parametrize("retries", [1, 3])
def test_retries_are_bounded_and_the_reason_says_so(retries: int) -> None:
    router = at("PREFILLING", "p1 p2 p3 d1", "retry-pair", retries=retries)
    used = ["p1"]
    for generation in range(retries):
        sent = fail(router, "prefill", generation=generation)[-1]
        assert isinstance(sent, SendPrefill)
        used.append(sent.worker)
    assert sorted(used[:3]) == ["p1", "p2", "p3"][: len(used)], "a worker that failed, again"
    out = fail(router, "prefill", generation=retries)
    reason = f"why; retry-pair: sent again {retries} of {retries} times"
    assert out == [
        Recovery(1, retries, "exhausted", "why"),
        Reply(1, 502, "prefill_failed", reason),
        Terminal(1, "failed", reason),
    ]
    assert (router.counts.retried, router.counts.exhausted) == (retries, 1)
    assert_idle(router)


def test_the_same_pair_is_tried_again_where_there_is_no_other() -> None:
    router = at("HANDOFF", "p1 d1", "retry-pair")
    assert fail(router, "decode")[-1] == SendPrefill(1, 1, "p1")
    assert router.handle(PrefillDone(1, 1), 3) == [SendDecode(1, 1, "d1", remote=True)]


@pytest.mark.parametrize(
    ("policy", "names", "reason"),
    [
        ("retry-pair", "p1 d1", "no prefill worker is up"),
        ("recompute-on-decode", "p1 d1", "no decode or mixed worker is up"),
        ("mixed-pool", "p1 d1", "no mixed worker is up"),
    ],
)
def test_it_fails_where_nobody_can_take_it(policy: str, names: str, reason: str) -> None:
    router = at("PREFILLING", names, policy)
    if policy == "recompute-on-decode":
        router.handle(WorkerGone("d1"), 1)
    out = fail(router, "prefill", 0, lost=True)
    reason = f"why; {policy}: {reason}"
    assert out == [
        Recovery(1, 0, "no_place", "why"),
        Reply(1, 502, "prefill_failed", reason),
        Terminal(1, "failed", reason),
    ]
    assert_idle(router)


def test_a_retry_that_finds_no_pair_falls_back_as_on_arrival_and_is_counted() -> None:
    router = at("PREFILLING", "p1 d1 m1", "retry-pair")
    out = fail(router, "prefill", 0, lost=True)
    assert out[-1] == SendDecode(1, 1, "m1", remote=False)
    assert (router.counts.retried, router.counts.fallback) == (1, 1)
    assert (router.counts.remote, router.counts.local) == (1, 0), "where it went at first"


@pytest.mark.parametrize("policy", RECOVERING)
def test_decode_gone_between_the_legs_is_a_failed_leg_too(policy: str) -> None:
    router = at("PREFILLING", "p1 d1 m1", policy)
    router.handle(WorkerGone("d1"), 1)
    out = router.handle(PrefillDone(1, 0), 2)
    assert out[0] == ReleaseHeld(1, 0, "p1")
    assert out[-1] == SendDecode(1, 1, "m1", remote=False)
    assert_one_leg(router, "m1")


def assert_one_leg(router: Router, worker: str) -> None:
    loads = {name: known.requests for name, known in router.workers.items() if known.requests}
    assert loads == {worker: 1}


@pytest.mark.parametrize("policy", RECOVERING)
def test_late_messages_of_the_old_attempt_are_dropped(policy: str) -> None:
    router = at("BOTH", "p1 p2 d1 d2 m1", policy)
    fail(router, "prefill")
    before = repr(router.requests[1])
    for message in (
        PrefillDone(1, 0),
        DecodeStarted(1, 0),
        LegEnded(1, 0),
        LegFailed(1, 0, "decode", 0, "late", lost=True),
    ):
        assert router.handle(message, 3) == []
    assert repr(router.requests[1]) == before
    assert all(worker.up for worker in router.workers.values())


def test_recomputing_stops_at_its_budget_and_starts_again_with_time() -> None:
    router = router_of("p1 d1", "recompute-on-decode", recompute_tokens_per_s=100)
    results = []
    for request_id, now_ns in ((1, 0), (2, 0), (3, 0), (4, NS_PER_S // 2), (5, NS_PER_S)):
        arrive(router, request_id, weight=50, left_ns=10**12)
        message = LegFailed(request_id, 0, "prefill", 500, "why")
        out = router.handle(message, now_ns)
        results += [effect.result for effect in out if isinstance(effect, Recovery)]
        if results[-1] == "over_budget":
            reply = next(effect for effect in out if isinstance(effect, Reply))
            assert (reply.status, reply.code) == (502, "prefill_failed")
            assert reply.reason.endswith("the budget for recomputed prompts is used up")
    assert results == ["recomputed", "recomputed", "over_budget", "recomputed", "recomputed"]
    assert (router.counts.recomputed, router.counts.over_budget) == (4, 1)


@given(
    per_s=st.integers(1, 1000),
    asked=st.lists(st.tuples(st.integers(0, 5 * NS_PER_S), st.integers(0, 3000)), max_size=30),
)
def test_a_budget_holds_over_every_stretch_of_time(
    per_s: int, asked: list[tuple[int, int]]
) -> None:
    budget = Budget(per_s)
    taken: list[tuple[int, int]] = []
    for now_ns, tokens in sorted(asked):
        if budget.take(tokens, now_ns):
            taken.append((now_ns, tokens))
    for i, (since_ns, _) in enumerate(taken):
        for j in range(i, len(taken)):
            spent = sum(n for _, n in taken[i:j]) + min(taken[j][1], per_s)
            assert spent * NS_PER_S <= per_s * (NS_PER_S + taken[j][0] - since_ns)


def test_a_budget_lets_one_large_prompt_through_and_is_paid_back() -> None:
    budget = Budget(100)
    assert budget.take(250, 0)
    assert not budget.take(1, 1_500_000_000)
    assert budget.take(1, 1_510_000_000)
    assert not budget.take(250, 2_000_000_000), "only a full one lets it through"
    assert budget.take(250, 2_520_000_000)


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(ValueError, match=r"failure_policy 'hope': fail, retry-pair, .* choices"):
        Router(max_inflight=1, failure_policy="hope")
    with pytest.raises(ValueError, match=f"retries 9: from 0 to {MOST_RETRIES} are right"):
        Router(max_inflight=1, failure_policy="retry-pair", retries=9)


def test_every_result_has_a_counter() -> None:
    assert get_args(RecoveryResult) == RECOVERIES
