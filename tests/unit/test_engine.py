"""The engine by itself, on one worker: what goes into a step, and who waits for whom."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.harness import FakeWorker, kv_of, next_token, reference
from twofold.messages import Abort, RunStep, Submit, Wake
from twofold.policy import batch

B = 4


def submit(request_id: int, n_prompt: int, **kwargs: Any) -> Submit:
    """A request whose prompt shares nothing with that of another id."""
    tokens = tuple((request_id * 31 + i) % 97 for i in range(n_prompt))
    return Submit(request_id=request_id, tokens=tokens, **{"max_tokens": 3, **kwargs})


def work_of(worker: FakeWorker) -> dict[int, int]:
    """Tokens per request in the step in flight, in the step's order."""
    assert worker.step is not None
    return {request_id: n for request_id, _, n in worker.step.work}


# ------------------------------------------------------------------------------ steps


def test_a_prompt_goes_in_chunks_within_the_budget() -> None:
    worker = FakeWorker("w", max_num_batched_tokens=8)
    worker.send(submit(1, 19))
    seen = []
    while worker.step is not None:
        seen.append(work_of(worker)[1])
        worker.finish_step()
    assert seen == [8, 8, 3, 1, 1]
    worker.verify_output(1)


def test_decodes_go_first_then_chunks_of_what_is_left() -> None:
    worker = FakeWorker("w", max_num_batched_tokens=8, n_blocks=32)
    worker.send(submit(1, 5, max_tokens=9))
    worker.finish_step()
    worker.send(submit(2, 6, max_tokens=9))
    worker.finish_step()
    worker.finish_step()
    worker.send(submit(3, 20, max_tokens=9))
    worker.send(submit(4, 3, max_tokens=9))
    worker.finish_step()
    assert list(work_of(worker).items()) == [(1, 1), (2, 1), (3, 6)]
    worker.finish_step()
    worker.finish_step()
    assert list(work_of(worker).items()) == [(1, 1), (2, 1), (3, 6)]
    worker.finish_step()
    assert list(work_of(worker).items()) == [(1, 1), (2, 1), (3, 2), (4, 3)]
    worker.run()
    for request_id in (1, 2, 3, 4):
        worker.verify_output(request_id)
    worker.verify_idle()


def test_never_more_sequences_than_max_num_seqs() -> None:
    worker = FakeWorker("w", max_num_seqs=2, n_blocks=64)
    for i in range(1, 6):
        worker.send(submit(i, 3))
    worker.finish_step()
    assert list(work_of(worker)) == [1, 2]
    worker.run()
    assert all(len(step.work) <= 2 for step in worker.steps)
    worker.verify_idle()


def test_a_step_smaller_than_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens 3 is below max_num_seqs 4"):
        FakeWorker("w", max_num_seqs=4, max_num_batched_tokens=3)


@pytest.mark.parametrize("n_prompt", [1, B - 1, B, B + 1, 2 * B, 3 * B, 3 * B + 5])
@pytest.mark.parametrize("max_tokens", [1, 2, B, B + 1])
def test_any_length_gives_the_reference_and_gives_all_blocks_back(
    n_prompt: int, max_tokens: int
) -> None:
    worker = FakeWorker("w")
    for request_id in (1, 2):  # the second finds the first one's blocks in the cache
        asked = submit(1, n_prompt, max_tokens=max_tokens)
        worker.send(Submit(request_id=request_id, tokens=asked.tokens, max_tokens=max_tokens))
        worker.run()
        worker.verify_output(request_id)
        assert len(worker.outputs[request_id]) == max_tokens
    assert worker.ended[1].n_cached == 0
    assert worker.ended[2].n_cached == (n_prompt - 1) // B * B
    worker.verify_idle()


def test_a_prompt_of_whole_blocks_needs_no_block_for_its_only_token() -> None:
    worker = FakeWorker("w", n_blocks=3)
    worker.send(submit(1, 3 * B, max_tokens=1))
    worker.run()
    assert worker.ended[1].outcome == "finished"
    worker.send(submit(2, 3 * B, max_tokens=2))
    assert worker.ended[2].reason == "never_fits"


# ------------------------------------------------------------------------------- ends


def test_stop_token_ends_the_answer() -> None:
    plain = submit(1, 6, max_tokens=30)
    answer, _ = reference(plain)
    stop = answer[2]
    asked = submit(1, 6, max_tokens=30, stop_token_ids=(stop,))
    worker = FakeWorker("w")
    worker.send(asked)
    worker.run()
    assert worker.ended[1].reason == "stop"
    assert worker.outputs[1] == answer[: answer.index(stop) + 1]


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 5])
def test_stop_tokens_count_only_after_min_tokens(min_tokens: int) -> None:
    asked = submit(1, 6, max_tokens=8, min_tokens=min_tokens, stop_token_ids=(0, 1, 2, 3, 4))
    worker = FakeWorker("w")
    worker.send(asked)
    worker.run()
    assert (len(worker.outputs[1]), worker.ended[1].reason) == (min_tokens + 1, "stop")


