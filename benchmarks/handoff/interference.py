"""What handoffs do to decode: CPU time on its event loop, and time of its steps.

The prefill side replays KV that it holds and computes nothing, so that on a machine of few cores
only the handoff is measured. Compared are

    idle     nothing arrives
    local    requests of the same length arrive, answered from decode's own prefix cache
    handoff  the same, with KV handed over

The difference of the last two is the handoff's own: both take in a request over HTTP and add one
row to one step.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.handoff.conditions import BLOCK_SIZE, Config, Progress, configs
from benchmarks.handoff.live import random_ids
from benchmarks.handoff.pairs import Pairs, Probe
from twofold.types import NS_PER_S

Ask = Callable[[], Coroutine[Any, Any, None]]

# The way there and back again. A step grows by the same with each token that its rows have
# written, so over windows of as many tokens that cancels out; over windows of time it would not.
WINDOWS: Final = ("idle", "local", "handoff", "handoff", "local", "idle")


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured."""

    loop_tokens: tuple[int, ...]
    loop_handoffs: int
    loop_rounds: int
    probe_streams: int
    probe_prompt: int
    handoff_tokens: int
    rate: int
    window_tokens: int
    gap_tokens: int
    cycles: int
    rounds: int


FULL = Sizes(
    loop_tokens=(257, 1025, 4097),
    loop_handoffs=10,
    loop_rounds=2,
    probe_streams=8,
    # As long as what arrives: else the one row would be padding for all the others, or they for it.
    probe_prompt=1024,
    handoff_tokens=1025,
    rate=8,
    window_tokens=32,
    gap_tokens=8,
    cycles=6,
    rounds=5,
)
QUICK = msgspec.structs.replace(
    FULL, loop_tokens=(257, 1025), loop_handoffs=4, loop_rounds=1, cycles=1, rounds=1
)
KV_BLOCKS: Final = 3072
_PROBE_OUTPUT: Final = 6000
_PROMPTS: Final = 6
"""As many as run at once, or more, and few enough to stay in decode's prefix cache."""


def measure(model: Path, sizes: Sizes, parts: list[str]) -> dict[str, Any]:
    """Results by part, "loop" and "interference", as asked for."""
    pairs = Pairs(model, configs(), kv_blocks=KV_BLOCKS)
    try:
        return asyncio.run(_measure(pairs, sizes, parts))
    finally:
        pairs.stop()


