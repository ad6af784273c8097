"""The charts of a page with a bar per set-up: attainment, goodput, phases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from twofold.metrics.ledger import PHASES
from twofold.report.results import Goal, Run
from twofold.report.setups import Row, drawn_up_to, mean_ttft_ms, meets_goal, per_gpu, rate_of
from twofold.report.svg import Scale, coord, picture, tag, text, ticks, titled, width_of
from twofold.report.words import milliseconds, number, percent, spoken, whole_percent

_WIDTH: Final = 620.0
_MOST_BARS: Final = 16
_ROW: Final = 30.0
_TALL: Final = 22.0
WAITS: Final = frozenset({"queue", "recovery", "prefill_queue", "handoff_wait", "decode_queue"})
"""Phases in which a request only waits: hatched, so that they show without colour."""


class _Bar(NamedTuple):
    """A bar with an outline that it is a part of (0: none), and its words."""

    name: str
    value: float
    whole: float
    look: str
    label: str


def attainment(rows: Sequence[Row], goal: Goal | None) -> str:
    """Share of requests that meet the SLO, a bar per set-up, with the goal's line."""
    drawn = sorted(rows, key=lambda row: -(row.run.slo_attainment or 0.0))[:_MOST_BARS]
    bars = [
        _Bar(
            row.setup.short,
            row.run.slo_attainment or 0.0,
            0.0,
            "good" if meets_goal(row.run, goal) else "short",
            percent(row.run.slo_attainment),
        )
        for row in drawn
    ]
    shares = [(share, whole_percent(share)) for share in (0, 0.25, 0.5, 0.75, 1)]
    line = None if goal is None else goal.attainment
    return _plain("attainment", "SLO attainment", bars, shares, "requests within the SLO", line)


def goodput(rows: Sequence[Row]) -> str:
    """Requests within the SLO a second, inside all that finish a second."""
    divide = per_gpu([row.run for row in rows])

    def bar(row: Row) -> _Bar:
        good = rate_of(row.run.goodput_rps, row.run, divide)
        done = rate_of(row.run.throughput_rps, row.run, divide)
        return _Bar(row.setup.short, good, done, "good", f"{number(good)} of {number(done)}")

    bars = sorted(map(bar, rows), key=lambda bar: -bar.value)[:_MOST_BARS]
    high = max((max(bar.value, bar.whole) for bar in bars), default=0.0) or 1.0
    rates = [(value, number(value)) for value in ticks(0, high)]
    unit = "requests/s per GPU" if divide else "requests/s"
    return _plain("goodput", "Goodput and throughput", bars, rates, unit, None)


def _plain(
    ident: str,
    title: str,
    bars: Sequence[_Bar],
    values: Sequence[tuple[float, str]],
    x_name: str,
    line: float | None,
) -> str:
    x = Scale(0, values[-1][0], _left([bar.name for bar in bars]), _WIDTH - 100)
    top = 22.0
    bottom = top + len(bars) * _ROW + 4
    parts = [_axis(x, values, top - 6, bottom, x_name)]
    for i, bar in enumerate(bars):
        y = top + i * _ROW
        parts.append(_name(bar.name, x, y))
        size = {"x": x.start, "y": y, "height": _TALL}
        box = tag("rect", class_=f"bar {bar.look}", width=x.at(bar.value) - x.start, **size)
        if bar.whole:
            box += tag("rect", class_="whole", width=x.at(bar.whole) - x.start, **size)
        parts.append(titled(box, f"{bar.name}: {bar.label}"))
        end = x.at(max(bar.value, bar.whole))
        parts.append(text(bar.label, end + 7, y + 16, class_="tick strong"))
    if line is not None:
        at = x.at(line)
        parts.append(tag("line", class_="goal", x1=at, x2=at, y1=top - 6, y2=bottom))
        words = f"goal {whole_percent(line)}"
        parts.append(text(words, at, top - 10, class_="goal-name", text_anchor="middle"))
    words = "; ".join(f"{bar.name}: {bar.label}" for bar in bars)
    return picture(ident, title, words, _WIDTH, bottom + 46, "".join(parts))


