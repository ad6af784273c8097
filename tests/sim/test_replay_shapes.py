"""What any trace must show: where a split helps, where it does not, and what moves its ratio.

The rates are found by the plan's own bisection, on traces and profiles made up to be quick.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec
import pytest

from tests.unit.plan_support import requests, scenario, write_profile, write_requests
from tests.unit.published import published
from twofold.metrics.slo import Slo
from twofold.plan.bisect import Held, drive, highest
from twofold.plan.execute import Here
from twofold.plan.known import start_scale
from twofold.plan.placement import ROUTINGS
from twofold.plan.runner import Probe, attempt
from twofold.plan.scenario import Engine, Scenario
from twofold.plan.workload import requests_of, summary

GOALS = Slo(ttft_ms=600, tpot_ms=14)
ENGINE = Engine(max_num_seqs=128, chunk_tokens=2048)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shapes")


@cache
def trace(folder: Path, input_tokens: int, output_tokens: int) -> Path:
    # Long answers need more requests, lest all of them are in flight at once at any rate.
    n = 140 if output_tokens < 100 else 250
    found = requests(n, rate=10, input_tokens=input_tokens, output_tokens=output_tokens)
    return write_requests(folder, found, f"{input_tokens}-{output_tokens}.jsonl")


def like(
    folder: Path, pools: str, *, lengths: tuple[int, int] = (1500, 60), engine: Engine = ENGINE
) -> Scenario:
    made = scenario(trace(folder, *lengths), write_profile(folder), pools, slo=GOALS, engine=engine)
    return msgspec.structs.replace(made, attainment=0.9)


def at(made: Scenario, scale: float) -> Probe:
    found = attempt(msgspec.structs.replace(made, rate_scale=scale))
    assert isinstance(found, Probe), found
    return found


def held(*made: Scenario, within: float = 1.08) -> list[Held]:
    searches = [
        highest(
            0.9, start=start_scale(one, summary(requests_of(one.workload, 0).rows)), within=within
        )
        for one in made
    ]
    with Here(attempt) as where:
        return drive(searches, made, where)


def test_at_low_rate_unsplit_is_as_good_or_better(folder: Path) -> None:
    split, unsplit = (at(like(folder, pools), 0.1) for pools in ("1P1D", "2M"))
    assert unsplit.attainment >= split.attainment
    assert unsplit.ttft_ms <= split.ttft_ms, "a handoff costs time and buys nothing yet"


def test_past_the_knee_the_split_holds_what_unsplit_does_not(folder: Path) -> None:
    chunks = [msgspec.structs.replace(ENGINE, chunk_tokens=n) for n in (256, 1024, 2048)]
    ratios = held(*(like(folder, pools) for pools in ("1P3D", "2P2D", "3P1D")))
    tuned = held(*(like(folder, "4M", engine=engine) for engine in chunks))
    best = max(ratios, key=lambda found: found.scale)
    other = max(tuned, key=lambda found: found.scale)
    assert best.scale > other.scale * 1.05
    broke = at(like(folder, "4M", engine=chunks[tuned.index(other)]), best.scale)
    assert broke.attainment < 0.9
    assert broke.tpot_share < broke.ttft_share, "prompts between its decode steps are what breaks"


def test_the_winning_ratio_moves_with_the_length_mix(folder: Path) -> None:
    names = ("1P3D", "2P2D", "3P1D")
    winners = []
    for lengths in ((4000, 12), (300, 300)):
        found = held(*(like(folder, pools, lengths=lengths) for pools in names), within=1.15)
        winners.append(names[max(range(3), key=lambda i: found[i].scale)])
    assert winners == ["3P1D", "1P3D"], "long prompts want prefill, long answers decode"


def test_shrinking_decode_brings_the_knee(folder: Path) -> None:
    lengths = (300, 300)
    found = held(*(like(folder, pools, lengths=lengths) for pools in ("2P3D", "2P2D", "2P1D")))
    scales = [one.scale for one in found]
    assert scales[0] > scales[1] * 1.1 > scales[2] * 1.1 * 1.1


def test_doubling_the_block_size_moves_no_plan(folder: Path) -> None:
    engines = [msgspec.structs.replace(ENGINE, block_size=n) for n in (16, 32)]
    for pools in ("1P1D", "2M"):
        one, two = held(*(like(folder, pools, engine=engine) for engine in engines))
        assert two.scale == pytest.approx(one.scale, rel=0.09)


def test_a_slower_link_is_seen_in_the_transfer(folder: Path) -> None:
    made = like(folder, "1P1D")
    slow = msgspec.structs.replace(made, link_bytes_per_s=1_000_000_000)
    quick, late = at(made, 0.02), at(slow, 0.02)
    # 131,072 bytes a token, and 50 GB/s where nothing is said.
    assert late.phases_ms["transfer"] == pytest.approx(quick.phases_ms["transfer"] * 50, rel=0.2)
    assert late.ttft_ms > quick.ttft_ms + 100


# ---------------------------------------------------------------------------- published traces


def published_like(name: str, pools: str, chunk_tokens: int = 8192) -> Scenario:
    """200 requests of an Azure trace on H100s, from a table of step times."""
    made = scenario(
        published(f"traces/{name}.csv"),
        published("profiles/aiconfigurator_steps/Meta-Llama-3.1-8B__h100_sxm__vllm__tp1.csv"),
        pools,
        slo=Slo(ttft_ms=500, tpot_ms=20),
        engine=msgspec.structs.replace(ENGINE, chunk_tokens=chunk_tokens),
    )
    workload = msgspec.structs.replace(made.workload, requests=200)
    return msgspec.structs.replace(made, workload=workload)


def test_at_low_rate_published_traces_gain_nothing_from_a_split() -> None:
    for name in ("azure2023_conv", "azure2023_code"):
        split, unsplit = (at(published_like(name, p, 1024), 0.1) for p in ("1P1D", "2M"))
        assert unsplit.holds(0.9)
        assert unsplit.ttft_ms < split.ttft_ms
        assert unsplit.phases_ms.get("transfer", 0) == 0 < split.phases_ms["transfer"]


def test_code_wants_more_prefill_than_conversation() -> None:
    gains = []
    for name in ("azure2023_code", "azure2023_conv"):
        pair = [published_like(name, pools) for pools in ("3P1D", "1P3D")]
        # A TPOT that decode can miss within so short a trace.
        tight = Slo(ttft_ms=500, tpot_ms=9)
        more, less = held(*(msgspec.structs.replace(s, slo=tight) for s in pair), within=1.15)
        gains.append(more.scale / less.scale)
    assert gains[0] > 1 > gains[1], "code has long prompts and short answers"


def tight(name: str, pools: str, engine: Engine = ENGINE) -> Scenario:
    """A published trace under a TPOT that prompts between decodes can break."""
    made = published_like(name, pools)
    return msgspec.structs.replace(made, slo=Slo(ttft_ms=500, tpot_ms=9), engine=engine)


def test_past_the_knee_the_split_holds_a_published_trace() -> None:
    name = "azure2023_code"
    chunks = [msgspec.structs.replace(ENGINE, chunk_tokens=n) for n in (256, 1024, 8192)]
    split = held(tight(name, "3P1D"), within=1.1)[0].scale
    unsplit = [
        msgspec.structs.replace(tight(name, "4M", engine), policies=(("split", routing),))
        for engine in chunks
        for routing in ROUTINGS
    ]
    tuned = held(*unsplit, within=1.1)
    most = max(found.scale for found in tuned)
    assert split > most * 1.2
    best = unsplit[[found.scale for found in tuned].index(most)]
    assert at(best, split).attainment < 0.9
    whole = at(tight(name, "4M", chunks[-1]), split)
    assert whole.tpot_share < 0.9, "whole prompts between decode steps break their TPOT"


def test_shrinking_decode_brings_the_knee_on_a_published_trace() -> None:
    found = held(
        *(tight("azure2023_conv", pools) for pools in ("2P3D", "2P2D", "2P1D")), within=1.1
    )
    scales = [one.scale for one in found]
    assert scales[0] > scales[1] * 1.1 > scales[2] * 1.1 * 1.1


def test_doubling_the_block_size_moves_no_plan_of_a_published_trace() -> None:
    engines = [msgspec.structs.replace(ENGINE, block_size=n) for n in (16, 32)]
    names = ("1P3D", "2P2D", "3P1D")
    winners = []
    for engine in engines:
        found = held(*(tight("azure2023_conv", pools, engine) for pools in names), within=1.1)
        winners.append((max(range(3), key=lambda i: found[i].scale), [one.scale for one in found]))
    assert winners[0][0] == winners[1][0]
    assert winners[1][1] == pytest.approx(winners[0][1], rel=0.1)
