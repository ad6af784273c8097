"""Every order of events in the small: breadth-first over the real cores, with states told apart.

`python -m twofold.sim.explore --mode all --faults 2` goes through all that can happen to two
requests over one prefill and one decode worker with at most two faults, and says how many
distinct states there are, whether an invariant breaks in any, and whether there is one from which
the requests cannot end any more. Exit status 0: neither, 1: one of them, 2: bad usage.
"""

from __future__ import annotations

import argparse
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from twofold.sim.explore_model import Model
from twofold.sim.explore_moves import at_end, moves
from twofold.sim.explore_world import World

PROMPTS: Final = ((1, 2, 3), (1, 2, 4, 5, 6))
"""Of two and three blocks of two tokens, of which one and two are handed over; one is shared."""

_REPORT_EVERY: Final = 50_000
_NOBODY: Final = 0xFFFFFFFF


class Found(msgspec.Struct, kw_only=True):
    """What a search came to. `path` leads, in words, to what is wrong, if anything is.

    `complete` is False when there were more states than allowed. `n_stuck` of the states are
    such that the requests cannot end from there.
    """

    n_states: int = 0
    n_steps: int = 0
    n_ends: int = 0
    n_stuck: int = 0
    n_cores: int = 0
    violation: str = ""
    path: tuple[str, ...] = ()
    complete: bool = True

    @property
    def is_clean(self) -> bool:
        """Whether all was seen and nothing is wrong."""
        return self.complete and not self.violation and not self.n_stuck


class _Search:
    """States by number, in the order in which they were found, and the steps between them.

    Of a state only a hash of 64 bits is kept, so that many millions fit into memory: that two of
    ten million have the same one has a chance of 1 in 400,000.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.parents = array("I")
        self.ends = bytearray()
        self.froms, self.tos = array("I"), array("I")
        self._numbers: dict[int, int] = {}

    def add(self, world: World, parent: int) -> bool:
        """Note a step from `parent` to `world`; True when it is new."""
        key = hash(world)
        number = self._numbers.get(key)
        is_new = number is None
        if number is None:
            number = self._numbers[key] = len(self.parents)
            self.parents.append(parent)
            self.ends.append(at_end(self.model, world))
        if parent != _NOBODY:
            self.froms.append(parent)
            self.tos.append(number)
        return is_new

    def stuck(self) -> list[int]:
        """States from which no end can be reached, by going back from all ends."""
        n = len(self.parents)
        sources, targets = np.frombuffer(self.froms, np.uint32), np.frombuffer(self.tos, np.uint32)
        order = np.argsort(targets, kind="stable")
        first = np.searchsorted(targets[order], np.arange(n + 1))
        sources = sources[order]
        can = bytearray(self.ends)
        front = [number for number in range(n) if can[number]]
        while front:
            number = front.pop()
            for source in sources[first[number] : first[number + 1]].tolist():
                if not can[source]:
                    can[source] = 1
                    front.append(source)
        return [number for number in range(n) if not can[number]]

    def path(self, number: int, start: World) -> tuple[str, ...]:
        """What happens from `start` to state `number`, in words."""
        numbers: list[int] = []
        while self.parents[number] != _NOBODY:
            numbers.append(number)
            number = self.parents[number]
        world, words = start, []
        for number in reversed(numbers):
            for what, then in moves(self.model, world):
                if self._numbers[hash(then)] == number:
                    world = then
                    words.append(what)
                    break
        return tuple(words)


def explore(
    model: Model,
    faults: int,
    most_states: int = _NOBODY - 1,
    progress: Callable[[int], None] = lambda n_states: None,
) -> Found:
    """Go through all states that can be reached from `model.start(faults)`."""
    search, start = _Search(model), model.start(faults)
    search.add(start, _NOBODY)
    front = deque([start])
    found = Found()
    at = 0
    while front and found.complete:
        world = front.popleft()
        try:
            front.extend([then for _, then in moves(model, world) if search.add(then, at)])
        except AssertionError as error:
            found.violation = str(error)
            found.path = search.path(at, start)
            break
        at += 1
        found.complete = len(search.parents) <= most_states
        if at % _REPORT_EVERY == 0:
            progress(len(search.parents))
    found.n_states, found.n_steps = len(search.parents), len(search.tos)
    found.n_ends, found.n_cores = sum(search.ends), len(model.workers) + len(model.routers)
    if found.complete and not found.violation:
        stuck = search.stuck()
        found.n_stuck = len(stuck)
        if stuck:
            found.path = search.path(stuck[0], start)
    return found


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m twofold.sim.explore", description="Go through every order of events."
    )
    modes = ("pull", "push", "layerwise")
    parser.add_argument("--mode", choices=[*modes, "all"], default="all")
    parser.add_argument("--faults", type=int, choices=range(4), default=2, help="at most so many")
    parser.add_argument("--requests", type=int, choices=(1, 2), default=2)
    parser.add_argument("--max-tokens", type=int, choices=(1, 2, 3), default=1, help="of an answer")
    parser.add_argument("--blocks", type=int, default=6, help="KV blocks of a worker, 3 or more")
    parser.add_argument("--caching", action="store_true", help="with prefix caches")
    parser.add_argument(
        "--instant-legs", action="store_true", help="the gateway's legs take no time: fewer states"
    )
    parser.add_argument("--most-states", type=int, default=20_000_000, help="give up after these")
    asked = parser.parse_args(words)
    asked.modes = modes if asked.mode == "all" else (asked.mode,)
    if asked.blocks < 3:
        parser.error(f"--blocks {asked.blocks}: no prompt fits; 3 or more are right")
    return asked


def main(words: Sequence[str] | None = None) -> int:
    """Run the search as the command line says; returns the exit status."""
    asked = _arguments(words)
    clean = True
    for mode in asked.modes:
        model = Model(
            mode,
            PROMPTS[: asked.requests],
            max_tokens=asked.max_tokens,
            n_blocks=asked.blocks,
            caching=asked.caching,
            instant_legs=asked.instant_legs,
        )
        began = time.monotonic()

        def told(n_states: int, mode: str = mode) -> None:
            print(f"{mode}: {n_states:,} states so far", file=sys.stderr, flush=True)

        found = explore(model, asked.faults, asked.most_states, told)
        clean = clean and found.is_clean
        for step in found.path:
            print(f"  {step}")
        print(
            f"{mode}: {found.n_states:,} distinct states, {found.n_steps:,} steps, "
            f"{found.n_ends:,} ends, {found.n_cores:,} states of cores, "
            f"{found.n_stuck:,} states without a way to the end, "
            f"{found.violation or 'no violation'}{'' if found.complete else ', NOT COMPLETE'}, "
            f"{time.monotonic() - began:.1f} s",
            flush=True,
        )
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
