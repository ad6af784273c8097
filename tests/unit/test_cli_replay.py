"""`twofold replay` and `twofold plan` as people run them: output, files, exit codes, bad input."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.plan_support import command, decoded, requests, write_profile, write_requests
from twofold.cli import replay_jobs
from twofold.cli.plan_run import frontier
from twofold.plan.execute import Here
from twofold.report.results import plan_from_json, replay_from_json
from twofold.trace import TraceRequest


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A trace of 60 requests and a profile."""
    folder = tmp_path_factory.mktemp("replay")
    trace = write_requests(folder, requests(60, rate=8, input_tokens=600, output_tokens=20))
    return trace, write_profile(folder)


def test_a_sweep_is_shown_and_written(files: tuple[Path, Path], tmp_path: Path) -> None:
    trace, profile = files
    target, page = tmp_path / "r.json", tmp_path / "r.html"
    code, out, err = command(
        *("replay", trace, "--profile", profile, "--pools", "1P1D", "--pools", "2M", "--jobs", 1),
        *("--rate-scale", "1:3:2", "--slo-ttft", 0.5, "--slo-tpot", 0.03),
        *("--json", target, "--html", page),
    )
    assert code == 0
    assert "runs: 4, of 60 requests each" in err
    assert "goal: TTFT 500 ms and TPOT 30 ms for 90 % of requests" in out
    assert all(len(line) <= 100 for line in out.splitlines())
    replay = replay_from_json(target.read_bytes())
    assert [(run.pools, run.rate_scale) for run in replay.runs] == [
        ("1P1D", 1.0),
        ("1P1D", 3.0),
        ("2M", 1.0),
        ("2M", 3.0),
    ]
    assert replay.header.trace_sha256[:12] in out
    assert replay.header.profile_sha256[:12] in out
    assert all(run.gpus == 2 and run.requests == 60 for run in replay.runs)
    assert replay.runs[0].cost_per_hour == pytest.approx(2 * 4.76)
    assert replay.runs[0].power_w == 1400
    assert replay.runs[0].queues is not None
    assert max(map(max, replay.runs[0].queues.running)) > 0
    assert "<svg" in page.read_text()


def test_json_on_stdout_is_all_there_is(files: tuple[Path, Path]) -> None:
    trace, profile = files
    code, out, err = command(
        "replay", trace, "--profile", profile, "--pools", "1M", "--json", "-", "--jobs", 1
    )
    assert code == 0
    assert replay_from_json(out.encode()).goal is None
    assert "60 rows" in err


def test_an_estimate_says_that_it_is_one(files: tuple[Path, Path]) -> None:
    code, _, err = command(
        *("replay", files[0], "--model", "Qwen3-8B", "--accelerator", "h100", "--jobs", 1),
        *("--pools", "1M"),
    )
    assert code == 0
    assert "Qwen3-8B on 1 x H100-SXM-80GB (roofline, an estimate)" in err


