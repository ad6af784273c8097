"""A fault at a chosen message, crossed with a client that leaves and kill -9 of either worker.

    python -m tests.live.cross [--every N] [--modes pull,push,layerwise] [--json FILE]

goes through the whole cross; tests/live/test_cross.py through a part that covers each pair.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import cycle, product
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.live.cluster import DEADLINE_S, B, Cluster, cluster
from tests.live.fault_proxy import FATES, Fault

MODES: Final = ("pull", "push", "layerwise")
LENGTHS: Final = (1, B - 1, B, B + 1, 2 * B)
ACTS: Final = ("none", "abort", "kill prefill", "kill decode")
POINTS: Final = {
    "pull": ("Hello>", "Hello<", "Claim", "Grant", "request", "answer", "Done", "Closed"),
    "push": ("Hello>", "Hello<", "Claim", "write", "bytes", "answer", "Written"),
    "layerwise": ("Hello>", "Hello<", "Claim", "write", "bytes", "answer", "Written"),
}
"""Messages at which something goes wrong, in the order in which they come."""

QUICKLY_MISSED: Final = {"pull": ("Done", "Closed", "Grant"), "push": ("bytes", "Written")}
"""Messages whose loss takes few seconds to show, for a short run."""

PHASES: Final = ("in prefill", "committed", "streaming")
"""Phases with no message between workers: a worker that stands still marks them."""

DATA: Final = ("request", "write", "bytes", "answer")

PLACES: Final = tuple(i / 40 for i in range(40))
"""Where messages of the control connection have a bit flipped, as a share of their length."""

PREFILL, DECODE = "prefill-0", "decode-1"
TOLD_WITHIN_S: Final = 2.0
"""From a kill until the client has its error: 1 s, and time for a loaded machine."""

GIVEN_UP_WITHIN_S: Final = DEADLINE_S + 4.0
"""From a lost message until the client has an end, and until all is back after that."""


class Case(NamedTuple):
    """`at` is a message's kind, with the fate of it, or a phase, with none."""

    mode: str
    at: str
    fate: str
    act: str
    length: int
    place: float = 0.5

    def __str__(self) -> str:
        return " ".join(map(str, self))


class Outcome(NamedTuple):
    end: str
    took_s: float
    """From when the fault was met until the client's end."""


def whole(modes: tuple[str, ...] = MODES) -> Iterator[Case]:
    """Every case."""
    for mode in modes:
        for place in PLACES:
            for at in ("Claim", "Grant", "Written", "Done", "Closed"):
                if at in POINTS[mode]:
                    yield Case(mode, at, "corrupt", "none", 2 * B, place)
        for length, act in product(LENGTHS, ACTS):
            for at in PHASES:
                if act != "none" and (at, length) != ("committed", 1):
                    yield Case(mode, at, "", act, length)
            for at, fate in product(POINTS[mode], FATES):
                if length == 1 and (at in DATA or mode != "pull"):
                    continue  # a prompt of one token has no KV to hand over
                if fate == "hold" and act == "none":
                    continue  # nothing ends it
                yield Case(mode, at, fate, act, length)


def covering(mode: str) -> list[Case]:
    """Some of `whole`: in push and layerwise together, and in pull alone, every point meets
    every fate but lateness, which `hold` is, and loss, and every act; lengths take turns."""
    lengths = cycle(LENGTHS[0 if mode == "pull" else 1 :])
    turn = 0 if mode == "pull" else MODES.index(mode)
    found = []
    acts = [(at, "hold", act) for at, act in product(POINTS[mode], ACTS[1:])]
    acts += [(at, "", act) for at, act in product(PHASES, ACTS[1:])]
    fates = [f for f in FATES if f not in ("hold", "delay", "drop")]
    acts += [(at, fate, "none") for at, fate in product(POINTS[mode], fates)]
    acts += [(at, "drop", "none") for at in QUICKLY_MISSED.get(mode, ())]
    for i, (at, fate, act) in enumerate(acts):
        length = next(lengths)
        while length == 1 and (at in DATA or at == "committed"):
            length = next(lengths)
        if not turn or i % 2 == turn - 1:
            found.append(Case(mode, at, fate, act, length))
    return found


