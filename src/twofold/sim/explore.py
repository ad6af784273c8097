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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from twofold.sim.explore_model import Model
from twofold.sim.explore_moves import Next, at_end, fault_moves, free_moves, moves
from twofold.sim.explore_reduce import Reduction
from twofold.sim.explore_world import World

PROMPTS: Final = ((1, 2, 3), (1, 2, 4, 5, 6))
"""Of two and three blocks of two tokens, of which one and two are handed over; one is shared."""

_REPORT_EVERY: Final = 50_000
_NOBODY: Final = 0xFFFFFFFF


class Found(msgspec.Struct, kw_only=True):
    """What a search came to. `path` leads, in words, to what is wrong, if anything is.

    `n_by_faults` are the states by how many faults it takes to come there, `n_steps` the events
    that were tried, `ends` the states in which all is over, each as a hash. `complete` is False
    when there were more states than allowed. From `n_stuck` of the states the requests cannot end
    any more, even if no further fault happens.
    """

    n_states: int = 0
    n_by_faults: tuple[int, ...] = ()
    n_steps: int = 0
    ends: frozenset[int] = frozenset()
    n_stuck: int = 0
    n_cores: int = 0
    violation: str = ""
    path: tuple[str, ...] = ()
    complete: bool = True

    @property
    def is_clean(self) -> bool:
        """Whether all was seen and nothing is wrong."""
        return self.complete and not self.violation and not self.n_stuck


class _TooMany(Exception):
    """More states than allowed."""


class _Search:
    """States by number, in the order in which they were found, and steps between them.

    Those that take fewer faults are gone through first, and a state that was met already is
    left: what can follow with fewer faults left can follow with more. So how many are left is
    no part of a state.

    Of a state only a hash of 64 bits is kept, so that many millions fit into memory: that two of
    twenty million have the same one has a chance of 1 in 90,000. Of the steps those that are no
    faults are kept.
    """

    def __init__(
        self, model: Model, most_states: int, progress: Callable[[int], None], *, reduced: bool
    ) -> None:
        self.n_steps = 0
        self.n_by_faults: list[int] = []
        self.at = 0  # the state whose steps are being taken
        self.ends: dict[int, int] = {}  # hashes by number
        self._model = model
        self._reduction = Reduction(model) if reduced else None
        self._most_states = most_states
        self._progress = progress
        self._parents = array("I")
        self._froms, self._tos = array("I"), array("I")
        self._numbers: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._parents)

    def run(self, start: World) -> None:
        """Go through all that can come of `start`. AssertionError: what is wrong at `at`."""
        self.at = _NOBODY
        self._meet(start)
        layer = [start]
        for left in range(start.faults, 0, -1):
            worlds = list(self._follow(layer))
            self.n_by_faults.append(len(self) - sum(self.n_by_faults))
            following = (then for world in worlds for then in self._faults(world))
            if left > 1:
                layer = list(following)
            else:
                for then in following:
                    for _ in self._follow([then]):
                        pass
                layer = []
        for _ in self._follow(layer):
            pass
        self.n_by_faults.append(len(self) - sum(self.n_by_faults))

    def _follow(self, worlds: Sequence[World]) -> Iterator[World]:
        """These and all that comes of them without another fault."""
        front = deque(worlds)
        while front:
            world = front.popleft()
            self.at = self._numbers[world.key()]
            if at_end(self._model, world):
                self.ends[self.at] = world.key()
            for _, then in self._chosen(world, free_moves):
                if then.faults == world.faults:
                    number, is_new = self._meet(then)
                    self._froms.append(self.at)
                    self._tos.append(number)
                    if is_new:
                        front.append(then)
            yield world

    def _faults(self, world: World) -> Iterator[World]:
        """What is new after one fault."""
        at = self._numbers[world.key()]
        self.at = at
        for _, then in self._chosen(world, fault_moves):
            if then.faults < world.faults and self._meet(then)[1]:
                yield then
                self.at = at

    def _chosen(self, world: World, moves: Callable[..., Iterable[Next]]) -> Iterable[Next]:
        chosen = None if self._reduction is None else self._reduction.of(world)
        return moves(self._model, world) if chosen is None else chosen

    def _meet(self, world: World) -> tuple[int, bool]:
        """The number of what a step from `at` leads to, and whether it is new."""
        self.n_steps += 1
        key, new = world.key(), len(self._parents)
        number = self._numbers.setdefault(key, new)
        if number != new:
            return number, False
        if new >= self._most_states:
            raise _TooMany
        self._parents.append(self.at)
        if new % _REPORT_EVERY == 0 and new:
            self._progress(new)
        return number, True

    def stuck(self) -> list[int]:
        """States from which no end can be reached, by going back from all ends."""
        n = len(self)
        sources = np.frombuffer(self._froms, np.uint32)
        targets = np.frombuffer(self._tos, np.uint32)
        order = np.argsort(targets, kind="stable")
        first = np.searchsorted(targets[order], np.arange(n + 1))
        sources = sources[order]
        can = bytearray(n)
        front = list(self.ends)
        for number in front:
            can[number] = 1
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
        while self._parents[number] != _NOBODY:
            numbers.append(number)
            number = self._parents[number]
        world, words = start, []
        for number in reversed(numbers):
            for what, then in moves(self._model, world):
                if self._numbers.get(then.key()) == number:
                    world = then
                    words.append(what)
                    break
        return tuple(words)


def explore(
    model: Model,
    faults: int,
    most_states: int = _NOBODY - 1,
    progress: Callable[[int], None] = lambda n_states: None,
    *,
    reduced: bool = True,
) -> Found:
    """Go through all states that can be reached from `model.start(faults)`.

    With `reduced` orders of events that lead to the same are left out (`explore_reduce`).
    """
    reduced = reduced and not model.instant_legs
    search, start = _Search(model, most_states, progress, reduced=reduced), model.start(faults)
    found = Found()
    try:
        search.run(start)
    except AssertionError as error:
        found.violation = str(error)
        found.path = search.path(search.at, start)
    except _TooMany:
        found.complete = False
    found.n_states, found.n_steps = len(search), search.n_steps - 1
    found.n_by_faults = tuple(search.n_by_faults)
    found.ends = frozenset(search.ends.values())
    found.n_cores = len(model.workers) + len(model.routers)
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
    parser.add_argument("--most-states", type=int, default=50_000_000, help="give up after these")
    parser.add_argument("--full", action="store_true", help="also orders that lead to the same")
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

        found = explore(model, asked.faults, asked.most_states, told, reduced=not asked.full)
        clean = clean and found.is_clean
        for step in found.path:
            print(f"  {step}")
        print(
            f"{mode}: {found.n_states:,} distinct states, {found.n_steps:,} steps, "
            f"{len(found.ends):,} ends, {found.n_cores:,} states of cores, "
            f"{found.n_stuck:,} states without a way to the end, "
            f"{found.violation or 'no violation'}{'' if found.complete else ', NOT COMPLETE'}, "
            f"{time.monotonic() - began:.1f} s",
            flush=True,
        )
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
