"""Runs one scenario on the simulator, and what is read off its outcome."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from twofold.cost.errors import CostError
from twofold.cost.step import StepTime
from twofold.metrics.record import RequestRecord
from twofold.metrics.slo import Slo, meets
from twofold.plan.hardware import Machine, layout_of, read_machine
from twofold.plan.scenario import Scenario
from twofold.plan.workload import requests_of, scaled
from twofold.sim import Cluster, SeededFaults
from twofold.sim.pools import Pool, PoolsError, plan_workers
from twofold.trace import TraceError, TraceRequest
from twofold.types import NS_PER_MS, NS_PER_S, ceil_div, ns_to_ms

MAX_MODEL_LEN = 2**31 - 1
"""What fits is settled by KV blocks alone: a trace may be of another model than the profile."""

LATEST_NS = 100 * NS_PER_MS
"""The longest that a seeded fault delays a message."""

_LEAST_ANSWERS = 10


class SetupError(ValueError):
    """A scenario that cannot be run, in one line."""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One run, briefly: rates per second, shares of requests that meet both goals and each.

    `ttft_ms` and `tpot_ms` are at the attainment's percentile, infinite where too few came;
    `phases_ms` are means over requests with a first token. Arrivals took `arrivals_s`, an answer
    `e2e_s` on average.
    """

    rate_scale: float
    offered_rps: float
    attainment: float
    ttft_share: float
    tpot_share: float
    goodput_rps: float
    ttft_ms: float
    tpot_ms: float
    phases_ms: dict[str, float]
    slots: int
    slots_peak: int
    lost: int
    arrivals_s: float = 0.0
    e2e_s: float = 0.0

    @property
    def too_short(self) -> bool:
        """Whether arrivals ended before queues could build: few answers' time after the first."""
        return self.arrivals_s < _LEAST_ANSWERS * self.e2e_s

    def holds(self, attainment: float) -> bool:
        """Whether enough requests met the goals."""
        return self.attainment >= attainment


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A run that failed: which, and why in one line."""

    scenario: str
    reason: str


def simulate(scenario: Scenario) -> list[RequestRecord]:
    """The record of every request, in order of arrival.

    Raises SetupError, TraceError or CostError (OutOfRange outside the profile).
    """
    return simulate_counting(scenario)[0]


def simulate_counting(scenario: Scenario) -> tuple[list[RequestRecord], int]:
    """`simulate`, and how many faults of `Scenario.faults` there were."""
    requests = requests_of(scenario.workload, scenario.seed).rows
    cluster = _cluster(scenario)
    records = cluster.run(iter(scaled(requests, scenario.rate_scale)))
    return records, cluster.network.n_faults


def _cluster(scenario: Scenario) -> Cluster:
    pair_bytes_per_s = link_bytes_per_s(scenario)

    def nic_bytes_per_s(pool: Pool) -> int:
        machine = machine_of(scenario, pool)
        return _each_link(scenario, [machine]) * machine.gpus

    least_gpus = min(machine.gpus for machine in machines_of(scenario))
    return Cluster(
        plan_workers(
            scenario.pools,
            lambda pool: _settle(scenario, pool),
            nic_bytes_per_s,
            lambda pool: machine_of(scenario, pool).pipeline,
        ),
        link_bytes_per_s=pair_bytes_per_s,
        share_nics=scenario.link_sharing == "worker",
        bounce_bytes_per_s=scenario.bounce_bytes_per_s * least_gpus,
        prepare_ns=scenario.prepare_ns,
        crashes=scenario.crashes,
        faults=_faults(scenario),
        router=_router(scenario),
    )


def _faults(scenario: Scenario) -> SeededFaults | None:
    """Faults of all kinds at one rate. Flipped bits are left out: no content is simulated here."""
    if scenario.faults is None:
        return None
    seed, rate = scenario.faults
    return SeededFaults(
        seed=seed,
        drop=rate,
        duplicate=rate,
        delay=rate,
        most_ns=LATEST_NS,
        cut_leg=rate,
        fail_read=rate,
        fail_step=rate,
    )


def _router(scenario: Scenario) -> dict[str, Any]:
    """Settings of the router: policies, and the goals that admission and scores look at."""
    names = {"admission": "admission"}
    found: dict[str, Any] = {
        names.get(kind, f"{kind}_policy"): name
        for kind, name in scenario.policies
        if kind != "chunk"
    }
    found["seed"] = scenario.seed
    found["retries"] = scenario.retries
    found["recompute_tokens_per_s"] = scenario.recompute_tokens_per_s
    found["ttft_goal_ns"] = _goal_ns(scenario.slo.ttft_ms)
    found["tpot_goal_ns"] = _goal_ns(scenario.slo.tpot_ms)
    return found


def _settle(scenario: Scenario, pool: Pool) -> tuple[Mapping[str, Any], StepTime]:
    """The settings and the step times of the workers of one pool."""
    engine = scenario.engine
    machine = machine_of(scenario, pool)
    settings: dict[str, Any] = {
        "layout": layout_of(machine.shape, engine.block_size, engine.kv_dtype),
        "n_blocks": n_blocks(scenario, machine),
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.chunk_tokens,
        "max_model_len": MAX_MODEL_LEN,
        "max_waiting": engine.max_waiting,
        "prefix_caching": engine.prefix_caching,
        "handoff": engine.handoff,
        "chunk_policy": scenario.chunk_policy,
        "chunk_cap_tokens": engine.chunk_cap_tokens,
        "chunk_goal_ns": _goal_ns(scenario.slo.tpot_ms),
        "pipeline_stages": machine.pp,
    }
    return settings, machine.step


def _goal_ns(goal_ms: float) -> int:
    """0 for no goal."""
    return round(goal_ms * NS_PER_MS) if math.isfinite(goal_ms) else 0


def machine_of(scenario: Scenario, pool: Pool) -> Machine:
    """What the workers of `pool` run on."""
    return read_machine(scenario.hardware[scenario.pools.index(pool)])


def machines_of(scenario: Scenario) -> list[Machine]:
    """What the workers of each pool run on."""
    return [read_machine(hardware) for hardware in scenario.hardware]


def n_blocks(scenario: Scenario, machine: Machine) -> int:
    """KV blocks of one worker. Raises CostError."""
    engine = scenario.engine
    return engine.kv_blocks or machine.kv_blocks(
        engine.block_size, engine.memory_share, engine.kv_dtype
    )


def link_bytes_per_s(scenario: Scenario) -> int:
    """Of one pair of workers: the accelerators of the smaller one each have a link."""
    machines = machines_of(scenario)
    each = _each_link(scenario, machines)
    if not each:
        raise SetupError(
            f"{machines[0].title}: its network is not known; --link-gbytes-per-s says its speed"
        )
    return each * min(machine.gpus for machine in machines)


def _each_link(scenario: Scenario, machines: Sequence[Machine]) -> int:
    """Bytes per second of the slowest accelerator's link, 0 where none is known."""
    if scenario.link_bytes_per_s:
        return scenario.link_bytes_per_s
    nics = [m.accelerator.nic_bytes_per_s for m in machines if m.accelerator is not None]
    return min(nics, default=0)


