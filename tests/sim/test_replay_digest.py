"""The same command gives the same bytes: in parallel, and under any hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.plan_support import command, requests, write_profile, write_requests
from tests.unit.published import published
from twofold.report.results import plan_from_json, replay_from_json


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("digest")
    trace = write_requests(folder, requests(80, rate=20, input_tokens=700, output_tokens=25))
    found = ["replay", str(trace), "--profile", str(write_profile(folder)), "--json", "-"]
    return [*found, "--pools", "2P1D", "--pools", "2M", "--slo-ttft", "0.5", "--slo-tpot", "0.03"]


def run(words: list[str], hash_seed: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "twofold", *words],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        timeout=120,
    )
    return done.stdout


def test_every_hash_seed_and_number_of_processes_gives_the_same_json(words: list[str]) -> None:
    code, first, _ = command(*words, "--jobs", 1)
    assert code == 0
    digests = [one.digest for one in replay_from_json(first.encode()).runs]
    assert len(set(digests)) == 2
    found = [run([*words, "--jobs", jobs], seed) for seed, jobs in (("0", "1"), ("1", "2"))]
    found.append(run([*words, "--jobs", "2"], "12345"))
    assert found == [first] * 3


def test_another_seed_is_another_run_where_anything_is_drawn(words: list[str]) -> None:
    drawn = [*words, "--jobs", "1", "--rate", "20"]
    one, two, again = (
        replay_from_json(command(*drawn, "--seed", seed)[1].encode()) for seed in (1, 2, 1)
    )
    assert one.digest == again.digest != two.digest
    assert (one.header.seed, two.header.seed) == (1, 2)
    assert one.header.config_sha256 != two.header.config_sha256
    assert one.header.trace_sha256 == two.header.trace_sha256


def test_a_plan_is_the_same_on_one_process_and_on_two(words: list[str]) -> None:
    plan = ["plan", *words[1:4], "--gpus", "2", "--quick", "--resamples", "1", "--json", "-"]
    plan += ["--chunk", "512", "--chunk", "2048", "--slo-ttft", "0.5", "--slo-tpot", "0.02"]
    found = [command(*plan, "--jobs", jobs)[1] for jobs in (1, 2)]
    assert found[0] == found[1]
    assert plan_from_json(found[0].encode()).runs


def test_policies_reach_the_router(words: list[str]) -> None:
    some = ["none=ttft", "prefill=round_robin,decode=free_blocks", "admission=ttft"]
    assert command(*words, "--policy", some[0])[0] == 2
    digests = []
    for policy in ("prefill=least_tokens", *some[1:]):
        code, out, _ = command(*words, "--jobs", 1, "--rate-scale", 4, "--policy", policy)
        assert code == 0
        (one, _) = replay_from_json(out.encode()).runs
        assert one.policy
        digests.append(one.digest)
    assert len(set(digests)) == 3


def test_chunk_policies_reach_the_workers(words: list[str]) -> None:
    digests = []
    for more in (
        ("fixed",),
        ("capped", "--chunk-cap", 2048),  # no tighter than a step's own budget
        ("capped", "--chunk-cap", 256),
        ("tpot_goal",),
    ):
        code, out, err = command(*words, "--jobs", 1, "--policy", f"chunk={more[0]}", *more[1:])
        assert code == 0, err
        digests.append(replay_from_json(out.encode()).digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_faults_are_drawn_from_their_seed_and_counted(words: list[str]) -> None:
    runs = []
    for fault in ("1:0.01", "1:0.01", "2:0.01", "1:0", None):
        more = () if fault is None else ("--faults", fault)
        code, out, err = command(*words, "--jobs", 1, *more)
        assert code == 0, err
        runs.append(replay_from_json(out.encode()))
    one, again, other, zero, none = runs
    assert one.digest == again.digest
    assert len({one.digest, other.digest, none.digest}) == 3
    assert zero.digest == none.digest, "steps one by one, and nothing goes wrong"
    split = one.runs[0]
    assert split.completed + split.failed == split.requests
    assert 0 < split.failed < (split.faults or 0)
    assert [run.faults for run in zero.runs] == [0, 0]
    assert [run.faults for run in none.runs] == [None, None]
    assert one.header.config_sha256 != none.header.config_sha256


def test_preparation_is_of_decodes_loop_in_pull_alone(words: list[str]) -> None:
    """100 handoffs of 30 ms each, within some seconds."""
    tpot, ttft = [], []
    for more in ((), ("--prepare-ms", 30)):
        for handoff in ("pull", "push"):
            code, out, err = command(*words, "--jobs", 1, "--handoff", handoff, *more)
            assert code == 0, err
            run = replay_from_json(out.encode()).runs[0]
            tpot.append(run.tpot_ms.mean or 0)
            ttft.append(run.ttft_ms.mean or 0)
    assert tpot[2] > tpot[0] + 5
    assert tpot[3] == pytest.approx(tpot[1], abs=1)
    assert ttft[3] == pytest.approx(ttft[1] + 30, abs=3)


def test_links_and_bounces_reach_the_network(words: list[str]) -> None:
    def transfer_ms(*more: object) -> float:
        code, out, err = command(*words, "--jobs", 1, *more)
        assert code == 0, err
        return replay_from_json(out.encode()).runs[0].phases_ms["transfer"].mean or 0

    busy = ("--link-gbytes-per-s", 5)
    assert transfer_ms(*busy) > transfer_ms(*busy, "--link-sharing", "pair") * 1.02
    # 700 tokens of 131,072 bytes in blocks of 16, copied twice at 10 GB/s; links are idle mostly.
    copies_ms = 2 * 44 * 16 * 131_072 / 1e7
    assert transfer_ms("--host-bounce", 10) == pytest.approx(transfer_ms() + copies_ms, rel=0.05)


def test_published_traces_replay_with_their_prefixes() -> None:
    profile = published("profiles/aiconfigurator_steps/Meta-Llama-3.1-8B__h100_sxm__vllm__tp1.csv")
    for name, more in (
        ("traces/azure2023_conv.csv", ()),
        ("traces/mooncake_conversation_trace.jsonl", ("--jitter", 3, "--length-divide", 4)),
    ):
        code, out, err = command(
            *("replay", published(name), "--profile", profile, "--pools", "1P1D", "--jobs", 1),
            *("--requests", 60, "--slo-ttft", 2, "--slo-tpot", 0.05, "--json", "-", *more),
        )
        assert code == 0, err
        (one,) = replay_from_json(out.encode()).runs
        assert (one.completed, one.failed) == (60, 0)


def test_hash_seeds_differ_in_this_test(tmp_path: Path) -> None:
    """The variable reaches the process: else the test above would prove nothing."""
    script = "print(hash('a'))"
    found = [
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1")
    ]
    assert found[0] != found[1]
