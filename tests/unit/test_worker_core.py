"""The whole core of a worker: odd messages, deadlines, replay."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.harness import LAYOUT, MS, B, FakeWorker
from tests.unit.harness_pair import Pair
from twofold.core.worker import WorkerCore
from twofold.messages import (
    Abort,
    Claim,
    Closed,
    Digested,
    Done,
    Ended,
    FromPeer,
    Grant,
    Heartbeat,
    PeerLost,
    ReadDone,
    Refusal,
    Release,
    Submit,
    Wake,
    WakeAt,
    WorkerMessage,
)

NOBODY = 4242
ODD: list[WorkerMessage] = [
    Abort(NOBODY),
    Release(NOBODY, 0),
    Digested(NOBODY, (1, 2)),
    ReadDone(NOBODY, ok=True),
    ReadDone(NOBODY, ok=False, reason="late"),
    PeerLost("stranger"),
    Wake(),
    FromPeer("stranger", Grant(NOBODY, 0, (1, 2), (0,), (9,), "s", 0, 1)),
    FromPeer("stranger", Refusal(NOBODY, 0, "no")),
    FromPeer("stranger", Closed(NOBODY, 0, valid=True)),
    FromPeer("stranger", Done(NOBODY, 0, ok=True)),
    FromPeer("stranger", Heartbeat(((NOBODY, 0), (1, 0)))),
    FromPeer("stranger", Heartbeat(())),
    FromPeer("stranger", Claim(NOBODY, 0, LAYOUT)),
]


@pytest.mark.parametrize("message", ODD)
def test_messages_about_nobody_change_nothing(message: WorkerMessage) -> None:
    worker = FakeWorker("w")
    worker.send(Submit(request_id=1, tokens=(1, 2, 3, 4, 5), max_tokens=3, hold=True))
    worker.send(message)
    worker.run()
    worker.send(message)
    worker.send(Release(1, 0))
    worker.digests.clear()
    assert worker.ended[1].held
    worker.verify_output(1)
    worker.verify_idle()


def test_deadline_fails_a_running_request_and_frees_it() -> None:
    worker = FakeWorker("w")
    effects = worker.send(
        Submit(request_id=1, tokens=(1, 2), max_tokens=50, time_left_ns=20 * MS), 5 * MS
    )
    assert WakeAt(25 * MS) in effects
    worker.finish_step(24 * MS)
    worker.send(Wake(), 25 * MS)
    assert (worker.ended[1].outcome, worker.ended[1].reason) == ("failed", "deadline")
    worker.run(26 * MS)
    worker.verify_idle()


def test_deadline_ends_with_its_request() -> None:
    worker = FakeWorker("w")
    worker.send(Submit(request_id=1, tokens=(1, 2), max_tokens=1, time_left_ns=20 * MS))
    worker.run()
    assert len(worker.core.timers) == 0
    assert worker.send(Wake(), 20 * MS) == []
    worker.verify_idle()


def test_wake_that_comes_a_hair_early_is_asked_for_again() -> None:
    worker = FakeWorker("w")
    worker.send(Submit(request_id=1, tokens=(1, 2), max_tokens=50, time_left_ns=20 * MS))
    assert worker.send(Wake(), 20 * MS - 1) == [WakeAt(20 * MS)]


def test_deadline_of_a_refused_request_is_not_kept() -> None:
    worker = FakeWorker("w")
    worker.send(Submit(request_id=1, tokens=(), max_tokens=5, time_left_ns=1))
    assert worker.ended[1].reason == "empty_prompt"
    worker.verify_idle()


def test_prompt_of_one_token_is_held_though_it_has_no_blocks_to_give() -> None:
    worker = FakeWorker("w", lease_ns=9)
    worker.send(Submit(request_id=1, tokens=(3,), max_tokens=1, hold=True))
    worker.run()
    assert worker.digests[0].blocks == ()
    assert worker.core.source.holds(1)
    worker.digest()
    worker.send(Wake(), 9)
    assert not worker.core.source.holds(1)
    worker.verify_idle()


def test_held_blocks_serve_later_prompts_and_outlive_their_hold() -> None:
    worker = FakeWorker("w", n_blocks=5)
    tokens = tuple(range(2 * B + 2))
    worker.send(Submit(request_id=1, tokens=tokens, max_tokens=1, hold=True))
    worker.run()
    assert worker.core.pool.counts().held == 3
    worker.send(Submit(request_id=2, tokens=(*tokens[: 2 * B], 9), max_tokens=4))
    worker.send(Release(1, 0))
    assert worker.core.pool.counts().held == 0
    worker.run()
    assert worker.ended[2].n_cached == 2 * B
    worker.verify_output(2)
    worker.digests.clear()
    worker.verify_idle()


def test_full_pool_of_holds_lets_nobody_in_until_a_lease_ends() -> None:
    worker = FakeWorker("w", n_blocks=3, lease_ns=9, prefix_caching=False)
    worker.send(Submit(request_id=1, tokens=tuple(range(3 * B)), max_tokens=1, hold=True))
    worker.run()
    worker.send(Submit(request_id=2, tokens=(1, 2, 3), max_tokens=1), 5)
    assert worker.step is None
    worker.send(Wake(), 9)
    worker.run(9)
    worker.verify_output(2)
    worker.digests.clear()
    worker.verify_idle()


def test_reused_request_id_is_a_drivers_fault() -> None:
    worker = FakeWorker("w")
    asked = Submit(request_id=1, tokens=(1, 2), max_tokens=2)
    worker.send(asked)
    with pytest.raises(AssertionError, match="reused a request id"):
        worker.core.handle(asked, 0)


def test_check_sees_a_block_that_leaks() -> None:
    worker = FakeWorker("w")
    worker.core.pool.allocate(1)
    with pytest.raises(AssertionError, match="block 0 leaks"):
        worker.core.check()


@settings(max_examples=60)
@given(st.lists(st.integers(0, 10**6), min_size=10, max_size=60))
def test_recorded_inbox_gives_the_same_effects_on_a_fresh_core(moves: list[int]) -> None:
    pair = Pair(p={"n_blocks": 9}, d={"n_blocks": 7})
    inboxes: dict[str, list[tuple[WorkerMessage, int]]] = {"P": [], "D": []}
    effects: dict[str, list[object]] = {"P": [], "D": []}
    for name, worker in pair.workers.items():
        record(worker.core, inboxes[name], effects[name])
    for move in moves:
        kind = move % 8
        if kind == 0:
            pair.prefill(tuple((move // 8 + i) % 5 for i in range(1 + move // 8 % 11)))
        elif kind == 1 and pair.handles:
            pair.decode(pair.handles.pop(), max_tokens=1 + move // 8 % 7)
        elif kind == 2:
            pair.advance(move // 8 % 300 * MS)
        elif kind == 3 and pair.net:
            pair.net.pop(move // 8 % len(pair.net))
        elif kind == 4 and pair.d.submitted:
            live = list(pair.d.submitted)
            pair.send(pair.d, Abort(live[move // 8 % len(live)]))
        else:
            pair.busy()
    pair.quiesce()
    for name, settings_ in (("P", 9), ("D", 7)):
        fresh = FakeWorker(name, n_blocks=settings_).core
        again = [fresh.handle(message, now_ns) for message, now_ns in inboxes[name]]
        assert again == effects[name]
        wire = msgspec.msgpack.encode(again)
        assert wire == msgspec.msgpack.encode(effects[name])


def record(core: WorkerCore, inbox: list[tuple[WorkerMessage, int]], effects: list[object]) -> None:
    """Write down what `core` is told and what it answers."""
    handle = core.handle

    def recorded(message: WorkerMessage, now_ns: int) -> list[object]:
        inbox.append((message, now_ns))
        out = handle(message, now_ns)
        effects.append(list(out))
        return list(out)

    core.handle = recorded  # type: ignore[method-assign, assignment]


def test_ended_says_what_became_of_a_request() -> None:
    worker = FakeWorker("w")
    worker.send(Submit(request_id=1, tokens=(1, 2, 3), max_tokens=2))
    worker.run()
    assert worker.ended[1] == Ended(
        request_id=1,
        outcome="finished",
        reason="length",
        n_prompt=3,
        n_output=2,
        n_cached=0,
        n_preempted=0,
    )
