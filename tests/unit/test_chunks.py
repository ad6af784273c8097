"""Chunk policies in the engine: what a step has for prompts, and what is learned of step times."""

from __future__ import annotations

import pytest

from tests.unit.harness import MS, FakeWorker
from tests.unit.test_engine import submit, work_of
from twofold.core.chunks import Chunks, make_chunks
from twofold.messages import RunStep

NS_PER_TOKEN = 10_000


def step(*work: int) -> RunStep:
    """A step with a row for each of these numbers of tokens."""
    return RunStep(1, tuple((i, 0, n) for i, n in enumerate(work)))


def took(chunks: Chunks, work: RunStep, ns: int) -> None:
    chunks.began(5)
    chunks.ended(work, 5 + ns)


def test_the_default_policy_asks_nobody() -> None:
    assert make_chunks("fixed", 7, 7, 7) is None


@pytest.mark.parametrize(
    ("policy", "words"),
    [("best", "chunk_policy 'best': fixed, capped, tpot_goal are"), ("capped", "chunk_cap_tokens")],
)
def test_a_policy_that_cannot_work_is_refused(policy: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FakeWorker("w", chunk_policy=policy)
    with pytest.raises(ValueError, match="needs a goal"):
        FakeWorker("w", chunk_policy="tpot_goal")


def test_a_cap_holds_for_all_prompts_of_a_step_together() -> None:
    # Without a cache, so that no block which becomes known is a reason to look again.
    limits = {"max_num_batched_tokens": 16, "n_blocks": 64, "prefix_caching": False}
    worker = FakeWorker("w", chunk_policy="capped", chunk_cap_tokens=5, **limits)
    worker.send(submit(1, 4, max_tokens=9))
    worker.finish_step()
    worker.send(submit(2, 7, max_tokens=2))
    worker.send(submit(3, 6, max_tokens=2))
    seen = []
    for _ in range(4):
        worker.finish_step()
        seen.append(work_of(worker))
    # A prompt that was left out for want of budget is tried again: 3 starts with 2's last tokens.
    assert seen[:3] == [{1: 1, 2: 5}, {1: 1, 2: 2, 3: 3}, {1: 1, 2: 1, 3: 3}]
    worker.run()
    for request_id in (1, 2, 3):
        worker.verify_output(request_id)
    worker.verify_idle()


def test_steps_of_a_pipeline_took_what_passed_since_each_began() -> None:
    chunks = Chunks("tpot_goal", 0, 100 * MS, 1)
    chunks.began(0)
    chunks.began(10 * MS)
    chunks.began(20 * MS)
    chunks.ended(step(1, 1), 40 * MS)
    assert chunks._decode_ns == 40 * MS
    chunks.failed()
    chunks.ended(step(1, 1), 50 * MS)
    assert chunks._decode_ns == 30 * MS


def test_a_step_that_fails_is_no_measure() -> None:
    worker = FakeWorker("w", chunk_policy="tpot_goal", chunk_goal_ns=100 * MS)
    worker.send(submit(1, 4), 0)
    worker.fail_step(7 * MS)
    worker.send(submit(2, 4, max_tokens=2), 10 * MS)
    worker.finish_step(12 * MS)
    worker.finish_step(15 * MS)
    chunks = worker.core.engine.chunks
    assert chunks is not None
    assert chunks._decode_ns == 3 * MS


def test_a_goal_leaves_prompts_what_decoding_does_not_take() -> None:
    """Steps of 2 ms for decoding and 10 us a prompt token, 3 ms wanted: 100 tokens."""
    chunks = Chunks("tpot_goal", cap_tokens=0, goal_ns=3 * MS, least_tokens=4)
    assert chunks.tokens(2000, 8) == 2000, "nothing is known yet"
    took(chunks, step(50), 4 * MS)
    assert chunks.tokens(2000, 0) == 2000, "nobody decodes"
    assert chunks.tokens(2000, 8) == 37, "80 us a token is the most that it can be"
    took(chunks, step(1, 1), 2 * MS)
    took(chunks, step(1, 1, 50), 2 * MS + 50 * NS_PER_TOKEN)
    assert chunks.tokens(2000, 8) == 100
    assert chunks.tokens(30, 8) == 30
    took(chunks, step(1, 1), 4 * MS)
    assert chunks.tokens(2000, 8) == 4, "over the goal already: prompts move all the same"


def test_only_the_last_decode_step_counts() -> None:
    """So that many that are alike may be crossed at once."""
    one, other = (Chunks("tpot_goal", 0, 3 * MS, 4) for _ in range(2))
    for chunks in (one, other):
        took(chunks, step(1, 40), 2 * MS)
    for ns in (1 * MS, 5 * MS, 2 * MS):
        took(one, step(1), ns)
    took(other, step(1), 2 * MS)
    assert one.tokens(2000, 1) == other.tokens(2000, 1)


def test_the_engine_tells_how_long_its_steps_took() -> None:
    worker = FakeWorker(
        "w", max_num_batched_tokens=64, n_blocks=64, chunk_policy="tpot_goal", chunk_goal_ns=3 * MS
    )
    worker.send(submit(1, 4, max_tokens=40))
    now_ns = [0]

    def finish() -> None:
        """2 ms, and 200 us for each prompt token."""
        now_ns[0] += 2 * MS + sum(n for n in work_of(worker).values() if n > 1) * 200_000
        worker.finish_step(now_ns[0])

    finish()
    finish()
    worker.send(submit(2, 60), now_ns[0])
    finish()
    # All that is known is a step of 4 prompt tokens, 2.8 ms: 700 us each, with 1 ms to spend.
    assert work_of(worker) == {1: 1, 2: 4}, "a block at least"
    finish()
    assert work_of(worker) == {1: 1, 2: 5}, "200 us each now"
    worker.run()
    worker.verify_output(1)
    worker.verify_output(2)
    worker.verify_idle()
