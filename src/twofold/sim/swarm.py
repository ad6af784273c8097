"""The search for faults: many schedules drawn from seeds, on all processors.

`python -m twofold.sim.swarm --seeds 10000 --mode all`. A violation is shrunk and printed as JSON
that can be kept as a regression test. Exit status 0: none found, 1: some, 2: bad usage.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Final

import msgspec

from twofold.sim.swarm_run import Verdict, run
from twofold.sim.swarm_schedule import ALL_MODES, Mode, draw, encode
from twofold.sim.swarm_shrink import shrink

_CHUNK: Final = 20  # seeds that a process takes at a time
_SHRUNK: Final = 3  # violations that are shrunk; the others are only named
_REPORT_S: Final = 10.0


class Found(msgspec.Struct, frozen=True):
    """One schedule that broke an invariant."""

    seed: int
    mode: Mode
    violation: str


class Tally(msgspec.Struct):
    """What a number of schedules came to."""

    schedules: int = 0
    requests: int = 0
    events: int = 0
    outcomes: dict[str, int] = msgspec.field(default_factory=dict)
    found: list[Found] = msgspec.field(default_factory=list)

    def add(self, seed: int, mode: Mode, verdict: Verdict) -> None:
        """One more schedule."""
        self.schedules += 1
        self.requests += verdict.n_requests
        self.events += verdict.n_events
        if verdict.violation:
            self.found.append(Found(seed, mode, verdict.violation))
        self._ends(verdict.outcomes)

    def join(self, other: Tally) -> None:
        """Those of `other` as well."""
        self.schedules += other.schedules
        self.requests += other.requests
        self.events += other.events
        self.found += other.found
        self._ends(other.outcomes)

    def _ends(self, outcomes: dict[str, int]) -> None:
        for name, n in outcomes.items():
            self.outcomes[name] = self.outcomes.get(name, 0) + n


def tally(seeds: Sequence[int], modes: Sequence[Mode], n_requests: int = 50) -> Tally:
    """Run each seed in each mode, here."""
    found = Tally()
    for seed in seeds:
        for mode in modes:
            found.add(seed, mode, run(draw(seed, mode, n_requests)))
    return found


def tallies(start: int, seeds: int, modes: Sequence[Mode], jobs: int) -> Iterator[Tally]:
    """Run `seeds` seeds from `start` on in each mode over `jobs` processes, as parts get done."""
    parts = [
        range(at, min(at + _CHUNK, start + seeds)) for at in range(start, start + seeds, _CHUNK)
    ]
    if jobs == 1:
        yield from (tally(part, modes) for part in parts)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(tally, parts, [modes] * len(parts))


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m twofold.sim.swarm", description="Search for faults in the handoff."
    )
    parser.add_argument("--seeds", type=_count, default=1000, help="seeds to run in each mode")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--mode", choices=[*ALL_MODES, "all"], default="all")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument("--jobs", type=_count, default=cores or 1, help="processes")
    return parser.parse_args(words)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _watched(parts: Iterable[Tally], total: int) -> tuple[Tally, float]:
    """The sum of `parts`, with a line on stderr now and then; and the seconds it took."""
    began = told = time.monotonic()
    found = Tally()
    for part in parts:
        found.join(part)
        for one in part.found:
            print(f"seed {one.seed}, {one.mode}: {one.violation}", file=sys.stderr)
        if time.monotonic() - told > _REPORT_S:
            told = time.monotonic()
            rate = found.schedules / (told - began)
            line = f"{found.schedules:,} of {total:,} schedules, {rate:.1f} a second"
            print(line, file=sys.stderr, flush=True)
    return found, time.monotonic() - began


def main(words: Sequence[str] | None = None) -> int:
    """Run the search as the command line says; returns the exit status."""
    asked = _arguments(words)
    modes: tuple[Mode, ...] = ALL_MODES if asked.mode == "all" else (asked.mode,)
    parts = tallies(asked.start, asked.seeds, modes, asked.jobs)
    found, took_s = _watched(parts, asked.seeds * len(modes))
    for one in found.found[:_SHRUNK]:
        print(f"smallest schedule found for seed {one.seed}, {one.mode}:", file=sys.stderr)
        print(encode(shrink(draw(one.seed, one.mode))).decode(), flush=True)
    ends = ", ".join(f"{n:,} {name}" for name, n in sorted(found.outcomes.items()))
    print(f"requests: {ends}")
    print(
        f"{found.schedules:,} schedules, {found.requests:,} requests, {found.events:,} events, "
        f"{found.schedules / took_s:.1f} schedules/s, {len(found.found)} violations"
    )
    return 1 if found.found else 0


if __name__ == "__main__":
    sys.exit(main())
