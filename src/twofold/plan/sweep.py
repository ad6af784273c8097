"""Many scenarios from values that are given more than once: every combination of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec

from twofold.plan.bisect import neat
from twofold.plan.hardware import Hardware, Machine, read_machine
from twofold.plan.runner import SetupError
from twofold.plan.scenario import Scenario
from twofold.sim.pools import Pool, pools_name

MOST_RUNS = 100_000


class Axes(msgspec.Struct, frozen=True, kw_only=True):
    """What is swept; each has one value or more. 0 has `Engine`'s and `Scenario`'s meaning."""

    pools: tuple[tuple[Pool, ...], ...]
    rate_scales: tuple[float, ...] = (1.0,)
    chunks: tuple[int, ...] = (2048,)
    handoffs: tuple[str, ...] = ("pull",)
    policies: tuple[tuple[tuple[str, str], ...], ...] = ((),)
    block_sizes: tuple[int, ...] = (16,)
    kv_blocks: tuple[int, ...] = (0,)
    max_num_seqs: tuple[int, ...] = (256,)
    links: tuple[int, ...] = (0,)


def rates(text: str) -> tuple[float, ...]:
    """Rate scales from "2" or "A:B:STEP", both ends included where the steps meet them.

    Raises ValueError, in words that follow the flag's name.
    """
    parts = text.split(":")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    right = all(math.isfinite(number) and 0 < number <= 1e6 for number in numbers)
    if not right or len(numbers) not in (1, 3):
        raise ValueError("a number above 0, or A:B:STEP such as 0.5:4:0.5, is right")
    if len(numbers) == 1:
        return (numbers[0],)
    low, high, step = numbers
    n = math.floor((high - low) / step + 1e-9) + 1 if high >= low else 0
    if not 1 <= n <= 1000:
        raise ValueError("A is below B, and there are at most 1,000 steps between them")
    return tuple(float(f"{low + i * step:.10g}") for i in range(n))


def combinations(like: Scenario, axes: Axes, machines: Sequence[Machine]) -> list[Scenario]:
    """Every combination, rates last, so that runs of one set-up follow one another.

    Raises SetupError where a pool runs on none of `machines`, or there are too many runs.
    """
    placed = [setup for pools in axes.pools for setup in place(pools, machines)]
    rest = (
        axes.handoffs,
        axes.policies,
        axes.chunks,
        axes.block_sizes,
        axes.kv_blocks,
        axes.max_num_seqs,
        axes.links,
        axes.rate_scales,
    )
    n = len(placed) * math.prod(len(values) for values in rest)
    if n > MOST_RUNS:
        raise SetupError(f"{n:,} runs; at most {MOST_RUNS:,} make one sweep")
    return [
        msgspec.structs.replace(
            like,
            pools=pools,
            hardware=hardware,
            rate_scale=neat(rate),
            policies=policies,
            link_bytes_per_s=link,
            engine=msgspec.structs.replace(
                like.engine,
                handoff=handoff,
                chunk_tokens=chunk,
                block_size=block,
                kv_blocks=blocks,
                max_num_seqs=seqs,
            ),
        )
        for (pools, hardware), handoff, policies, chunk, block, blocks, seqs, link, rate in (
            itertools.product(placed, *rest)
        )
    ]


def place(
    pools: tuple[Pool, ...], machines: Sequence[Machine]
) -> list[tuple[tuple[Pool, ...], tuple[Hardware, ...]]]:
    """`pools` with what each runs on: once, or once for each machine that an open pool may take.

    Raises SetupError where a pool names what there is none of, or several of.
    """
    closed = [_named(pool, machines) for pool in pools]
    if None not in closed:
        return [(pools, tuple(machine.hardware for machine in closed if machine is not None))]
    found = []
    for default in machines:
        chosen = [machine or default for machine in closed]
        named = tuple(
            pool if closed[i] is not None else _spelled(pool, default, machines)
            for i, pool in enumerate(pools)
        )
        found.append((named, tuple(machine.hardware for machine in chosen)))
    return found


def _named(pool: Pool, machines: Sequence[Machine]) -> Machine | None:
    """The machine that `pool` names; None where it names none."""
    if not pool.says_what:
        return None
    near = [
        machine
        for machine in machines
        if pool.accelerator in ("", *machine.names) and pool.tp in (0, machine.tp)
    ]
    fit = [machine for machine in near if pool.pp in (0, machine.pp)]
    if len(fit) == 1:
        return fit[0]
    if len({(machine.sha256, machine.tp) for machine in near}) == 1 and not fit:
        return read_machine(msgspec.structs.replace(near[0].hardware, pp=pool.pp))
    if not near and machines and not machines[0].hardware.profile:
        first = machines[0].hardware
        return read_machine(
            msgspec.structs.replace(
                first,
                accelerator=pool.accelerator or first.accelerator,
                tp=pool.tp or first.tp,
                pp=pool.pp or first.pp,
            )
        )
    there = ", ".join(f"{machine.short_name}:{machine.degree}" for machine in machines)
    problem = "fits several profiles" if fit else "fits no profile"
    raise SetupError(f"--pools {pools_name([pool])}: {problem}; there are {there}")


def _spelled(pool: Pool, machine: Machine, machines: Sequence[Machine]) -> Pool:
    """`pool` with as much of what it runs on as tells it from the others."""
    kinds = {other.short_name for other in machines}
    tps, pps = {other.tp for other in machines}, {other.pp for other in machines}
    return msgspec.structs.replace(
        pool,
        accelerator=machine.short_name if len(kinds) > 1 else "",
        tp=machine.tp if len(tps) > 1 else 0,
        pp=machine.pp if len(pps) > 1 else 0,
    )
