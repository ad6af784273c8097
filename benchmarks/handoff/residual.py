"""From the end of prefill to decode-ready, and blocks that decode holds meanwhile, by mode.

Both from real deployments: gateway, workers, sockets, the model's own computing. Times are read
off the workers' journals afterwards.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.handoff.conditions import Config, Progress, configs, shared_clock
from benchmarks.handoff.journals import Handoff
from benchmarks.handoff.live import MODEL, Live, random_ids
from twofold.bench.drive import Target, drive
from twofold.metrics.ledger import parse_server_timing
from twofold.trace import TraceRequest
from twofold.types import NS_PER_MS, NS_PER_S


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured."""

    lengths: tuple[int, ...]
    rounds: int
    slots_prompt: int
    slots_output: int
    slots_requests: int
    utilisation: float


FULL = Sizes(
    lengths=(16, 64, 256, 1024, 2048, 4096, 8192),
    rounds=3,
    slots_prompt=1024,
    slots_output=32,
    slots_requests=24,
    utilisation=0.5,
)
QUICK = Sizes(
    lengths=(16, 256, 1024),
    rounds=1,
    slots_prompt=512,
    slots_output=8,
    slots_requests=8,
    utilisation=0.5,
)

KV_BLOCKS: Final = 640
"""Little more than the longest prompt takes, so that it touches nearly all of a pool."""

Span = tuple[int, int]  # begin and end on the machine's clock


class Asked(msgspec.Struct):
    """Which handoffs belong to which case, by when they were asked for."""

    residual: dict[tuple[Config, int], list[Span]]
    slots: dict[Config, Span]
    rate: float


def measure(model: Path, sizes: Sizes, parts: list[str]) -> dict[str, Any]:
    """Results by part, "residual" and "slots", as asked for."""
    shared_clock()
    with tempfile.TemporaryDirectory(prefix="twofold-handoff-") as folder:
        live = Live(model, configs(), Path(folder), kv_blocks=KV_BLOCKS)
        asked = asyncio.run(_drive(live, sizes, parts))
        found = {config: live.handoffs(config) for config in live.configs}
    results: dict[str, Any] = {}
    if "residual" in parts:
        results["residual"] = [
            residual_row(config, n, _within(found[config], spans))
            for (config, n), spans in asked.residual.items()
        ]
    if "slots" in parts:
        rows = [
            slots_row(config, _within(found[config], [span]), span)
            for config, span in asked.slots.items()
        ]
        results["slots"] = {
            "from": "live deployments",
            "rate_per_s": round(asked.rate, 3),
            "prompt_tokens": sizes.slots_prompt,
            "output_tokens": sizes.slots_output,
            "rows": rows,
        }
    return results


async def _drive(live: Live, sizes: Sizes, parts: list[str]) -> Asked:
    rng = random.Random(1)
    asked = Asked({}, {}, 0.0)
    progress = Progress("start", len(live.configs))
    try:
        await live.start()
        prefills = []
        for config in live.configs:
            # Connections and mappings are made for the first; that is not measured.
            await live.ask(config, random_ids(rng, max(sizes.lengths)), 4)
            for _ in range(2):
                answer = await live.ask(config, random_ids(rng, sizes.slots_prompt), 4)
                timing = parse_server_timing(answer.headers["server-timing"])
                prefills.append(timing["prefill"])
            progress.step()
        progress.end()
        if "residual" in parts:
            await _residual(live, sizes, rng, asked)
        if "slots" in parts:
            asked.rate = sizes.utilisation * NS_PER_S / statistics.median(prefills)
            await _slots(live, sizes, asked)
    finally:
        await live.stop()
    return asked


async def _residual(live: Live, sizes: Sizes, rng: random.Random, asked: Asked) -> None:
    progress = Progress("residual", sizes.rounds * len(sizes.lengths) * len(live.configs))
    for number in range(sizes.rounds):
        for n in sizes.lengths:
            turn = number % len(live.configs)
            for config in live.configs[turn:] + live.configs[:turn]:
                began_ns = time.monotonic_ns()
                await live.ask(config, random_ids(rng, n), 2)
                spans = asked.residual.setdefault((config, n), [])
                spans.append((began_ns, time.monotonic_ns()))
                progress.step()
    progress.end()


async def _slots(live: Live, sizes: Sizes, asked: Asked) -> None:
    """The same arrivals for every configuration, one after the other."""
    rng = random.Random(2)
    at_s, rows = 0.0, []
    for _ in range(sizes.slots_requests):
        rows.append(TraceRequest(round(at_s * NS_PER_S), sizes.slots_prompt, sizes.slots_output))
        at_s += rng.expovariate(asked.rate)
    progress = Progress("slots", len(live.configs) * len(rows))
    for config in live.configs:
        target = Target("127.0.0.1", live.port(config), MODEL)
        began_ns = time.monotonic_ns()
        records = await drive(
            target,
            rows,
            lambda _number, row: random_ids(rng, row.input_tokens),
            time.monotonic_ns,
            lambda _record: progress.step(),
        )
        failed = [record for record in records if record.outcome != "finished"]
        if failed:
            raise RuntimeError(f"{config}: {len(failed)} of {len(records)} requests failed")
        asked.slots[config] = (began_ns, time.monotonic_ns())
    progress.end()


def _within(found: list[Handoff], spans: list[Span]) -> list[Handoff]:
    return [h for h in found if any(a <= h.prefill_began_ns <= b for a, b in spans)]


def _median_ms(values: list[int]) -> float:
    return round(statistics.median(values) / NS_PER_MS, 3)


def residual_row(config: Config, n_tokens: int, handoffs: list[Handoff]) -> dict[str, Any]:
    """Medians of one case. The share is the median of each handoff's own."""
    row: dict[str, Any] = {
        "handoff": config.handoff,
        "transport": config.transport,
        "tokens": n_tokens,
        "runs": len(handoffs),
        "prefill_ms": _median_ms([h.prefill_ns for h in handoffs]),
        "residual_ms": _median_ms([h.residual_ns for h in handoffs]),
        "residual_ms_least": round(min(h.residual_ns for h in handoffs) / NS_PER_MS, 3),
        "of_prefill": round(statistics.median(h.residual_ns / h.prefill_ns for h in handoffs), 4),
    }
    if config.handoff == "pull":
        row["steps_ms"] = {
            "prefill end to decode leg": _median_ms([h.came_ns - h.prefilled_ns for h in handoffs]),
            "to grant": _median_ms([h.granted_ns - h.came_ns for h in handoffs]),
            "to copied": _median_ms([h.copied_ns - h.granted_ns for h in handoffs]),
            "to confirmed": _median_ms([h.ready_ns - h.copied_ns for h in handoffs]),
        }
    return row


def slots_row(config: Config, handoffs: list[Handoff], span: Span) -> dict[str, Any]:
    """Time averages over the run of what decode had set aside with no KV to step on yet."""
    length_ns = span[1] - span[0]
    return {
        "handoff": config.handoff,
        "transport": config.transport,
        "handoffs": len(handoffs),
        "slots_waiting": round(sum(h.reserved_ns for h in handoffs) / length_ns, 4),
        "blocks_waiting": round(sum(h.reserved_ns * h.n_blocks for h in handoffs) / length_ns, 2),
        "reserved_ms": _median_ms([h.reserved_ns for h in handoffs]),
        "residual_ms": _median_ms([h.residual_ns for h in handoffs]),
        "ranges": statistics.median(h.n_ranges for h in handoffs),
        "blocks": statistics.median(h.n_blocks for h in handoffs),
    }
