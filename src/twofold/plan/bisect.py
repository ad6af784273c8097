"""The highest rate that still meets the goal, found by bisection over the rate scale.

Each search is a generator: it yields the rate scale to try next and is sent the outcome. So many
run at once on whatever executes them, and what each does depends on its own outcomes alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

import msgspec

from twofold.plan.execute import Executor
from twofold.plan.runner import Probe, Problem
from twofold.plan.scenario import Scenario

Outcome = Probe | Problem
LOWEST: Final = 2.0**-12
HIGHEST: Final = 2.0**20
"""Rate scales beyond which no search goes: a goal that is missed below is missed at any rate."""
_MOST_STEP: Final = 4.0


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found: the highest run that met the goal, and the lowest above it that did not.

    `problem` is what stopped runs above `held` (or all of them), "" when nothing did.
    """

    held: Probe | None
    broke: Probe | None
    problem: str = ""
    runs: int = 0

    @property
    def rate_rps(self) -> float:
        """Requests per second that were held; 0 when no rate was."""
        return self.held.offered_rps if self.held is not None else 0.0

    @property
    def scale(self) -> float:
        """The rate scale that was held; 0 when none was."""
        return self.held.rate_scale if self.held is not None else 0.0


Search = Generator[float, Outcome, Held]


def highest(attainment: float, *, start: float, step: float = 2.0, within: float = 1.02) -> Search:
    """Brackets the highest rate scale that holds, from `start` on by growing steps, and halves the
    bracket (in ratio) until its ends are a factor of `within` apart.

    Attainment need not fall evenly with the rate; what is found is one rate that holds with one
    a little higher that does not.
    """
    low: Probe | None = None
    high: Probe | None = None
    low_scale, high_scale, problem, runs = 0.0, math.inf, "", 0
    scale = neat(start)
    while True:
        outcome = yield scale
        runs += 1
        if isinstance(outcome, Probe) and outcome.holds(attainment):
            low, low_scale = outcome, scale
        elif isinstance(outcome, Probe):
            high, high_scale = outcome, scale
        else:
            problem, high, high_scale = outcome.reason, None, scale
        if math.isinf(high_scale):
            scale, step = neat(low_scale * step), min(step * step, _MOST_STEP)
            if scale > HIGHEST:
                break
        elif not low_scale:
            scale, step = neat(high_scale / step), min(step * step, _MOST_STEP)
            if scale < LOWEST:
                break
        else:
            scale = neat(math.sqrt(low_scale * high_scale))
            if high_scale <= low_scale * within or not low_scale < scale < high_scale:
                break
    return Held(held=low, broke=high, problem=problem, runs=runs)


def neat(scale: float) -> float:
    """`scale` to four digits: a rate that can be typed in again."""
    return float(f"{scale:.4g}")


def drive(
    searches: Sequence[Search],
    scenarios: Sequence[Scenario],
    executor: Executor[Scenario, Outcome],
    tick: Callable[[], Any] = lambda: None,
) -> list[Held]:
    """What each search finds with the scenario of its place; `tick` is called after every run."""
    found: list[Held | None] = [None] * len(searches)

    def give(number: int, scale: float) -> None:
        scenario = msgspec.structs.replace(scenarios[number], rate_scale=scale)
        executor.submit(number, scenario)

    for number, search in enumerate(searches):
        give(number, next(search))
    while any(held is None for held in found):
        number, outcome = executor.take()
        tick()
        try:
            give(number, searches[number].send(outcome))
        except StopIteration as ended:
            found[number] = ended.value
    return [held for held in found if held is not None]