def _left(names: Sequence[str]) -> float:
    """Where bars begin so that the names fit before them."""
    return max((width_of(name) for name in names), default=0.0) + 20


def _name(name: str, x: Scale, y: float) -> str:
    return text(name, x.start - 8, y + 16, class_="tick strong", text_anchor="end")


def _axis(
    x: Scale, values: Sequence[tuple[float, str]], top: float, bottom: float, name: str
) -> str:
    parts: list[str] = []
    for value, label in values:
        at = x.at(value)
        parts.append(tag("line", class_="grid", x1=at, x2=at, y1=top, y2=bottom))
        parts.append(text(label, at, bottom + 16, class_="tick", text_anchor="middle"))
    middle = (x.start + x.end) / 2
    parts.append(text(name, middle, bottom + 36, class_="name", text_anchor="middle"))
    return "".join(parts)


def phases(rows: Sequence[Row], goal: Goal | None) -> str:
    """One stacked bar a set-up: the mean of every phase up to the first token."""
    drawn = sorted(rows, key=lambda row: mean_ttft_ms(row.run))[:_MOST_BARS]
    used = [name for name in PHASES if any(_mean(row.run, name) > 0 for row in drawn)]
    longest = drawn_up_to(drawn, goal) or 1.0
    x = Scale(0, longest, _left([row.setup.short for row in drawn]), _WIDTH - 76)
    legend, head = _legend(used)
    bottom = head + len(drawn) * _ROW + 6
    values = [(value, number(value)) for value in ticks(0, longest) if value <= longest]
    parts = [_axis(x, values, head - 6, bottom, "mean time, ms"), legend]
    parts += [_stack(row, used, x, head + i * _ROW) for i, row in enumerate(drawn)]
    words = "; ".join(
        f"{row.setup.short}: "
        + ", ".join(f"{spoken(name)} {milliseconds(_mean(row.run, name))}" for name in used)
        for row in drawn
    )
    return picture("phases", "Mean TTFT by phase", words, _WIDTH, bottom + 46, "".join(parts))


def _stack(row: Row, used: Sequence[str], x: Scale, y: float) -> str:
    parts = [_name(row.setup.short, x, y)]
    done = 0.0
    for phase in used:
        took = _mean(row.run, phase)
        if took > 0:
            start, end = x.at(min(done, x.high)), x.at(min(done + took, x.high))
            done += took
            box = {"x": start, "y": y, "width": end - start, "height": _TALL}
            drawn = tag("rect", class_=f"p-{phase}", **box)
            if phase in WAITS:
                drawn += tag("rect", fill="url(#hatch)", **box)
            parts.append(titled(drawn, f"{row.setup.short}, {spoken(phase)}: {milliseconds(took)}"))
    end = x.at(min(done, x.high))
    if done > x.high:
        torn = f"M{coord(end - 9)},{coord(y + 24)} l6,-26 M{coord(end - 4)},{coord(y + 24)} l6,-26"
        parts.append(tag("path", class_="torn", d=torn))
    parts.append(text(milliseconds(done), end + 7, y + 16, class_="tick strong"))
    return "".join(parts)


def _legend(used: Sequence[str]) -> tuple[str, float]:
    """Boxes with names in rows, and where the bars begin below them."""
    x, y = 14.0, 12.0
    parts: list[str] = []
    for name in used:
        wide = 20 + width_of(spoken(name)) + 18
        if x + wide > _WIDTH:
            x, y = 14.0, y + 22
        box = {"x": x, "y": y, "width": 13.0, "height": 13.0}
        parts.append(tag("rect", class_=f"p-{name}", **box))
        if name in WAITS:
            parts.append(tag("rect", fill="url(#hatch)", **box))
        parts.append(text(spoken(name), x + 19, y + 11, class_="tick"))
        x += wide
    return "".join(parts), y + 32


def _mean(run: Run, phase: str) -> float:
    found = run.phases_ms.get(phase)
    return (found.mean or 0.0) if found is not None else 0.0
