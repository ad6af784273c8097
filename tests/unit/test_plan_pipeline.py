"""Pipeline parallelism in plans: pools, memory, prices, the space, and what a run makes of it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.unit.plan_support import command, decoded, requests, write_profile, write_requests
from tests.unit.plan_support import scenario as scenario_of
from twofold.cost.models import fits_tokens, model_shape
from twofold.plan.facts import Facts
from twofold.plan.hardware import Hardware, Machine, read_machine
from twofold.plan.known import ms_per_token, start_scale
from twofold.plan.placement import enumerate_space
from twofold.plan.rules import one_gpu, too_few_gpus
from twofold.plan.runner import SetupError, link_bytes_per_s, simulate
from twofold.plan.sweep import place
from twofold.plan.workload import summary
from twofold.sim.pools import PoolsError, parse_pools, pools_name


def machines(folder: Path, *pps: int, tp: int = 1) -> list[Machine]:
    profile = str(write_profile(folder, tp))
    return [read_machine(Hardware(profile=profile, pp=pp)) for pp in pps]


def estimate(pp: int, tp: int = 1) -> Machine:
    return read_machine(Hardware(model="Llama-3.1-70B", accelerator="h100", tp=tp, pp=pp))


def test_pools_name_their_stages() -> None:
    for spec in ("1P:tp2:pp2,4D:tp1", "2M:pp4", "1P:h100:tp2:pp2,1D:pp2"):
        assert pools_name(parse_pools(spec)) == spec
    assert [pool.pp for pool in parse_pools("1P:tp2:PP3,1D")] == [3, 0]
    with pytest.raises(PoolsError, match="pp is 1 or more, as in 2P:tp2"):
        parse_pools("2M:pp0")
    with pytest.raises(PoolsError, match="not COUNT, role and what it runs on"):
        parse_pools("2M:")


def test_stages_share_weights_and_layers() -> None:
    """Each of 8 accelerators has 1/8 of the weights; with 8 KV heads, of each token's KV too."""
    shape = model_shape("Llama-3.1-70B")
    memory = 72_000_000_000
    left = memory - shape.weights_bytes / 8
    per_token = shape.kv_bytes_per_token(2.0) / 8
    for tp, pp in ((8, 1), (4, 2), (2, 4), (1, 8)):
        assert fits_tokens(shape, memory, tp, 2.0, pp) == pytest.approx(left / per_token, abs=1)
    latent = model_shape("DeepSeek-V3")  # a latent is copied over tensor ranks, not over stages
    wide = fits_tokens(latent, 10**12, 8, 2.0)
    assert fits_tokens(latent, 10**12, 4, 2.0, 2) == pytest.approx(2 * wide, rel=1e-6)


def test_a_profile_says_what_fits_one_stage_and_weights_are_there_once() -> None:
    """KV of two stages: twice what one has beside the weights, and the room of one set of them."""
    one, two = (estimate(pp, tp=4) for pp in (1, 2))
    fits = one.kv_blocks(16, 0.9, "bfloat16") * 16
    profiled = msgspec.structs.replace(two, kv_tokens=fits)
    wanted = two.kv_blocks(16, 0.9, "bfloat16")
    assert profiled.kv_blocks(16, 0.9, "bfloat16") == pytest.approx(wanted, abs=2)
    assert wanted > 2 * one.kv_blocks(16, 0.9, "bfloat16")


def test_a_worker_of_stages_costs_all_its_accelerators() -> None:
    one, four = estimate(1, tp=2), estimate(4, tp=2)
    assert (one.gpus, four.gpus, four.degree) == (2, 8, "tp2:pp4")
    assert four.usd_per_hour == pytest.approx(4 * (one.usd_per_hour or 0))
    assert four.power_w == pytest.approx(4 * (one.power_w or 0))


