"""Splitwise: which split of a cluster serves most within the nine goals, and against what.

The published pools are of BLOOM-176B: it is the default of splitwise-sim's applications/solo.yaml,
and its notebook plots the pools and the search for 70 req/s with model_to_plot = "bloom-176b".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from benchmarks.published.data import Data, at_share, spread
from benchmarks.published.rows import Row, close, holds
from benchmarks.published.sim import (
    Times,
    WholePrompts,
    Workers,
    at_prefill,
    one_token_less,
    simulate,
)
from benchmarks.published.splitwise import SOURCE, TRACES, step
from twofold.cost.models import model_shape
from twofold.trace import Lengths, poisson
from twofold.types import NS_PER_MS


class Pools(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster as the paper names it: prompt and token machines, or `mixed` ones."""

    name: str
    prompt: str = "H"
    token: str = "H"
    n_prompt: int = 0
    n_token: int = 0
    mixed: int = 0

    @property
    def spec(self) -> str:
        """As a pool spec."""
        return f"{self.mixed}M" if self.mixed else f"{self.n_prompt}P{self.n_token}D"


TABLE: Final = "bloom-176b"
SHAPE: Final = "BLOOM-176B"
KV_TOKENS: Final = (8 * 80 * 2**30 - 329_000_000_000) // (2 * 70 * 14336 * 2)
"""8 x 80 GiB less the weights, over layers x hidden x K and V of 2 bytes: its configuration."""
TOLD: Final = (
    "BLOOM-176B, splitwise-sim's default and what its notebook plots; decode looked up as it "
    "does (by sequences, below the first point), TBT over all tokens, the idle A100's TBT at "
    "the prompt's size; KV in 8 x 80 GiB less 329 GB as in its configuration"
)


class Goals:
    """The nine goals: slowdowns against an idle A100 at P50, P90 and P99."""

    def __init__(self, data: Data) -> None:
        table = data.paper("splitwise")["table6_slo_slowdown_vs_uncontended_DGX_A100"]
        self._limits = [
            (i, share, float(table[label][percent]))
            for i, label in enumerate(("TTFT", "TBT", "E2E"))
            for percent, share in (("P50", 0.5), ("P90", 0.9), ("P99", 0.99))
        ]
        self._idle = step(data, "A", model=TABLE, as_published=True)

    def _base(self, request: Lengths) -> Times:
        n = request.input_tokens
        ttft = self._idle.step_ns([(n, 0)], 0, 0) / NS_PER_MS
        tbt = self._idle.step_ns((), n, n) / NS_PER_MS
        return Times(ttft, tbt, ttft + tbt * (request.output_tokens - 1))

    def missed(self, requests: Sequence[Lengths], times: Sequence[Times]) -> list[str]:
        """Which are missed, in words; none when all hold."""
        bases = [self._base(request) for request in requests]
        took = [
            Times(t.ttft, (t.e2e - t.ttft) / request.output_tokens, t.e2e)
            for request, t in zip(requests, times, strict=True)
        ]
        slowdowns = [
            [t[i] / base[i] for t, base in zip(took, bases, strict=True)] for i in range(3)
        ]
        names = ("TTFT", "TBT", "E2E")
        found = []
        for i, share, limit in self._limits:
            reached = at_share(slowdowns[i], share)
            if reached > limit:
                found.append(f"{names[i]} P{100 * share:.0f} {reached:.2f} > {limit:g}")
        return found


RATES: Final = range(30, 251, 10)
"""The rates that splitwise-sim generates traces for."""


def seconds(data: Data) -> int:
    """How long requests come for in each run."""
    return 5 if data.quick else 15


class Search:
    """The highest rate of the grid at which a cluster meets all nine goals."""

    def __init__(self, data: Data, trace: str) -> None:
        self._data = data
        self._all = data.lengths(TRACES[trace])
        self._goals = Goals(data)
        self._shape = model_shape(SHAPE)
        self.why: dict[str, str] = {}

    def _workers(self, machine: str) -> Workers:
        times = step(self._data, machine, model=TABLE, as_published=True)
        return Workers(step=WholePrompts(times), kv_tokens=KV_TOKENS, max_num_seqs=512, budget=2048)

    def missed(self, pools: Pools, rate: int) -> list[str]:
        """The goals that are missed at `rate`."""
        lengths = spread(self._all, rate * seconds(self._data), 0)
        requests = one_token_less(poisson(lengths, rate, seed=0))
        workers: Workers | dict[str, Workers] = self._workers(pools.prompt)
        if not pools.mixed:
            workers = {"prefill": self._workers(pools.prompt), "decode": self._workers(pools.token)}
        records = simulate(pools.spec, self._shape, workers, requests, link_bytes_per_s=200 * 2**30)
        return self._goals.missed(lengths, [at_prefill(record) for record in records])

    def best(self, pools: Pools) -> int:
        """The rate, 0 where the lowest of the grid already misses."""
        low, high = -1, len(RATES)
        while high - low > 1:
            middle = (low + high) // 2
            missed = self.missed(pools, RATES[middle])
            if missed:
                high = middle
                self.why[pools.name] = missed[0]
            else:
                low = middle
        return RATES[low] if low >= 0 else 0


