"""The set-ups that a budget of accelerators allows: the space that a plan searches.

DistServe's placement search, enumerated: every degree of tensor and of pipeline parallelism that
is known or asked for, for each phase by itself, at every ratio of prefill to decode workers; and
the same accelerators unsplit, at every chunk size and by either of two ways to spread requests
over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from twofold.plan.hardware import Hardware, Machine
from twofold.plan.runner import SetupError
from twofold.plan.scenario import Scenario
from twofold.sim.pools import Pool, Role

Equal = Literal["gpus", "cost", "power"]
CHUNKS: Final = (256, 512, 1024, 2048, 4096, 8192)
"""Chunk sizes that unsplit set-ups are tried with, where the engine and the profile allow."""
ROUTINGS: Final = ("always", "projected")
"""Split policies that unsplit set-ups of several workers are tried with: with nothing to split they
say to which worker a request goes, the one with the fewest tokens or that with the least projected
time. Neither is the better one on every trace."""
MOST_RATIOS: Final = 7
"""Ratios of a pair of machines that are tried before the search closes in on the best of them."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One set-up. `family` is the same for set-ups that differ in their ratio alone, `place` is
    its place among them. `routing` is the split policy, "" for what the scenario has.
    """

    pools: tuple[Pool, ...]
    hardware: tuple[Hardware, ...]
    chunk_tokens: int
    family: int
    place: int
    routing: str = ""

    @property
    def split(self) -> bool:
        """Whether prefill has workers of its own."""
        return self.pools[0].role == "prefill"

    def scenario(self, like: Scenario) -> Scenario:
        """`like` on this set-up."""
        engine = msgspec.structs.replace(like.engine, chunk_tokens=self.chunk_tokens)
        policies = dict(like.policies)
        if self.routing:
            policies["split"] = self.routing
        return msgspec.structs.replace(
            like,
            pools=self.pools,
            hardware=self.hardware,
            engine=engine,
            policies=tuple(sorted(policies.items())),
        )


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """All candidates, and the space in words."""

    splits: tuple[Candidate, ...]
    unsplit: tuple[Candidate, ...]
    words: str


def weight(machine: Machine, equal: Equal) -> float:
    """What one worker takes of the budget. Raises SetupError where that is not known."""
    if equal == "gpus":
        return float(machine.gpus)
    found = machine.usd_per_hour if equal == "cost" else machine.power_w
    if not found:
        what = "--usd-per-hour gives a price" if equal == "cost" else "--equal gpus needs none"
        raise SetupError(
            f"--equal {equal}: the {'price' if equal == 'cost' else 'power'} of "
            f"{machine.short_name} is not known; {what}"
        )
    return found


def enumerate_space(
    machines: Sequence[Machine],
    gpus: int,
    *,
    equal: Equal = "gpus",
    chunks: Sequence[int] = CHUNKS,
    split_chunk: int = max(CHUNKS),
    routings: Sequence[str] = ROUTINGS,
) -> Space:
    """Every split and unsplit set-up of `machines` that uses what `gpus` of the first are worth.

    `routings` are the split policies to try unsplit.
    Raises SetupError where not even one worker fits.
    """
    weights = [weight(machine, equal) for machine in machines]
    budget = gpus * weights[0] / machines[0].gpus * (1 + 1e-9)
    splits: list[Candidate] = []
    family = 0
    for i, prefill in enumerate(machines):
        for j, decode in enumerate(machines):
            ratios = _ratios(budget, weights[i], weights[j])
            splits += [
                _split(machines, prefill, decode, ratio, split_chunk, family, place)
                for place, ratio in enumerate(ratios)
            ]
            family += 1
    unsplit: list[Candidate] = []
    for i, machine in enumerate(machines):
        n = int(budget / weights[i])
        # One worker alone leaves nothing to route.
        for routing in routings if n > 1 else routings[:n]:
            unsplit += [
                _unsplit(machines, machine, n, chunk, routing, family, place)
                for place, chunk in enumerate(chunks)
            ]
            family += 1
    if not unsplit:
        most = min(machine.gpus for machine in machines)
        raise SetupError(f"--gpus {gpus}: fewer than one worker takes ({most})")
    pps = {machine.pp for machine in machines}
    words = (
        f"{len(splits)} splits of {gpus} GPUs (tensor parallelism "
        f"{_each({m.tp for m in machines})} for each phase, "
        f"{'no pipeline parallelism' if pps == {1} else f'pipeline parallelism {_each(pps)}'}"
        f") and {len(unsplit)} unsplit set-ups (chunks of "
        f"{', '.join(str(chunk) for chunk in chunks)} tokens"
        f"{', two ways to route' if len(routings) > 1 else ''})"
    )
    return Space(splits=tuple(splits), unsplit=tuple(unsplit), words=words)


def _each(degrees: set[int]) -> str:
    return ", ".join(str(degree) for degree in sorted(degrees))


def _ratios(budget: float, prefill: float, decode: float) -> list[tuple[int, int]]:
    """(prefill, decode) workers, as many as the budget takes."""
    found: list[tuple[int, int]] = []
    for n in range(1, int(budget / prefill) + 1):
        left = budget - n * prefill
        m = int(left / decode)
        # With room for one more prefill worker beside as many of decode, this one wastes it.
        if m >= 1 and left - m * decode < prefill:
            found.append((n, m))
    return found


def _pool(machines: Sequence[Machine], machine: Machine, role: Role, count: int) -> Pool:
    """A pool that names what it runs on where that is not the same for all."""
    many_kinds = len({m.short_name for m in machines}) > 1
    many_tps = len({m.tp for m in machines}) > 1
    many_pps = len({m.pp for m in machines}) > 1
    return Pool(
        role=role,
        count=count,
        accelerator=machine.short_name if many_kinds else "",
        tp=machine.tp if many_tps else 0,
        pp=machine.pp if many_pps else 0,
    )


def _split(
    machines: Sequence[Machine],
    prefill: Machine,
    decode: Machine,
    ratio: tuple[int, int],
    chunk: int,
    family: int,
    place: int,
) -> Candidate:
    return Candidate(
        pools=(
            _pool(machines, prefill, "prefill", ratio[0]),
            _pool(machines, decode, "decode", ratio[1]),
        ),
        hardware=(prefill.hardware, decode.hardware),
        chunk_tokens=chunk,
        family=family,
        place=place,
    )


def _unsplit(
    machines: Sequence[Machine],
    machine: Machine,
    n: int,
    chunk: int,
    routing: str,
    family: int,
    place: int,
) -> Candidate:
    return Candidate(
        pools=(_pool(machines, machine, "mixed", n),),
        hardware=(machine.hardware,),
        chunk_tokens=chunk,
        routing=routing,
        family=family,
        place=place,
    )


def first_of(family: Sequence[Candidate], most: int = MOST_RATIOS) -> list[Candidate]:
    """At most `most` of a family, evenly spaced, both ends among them."""
    if len(family) <= most:
        return list(family)
    places = [round(i * (len(family) - 1) / (most - 1)) for i in range(most)]
    return [family[place] for place in places]


def between(family: Sequence[Candidate], tried: Sequence[int], best: int) -> list[Candidate]:
    """Those halfway between the best place and the nearest ones tried, on both sides."""
    lower = max((place for place in tried if place < best), default=best)
    upper = min((place for place in tried if place > best), default=best)
    places = sorted({(lower + best) // 2, (best + upper + 1) // 2} - set(tried))
    return [family[place] for place in places]
