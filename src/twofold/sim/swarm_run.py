"""Running one schedule with every invariant watched, and what came of it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from twofold.cost.step import LinearStep
from twofold.metrics.record import RequestRecord
from twofold.sim.audit import Audit
from twofold.sim.cluster import Cluster
from twofold.sim.faults import AS_SENT, Fate, Faults, ListedFaults, RecordedFaults
from twofold.sim.pools import plan_pools
from twofold.sim.swarm_schedule import QUIET_NS, TIME_LEFT_NS, Schedule
from twofold.types import NS_PER_MS, PROTOCOL_VERSION, KVLayout

_STEP: Final = LinearStep(2 * NS_PER_MS, 10_000.0, 50_000.0, 10.0)
_MOST_EVENTS: Final = 400_000


class Verdict(msgspec.Struct, kw_only=True):
    """What came of a run. `violation` is "" or the invariant that broke, in words.

    `fates` are those messages' that were not simply delivered, by name. `outcomes` counts ends,
    and what became of legs that failed.
    """

    n_requests: int
    n_events: int = 0
    violation: str = ""
    fates: dict[str, Fate] = {}
    outcomes: dict[str, int] = {}


class _Until:
    """Faults that stop at `end_ns`, to see whether all is well again."""

    def __init__(self, faults: Faults, now_ns: Callable[[], int], end_ns: int) -> None:
        self._faults = faults
        self._now_ns = now_ns
        self._end_ns = end_ns

    def fate(self, sequence: int, message: object) -> Fate:
        """See `Faults`."""
        if self._now_ns() >= self._end_ns:
            return AS_SENT
        return self._faults.fate(sequence, message)


def run(schedule: Schedule, full_every: int = 8) -> Verdict:
    """Run `schedule` to its end, or to the first violation.

    `full_every`: blocks are counted one by one after every so-manyth message only.
    """
    recorded = RecordedFaults(schedule.rates) if schedule.rates is not None else None
    faults: Faults = recorded if recorded is not None else ListedFaults(schedule.fates)
    audit = Audit(full_every)
    now: list[Cluster] = []
    cluster = _cluster(schedule, _Until(faults, lambda: now[0].events.now_ns, QUIET_NS), audit)
    now.append(cluster)
    verdict = Verdict(n_requests=len(schedule.requests) + 1)
    try:
        records = cluster.run(schedule.trace(), most_events=_MOST_EVENTS)
        audit.finish()
        _judge(records, verdict)
        if not schedule.loses_leases:
            _canary(cluster, records[-1])
    # Whatever a core raises is a finding; an AssertionError only the most likely one.
    except Exception as error:
        verdict.violation = _words(error)
    verdict.n_events = cluster.events.n_run
    verdict.fates = recorded.fates if recorded is not None else dict(schedule.fates)
    return verdict


def _words(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {last.name}: {error}".splitlines()[0]


def _cluster(schedule: Schedule, faults: Faults, audit: Audit) -> Cluster:
    layout = KVLayout(
        protocol=PROTOCOL_VERSION,
        engine="twofold",
        model_digest="00",
        tokenizer_digest="00",
        dtype="float16",
        block_size=schedule.block_size,
        layers=4,
        kv_heads=2,
        head_dim=8,
        rope="",
    )
    settings = {"layout": layout, "max_model_len": 4096, **schedule.settings}
    gone_ns = [asked.gone_ns for asked in schedule.requests] + [0]
    return Cluster(
        plan_pools(schedule.pools, {**settings, "handoff": schedule.mode}, _STEP),
        time_left_ns=TIME_LEFT_NS,
        gone_after_ns=lambda request_id: gone_ns[request_id],
        faults=faults,
        crashes=schedule.troubles,
        router=schedule.failures,
        observers=[audit],
        track_contents=True,
        link_bytes_per_s=schedule.network["link_bytes_per_s"],
        digest_ns=schedule.network["digest_ns"],
        layer_groups=schedule.network["layer_groups"],
    )


def _judge(records: Sequence[RequestRecord], verdict: Verdict) -> None:
    """What must hold of the records once all is over."""
    assert [record.request_id for record in records] == list(range(verdict.n_requests))
    for record in records:
        number, outcome = record.request_id, record.outcome
        assert record.e2e_ns <= TIME_LEFT_NS, f"request {number} outlived its deadline"
        assert all(ns <= record.end_ns for ns in record.token_times_ns)
        if outcome == "finished":
            got, wanted = len(record.token_times_ns), record.output_tokens
            assert got == wanted, f"request {number} has {got} tokens, not {wanted}"
        phases_ns, ttft_ns = sum(record.phases_ns.values()), record.ttft_ns or 0
        assert phases_ns == ttft_ns, f"request {number}: phases sum to {phases_ns}, not {ttft_ns}"
        for name in (outcome, *record.recoveries):
            verdict.outcomes[name] = verdict.outcomes.get(name, 0) + 1


def _canary(cluster: Cluster, record: RequestRecord) -> None:
    """Once faults have stopped and leases run out, whoever is alive serves again."""
    alive = {worker.role for worker in cluster.workers.values() if worker.core is not None}
    served = "mixed" in alive or {"prefill", "decode"} <= alive
    assert (record.outcome == "finished") == served, f"the canary failed: {record.reason}"