def test_failure_policies_are_compared_and_their_use_is_shown(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    """A prefill worker dies amid the trace; the same trace under three policies."""
    trace, profile = files
    target, page = tmp_path / "f.json", tmp_path / "f.html"
    code, out, _ = command(
        *("replay", trace, "--profile", profile, "--pools", "2P1D", "--jobs", 1),
        *("--crash", "prefill-0@0.1", "--rate-scale", 40, "--retries", 2),
        *("--failure-policy", "fail", "--failure-policy", "retry-pair"),
        *("--failure-policy", "recompute-on-decode", "--recompute-tokens-per-s", 1),
        *("--json", target, "--html", page),
    )
    assert code == 0
    runs = {run.policy: run for run in replay_from_json(target.read_bytes()).runs}
    assert list(runs) == [
        f"failure={name}" for name in ("fail", "retry-pair", "recompute-on-decode")
    ]
    fail, retry, recompute = runs.values()
    lost = fail.failed
    assert lost > 1
    assert (fail.recoveries, retry.recoveries) == ({}, {"retried": lost})
    assert retry.failed == 0
    assert recompute.recoveries == {"over_budget": lost - 1, "recomputed": 1}
    assert recompute.failed == lost - 1
    assert len({run.digest for run in runs.values()}) == 3
    lines = [line for line in out.splitlines() if line.startswith("legs that failed, ")]
    assert [line.rpartition(": ")[2] for line in lines] == [
        f"{lost} retried",
        f"{lost - 1} over budget, 1 recomputed",
    ]
    assert f"{lost} retried" in page.read_text()
    assert (retry.phases_ms["recovery"].max or 0) > 0
    assert "recovery" not in fail.phases_ms


def test_a_chrome_trace_is_of_one_run(files: tuple[Path, Path], tmp_path: Path) -> None:
    trace, profile = files
    target = tmp_path / "c.json"
    words = ("replay", trace, "--profile", profile, "--pools", "1P1D", "--chrome-trace", target)
    code, _, _ = command(*words, "--jobs", 1)
    assert code == 0
    assert len(msgspec.json.decode(target.read_bytes())["traceEvents"]) > 60
    code, _, err = command(*words, "--pools", "2M")
    assert (code, err.count("\n")) == (2, 1)
    assert "--chrome-trace: of one run, and these are 2" in err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--pools 2X", "--pools 2X: pools '2X': counts of P, D and M are right, as in 2P1D or 3M"),
        ("", "--pools: name the workers to simulate, such as --pools 2P1D --pools 3M"),
        ("--pools 1M --rate-scale 0", "--rate-scale 0: a number above 0, or A:B:STEP such as"),
        ("--pools 1M --slo-ttft x", "--slo-ttft x: must be a number above 0"),
        ("--pools 1M --chunk 0", "--chunk 0: must be a whole number from 1 to"),
        ("--pools 1M --chunk 64 --max-num-seqs 128", "--chunk 64: below --max-num-seqs 128"),
        ("--pools 1M --handoff throw", "--handoff throw: must be one of pull"),
        ("--pools 1M --policy nicest", "--policy nicest: no such policy; there are prefill="),
        ("--pools 1M --faults x", "--faults x: must be SEED or SEED:RATE with a rate from 0 to 1"),
        ("--pools 1M --faults 1:2", "--faults 1:2: must be SEED or SEED:RATE"),
        ("--pools 1M --host-bounce 0", "--host-bounce 0: must be a number above 0"),
        ("--pools 1M --prepare-ms -1", "--prepare-ms"),
        ("--pools 1M --policy capped", "--policy chunk=capped: needs --chunk-cap N"),
        ("--pools 1M --policy tpot_goal", "--policy chunk=tpot_goal: needs --slo-tpot S"),
        ("--pools 1M --policy prefill=jsq,prefill=round_robin", "two policies for prefill"),
        ("--pools 1M --window 5", "--window 5: must be A:B in seconds with A below B"),
        ("--pools 1M --window 9000:", "no request is left"),
        ("--pools 1M --cv 2", "--cv: needs --rate"),
        ("--pools 1M --tp 2", "--tp: a profile has its own; leave it out"),
        ("--pools 1M:l40s", "--pools 1M:l40s: fits no profile; there are h100:tp1"),
        ("--pools 1M --kv-blocks 10", "is larger than any mixed worker's 160 tokens of KV"),
        ("--pools 1M --memory-share 0.1", "leaves no room for KV"),
        ("--pools 1M --crash decode-0@3", "--crash decode-0: no such worker; mixed-0 are"),
        ("--pools 1M --crash mixed-0", "--crash mixed-0: must be WORKER@S or WORKER@S:DOWN_S"),
        ("--pools 1M --failure-policy hope", "--failure-policy hope: must be one of fail, retry-"),
        ("--pools 1M --retries 9", "--retries 9: must be a whole number from 1 to 8"),
        ("--pools 1M --recompute-tokens-per-s 0", "--recompute-tokens-per-s 0: must be a whole"),
        (
            "--pools 1M --failure-policy fail --policy failure=fail",
            "--failure-policy: --policy failure= says it too; leave one out",
        ),
        ("--pools 1M --html no/where.html", "--html no/where.html: no such directory"),
        ("--pools 1M --plot x.gif", "--plot x.gif: a name that ends in .png or .svg is right"),
        ("--pools 1M --usd-per-hour h100", "--usd-per-hour h100: must be NAME=X"),
        ("--pools 1M --length-divide 1.5", "--length-divide 1.5: must be a whole number"),
    ],
)
def test_bad_input_is_one_line(files: tuple[Path, Path], words: str, line: str) -> None:
    trace, profile = files
    code, out, err = command("replay", trace, "--profile", profile, *words.split())
    assert (code, out) == (2, "")
    assert err.startswith("twofold replay: ")
    assert err.count("\n") == 1
    assert line in err


