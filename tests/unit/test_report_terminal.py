"""Tables for the terminal, and how set-ups are named and chosen."""

from __future__ import annotations

import io
import math
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from twofold.report.results import Interval, Plan, Replay, Rule, replay_of
from twofold.report.setups import (
    MOST_SHORT,
    best_of,
    contenders,
    drawn_up_to,
    holds_up_to,
    pool_counts,
    reading,
    setups_of,
    side_by_side,
)
from twofold.report.terminal import show_plan, show_replay
from twofold.report.words import milliseconds, number, percent, shorten, whole_percent

from .report_support import GOAL, HEADER, RATES, SETUPS, run, sweep


def shown(result: Replay | Plan, *, terminal: bool = False) -> str:
    file = io.StringIO()
    console = Console(
        file=file,
        width=100,
        force_terminal=terminal,
        color_system="standard" if terminal else "auto",
    )
    show_plan(console, result) if isinstance(result, Plan) else show_replay(console, result)
    return file.getvalue()


def plan(**changes: Any) -> Plan:
    best = run("2P2D", goodput_per_gpu=Interval(value=4.2, low=4.0, high=4.4))
    unsplit = run("4M", capacity=2.1, goodput_per_gpu=Interval(value=3.1, low=2.9, high=3.3))
    fields: dict[str, Any] = {
        "header": HEADER,
        "goal": GOAL,
        "verdict": "split",
        "because": "2P2D serves 35 % more per GPU than 4M.",
        "best": best,
        "best_unsplit": unsplit,
        "frontier": [best, unsplit],
        "rules": [Rule(rule="one GPU", holds=False, because="there are 4 [b]GPUs[/b]")],
    }
    return Plan(**{**fields, **changes})


