"""Making a schedule that breaks an invariant as small as can be while it still does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from twofold.sim.swarm_run import run
from twofold.sim.swarm_schedule import Schedule

_T = TypeVar("_T")


def shrink(schedule: Schedule, most_runs: int = 1500) -> Schedule:
    """A smaller schedule that breaks an invariant too; not necessarily the same one.

    Leaves out troubles, fates and requests, in ever smaller parts, until no single one can go or
    `most_runs` have been made. `schedule` itself must fail.
    """
    verdict = run(schedule, full_every=1)
    assert verdict.violation, f"seed {schedule.seed} in mode {schedule.mode} breaks nothing"
    best = msgspec.structs.replace(schedule, rates=None, fates=verdict.fates)
    search = _Search(most_runs)
    before = None
    while before != best and search.left > 0:
        before = best
        for part in (_without_troubles, _without_fates, _without_requests, _staying):
            best = part(best, search)
    return best


class _Search:
    """Counts runs. `fails` says whether a schedule breaks an invariant, False when none is left."""

    def __init__(self, most_runs: int) -> None:
        self.left = most_runs

    def fails(self, schedule: Schedule) -> bool:
        self.left -= 1
        return self.left >= 0 and bool(run(schedule, full_every=1).violation)


def _without_troubles(schedule: Schedule, search: _Search) -> Schedule:
    def with_only(kept: Sequence[int]) -> Schedule:
        troubles = tuple([schedule.troubles[i] for i in kept])
        return msgspec.structs.replace(schedule, troubles=troubles)

    return with_only(_least(range(len(schedule.troubles)), with_only, search))


def _without_fates(schedule: Schedule, search: _Search) -> Schedule:
    def with_only(kept: Sequence[str]) -> Schedule:
        fates = {name: schedule.fates[name] for name in kept}
        return msgspec.structs.replace(schedule, fates=fates)

    return with_only(_least(list(schedule.fates), with_only, search))


def _without_requests(schedule: Schedule, search: _Search) -> Schedule:
    def with_only(kept: Sequence[int]) -> Schedule:
        requests = tuple([schedule.requests[i] for i in kept])
        return msgspec.structs.replace(schedule, requests=requests)

    return with_only(_least(range(len(schedule.requests)), with_only, search))


def _staying(schedule: Schedule, search: _Search) -> Schedule:
    """Clients that leave stay, where that is of no consequence."""
    for index, asked in enumerate(schedule.requests):
        if asked.gone_ns:
            requests = list(schedule.requests)
            requests[index] = msgspec.structs.replace(asked, gone_ns=0)
            smaller = msgspec.structs.replace(schedule, requests=tuple(requests))
            if search.fails(smaller):
                schedule = smaller
    return schedule


def _least(
    items: Sequence[_T], with_only: Callable[[Sequence[_T]], Schedule], search: _Search
) -> Sequence[_T]:
    """A subset of `items` of which none can go: parts are left out, halved in size each time."""
    kept = list(items)
    size = len(kept)
    while size >= 1 and kept:
        at = 0
        while at < len(kept):
            fewer = kept[:at] + kept[at + size :]
            if search.fails(with_only(fewer)):
                kept = fewer
            else:
                at += size
        size //= 2
    return kept