def test_files_that_are_none_are_one_line(files: tuple[Path, Path], tmp_path: Path) -> None:
    trace, profile = files
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    for words, line in (
        ((tmp_path / "no.csv", "--profile", profile), "no.csv: cannot read: No such file"),
        ((empty, "--profile", profile), "empty.csv: the trace is empty; it needs a request"),
        ((trace, "--profile", tmp_path / "no.json"), "no.json: cannot read"),
        ((trace, "--profile", trace), "t.jsonl: not DistServe's coefficients"),
        ((trace,), "--profile: needed: step times come from --profile FILE, or are estimated"),
        ((trace, "--model", "Qwen3-8B"), "--accelerator: needed"),
        ((trace, "--model", "x", "--accelerator", "h100"), "x: not a known model"),
        ((trace, "--model", "Llama-3.1-70B", "--accelerator", "h100"), "more accelerators"),
    ):
        code, _, err = command("replay", *words, "--pools", "1M")
        assert (code, err.count("\n")) == (2, 1), err
        assert line in err


def test_a_request_too_large_is_counted_with_skip_bad(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    trace, profile = files
    words = ("--profile", profile, "--pools", "1M", "--kv-blocks", 50, "--jobs", 1)
    code, out, _ = command("replay", trace, *words, "--skip-bad", "--json", "-")
    assert code == 0
    (run,) = replay_from_json(out.encode()).runs
    assert 0 < run.refused < 60
    assert run.completed + run.refused == 60


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    found = [TraceRequest(0, 4000, 5)] * 6  # together more than the profile knows in one step
    trace, profile = write_requests(tmp_path, found), write_profile(tmp_path)
    words = ("replay", trace, "--profile", profile, "--pools", "1M", "--jobs", 1, "--json", "-")
    code, out, err = command(*words, "--chunk", 32768, "--chunk", 2048)
    assert code == 1
    assert "twofold replay: 1M chunk 32768 at 1x: " in err
    assert "outside the profile" in err
    assert [run.settings["chunk"] for run in replay_from_json(out.encode()).runs] == [2048]
    code, out, _ = command(*words, "--chunk", 32768, "--extrapolate")
    assert code == 0


def test_ctrl_c_keeps_what_is_done(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Impatient(Here[Any, Any]):
        def take(self) -> tuple[int, Any]:
            if len(self._waiting) == 1:
                raise KeyboardInterrupt
            return super().take()

    monkeypatch.setattr(replay_jobs, "executor", lambda work, jobs, lost: Impatient(work))
    trace, profile = files
    code, out, err = command(
        *("replay", trace, "--profile", profile, "--pools", "1M", "--pools", "2M", "--json", "-")
    )
    assert code == 130
    assert "interrupted: 1 of 2 runs are done" in err
    assert [run.pools for run in replay_from_json(out.encode()).runs] == ["1M"]


def test_ctrl_c_ends_the_processes_too(files: tuple[Path, Path], tmp_path: Path) -> None:
    trace = write_requests(tmp_path, requests(4000, rate=8, input_tokens=600, output_tokens=400))
    words = [sys.executable, "-m", "twofold", "replay", str(trace), "--profile", str(files[1])]
    words += ["--pools", "2M", "--rate-scale", "1:40:1", "--jobs", "2"]
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Ignored where whoever started the tests did so in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    while "runs: 40" not in process.stderr.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    begun = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.monotonic() - begun < 20
    assert "Traceback" not in err


# ------------------------------------------------------------------------------------- the plan


def test_a_plan_is_shown_and_written(files: tuple[Path, Path], tmp_path: Path) -> None:
    trace, profile = files
    target = tmp_path / "p.json"
    code, out, err = command(
        *("plan", trace, "--profile", profile, "--gpus", 3, "--quick", "--resamples", 2),
        *("--slo-ttft", 1, "--slo-tpot", 0.03, "--chunk", 512, "--chunk", 2048),
        *("--json", target, "--jobs", 1),
    )
    assert code == 0, err
    assert "space: 2 splits of 3 GPUs" in err
    assert "after the race: 2P1D" in err or "after the race: 1P2D" in err
    assert re.search(r"3M chunk (512|2048)( projected)? holds ", err)
    assert out.startswith("verdict: ")
    plan = plan_from_json(target.read_bytes())
    assert plan.verdict == "do not split"
    assert plan.best_unsplit is not None
    assert plan.best_unsplit.pools == "3M"
    each = plan.best_unsplit.goodput_per_gpu
    assert each is not None
    assert each.value is not None
    assert each.low is not None
    assert each.high is not None
    assert 0 < each.low <= each.value <= each.high
    assert plan.best == plan.best_unsplit
    assert plan.best_split is not None
    assert plan.best_split.pools in ("1P2D", "2P1D")
    assert "best split" in out
    assert plan.frontier
    assert "short prompts" in [rule.rule for rule in plan.rules]
    assert " tokens or more" not in plan.because


def test_a_plan_simulates_what_preparing_a_handoff_takes(files: tuple[Path, Path]) -> None:
    """On decode's loop, in pull: at 100 ms a handoff, 8 a second take most of it."""
    trace, profile = files
    held, stalls = {}, {}
    for ms in (0, 100):
        code, out, err = command(
            *("plan", trace, "--profile", profile, "--gpus", 2, "--quick"),
            *("--slo-ttft", 1, "--slo-tpot", 0.03, "--chunk", 2048, "--resamples", 0),
            *("--jobs", 1, "--json", "-", "--prepare-ms", ms),
        )
        assert code == 0, err
        plan = decoded(out)
        split = plan["best_split"]
        assert isinstance(split, dict)
        held[ms] = split["goodput_per_gpu"]["value"]
        rules = {rule["rule"]: rule["holds"] for rule in plan["rules"]}  # type: ignore[attr-defined]
        stalls[ms] = rules["handoff preparation stalls decode"]
    assert held[100] < held[0] / 2
    assert stalls == {0: False, 100: True}


def test_the_frontier_has_no_run_that_another_beats(files: tuple[Path, Path]) -> None:
    trace, profile = files
    words = ("replay", trace, "--profile", profile, "--pools", "1M", "--jobs", 1, "--json", "-")
    (run,) = replay_from_json(command(*words)[1].encode()).runs
    made = [
        msgspec.structs.replace(run, goodput_rps=goodput, slo_attainment=share, gpus=gpus)
        for goodput, share, gpus in ((4, 0.9, 1), (6, 0.95, 2), (5, 0.8, 1), (4, 0.9, 2))
    ]
    assert frontier(made) == [made[2], made[0], made[1]]


def test_one_gpu_and_no_goal_need_no_split(files: tuple[Path, Path]) -> None:
    trace, profile = files
    words = ("plan", trace, "--profile", profile, "--quick", "--resamples", 0, "--json", "-")
    for more, rule in (
        (("--gpus", 1, "--slo-tpot", 0.03), "one GPU"),
        (("--gpus", 2), "no latency goal"),
    ):
        code, out, err = command(*words, "--jobs", 1, "--chunk", 2048, *more)
        assert code == 0, err
        assert f"no split is simulated: {rule}" in err
        plan = plan_from_json(out.encode())
        assert plan.verdict == "do not split"
        assert [found.holds for found in plan.rules if found.rule == rule] == [True]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "--gpus: needed: how many accelerators there are"),
        ("--gpus 0", "--gpus 0: must be a whole number from 1"),
        ("--gpus 2 --rate-scale 1:2:1", "--rate-scale 1:2:1: must be a number above 0"),
        ("--gpus 2 --block-size 16 --block-size 32", "--block-size: once; a plan tries"),
        ("--gpus 2 --equal money", "--equal: invalid choice: 'money'"),
        ("--gpus 2 --kv-blocks 9", "is larger than any prefill worker's 144 tokens of KV"),
    ],
)
def test_a_bad_wish_is_one_line(files: tuple[Path, Path], words: str, line: str) -> None:
    trace, profile = files
    code, out, err = command("plan", trace, "--profile", profile, *words.split())
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert line in err