def test_activations_go_by_the_links_of_a_node_and_by_the_network_beyond() -> None:
    near, far = estimate(4, tp=2).pipeline, estimate(8, tp=2).pipeline
    assert (near.stages, near.bytes_per_token) == (4, 8192 * 2)
    assert near.bytes_per_s == 2 * 450_000_000_000
    assert far.bytes_per_s == 2 * 50_000_000_000
    assert near.hop_ns(1000) == 10_000 + -(-1000 * 16384 * 1_000_000_000 // near.bytes_per_s)


def test_a_batch_is_decoded_in_shares() -> None:
    one, two = estimate(1, tp=4), estimate(2, tp=4)
    assert two.decode_ns(64, 64_000) == one.step.step_ns((), 32, 32_000)
    assert two.decode_ns(7, 7_000) == one.step.step_ns((), 4, 4_000)


def test_the_space_has_stages_for_each_phase(tmp_path: Path) -> None:
    space = enumerate_space(machines(tmp_path, 1, 2), 4, chunks=(512,))
    names = {pools_name(candidate.pools) for candidate in space.splits}
    assert {"1P:pp1,3D:pp1", "2P:pp1,1D:pp2", "1P:pp2,2D:pp1", "1P:pp2,1D:pp2"} <= names
    assert {pools_name(c.pools) for c in space.unsplit} == {"4M:pp1", "2M:pp2"}
    assert "pipeline parallelism 1, 2)" in space.words
    for candidate in (*space.splits, *space.unsplit):
        pools = zip(candidate.pools, candidate.hardware, strict=True)
        assert sum(pool.count * hardware.gpus for pool, hardware in pools) in (3, 4)
    with pytest.raises(SetupError, match=r"fewer than one worker takes \(2\)"):
        enumerate_space(machines(tmp_path, 2), 1)


def test_a_pool_may_ask_for_stages_that_no_flag_names(tmp_path: Path) -> None:
    (machine,) = machines(tmp_path, 1)
    ((pools, hardware),) = place(parse_pools("1P:pp2,1D"), [machine])
    assert [h.pp for h in hardware] == [2, 1]
    assert pools_name(pools) == "1P:pp2,1D"
    both = machines(tmp_path, 1, 2)
    found = place(parse_pools("2M"), both)
    assert [pools_name(pools) for pools, _ in found] == ["2M:pp1", "2M:pp2"]
    assert [hardware[0].pp for _, hardware in found] == [1, 2]
    with pytest.raises(SetupError, match="fits several profiles; there are h100:tp1, h100:tp1:pp2"):
        place(parse_pools("1M:tp1"), both)


def test_links_are_of_all_accelerators(tmp_path: Path) -> None:
    trace = write_requests(tmp_path, requests(5, rate=1, input_tokens=100, output_tokens=5))
    made = scenario_of(trace, write_profile(tmp_path), "1P1D")
    profile = made.hardware[0].profile
    hardware = (Hardware(profile=profile, pp=2), Hardware(profile=profile, pp=4))
    wide = msgspec.structs.replace(made, hardware=hardware, link_bytes_per_s=1000)
    assert link_bytes_per_s(wide) == 2000
    assert wide.gpus == 6


def test_rules_count_the_accelerators_of_a_worker() -> None:
    rule = one_gpu(Facts(tp=4, pp=2, gpus=8))
    assert rule.holds
    assert "8 GPUs at TP 4 PP 2 make 1 worker" in rule.because
    assert Facts(tp=4, pp=2, gpus=16).unsplit_workers == 2
    both = Facts(tp=1, gpus=4, prefill_workers=2, decode_workers=1)
    assert "2 prefill and 1 decode worker at TP 1 take 3 GPUs" in too_few_gpus(both).because
    wide = msgspec.structs.replace(both, split_gpus=4)  # decode's is of two
    assert "2 prefill and 1 decode worker take 4 GPUs" in too_few_gpus(wide).because
    assert too_few_gpus(msgspec.structs.replace(both, split_gpus=5)).holds


def test_searches_begin_where_a_pipeline_can_go(tmp_path: Path) -> None:
    """Of long prompts and short answers two stages read twice as many."""
    rows = requests(50, rate=1, input_tokens=2000, output_tokens=2)
    trace = write_requests(tmp_path, rows)
    made = scenario_of(trace, write_profile(tmp_path), "1P1D")
    found = summary(rows)
    hardware = tuple(Hardware(profile=h.profile, pp=2) for h in made.hardware)
    two = msgspec.structs.replace(made, hardware=hardware)
    assert start_scale(two, found) == pytest.approx(2 * start_scale(made, found), rel=1e-6)
    one, piped = (read_machine(h) for h in (made.hardware[0], hardware[0]))
    # At 20 in decode: one worker's step of 20, or of 10 in each stage.
    busy = requests(50, rate=1, input_tokens=100, output_tokens=1000)
    assert (ms_per_token(piped, summary(busy), 2.0, 2) or 0) < (
        ms_per_token(one, summary(busy), 2.0, 1) or 0
    )


def test_two_stages_read_more_prompts_than_one_of_the_same_profile(tmp_path: Path) -> None:
    """At a load that one stage cannot keep up with and two can: TTFT tells."""
    trace = write_requests(tmp_path, requests(200, rate=14, input_tokens=2000, output_tokens=2))
    ttft_ms = {}
    for pp in (1, 2):
        made = scenario_of(trace, write_profile(tmp_path), "1P1D")
        hardware = tuple(Hardware(profile=h.profile, pp=pp) for h in made.hardware)
        records = simulate(msgspec.structs.replace(made, hardware=hardware))
        ttft_ms[pp] = sorted(record.ttft_ns or 0 for record in records)[100] / 1e6
    assert ttft_ms[1] > 3 * ttft_ms[2]


def test_replay_takes_stages_as_a_flag_and_in_pools(tmp_path: Path) -> None:
    trace = write_requests(tmp_path, requests(40, rate=8, input_tokens=600, output_tokens=20))
    words = ("replay", trace, "--profile", write_profile(tmp_path), "--json", "-", "--jobs", 1)
    code, out, err = command(*words, "--pools", "1P1D", "--pp", 1, "--pp", 2)
    assert code == 0, err
    first = decoded(out)["runs"]
    assert isinstance(first, list)
    assert [run["pools"] for run in first] == ["1P:pp1,1D:pp1", "1P:pp2,1D:pp2"]
    assert [run["gpus"] for run in first] == [2, 4]
    code, out, err = command(*words, "--pools", "1P:pp2,1D:pp2")
    assert code == 0, err
    second = decoded(out)["runs"]
    assert isinstance(second, list)
    assert second[0]["ttft_ms"] == first[1]["ttft_ms"]
    assert second[0]["ttft_ms"] != first[0]["ttft_ms"]
    code, _, err = command(*words, "--pools", "1M", "--pp", 0)
    assert (code, err.count("\n")) == (2, 1)
    assert "--pp 0: must be a whole number from 1" in err


def test_a_prompt_alone_takes_the_hops_longer_and_is_handed_over_by_all_links(
    tmp_path: Path,
) -> None:
    trace = write_requests(tmp_path, requests(1, rate=1, input_tokens=1000, output_tokens=5))
    made = scenario_of(trace, write_profile(tmp_path), "1P1D")
    phases = {}
    for pp in (1, 2):
        hardware = tuple(Hardware(profile=h.profile, pp=pp) for h in made.hardware)
        (record,) = simulate(
            msgspec.structs.replace(made, hardware=hardware, link_bytes_per_s=10**9)
        )
        phases[pp] = record.phases_ns
    pipeline = read_machine(hardware[0]).pipeline
    longer_ns = phases[2]["prefill"] - phases[1]["prefill"]
    assert longer_ns == pytest.approx(pipeline.hop_ns(record.input_tokens), abs=2)
    assert phases[2]["transfer"] == pytest.approx(phases[1]["transfer"] / 2, rel=0.02)


def test_a_plan_tries_stages_where_they_are_asked_for(tmp_path: Path) -> None:
    trace = write_requests(tmp_path, requests(60, rate=8, input_tokens=600, output_tokens=20))
    code, out, err = command(
        *("plan", trace, "--profile", write_profile(tmp_path), "--gpus", 4, "--pp", 2, "--quick"),
        *("--slo-ttft", 1, "--slo-tpot", 0.03, "--chunk", 2048, "--resamples", 0),
        *("--jobs", 1, "--json", "-"),
    )
    assert code == 0, err
    assert "space: 1 splits of 4 GPUs (tensor parallelism 1 for each phase, pipeline" in err
    plan = decoded(out)
    rules = {rule["rule"]: rule["because"] for rule in plan["rules"]}  # type: ignore[attr-defined]
    assert "4 GPUs at TP 1 PP 2 make 2 workers" in rules["one GPU"]
    assert "1 decode worker take 4 GPUs" in rules["too few GPUs for both pools"]
    assert "1 x h100 (made up), a pipeline of 2" in err
    unsplit = plan["best_unsplit"]
    assert isinstance(unsplit, dict)
    each = unsplit["goodput_per_gpu"]["value"]
    assert (unsplit["pools"], unsplit["gpus"]) == ("2M", 4)
    assert f"2M chunk 2048 holds {4 * each:.3g} req/s" in err.replace(" projected", "")
