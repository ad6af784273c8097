"""One HTML file that shows a result: no scripts, no network, nothing beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from twofold.report import bars, boxes, lines
from twofold.report.results import Goal, Header, Interval, Plan, Replay, Rule, Run
from twofold.report.setups import (
    Row,
    Setup,
    contenders,
    goal_words,
    holds_up_to,
    meets_goal,
    per_gpu,
    reading,
    recoveries,
    setups_of,
    shown_runs,
    side_by_side,
)
from twofold.report.style import style_sheet
from twofold.report.svg import esc, tag
from twofold.report.words import NEVER, NONE, count, milliseconds, number, percent, scale

_HATCH: Final = (
    '<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs>'
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<path d="M-1,7 L7,-1 M-1,1 L1,-1 M5,7 L7,5" fill="none"/></pattern></defs></svg>'
)


def html_page(result: Replay | Plan, title: str = "") -> str:
    """The page as text, well-formed as XML too. Equal results give equal pages."""
    plan = result if isinstance(result, Plan) else None
    setups = lines.order(setups_of(shown_runs(result)), result.goal)
    name = title or ("twofold plan" if plan else "twofold replay")
    body = [
        tag("h1", esc(name)),
        tag("p", esc(_subtitle(setups, result.goal)), class_="sub"),
        _verdict(plan) if plan else _reading(setups, result.goal),
        _tiles(plan, setups, result.goal),
        _charts(setups, result.goal),
        _rules(plan.rules) if plan and plan.rules else "",
        _runs(setups, result.goal),
        _origin(result.header, result.digest if isinstance(result, Replay) else ""),
    ]
    head = (
        '<meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{esc(name)}</title><style>\n{style_sheet()}\n</style>"
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{_HATCH}<main>\n'
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def _subtitle(setups: Sequence[Setup], goal: Goal | None) -> str:
    n_runs = sum(len(setup.runs) for setup in setups)
    return f"{count(len(setups), 'set-up')}, {count(n_runs, 'run')}. Goal: {goal_words(goal)}."


def _reading(setups: Sequence[Setup], goal: Goal | None) -> str:
    return tag("div", tag("p", esc(" ".join(reading(setups, goal)))), class_="reading")


def _verdict(plan: Plan) -> str:
    verdict = tag("p", "Verdict: ", tag("b", esc(plan.verdict)), class_="verdict")
    return verdict + tag("div", tag("p", esc(plan.because)), class_="reading")


# --------------------------------------------------------------------------- tiles


def _tiles(plan: Plan | None, setups: Sequence[Setup], goal: Goal | None) -> str:
    if plan is not None:
        tiles = [
            _plan_tile(name, run, shown_runs(plan))
            for name, run in (("best", plan.best), ("best unsplit", plan.best_unsplit))
            if run is not None
        ]
    else:
        tiles = [t for row in contenders(side_by_side(setups, goal), goal) for t in _two(row, goal)]
    return tag("div", *tiles, class_="tiles") if tiles else ""


def _plan_tile(name: str, run: Run, among: Sequence[Run]) -> str:
    found = run.goodput_per_gpu or Interval(value=None)
    note = f"{setups_of([run], among)[0].name}; goodput per GPU, requests/s"
    if found.low is not None and found.high is not None:
        note += f", between {number(found.low)} and {number(found.high)}"
    return _tile(name, number(found.value), note)


def _two(row: Row, goal: Goal | None) -> list[str]:
    run = row.run
    what = "finished" if goal is None else "within the SLO"
    first = _tile(
        f"{row.setup.name}, at {scale(run.rate_scale)}",
        percent(run.slo_attainment),
        f"{what}; TTFT p99 {_time_words(run, run.ttft_ms.p99)}, "
        f"TPOT p99 {_time_words(run, run.tpot_ms.p99)}",
    )
    held = holds_up_to(row.setup, goal)
    if goal is None or len(row.setup.runs) < 2:
        second = _tile(f"{row.setup.name}, goodput", f"{number(run.goodput_rps)}/s", "")
    elif held is None:
        second = _tile(f"{row.setup.name}, holds the goal", "never", "at no rate tried")
    else:
        last = ", the highest tried" if held is row.setup.runs[-1] else ""
        second = _tile(
            f"{row.setup.name}, holds the goal up to",
            f"{number(held.offered_rps)} req/s",
            f"{scale(held.rate_scale)} the trace's rate{last}",
        )
    return [first, second]


def _tile(what: str, value: str, note: str) -> str:
    parts = (("what", what), ("value", value), ("note", note))
    return tag(
        "div", *(tag("div", esc(words), class_=name) for name, words in parts), class_="tile"
    )


# -------------------------------------------------------------------------- charts


def _charts(setups: Sequence[Setup], goal: Goal | None) -> str:
    if not setups:
        return ""
    rows = side_by_side(setups, goal)
    one_rate = len({run.rate_scale for setup in setups for run in setup.runs}) == 1
    figures = [
        *(_at_one_rate(rows, goal) if one_rate else _over_rates(setups, goal)),
        *_phases(rows, goal),
        *_ratios(setups, goal),
        *_of_contenders(contenders(rows, goal), goal),
    ]
    return tag("h2", "Charts") + tag("div", *figures, class_="charts")


def _over_rates(setups: Sequence[Setup], goal: Goal | None) -> list[str]:
    attainment = (
        "Higher and further right is better; right of where a line crosses the goal, "
        "that set-up is overloaded."
    )
    goodput = (
        "On the dashed line every request that finishes is within the SLO; what falls "
        "below it is work that came too late."
    )
    return [
        _figure("Attainment against rate", attainment, lines.attainment(setups, goal)),
        _figure("Goodput against throughput", goodput, lines.goodput(setups)),
    ]


def _at_one_rate(rows: Sequence[Row], goal: Goal | None) -> list[str]:
    """The same two figures where there is nothing to draw a line through."""
    at = f"at {scale(rows[0].run.rate_scale)} the trace's rate"
    attainment = f"Share of requests within the SLO, {at}."
    goodput = f"Requests a second within the SLO, of those that finish (outline), {at}."
    return [
        _figure("Attainment", attainment, bars.attainment(rows, goal)),
        _figure("Goodput and throughput", goodput, bars.goodput(rows)),
    ]


def _phases(rows: Sequence[Row], goal: Goal | None) -> list[str]:
    shown = [row for row in rows if any(p.mean for p in row.run.phases_ms.values())]
    if not shown:
        return []
    title = f"Where the time to the first token goes, at {scale(shown[0].run.rate_scale)}"
    words = "Means of all requests that got a token. Hatched phases are waiting, the others work."
    return [_figure(title, words, bars.phases(shown, goal))]


def _ratios(setups: Sequence[Setup], goal: Goal | None) -> list[str]:
    if len({setup.pools for setup in setups}) < 2:
        return []
    met = "" if goal is None else " among the rates that meet the goal"
    words = f"Highest goodput{met}, by number of prefill and decode workers. The best is framed."
    return [_figure("Which ratio", words, boxes.ratios(setups, goal))]


def _of_contenders(rows: Sequence[Row], goal: Goal | None) -> list[str]:
    """The queues of the best set-ups, and for which lengths the very best meets the goal."""
    found: list[str] = []
    for i, row in enumerate(rows):
        name = f"{row.setup.name} at {scale(row.run.rate_scale)}"
        if row.run.queues is not None:
            words = (
                "One line per worker, each point a peak. A queue that keeps growing is overload."
            )
            picture = lines.queues(f"queues-{i}", name, row.run.queues)
            found.append(_figure(f"Queues over time, {name}", words, picture))
    if rows and rows[0].run.buckets and goal is not None:
        best = rows[0]
        name = f"{best.setup.name} at {scale(best.run.rate_scale)}"
        words = "Percent within the SLO, by length of prompt and answer. Red edge: below the goal."
        found.append(_figure(f"Who meets the goal, {name}", words, boxes.lengths(best.run, goal)))
    return found


def _figure(title: str, words: str, picture: str) -> str:
    caption = tag("figcaption", tag("h3", esc(title)), tag("p", esc(words)))
    return tag("figure", caption, picture)


# -------------------------------------------------------------------------- tables


def _rules(rules: Sequence[Rule]) -> str:
    holds = {True: "yes", False: "no", None: "not known"}
    body = [
        tag(
            "tr",
            tag("td", esc(holds[rule.holds])),
            tag("td", esc(rule.rule), class_="left"),
            tag("td", esc(rule.because), class_="left"),
        )
        for rule in rules
    ]
    heads = [
        tag("th", esc(name), class_="left", scope="col") for name in ("holds", "rule", "because")
    ]
    return tag("h2", "Rules that need no simulation") + _scroll(heads, body)


_Show = Callable[[Run], str]


def _runs(setups: Sequence[Setup], goal: Goal | None) -> str:
    """Every run, by rate; the best figures at a rate are marked."""
    rows = [Row(setup, run) for setup in setups for run in setup.runs]
    if not rows:
        return ""
    rows.sort(key=lambda row: row.run.rate_scale)
    columns = _columns([row.run for row in rows], goal)
    heads = [tag("th", "set-up", scope="col")]
    heads += [tag("th", esc(head), scope="col") for head, _, _, _ in columns]
    body: list[str] = []
    rate: float | None = None
    for row in rows:
        group = [other.run for other in rows if other.run.rate_scale == row.run.rate_scale]
        cells = [tag("td", esc(row.setup.name))]
        for head, show, value, better in columns:
            shown = show(row.run)
            kind = "missed" if head == "goal" and shown == "missed" else None
            if better and value is not None and _is_best(row.run, group, value, better):
                kind = "best"
            cells.append(tag("td", esc(shown), class_=kind))
        first = rate is not None and row.run.rate_scale != rate
        rate = row.run.rate_scale
        body.append(tag("tr", *cells, class_="first" if first else None))
    note = "Times in ms. * best at that rate."
    if any(row.run.lost for row in rows):
        note += f' "{NEVER}": so many requests were refused or failed.'
    return tag("h2", "Runs") + tag("p", esc(note), class_="sub") + _scroll(heads, body)


def _is_best(
    run: Run, group: Sequence[Run], value: Callable[[Run], float | None], better: int
) -> bool:
    mine = value(run)
    others = [v * better for v in map(value, group) if v is not None]
    unequal = len(others) < len(group) or min(others) != max(others)
    return mine is not None and unequal and mine * better == max(others)


def _columns(
    runs: Sequence[Run], goal: Goal | None
) -> list[tuple[str, _Show, Callable[[Run], float | None] | None, int]]:
    """Head, text, figure to compare by and which way is better (0: neither)."""
    found: list[tuple[str, _Show, Callable[[Run], float | None] | None, int]] = [
        ("rate", lambda run: scale(run.rate_scale), None, 0),
        ("req/s", lambda run: number(run.offered_rps), None, 0),
        ("attainment", lambda run: percent(run.slo_attainment), lambda run: run.slo_attainment, 1),
    ]
    if goal is not None:
        found.append(("goal", lambda run: "met" if meets_goal(run, goal) else "missed", None, 0))
    found.append(("goodput/s", lambda run: number(run.goodput_rps), lambda run: run.goodput_rps, 1))
    if per_gpu(runs) or any(run.goodput_per_gpu is not None for run in runs):
        found.append(("per GPU", lambda run: number(_per_gpu(run)), _per_gpu, 1))
    found += [
        ("finished/s", lambda run: number(run.throughput_rps), lambda run: run.throughput_rps, 1),
        ("tokens/s", lambda run: number(run.output_tokens_per_s), None, 0),
    ]
    for head, name, which in (
        ("TTFT p50", "ttft_ms", "p50"), ("p99", "ttft_ms", "p99"),
        ("TPOT p50", "tpot_ms", "p50"), ("p99", "tpot_ms", "p99"),
        ("ITL p99", "itl_ms", "p99"), ("E2E p50", "e2e_ms", "p50"),
    ):  # fmt: skip
        found.append((head, _time_text(name, which), _time_value(name, which), -1))
    if any(run.lost for run in runs):
        found.append(("refused", lambda run: number(run.refused), lambda run: run.refused, -1))
        found.append(("failed", lambda run: number(run.failed), lambda run: run.failed, -1))
    if any(run.recoveries for run in runs):
        found.append(("legs that failed", recoveries, None, 0))
    if any(run.slots_peak is not None for run in runs):
        found.append(("slots at peak", _slots, None, 0))
    if any(run.cost_per_hour is not None for run in runs):
        found.append(("cost/h", lambda run: number(run.cost_per_hour), None, 0))
    if any(run.power_w is not None for run in runs):
        found.append(("power, W", lambda run: number(run.power_w), None, 0))
    found.append(("digest", lambda run: run.digest[:10], None, 0))
    return found


def _per_gpu(run: Run) -> float | None:
    return run.goodput_per_gpu.value if run.goodput_per_gpu is not None else None


def _slots(run: Run) -> str:
    if run.slots_peak is None:
        return NONE
    return f"{run.slots_peak:,}" + (f" of {run.slots:,}" if run.slots else "")


def _time_value(name: str, which: str) -> Callable[[Run], float | None]:
    def value(run: Run) -> float | None:
        found: float | None = getattr(getattr(run, name), which)
        return found

    return value


def _time_text(name: str, which: str) -> _Show:
    value = _time_value(name, which)

    def show(run: Run) -> str:
        found = value(run)
        return number(found) if found is not None else NEVER if run.lost else NONE

    return show


def _time_words(run: Run, value: float | None) -> str:
    return NEVER if value is None and run.lost else milliseconds(value)


def _scroll(heads: Sequence[str], body: Sequence[str]) -> str:
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", "\n".join(body)))
    return tag("div", table, class_="scroll")


def _origin(header: Header, digest: str) -> str:
    entries = [
        ("twofold", header.twofold), ("seed", str(header.seed)),
        ("trace SHA-256", header.trace_sha256), ("profile SHA-256", header.profile_sha256),
        ("config SHA-256", header.config_sha256), ("digest of all outcomes", digest),
    ]  # fmt: skip
    shown = [
        tag("dt", esc(name)) + tag("dd", tag("code", esc(value)))
        for name, value in entries
        if value
    ]
    words = tag("p", "Equal hashes and seed give equal digests, on any machine.", class_="sub")
    return tag("h2", "Where this comes from") + words + tag("dl", *shown)
