"""Bisection over the rate: brackets, precision, and what it does with runs that fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.plan.bisect import HIGHEST, LOWEST, Held, Outcome, highest, neat
from twofold.plan.runner import Probe, Problem


def probe(scale: float, attainment: float) -> Probe:
    return Probe(
        rate_scale=scale,
        offered_rps=scale * 10,
        attainment=attainment,
        ttft_share=attainment,
        tpot_share=1.0,
        goodput_rps=scale * 10 * attainment,
        ttft_ms=1.0,
        tpot_ms=1.0,
        phases_ms={},
        slots=1,
        slots_peak=1,
        lost=0,
    )


def solve(
    answer: Callable[[float], Outcome], *, start: float = 1.0, within: float = 1.02
) -> tuple[Held, list[float]]:
    search = highest(0.9, start=start, within=within)
    scale, tried = next(search), []
    while True:
        tried.append(scale)
        try:
            scale = search.send(answer(scale))
        except StopIteration as ended:
            return ended.value, tried


def knee_at(knee: float) -> Callable[[float], Outcome]:
    return lambda scale: probe(scale, 1.0 if scale <= knee else 0.5)


@given(st.floats(0.001, 1000), st.floats(0.01, 100))
def test_it_finds_a_knee_from_any_start(knee: float, start: float) -> None:
    held, tried = solve(knee_at(knee), start=start)
    assert held.held is not None
    assert held.broke is not None
    assert held.scale <= knee < held.broke.rate_scale <= held.scale * 1.021
    assert len(tried) == held.runs == len(set(tried)), "a rate was run twice"
    assert held.runs < 25


def test_the_rate_is_that_of_the_run_that_held() -> None:
    held, _ = solve(knee_at(3.3))
    assert held.rate_rps == pytest.approx(33, rel=0.03)


def test_a_goal_that_no_rate_meets_ends_at_the_lowest() -> None:
    held, tried = solve(knee_at(0.0))
    assert (held.held, held.scale, held.rate_rps) == (None, 0.0, 0.0)
    assert min(tried) >= LOWEST
    assert held.broke is not None


def test_a_goal_that_every_rate_meets_ends_at_the_highest() -> None:
    held, tried = solve(knee_at(float("inf")))
    assert held.broke is None
    assert held.scale == max(tried) > HIGHEST / 5


def test_runs_that_fail_bound_the_search_and_are_named() -> None:
    def answer(scale: float) -> Outcome:
        if scale > 2:
            return Problem(scenario="s", reason="outside the profile")
        return probe(scale, 1.0)

    held, _ = solve(answer)
    assert held.scale == pytest.approx(2, rel=0.03)
    assert (held.broke, held.problem) == (None, "outside the profile")


def test_attainment_that_is_not_even_still_ends() -> None:
    held, tried = solve(lambda scale: probe(scale, 0.95 if round(scale * 10) % 3 else 0.5))
    assert held.held is not None
    assert len(tried) < 40


def test_rates_are_numbers_that_can_be_typed() -> None:
    assert neat(1.23456) == 1.235
    assert neat(123456.0) == 123500.0
    assert neat(0.000123456) == 0.0001235
