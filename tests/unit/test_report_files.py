"""Plots and Chrome traces."""

from __future__ import annotations

import io
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from twofold.metrics.record import RequestRecord
from twofold.report.chrome import GATEWAY, save_chrome_trace, write_chrome_trace
from twofold.report.plot import PlotError, check_plot, save_plot
from twofold.report.results import Plan, replay_of

from .report_support import GOAL, HEADER, SETUPS, record, records, run, sweep

Event = dict[str, Any]


def trace_of(found: list[RequestRecord]) -> list[Event]:
    file = io.BytesIO()
    n = write_chrome_trace(file, found, HEADER)
    whole = json.loads(file.getvalue())
    assert whole["otherData"]["trace_sha256"] == HEADER.trace_sha256
    events: list[Event] = whole["traceEvents"]
    assert len(events) == n
    return events


def names_of(events: list[Event]) -> dict[int, str]:
    return {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}


def test_the_slices_of_a_request_are_its_phases_on_their_workers() -> None:
    one = record(3, 2.0, 3.1, "2P2D")
    events = trace_of([one])
    names = names_of(events)
    slices = [(names[e["pid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    # ts and dur are microseconds; the request comes at 150 ms.
    assert slices == [
        (GATEWAY, "queue", 150_000, 1000),
        ("prefill-1", "prefill_queue", 151_000, 5000),
        ("prefill-1", "prefill", 156_000, 43_000),
        ("decode-1", "handoff_wait", 199_000, 2000),
        ("decode-1", "transfer", 201_000, 6000),
        ("decode-1", "first_step", 207_000, 9000),
        (GATEWAY, "relay", 216_000, 2000),
        ("decode-1", "answer", 218_000, 92_000),
    ]
    args = next(e["args"] for e in events if e["ph"] == "X")
    assert (args["request"], args["input_tokens"], args["kv_bytes"]) == (3, 1000, 4096)
    total = sum(e["dur"] for e in events if e["ph"] == "X" and e["name"] != "answer")
    assert total * 1000 == one.ttft_ns


def test_an_arrow_leads_from_prefill_to_decode() -> None:
    events = trace_of(records())
    names = names_of(events)
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert set(starts) == set(ends) == set(range(40))
    for i, start in starts.items():
        end = ends[i]
        assert names[start["pid"]] == f"prefill-{i % 2}"
        assert names[end["pid"]] == f"decode-{i % 2}"
        assert start["ts"] <= end["ts"]
        (around,) = [
            e for e in events
            if e["ph"] == "X" and (e["pid"], e["tid"]) == (start["pid"], start["tid"])
            and e["ts"] <= start["ts"] < e["ts"] + e["dur"]
        ]  # fmt: skip
        assert (around["name"], around["args"]["request"]) == ("prefill", i)
    unsplit = trace_of(records(pools="4M"))
    assert not [e for e in unsplit if e["ph"] in "sf"]
    assert set(names_of(unsplit).values()) == {GATEWAY, *(f"mixed-{i}" for i in range(4))}


def test_slices_on_a_lane_never_overlap() -> None:
    events = trace_of(records(4.0, 1.2))
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for e in events:
        if e["ph"] == "X":
            start = round(e["ts"] * 1000)
            lanes.setdefault((e["pid"], e["tid"]), []).append((start, round(e["dur"] * 1000)))
    assert len(lanes) > 4
    for slices in lanes.values():
        slices.sort()
        for (a, took), (b, _) in itertools.pairwise(slices):
            assert a + took <= b


def test_what_was_never_served_is_shown_at_the_gateway() -> None:
    events = trace_of([record(9, 4.0, 9.0, "2P2D")])
    (shown,) = [e for e in events if e["ph"] == "X"]
    assert (names_of(events)[shown["pid"]], shown["name"], shown["dur"]) == (
        GATEWAY, "refused", 50_000,
    )  # fmt: skip
    assert shown["args"]["reason"] == "queue_full"


def test_times_keep_their_nanoseconds() -> None:
    late = record(0, 1.0, 2.0, "4M")
    epoch = 1_700_000_000_000_000_123
    late = msgspec.structs.replace(
        late, arrival_ns=epoch, token_times_ns=[t + epoch for t in late.token_times_ns]
    )
    file = io.BytesIO()
    write_chrome_trace(file, [late])
    assert b'"ts":1700000000000000.123,' in file.getvalue()


def test_a_trace_is_written_as_the_records_come(tmp_path: Path) -> None:
    written: list[int] = []
    file = io.BytesIO()

    def coming() -> Any:
        for i in range(5):
            written.append(len(file.getvalue()))
            yield record(i, 1.0, 2.0, "2P2D")

    write_chrome_trace(file, coming())
    assert written == sorted(set(written))
    path = tmp_path / "run.json"
    n = save_chrome_trace(path, records(), HEADER)
    assert len(json.loads(path.read_bytes())["traceEvents"]) == n
    assert save_chrome_trace(path, []) == 0
    assert json.loads(path.read_bytes())["traceEvents"] == []


def test_labels_and_reasons_cannot_break_a_trace() -> None:
    odd = record(1, 1.0, 2.0, "2P2D")
    odd = msgspec.structs.replace(odd, decode='d"\n</script>\\', klass="\x00")
    assert 'd"\n</script>\\' in names_of(trace_of([odd])).values()


# --------------------------------------------------------------------------- plots


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_equal_results_give_equal_plots(tmp_path: Path, suffix: str) -> None:
    for name in ("a", "b"):
        save_plot(tmp_path / f"{name}.{suffix}", sweep())
    first, second = (tmp_path / f"{name}.{suffix}" for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    save_plot(second, sweep([1.0]))
    assert first.read_bytes() != second.read_bytes()


def test_a_plot_is_a_picture_of_its_kind(tmp_path: Path) -> None:
    save_plot(tmp_path / "a.PNG", sweep())
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG")
    save_plot(tmp_path / "a.svg", sweep())
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert root.tag.endswith("svg")
    text = (tmp_path / "a.svg").read_text()
    for words in (*(name for name, _ in SETUPS), "goal 90 %", "prefill queue", "Goodput"):
        assert f"<!-- {words} -->" in text


@pytest.mark.parametrize(
    "make",
    [
        lambda: replay_of(HEADER, [], GOAL),
        lambda: replay_of(HEADER, [run()], None),
        lambda: replay_of(HEADER, [run(label=f"$\\frac{{{i}$ _^") for i in range(12)], GOAL),
        lambda: Plan(header=HEADER, goal=GOAL, verdict="cannot meet", because="", best=None,
                     best_unsplit=None, frontier=[run()]),
    ],
)  # fmt: skip
def test_odd_results_make_plots_too(tmp_path: Path, make: Callable[[], Any]) -> None:
    save_plot(tmp_path / "a.svg", make())
    ElementTree.parse(tmp_path / "a.svg")


def test_a_plot_with_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlotError, match=r"^--plot \S+a\.pdf: .*\.png or \.svg") as refused:
        save_plot(tmp_path / "a.pdf", sweep())
    assert "\n" not in str(refused.value)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotError, match=r"twofold\[plot\]"):
        check_plot("a.png")


def test_reports_do_not_load_matplotlib_before_they_plot() -> None:
    import subprocess

    code = (
        "import sys, twofold.report.plot, twofold.report.html, twofold.report.terminal\n"
        "raise SystemExit('matplotlib' in sys.modules or 'rich' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
