"""The charts of a page with a line per set-up: attainment, goodput, queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from twofold.report.queues import Queues
from twofold.report.results import Goal, Run
from twofold.report.setups import Setup, best_of, per_gpu, rate_of, side_by_side
from twofold.report.svg import (
    Plot,
    Scale,
    coord,
    esc,
    marker,
    picture,
    spread,
    tag,
    text,
    ticks,
    titled,
    width_of,
)
from twofold.report.words import number, percent, scale, whole_percent

COLOURS: Final = 8
"""Set-ups that get a colour of their own; more are drawn in grey."""

_WIDTH: Final = 620.0
_HEIGHT: Final = 370.0
_LEFT: Final = 62.0
_TOP: Final = 34.0
_BOTTOM: Final = 320.0
_MOST_WORKERS: Final = 16
_ROLES: Final = ("prefill", "decode", "mixed")


class Line(NamedTuple):
    """One set-up's points: (x, y, words about it)."""

    name: str
    points: list[tuple[float, float, str]]


def attainment(setups: Sequence[Setup], goal: Goal | None) -> str:
    """Share of requests that meet the SLO against the rate, with the goal's line."""
    divide = per_gpu([run for setup in setups for run in setup.runs])
    lines = [
        Line(
            setup.short,
            [
                (rate_of(run.offered_rps, run, divide), run.slo_attainment, about(setup, run))
                for run in setup.runs
                if run.slo_attainment is not None
            ],
        )
        for setup in setups
    ]
    plot = _plot(lines, right=_right(lines), top=1.0)
    per = "requests/s per GPU" if divide else "requests/s"
    body = plot.frame(
        _x_ticks(plot),
        [(share, whole_percent(share)) for share in (0, 0.25, 0.5, 0.75, 1)],
        f"offered rate, {per}",
        "within the SLO",
    )
    if goal is not None:
        y = plot.y.at(goal.attainment)
        body += tag("line", class_="goal", x1=plot.x.start, x2=plot.x.end, y1=y, y2=y)
        label = f"goal {whole_percent(goal.attainment)}"
        # At the right end, where most lines have come down already.
        body += text(label, plot.x.end - 4, y - 6, class_="goal-name", text_anchor="end")
    words = "Attainment against rate: " + "; ".join(
        f"{line.name}: " + ", ".join(f"{percent(y)} at {number(x)}/s" for x, y, _ in line.points)
        for line in lines[:COLOURS]
    )
    body += _draw(lines, plot)
    return picture("attainment", "SLO attainment against rate", words, _WIDTH, _HEIGHT, body)


def goodput(setups: Sequence[Setup]) -> str:
    """Requests within the SLO a second against all requests finished a second."""
    divide = per_gpu([run for setup in setups for run in setup.runs])
    lines = [
        Line(
            setup.short,
            [
                (
                    rate_of(run.throughput_rps, run, divide),
                    rate_of(run.goodput_rps, run, divide),
                    about(setup, run),
                )
                for run in setup.runs
            ],
        )
        for setup in setups
    ]
    plot = _plot(lines, right=_right(lines))
    per = "requests/s per GPU" if divide else "requests/s"
    body = plot.frame(
        _x_ticks(plot),
        [(value, number(value)) for value in ticks(0, plot.y.high)],
        f"throughput (finished), {per}",
        f"goodput (within the SLO), {per}",
    )
    end = min(plot.x.high, plot.y.high)
    body += tag(
        "line",
        class_="goal",
        x1=plot.x.at(0),
        y1=plot.y.at(0),
        x2=plot.x.at(end),
        y2=plot.y.at(end),
    )
    body += text(
        "all good",
        plot.x.at(end * 0.5) - 8,
        plot.y.at(end * 0.5) - 6,
        class_="goal-name",
        text_anchor="end",
    )
    words = "Goodput against throughput: " + "; ".join(
        f"{line.name}: up to {number(max((y for _, y, _ in line.points), default=0.0))}/s good"
        for line in lines[:COLOURS]
    )
    body += _draw(lines, plot)
    return picture("goodput", "Goodput against throughput", words, _WIDTH, _HEIGHT, body)


def about(setup: Setup, run: Run) -> str:
    """A run in one line, for whoever points at its mark."""
    return (
        f"{setup.name} at {scale(run.rate_scale)}: {number(run.offered_rps)} req/s offered, "
        f"{percent(run.slo_attainment)} within the SLO, goodput {number(run.goodput_rps)}/s, "
        f"throughput {number(run.throughput_rps)}/s"
    )


def order(setups: Sequence[Setup], goal: Goal | None) -> list[Setup]:
    """All set-ups with those first that get a colour: the best, taken one by one."""
    rows = side_by_side(setups, goal)
    ranked: list[Setup] = []
    while rows and len(ranked) < COLOURS:
        best = best_of(rows, goal)
        assert best is not None
        ranked.append(best.setup)
        rows.remove(best)
    chosen = {setup.name for setup in ranked}
    first = [setup for setup in setups if setup.name in chosen]
    return first + [setup for setup in setups if setup.name not in chosen]


def _right(lines: Sequence[Line]) -> float:
    """Where the plot ends so that the names fit beside it."""
    longest = max(
        (width_of(line.name, bold=True) for line in lines[:COLOURS]),
        default=0.0,
    )
    return _WIDTH - longest - 24


