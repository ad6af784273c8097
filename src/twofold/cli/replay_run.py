"""One run as a report has it: what a process of a sweep does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from twofold.cost.errors import CostError
from twofold.metrics.record import RequestRecord
from twofold.metrics.slo import figures
from twofold.plan.runner import Problem, SetupError, machines_of, simulate_counting, slots_held
from twofold.plan.scenario import Scenario
from twofold.report.chrome import save_chrome_trace
from twofold.report.queues import QueueRecorder, Queues
from twofold.report.results import Goal, Header, Interval, Run, Setting, run_of
from twofold.sim.pools import PoolsError, pools_name
from twofold.trace import TraceError

_NS_PER_POINT = 10_000_000


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario and how its run is to be shown. `chrome` names a file for its events."""

    scenario: Scenario
    goal: Goal | None
    settings: dict[str, Setting]
    queues: bool = False
    label: str = ""
    goodput_per_gpu: Interval | None = None
    chrome: str = ""
    header: Header | None = None


def work(job: Job) -> Run | Problem:
    """Simulate it; a run, or why there is none."""
    try:
        return _run(job)
    except (SetupError, CostError, TraceError, PoolsError, ValueError, AssertionError) as error:
        return lost(job, str(error) or type(error).__name__)


def lost(job: Job, reason: str) -> Run | Problem:
    """The answer for a job that ended without one."""
    return Problem(scenario=job.scenario.name, reason=reason)


def _run(job: Job) -> Run:
    scenario = job.scenario
    records, n_faults = simulate_counting(scenario)
    if job.chrome:
        save_chrome_trace(job.chrome, records, job.header)
    more: dict[str, Any] = {}
    if job.goodput_per_gpu is not None:
        more["goodput_per_gpu"] = job.goodput_per_gpu
    slots, peak = slots_held(scenario, records)
    return run_of(
        figures(records, scenario.slo),
        records,
        pools=pools_name(scenario.pools),
        rate_scale=scenario.rate_scale,
        goal=job.goal,
        gpus=scenario.gpus,
        label=job.label,
        handoff=scenario.engine.handoff if scenario.split else "",
        policy=",".join(f"{kind}={name}" for kind, name in scenario.policies),
        settings=job.settings,
        cost_per_hour=_total([m.usd_per_hour for m in machines_of(scenario)], scenario),
        power_w=_total([m.power_w for m in machines_of(scenario)], scenario),
        slots=slots,
        slots_peak=peak,
        faults=None if scenario.faults is None else n_faults,
        queues=queues_of(scenario, records) if job.queues else None,
        **more,
    )


def _total(each: Sequence[float | None], scenario: Scenario) -> float | None:
    """Over all workers, None where one is not known."""
    known = [value for value in each if value is not None]
    if len(known) < len(each):
        return None
    return sum(pool.count * value for pool, value in zip(scenario.pools, known, strict=True))


def queues_of(scenario: Scenario, records: Sequence[RequestRecord]) -> Queues:
    """How many requests waited and ran on each worker over time, from where their time went.

    A request with a first token waits on the worker that reads its prompt, runs there, waits for
    its place where it is decoded, and runs there to its end. Blocks are those that it fills by
    then. Requests without one are in no worker's figures.
    """
    names = [
        f"{role}-{i}"
        for role in ("prefill", "decode", "mixed")
        for i in range(sum(p.count for p in scenario.pools if p.role == role))
    ]
    number = {name: i for i, name in enumerate(names)}
    changes: list[tuple[int, int, int, int, int]] = []
    for record in records:
        if record.phases_ns:
            changes += _changes(record, number, scenario.engine.block_size)
    depths = [[0, 0, 0] for _ in names]
    recorder = QueueRecorder(names, span_ns=_NS_PER_POINT)
    for at_ns, worker, waiting, running, blocks in sorted(changes):
        depth = depths[worker]
        depth[0] += waiting
        depth[1] += running
        depth[2] += blocks
        recorder.note(at_ns, worker, max(depth[0], 0), max(depth[1], 0), max(depth[2], 0))
    return recorder.done()


def _changes(
    record: RequestRecord, number: dict[str, int], block_size: int
) -> list[tuple[int, int, int, int, int]]:
    """(time, worker, change in waiting, in running, in blocks) over a request's life."""
    phases = record.phases_ns
    decode = number[record.decode]
    first = number[record.prefill] if record.prefill else decode
    read = -(-record.input_tokens // block_size)
    whole = -(-(record.input_tokens + record.output_tokens) // block_size)
    arrived = record.arrival_ns + phases.get("queue", 0) + phases.get("tokenise", 0)
    arrived += phases.get("recovery", 0)
    begun = arrived + phases.get("prefill_queue", 0)
    done = begun + phases.get("prefill", 0)
    placed = record.token_times_ns[0] - phases.get("transfer", 0) - phases.get("first_step", 0)
    if first == decode and not record.prefill:
        return [
            (arrived, first, 1, 0, 0),
            (begun, first, -1, 1, whole),
            (record.end_ns, first, 0, -1, -whole),
        ]
    placed = max(placed, done)
    return [
        (arrived, first, 1, 0, 0),
        (begun, first, -1, 1, read),
        (done, first, 0, -1, 0),
        (done, decode, 1, 0, 0),
        (placed, decode, -1, 1, whole),
        (placed, first, 0, 0, -read),
        (record.end_ns, decode, 0, -1, -whole),
    ]
