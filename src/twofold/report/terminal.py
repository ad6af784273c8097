"""Runs and plans as tables that fit 100 columns, plain where stdout is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from twofold.report.results import Goal, Interval, Plan, Replay, Rule, Run
from twofold.report.setups import (
    Row,
    Setup,
    contenders,
    drawn_up_to,
    goal_words,
    mean_ttft_ms,
    meets_goal,
    per_gpu,
    reading,
    recoveries,
    setups_of,
    shown_runs,
    side_by_side,
)
from twofold.report.words import (
    NEVER,
    NONE,
    count,
    joined,
    milliseconds,
    number,
    percent,
    scale,
    spoken,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH: Final = 100
_MOST_BARS: Final = 12
_BAR: Final = 62

# Capitals are work, small letters are waiting, so that the bars read without colour.
_LETTERS: Final = {
    "queue": ("q", "yellow"),
    "recovery": ("r", "yellow"),
    "tokenise": ("K", "cyan"),
    "prefill_queue": ("p", "yellow"),
    "prefill": ("P", "blue"),
    "handoff_wait": ("h", "yellow"),
    "transfer": ("T", "magenta"),
    "decode_queue": ("d", "yellow"),
    "first_step": ("F", "green"),
    "decode": ("D", "green"),
    "relay": ("R", "cyan"),
    "unattributed": (".", "dim"),
}


class _Column(NamedTuple):
    """A column: its head, its figure and its text.

    `better` is 1 when more is better, -1 when less is, 0 when neither. Where a table gets too
    wide, the columns of the highest `spare` are left out; no two have the same.
    """

    spare: float
    head: str
    value: Callable[[Run], float | None]
    show: Callable[[Run, float | None], str]
    better: int = 0


def show_replay(console: Console, replay: Replay) -> None:
    """Print the runs, where the time to the first token went, and how to read it."""
    setups = setups_of(replay.runs)
    _say(console, f"goal: {goal_words(replay.goal)}")
    _runs(console, setups, replay.goal)
    _phases(console, side_by_side(setups, replay.goal), replay.goal)
    _say(console, "", "Read this as: " + " ".join(reading(setups, replay.goal)))
    _hashes(console, replay)


def show_plan(console: Console, plan: Plan) -> None:
    """Print the verdict with its reason, the two set-ups that it compares, rules and frontier."""
    from rich.text import Text

    console.print(Text.assemble(("verdict: ", ""), (plan.verdict, "bold")), highlight=False)
    _say(console, plan.because, "", f"goal: {goal_words(plan.goal)}")
    all_runs = shown_runs(plan)
    first = ("best", plan.best) if plan.best_split is None else ("best split", plan.best_split)
    compared = [first, ("best unsplit", plan.best_unsplit)]
    table = _table("", "set-up", "GPUs", "goodput/GPU", "low", "high", "attain", "req/s")
    for name, run in compared:
        if run is not None:
            table.add_row(name, *_compared(run, all_runs))
    if table.row_count:
        _say(console, "")
        console.print(table, highlight=False, markup=False)
    setups = setups_of([run for _, run in compared if run is not None], all_runs)
    _phases(console, [Row(setup, setup.runs[-1]) for setup in setups], plan.goal)
    _rules(console, plan.rules)
    if plan.frontier:
        _say(console, "", "frontier: no other set-up beats these in both goodput and attainment")
        _runs(console, setups_of(plan.frontier, all_runs), plan.goal)
    _hashes(console, plan)


def _compared(run: Run, among: Sequence[Run]) -> list[str]:
    found = run.goodput_per_gpu or Interval(value=None)
    setup = setups_of([run], among)[0]
    return [
        setup.short,
        number(run.gpus) if run.gpus else NONE,
        *(number(value) for value in (found.value, found.low, found.high)),
        percent(run.slo_attainment),
        number(run.offered_rps),
    ]


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False)


def _table(*heads: str, gap: int = 2) -> Table:
    """Figures to the right; no lines, so that it reads in a file too."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, gap, 0, 0))
    for head in heads:
        left = head in ("", "set-up", "holds", "rule")
        fold = head in ("set-up", "because")
        table.add_column(
            head,
            justify="left" if left or fold else "right",
            no_wrap=not fold,
            overflow="fold" if fold else "crop",
        )
    return table


