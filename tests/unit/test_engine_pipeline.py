"""An engine whose device is a pipeline: several steps in flight, ended in order."""

from __future__ import annotations

from tests.unit.harness import FakeWorker
from tests.unit.test_engine import B, submit
from twofold.core.request import State
from twofold.messages import Abort
from twofold.policy import batch

Rows = list[tuple[int, int, int]]


def in_flight(worker: FakeWorker) -> list[Rows]:
    """Rows (request, start, n) of each step in flight, oldest step first."""
    return [list(step.work) for step in worker.in_flight]


def test_chunks_of_a_prompt_follow_one_another_into_the_pipeline() -> None:
    worker = FakeWorker("w", pipeline_stages=2)
    worker.send(submit(1, 19))
    assert in_flight(worker) == [[(1, 0, 8)], [(1, 8, 8)]]
    worker.finish_step()
    assert in_flight(worker) == [[(1, 8, 8)], [(1, 16, 3)]]
    worker.finish_step()
    assert in_flight(worker) == [[(1, 16, 3)]]  # the first token is not known yet
    worker.finish_step()
    assert in_flight(worker) == [[(1, 19, 1)]]
    worker.run()
    worker.verify_output(1)
    worker.verify_idle()


def test_a_sequence_is_decoded_in_one_step_at_a_time_and_each_step_has_its_share() -> None:
    worker = FakeWorker("w", pipeline_stages=2, max_num_seqs=8, n_blocks=32)
    for i in (1, 2, 3, 4, 5):
        worker.send(submit(i, 1, max_tokens=9))
    seen = []
    for _ in range(12):
        worker.finish_step()
        rows = [[request for request, _, _ in step] for step in in_flight(worker)]
        ids = [request for step in rows for request in step]
        assert len(set(ids)) == len(ids), "a sequence is in two steps"
        seen.append([len(step) for step in rows])
    assert seen[4:] == [[2, 3], [3, 2]] * 4
    worker.run()
    for i in worker.ended:
        worker.verify_output(i)
    worker.verify_idle()


def test_shares_of_a_batch_take_all_of_it() -> None:
    for stages in (1, 2, 3, 5):
        for n in range(20):
            assert batch.decodes_at_most(n, stages) * stages >= n
    assert batch.decodes_at_most(7, 1) == 7
    assert batch.decodes_at_most(7, 3) == 3


def test_whoever_is_in_a_step_is_not_preempted() -> None:
    """Two sequences fill the pool. The one that needs a block sits out while the other computes,
    as blocks that a step writes cannot be taken, and gives way once nobody else can."""
    worker = FakeWorker("w", pipeline_stages=2, n_blocks=4, max_num_seqs=2, prefix_caching=False)
    worker.send(submit(1, 2 * B - 1, max_tokens=6))
    worker.send(submit(2, 2 * B - 1, max_tokens=6))
    engine = worker.core.engine
    preempted_in_flight = 0
    for _ in range(40):
        if worker.step is None:
            break
        before = engine.n_preemptions
        worker.finish_step()
        rows = [request for step in in_flight(worker) for request, _, _ in step]
        waiting = [request.id for request in engine.waiting]
        preempted_in_flight += bool(set(rows) & set(waiting))
        assert engine.n_preemptions - before <= 1
    assert engine.n_preemptions >= 1
    assert not preempted_in_flight
    for i in (1, 2):
        worker.verify_output(i)
    worker.verify_idle()


def test_one_that_lacks_a_block_sits_out_while_others_compute() -> None:
    """Those may be about to end: nothing is thrown away before that is known."""
    limits = {"n_blocks": 4, "max_num_seqs": 2, "max_num_batched_tokens": 7}
    worker = FakeWorker("w", pipeline_stages=2, prefix_caching=False, **limits)
    worker.send(submit(1, 2 * B - 1, max_tokens=6))
    worker.send(submit(2, 2 * B, max_tokens=1))
    for _ in range(3):
        worker.finish_step()
    assert in_flight(worker) == [[(2, 2 * B - 1, 1)]]  # its last; the other needs a third block
    worker.finish_step()
    assert in_flight(worker) == [[(1, 2 * B, 1)]]
    worker.run()
    assert worker.core.engine.n_preemptions == 0
    for i in (1, 2):
        worker.verify_output(i)
    worker.verify_idle()


def test_blocks_of_an_aborted_prompt_come_back_when_its_last_step_is_done() -> None:
    worker = FakeWorker("w", pipeline_stages=3)
    worker.send(submit(1, 22))
    row = worker.core.engine.row(1)
    assert row.sent == 22
    worker.send(Abort(1))
    for left in (14, 6):
        worker.finish_step()
        assert (row.state, row.sent) == (State.DRAINING, left)
        assert worker.core.pool.counts().active > 0
    worker.finish_step()
    worker.verify_idle()


def test_a_failed_chunk_fails_the_prompt_and_waits_for_the_chunks_behind_it() -> None:
    worker = FakeWorker("w", pipeline_stages=2)
    worker.send(submit(1, 16))
    worker.send(submit(2, 3))
    worker.fail_step()
    assert worker.ended[1].outcome == "failed"
    assert worker.core.engine.row(1).state is State.DRAINING
    worker.finish_step()
    assert 1 not in worker.core.engine.requests
    worker.run()
    worker.verify_output(2)
    worker.verify_idle()


def test_one_stage_has_one_step() -> None:
    worker = FakeWorker("w")
    worker.send(submit(1, 19))
    assert in_flight(worker) == [[(1, 0, 8)]]
