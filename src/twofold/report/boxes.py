"""The heat maps of a page: goodput by ratio, attainment by length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from twofold.report.buckets import Bucket
from twofold.report.results import Goal, Run
from twofold.report.setups import (
    Setup,
    meets_goal,
    per_gpu,
    rate_of,
)
from twofold.report.svg import picture, tag, text, titled
from twofold.report.words import count, milliseconds, number, percent, scale

_WIDTH: Final = 620.0
_SHADES: Final = 5


class _Cell(NamedTuple):
    """One box of a heat map: its place, its looks (CSS classes) and its words."""

    column: int
    row: int
    look: str
    label: str
    title: str


def ratios(setups: Sequence[Setup], goal: Goal | None) -> str:
    """Goodput for every number of prefill and decode workers, and for unsplit set-ups."""
    divide = per_gpu([run for setup in setups for run in setup.runs])
    best: dict[tuple[int, int, int], tuple[float, Setup, Run]] = {}
    for setup in setups:
        value, run = _peak(setup, goal, divide)
        if setup.pools not in best or value > best[setup.pools][0]:
            best[setup.pools] = (value, setup, run)
    most = max((value for value, _, _ in best.values()), default=0.0)
    prefills = sorted({p for p, _, m in best if p and not m})
    decodes = sorted({d for p, d, m in best if p and not m})
    others = [pools for pools in best if pools[2] or not pools[0]]
    columns = [f"{p}P" for p in prefills]
    if others:
        # An empty column sets apart what has no ratio.
        columns = [*columns, *[""] * bool(columns), "unsplit"]
    cells: list[_Cell] = []
    for pools, (value, setup, run) in best.items():
        words = f"{setup.name}: goodput {number(value)}/s at {scale(run.rate_scale)}"
        label = number(value) if value else "missed"
        if pools in others:
            at = (len(columns) - 1, others.index(pools))
            label = f"{setup.runs[0].pools}: {label}"
        else:
            at = (prefills.index(pools[0]), decodes.index(pools[1]))
        look = _shade(value / most) + (" top" if value == most else "") if value else "none"
        cells.append(_Cell(at[0], at[1], look, label, words))
    rows = [f"{d}D" for d in decodes]
    per = "/s per GPU" if divide else "/s"
    words = f"Goodput{per} by ratio: " + ", ".join(cell.title for cell in cells)
    body, height = _grid(cells, columns, rows, "prefill workers", "decode workers")
    return picture("ratios", "Goodput by ratio", words, _WIDTH, height, body)


def _peak(setup: Setup, goal: Goal | None, divide: bool) -> tuple[float, Run]:
    """The highest goodput of a set-up among its runs that meet the goal, 0 without one."""
    good = [run for run in setup.runs if meets_goal(run, goal)]
    if not good:
        return 0.0, setup.runs[0]
    best = max(good, key=lambda run: rate_of(run.goodput_rps, run, divide))
    return rate_of(best.goodput_rps, best, divide), best


def lengths(run: Run, goal: Goal) -> str:
    """Attainment by length of prompt and answer."""
    inputs = sorted({b.input_from: b.input_below for b in run.buckets}.items())
    outputs = sorted({b.output_from: b.output_below for b in run.buckets}.items())
    cells = [
        _Cell(
            inputs.index((b.input_from, b.input_below)),
            outputs.index((b.output_from, b.output_below)),
            _attained(b.slo_attainment, goal),
            _short_percent(b.slo_attainment),
            _about(b),
        )
        for b in run.buckets
    ]
    words = "Share within the SLO: " + "; ".join(cell.title for cell in cells)
    columns, rows = [_upto(*edges) for edges in inputs], [_upto(*edges) for edges in outputs]
    body, height = _grid(cells, columns, rows, "prompt, tokens", "answer, tokens")
    return picture("lengths", "Attainment by length", words, _WIDTH, height, body)


def _attained(share: float | None, goal: Goal) -> str:
    if share is None:
        return "none"
    return _shade(share) + ("" if share >= goal.attainment else " below")


def _shade(share: float) -> str:
    return f"h{max(0, min(_SHADES - 1, int(share * _SHADES)))}"


def _about(b: Bucket) -> str:
    return (
        f"prompt {_upto(b.input_from, b.input_below)}, answer "
        f"{_upto(b.output_from, b.output_below)} tokens: {count(b.requests, 'request')}, "
        f"{percent(b.slo_attainment)} within the SLO, TTFT p99 {milliseconds(b.ttft_ms.p99)}"
    )


def _upto(low: int, below: int | None) -> str:
    return f"{_kilo(low)}+" if below is None else f"<{_kilo(below)}"


def _kilo(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 else str(n)


def _short_percent(share: float | None) -> str:
    return "-" if share is None else f"{int(share * 100)}"


def _grid(
    cells: Sequence[_Cell],
    columns: Sequence[str],
    rows: Sequence[str],
    x_name: str,
    y_name: str,
) -> tuple[str, float]:
    """The boxes of a heat map and its height; rows grow upwards."""
    n_rows = max([len(rows), *(cell.row + 1 for cell in cells)])
    left, head = 72.0, 34.0
    wide = min(110.0, (_WIDTH - left - 14) / max(1, len(columns)))
    high = min(46.0, max(28.0, 270.0 / max(1, n_rows)))
    bottom = head + n_rows * high
    parts = [text(y_name, 14, 20, class_="name")]
    for i, name in enumerate(columns):
        x = left + (i + 0.5) * wide
        parts.append(text(name, x, bottom + 18, class_="tick", text_anchor="middle"))
    for i, name in enumerate(rows):
        y = bottom - (i + 0.5) * high + 4
        parts.append(text(name, left - 8, y, class_="tick", text_anchor="end"))
    for cell in cells:
        x, y = left + cell.column * wide, bottom - (cell.row + 1) * high
        box = tag(
            "rect",
            class_=f"cell {cell.look}",
            x=x + 2,
            y=y + 2,
            width=wide - 4,
            height=high - 4,
            rx=3,
        )
        words = text(
            cell.label,
            x + wide / 2,
            y + high / 2 + 4.5,
            class_=f"in {cell.look}",
            text_anchor="middle",
        )
        parts.append(titled(box + words, cell.title))
    middle = left + len(columns) * wide / 2
    parts.append(text(x_name, middle, bottom + 38, class_="name", text_anchor="middle"))
    return "".join(parts), bottom + 50
