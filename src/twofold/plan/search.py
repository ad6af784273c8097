"""From every set-up to the best split and the best unsplit one, from coarse to fine.

First all set-ups race on a sample of the trace: whoever holds a rate goes on to a higher one. The
few best of either kind are then bisected on more of it. Last, both winners are run on
resamples of the trace, the same ones, for the interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from twofold.plan.bisect import HIGHEST, LOWEST, Held, Outcome, drive, highest, neat
from twofold.plan.execute import Executor, run_all
from twofold.plan.known import start_scale
from twofold.plan.placement import Candidate, Space, between, first_of
from twofold.plan.runner import Probe, Problem
from twofold.plan.scenario import Scenario
from twofold.plan.words import figure
from twofold.plan.workload import requests_of, summary
from twofold.sim.pools import pools_name

_UP: Final = 1.25
_MOST_UP: Final = 2.5
_DOWN: Final = 1.6
_MOST_DOWN: Final = 4.0


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """How much a search spends, in requests: `race` in the first round, `whole` in the bisections
    and all runs after them, `resample` in each of `resamples`. Longer traces are sampled.

    `splits` and `unsplit` set-ups are bisected; `within` is the ratio between a rate that holds
    and one that does not.
    """

    race: int = 1000
    whole: int = 3000
    resample: int = 1500
    resamples: int = 8
    splits: int = 3
    unsplit: int = 2
    within: float = 1.02


_ALL: Final = 1_000_000_000
QUICK: Final = Effort(
    race=500, whole=1500, resample=1000, resamples=4, splits=1, unsplit=1, within=1.05
)
THOROUGH: Final = Effort(race=3000, whole=_ALL, resample=_ALL)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One set-up and the rate that it holds: on the sample, and on the whole where it got so far.

    `resampled` are the rates held on the resamples, in order.
    """

    candidate: Candidate
    coarse: Held
    fine: Held | None = None
    resampled: tuple[float, ...] = ()

    @property
    def best(self) -> Held:
        """The finer of the two."""
        return self.fine or self.coarse

    @property
    def gpus(self) -> int:
        """Accelerators that it uses."""
        pools = zip(self.candidate.pools, self.candidate.hardware, strict=True)
        return sum(pool.count * hardware.gpus for pool, hardware in pools)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The least and the most that the trace itself and its resamples held, requests/s."""
        if not self.resampled:
            return None
        rates = (self.best.rate_rps, *self.resampled)
        return min(rates), max(rates)


class Progress(msgspec.Struct, frozen=True):
    """How a search tells of itself: `say` begins a stage of about so many runs, `tick` ends one,
    `note` says what is known by now, lest it be lost when the search is interrupted.
    """

    say: Callable[[str, int], Any]
    tick: Callable[[], Any]
    note: Callable[[str], Any] = lambda line: None


def search(
    space: Space,
    like: Scenario,
    effort: Effort,
    executor: Executor[Scenario, Outcome],
    progress: Progress,
) -> tuple[list[Finding], list[Finding]]:
    """(splits, unsplit set-ups), each with the best first; the first of each have all figures."""
    splits = _coarse(space.splits, like, effort, executor, progress)
    unsplit = _coarse(space.unsplit, like, effort, executor, progress)
    _tell(progress, "after the race", splits, unsplit)
    finalists = [*splits[: effort.splits], *unsplit[: effort.unsplit]]
    fine = _fine(finalists, like, effort, executor, progress)
    splits = _ranked([*(f for f in fine if f.candidate.split), *splits[effort.splits :]])
    unsplit = _ranked([*(f for f in fine if not f.candidate.split), *unsplit[effort.unsplit :]])
    _tell(progress, "bisected", splits, unsplit)
    winners = [found[0] for found in (splits, unsplit) if found]
    resampled = _resampled(winners, like, effort, executor, progress)
    by_candidate = {id(f.candidate): f for f in resampled}
    return (
        [by_candidate.get(id(f.candidate), f) for f in splits],
        [by_candidate.get(id(f.candidate), f) for f in unsplit],
    )


def _tell(progress: Progress, when: str, *kinds: Sequence[Finding]) -> None:
    """The best of each kind so far."""
    best = [findings[0] for findings in kinds if findings]
    words = [f"{_setup_name(f.candidate)} holds {figure(f.best.rate_rps)} req/s" for f in best]
    progress.note(f"{when}: {', '.join(words)}")


def _setup_name(candidate: Candidate) -> str:
    """A set-up in as few words as tell it from others."""
    routed = " projected" if candidate.routing == "projected" else ""
    return f"{pools_name(candidate.pools)} chunk {candidate.chunk_tokens}{routed}"


def _ranked(findings: Sequence[Finding]) -> list[Finding]:
    """Whoever got to the whole trace first, then by rate held; ties as they were enumerated."""
    return sorted(
        findings,
        key=lambda f: (
            f.fine is None,
            -f.best.rate_rps,
            -(f.best.broke.attainment if f.best.broke is not None else 0.0),
            f.candidate.family,
            f.candidate.place,
        ),
    )


def sampled(like: Scenario, most: int) -> Scenario:
    """`like` on about `most` requests of its trace."""
    workload = msgspec.structs.replace(like.workload, sample=most)
    return msgspec.structs.replace(like, workload=workload)


def _coarse(
    candidates: Sequence[Candidate],
    like: Scenario,
    effort: Effort,
    executor: Executor[Scenario, Outcome],
    progress: Progress,
) -> list[Finding]:
    """All of `candidates` on the sample; of long families first some, then what lies between."""
    like = sampled(like, effort.race)
    found = summary(requests_of(like.workload, like.seed).rows)
    families: dict[int, list[Candidate]] = {}
    for candidate in candidates:
        families.setdefault(candidate.family, []).append(candidate)
    wave = [candidate for family in families.values() for candidate in first_of(family)]
    starts = [start_scale(candidate.scenario(like), found) for candidate in wave]
    start = max(starts, default=1.0)
    findings: list[Finding] = []
    while wave:
        kind = "splits" if wave[0].split else "unsplit set-ups"
        progress.say(f"{len(wave)} {kind} on {found.requests:,} requests", 2 * len(wave))
        findings += _race(wave, like, start, executor, progress)
        start = max(finding.coarse.scale for finding in findings) or start
        wave = [c for family in families.values() for c in _closer(family, findings)]
    return _ranked(findings)


def _race(
    candidates: Sequence[Candidate],
    like: Scenario,
    start: float,
    executor: Executor[Scenario, Outcome],
    progress: Progress,
) -> list[Finding]:
    """All at one rate, those that hold it at a higher one, and so on until none does.

    Steps grow while all hold, and are small again once some fall behind. Where none holds the
    first rate, all go down together until one does. So the weak cost few runs, and how far they
    fell short ranks them.
    """
    held: list[Probe | None] = [None] * len(candidates)
    broke: list[Probe | None] = [None] * len(candidates)
    problems, runs = [""] * len(candidates), [0] * len(candidates)
    racing, scale, low = list(range(len(candidates))), neat(start), 0.0
    step, down = _UP, _DOWN
    while racing and LOWEST <= scale <= HIGHEST:
        scenarios = [
            msgspec.structs.replace(candidates[i].scenario(like), rate_scale=scale) for i in racing
        ]
        standing = []
        for i, outcome in zip(racing, run_all(scenarios, executor, progress.tick), strict=True):
            runs[i] += 1
            if isinstance(outcome, Problem):
                problems[i], broke[i] = outcome.reason, None
            elif outcome.holds(like.attainment):
                held[i] = outcome
                standing.append(i)
            else:
                broke[i] = outcome
        if not standing and low and step == _UP:
            break
        if not standing and low:
            step = _UP
        elif standing:
            step = min(step * step, _MOST_UP) if standing == racing else _UP
            low, racing = scale, standing
        scale = neat(low * step if low else scale / down)
        down = min(down * down, _MOST_DOWN)
    return [
        Finding(
            candidate=candidate,
            coarse=Held(held=held[i], broke=broke[i], problem=problems[i], runs=runs[i]),
        )
        for i, candidate in enumerate(candidates)
    ]


def _closer(family: Sequence[Candidate], findings: Sequence[Finding]) -> list[Candidate]:
    """What to try next of a family of which not every ratio was tried."""
    tried = {f.candidate.place: f for f in findings if f.candidate.family == family[0].family}
    if len(tried) == len(family):
        return []
    best = _ranked(list(tried.values()))[0].candidate.place
    return between(family, sorted(tried), best)


def _fine(
    finalists: Sequence[Finding],
    like: Scenario,
    effort: Effort,
    executor: Executor[Scenario, Outcome],
    progress: Progress,
) -> list[Finding]:
    """`finalists` on the whole trace."""
    like = sampled(like, effort.whole)
    n = len(requests_of(like.workload, like.seed).rows)
    progress.say(f"the best {len(finalists)} on {n:,} requests", 6 * len(finalists))
    scenarios = [finding.candidate.scenario(like) for finding in finalists]
    searches = [
        highest(
            like.attainment,
            start=_near(finding.coarse),
            step=1.1,
            within=effort.within,
        )
        for finding in finalists
    ]
    held = drive(searches, scenarios, executor, progress.tick)
    return [
        msgspec.structs.replace(finding, fine=found)
        for finding, found in zip(finalists, held, strict=True)
    ]


def _near(coarse: Held) -> float:
    """A rate scale to begin at, close to where the race ended."""
    if coarse.held is None and coarse.broke is not None:
        return coarse.broke.rate_scale / 1.5
    return coarse.scale or 1.0


def _resampled(
    winners: Sequence[Finding],
    like: Scenario,
    effort: Effort,
    executor: Executor[Scenario, Outcome],
    progress: Progress,
) -> list[Finding]:
    """`winners` with the rates that they hold on resamples of the trace."""
    able = [finding for finding in winners if finding.best.held is not None]
    n = effort.resamples
    if not able or not n:
        return list(winners)
    progress.say(f"{n} resamples of the trace", 4 * n * len(able))
    scenarios = []
    for finding in able:
        base = finding.candidate.scenario(sampled(like, effort.resample))
        for number in range(1, n + 1):
            workload = msgspec.structs.replace(base.workload, resample=number)
            scenarios.append(msgspec.structs.replace(base, workload=workload))
    searches = [
        highest(like.attainment, start=finding.best.scale, step=1.05, within=effort.within * 1.01)
        for finding in able
        for _ in range(n)
    ]
    held = drive(searches, scenarios, executor, progress.tick)
    rates = {
        id(finding): tuple(one.rate_rps for one in held[i * n : (i + 1) * n])
        for i, finding in enumerate(able)
    }
    return [
        msgspec.structs.replace(finding, resampled=rates.get(id(finding), ()))
        for finding in winners
    ]