def lines_with(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


def test_every_run_is_in_the_table_with_its_figures() -> None:
    replay = sweep()
    text = shown(replay)
    for pools, _ in SETUPS:
        rows = [line for line in lines_with(text, pools) if " met " in line or " missed " in line]
        assert len(rows) == len(RATES)
        for row, rate in zip(rows, RATES, strict=True):
            (one,) = [r for r in replay.runs if r.pools == pools and r.rate_scale == rate]
            cells = row.replace("*", " ").split()
            assert cells[1] == f"{rate:g}x"
            assert cells[2] == number(one.offered_rps)
            assert f" {percent(one.slo_attainment)}" in row.replace("*", " ")
    assert "never" in text  # a tenth is refused at 4x
    assert replay.digest in text


def test_the_best_at_a_rate_is_marked_by_a_star() -> None:
    text = shown(sweep())
    rows = text.partition("where the mean")[0].splitlines()
    at_three = [line for line in rows if " 3x " in line]
    attained = {line.split()[0]: "%*" in line for line in at_three}
    assert attained == {"1P3D": False, "2P2D": True, "3P1D": False, "4M": False}


def test_nothing_is_marked_where_all_are_equal() -> None:
    one = run()
    twin = msgspec.structs.replace(one, label="twin")
    assert "*" not in shown(replay_of(HEADER, [one, twin], GOAL))


def test_the_table_fits_a_hundred_columns() -> None:
    runs = [
        run(label=f"a set-up number {i} with quite a long name", gpus=4 + i, slots=9, slots_peak=7,
            cost_per_hour=98765.0, rate=rate, capacity=0.2)
        for i in range(14)
        for rate in (1.0, 4.0)
    ]  # fmt: skip
    for result in (sweep(), replay_of(HEADER, runs, GOAL), plan(), plan(runs=runs)):
        text = shown(result)
        assert max(map(len, text.splitlines())) <= 100
        assert "\x1b" not in text
        assert "…" not in text
    assert "\x1b[" in shown(sweep(), terminal=True)


def test_columns_that_do_not_fit_are_left_out_whole() -> None:
    runs = [run(label=f"a name of 24 letters {i:03}", cost_per_hour=98765.0) for i in range(3)]
    runs += [run(label=f"lost {i}", rate=4.0, slots=9, slots_peak=7) for i in range(2)]
    table = shown(replay_of(HEADER, runs, GOAL)).splitlines()
    (heads,) = [line for line in table if line.startswith("set-up")]
    assert re.split(r"  +", heads.strip()) == [
        "set-up", "rate", "req/s", "attain", "goal", "good/s", "lost", "TTFT p50", "TTFT p99",
        "TPOT p99",
    ]  # fmt: skip
    rows = [line for line in table if " 2x " in line and "%" in line and "Read" not in line]
    assert len(rows) == 3
    one = runs[0]
    for row in rows:
        assert row.replace("*", "").split()[-2:] == [
            number(one.ttft_ms.p99),
            number(one.tpot_ms.p99),
        ]


def test_names_with_markup_are_text() -> None:
    text = shown(replay_of(HEADER, [run(label="[red]x[/red]"), run(label="[/]")], GOAL))
    assert "[red]x[/red]" in text
    assert "[/]" in text
    assert "there are 4 [b]GPUs[/b]" in shown(plan())


def test_phase_bars_are_as_long_as_the_phases() -> None:
    text = shown(sweep([1.0]))
    (bar,) = [line for line in lines_with(text, "2P2D") if line.endswith(" ms") and "PP" in line]
    letters = bar.split()[1]
    assert "".join(dict.fromkeys(letters)) == "qpPhTFR"
    # 43 of 68 ms are prefill.
    assert letters.count("P") / len(letters) == pytest.approx(43 / 68, abs=0.02)


def test_a_bar_that_would_dwarf_the_others_is_cut() -> None:
    rows = side_by_side(setups_of(sweep().runs), GOAL)
    assert {row.run.rate_scale for row in rows} == {3.0}
    totals = {r.setup.name: sum(p.mean or 0 for p in r.run.phases_ms.values()) for r in rows}
    assert drawn_up_to(rows, GOAL) == 3 * totals["2P2D"]
    assert [line.count(">") for line in lines_with(shown(sweep()), "1P3D") if "pp" in line] == [1]
    alone = [row for row in rows if row.setup.name == "1P3D"]
    assert drawn_up_to(alone, GOAL) == totals["1P3D"]
    assert drawn_up_to([], GOAL) == 0


def test_a_plan_shows_verdict_interval_and_rules() -> None:
    text = shown(plan())
    assert text.startswith("verdict: split\n2P2D serves 35 % more per GPU than 4M.\n")
    (best,) = lines_with(text, "best  ")
    assert best.split()[1:6] == ["2P2D", "4", "4.20", "4", "4.40"]
    (rule,) = lines_with(text, "no ")
    assert "one GPU" in rule
    none = shown(plan(best=None, best_unsplit=None, frontier=[], verdict="cannot meet", rules=[]))
    assert none.startswith("verdict: cannot meet")


def test_a_result_without_runs_says_so() -> None:
    assert "There are no runs." in shown(replay_of(HEADER, [], GOAL))


# -------------------------------------------------------------------------- set-ups


def test_pools_are_counted() -> None:
    assert pool_counts("2P1D") == (2, 1, 0)
    assert pool_counts("12M") == (0, 0, 12)
    assert pool_counts("2P:h100,2D:h200") == (2, 2, 0)
    assert pool_counts("1p1d2m") == (1, 1, 2)


def test_a_name_says_what_varies() -> None:
    runs = [
        run(handoff="push"),
        run(handoff="pull"),
        run("4M", settings={"chunk": 512, "tp": 2}),
        run("4M", settings={"chunk": 2048, "tp": 2}),
    ]
    names = ["2P2D push", "2P2D pull", "4M chunk 512", "4M chunk 2048"]
    assert [setup.name for setup in setups_of(runs)] == names
    assert [setup.name for setup in setups_of(runs[2:3])] == ["4M"]
    assert [setup.name for setup in setups_of(runs[2:3], among=runs)] == ["4M chunk 512"]
    both = setups_of([run(label="x"), run(label="x", handoff="push")])
    assert [setup.name for setup in both] == ["x", "x #2"]


@given(st.lists(st.text("ab", min_size=1, max_size=40), min_size=1, max_size=12, unique=True))
def test_short_names_are_short_and_differ(labels: list[str]) -> None:
    base = run()
    setups = setups_of([msgspec.structs.replace(base, label=label) for label in labels])
    short = [setup.short for setup in setups]
    assert len(set(short)) == len(labels)
    assert max(map(len, short)) <= MOST_SHORT


def test_a_setup_holds_the_goal_up_to_its_first_miss() -> None:
    held = {setup.name: holds_up_to(setup, GOAL) for setup in setups_of(sweep().runs)}
    assert {name: one and one.rate_scale for name, one in held.items()} == {
        "1P3D": 1.0, "2P2D": 3.0, "3P1D": 2.0, "4M": 2.0,
    }  # fmt: skip
    # A later rate that happens to be met does not count.
    runs = [msgspec.structs.replace(run(), rate_scale=r, slo_attainment=a)
            for r, a in ((1.0, 0.95), (2.0, 0.5), (3.0, 0.95))]  # fmt: skip
    (setup,) = setups_of(runs)
    assert holds_up_to(setup, GOAL) == runs[0]
    assert holds_up_to(setup, None) == runs[2]


def test_the_best_of_both_kinds_is_compared_at_one_rate() -> None:
    rows = side_by_side(setups_of(sweep().runs), GOAL)
    assert [row.setup.name for row in contenders(rows, GOAL)] == ["2P2D", "4M"]
    assert contenders([], GOAL) == []
    none_meets = side_by_side(setups_of(sweep([4.0]).runs), GOAL)
    assert {row.run.rate_scale for row in none_meets} == {4.0}
    all_miss = side_by_side(setups_of([run(rate=r, capacity=0.1) for r in (1.0, 2.0)]), GOAL)
    assert [row.run.rate_scale for row in all_miss] == [1.0]


def test_with_more_gpus_the_rate_per_gpu_decides() -> None:
    small = msgspec.structs.replace(run("1P1D", rate=2.0, gpus=2), slo_attainment=0.95)
    large = msgspec.structs.replace(run("4M", rate=2.0, gpus=8), slo_attainment=1.0)
    rows = side_by_side(setups_of([large, small]), GOAL)
    best = best_of(rows, GOAL)
    assert best is not None
    assert best.setup.name == "1P1D"


def test_a_reading_says_who_is_best_and_how_far_it_goes() -> None:
    said = " ".join(reading(setups_of(sweep().runs), GOAL))
    assert said.startswith("At 3x the trace's rate (30.8 req/s), ")
    assert "on 2P2D, the most of 4 set-ups. The best unsplit set-up, 4M, has " in said
    assert "2P2D holds the goal up to 3x (30.8 req/s). 4M holds the goal up to 2x" in said
    low = reading(setups_of([run(capacity=0.1)]), GOAL)
    assert low[-1] == "2P2D misses the goal at 2x already."
    top = reading(setups_of([run()]), GOAL)
    assert "up to the highest rate tried, 2x" in top[-1]
    assert "requests finish on 2P2D" in reading(setups_of([run()]), None)[0]


# --------------------------------------------------------------------------- words


def test_figures_read_well() -> None:
    assert [number(v) for v in (0, 0.01234, 4.2, 42.24, 424.4, 12345.6, -3, None)] == [
        "0", "0.0123", "4.20", "42.2", "424", "12,346", "-3", "-",
    ]  # fmt: skip
    assert [percent(v) for v in (0, 0.0001, 0.5, 0.9999, 1, None)] == [
        "0 %", "< 0.1 %", "50.0 %", "99.9 %", "100 %", "-",
    ]  # fmt: skip
    assert [milliseconds(v) for v in (0.42, 83.06, 2400, 90_000, None)] == [
        "0.42 ms", "83.1 ms", "2.40 s", "1.50 min", "-",
    ]  # fmt: skip
    assert [whole_percent(v) for v in (0.9, 0.995, 1)] == ["90 %", "99.5 %", "100 %"]


@given(st.floats(0, 1))
def test_only_all_is_a_hundred_percent(share: float) -> None:
    assert (percent(share) == "100 %") == (share == 1)
    assert (percent(share) == "0 %") == (share == 0)
    assert not math.isnan(float(percent(share).removesuffix(" %").removeprefix("< ")))


@given(st.text(max_size=40), st.integers(9, 30))
def test_a_short_name_keeps_both_ends(name: str, most: int) -> None:
    short = shorten(name, most)
    assert len(short) <= most
    if len(name) <= most:
        assert short == name
    else:
        assert (short[0], short[-1]) == (name[0], name[-1])
