"""Routing by cache against routing by chance: two replicas and one long prefix after another."""

from __future__ import annotations

from typing import Final

from benchmarks.published.data import Data
from benchmarks.published.mooncake import random_policy
from benchmarks.published.rows import Row, close, exact, holds, unchecked
from benchmarks.published.sim import Workers, simulate
from twofold.cost.models import model_shape
from twofold.cost.step import LinearStep
from twofold.trace import TraceRequest
from twofold.types import NS_PER_MS, NS_PER_S, ceil_div

SOURCE: Final = "Cache-aware routing"
PREFIX: Final = 5200
PAIRS: Final = 30


def _requests() -> list[TraceRequest]:
    """Each prefix twice, one request at a time."""
    found = []
    for i in range(2 * PAIRS):
        blocks = tuple(1 + (i // 2) * 1000 + block for block in range(ceil_div(PREFIX, 16)))
        found.append(TraceRequest(i * 10 * NS_PER_S, PREFIX + 16, 2, (*blocks, 10**6 + i), 16))
    return found


def rows_of(_: Data) -> list[Row]:
    """How often the second request of a prefix meets the first one's worker and cache."""
    conditions = (
        f"two workers, {PAIRS} prefixes of 5,200 tokens (not printed: 56.7 % is 17 of 30), each "
        "asked for twice, one request at a time; hit rate over the second requests"
    )
    step = LinearStep(NS_PER_MS, 20_000.0)
    workers = Workers(step=step, kv_tokens=1_000_000, prefix_caching=True)
    told = {"prefix_aware": (100.0, 99.60), "random": (56.7, 56.56)}
    rows = []
    for policy, (back, hits) in told.items():
        with random_policy():
            records = simulate(
                "2P1D",
                model_shape("Qwen2.5-7B"),
                workers,
                _requests(),
                router={"prefill_policy": policy},
            )
        pairs = list(zip(records[::2], records[1::2], strict=True))
        same = 100 * sum(a.prefill == b.prefill for a, b in pairs) / len(pairs)
        cached = 100 * sum(b.n_cached for _, b in pairs) / sum(b.input_tokens for _, b in pairs)
        # Of 30 fair draws, 19 in 20 results lie within two deviations: 50 +- 18 %.
        for label, printed, ours in (
            ("back to the first replica", back, same),
            ("token hit rate", hits, cached),
        ):
            what = f"{policy}: {label}"
            if policy == "random":
                fair = abs(ours - 50) <= 18.3 and abs(printed - 50) <= 18.3
                told_pair = (f"{printed:g} %", f"{ours:.1f} %")
                law = f"{conditions}; both must lie within two deviations of chance, 50 +- 18 %"
                rows.append(holds(SOURCE, what, *told_pair, fair, conditions=law))
            else:
                rows.append(close(SOURCE, what, printed, ours, unit="%", conditions=conditions))
    rows.append(
        exact(
            SOURCE,
            "17 of 30 by chance",
            "56.7",
            100 * 17 / 30,
            unit="%",
            conditions="what the printed share is",
        )
    )
    rows.append(
        unchecked(
            SOURCE,
            "TTFT P50 127 against 155 ms, P95 159 against 2018 ms",
            "127, 159 ms",
            "no step table of Qwen2.5-0.5B, and its accelerator is not named",
        )
    )
    return rows
