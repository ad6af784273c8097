"""What DistServe says of tensor and pipeline degrees: the KV that fits, and queues for prefill."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from benchmarks.published.data import Data, mean
from benchmarks.published.distserve import SOURCE, fit
from benchmarks.published.rows import CLOSE_PCT, Row, close
from benchmarks.published.sim import Workers, at_client, simulate
from twofold.cost.accelerators import accelerator
from twofold.cost.models import ModelShape, fits_tokens, model_shape
from twofold.cost.pipeline import Pipeline
from twofold.cost.step import StepTime
from twofold.cost.step_profile import step_time
from twofold.trace import Lengths, poisson

BLOCK: Final = 16
KV_SHARE: Final = 0.94
"""Of a GPU's memory for weights and KV: 0.95 less 0.01, in DistServe's profile_memory.py."""
A100_BYTES: Final = 84_990_616_000
"""A100-80G as CUDA counts it (79.15 GiB), fitted to the whole table: with DistServe's own formula
nothing further than 11 kB from it gives all its rows."""
POSITIONS: Final = 2048
PROMPT: Final = 512
LOADS: Final = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
"""Rate x D: below K, from where one stage of K times the speed does not keep up."""


class Fit(NamedTuple):
    """A row of max_num_tokens.csv beside what we find for it."""

    shape: ModelShape
    tp: int
    pp: int
    told: int
    ours: int

    @property
    def error_pct(self) -> float:
        """Signed."""
        return 100 * (self.ours - self.told) / self.told


def fits(data: Data, memory_bytes: float) -> list[Fit]:
    """Every row of the table, with what fits beside the weights in `memory_bytes` of each GPU."""
    found = []
    with data.path("profiles/distserve/max_num_tokens.csv").open() as file:
        for row in csv.DictReader(file):
            shape, tp, pp = model_shape(row["model"]), int(row["tp"]), int(row["pp"])
            ours = fits_tokens(shape, int(memory_bytes), tp, pp=pp) // BLOCK * BLOCK
            found.append(Fit(shape, tp, pp, int(row["max_num_tokens"]), ours))
    return found


def as_distserve_counts(fit: Fit, memory_bytes: float) -> int:
    """Tokens by the formula of DistServe's profile_memory.py: embeddings whole on every GPU, biases
    whole on every GPU of a stage.
    """
    shape, layers = fit.shape, fit.shape.layers // fit.pp
    width = shape.hidden
    embeddings = (shape.vocab + POSITIONS) * width
    weights = 2 * (embeddings + layers * (12 * width**2 / fit.tp + 5 * width))
    block = 2 * layers * (shape.heads // fit.tp) * shape.head_dim * BLOCK * 2
    return int((memory_bytes - weights) // block) * BLOCK


def memory_rows(data: Data) -> list[Row]:
    """KV tokens beside the weights, for every degree in DistServe's table."""
    memory = A100_BYTES * KV_SHARE
    found = fits(data, memory)
    same = sum(as_distserve_counts(row, memory) == row.told for row in found)
    spec = int(accelerator("a100").memory_bytes * KV_SHARE)
    lower = _worst(fits(data, spec))
    conditions = (
        f"{KV_SHARE:g} of {A100_BYTES / 2**30:.2f} GiB for weights and KV: its script's 0.95 less "
        "0.01, and the size of an A100-80G as fitted to the whole table by its script's formula; "
        f"float16, blocks of {BLOCK}; errors without sign. DistServe has whole embeddings and "
        "biases on every GPU, we spread them over all; counted its way, that one size gives "
        f"{same} of {len(found)} rows to the token. With the "
        f"{accelerator('a100').memory_bytes / 1e9:g} GB of our accelerator table the "
        f"worst is {lower.error_pct:+.0f} % ({_told(lower)})"
    )
    rows = []
    for name in dict.fromkeys(row.shape.name for row in found):
        own = [row for row in found if row.shape.name == name]
        rows.append(_fit_row(name, own, conditions))
    return rows


def _worst(rows: Sequence[Fit]) -> Fit:
    return max(rows, key=lambda row: abs(row.error_pct))


def _told(row: Fit) -> str:
    return f"{row.shape.name} TP{row.tp} PP{row.pp}: {row.ours:,} against {row.told:,}"


def _fit_row(name: str, rows: Sequence[Fit], conditions: str) -> Row:
    """One row for all degrees of a model: its error is the median of theirs."""
    worst = _worst(rows)
    good = abs(worst.error_pct) <= CLOSE_PCT
    median = float(np.median([abs(row.error_pct) for row in rows]))
    degrees = f"TP1-{max(row.tp for row in rows)}, PP1-{max(row.pp for row in rows)}"
    told = sorted(row.told for row in rows)
    ours = f"worst {worst.error_pct:+.1f} % ({_told(worst)})"
    return Row(
        source=SOURCE,
        what=f"KV tokens beside the weights, {name}, {len(rows)} placements ({degrees})",
        published=f"{told[0]:,} to {told[-1]:,}",
        ours=f"median error {median:.1f} %, {ours}",
        error_pct=median,
        conditions=conditions,
        verdict="within 15 %" if good else "differs",
        reason="" if good else "little is left beside the weights, so that their share decides",
    )


