"""DistServe's degrees of parallelism: placements, pipelines, memory and queues of its rows."""

from __future__ import annotations

import msgspec
import pytest
from benchmarks.published.data import Data
from benchmarks.published.distserve import (
    OPT_66B,
    Placement,
    fit,
    kv_tokens,
    placements,
    run_split,
    with_overhead,
)
from benchmarks.published.distserve_parallelism import (
    A100_BYTES,
    KV_SHARE,
    Prefills,
    as_distserve_counts,
    even_rate,
    fits,
    memory_rows,
)
from benchmarks.published.sim import NEVER, Workers, at_client, at_prefill, one_token_less, simulate

from tests.unit.published import published
from twofold.cost.models import model_shape
from twofold.cost.pipeline import Pipeline
from twofold.cost.step import LinearStep, StepTime
from twofold.cost.step_profile import step_time
from twofold.trace import TraceRequest
from twofold.types import NS_PER_MS

SHAPE = model_shape("OPT-13B")


def shipped() -> Data:
    return Data(published("profiles/distserve").parent.parent)


def in_stages(step: StepTime, stages: int, budget: int = 2048) -> Workers:
    return Workers(
        step=step,
        kv_tokens=2**16,
        max_num_seqs=64,
        budget=budget,
        pipeline=Pipeline(stages=stages),
    )


def test_a_prompt_enters_a_pipeline_when_its_first_stage_is_free() -> None:
    """Two prompts of 100 ms at once, one a step: the second waits for one stage, not for all."""
    requests = [TraceRequest(0, 100, 1), TraceRequest(0, 100, 1)]
    step = LinearStep(100 * NS_PER_MS, 0.0)
    found = {
        stages: [
            at_client(record).ttft
            for record in simulate("1M", SHAPE, in_stages(step, stages, budget=100), requests)
        ]
        for stages in (1, 2, 4)
    }
    assert found == {1: [100, 200], 2: [100, 150], 4: [100, 125]}
    slow = msgspec.structs.replace(
        in_stages(step, 2, budget=100), pipeline=Pipeline(stages=2, latency_ns=5 * NS_PER_MS)
    )
    records = simulate("1M", SHAPE, slow, requests)
    assert [at_client(record).ttft for record in records] == [105, 155]


def test_a_token_takes_a_pass_through_all_stages_whoever_else_decodes() -> None:
    """10 ms a step and 4 ms a sequence: two sequences go through two stages as two steps of one."""
    step = LinearStep(10 * NS_PER_MS, 0.0, 4.0 * NS_PER_MS)
    requests = one_token_less([TraceRequest(0, 16, 101), TraceRequest(0, 16, 101)])
    workers = {"prefill": in_stages(step, 1), "decode": in_stages(step, 2)}
    tpots = [at_prefill(record).tpot for record in simulate("1P1D", SHAPE, workers, requests)]
    assert tpots == pytest.approx([14, 14], rel=0.02)
    workers["decode"] = in_stages(step, 1)
    tpots = [at_prefill(record).tpot for record in simulate("1P1D", SHAPE, workers, requests)]
    assert tpots == pytest.approx([18, 18], rel=0.02)


def test_overhead_of_a_prefill_grows_with_its_stages() -> None:
    """2 ms once for every step, and p ms in each of p stages for a prefill."""
    profile = fit(shipped(), "opt-13b", 1)
    alone = step_time(profile)
    for pp, added_ms in ((1, 3.0), (2, 6.0), (4, 18.0)):
        step = step_time(with_overhead(profile, pp))
        prefill = step.step_ns([(512, 0)], 0, 0) - alone.step_ns([(512, 0)], 0, 0)
        assert prefill == pytest.approx((added_ms + 512e-4) * 1e6, abs=2)
        decode = step.step_ns((), 4, 2000) - alone.step_ns((), 4, 2000)
        assert decode == pytest.approx((2.0 + 2000e-4) * 1e6, abs=2)


def test_the_prefill_of_a_pair_is_a_pipeline_with_that_overhead() -> None:
    """The second prompt comes 1 ms after the first, and is read when that leaves its stage."""
    data = shipped()
    place = Placement(model="opt-13b", prefill_tp=1, prefill_pp=2, decode_tp=1)
    step = step_time(with_overhead(fit(data, "opt-13b", 1), 2))
    whole_ms = step.step_ns([(600, 0)], 0, 0) / NS_PER_MS
    times = run_split(data, place, [TraceRequest(0, 600, 5), TraceRequest(NS_PER_MS, 600, 5)])
    assert [t.ttft for t in times] == pytest.approx([whole_ms, 1.5 * whole_ms - 1], abs=1e-3)