# --------------------------------------------------------------------------- runs


def _runs(console: Console, setups: Sequence[Setup], goal: Goal | None) -> None:
    rows = [Row(setup, run) for setup in setups for run in setup.runs]
    if not rows:
        return
    rates = sorted({row.run.rate_scale for row in rows})
    columns = _columns([row.run for row in rows], goal, many_rates=len(rates) > 1)
    # A place for the star after every figure and head, so that they line up.
    table = _table("set-up", *(f"{column.head} " for column in columns), gap=1)
    marked = False
    for rate in rates:
        group = [row for row in rows if row.run.rate_scale == rate]
        best = _best(group, columns)
        for i, row in enumerate(group):
            cells = [_cell(row.run, column) for column in columns]
            stars = [len(group) > 1 and i in best[column.head] for column in columns]
            cells = [f"{c}*" if star else f"{c} " for c, star in zip(cells, stars, strict=True)]
            marked = marked or any(stars)
            table.add_row(row.setup.short, *cells, end_section=i == len(group) - 1)
        if rate != rates[-1] and len(group) > 1:
            table.add_row()
    _say(console, "")
    console.print(table, highlight=False, markup=False)
    notes = ["times in ms"]
    if marked:
        notes.append("* best" + (" at that rate" if len(rates) > 1 else ""))
    if any(row.run.lost for row in rows):
        notes.append(f'"{NEVER}": so many requests were refused or failed')
    _say(console, "; ".join(notes))
    for row in rows:
        if row.run.recoveries:
            at = f" at {scale(row.run.rate_scale)}" if len(rates) > 1 else ""
            _say(console, f"legs that failed, {row.setup.short}{at}: {recoveries(row.run)}")


def _best(group: Sequence[Row], columns: Sequence[_Column]) -> dict[str, list[int]]:
    """Per column the rows with the best figure, none where all are equal."""
    found: dict[str, list[int]] = {}
    for column in columns:
        values = [column.value(row.run) for row in group]
        known = [column.better * value for value in values if value is not None]
        top = max(known, default=0.0)
        same = len(known) == len(values) and min(known, default=0.0) == top
        found[column.head] = [
            i
            for i, value in enumerate(values)
            if column.better and not same and value is not None and column.better * value == top
        ]
    return found


def _cell(run: Run, column: _Column) -> str:
    return column.show(run, column.value(run))


def _columns(runs: Sequence[Run], goal: Goal | None, *, many_rates: bool) -> list[_Column]:
    """What tells these runs apart."""
    plain = _plain
    found: list[_Column] = []
    if many_rates:
        found.append(_Column(0, "rate", lambda run: run.rate_scale, lambda run, v: scale(v or 0)))
    found.append(_Column(7 * many_rates, "req/s", lambda run: run.offered_rps, plain))
    found.append(_Column(1, "attain", lambda run: run.slo_attainment, _percent, 1))
    if goal is not None:
        found.append(_Column(6, "goal", lambda run: None, lambda run, v: _met(run, goal)))
    if per_gpu(runs):
        found.append(_Column(2, "good/GPU", _goodput_per_gpu, plain, 1))
    else:
        found.append(_Column(2, "good/s", lambda run: run.goodput_rps, plain, 1))
    if any(run.lost for run in runs):
        found.append(_Column(3, "lost", lambda run: run.lost, plain, -1))
    found += [
        _Column(8, "TTFT p50", lambda run: run.ttft_ms.p50, _time, -1),
        _Column(4, "TTFT p99", lambda run: run.ttft_ms.p99, _time, -1),
        _Column(9, "TPOT p50", lambda run: run.tpot_ms.p50, _time, -1),
        _Column(5, "TPOT p99", lambda run: run.tpot_ms.p99, _time, -1),
    ]
    if any(run.faults is not None for run in runs):
        found.append(_Column(3.5, "faults", lambda run: run.faults, plain))
    if any(run.slots_peak is not None for run in runs):
        found.append(_Column(10, "slots", lambda run: run.slots_peak, plain))
    if any(run.cost_per_hour is not None for run in runs):
        found.append(_Column(11, "cost/h", lambda run: run.cost_per_hour, plain))
    found.append(_Column(12, "tok/s", lambda run: run.output_tokens_per_s, plain, 1))
    return _fitting(found, runs)


