"""Workers that are pipelines: stages in the simulator, against arithmetic and queueing theory."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from tests.sim.support import LEG, MS, SETTINGS, audited, cluster, one
from twofold.cost.pipeline import Pipeline
from twofold.cost.step import LinearStep
from twofold.messages import RunStep
from twofold.sim import Cluster, SeededFaults
from twofold.sim.pools import WorkerPlan
from twofold.sim.stages import Stages, layer_marks
from twofold.trace import TraceRequest

STEP = LinearStep(2 * MS, 10_000.0, 50_000.0)
HOP = Pipeline(stages=2, bytes_per_token=100, bytes_per_s=1_000_000_000, latency_ns=7)


def pass_ns(pipeline: Pipeline, step_ns: int, tokens: int) -> int:
    """Time of a step of `tokens` through all stages, when it has to wait for none."""
    hops_ns = (pipeline.stages - 1) * pipeline.hop_ns(tokens)
    return pipeline.stages * pipeline.stage_ns(step_ns) + hops_ns


def mixed(stages: int, pipeline: Pipeline | None = None, **settings: Any) -> Cluster:
    """One worker that does all, of so many stages."""
    plan = WorkerPlan(
        name="mixed-0",
        role="mixed",
        settings={**SETTINGS, "prefix_caching": False, "pipeline_stages": stages, **settings},
        step=STEP,
        pipeline=pipeline,
    )
    return Cluster([plan], leg_latency_ns=LEG)


def test_steps_wait_for_a_stage_and_for_what_the_stage_before_makes() -> None:
    stages = Stages(Pipeline(stages=3, bytes_per_token=1, bytes_per_s=1_000_000_000, latency_ns=1))
    four, one_token = RunStep(1, ((1, 0, 3), (2, 9, 1))), RunStep(2, ((2, 10, 1),))
    assert stages.ends_ns(0, 30, four) == [10, 25, 40]  # hops of 5
    assert stages.ends_ns(0, 60, four) == [30, 55, 80]  # stage 0 is free at 10; nothing else waits
    assert stages.ends_ns(100, 29, one_token) == [110, 122, 134]  # rounded up; hops of 2
    assert stages.ends_ns(100, 3, one_token) == [111, 123, 135]  # short, behind the one before it
    assert Stages(Pipeline()).ends_ns(7, 30, four) == [37]


def test_a_pass_is_the_stages_and_the_hops_between_them() -> None:
    assert HOP.hop_ns(50) == 7 + 5_000
    assert pass_ns(HOP, 2 * MS, 50) == 2 * MS + 5_007
    assert pass_ns(Pipeline(stages=4), 2 * MS + 1, 50) == 4 * (MS // 2 + 1)
    assert pass_ns(Pipeline(), 2 * MS, 50) == 2 * MS


def test_a_core_and_its_device_have_as_many_stages() -> None:
    with pytest.raises(AssertionError, match="mixed-0: its core and its device differ in stages"):
        mixed(3, HOP)


def test_layers_are_said_to_be_done_by_groups_or_by_stages() -> None:
    assert layer_marks(8, 4, 100, [500]) == [(2, 200), (4, 300), (6, 400)]
    assert layer_marks(8, 4, 100, [200, 320, 500]) == [(2, 200), (5, 320)]


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_prompts_queue_for_the_first_stage_as_distserve_says(stages: int) -> None:
    """DistServe, section 3.1: with K-way inter-operator parallelism a prompt of D waits as in a
    queue with services of D/K, and takes D. Lindley's recursion, to the nanosecond."""
    service_ns = STEP.step_ns([(256, 0)], 0, 0)
    stage_ns = -(-service_ns // stages)
    draw = random.Random(stages)
    at_ns, requests = 0, list[TraceRequest]()
    for _ in range(1500):
        at_ns += round(draw.expovariate(0.8 / stage_ns))
        requests.append(TraceRequest(at_ns, 256, 1))
    made = mixed(stages, max_waiting=2000)
    free_ns, waited = 0, 0
    for record in made.run(iter(requests)):
        start_ns = max(record.arrival_ns + LEG, free_ns)
        free_ns = start_ns + stage_ns
        waited += start_ns > record.arrival_ns + LEG
        assert record.arrival_ns + (record.ttft_ns or 0) == start_ns + stages * stage_ns + LEG
    assert waited > 900


@pytest.mark.parametrize("pipeline", [Pipeline(stages=2), HOP])
def test_tokens_come_once_a_pass_of_half_the_batch(pipeline: Pipeline) -> None:
    made = mixed(2, pipeline)
    records = made.run(iter([one(4, output_tokens=30) for _ in range(8)]))
    expected_ns = pass_ns(pipeline, STEP.step_ns((), 4, 0), 4)
    for record in records:
        gaps = [b - a for a, b in pairwise(record.token_times_ns)]
        assert gaps[10:25] == [expected_ns] * 15


def test_a_pipeline_decodes_more_sequences_in_the_same_time() -> None:
    """Two stages with half of the batch each are through in the time that one takes with that
    half: twice the tokens at the same TPOT."""
    two = mixed(2).run(iter([one(4, output_tokens=40) for _ in range(16)]))
    half = mixed(1).run(iter([one(4, output_tokens=40) for _ in range(8)]))
    assert two[0].tpot_ns == pytest.approx(half[0].tpot_ns, rel=0.02)


@pytest.mark.parametrize("mode", ["pull", "push", "layerwise"])
@pytest.mark.parametrize("stages", [2, 3])
def test_all_invariants_hold_with_tight_pools(mode: str, stages: int) -> None:
    draw = random.Random(stages)
    requests = [one(draw.randrange(1, 400), 1 + draw.randrange(30), i * MS) for i in range(120)]
    records, made = audited(
        "1P1D1M",
        requests,
        settings={
            "handoff": mode,
            "pipeline_stages": stages,
            "n_blocks": 64,
            "max_model_len": 448,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
            "min_layerwise_tokens": 0,
        },
    )
    assert {record.outcome for record in records} == {"finished"}
    cores = [worker.core for worker in made.workers.values()]
    assert sum(core.engine.n_preemptions for core in cores if core is not None) > 0


def test_a_step_that_fails_spoils_those_behind_it_of_the_same_prompt() -> None:
    requests = [one(400, 5, i * 8 * MS) for i in range(60)]
    records, _ = audited(
        "2M",
        requests,
        settings={"pipeline_stages": 3, "max_num_batched_tokens": 64},
        faults=SeededFaults(seed=3, fail_step=0.03),
    )
    assert {record.outcome for record in records} == {"finished", "failed"}


def test_handoffs_are_prepared_when_the_first_stage_is_free() -> None:
    """On decode's loop, in pull: between steps, which begin whenever the first stage is free."""
    more = {}
    for stages in (1, 2):
        ttft_ns = []
        for prepare_ns in (0, MS):
            made = cluster(
                "1P1D",
                settings={"pipeline_stages": stages},
                step=LinearStep(8 * MS, 0),
                prepare_ns=prepare_ns,
            )
            ttft_ns.append(made.run(iter([one(4, 20), one(4, 20, 11 * MS)]))[1].ttft_ns or 0)
        more[stages] = ttft_ns[1] - ttft_ns[0]
    assert more[1] > more[2] > MS


def test_layers_of_the_first_stages_are_sent_before_the_last_is_through() -> None:
    """On a link that takes as long as the prompt, half of the bytes go during the second stage."""
    took = {}
    for mode in ("push", "layerwise"):
        made = cluster(
            "1P1D",
            settings={"handoff": mode, "pipeline_stages": 2, "min_layerwise_tokens": 0},
            link_bytes_per_s=5_000_000,
        )
        took[mode] = made.run(iter([one(256, 2)]))[0].ttft_ns or 0
    bytes_ns = 256 * 256 * 1_000_000_000 // 5_000_000 // 2  # K and V of half of the layers
    stage_ns = STEP.step_ns([(256, 0)], 0, 0) // 2
    assert took["push"] - took["layerwise"] == pytest.approx(min(bytes_ns, stage_ns), rel=0.1)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_abridged_and_single_steps_agree(stages: int) -> None:
    draw = random.Random(7)
    requests = [one(draw.randrange(1, 300), 1 + draw.randrange(60), i * MS) for i in range(150)]
    found = [
        cluster("1P2D", settings={"pipeline_stages": stages}, singly=singly).run(iter(requests))
        for singly in (False, True)
    ]
    assert found[0] == found[1]