def _conditions(data: Data) -> str:
    return (
        f"{TOLD}; TP8 machines, Poisson requests "
        f"for {seconds(data)} s with lengths of "
        "the Azure trace (golden-section stride), rates 30 to 250 by 10 as splitwise-sim's, all "
        "nine slowdown goals against the same model's idle A100, transfer 200 GiB/s per pair as in "
        "splitwise-sim, 512 sequences and 2,048 tokens a step (longer prompts in chunks at the "
        "price of the whole), first token from the prompt machine, no mixed pool"
    )


def winner_rows(data: Data, trace: str) -> list[Row]:
    """The best split of 40 H100 machines at equal power: 35:5 for code, 25:15 for conversation."""
    told = data.paper("splitwise")["pools"]
    published = "{}:{}".format(*told[f"iso_power_{trace}"]["HH"])
    search = Search(data, trace)
    rates: dict[str, int] = {}
    for n_token in (5, 15, 25) if data.quick else (5, 10, 15, 20):
        pools = Pools(name=f"{40 - n_token}:{n_token}", n_prompt=40 - n_token, n_token=n_token)
        rates[pools.name] = search.best(pools)
    top = max(rates.values())
    winners = [name for name, rate in rates.items() if rate == top]
    shown = ", ".join(f"{name} {rate}" for name, rate in rates.items())
    stops = ", ".join(f"{name}: {why}" for name, why in search.why.items())
    what = f"best split of 40 H100 machines, {trace}"
    return [
        holds(
            SOURCE,
            f"{what}, {SHAPE}",
            published,
            f"{' and '.join(winners)} ({shown} req/s)",
            published in winners,
            conditions=_conditions(data),
            why=f"what stops each split above its rate: {stops}",
        )
    ]


def claim_rows(data: Data) -> list[Row]:
    """Throughput at equal power or cost, conversation trace."""
    search = Search(data, "conversation")
    pools = [
        Pools(name="Baseline-A100 (70)", prompt="A", mixed=70),
        Pools(name="Baseline-H100 (40)", mixed=40),
        Pools(name="AA (45:25)", prompt="A", token="A", n_prompt=45, n_token=25),
        Pools(name="AA (51:35)", prompt="A", token="A", n_prompt=51, n_token=35),
        Pools(name="HA (25:26)", token="A", n_prompt=25, n_token=26),
    ]
    found = {p.name: search.best(p) for p in pools}
    conditions = (
        _conditions(data) + "; rates in req/s: " + ", ".join(f"{k} {v}" for k, v in found.items())
    )
    stops = "what stops each: " + ", ".join(f"{k}: {v}" for k, v in search.why.items())
    told = (
        ("AA against Baseline-A100 at equal power", 2.15, "AA (45:25)", "Baseline-A100 (70)"),
        ("AA against Baseline-H100 at equal cost", 1.4, "AA (51:35)", "Baseline-H100 (40)"),
        ("HA against Baseline-H100 at equal power", 1.18, "HA (25:26)", "Baseline-H100 (40)"),
    )
    rows = []
    for what, factor, ours, base in told:
        if found[base]:
            rows.append(
                close(
                    SOURCE,
                    f"throughput, conversation: {what}",
                    factor,
                    found[ours] / found[base],
                    unit="times",
                    conditions=conditions,
                    why=stops,
                )
            )
        else:
            rows.append(
                holds(
                    SOURCE,
                    f"throughput, conversation: {what}",
                    f"{factor} times",
                    f"{found[ours]} req/s against 0",
                    False,
                    conditions=conditions,
                    why=f"the baseline misses a goal at every rate here; {stops}",
                )
            )
    return rows


def cheapest_rows(data: Data) -> list[Row]:
    """27P:3T as the smallest H100 cluster for 70 req/s of code, all machines at one price."""
    search = Search(data, "coding")
    rate = 70
    found: dict[int, int] = {}
    for n_token in (2, 3, 4):
        low, high = 0, 40
        while high - low > 1:
            middle = (low + high) // 2
            pools = Pools(name=f"{middle}:{n_token}", n_prompt=middle, n_token=n_token)
            low, high = (middle, high) if search.missed(pools, rate) else (low, middle)
        found[n_token] = high
    n_token = min(found, key=lambda n: (found[n] + n, n))
    published = data.paper("splitwise")["pools"]["cost_optimal_coding_70rps_HH"]
    told = sum(published)
    ours = found[n_token] + n_token
    shown = ", ".join(f"{p}:{t}" if p < 40 else f"none with {t}" for t, p in found.items())
    conditions = _conditions(data) + f"; smallest that hold 70 req/s: {shown}"
    what = "cheapest H100 cluster for 70 req/s of code"
    best = f"{found[n_token]}P:{n_token}T"
    return [
        close(SOURCE, f"{what}: machines", told, ours, unit="machines", conditions=conditions),
        holds(
            SOURCE,
            what,
            "27P:3T",
            best,
            [found[n_token], n_token] == published,
            conditions=conditions,
        ),
    ]
