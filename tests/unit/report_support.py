"""A believable sweep, made by hand: every set-up has a rate from which it falls behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from twofold.metrics.record import RequestRecord
from twofold.metrics.slo import figures
from twofold.report.queues import Queues, queue_over_time
from twofold.report.results import Goal, Header, Replay, Run, header_of, replay_of, run_of

MS: Final = 1_000_000
GOAL: Final = Goal(ttft_ms=500, tpot_ms=40, attainment=0.9)
RATES: Final = (1.0, 2.0, 3.0, 4.0)
SETUPS: Final = (("1P3D", 1.2), ("2P2D", 3.1), ("3P1D", 2.4), ("4M", 2.1))
HEADER: Final[Header] = header_of(
    trace_sha256="a1" * 32, profile_sha256="b2" * 32, config={"pools": "2P2D"}, seed=7
)


def record(i: int, rate: float, capacity: float, pools: str) -> RequestRecord:
    """Request `i` of a run: the later, the longer it waits once the rate is above capacity."""
    arrival = round(i * 100 * MS / rate)
    wait = round(max(0.0, rate / capacity - 1) * 60 * MS * i) + 5 * MS
    phases = {"queue": MS, "prefill_queue": wait, "prefill": (40 + i % 7) * MS, "relay": 2 * MS}
    split = "P" in pools
    if split:
        phases |= {"handoff_wait": 2 * MS, "transfer": 6 * MS, "first_step": 9 * MS}
    first = arrival + sum(phases.values())
    times = [first + k * (20 + i % 5) * MS for k in range(2 + i % 6)]
    lost = rate > 3 and i % 10 == 9
    return RequestRecord(
        request_id=i,
        arrival_ns=arrival,
        end_ns=arrival + 50 * MS if lost else times[-1] + MS,
        input_tokens=100 + 300 * (i % 9),
        output_tokens=2 + i % 6,
        outcome="refused" if lost else "finished",
        reason="queue_full" if lost else "",
        token_times_ns=() if lost else times,
        phases_ns={} if lost else phases,
        prefill="" if lost or not split else f"prefill-{i % 2}",
        decode="" if lost else f"decode-{i % 2}" if split else f"mixed-{i % 4}",
        n_bytes=4096 if split else 0,
    )


def records(rate: float = 2.0, capacity: float = 3.1, pools: str = "2P2D") -> list[RequestRecord]:
    """The forty requests of a run."""
    return [record(i, rate, capacity, pools) for i in range(40)]


def queues(pools: str = "2P2D") -> Queues:
    """Queues that grow and empty again."""
    roles = ("prefill", "decode") if "P" in pools else ("mixed",)
    workers = [f"{role}-{i}" for role in roles for i in range(2)]
    samples = [
        (t * 10 * MS, {w: (min(t, 60 - t) + k, t % 5, t * 3) for k, w in enumerate(workers)})
        for t in range(60)
    ]
    return queue_over_time(samples, workers)


def run(pools: str = "2P2D", rate: float = 2.0, capacity: float = 3.1, **changes: Any) -> Run:
    """One run, from its records as a command makes it."""
    found = records(rate, capacity, pools)
    fields: dict[str, Any] = {"gpus": 4, "queues": queues(pools)}
    fields["handoff"] = "pull" if "P" in pools else ""
    return run_of(
        figures(found, GOAL.slo()),
        found,
        pools=pools,
        rate_scale=rate,
        goal=GOAL,
        **{**fields, **changes},
    )


def sweep(rates: Sequence[float] = RATES) -> Replay:
    """All set-ups at all rates."""
    runs = [run(pools, rate, capacity) for pools, capacity in SETUPS for rate in rates]
    return replay_of(HEADER, runs, GOAL)