def _fitting(columns: Sequence[_Column], runs: Sequence[Run]) -> list[_Column]:
    """The columns that fit beside the set-up's name; those of the highest `spare` go first."""
    names = max(len(setup.short) for setup in setups_of(runs))
    room = WIDTH - max(names, len("set-up")) - 1
    kept = list(columns)
    # Each has a place for a star and a gap.
    widths = {
        column.spare: max(len(column.head), *(len(_cell(run, column)) for run in runs)) + 2
        for column in columns
    }
    while sum(widths[column.spare] for column in kept) > room:
        kept.remove(max(kept, key=lambda column: column.spare))
    return kept


def _goodput_per_gpu(run: Run) -> float | None:
    return run.goodput_per_gpu.value if run.goodput_per_gpu is not None else None


def _plain(run: Run, value: float | None) -> str:
    return number(value)


def _percent(run: Run, value: float | None) -> str:
    return percent(value)


def _time(run: Run, value: float | None) -> str:
    if value is None:
        return NEVER if run.lost else NONE
    return number(value)


def _met(run: Run, goal: Goal) -> str:
    return "met" if meets_goal(run, goal) else "missed"


# ------------------------------------------------------------------------- phases


def _phases(console: Console, rows: Sequence[Row], goal: Goal | None) -> None:
    """One bar a set-up: where the mean time to the first token went."""
    from rich.text import Text

    drawn = [row for row in rows if mean_ttft_ms(row.run) > 0]
    if not drawn:
        return
    shown = drawn[:_MOST_BARS]
    shown += [row for row in contenders(drawn, goal) if row not in shown]
    end_ms = drawn_up_to(shown, goal)
    rates = [scale(rate) for rate in sorted({row.run.rate_scale for row in shown})]
    _say(console, "", f"where the mean TTFT goes, at {joined(rates)} the trace's rate")
    width = max(len(row.setup.short) for row in shown)
    for row in shown:
        total = mean_ttft_ms(row.run)
        line = Text(f"{row.setup.short:<{width}}  ")
        for name, cells in _cells(row.run, end_ms):
            letter, style = _LETTERS[name]
            line.append(letter * cells, style=style)
        line.append(f"{'>' if total > end_ms else ''} {milliseconds(total)}")
        console.print(line, highlight=False, no_wrap=True, overflow="crop")
    if len(drawn) > len(shown):
        _say(console, f"and {count(len(drawn) - len(shown), 'set-up')} more")
    used = [name for name in _LETTERS if any(_mean(row.run, name) > 0 for row in shown)]
    _say(console, "  ".join(f"{_LETTERS[name][0]} {spoken(name)}" for name in used))


def _mean(run: Run, name: str) -> float:
    phase = run.phases_ms.get(name)
    return (phase.mean or 0.0) if phase is not None else 0.0


def _cells(run: Run, end_ms: float) -> list[tuple[str, int]]:
    """How many letters each phase gets: edges are rounded, so that they add up."""
    found: list[tuple[str, int]] = []
    done = 0.0
    for name in _LETTERS:
        start = min(_BAR, round(done / end_ms * _BAR))
        done += _mean(run, name)
        found.append((name, min(_BAR, round(done / end_ms * _BAR)) - start))
    return found


# ------------------------------------------------------------------------ the rest


def _rules(console: Console, rules: Sequence[Rule]) -> None:
    if not rules:
        return
    table = _table("holds", "rule", "because")
    for rule in rules:
        holds = "?" if rule.holds is None else "yes" if rule.holds else "no"
        table.add_row(holds, rule.rule, rule.because)
    _say(console, "")
    console.print(table, highlight=False, markup=False)


def _hashes(console: Console, result: Replay | Plan) -> None:
    """What it was computed from, and the digest in full, since people compare that."""
    header = result.header
    hashes = (
        ("trace", header.trace_sha256),
        ("profile", header.profile_sha256),
        ("config", header.config_sha256),
    )
    parts = [f"twofold {header.twofold}", f"seed {header.seed}"]
    parts += [f"{name} {value[:12]}" for name, value in hashes if value]
    _say(console, "", ", ".join(parts))
    if isinstance(result, Replay):
        _say(console, f"digest {result.digest}")
