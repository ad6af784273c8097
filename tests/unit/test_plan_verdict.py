"""Verdicts from made-up findings: the word, the numbers and the reason."""

from __future__ import annotations

import msgspec
import pytest

from twofold.metrics.slo import Slo
from twofold.plan.bisect import Held
from twofold.plan.hardware import Hardware
from twofold.plan.placement import Candidate
from twofold.plan.rules import Rule
from twofold.plan.runner import Probe
from twofold.plan.search import Finding
from twofold.plan.verdict import Case, decide, forbidding
from twofold.sim.pools import parse_pools


def probe(scale: float, ttft: float, tpot: float, *, slots_peak: int = 10) -> Probe:
    return Probe(
        rate_scale=scale,
        offered_rps=scale * 5,
        attainment=min(ttft, tpot),
        ttft_share=ttft,
        tpot_share=tpot,
        goodput_rps=scale * 5 * min(ttft, tpot),
        ttft_ms=800.0,
        tpot_ms=45.0,
        phases_ms={"prefill_queue": 300.0, "prefill": 100.0},
        slots=100,
        slots_peak=slots_peak,
        lost=0,
    )


def finding(pools: str, scale: float, *, resampled: tuple[float, ...] = ()) -> Finding:
    parsed = parse_pools(pools)
    candidate = Candidate(
        pools=parsed,
        hardware=(Hardware(model="Qwen3-8B", accelerator="h100"),) * len(parsed),
        chunk_tokens=512,
        family=0,
        place=0,
    )
    held = Held(held=probe(scale, 0.95, 0.95) if scale else None, broke=None)
    return Finding(candidate=candidate, coarse=held, fine=held, resampled=resampled)


def case(split: float, unsplit: float, load: float, **changes: object) -> Case:
    """Set-ups that hold these rate scales; below, all is well, above, TPOT breaks first."""

    def at(scale: float) -> Probe:
        good = load <= scale
        return probe(load, 0.99, 0.98 if good else 0.4)

    made = Case(
        split=finding("1P3D", split),
        unsplit=finding("4M", unsplit),
        slo=Slo(ttft_ms=500, tpot_ms=30),
        attainment=0.9,
        load=load,
        judge="load",
        at_load=(at(split), at(unsplit)),
        pushed=probe(max(split, unsplit), 0.99, 0.4),
        gpus=4,
    )
    return msgspec.structs.replace(made, **changes)


@pytest.mark.parametrize(
    ("split", "unsplit", "load", "by_load", "by_capacity"),
    [
        (4.0, 2.0, 1.0, "do not split", "split"),
        (4.0, 2.0, 3.0, "split", "split"),
        (2.0, 4.0, 1.0, "do not split", "do not split"),
        (2.0, 4.0, 3.0, "do not split", "do not split"),
        (2.04, 2.0, 1.0, "do not split", "do not split"),
        (4.0, 2.0, 5.0, "cannot meet", "cannot meet"),
        (0.0, 0.0, 1.0, "cannot meet", "cannot meet"),
    ],
)
def test_the_word(
    split: float, unsplit: float, load: float, by_load: str, by_capacity: str
) -> None:
    made = case(split, unsplit, load)
    assert decide(made).word == by_load
    assert decide(msgspec.structs.replace(made, judge="capacity")).word == by_capacity


def test_a_split_is_explained_by_what_breaks_unsplit() -> None:
    because = decide(case(4.0, 2.0, 3.0)).because
    assert "At 3x the trace's rate (15.0 req/s) the best unsplit set-up, 4M with" in because
    assert "meets the goal for 40 % of requests" in because
    assert "the best split, 1P3D, for 98 %" in because
    assert "TPOT broke first, met by 40 % against 99 % for TTFT" in because
    assert "its TPOT is 45.0 ms at 90 %, goal 30.0 ms" in because
    assert "prompts are read between its decode steps" in because
    assert "Held at most: 2.50 req/s per GPU unsplit, 5.00 req/s per GPU split." in because
    assert "within the 80 % rule" in because


def test_a_split_that_starves_for_prefill_is_explained_by_its_phases() -> None:
    made = case(2.0, 4.0, 3.0, pushed=probe(4.0, 0.3, 0.99))
    because = decide(made).because
    assert "1P3D has 30 %: TTFT broke first" in because
    assert "its TTFT is 800 ms at 90 %, goal 500 ms, 75 % of the mean in prefill queue" in because


def test_headroom_is_told_where_unsplit_is_enough() -> None:
    because = decide(case(4.0, 2.0, 1.0)).because
    assert "Splitting would pay from 2x the trace's rate on" in because


def test_resamples_give_an_interval_and_count_wins() -> None:
    made = msgspec.structs.replace(
        case(4.0, 2.0, 3.0),
        split=finding("1P3D", 4.0, resampled=(18.0, 22.0, 9.0)),
        unsplit=finding("4M", 2.0, resampled=(11.0, 12.0, 10.0)),
    )
    because = decide(made).because
    assert "5.00 req/s per GPU (2.25 to 5.50 over resamples) split" in because
    assert "2.50 req/s per GPU (2.50 to 3.00 over resamples) unsplit" in because
    assert "; the split holds more on 2 of 3 resamples" in because


def test_too_little_says_how_much_would_do() -> None:
    because = decide(case(4.0, 2.0, 6.0)).because
    assert "1P3D holds 4x (20.0 req/s); at that rate per GPU, about 6 GPUs are needed." in because
    assert "90 % are wanted: TPOT broke first" in because
    assert "too tight for these GPUs" in decide(case(0.0, 0.0, 1.0)).because


def test_a_trace_too_short_for_queues_is_told() -> None:
    short = finding("1P3D", 4.0)
    held = short.best.held
    assert held is not None
    held = msgspec.structs.replace(held, arrivals_s=3.0, e2e_s=1.0)
    fine = Held(held=held, broke=None)
    made = msgspec.structs.replace(
        case(4.0, 2.0, 3.0), split=msgspec.structs.replace(short, fine=fine)
    )
    because = decide(made).because
    assert "its arrivals take 3.00 s, an answer 1.00 s" in because
    assert "The trace is short" not in decide(case(4.0, 2.0, 3.0)).because


def test_full_slots_are_told() -> None:
    full = probe(3.0, 0.99, 0.98, slots_peak=90)
    because = decide(case(4.0, 2.0, 3.0, at_load=(full, probe(3.0, 0.99, 0.4)))).because
    assert "At peak 90 of 100 decode slots are held, 90 %, over the 80 % rule." in because


def test_a_rule_settles_it_without_a_split() -> None:
    rules = (
        Rule(rule="short prompts", holds=True, because="so"),
        Rule(rule="no latency goal", holds=True, because="nobody waits"),
    )
    assert forbidding(rules) == rules[1]
    assert forbidding(rules[:1]) is None
    at_load = (None, probe(1.0, 0.99, 0.98))
    made = msgspec.structs.replace(case(0.0, 2.0, 1.0), split=None, rules=rules, at_load=at_load)
    verdict = decide(made)
    assert verdict.word == "do not split"
    assert verdict.because.startswith("Nobody waits. 4M with chunks of 512 meets the goal for 98 %")
