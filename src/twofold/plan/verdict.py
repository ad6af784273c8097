"""Split, do not split, or cannot meet: from what the best of both kinds hold, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from twofold.metrics.slo import Slo
from twofold.plan.rules import MOST_SLOTS_USED, Rule
from twofold.plan.runner import Probe
from twofold.plan.search import Finding
from twofold.plan.words import count, figure, percent, plain
from twofold.sim.pools import pools_name

Word = Literal["split", "do not split", "cannot meet"]
Judge = Literal["load", "capacity"]
CLEARLY: Final = 1.03
"""A rate held counts as higher from this factor on: below it, bisection cannot tell."""
FORBID: Final = ("one GPU", "no latency goal")
"""Rules that settle the verdict without simulating any split."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict and its reason, in a few sentences."""

    word: Word
    because: str


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What is judged. `load` is the rate scale that must be held.

    `at_load` has the run of each at the load, `pushed` the run of the weaker one at the highest
    rate that the stronger holds.
    """

    split: Finding | None
    unsplit: Finding
    slo: Slo
    attainment: float
    load: float
    judge: Judge
    at_load: tuple[Probe | None, Probe]
    pushed: Probe | None = None
    rules: tuple[Rule, ...] = ()
    gpus: int = 0


def forbidding(rules: Sequence[Rule]) -> Rule | None:
    """The rule that settles it before any split is simulated, if one holds."""
    return next((rule for rule in rules if rule.holds and rule.rule in FORBID), None)


def setup_words(finding: Finding) -> str:
    """A set-up in words; chunk size and routing are what unsplit ones differ in."""
    candidate = finding.candidate
    name = pools_name(candidate.pools)
    if candidate.split:
        return name
    routed = " routed by projected time" if candidate.routing == "projected" else ""
    return f"{name} with chunks of {candidate.chunk_tokens:,}{routed}"


def stronger(split: Finding, unsplit: Finding) -> Finding:
    """Whichever holds clearly more; the unsplit one, which is simpler, where neither does."""
    if split.best.rate_rps > unsplit.best.rate_rps * CLEARLY:
        return split
    return unsplit


def decide(case: Case) -> Verdict:
    """The verdict. At the load: whoever holds it wins, the unsplit one where both do. By
    capacity: whoever holds clearly more.
    """
    split, unsplit = case.split, case.unsplit
    load_split, load_unsplit = case.at_load
    holds_split = load_split is not None and load_split.holds(case.attainment)
    holds_unsplit = load_unsplit.holds(case.attainment)
    if not holds_split and not holds_unsplit:
        return Verdict(word="cannot meet", because=_cannot(case))
    forbids = forbidding(case.rules)
    if split is None or forbids is not None:
        because = "no split of these GPUs is possible" if forbids is None else forbids.because
        return Verdict(
            word="do not split",
            because=_sentences(f"{_upper(because)}.", _held_words(case, unsplit)),
        )
    best = stronger(split, unsplit)
    if case.judge == "capacity":
        word: Word = "split" if best is split else "do not split"
    elif holds_unsplit:
        word = "do not split"
    else:
        word = "split"
    return Verdict(word=word, because=_compared(case, split, word))


def _compared(case: Case, split: Finding, word: Word) -> str:
    unsplit = case.unsplit
    at_split, at_unsplit = case.at_load
    assert at_split is not None, "a split was tried and not run at the load"
    parts = [
        f"At {_load(case, at_unsplit)} the best unsplit set-up, {setup_words(unsplit)}, meets the "
        f"goal for {percent(at_unsplit.attainment)} of requests and the best split, "
        f"{setup_words(split)}, for {percent(at_split.attainment)}"
        + (f" ({_broke(at_unsplit)})" if not at_unsplit.holds(case.attainment) else "")
        + "."
    ]
    parts.append(
        f"Held at most: {_capacity(unsplit)} unsplit, {_capacity(split)} split{_wins(case, split)}."
    )
    best = stronger(split, unsplit)
    loser = unsplit if best is split else split
    if case.pushed is not None:
        parts.append(_pushed(case, best, loser, case.pushed))
    if case.judge == "load" and word == "do not split" and best is split:
        more = unsplit.best.scale
        parts.append(
            f"Splitting would pay from {plain(more)}x the trace's rate on, where unsplit ends."
        )
    parts.append(_slots(at_split if word == "split" else at_unsplit))
    parts.append(_short(best))
    return _sentences(*parts)


def _load(case: Case, at: Probe) -> str:
    return f"{plain(case.load)}x the trace's rate ({figure(at.offered_rps)} req/s)"


def _capacity(finding: Finding) -> str:
    """The highest rate, per GPU, with its interval."""
    if finding.best.held is None:
        return "no rate"
    each = finding.best.rate_rps / finding.gpus
    words = f"{figure(each)} req/s per GPU"
    if finding.interval is not None:
        low, high = (rate / finding.gpus for rate in finding.interval)
        words += f" ({figure(low)} to {figure(high)} over resamples)"
    return words


def _wins(case: Case, split: Finding) -> str:
    pairs = list(zip(split.resampled, case.unsplit.resampled, strict=False))
    if not pairs:
        return ""
    wins = sum(a > b for a, b in pairs)
    return f"; the split holds more on {wins} of {count(len(pairs), 'resample')}"


def _pushed(case: Case, best: Finding, loser: Finding, pushed: Probe) -> str:
    """What goes wrong first for the weaker one where the stronger still holds."""
    words = (
        f"At {figure(pushed.offered_rps)} req/s, which {setup_words(best)} holds, "
        f"{setup_words(loser)} has {percent(pushed.attainment)}: {_broke(pushed)}"
    )
    at = percent(case.attainment)
    if pushed.tpot_share <= pushed.ttft_share:
        words += f"; its TPOT is {_ms(pushed.tpot_ms)} at {at}, goal {_ms(case.slo.tpot_ms)}"
        if not loser.candidate.split:
            words += ", as prompts are read between its decode steps"
    else:
        words += f"; its TTFT is {_ms(pushed.ttft_ms)} at {at}, goal {_ms(case.slo.ttft_ms)}"
        if pushed.phases_ms:
            name = max(pushed.phases_ms, key=lambda phase: (pushed.phases_ms[phase], phase))
            share = pushed.phases_ms[name] / sum(pushed.phases_ms.values())
            words += f", {percent(share)} of the mean in {name.replace('_', ' ')}"
    return words + "."


def _broke(probe: Probe) -> str:
    """Which goal broke first."""
    first, share, other, rest = ("TTFT", probe.ttft_share, "TPOT", probe.tpot_share)
    if probe.tpot_share <= probe.ttft_share:
        first, share, other, rest = other, rest, first, share
    return f"{first} broke first, met by {percent(share)} against {percent(rest)} for {other}"


def _ms(value: float) -> str:
    if math.isinf(value) or math.isnan(value):
        return "never reached" if math.isinf(value) else "not known"
    return f"{figure(value)} ms"


def _slots(probe: Probe) -> str:
    """The 80 % rule on the slots held at peak."""
    if not probe.slots:
        return ""
    share = probe.slots_peak / probe.slots
    rule = "over" if share > MOST_SLOTS_USED else "within"
    return (
        f"At peak {probe.slots_peak:,} of {probe.slots:,} decode slots are held, {percent(share)}, "
        f"{rule} the {percent(MOST_SLOTS_USED)} rule."
    )


def _held_words(case: Case, finding: Finding) -> str:
    at = case.at_load[1]
    return (
        f"{setup_words(finding)} meets the goal for {percent(at.attainment)} of requests at "
        f"{_load(case, at)}, and holds {_capacity(finding)} at most."
    )


def _cannot(case: Case) -> str:
    """By how much it is missed, and what would be enough."""
    at_split, at_unsplit = case.at_load
    tried = [(at_unsplit, case.unsplit)]
    if at_split is not None and case.split is not None:
        tried.append((at_split, case.split))
    at, best = max(tried, key=lambda pair: (pair[0].attainment, pair[1].best.rate_rps))
    words = (
        f"At {_load(case, at)} the best set-up, {setup_words(best)}, meets the goal for "
        f"{percent(at.attainment)} of requests, {percent(case.attainment)} are wanted: "
        f"{_broke(at)}."
    )
    most = max((finding for _, finding in tried), key=lambda f: f.best.scale)
    if most.best.held is None:
        return _sentences(
            words, "No rate is low enough for the goal: it is too tight for these GPUs."
        )
    need = math.ceil(most.gpus * case.load / most.best.scale)
    return _sentences(
        words,
        f"{setup_words(most)} holds {plain(most.best.scale)}x "
        f"({figure(most.best.rate_rps)} req/s); at that rate per GPU, about {need} GPUs are "
        "needed.",
    )


def _short(best: Finding) -> str:
    """A warning where the trace is over before a steady state is reached."""
    held = best.best.held
    if held is None or not held.too_short:
        return ""
    return (
        f"The trace is short: at the highest rate held its arrivals take {figure(held.arrivals_s)} "
        f"s, an answer {figure(held.e2e_s)} s, so that queues hardly build and these rates are "
        "too high."
    )


def _sentences(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