async def one(made: Cluster, case: Case) -> Outcome:
    """Run a case, and check what must hold during and after it."""
    if case.at.startswith("Hello"):
        await made.proxy.sever()
        await made.states()  # an answer of theirs comes after they have seen that
    fault = _fault(case)
    made.proxy.set(*([fault] if fault else []))
    if case.at == "in prefill":
        made.signal(PREFILL, signal.SIGSTOP)
    client, task = made.ask(case.length)
    if fault is not None:
        await _met(fault.met, task, case)
    elif case.at == "streaming":
        await _met(client.first, task, case)
    else:
        await made.wait(lambda: bool(made.gateway.router.requests), 5, "the request has arrived")
    stopped = {"in prefill": PREFILL, "committed": DECODE}.get(case.at)
    if case.at == "committed":
        made.signal(DECODE, signal.SIGSTOP)
    if case.at == "committed" and fault is not None:
        fault.let_go.set()
    began = time.monotonic()
    victim = {"kill prefill": PREFILL, "kill decode": DECODE}.get(case.act)
    if case.act == "abort":
        client.leave()
    elif victim is not None:
        made.kill(victim)
    # What was held back, or stood still, comes after that.
    await asyncio.sleep(0.03)
    if stopped is not None and stopped != victim:
        made.signal(stopped, signal.SIGCONT)
    if fault is not None:
        fault.let_go.set()
    await task
    took_s = client.ended_at - began
    end = "left" if case.act == "abort" else client.end()
    if case.act == "none":
        _check_alone(case, end)
    if end == "error":  # an answer that goes on to its end takes what it takes
        assert took_s < (TOLD_WITHIN_S if victim else GIVEN_UP_WITHIN_S), took_s
    await _afterwards(made, case, victim)
    return Outcome(end, took_s)


async def _afterwards(made: Cluster, case: Case, victim: str | None) -> None:
    """All is as before, and served as before, once the fault is over."""
    made.proxy.set()
    if case.at.startswith("Hello") and case.fate == "drop":
        # Until whoever waits for it gives up, others wait on the same connection.
        await made.wait(lambda: not made.proxy.n_links, 2, "nobody waits for a Hello")
    if victim is not None:
        await made.restart(victim)
    await made.at_baseline(GIVEN_UP_WITHIN_S)
    await made.canary()
    await made.at_baseline(2.0)
    assert not made.proxy.broken, made.proxy.broken
    gauges = await made.gauges()
    assert gauges, "no gauges"
    assert not any(gauges.values()), gauges


def _check_alone(case: Case, end: str) -> None:
    """What a fault alone may come to."""
    # A Hello has half a second: on a loaded machine a late one may be too late.
    if case.fate == "delay" and not case.at.startswith("Hello"):
        assert end == "whole", end
    if case.fate == "corrupt" and case.at in ("answer", "bytes"):
        # One bit of KV may change no token: that it was seen is what counts.
        assert end == "error", "damaged KV was believed"


def _fault(case: Case) -> Fault | None:
    if case.at == "committed":
        return Fault("Closed" if case.mode == "pull" else "Written", "hold")
    if case.at in PHASES:
        return None
    fate: Any = case.fate
    return Fault(case.at, fate, at=case.place)


async def _met(event: asyncio.Event, task: asyncio.Task[None], case: Case) -> None:
    """Until `event`, which must come while the request is under way."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait((waiting, task), timeout=20, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    assert event.is_set(), f"{case.at} never came"


class Report:
    """What came of the cases of a run."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.told_s: list[float] = []
        self.failed: list[str] = []

    def body(self) -> dict[str, Any]:
        told = sorted(self.told_s)
        return {
            "cases": sum(self.ends.values()) + len(self.failed),
            "ends": dict(sorted(self.ends.items())),
            "longest_from_kill_to_error_s": round(told[-1], 3) if told else None,
            "failed": self.failed,
        }


async def run(mode: str, cases: list[Case], report: Report, on_case: Any = None) -> None:
    """Run the cases of one mode; a failed one is noted, and its cluster begun anew."""
    left = list(cases)
    while left:
        async with cluster(handoff=mode) as made:
            await made.canary()
            while left:
                case = left.pop(0)
                if on_case is not None:
                    on_case(case)
                try:
                    outcome = await one(made, case)
                except Exception as error:
                    report.failed.append(f"{case}: {type(error).__name__}: {error}")
                    print(f"failed: {report.failed[-1]}", file=sys.stderr, flush=True)
                    break
                report.ends[outcome.end] += 1
                if case.act.startswith("kill") and outcome.end == "error":
                    report.told_s.append(outcome.took_s)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1, help="only each Nth case")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--only", default="", help="only cases whose text has this")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    cases = [c for c in whole(tuple(args.modes.split(","))) if args.only in str(c)]
    cases = cases[:: args.every]
    report = Report()
    began = time.monotonic()
    n_begun = 0

    def on_case(case: Case) -> None:
        nonlocal n_begun
        n_begun += 1
        text = f"{n_begun}/{len(cases)} failed {len(report.failed)}: {case}"
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif n_begun % 50 == 0:
            print(text, file=sys.stderr, flush=True)

    for mode in args.modes.split(","):
        asyncio.run(run(mode, [c for c in cases if c.mode == mode], report, on_case))
    body = report.body() | {"took_s": round(time.monotonic() - began, 1)}
    print(json.dumps(body, indent=1))
    if args.json:
        args.json.write_text(json.dumps(body, indent=1) + "\n")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