def test_the_example_searches_both_degrees_of_both_phases() -> None:
    data = shipped()
    found = placements(data, "opt-13b", 4)
    small = [(1, 1), (1, 2), (2, 1)]  # three GPUs divide neither heads nor layers
    assert sorted(
        (place.prefill_tp, place.prefill_pp, place.decode_tp, place.decode_pp) for place in found
    ) == [(*a, *b) for a in small for b in small]
    assert max(place.gpus for place in found) == 4
    assert len({place.name for place in found}) == len(found)
    assert "TP2 prefill + TP1 PP2 decode" in {place.name for place in found}
    whole = {(p.prefill_tp, p.prefill_pp, p.decode_tp, p.decode_pp): p.gpus for p in found}
    assert (whole[1, 2, 1, 2], whole[2, 1, 1, 1]) == (4, 3)
    # OPT-66B fits no GPU alone: two at least for each phase.
    assert {place.gpus for place in placements(data, "opt-66b", 4)} == {4}


def test_a_pair_holds_the_kv_of_all_stages_of_its_decode_pipeline() -> None:
    """A context above what one of two stages would hold by itself is served all the same."""
    data = shipped()
    context = kv_tokens(data, "opt-66b", 2, 2) * 2 // 3
    (times,) = run_split(data, OPT_66B, [TraceRequest(0, context, 20)])
    assert times.e2e < NEVER
    alone = msgspec.structs.replace(OPT_66B, decode_pp=1)
    (times,) = run_split(data, alone, [TraceRequest(0, context, 20)])
    assert times.e2e == NEVER
    assert OPT_66B.gpus == 8
    assert Placement(model="opt-13b", prefill_tp=2, prefill_pp=3, decode_tp=1).gpus == 7


def test_kv_that_fits_is_near_the_table_for_every_degree() -> None:
    found = fits(shipped(), A100_BYTES * KV_SHARE)
    assert len(found) == 76
    assert max(abs(row.error_pct) for row in found) < 6
    assert {row.verdict for row in memory_rows(shipped())} == {"within 15 %"}


def test_the_memory_is_the_only_one_that_the_table_allows() -> None:
    """With DistServe's own way to count weights, every row is met; 12 kB more or less lose one."""
    found = fits(shipped(), A100_BYTES * KV_SHARE)

    def met(memory_bytes: float) -> int:
        return sum(as_distserve_counts(row, memory_bytes * KV_SHARE) == row.told for row in found)

    assert met(A100_BYTES) == len(found)
    assert met(A100_BYTES - 12_000) < len(found)
    assert met(A100_BYTES + 12_000) < len(found)


def prefills(requests: int) -> Prefills:
    """D of 100 ms, K of 1.6."""
    return Prefills(
        shape=SHAPE,
        alone=LinearStep(100 * NS_PER_MS, 0.0),
        together=LinearStep(62_500_000, 0.0),
        requests=requests,
    )


def test_queues_for_prefill_wait_as_long_as_md1_says() -> None:
    queues = prefills(6_000)
    assert (queues.d_s, queues.k) == pytest.approx((0.1, 1.6))
    # By hand at 10 req/s: 100 + 0.1/4 ms x 1000; 62.5 + 0.1/(3.2 x 0.6) ms x 1000.
    assert queues.formula_s("inter", 10) == pytest.approx(0.125)
    assert queues.formula_s("intra", 10) == pytest.approx(0.0625 + 0.1 / 1.92)
    for way in ("inter", "intra"):
        for rate in (2.0, 10.0):
            told = queues.formula_s(way, rate)
            assert queues.simulated_s(way, rate) == pytest.approx(told, rel=0.05)


def test_stages_are_better_from_some_rate_on() -> None:
    queues = prefills(1_000)
    told = even_rate(queues, simulated=False)
    assert queues.formula_s("inter", told) == pytest.approx(queues.formula_s("intra", told), 0.01)
    assert even_rate(queues, simulated=True) == pytest.approx(told, rel=0.1)
    assert queues.simulated_s("intra", 3) < queues.simulated_s("inter", 3)
    assert queues.simulated_s("inter", 15) < queues.simulated_s("intra", 15)
