"""What a run is computed from and what is read off it: memory, layouts, slots, queues, facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.plan_support import requests, scenario, write_profile, write_requests
from tests.unit.published import published
from twofold.cli.replay_run import queues_of
from twofold.cost.errors import CostError
from twofold.cost.models import model_shape
from twofold.metrics.record import RequestRecord
from twofold.metrics.slo import figures
from twofold.plan.hardware import Hardware, layout_of, read_machine
from twofold.plan.known import facts_of, ms_per_token, start_scale
from twofold.plan.runner import attempt, link_bytes_per_s, probe, simulate, slots_held
from twofold.plan.scenario import Scenario
from twofold.plan.workload import requests_of, summary

MS = 1_000_000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    folder = tmp_path_factory.mktemp("runner")
    trace = write_requests(folder, requests(50, rate=12, input_tokens=800, output_tokens=30))
    return scenario(trace, write_profile(folder), "1P1D")


def test_a_probe_says_the_same_as_all_figures(made: Scenario) -> None:
    hard = msgspec.structs.replace(made, rate_scale=6.0)
    brief, full = probe(hard), figures(simulate(hard), hard.slo)
    assert brief.attainment == full.slo_attainment
    assert (brief.offered_rps, brief.goodput_rps) == (full.offered_rps, full.goodput_rps)
    assert brief.ttft_ms == full.ttft_ms.p90
    assert brief.tpot_ms == full.tpot_ms.p90
    assert brief.phases_ms["prefill"] == pytest.approx(full.phases_ms["prefill"].mean)
    assert brief.attainment <= min(brief.ttft_share, brief.tpot_share) <= 1


def test_a_run_that_fails_is_a_value(made: Scenario) -> None:
    gone = msgspec.structs.replace(
        made, workload=msgspec.structs.replace(made.workload, trace="/nowhere.csv")
    )
    found = attempt(gone)
    assert "cannot read" in getattr(found, "reason", "")
    assert getattr(found, "scenario", "") == "1P1D chunk 2048 at 1x"


def test_memory_that_weights_leave_is_kv() -> None:
    machine = read_machine(Hardware(model="Llama-3.1-8B", accelerator="h100"))
    tokens = (0.9 * 80e9 - machine.shape.weights_bytes) / 131072
    assert machine.kv_blocks(16, 0.9, "bfloat16") == int(tokens) // 16
    assert machine.kv_blocks(16, 0.9, "float8_e4m3fn") == pytest.approx(tokens / 8, rel=1e-3)
    with pytest.raises(CostError, match="leaves no room for KV; a larger --tp"):
        machine.kv_blocks(16, 0.15, "bfloat16")


@pytest.mark.parametrize(
    ("model", "bytes_per_token"),
    [("Llama-3.1-8B", 131072), ("DeepSeek-V3", 61 * 576 * 2), ("Mistral-7B-v0.1", 131072)],
)
def test_a_layout_has_the_bytes_of_its_model(model: str, bytes_per_token: int) -> None:
    assert layout_of(model_shape(model), 32, "bfloat16").block_bytes == 32 * bytes_per_token


def test_links_are_of_the_smaller_worker(tmp_path: Path, made: Scenario) -> None:
    hardware = tuple(Hardware(profile=str(write_profile(tmp_path, tp))) for tp in (4, 2))
    wide = msgspec.structs.replace(made, hardware=hardware)
    assert link_bytes_per_s(made) == 50_000_000_000
    assert link_bytes_per_s(wide) == 100_000_000_000
    slow = msgspec.structs.replace(wide, link_bytes_per_s=1000)
    assert link_bytes_per_s(slow) == 2000


def test_published_models_are_known_under_their_spellings() -> None:
    table = str(published("profiles/splitwise_perf_model.csv"))
    machine = read_machine(Hardware(profile=table, select="llama2-70b:h100-80gb:8"))
    assert (machine.shape.name, machine.tp) == ("Llama-2-70B", 8)
    assert machine.power_w == 5600


def record(at_ms: int, end_ms: int, **changes: Any) -> RequestRecord:
    """First token after 10 ms: 2 in prefill's queue, 4 of prefill, 3 of transfer, 1 of step."""
    fields: dict[str, Any] = {
        "request_id": 0,
        "arrival_ns": at_ms * MS,
        "end_ns": end_ms * MS,
        "input_tokens": 20,
        "output_tokens": 4,
        "outcome": "finished",
        "token_times_ns": [(at_ms + 10) * MS, end_ms * MS],
        "phases_ns": {
            "prefill_queue": 2 * MS,
            "prefill": 4 * MS,
            "transfer": 3 * MS,
            "first_step": MS,
        },
        "prefill": "prefill-0",
        "decode": "decode-0",
    }
    return RequestRecord(**{**fields, **changes})


def test_slots_are_held_from_the_transfer_to_the_end(made: Scenario) -> None:
    apart = [record(0, 20), record(14, 40)]  # the second takes its slot at 20 ms
    assert slots_held(made, apart) == (128, 1)
    assert slots_held(made, [record(0, 21), record(14, 40)]) == (128, 2)
    mixed = [record(0, 20, prefill=""), record(14, 40, prefill="")]  # and here from 16 ms on
    assert slots_held(made, mixed) == (128, 2)
    assert slots_held(made, []) == (128, 0)


def test_queues_follow_from_where_time_went(made: Scenario) -> None:
    found = queues_of(made, [record(0, 400), record(1, 500)])
    assert found.workers == ["prefill-0", "decode-0"]
    assert (max(found.waiting[0]), max(found.running[0])) == (2, 2)
    assert (max(found.running[1]), found.running[1][-1]) == (2, 1)
    assert max(found.blocks[0]) == max(found.blocks[1]) == 4
    assert found.waiting[1][-1] == found.running[0][-1] == found.blocks[0][-1] == 0


def test_facts_are_those_of_the_trace(made: Scenario) -> None:
    found = summary(requests_of(made.workload, 0).rows)
    machine = read_machine(made.hardware[0])
    facts = facts_of(made, machine, found, gpus=2, nodes=1, prepare_ms=None)
    assert facts.rate_rps == pytest.approx(12, rel=0.3)
    assert [prompt.label for prompt in facts.prompts] == ["P50", "P95"]
    assert facts.prompts[1].tokens > facts.prompts[0].tokens
    assert facts.prompts[0].prefill_ms == pytest.approx(5 + facts.prompts[0].tokens / 20, rel=0.01)
    assert facts.prefix_hit_share is None
    assert facts.ms_per_token is not None
    assert 8 < facts.ms_per_token < 12
    assert ms_per_token(machine, found, 10_000, 2) is None, "decode cannot keep up by itself"


def test_a_search_starts_near_what_a_set_up_can_do(made: Scenario) -> None:
    found = summary(requests_of(made.workload, 0).rows)
    start = start_scale(made, found)
    assert probe(msgspec.structs.replace(made, rate_scale=start / 4)).holds(0.9)
    assert not probe(msgspec.structs.replace(made, rate_scale=start * 8)).holds(0.9)
