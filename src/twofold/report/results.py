"""What `replay`, `bench` and `plan` hand out as JSON. These names stay put.

A figure that is not finite is null: a percentile whose rank falls among requests that failed or
were refused never came, and a measure without values has none. `Run.lost` tells which.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from twofold import __version__
from twofold.metrics.digest import digest as digest_of
from twofold.metrics.record import RequestRecord
from twofold.metrics.slo import Figures, Slo
from twofold.report.buckets import Bucket, Measure, buckets_of, finite, measure
from twofold.report.queues import Queues

Setting = str | int | float | bool


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a result was computed from: equal headers and digests mean equal results.

    Hashes are hex SHA-256, empty where there is no such input (a bench has no profile).
    """

    twofold: str
    trace_sha256: str
    profile_sha256: str
    config_sha256: str
    seed: int


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """The SLO of one request in milliseconds (null: no goal) and the share that must meet it."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    attainment: float = 0.9

    def slo(self) -> Slo:
        """The same goals for one request."""
        return Slo(
            ttft_ms=math.inf if self.ttft_ms is None else self.ttft_ms,
            tpot_ms=math.inf if self.tpot_ms is None else self.tpot_ms,
        )


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A value and the interval that it lies in; `low` and `high` are null where none was found."""

    value: float | None
    low: float | None = None
    high: float | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One set-up at one rate. Rates are per second, times in milliseconds.

    `label` names the set-up where `pools` would not; `settings` holds what else was chosen for
    it (chunk size, parallel degrees). `rate_scale` multiplies the trace's own rate.
    `goodput_per_gpu` is null without `gpus`; from a plan it is the highest rate per GPU that
    still meets the goal, else this run's own. `slots_peak` of `slots` decode slots were held at
    once. `faults` were let happen, null where none were asked for. `phases_ms` sum to the TTFT in
    their means, not in their percentiles. `digest` is the SHA-256 over the outcome of every
    request, in order. `recoveries` counts what the failure policy made of legs that failed:
    retried, recomputed, moved; exhausted, over_budget, no_place.
    """

    pools: str
    rate_scale: float
    offered_rps: float
    completed: int
    refused: int
    failed: int
    slo_attainment: float | None
    goodput_rps: float
    throughput_rps: float
    output_tokens_per_s: float
    ttft_ms: Measure
    tpot_ms: Measure
    itl_ms: Measure
    e2e_ms: Measure
    phases_ms: dict[str, Measure]
    buckets: list[Bucket]
    digest: str
    requests: int
    cancelled: int = 0
    label: str = ""
    handoff: str = ""
    policy: str = ""
    settings: dict[str, Setting] = msgspec.field(default_factory=dict)
    gpus: int = 0
    goodput_per_gpu: Interval | None = None
    cost_per_hour: float | None = None
    power_w: float | None = None
    slots: int | None = None
    slots_peak: int | None = None
    faults: int | None = None
    queues: Queues | None = None
    recoveries: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def lost(self) -> int:
        """Requests that were refused or failed."""
        return self.refused + self.failed


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of one trace. `digest` is that of the only run, or over those of all, in order."""

    header: Header
    goal: Goal | None
    runs: list[Run]
    digest: str


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that needs no simulation; `holds` is null where facts are missing."""

    rule: str
    holds: bool | None
    because: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on splitting, with the best of both kinds on the same GPUs.

    `best` is the recommended one of `best_split` (null: none was tried) and `best_unsplit`.
    `frontier` holds the runs that no other beats in both goodput and attainment, `runs` all that
    were tried.
    """

    header: Header
    goal: Goal | None
    verdict: Literal["split", "do not split", "cannot meet"]
    because: str
    best: Run | None
    best_unsplit: Run | None
    frontier: list[Run]
    best_split: Run | None = None
    rules: list[Rule] = msgspec.field(default_factory=list)
    runs: list[Run] = msgspec.field(default_factory=list)


def header_of(
    *, trace_sha256: str, profile_sha256: str, config: Mapping[str, Any], seed: int
) -> Header:
    """A header of this version; `config` is hashed as JSON with sorted keys."""
    canonical = msgspec.json.encode(dict(config), order="deterministic")
    return Header(
        twofold=__version__,
        trace_sha256=trace_sha256,
        profile_sha256=profile_sha256,
        config_sha256=hashlib.sha256(canonical).hexdigest(),
        seed=seed,
    )


def run_of(
    figures: Figures,
    records: Sequence[RequestRecord],
    *,
    pools: str,
    rate_scale: float = 1.0,
    goal: Goal | None = None,
    gpus: int = 0,
    digest: str | None = None,
    **rest: Any,
) -> Run:
    """The run that `figures` and `records` (of the same requests) describe.

    `digest` is computed unless given. `rest` are further fields of Run: label, handoff, policy,
    settings, cost_per_hour, power_w, slots, slots_peak, faults, queues, goodput_per_gpu.
    """
    if gpus:
        rest.setdefault("goodput_per_gpu", Interval(value=finite(figures.goodput_rps / gpus)))
    slo = goal.slo() if goal is not None else Slo()
    return Run(
        pools=pools,
        rate_scale=rate_scale,
        offered_rps=figures.offered_rps,
        requests=figures.requests,
        completed=figures.completed,
        refused=figures.refused,
        failed=figures.failed,
        cancelled=figures.cancelled,
        slo_attainment=finite(figures.slo_attainment),
        goodput_rps=figures.goodput_rps,
        throughput_rps=figures.throughput_rps,
        output_tokens_per_s=figures.output_tokens_per_s,
        ttft_ms=measure(figures.ttft_ms),
        tpot_ms=measure(figures.tpot_ms),
        itl_ms=measure(figures.itl_ms),
        e2e_ms=measure(figures.e2e_ms),
        phases_ms={name: measure(found) for name, found in figures.phases_ms.items()},
        buckets=buckets_of(records, slo),
        digest=digest_of(records) if digest is None else digest,
        recoveries=dict(sorted(Counter(name for r in records for name in r.recoveries).items())),
        gpus=gpus,
        **rest,
    )


def replay_of(header: Header, runs: Sequence[Run], goal: Goal | None = None) -> Replay:
    """The result of `runs`, in the order given."""
    if len(runs) == 1:
        digest = runs[0].digest
    else:
        digest = hashlib.sha256("".join(run.digest for run in runs).encode()).hexdigest()
    return Replay(header=header, goal=goal, runs=list(runs), digest=digest)


def to_json(result: Replay | Plan) -> bytes:
    """Indented JSON with a newline at its end; no NaN or infinity in it."""
    return msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"


def replay_from_json(text: bytes) -> Replay:
    """What `to_json` wrote. Raises msgspec.ValidationError or DecodeError."""
    return msgspec.json.decode(text, type=Replay)


def plan_from_json(text: bytes) -> Plan:
    """What `to_json` wrote. Raises msgspec.ValidationError or DecodeError."""
    return msgspec.json.decode(text, type=Plan)
