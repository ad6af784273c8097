"""The HTML file: well-formed, whole, self-contained, escaped, the same every time."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.report import bars, boxes, lines
from twofold.report.html import html_page
from twofold.report.queues import Queues
from twofold.report.results import Goal, Interval, Plan, Replay, Rule, replay_of
from twofold.report.setups import setups_of, side_by_side
from twofold.report.style import style_sheet
from twofold.report.svg import Scale, esc, spread, tag, ticks
from twofold.report.words import number, percent

from .report_support import GOAL, HEADER, RATES, SETUPS, queues, run, sweep

SVG = "{http://www.w3.org/2000/svg}"
NASTY = "<script>alert(\"x\")</script> & 'quoted' \x00\x1b \ud800 end"


def tree_of(page: str) -> ElementTree.Element:
    return ElementTree.fromstring(page)


def text_of(element: ElementTree.Element) -> str:
    return "".join(element.itertext())


def classed(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [e for e in root.iter() if name in e.get("class", "").split()]


class _Strict(HTMLParser):
    """Fails on tags that do not nest."""

    void = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_as_html_and_as_xml() -> None:
    page = html_page(sweep())
    parser = _Strict()
    parser.feed(page)
    assert parser.open == []
    assert parser.seen[:2] == ["html", "head"]
    root = tree_of(page)
    assert root.get("lang") == "en"
    charts = [figure.find(f"{SVG}svg") for figure in root.iter("figure")]
    assert [chart.get("aria-labelledby") for chart in charts if chart is not None] == [
        f"{name}-t {name}-d"
        for name in ("attainment", "goodput", "phases", "ratios", "queues-0", "queues-1", "lengths")
    ]
    idents = [e.get("id") for e in root.iter() if e.get("id")]
    assert len(idents) == len(set(idents))
    for chart in charts:
        assert chart is not None
        assert all(chart.findtext(f"{SVG}{name}") for name in ("title", "desc"))


def test_the_page_needs_nothing_else() -> None:
    page = html_page(sweep())
    assert "<script" not in page
    rest = page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|//|@import|src=|href=|url\((?!#)", rest)
    assert not re.search(r"\b(nan|inf|None)\b", rest)
    assert "\n@media screen and (prefers-color-scheme: dark)" in page
    assert "@media print" in page


def test_every_colour_that_is_used_is_there_in_both_themes() -> None:
    sheet = style_sheet()
    used = set(re.findall(r"var\(--([a-z0-9-]+)\)", sheet))
    light, dark = re.findall(r":root \{([^}]*)\}", sheet)
    for theme in (light, dark):
        assert used <= set(re.findall(r"--([a-z0-9-]+):", theme))
    assert sheet.count("{") == sheet.count("}")


def test_every_run_is_in_the_table_with_its_figures() -> None:
    replay = sweep()
    root = tree_of(html_page(replay))
    table = list(root.iter("table"))[-1]
    heads = [text_of(head) for head in table.iter("th")]
    rows = [[text_of(cell) for cell in row.iter("td")] for row in table.iter("tr")][1:]
    assert len(rows) == len(replay.runs)
    found = {tuple(row[:2]): dict(zip(heads, row, strict=True)) for row in rows}
    for one in replay.runs:
        row = found[one.pools, f"{one.rate_scale:g}x"]
        assert row["digest"] == one.digest[:10]
        assert row["attainment"] == percent(one.slo_attainment)
        assert row["goodput/s"] == number(one.goodput_rps)
        assert row["TTFT p50"] == number(one.ttft_ms.p50)
        assert row["refused"] == str(one.refused)
        missed = (one.slo_attainment or 0) < GOAL.attainment
        assert row["goal"] == ("missed" if missed else "met")
    best = {text_of(cell) for cell in classed(table, "best")}
    assert percent(next(r for r in replay.runs if r.pools == "2P2D").slo_attainment) in best


def test_header_and_digest_are_shown_in_full() -> None:
    replay = sweep([1.0])
    codes = {text_of(code) for code in tree_of(html_page(replay)).iter("code")}
    expected = {HEADER.trace_sha256, HEADER.profile_sha256, HEADER.config_sha256, replay.digest}
    assert expected <= codes


def test_equal_results_give_equal_pages() -> None:
    assert html_page(sweep()) == html_page(sweep())


def test_words_from_outside_are_escaped() -> None:
    hostile = run(label=NASTY, settings={NASTY: NASTY}, handoff=NASTY)
    found = msgspec.structs.replace(hostile.queues or queues(), workers=[NASTY] * 4)
    hostile = msgspec.structs.replace(hostile, queues=found)
    header = msgspec.structs.replace(HEADER, trace_sha256=NASTY)
    page = html_page(replay_of(header, [hostile, run("4M")], GOAL), title=NASTY)
    assert "<script" not in page
    shown = text_of(tree_of(page))
    assert "<script>alert(\"x\")</script> & 'quoted' \ufffd\ufffd \ufffd end" in shown


@given(st.text(max_size=30))
def test_any_text_survives_an_element_and_an_attribute(words: str) -> None:
    page = tag("p", esc(words), title=words)
    found = tree_of(page)
    # XML reads line ends and, in attributes, white space in its own way.
    assert re.sub(r"\s", " ", found.text or "") == re.sub(r"\s", " ", _allowed(words))
    assert len(found.get("title") or "") == len(words)


def _allowed(words: str) -> str:
    return "".join(c if esc(c) != "\ufffd" else "\ufffd" for c in words)


# -------------------------------------------------------------------------- charts


def points(root: ElementTree.Element, look: str) -> list[tuple[float, float]]:
    (line,) = [e for e in classed(root, look) if e.tag == f"{SVG}polyline"]
    pairs = [pair.split(",") for pair in line.get("points", "").split()]
    return [(float(x), float(y)) for x, y in pairs]


def test_a_line_goes_through_every_point() -> None:
    setups = setups_of(sweep().runs)
    root = tree_of(lines.attainment(setups, GOAL))
    (goal,) = [e for e in classed(root, "goal") if e.tag == f"{SVG}line"]
    at_goal = float(goal.get("y1", ""))
    for i, setup in enumerate(setups):
        drawn = points(root, f"s{i}")
        assert len(drawn) == len(RATES)
        xs = [x for x, _ in drawn]
        assert xs == sorted(xs)
        for (_, y), one in zip(drawn, setup.runs, strict=True):
            # Up is better, and the goal's line parts met from missed.
            assert (y <= at_goal) == ((one.slo_attainment or 0) >= GOAL.attainment)
        titles = [text_of(t) for t in root.iter(f"{SVG}title")]
        assert sum(title.startswith(f"{setup.name} at ") for title in titles) == len(RATES)


def test_many_setups_are_all_drawn_the_rest_in_grey() -> None:
    runs = [run(label=f"n{i}", rate=r, capacity=1 + i / 5) for i in range(11) for r in (1.0, 3.0)]
    setups = lines.order(setups_of(runs), GOAL)
    assert len(setups) == 11
    root = tree_of(lines.goodput(setups))
    drawn = [e for e in root.iter(f"{SVG}polyline") if "line" in e.get("class", "").split()]
    assert len(drawn) == 11
    assert sum("rest" in e.get("class", "") for e in drawn) == 3
    assert "grey: 3 more" in text_of(root)
    page = tree_of(html_page(replay_of(HEADER, runs, GOAL)))
    assert len(list(list(page.iter("table"))[-1].iter("tr"))) == 1 + len(runs)


def test_the_ratio_map_has_a_cell_per_ratio_and_frames_the_best() -> None:
    root = tree_of(boxes.ratios(setups_of(sweep().runs), GOAL))
    cells = list(root.iter(f"{SVG}rect"))
    assert len(cells) == len(SETUPS)
    (best,) = [e for e in cells if "top" in e.get("class", "")]
    framed = [t for t in root.iter(f"{SVG}text") if "top" in t.get("class", "")]
    runs = [r for r in sweep().runs if (r.slo_attainment or 0) >= GOAL.attainment]
    assert [text_of(t) for t in framed] == [number(max(r.goodput_rps for r in runs))]
    assert "h4" in best.get("class", "")
    (never,) = boxes_of(boxes.ratios(setups_of([run("1P2D", capacity=0.1)]), GOAL), "none")
    assert never.get("class") == "cell none"
    assert "4M: " in text_of(root)


def boxes_of(svg: str, look: str) -> list[ElementTree.Element]:
    return [e for e in tree_of(svg).iter(f"{SVG}rect") if look in e.get("class", "").split()]


def test_the_length_map_marks_what_is_below_the_goal() -> None:
    one = run()
    shares = (0.95, 0.89, 0.9, None, 0.0)
    marked = [
        msgspec.structs.replace(bucket, slo_attainment=share)
        for bucket, share in zip(one.buckets, shares, strict=True)
    ]
    one = msgspec.structs.replace(one, buckets=marked)
    svg = boxes.lengths(one, GOAL)
    assert len(boxes_of(svg, "below")) == 2
    assert len(boxes_of(svg, "none")) == 1
    assert len(boxes_of(svg, "cell")) == len(one.buckets)


def test_phases_are_drawn_to_scale_and_waits_are_hatched() -> None:
    rows = side_by_side(setups_of([run(rate=1.0)]), GOAL)
    root = tree_of(bars.phases(rows, GOAL))
    widths = {
        look.removeprefix("p-"): float(e.get("width", ""))
        for e in root.iter(f"{SVG}rect")
        if (look := e.get("class", "")).startswith("p-") and e.get("height") == "22"
    }
    for name, phase in rows[0].run.phases_ms.items():
        ratio = (phase.mean or 0) / (rows[0].run.phases_ms["prefill"].mean or 1)
        assert widths[name] / widths["prefill"] == pytest.approx(ratio, abs=0.01)
    # Each begins where the one before it ends.
    drawn = [
        (float(e.get("x", "")), float(e.get("width", "")))
        for e in root.iter(f"{SVG}rect")
        if e.get("class", "").startswith("p-") and e.get("height") == "22"
    ]
    for (x, width), (after, _) in itertools.pairwise(drawn):
        assert x + width == pytest.approx(after, abs=0.02)
    hatched = [e for e in root.iter(f"{SVG}rect") if e.get("fill") == "url(#hatch)"]
    assert len(hatched) == 2 * len(bars.WAITS & set(widths))


def test_one_rate_is_drawn_as_bars() -> None:
    replay = sweep([4.0])
    root = tree_of(html_page(replay))
    assert not [e for e in root.iter(f"{SVG}polyline") if "line" in e.get("class", "").split()]
    (chart,) = [e for e in root.iter(f"{SVG}svg") if "goodput-t" in e.get("aria-labelledby", "")]
    shown = text_of(chart)
    for one in replay.runs:
        assert f"{number(one.goodput_rps)} of {number(one.throughput_rps)}" in shown
    assert len(classed(chart, "whole")) == len(SETUPS)


def test_queues_have_a_line_per_worker_or_per_role_when_there_are_many() -> None:
    root = tree_of(lines.queues("q", "2P2D", queues()))
    # Waiting, running and blocks of four workers.
    assert len(list(root.iter(f"{SVG}polyline"))) == 12
    assert "prefill (2)" in text_of(root)
    deep = [list(range(i, i + 30)) for i in range(20)]
    names = [f"decode-{i}" for i in range(20)]
    zero = [[0] * 30 for _ in names]
    many = Queues(start_ms=0, span_ms=5, workers=names, waiting=deep, running=zero, blocks=zero)
    root = tree_of(lines.queues("q", "many", many))
    titles = [text_of(t) for t in root.iter(f"{SVG}title")]
    assert titles[1:] == [f"decode, most on any worker: peak {peak}" for peak in (48, 0)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: replay_of(HEADER, [], GOAL),
        lambda: replay_of(HEADER, [run()], None),
        lambda: replay_of(HEADER, [run(queues=None, gpus=0)], Goal()),
        lambda: sweep([1.0, 1.0]),
        lambda: replay_of(HEADER, [msgspec.structs.replace(
            run(), slo_attainment=None, goodput_rps=0.0, throughput_rps=0.0, offered_rps=0.0,
            phases_ms={}, buckets=[])], GOAL),
    ],
)  # fmt: skip
def test_odd_results_make_pages_too(make: Callable[[], Replay]) -> None:
    tree_of(html_page(make()))


def test_a_plan_leads_with_its_verdict() -> None:
    best = run(goodput_per_gpu=Interval(value=4.2, low=4.0, high=4.4))
    fields: dict[str, Any] = {"header": HEADER, "goal": GOAL, "best": best, "best_unsplit": None}
    plan = Plan(
        **fields, verdict="split", because="a < b", frontier=[best],
        rules=[Rule(rule="one <GPU>", holds=None, because="it takes the link's speed")],
    )  # fmt: skip
    root = tree_of(html_page(plan))
    assert [text_of(e) for e in classed(root, "verdict")] == ["Verdict: split"]
    shown = text_of(root)
    assert "a < b" in shown
    assert "goodput per GPU, requests/s, between 4 and 4.40" in shown
    assert "not known" in shown
    assert "one <GPU>" in shown


# ------------------------------------------------------------------------- drawing


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_enclose_their_range_in_even_steps(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert found[0] <= low + width * 1e-6
    assert found[-1] >= low + width * (1 - 1e-6)
    assert 2 <= len(found) <= 12


def test_ticks_are_round() -> None:
    assert ticks(0, 60) == [0, 20, 40, 60]
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(3, 3)[0] <= 3
    assert Scale(0, 10, 100, 0).at(2.5) == 75


@given(st.lists(st.floats(0, 300), max_size=12))
def test_labels_do_not_touch_and_stay_inside(wanted: list[float]) -> None:
    placed = spread(wanted, 17, 0, 300)
    assert all(-1e-6 <= y <= 300 + 1e-6 for y in placed)
    ordered = sorted(placed)
    assert all(b - a >= 17 - 1e-6 for a, b in itertools.pairwise(ordered))
    by_wish = [placed[i] for i in sorted(range(len(wanted)), key=lambda i: (wanted[i], i))]
    assert by_wish == ordered