def check(scenario: Scenario, *, skip_too_large: bool = False) -> None:
    """Raise SetupError, CostError, PoolsError or TraceError where `scenario` cannot be run.

    A request that is larger than any worker that it needs is one reason, unless
    `skip_too_large`: then it is refused when it arrives, and counted.
    """
    engine = scenario.engine
    if engine.chunk_tokens < engine.max_num_seqs:
        raise SetupError(
            f"--chunk {engine.chunk_tokens}: below --max-num-seqs {engine.max_num_seqs}, so that "
            "a step could not decode every sequence"
        )
    if scenario.chunk_policy == "capped" and not engine.chunk_cap_tokens:
        raise SetupError("--policy chunk=capped: needs --chunk-cap N, prompt tokens of a step")
    if scenario.chunk_policy == "tpot_goal" and not _goal_ns(scenario.slo.tpot_ms):
        raise SetupError("--policy chunk=tpot_goal: needs --slo-tpot S, the goal to keep steps to")
    machines = machines_of(scenario)
    kv = {layout_of(m.shape, engine.block_size, engine.kv_dtype).block_bytes for m in machines}
    if len(kv) > 1:
        raise SetupError(
            f"{scenario.name}: pools of different models ({machines[0].title}, "
            f"{machines[-1].title}); a KV cache can only be handed over within one model"
        )
    names = {
        f"{pool.role}-{i}"
        for pool in scenario.pools
        for i in range(sum(p.count for p in scenario.pools if p.role == pool.role))
    }
    for crash in scenario.crashes:
        if crash.worker not in names:
            raise SetupError(
                f"--crash {crash.worker}: no such worker; {', '.join(sorted(names)[:6])} are"
            )
    link_bytes_per_s(scenario)
    _check_sizes(scenario, machines, skip_too_large)


