"""The router with other policies than its first ones, and what it learns to feed them."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from tests.unit.harness import LAYOUT
from twofold.core.router import Router
from twofold.messages import (
    Arrive,
    DecodeStarted,
    LegEnded,
    LegFailed,
    PrefillDone,
    Reply,
    RouterEffect,
    SendDecode,
    SendPrefill,
    Terminal,
    WorkerSeen,
)

Role = Literal["prefill", "decode", "mixed"]
MS = 1_000_000
S = 1_000 * MS
BLOCK = LAYOUT.block_size


def router_of(names: str, *, blocks: int = 0, slots: int = 0, **settings: Any) -> Router:
    """Workers p..., d..., m... of the roles that their first letters say."""
    router = Router(max_inflight=100, **settings)
    for name in names.split():
        see(router, name, blocks=blocks, slots=slots)
    return router


def see(router: Router, name: str, life: str = "1", *, blocks: int = 0, slots: int = 0) -> None:
    roles: dict[str, Role] = {"p": "prefill", "d": "decode", "m": "mixed"}
    message = WorkerSeen(
        worker=name,
        role=roles[name[0]],
        engine_id=life,
        layout=LAYOUT,
        kv_blocks=blocks,
        max_num_seqs=slots,
    )
    assert router.handle(message, 0) == []


def arrive(
    router: Router, request_id: int, weight: int = 1_000, now_ns: int = 0, **more: Any
) -> RouterEffect:
    return router.handle(Arrive(request_id=request_id, weight=weight, **more), now_ns)[0]


def placed(effect: RouterEffect) -> str:
    assert isinstance(effect, SendPrefill | SendDecode), effect
    return effect.worker


def prefill(router: Router, request_id: int, now_ns: int = 0) -> str:
    return placed(router.handle(PrefillDone(request_id, 0), now_ns)[0])


def serve(router: Router, request_id: int, sent_ns: int, read_ns: int, weight: int = 1_000) -> str:
    """A request alone from beginning to end; the worker that read it."""
    worker = placed(arrive(router, request_id, weight, sent_ns))
    prefill(router, request_id, sent_ns + read_ns)
    router.handle(DecodeStarted(request_id, 0), sent_ns + read_ns)
    router.handle(LegEnded(request_id, 0), sent_ns + read_ns)
    return worker


@pytest.mark.parametrize("setting", ["prefill_policy", "decode_policy", "split_policy"])
def test_an_unknown_policy_is_named_with_the_choices(setting: str) -> None:
    with pytest.raises(ValueError, match=rf"{setting} 'best': .*, .* are the choices"):
        Router(max_inflight=1, **{setting: "best"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="admission 'all': none, ttft, joint, joint_predicted are"):
        Router(max_inflight=1, admission="all")


# --------------------------------------------------------------------------------- prefill


def test_rates_are_learnt_and_waiting_is_not_part_of_them() -> None:
    router = router_of("p1 p2 d", prefill_policy="projected_ttft")
    for i in range(4):  # four at once on each worker; p1 reads 10 times as fast
        assert [placed(arrive(router, 2 * i)), placed(arrive(router, 2 * i + 1))] == ["p1", "p2"]
    for i in range(4):
        prefill(router, 2 * i, (i + 1) * 100 * MS)
    for i in range(4):
        prefill(router, 2 * i + 1, (i + 1) * S)
    rates = [router.workers[name].reading.per_s for name in ("p1", "p2")]
    assert rates == [10_000, 1_000]
    chosen = [placed(arrive(router, 100 + i)) for i in range(11)]
    assert chosen == ["p1"] * 9 + ["p2", "p1"]


def test_a_cancelled_prompt_does_not_slow_the_next_ones_rate() -> None:
    router = router_of("p d", prefill_policy="projected_ttft")
    arrive(router, 1, 5_000)
    arrive(router, 2, 1_000)
    router.handle(LegFailed(1, 0, "prefill", 400, "no"), 3 * S)
    prefill(router, 2, 4 * S)
    assert router.workers["p"].reading.per_s == 1_000


def test_a_slow_handoff_counts_against_its_prefill_worker() -> None:
    router = router_of("p1 p2 d", prefill_policy="projected_ttft")
    for request_id in (1, 2):
        arrive(router, request_id)
    for request_id, handed_ns in ((1, S), (2, MS)):
        prefill(router, request_id, 100 * MS)
        router.handle(DecodeStarted(request_id, 0), 100 * MS + handed_ns)
    assert placed(arrive(router, 3)) == "p2"
    assert "p1 1100.0 ms, p2 101.0 ms" in router.why(3)[1]


def test_a_prefill_queue_over_its_budget_is_refused_and_can_be_tried_again() -> None:
    router = router_of("p1 p2 d", prefill_budget_tokens=1_500)
    for i in range(2):
        placed(arrive(router, i, 1_000))
    reason = "every prefill queue is over its budget"
    assert router.handle(Arrive(request_id=2, weight=501), 0) == [
        Reply(2, 429, "over_capacity", reason, 1),
        Terminal(2, "refused", reason),
    ]
    assert placed(arrive(router, 3, 500)) == "p1"
    prefill(router, 1)
    assert placed(arrive(router, 4, 1_500)) == "p2"


# -------------------------------------------------------------------------------- prefixes


def chain(*keys: int) -> dict[str, Any]:
    return {"block_keys": keys, "block_tokens": 100}


@pytest.mark.parametrize("policy", ["projected_ttft", "prefix_aware"])
def test_turns_of_a_session_and_siblings_at_once_meet_on_one_worker(policy: str) -> None:
    router = router_of("p1 p2 p3 d", prefill_policy=policy)
    first = placed(arrive(router, 1, 1_000, **chain(*range(10))))
    other = placed(arrive(router, 2, 1_000, **chain(*range(50, 60))))
    assert first != other
    for request_id in (1, 2):
        prefill(router, request_id, S)
    assert placed(arrive(router, 3, 1_100, S, **chain(*range(50, 61)))) == other
    assert placed(arrive(router, 4, 1_100, S, **chain(*range(11)))) == first
    assert router.workers[other].queued_tokens == 100
    # Before the first of them has been read, three siblings follow it.
    lone = placed(arrive(router, 5, 1_000, S, **chain(*range(70, 80))))
    for i in range(3):
        sibling = placed(arrive(router, 6 + i, 1_000, S, **chain(*range(70, 80))))
        assert sibling == lone


def test_a_worker_in_a_new_life_has_nothing_cached() -> None:
    router = router_of("p1 p2 d", prefill_policy="prefix_aware")
    arrive(router, 1, 1_000, **chain(1, 2))
    assert placed(arrive(router, 2, 1_001, **chain(9))) == "p2"
    for request_id in (1, 2):
        prefill(router, request_id, S)
    see(router, "p2", "1")
    assert placed(arrive(router, 3, 200, S, **chain(9, 10))) == "p2"
    see(router, "p2", "2")
    assert placed(arrive(router, 4, 200, S, **chain(9, 10))) == "p1"


SIZE = BLOCK * BLOCK  # tokens of a key, here


@pytest.mark.parametrize(
    ("blocks", "uncached"), [(0, 100), (25 * BLOCK, 100), (24 * BLOCK, 100 + SIZE)]
)
def test_no_more_is_remembered_of_a_worker_than_its_pool_holds(blocks: int, uncached: int) -> None:
    router = router_of("p d", prefill_policy="prefix_aware", blocks=blocks)
    for i, keys in enumerate((range(10), range(50, 65))):
        arrive(router, i, len(keys) * SIZE, block_keys=tuple(keys), block_tokens=SIZE)
        prefill(router, i)
    arrive(router, 9, 10 * SIZE + 100, block_keys=tuple(range(10)), block_tokens=SIZE)
    assert router.workers["p"].queued_tokens == uncached


def test_unique_prompts_spread_and_a_hot_worker_does_not_end_affinity() -> None:
    router = router_of("p1 p2 p3 p4 d", prefill_policy="prefix_aware")
    at: dict[int, str] = {}
    for i in range(40):
        at[i] = placed(arrive(router, i, 1_000, **chain(*range(100 * i, 100 * i + 10))))
    assert [list(at.values()).count(f"p{i}") for i in range(1, 5)] == [10] * 4
    for i in range(40):
        prefill(router, i, S)
    placed(arrive(router, 100, 1_000_000, S))  # no keys: p1 gets it and is hot
    hits = [
        placed(arrive(router, 200 + i, 1_000, S, **chain(*range(100 * i, 100 * i + 10))))
        for i in range(40)
    ]
    moved = [i for i in range(40) if hits[i] != at[i]]
    assert moved == [i for i in range(40) if at[i] == "p1"]
    assert "p1" not in hits


# ---------------------------------------------------------------------------------- decode


def test_step_times_are_learnt_per_decode_worker() -> None:
    router = router_of("p d1 d2", decode_policy="projected_tpot")
    for request_id in (1, 2):
        arrive(router, request_id)
        prefill(router, request_id)
        router.handle(DecodeStarted(request_id, 0), 0)
    assert [router.requests[i].decode for i in (1, 2)] == ["d1", "d2"]
    router.handle(LegEnded(1, 0, 101), S)  # 10 ms a token
    router.handle(LegEnded(2, 0, 11), S)  # 100 ms a token
    for i in range(3, 6):
        arrive(router, i)
        assert prefill(router, i) == "d1"


def test_a_new_decode_worker_is_not_taken_for_free() -> None:
    router = router_of("p d1", decode_policy="projected_tpot")
    arrive(router, 1)
    prefill(router, 1)
    router.handle(DecodeStarted(1, 0), 0)
    router.handle(LegEnded(1, 0, 101), S)
    see(router, "d2")
    chosen = []
    for i in range(2, 6):
        arrive(router, i)
        chosen.append(prefill(router, i))
    assert chosen == ["d1", "d2", "d1", "d2"]


def test_blocks_are_reserved_for_prompt_and_answer() -> None:
    router = router_of("p d1 d2", blocks=100, decode_policy="free_blocks")
    arrive(router, 1, 10 * BLOCK, max_tokens=50 * BLOCK)
    prefill(router, 1)
    assert router.workers["d1"].used_blocks == 60
    for i, worker in ((2, "d2"), (3, "d2"), (4, "d1")):
        arrive(router, i, 10 * BLOCK, max_tokens=20 * BLOCK - 1)
        assert prefill(router, i) == worker
    router.handle(LegFailed(1, 0, "decode", 500, "no"), 0)
    assert router.workers["d1"].used_blocks == 30


def test_answers_of_each_predicted_length_are_spread() -> None:
    router = router_of("p d1 d2", decode_policy="length_buckets")
    chosen = []
    for i, predicted in enumerate((4_000, 50, 4_000, 50)):
        arrive(router, i, predicted_tokens=predicted)
        chosen.append(prefill(router, i))
    assert chosen == ["d1", "d2", "d2", "d1"]


# ----------------------------------------------------------------------------------- split


def test_never_splits() -> None:
    router = router_of("p d1 d2", split_policy="never")
    assert [arrive(router, i) for i in (1, 2)] == [
        SendDecode(1, 0, "d1", remote=False),
        SendDecode(2, 0, "d2", remote=False),
    ]
    assert (router.counts.local, router.counts.remote, router.counts.fallback) == (2, 0, 0)


def test_projected_reads_prompts_on_decode_until_it_costs_more_than_handing_over() -> None:
    """Long before any is due there, a prompt of the same length goes both ways."""
    router = router_of("p d", split_policy="projected")
    assert isinstance(arrive(router, 1), SendPrefill)
    prefill(router, 1, 100 * MS)
    router.handle(DecodeStarted(1, 0), 250 * MS)  # the handoff takes longer than the work
    router.handle(LegEnded(1, 0), S)
    assert arrive(router, 2, now_ns=S) == SendDecode(2, 0, "d", remote=False)
    router.handle(DecodeStarted(2, 0), S + 100 * MS)
    assert arrive(router, 3, now_ns=S + 100 * MS) == SendDecode(3, 0, "d", remote=False)
    router.handle(DecodeStarted(3, 0), S + 200 * MS)
    # Two answers under way there: 100 ms of work, 200 ms of delay to them, against 250 ms.
    assert isinstance(arrive(router, 4, now_ns=S + 200 * MS), SendPrefill)
    assert router.why(4) == (
        "two legs take less time: d 300.0 ms, p and handoff 250.0 ms",
        "fewest queued tokens: p 0 tokens",
    )


def test_threshold_counts_uncached_tokens() -> None:
    router = router_of("p d", split_policy="threshold", local_below_tokens=300)
    assert isinstance(arrive(router, 1, 1_000, **chain(*range(10))), SendPrefill)
    prefill(router, 1)
    assert isinstance(arrive(router, 2, 1_200, **chain(*range(10), 11, 12)), SendDecode)
    assert isinstance(arrive(router, 3, 1_300, **chain(*range(10), 13, 14, 15)), SendPrefill)


def test_mixed_pool_draws_workers_in_and_lets_them_go() -> None:
    router = router_of("p d", split_policy="mixed_pool", mixed_above_tokens=1_500, blocks=9_000)
    for i in (1, 2):
        assert isinstance(arrive(router, i), SendPrefill)
    assert arrive(router, 3) == SendDecode(3, 0, "d", remote=False)
    for i in (1, 2):
        prefill(router, i)
    assert isinstance(arrive(router, 4), SendPrefill)
    # Decode's pool holds no more blocks: the prefill worker does both.
    arrive(router, 5, max_tokens=BLOCK)
    blocks = router.workers["d"].used_blocks
    wide = (9_000 - blocks) * BLOCK + 1
    prefill(router, 4)
    prefill(router, 5)
    assert arrive(router, 6, 10, max_tokens=wide) == SendDecode(6, 0, "p", remote=False)
    assert router.why(6)[0].startswith("one leg, a prefill worker joins the mixed pool")


def test_without_a_pair_one_leg_at_a_mixed_worker_is_a_fallback() -> None:
    router = router_of("p m", split_policy="projected")
    assert arrive(router, 1) == SendDecode(1, 0, "m", remote=False)
    assert router.counts.fallback == 1


# ------------------------------------------------------------------------------- admission


def test_what_cannot_be_in_time_is_refused_before_any_work() -> None:
    router = router_of("p d", admission="ttft", ttft_goal_ns=S)
    for i in range(10):
        assert isinstance(arrive(router, i, 1_000), SendPrefill)
    reply = arrive(router, 10, 1_000)
    assert isinstance(reply, Reply)
    assert (reply.status, reply.code, reply.retry_after_s) == (429, "over_capacity", 1)
    assert reply.reason == "the first token is projected after 1100 ms, 1000 ms is the limit"
    assert router.counts.refused == 1
    prefill(router, 0, 100 * MS)
    assert isinstance(arrive(router, 11, 1_000), SendPrefill)


def test_a_requests_own_deadline_is_a_limit_too() -> None:
    router = router_of("p d", admission="ttft", ttft_goal_ns=10 * S)
    assert isinstance(arrive(router, 1, 1_000, time_left_ns=100 * MS), SendPrefill)
    assert isinstance(arrive(router, 2, 1_000, time_left_ns=199 * MS), Reply)
    assert isinstance(arrive(router, 3, 1_000, time_left_ns=200 * MS), SendPrefill)
    assert isinstance(arrive(router, 4, 98_001), Reply)


def test_joint_admission_sees_a_burst_before_it_reaches_decode() -> None:
    router = router_of("p d", admission="joint", slots=3)
    effects = [arrive(router, i) for i in range(5)]
    assert [isinstance(effect, SendPrefill) for effect in effects] == [True] * 3 + [False] * 2
    for i in range(3):
        prefill(router, i)
        router.handle(DecodeStarted(i, 0), 0)
    assert isinstance(arrive(router, 5), Reply)
    router.handle(LegEnded(0, 0), S)
    assert isinstance(arrive(router, 6), SendPrefill)


def test_admission_looks_at_the_one_worker_of_one_leg() -> None:
    router = router_of("m", admission="joint", slots=2, ttft_goal_ns=S)
    assert isinstance(arrive(router, 1, 9_000), SendDecode)
    late = arrive(router, 2, 2_000)
    assert isinstance(late, Reply)
    assert late.reason.startswith("the first token is projected after 1100 ms")
    assert isinstance(arrive(router, 3, 1_000), SendDecode)
    full = arrive(router, 4, 0)
    assert isinstance(full, Reply)
    assert full.reason == "no decode worker has room"


def test_why_names_each_choice_in_order() -> None:
    router = router_of("p d1 d2")
    arrive(router, 1)
    assert router.why(1) == ("two legs", "fewest queued tokens: p 0 tokens")
    prefill(router, 1)
    assert router.why(1)[2] == "fewest sequences: d1 0 sequences, d2 0 sequences"