async def _measure(pairs: Pairs, sizes: Sizes, parts: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    if "loop" in parts:
        results["loop"] = await _loop(pairs, sizes)
    if "interference" in parts:
        results["interference"] = await _interference(pairs, sizes)
    return results


def _local(pairs: Pairs, config: Config, *prompts: list[int]) -> Ask:
    """Each of `prompts` in turn: KV that was handed over is not shared by requests either."""
    turns = itertools.cycle(prompts)
    return lambda: pairs.local(config, next(turns), cached=True)


def _handoff(pairs: Pairs, config: Config, n_tokens: int) -> Ask:
    return lambda: pairs.handoff(config, n_tokens)


# ------------------------------------------------------------------------------------------- loop


async def _cpu_us(pairs: Pairs, ask: Ask, times: int) -> tuple[float, float]:
    """CPU time per request on decode's event loop, and in all of its threads."""
    loop_ns, process_ns = pairs.decode_cpu_ns()
    for _ in range(times):
        await ask()
    loop_after_ns, process_after_ns = pairs.decode_cpu_ns()
    return (loop_after_ns - loop_ns) / times / 1e3, (process_after_ns - process_ns) / times / 1e3


async def _loop(pairs: Pairs, sizes: Sizes) -> dict[str, Any]:
    cases = [(config, n) for n in sizes.loop_tokens for config in pairs.configs]
    progress = Progress("loop", sizes.loop_rounds * len(cases))
    found: dict[tuple[Config, int], list[tuple[float, float, float, float]]] = {}
    for _ in range(sizes.loop_rounds):
        for config, n in cases:
            prompt = random_ids(pairs.rng, n)
            local, handoff = _local(pairs, config, prompt), _handoff(pairs, config, n)
            await pairs.local(config, prompt)  # from here on it is in decode's cache
            await handoff()
            without = await _cpu_us(pairs, local, sizes.loop_handoffs)
            having = await _cpu_us(pairs, handoff, sizes.loop_handoffs)
            found.setdefault((config, n), []).append((*without, *having))
            progress.step()
    progress.end()
    rows = [loop_row(config, n, sizes.rate, runs) for (config, n), runs in found.items()]
    return {"handoffs_per_run": sizes.loop_handoffs, "rate_per_s": sizes.rate, "rows": rows}


def loop_row(
    config: Config, n: int, rate: int, runs: list[tuple[float, float, float, float]]
) -> dict[str, Any]:
    """Medians over `runs` of (loop, process) CPU time of a local request and of a handoff."""
    local_us, local_all_us, handoff_us, handoff_all_us = (
        statistics.median(run[i] for run in runs) for i in range(4)
    )
    return {
        "handoff": config.handoff,
        "transport": config.transport,
        "tokens": n,
        "local_us": round(local_us),
        "handoff_us": round(handoff_us),
        "own_us": round(handoff_us - local_us),
        "own_us_all_threads": round(handoff_all_us - local_all_us),
        "loop_time_lost": round(handoff_us * rate / 1e6, 5),
    }


# ----------------------------------------------------------------------------------- interference


async def _arrivals(ask: Ask, rate: int, over: asyncio.Event) -> None:
    """Requests at even distances until `over`; returns when all have ended."""
    begin_ns = time.monotonic_ns()
    async with asyncio.TaskGroup() as group:
        for i in itertools.count():
            left_ns = begin_ns + i * NS_PER_S // rate - time.monotonic_ns()
            await asyncio.sleep(max(0, left_ns) / NS_PER_S)
            if over.is_set():
                return
            group.create_task(ask())


async def _window(probe: Probe, first: int, last: int, rate: int, ask: Ask | None) -> float:
    """Mean step time between two tokens of the probe, beside arrivals.

    Raises RuntimeError when the last is there before it began.
    """
    await probe.has(first)
    if len(probe.times_ns) > last:
        raise RuntimeError(f"tokens {first} to {last} were written before arrivals began")
    over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        if ask is not None:
            group.create_task(_arrivals(ask, rate, over))
        await probe.has(last)
        over.set()
    return probe.step_ms(first, last)


async def _cycle(
    probe: Probe, number: int, sizes: Sizes, asks: dict[str, Ask | None]
) -> dict[str, float]:
    """Mean step time of each kind of window, once there and back."""
    found: dict[str, list[float]] = {kind: [] for kind in asks}
    every = sizes.window_tokens + sizes.gap_tokens  # what is under way ends in the gap
    for place, kind in enumerate(WINDOWS, start=1):
        first = (number * len(WINDOWS) + place) * every
        step_ms = await _window(probe, first, first + sizes.window_tokens, sizes.rate, asks[kind])
        found[kind].append(step_ms)
    return {kind: statistics.fmean(steps) for kind, steps in found.items()}


async def _round(pairs: Pairs, config: Config, sizes: Sizes) -> list[dict[str, float]]:
    """Cycles over a fresh batch of probes."""
    prompts = [random_ids(pairs.rng, sizes.handoff_tokens) for _ in range(_PROMPTS)]
    for prompt in prompts:
        await pairs.local(config, prompt)  # from here on it is in decode's cache
    asks: dict[str, Ask | None] = {
        "idle": None,
        "local": _local(pairs, config, *prompts),
        "handoff": _handoff(pairs, config, sizes.handoff_tokens),
    }
    probe = Probe(pairs, config, sizes.probe_streams, sizes.probe_prompt, _PROBE_OUTPUT)
    await probe.start()
    found = [await _cycle(probe, number, sizes, asks) for number in range(sizes.cycles)]
    await probe.stop()
    return found


async def _warm(pairs: Pairs, sizes: Sizes) -> None:
    """Touch every page of every pool on both sides, so that all have been mapped, by whatever
    transport: a worker that has served for a minute has that behind it.
    """
    blocks = (sizes.handoff_tokens - 1) // BLOCK_SIZE
    for config in pairs.configs:
        for _ in range(KV_BLOCKS // blocks + 1):
            await pairs.handoff(config, sizes.handoff_tokens)


async def _interference(pairs: Pairs, sizes: Sizes) -> dict[str, Any]:
    progress = Progress("interference", sizes.rounds * len(pairs.configs))
    await _warm(pairs, sizes)
    found: dict[Config, list[dict[str, float]]] = {config: [] for config in pairs.configs}
    for _ in range(sizes.rounds):
        for config in pairs.configs:
            found[config] += await _round(pairs, config, sizes)
            progress.step()
    progress.end()
    return {
        "rate_per_s": sizes.rate,
        "handoff_tokens": sizes.handoff_tokens,
        "blocks": (sizes.handoff_tokens - 1) // BLOCK_SIZE,
        "probe_streams": sizes.probe_streams,
        "probe_prompt": sizes.probe_prompt,
        "window_tokens": sizes.window_tokens,
        "rows": [interference_row(config, runs) for config, runs in found.items()],
    }


def median_interval(values: list[float]) -> tuple[float, float]:
    """Where the median of what `values` are drawn from lies with a probability of 95 % or more.

    By order alone, whatever the distribution: of n values fewer than k lie below the median with
    the probability of fewer than k heads in n throws. With under six it is their whole range.
    """
    n, ordered = len(values), sorted(values)
    k, below = 0, 0.5**n
    while below <= 0.025:
        k += 1
        below += math.comb(n, k) * 0.5**n
    k = max(k, 1)
    return ordered[k - 1], ordered[n - k]


def interference_row(config: Config, cycles: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over cycles; shares are medians of each cycle's own."""

    def over(kind: str, base: str) -> float:
        return round(statistics.median(cycle[kind] / cycle[base] - 1 for cycle in cycles), 4)

    shares = [cycle["handoff"] / cycle["local"] - 1 for cycle in cycles]
    return {
        "handoff": config.handoff,
        "transport": config.transport,
        "cycles": len(cycles),
        "idle_ms": round(statistics.median(cycle["idle"] for cycle in cycles), 3),
        "local_ms": round(statistics.median(cycle["local"] for cycle in cycles), 3),
        "handoff_ms": round(statistics.median(cycle["handoff"] for cycle in cycles), 3),
        "local_over_idle": over("local", "idle"),
        "handoff_over_idle": over("handoff", "idle"),
        "handoff_over_local": over("handoff", "local"),
        "handoff_over_local_interval": [round(share, 4) for share in median_interval(shares)],
        "handoff_over_local_range": [round(min(shares), 4), round(max(shares), 4)],
    }