def _check_sizes(scenario: Scenario, machines: Sequence[Machine], skip_too_large: bool) -> None:
    by_role: dict[str, int] = {}
    for pool, machine in zip(scenario.pools, machines, strict=True):
        blocks = n_blocks(scenario, machine)
        by_role[pool.role] = max(by_role.get(pool.role, 0), blocks)
    if skip_too_large:
        return
    requests = requests_of(scenario.workload, scenario.seed).rows
    for role, blocks in by_role.items():
        tokens = blocks * scenario.engine.block_size
        worst = max(requests, key=lambda r: _needs(r, role))
        if ceil_div(_needs(worst, role), scenario.engine.block_size) > blocks:
            number = requests.index(worst) + 1
            raise SetupError(
                f"{scenario.workload.trace}: request {number} of {worst.input_tokens:,} prompt and "
                f"{worst.output_tokens:,} answer tokens is larger than any {role} worker's "
                f"{tokens:,} tokens of KV; --skip-bad counts such requests as refused"
            )


def _needs(request: TraceRequest, role: str) -> int:
    return request.input_tokens + (1 if role == "prefill" else request.output_tokens)


def probe(scenario: Scenario) -> Probe:
    """Run `scenario` and say briefly how it went."""
    records = simulate(scenario)
    slo, share = scenario.slo, scenario.attainment
    counted = [r for r in records if r.outcome != "cancelled"]
    finished = [r for r in counted if r.outcome == "finished"]
    n = len(counted) or 1
    good = sum(meets(r, slo) for r in counted)
    first_ns = min((r.arrival_ns for r in records), default=0)
    arrivals_ns = max((r.arrival_ns for r in records), default=0) - first_ns
    span_ns = max((r.end_ns for r in records), default=0) - first_ns
    slots, peak = slots_held(scenario, records)
    return Probe(
        rate_scale=scenario.rate_scale,
        offered_rps=len(records) * NS_PER_S / arrivals_ns if arrivals_ns else 0.0,
        attainment=good / n,
        ttft_share=sum(meets(r, Slo(ttft_ms=slo.ttft_ms)) for r in counted) / n,
        tpot_share=sum(meets(r, Slo(tpot_ms=slo.tpot_ms)) for r in counted) / n,
        goodput_rps=good * NS_PER_S / span_ns if span_ns else 0.0,
        ttft_ms=_at_share([r.ttft_ns for r in counted], share),
        tpot_ms=_at_share([r.tpot_ns for r in counted if len(r.token_times_ns) != 1], share),
        phases_ms=_phases(records),
        slots=slots,
        slots_peak=peak,
        lost=sum(r.outcome in ("refused", "failed") for r in records),
        arrivals_s=arrivals_ns / NS_PER_S,
        e2e_s=sum(r.e2e_ns for r in finished) / len(finished) / NS_PER_S if finished else 0.0,
    )


def _at_share(values: Sequence[int | None], share: float) -> float:
    """The value that `share` of all do not exceed, in ms; a missing one never came."""
    if not values:
        return math.nan
    known = sorted(value for value in values if value is not None)
    rank = max(1, math.ceil(share * len(values)))
    return ns_to_ms(known[rank - 1]) if rank <= len(known) else math.inf


def _phases(records: Sequence[RequestRecord]) -> dict[str, float]:
    begun = [r.phases_ns for r in records if r.phases_ns]
    names = dict.fromkeys(name for phases in begun for name in phases)
    sums = {name: sum(phases.get(name, 0) for phases in begun) for name in names}
    return {name: ns_to_ms(total) / len(begun) for name, total in sums.items() if total}


def slots_held(scenario: Scenario, records: Sequence[RequestRecord]) -> tuple[int, int]:
    """(slots of all workers that decode, the most that were held at once).

    A slot is held from the transfer (or the first step of a worker that does all) to the end.
    """
    workers = sum(pool.count for pool in scenario.pools if pool.role != "prefill")
    changes: list[tuple[int, int]] = []
    for record in records:
        if record.token_times_ns:
            phases = record.phases_ns
            held_ns = phases.get("transfer", 0) + phases.get("first_step", 0)
            if not record.prefill:
                held_ns += phases.get("prefill", 0)
            changes += [(record.token_times_ns[0] - held_ns, 1), (record.end_ns, -1)]
    held = peak = 0
    for _, change in sorted(changes):
        held += change
        peak = max(peak, held)
    return workers * scenario.engine.max_num_seqs, peak


def attempt(scenario: Scenario) -> Probe | Problem:
    """`probe`, with what can go wrong in a run as a value."""
    try:
        return probe(scenario)
    except (SetupError, CostError, TraceError, PoolsError, ValueError, AssertionError) as error:
        return Problem(scenario=scenario.name, reason=str(error) or type(error).__name__)