def test_stop_token_that_is_the_last_allowed_one_is_a_stop() -> None:
    worker = FakeWorker("w")
    worker.send(submit(1, 6, max_tokens=1, stop_token_ids=(0, 1, 2, 3, 4)))
    worker.run()
    assert worker.ended[1].reason == "stop"


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "reason"),
    [
        (0, 3, "empty_prompt"),
        (5, 0, "no_tokens"),
        (5, -1, "no_tokens"),
        (17, 4, "too_long"),
        (12, 6, "never_fits"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(
    n_prompt: int, max_tokens: int, reason: str
) -> None:
    worker = FakeWorker("w", max_model_len=20, n_blocks=4)
    effects = worker.send(submit(1, n_prompt, max_tokens=max_tokens))
    assert len(effects) == 1
    assert (worker.ended[1].outcome, worker.ended[1].reason) == ("refused", reason)
    worker.verify_idle()


def test_just_fitting_requests_are_served() -> None:
    worker = FakeWorker("w", max_model_len=20, n_blocks=4)
    worker.send(submit(1, 12, max_tokens=5))
    worker.run()
    worker.send(submit(2, 12, max_tokens=5))
    worker.run()
    assert [worker.ended[i].outcome for i in (1, 2)] == ["finished", "finished"]
    worker.verify_output(2)


def test_a_full_queue_refuses() -> None:
    worker = FakeWorker("w", max_num_seqs=1, max_waiting=2)
    for i in range(1, 5):
        worker.send(submit(i, 3))
    assert worker.ended[4].reason == "queue_full"
    worker.run()
    assert sorted(worker.ended) == [1, 2, 3, 4]
    worker.send(submit(5, 3))
    worker.run()
    worker.verify_output(5)


def test_abort_in_a_step_keeps_its_blocks_until_the_step_is_done() -> None:
    worker = FakeWorker("w", n_blocks=4)
    worker.send(submit(1, 12))
    worker.send(Abort(1))
    assert worker.ended[1].outcome == "cancelled"
    assert worker.core.pool.counts().active == 3
    worker.send(submit(2, 12))
    worker.finish_step()
    worker.run()
    worker.verify_output(2)
    worker.verify_idle()


def test_abort_of_a_waiting_and_of_an_unknown_request() -> None:
    worker = FakeWorker("w", max_num_seqs=1)
    worker.send(submit(1, 5))
    worker.send(submit(2, 5))
    worker.send(Abort(2, "failed", "why not"))
    assert (worker.ended[2].outcome, worker.ended[2].reason) == ("failed", "why not")
    worker.send(Abort(2))
    worker.send(Abort(77))
    worker.run()
    worker.send(Abort(1))
    worker.verify_output(1)
    worker.verify_idle()


def test_stop_string_found_by_the_driver_is_a_finish() -> None:
    worker = FakeWorker("w")
    worker.send(submit(1, 5, max_tokens=50))
    worker.finish_step()
    worker.send(Abort(1, "finished", "stop"))
    worker.run()
    assert (worker.ended[1].outcome, worker.ended[1].n_output) == ("finished", 1)
    worker.verify_idle()


def test_failed_step_fails_its_requests_and_no_others() -> None:
    worker = FakeWorker("w", max_num_seqs=2)
    for i in (1, 2, 3):
        worker.send(submit(i, 5))
    worker.finish_step()
    worker.send(Abort(1))
    worker.fail_step()
    worker.run()
    assert [worker.ended[i].outcome for i in (1, 2, 3)] == ["cancelled", "failed", "finished"]
    worker.send(Submit(request_id=4, tokens=submit(2, 5).tokens, max_tokens=3))
    worker.run()
    worker.verify_output(3)
    worker.verify_output(4)  # nothing of the broken step was believed to be in the cache
    worker.verify_idle()


# ------------------------------------------------------------------- preemption, waiting


def test_the_youngest_gives_way_and_comes_back_with_the_same_text() -> None:
    worker = FakeWorker("w", n_blocks=8, max_num_seqs=3, max_num_batched_tokens=32)
    for i in (1, 2, 3):
        worker.send(submit(i, 2 * B - 1, max_tokens=2 * B + 2))
    worker.run()
    assert worker.ended[1].n_preempted == 0
    assert worker.ended[3].n_preempted > 0
    assert worker.core.engine.n_preemptions == sum(e.n_preempted for e in worker.ended.values())
    for i in (1, 2, 3):
        worker.verify_output(i)
    worker.verify_idle()


def test_small_requests_pass_a_big_one_that_cannot_be_placed() -> None:
    worker = FakeWorker("w", n_blocks=8, max_num_batched_tokens=32)
    worker.send(submit(1, 3 * B, max_tokens=20))
    worker.send(submit(2, 6 * B))
    worker.send(submit(3, 3))
    worker.finish_step()
    assert list(work_of(worker)) == [1, 3]
    worker.run()
    for i in (1, 2, 3):
        worker.verify_output(i)
    worker.verify_idle()


def stream_past(worker: FakeWorker, big: int, first: int, small: Any, limit: int) -> int:
    """Keep four small requests waiting at all times; steps until `big` has ended."""
    n = first
    for step in range(limit):
        while len(worker.core.engine.waiting) < 4:
            worker.send(submit(n, **small))
            n += 1
        if big in worker.ended:
            return step
        worker.finish_step()
    raise AssertionError(f"the big request starves: {limit} steps")


@pytest.mark.parametrize("max_num_seqs", [3, 4, 8])
def test_endless_small_requests_do_not_starve_a_big_one(max_num_seqs: int) -> None:
    small = {"n_prompt": 5, "max_tokens": 6}
    worker = FakeWorker("w", n_blocks=9, max_num_seqs=max_num_seqs, max_num_batched_tokens=16)
    for i in (1, 2, 3):
        worker.send(submit(i, **small))
    worker.send(submit(4, 8 * B, max_tokens=3))
    steps = stream_past(worker, 4, 5, small, 400)
    worker.verify_output(4)
    assert worker.ended[4].outcome == "finished"
    assert steps < 8 * batch.PREEMPT_AFTER


def test_no_starvation_on_a_prefill_worker_whose_pool_is_partly_held() -> None:
    lease_ns = 1000
    small = {"n_prompt": 5, "max_tokens": 1, "hold": True}
    worker = FakeWorker("w", n_blocks=9, max_num_batched_tokens=16, lease_ns=lease_ns)
    for i in (1, 2, 3):
        worker.send(submit(i, **small))
    worker.send(submit(4, 8 * B, max_tokens=1, hold=True))
    now, n = 0, 5
    for _ in range(3 * batch.RESERVE_AFTER):
        while len(worker.core.engine.waiting) < 4:
            worker.send(submit(n, **small), now)
            n += 1
        if 4 in worker.ended:
            break
        if worker.step is not None:
            worker.finish_step(now)
        else:  # all is held: only a lease that ends makes room
            assert worker.wake_ns is not None
            now = max(now, worker.wake_ns)
            worker.send(Wake(), now)
        while worker.digests:
            worker.digest(0, now)
        now += lease_ns // 50
    assert worker.ended[4].outcome == "finished", "the big request starves"


def test_pushing_out_the_young_for_nothing_does_not_happen() -> None:
    # The old one in the pool leaves too little for the big one even with all younger ones gone.
    worker = FakeWorker("w", n_blocks=10, max_num_seqs=4, max_num_batched_tokens=16)
    worker.send(submit(1, 3 * B, max_tokens=16))
    worker.send(submit(2, 7 * B, max_tokens=2))
    n = 3
    while 1 not in worker.ended:
        while len(worker.core.engine.waiting) < 3:
            worker.send(submit(n, 2, max_tokens=2))
            n += 1
        pushed_out = worker.core.engine.n_preemptions
        worker.finish_step()
    assert pushed_out == 0
    worker.run()
    for i in worker.ended:
        worker.verify_output(i)


def test_shared_blocks_are_not_counted_twice_as_gain() -> None:
    # The younger ones run on the old one's blocks: pushing them out frees next to nothing.
    shared = tuple(range(3 * B))
    worker = FakeWorker("w", n_blocks=10, max_num_seqs=4, max_num_batched_tokens=32)
    worker.send(Submit(request_id=1, tokens=(*shared, 1), max_tokens=16))
    worker.finish_step()
    worker.finish_step()
    worker.send(submit(2, 7 * B, max_tokens=2))
    n = 3
    while 1 not in worker.ended:
        while len(worker.core.engine.waiting) < 3:
            worker.send(Submit(request_id=n, tokens=(*shared, 50 + n), max_tokens=2))
            n += 1
        pushed_out = worker.core.engine.n_preemptions
        worker.finish_step()
    assert pushed_out == 0
    worker.run()
    for i in worker.ended:
        worker.verify_output(i)
    worker.verify_idle()


def test_row_stands_still_while_its_step_runs() -> None:
    worker = FakeWorker("w")
    worker.send(submit(1, 6, max_tokens=4))
    step = worker.step
    assert isinstance(step, RunStep)
    row = worker.core.engine.row(1)
    before = (list(row.ids()), list(row.blocks))
    worker.send(submit(2, 6))
    worker.send(Abort(2))
    worker.send(Abort(1))
    assert (row.tokens, row.blocks) == before
    worker.finish_step()
    worker.verify_idle()


def test_fake_model_depends_on_every_token() -> None:
    tokens = list(range(9))
    whole = kv_of(tokens)[-1]
    for i in range(9):
        assert kv_of([*tokens[:i], 99, *tokens[i + 1 :]])[-1] != whole
    assert kv_of(tokens, "salt")[-1] != whole
    assert {next_token(kv_of([i])[-1]) for i in range(50)} == {0, 1, 2, 3, 4}