def _plot(lines: Sequence[Line], *, right: float, top: float | None = None) -> Plot:
    xs = [x for line in lines for x, _, _ in line.points]
    ys = [y for line in lines for _, y, _ in line.points]
    high_x = ticks(0, max(xs, default=1.0) or 1.0)[-1]
    high_y = top or ticks(0, max(ys, default=1.0) or 1.0)[-1]
    return Plot(Scale(0, high_x, _LEFT, right), Scale(0, high_y, _BOTTOM, _TOP))


def _x_ticks(plot: Plot) -> list[tuple[float, str]]:
    return [(value, number(value)) for value in ticks(0, plot.x.high)]


def _draw(lines: Sequence[Line], plot: Plot) -> str:
    """Grey lines first, coloured ones over them, names at their right ends."""
    parts: list[str] = []
    numbered = list(enumerate(lines))
    for i, line in reversed(numbered):
        colour = f"s{i}" if i < COLOURS else "rest"
        places = [(plot.x.at(x), plot.y.at(y), words) for x, y, words in line.points]
        if len(places) > 1:
            path = " ".join(f"{coord(x)},{coord(y)}" for x, y, _ in places)
            parts.append(titled(tag("polyline", class_=f"line {colour}", points=path), line.name))
        if i < COLOURS or len(places) == 1:
            parts += [
                titled(marker(i, x, y, class_=f"mark {colour}"), words) for x, y, words in places
            ]
    named = [line for line in lines[:COLOURS] if line.points]
    ends = [plot.y.at(line.points[-1][1]) for line in named]
    places_y = spread(ends, 17, plot.y.end, plot.y.start)
    for line, end, y in zip(named, ends, places_y, strict=True):
        i = lines.index(line)
        x = plot.x.at(line.points[-1][0])
        parts.append(tag("line", class_="lead", x1=x + 6, y1=end, x2=plot.x.end + 8, y2=y))
        parts.append(text(line.name, plot.x.end + 12, y + 4, class_=f"label t{i}"))
    if len(lines) > COLOURS:
        more = f"grey: {len(lines) - COLOURS} more"
        parts.append(text(more, _WIDTH - 8, _HEIGHT - 10, class_="tick", text_anchor="end"))
    return "".join(parts)


# -------------------------------------------------------------------------- queues


def queues(ident: str, name: str, found: Queues) -> str:
    """Waiting and running requests and KV blocks over time: a line per worker, a look per role."""
    seconds = [(found.start_ms + i * found.span_ms) / 1000 for i in range(_length(found))]
    x = Scale(seconds[0], max(seconds[-1], seconds[0] + 0.001), _LEFT, _WIDTH - 14)
    panels = [("waiting requests", found.waiting), ("running requests", found.running)]
    if any(map(any, found.blocks)):
        panels.append(("KV blocks in use", found.blocks))
    parts = [_roles(found.workers)]
    bottom = 0.0
    for title, depths in panels:
        top = bottom + 36
        bottom = top + 86
        last = title == panels[-1][0]
        high = ticks(0, max((max(depth, default=0) for depth in depths), default=0) or 1, 4)[-1]
        plot = Plot(x, Scale(0, high, bottom, top))
        x_ticks = [(t, number(t) if last else "") for t in ticks(x.low, x.high) if t <= x.high]
        y_ticks = [(value, number(value)) for value in ticks(0, high, 4)]
        parts.append(plot.frame(x_ticks, y_ticks, "time, s" if last else "", title))
        parts += _worker_lines(found.workers, depths, seconds, plot)
    peaks = ", ".join(
        f"{worker} {max(depth, default=0)}"
        for worker, depth in zip(found.workers, found.waiting, strict=True)
    )
    words = f"Peak of waiting requests by worker: {peaks}"
    title = f"Queue depth over time, {name}"
    return picture(ident, title, words, _WIDTH, bottom + 48, "".join(parts))


def _length(found: Queues) -> int:
    return max((len(depth) for depth in found.waiting), default=1)


def role_of(worker: str) -> str:
    """The role that a worker's name begins with, else "mixed"."""
    return next((role for role in _ROLES if worker.startswith(role)), "mixed")


def _worker_lines(
    workers: Sequence[str], depths: Sequence[Sequence[int]], seconds: Sequence[float], plot: Plot
) -> list[str]:
    drawn = list(zip(workers, depths, strict=True))
    if len(drawn) > _MOST_WORKERS:
        drawn = [
            (f"{role}, most on any worker", [max(at) for at in zip(*of, strict=True)])
            for role in _ROLES
            if (
                of := [
                    d for worker, d in zip(workers, depths, strict=True) if role_of(worker) == role
                ]
            )
        ]
    parts: list[str] = []
    for worker, depth in drawn:
        path = " ".join(
            f"{coord(plot.x.at(t))},{coord(plot.y.at(value))}"
            for t, value in zip(seconds, depth, strict=False)
        )
        line = tag("polyline", class_=f"thin {role_of(worker)}", points=path)
        parts.append(titled(line, f"{worker}: peak {max(depth, default=0)}"))
    return parts


def _roles(workers: Sequence[str]) -> str:
    parts: list[str] = []
    right = _WIDTH - 14
    for role in reversed(_ROLES):
        n = sum(role_of(worker) == role for worker in workers)
        if n:
            words = f"{role} ({n})"
            parts.append(text(words, right, 22, class_="tick", text_anchor="end"))
            right -= width_of(words) + 4
            line = {"x1": right - 20, "x2": right, "y1": 18.0, "y2": 18.0}
            parts.append(tag("line", class_=f"thin {esc(role)}", **line))
            right -= 36
    return "".join(parts)