class Prefills(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts of one length on two GPUs, one by one: D seconds on one GPU, D/K by tensor
    parallelism, two stages of D/2 by pipeline parallelism. Rates are per second.
    """

    shape: ModelShape
    alone: StepTime
    together: StepTime
    requests: int

    @property
    def d_s(self) -> float:
        """D."""
        return self.alone.step_ns([(PROMPT, 0)], 0, 0) / 1e9

    @property
    def k(self) -> float:
        """K."""
        return self.d_s * 1e9 / self.together.step_ns([(PROMPT, 0)], 0, 0)

    def formula_s(self, way: str, rate: float) -> float:
        """Section 3.1's mean TTFT of an M/D/1 queue: "inter" or "intra" operator parallelism."""
        d, k = self.d_s, self.k
        if way == "inter":
            return d + rate * d**2 / (4 * (2 - rate * d))
        return d / k + rate * d**2 / (2 * k * (k - rate * d))

    def simulated_s(self, way: str, rate: float) -> float:
        """The same by our engine: steps of one prompt each, arrivals the same either way."""
        inter = way == "inter"
        workers = Workers(
            step=self.alone if inter else self.together,
            kv_tokens=2**20,
            max_num_seqs=PROMPT,
            budget=PROMPT,
            pipeline=Pipeline(stages=2 if inter else 1),
        )
        asked = poisson([Lengths(PROMPT, 1)] * self.requests, rate, seed=0)
        records = simulate("1M", self.shape, workers, asked)
        return mean(at_client(record).ttft for record in records) / 1e3


def even_rate(prefills: Prefills, *, simulated: bool) -> float:
    """The rate at which both ways have the same mean TTFT; above it stages are better."""
    ttft_s = prefills.simulated_s if simulated else prefills.formula_s
    low, high = 0.0, prefills.k / prefills.d_s
    while high - low > 0.01:
        rate = (low + high) / 2
        if ttft_s("inter", rate) > ttft_s("intra", rate):
            low = rate
        else:
            high = rate
    return (low + high) / 2


def queue_rows(data: Data) -> list[Row]:
    """Section 3.1: mean TTFT on two GPUs by tensor and by pipeline parallelism."""
    prefills = Prefills(
        shape=model_shape("OPT-13B"),
        alone=step_time(fit(data, "opt-13b", 1)),
        together=step_time(fit(data, "opt-13b", 2)),
        requests=5_000 if data.quick else 20_000,
    )
    d, k = prefills.d_s, prefills.k
    conditions = (
        f"OPT-13B, prompts of {PROMPT} tokens, one a step, D = {d * 1e3:.1f} ms and K = {k:.2f} of "
        f"the shipped fits of TP1 and TP2 (the paper leaves both open), {prefills.requests:,} "
        "Poisson requests (seed 0), nothing on the way between stages; published are the values "
        "of the section's formulas for M/D/1 queues"
    )
    rows = []
    for way, name in (("intra", "intra-operator (TP2)"), ("inter", "inter-operator (PP2)")):
        rates = [load / d for load in LOADS]
        told, ours = (
            [1e3 * ttft_s(way, rate) for rate in rates]
            for ttft_s in (prefills.formula_s, prefills.simulated_s)
        )
        rows.append(_queue_row(f"{name}, mean TTFT", rates, told, ours, conditions))
    return [
        *rows,
        close(
            SOURCE,
            "section 3.1: rate from which inter-operator has the lower mean TTFT",
            even_rate(prefills, simulated=False),
            even_rate(prefills, simulated=True),
            unit="req/s",
            conditions=conditions,
        ),
    ]


def _queue_row(
    what: str,
    rates: Sequence[float],
    told: Sequence[float],
    ours: Sequence[float],
    conditions: str,
) -> Row:
    error = mean(100 * abs(o - p) / p for p, o in zip(told, ours, strict=True))
    good = error <= CLOSE_PCT
    return Row(
        source=SOURCE,
        what=f"section 3.1: {what} at req/s {', '.join(f'{rate:.3g}' for rate in rates)}",
        published=" ".join(f"{p:.0f}" for p in told) + " ms",
        ours=" ".join(f"{o:.0f}" for o in ours) + " ms",
        error_pct=error,
        conditions=conditions,
        verdict="within 15 %" if good else "differs",
        reason="" if good else "reason not found",
    )
