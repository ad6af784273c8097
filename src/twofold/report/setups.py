"""Runs grouped into set-ups, and which of them to set side by side."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from twofold.report.results import Goal, Plan, Replay, Run
from twofold.report.words import (
    count,
    milliseconds,
    number,
    percent,
    scale,
    shorten,
    spoken,
    whole_percent,
)

MOST_SHORT: Final = 24

_PART: Final = re.compile(r"(\d+)([PDM])", re.IGNORECASE)


class Setup(NamedTuple):
    """One set-up at all the rates that it ran at, from the lowest.

    `short` is its name in at most `MOST_SHORT` characters, as unique as the name.
    """

    name: str
    short: str
    runs: tuple[Run, ...]

    @property
    def pools(self) -> tuple[int, int, int]:
        """Its prefill, decode and mixed workers."""
        return pool_counts(self.runs[0].pools)

    @property
    def split(self) -> bool:
        """Whether prefill has workers of its own."""
        return self.pools[0] > 0


class Row(NamedTuple):
    """One run with its set-up."""

    setup: Setup
    run: Run


def pool_counts(pools: str) -> tuple[int, int, int]:
    """Prefill, decode and mixed workers in "2P1D", "3M" or "2P:h100,2D:h200"."""
    counts = dict.fromkeys("PDM", 0)
    for digits, letter in _PART.findall(",".join(p.partition(":")[0] for p in pools.split(","))):
        counts[letter.upper()] += int(digits)
    return counts["P"], counts["D"], counts["M"]


def setups_of(runs: Sequence[Run], among: Sequence[Run] = ()) -> list[Setup]:
    """All set-ups, in the order in which they first come, under names that differ.

    A name says what varies among `runs`, or among `among` where these are a few of those.
    """
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(_facets(run).items()), []).append(run)
    varying = _varying([_facets(run) for run in among or runs])
    found: list[Setup] = []
    taken: dict[str, int] = {}
    short: dict[str, int] = {}
    for key, group in groups.items():
        name = _name(group[0], dict(key), varying)
        taken[name] = taken.get(name, 0) + 1
        if taken[name] > 1:
            name = f"{name} #{taken[name]}"
        found.append(
            Setup(name, _short(name, short), tuple(sorted(group, key=lambda run: run.rate_scale)))
        )
    return found


def _short(name: str, taken: dict[str, int]) -> str:
    """A short name that is not among `taken`, which counts what it was made from."""
    short = shorten(name, MOST_SHORT)
    taken[short] = taken.get(short, 0) + 1
    number = f" #{taken[short]}" if taken[short] > 1 else ""
    return shorten(short, MOST_SHORT - len(number)) + number


def _facets(run: Run) -> dict[str, str]:
    facets = {"pools": run.pools, "label": run.label, "handoff": run.handoff}
    facets |= {"policy": run.policy, "gpus": str(run.gpus)}
    return facets | {name: str(run.settings[name]) for name in sorted(run.settings)}


def _varying(facets: Sequence[dict[str, str]]) -> list[str]:
    """What has more than one value among the set-ups that have it at all."""
    names = dict.fromkeys(name for one in facets for name in one)
    hidden = ("pools", "label", "gpus")
    return [
        name
        for name in names
        if name not in hidden and len({one[name] for one in facets if one.get(name)}) > 1
    ]


def _name(run: Run, facets: dict[str, str], varying: Sequence[str]) -> str:
    if run.label:
        return run.label
    plain = ("handoff", "policy")
    more = [
        facets[name] if name in plain else f"{name} {facets[name]}"
        for name in varying
        if facets.get(name)
    ]
    return " ".join([run.pools, *more])


def shown_runs(result: Replay | Plan) -> list[Run]:
    """All runs; of a plan that keeps none, its frontier and the two that it compares."""
    if isinstance(result, Replay) or result.runs:
        return result.runs
    found = list(result.frontier)
    found += [r for r in (result.best, result.best_unsplit) if r is not None and r not in found]
    return found


def per_gpu(runs: Sequence[Run]) -> bool:
    """Whether rates must be divided by GPUs to compare these runs."""
    return len({run.gpus for run in runs}) > 1 and all(run.gpus for run in runs)


def rate_of(value: float, run: Run, divide: bool) -> float:
    """`value`, a rate of `run`, or its part per GPU."""
    return value / run.gpus if divide else value


def meets_goal(run: Run, goal: Goal | None) -> bool:
    """Whether enough of its requests met the SLO; always, without a goal."""
    return goal is None or (run.slo_attainment or 0.0) >= goal.attainment


def holds_up_to(setup: Setup, goal: Goal | None) -> Run | None:
    """The run at the highest rate up to which every run of the set-up meets the goal."""
    held: Run | None = None
    for run in setup.runs:
        if not meets_goal(run, goal):
            return held
        held = run
    return held


def side_by_side(setups: Sequence[Setup], goal: Goal | None) -> list[Row]:
    """Every set-up at the one rate that tells most about them.

    That is the highest rate common to most of them at which one still meets the goal, or else
    the lowest such rate. A set-up that did not run at it is left out.
    """
    by_rate: dict[float, list[Row]] = {}
    for setup in setups:
        for rate, run in {run.rate_scale: run for run in setup.runs}.items():
            by_rate.setdefault(rate, []).append(Row(setup, run))
    if not by_rate:
        return []
    most = max(len(rows) for rows in by_rate.values())
    common = sorted(rate for rate, rows in by_rate.items() if len(rows) == most)
    met = [rate for rate in common if any(meets_goal(row.run, goal) for row in by_rate[rate])]
    return by_rate[met[-1] if met else common[0]]


def best_of(rows: Sequence[Row], goal: Goal | None) -> Row | None:
    """The row that keeps the goal for most requests; ties by the rate that its set-up holds,
    then by goodput, then by order. With different numbers of GPUs the rate per GPU goes first.
    """
    divide = per_gpu([row.run for row in rows])

    def rank(row: Row) -> tuple[float, float, float]:
        held = holds_up_to(row.setup, goal)
        rate = rate_of(held.offered_rps, held, divide) if held else 0.0
        share = row.run.slo_attainment or 0.0
        goodput = rate_of(row.run.goodput_rps, row.run, divide)
        return (rate, share, goodput) if divide else (share, rate, goodput)

    return max(rows, key=rank, default=None)


def contenders(rows: Sequence[Row], goal: Goal | None) -> list[Row]:
    """The best row, and the best of the other kind (split or not) where there is one."""
    best = best_of(rows, goal)
    if best is None:
        return []
    other = best_of([row for row in rows if row.setup.split != best.setup.split], goal)
    return [best] if other is None else [best, other]


def drawn_up_to(rows: Sequence[Row], goal: Goal | None) -> float:
    """Where bars of the mean TTFT in ms end: at the longest, unless that would dwarf the rest.

    A set-up that is overloaded waits for minutes where others take a tenth of a second. Then the
    bars end at three times the longest of those that meet the goal (or the shortest of all).
    """
    totals = [mean_ttft_ms(row.run) for row in rows]
    met = [t for t, row in zip(totals, rows, strict=True) if meets_goal(row.run, goal)]
    longest = max(totals, default=0.0)
    bound = 3 * (max(met) if goal is not None and met else min(totals, default=0.0))
    return longest if longest <= 2 * bound or bound <= 0 else bound


def mean_ttft_ms(run: Run) -> float:
    """The sum of the mean phases."""
    return sum(phase.mean or 0.0 for phase in run.phases_ms.values())


def goal_words(goal: Goal | None) -> str:
    """The goal in a few words."""
    if goal is None:
        return "no goal"
    parts = [
        f"{name} {milliseconds(value)}"
        for name, value in (("TTFT", goal.ttft_ms), ("TPOT", goal.tpot_ms))
        if value is not None
    ]
    return f"{' and '.join(parts) or 'any time'} for {whole_percent(goal.attainment)} of requests"


def reading(setups: Sequence[Setup], goal: Goal | None) -> list[str]:
    """What the runs say, in one sentence or a few."""
    rows = side_by_side(setups, goal)
    ranked = contenders(rows, goal)
    if not ranked:
        return ["There are no runs."]
    best = ranked[0]
    what = "finish" if goal is None else "meet the goal"
    most = "the best per GPU" if per_gpu([row.run for row in rows]) else "the most"
    among = f", {most} of {count(len(rows), 'set-up')}" if len(rows) > 1 else ""
    said = [
        f"At {scale(best.run.rate_scale)} the trace's rate ({number(best.run.offered_rps)} req/s), "
        f"{percent(best.run.slo_attainment)} of requests {what} on {best.setup.name}{among}."
    ]
    for other in ranked[1:]:
        kind = "split" if other.setup.split else "unsplit"
        said.append(
            f"The best {kind} set-up, {other.setup.name}, has {percent(other.run.slo_attainment)}."
        )
    if goal is not None:
        said += [_held(row.setup, goal) for row in ranked]
    return said


def _held(setup: Setup, goal: Goal) -> str:
    held = holds_up_to(setup, goal)
    if held is None:
        lowest = setup.runs[0]
        return f"{setup.name} misses the goal at {scale(lowest.rate_scale)} already."
    at = f"{scale(held.rate_scale)} ({number(held.offered_rps)} req/s)"
    if held is setup.runs[-1]:
        return f"{setup.name} holds the goal up to the highest rate tried, {at}."
    return f"{setup.name} holds the goal up to {at}."


def recoveries(run: Run) -> str:
    """What the failure policy made of legs that failed: "3 retried, 1 exhausted"."""
    return ", ".join(f"{n:,} {spoken(name)}" for name, n in run.recoveries.items())
