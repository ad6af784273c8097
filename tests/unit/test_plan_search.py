"""The search over a space whose answers are known beforehand, without simulating anything."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from tests.unit.plan_support import requests, scenario, write_profile, write_requests
from tests.unit.test_plan_bisect import probe
from twofold.plan.bisect import Outcome
from twofold.plan.execute import Here
from twofold.plan.hardware import read_machine
from twofold.plan.placement import enumerate_space
from twofold.plan.runner import Problem
from twofold.plan.scenario import Scenario
from twofold.plan.search import Effort, Finding, Progress, search
from twofold.plan.verdict import setup_words
from twofold.sim.pools import pools_name

GPUS = 40
BEST = 13  # prefill workers of the best split


def capacity(found: Scenario) -> float:
    """Rate scales up to which a set-up holds: splits peak at one ratio, unsplit at one chunk."""
    if not found.split:
        return {256: 4.0, 1024: 6.0, 4096: 5.0}[found.engine.chunk_tokens]
    return 9.0 - abs(found.pools[0].count - BEST) * 0.2


@pytest.fixture
def like(tmp_path: Path) -> Scenario:
    trace = write_requests(tmp_path, requests(400, rate=9, input_tokens=50, output_tokens=5))
    return scenario(trace, write_profile(tmp_path), "1M")


class Told:
    """What a search says of itself, and every run that it asks for."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.ticks = 0
        self.runs: Counter[str] = Counter()

    def work(self, found: Scenario) -> Outcome:
        self.runs[found.name + f" of {found.workload.sample}"] += 1
        holds = capacity(found) * (1.0, 0.9, 1.1)[found.workload.resample % 3]
        return probe(found.rate_scale, 1.0 if found.rate_scale <= holds else 0.9 * holds / 10)

    def say(self, stage: str, runs: int) -> None:
        self.stages.append(stage)

    def tick(self) -> None:
        self.ticks += 1


def run(like: Scenario, told: Told, effort: Effort) -> tuple[list[Finding], list[Finding]]:
    machine = read_machine(like.hardware[0])
    space = enumerate_space([machine], GPUS, chunks=(256, 1024, 4096))
    return search(space, like, effort, Here(told.work), Progress(told.say, told.tick))


def test_it_finds_the_best_ratio_and_chunk_in_few_runs(like: Scenario) -> None:
    told = Told()
    splits, unsplit = run(like, told, Effort(race=100, whole=200, resample=100, resamples=3))
    assert pools_name(splits[0].candidate.pools) == f"{BEST}P{GPUS - BEST}D"
    assert splits[0].best.scale == pytest.approx(9.0, rel=0.02)
    assert unsplit[0].candidate.chunk_tokens == 1024
    assert unsplit[0].best.scale == pytest.approx(6.0, rel=0.02)
    assert splits[0].coarse.scale > 9.0 / 1.26, "the race ended too early"
    assert sum(told.runs.values()) == told.ticks < 160, "39 ratios, 3 chunks, 2 ways to route"
    assert max(told.runs.values()) == 1, "the same run twice"
    assert told.stages[0].startswith("7 splits on ")


def test_winners_alone_get_an_interval(like: Scenario) -> None:
    effort = Effort(race=100, whole=200, resample=100, resamples=3)
    splits, unsplit = run(like, Told(), effort)
    for findings, rate in ((splits, 90), (unsplit, 60)):
        assert [bool(f.resampled) for f in findings] == [True] + [False] * (len(findings) - 1)
        interval = findings[0].interval
        assert interval is not None
        assert interval[0] == pytest.approx(rate * 0.9, rel=0.04)
        assert interval[1] == pytest.approx(rate * 1.1, rel=0.04)
    assert sum(f.fine is not None for f in splits) == effort.splits
    assert run(like, Told(), msgspec.structs.replace(effort, resamples=0))[0][0].interval is None


@pytest.mark.parametrize("better", ["always", "projected"])
def test_unsplit_workers_are_routed_by_what_holds_more(like: Scenario, better: str) -> None:
    class Routed(Told):
        def work(self, found: Scenario) -> Outcome:
            holds = 6.0 if dict(found.policies).get("split") == better else 5.0
            return probe(found.rate_scale, 1.0 if found.rate_scale <= holds else 0.1)

    _, unsplit = run(like, Routed(), Effort(race=100, resamples=0))
    assert unsplit[0].candidate.routing == better
    assert unsplit[0].best.scale == pytest.approx(6.0, rel=0.02)
    words = " routed by projected time" if better == "projected" else ""
    assert setup_words(unsplit[0]) == f"{GPUS}M with chunks of 256{words}"


def test_a_goal_that_nothing_meets_ends(like: Scenario) -> None:
    class Never(Told):
        def work(self, found: Scenario) -> Outcome:
            super().work(found)
            return probe(found.rate_scale, 0.2)

    splits, unsplit = run(like, Never(), Effort(race=100, resamples=2))
    assert splits[0].best.held is unsplit[0].best.held is None
    assert splits[0].resampled == ()


def test_set_ups_that_fail_lose_to_those_that_run(like: Scenario) -> None:
    class Failing(Told):
        def work(self, found: Scenario) -> Outcome:
            if found.engine.chunk_tokens == 1024:
                return Problem(scenario=found.name, reason="outside the profile")
            return super().work(found)

    _, unsplit = run(like, Failing(), Effort(race=100, resamples=0))
    assert unsplit[0].candidate.chunk_tokens == 4096
    assert unsplit[-1].best.problem == "outside the profile"
