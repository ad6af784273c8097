"""Simulated deployments for the rows, and the published measures of their records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt

from twofold.cost.models import ModelShape
from twofold.cost.pipeline import Pipeline
from twofold.cost.step import PrefillPart, StepTime
from twofold.metrics.record import RequestRecord
from twofold.plan.hardware import layout_of
from twofold.sim import Cluster
from twofold.sim.events import Kind
from twofold.sim.pools import Pool, WorkerPlan, parse_pools, plan_workers
from twofold.trace import Lengths, TraceRequest
from twofold.types import NS_PER_MS

NEVER: Final = float("inf")
BLOCK: Final = 16
NO_LATENCY: Final[Mapping[str, int]] = {
    "leg_latency_ns": 0,
    "peer_latency_ns": 0,
    "read_latency_ns": 0,
}
"""Published simulators know no network but the transfer's bytes."""


class Workers(msgspec.Struct, frozen=True, kw_only=True):
    """What one role's workers are: KV tokens, slots, tokens of a step, and step times.

    `step` is of all layers, which the stages of `pipeline` share out; `kv_tokens` are what all
    stages together hold, each token's KV being spread over them.
    """

    step: StepTime
    kv_tokens: int
    max_num_seqs: int = 1024
    budget: int = 8192
    prefix_caching: bool = False
    pipeline: Pipeline = Pipeline()


def simulate(
    pools: str,
    shape: ModelShape,
    workers: Workers | Mapping[str, Workers],
    requests: Iterable[TraceRequest],
    *,
    link_bytes_per_s: int = 300_000_000_000,
    block: int = BLOCK,
    handoff: str = "pull",
    router: Mapping[str, Any] | None = None,
    layer_groups: int = 4,
    latency: Mapping[str, int] = NO_LATENCY,
) -> list[RequestRecord]:
    """Run `pools` ("2P1D") of `workers`, by role where they differ; `router` are its settings."""
    cluster = Cluster(
        _plans(pools, shape, workers, block, handoff),
        link_bytes_per_s=link_bytes_per_s,
        router=router,
        layer_groups=layer_groups,
        **cast("dict[str, Any]", dict(latency)),
    )
    return cluster.run(requests)


def _plans(
    pools: str,
    shape: ModelShape,
    workers: Workers | Mapping[str, Workers],
    block: int = BLOCK,
    handoff: str = "pull",
) -> list[WorkerPlan]:
    layout = layout_of(shape, block, "float16")

    def of(pool: Pool) -> Workers:
        return workers if isinstance(workers, Workers) else workers[pool.role]

    def make(pool: Pool) -> tuple[dict[str, Any], StepTime]:
        own = of(pool)
        settings = {
            "layout": layout,
            "n_blocks": own.kv_tokens // block,
            "max_num_seqs": own.max_num_seqs,
            "max_num_batched_tokens": own.budget,
            "max_model_len": 2**31 - 1,
            "max_waiting": 10**6,
            "prefix_caching": own.prefix_caching,
            "handoff": handoff,
            "pipeline_stages": own.pipeline.stages,
        }
        return settings, own.step

    return plan_workers(parse_pools(pools), make, pipeline=lambda pool: of(pool).pipeline)


class ClosedLoop(Cluster):
    """One unsplit worker and clients that each ask again as soon as they are answered.

    The clients share one process, which takes `gap_ns` for each request that it sends.
    """

    def __init__(self, shape: ModelShape, workers: Workers, *, gap_ns: int = 0) -> None:
        super().__init__(_plans("1M", shape, workers), link_bytes_per_s=1)
        self._gap_ns = gap_ns
        self._more: Iterator[Lengths] = iter(())
        self._sent = 0
        self._free_ns = 0

    def serve(self, clients: int, lengths: Sequence[Lengths]) -> list[RequestRecord]:
        """Records of `lengths` in their order; the first `clients` of them come at once."""
        self._more = iter(lengths[clients:])
        self._sent = clients
        return self.run([_at(self._turn(0), found) for found in lengths[:clients]])

    def _turn(self, now_ns: int) -> int:
        sent_ns = max(now_ns, self._free_ns)
        self._free_ns = sent_ns + self._gap_ns
        return sent_ns

    def _keep(self, record: RequestRecord) -> None:
        super()._keep(record)
        found = next(self._more, None)
        if found is not None:
            now_ns = self._turn(record.end_ns)
            more: Iterator[TraceRequest] = iter(())
            request = _at(now_ns, found)
            self.events.at(now_ns, Kind.ARRIVAL, 0, self._arrive, self._sent, request, more)
            self._sent += 1


def _at(now_ns: int, found: Lengths) -> TraceRequest:
    return TraceRequest(now_ns, found.input_tokens, found.output_tokens)


class _Changed:
    """A model of step times whose steps with prompts another class changes."""

    def __init__(self, step: StepTime, how: str) -> None:
        self._step = step
        self.name = f"{step.name}, {how}"
        self.estimate = step.estimate

    def decode_run_ns(self, batch: int, context: int, k: int) -> int:
        """See StepTime."""
        return self._step.decode_run_ns(batch, context, k)

    def decode_steps_ns(self, batch: int, context: int, k: int) -> npt.NDArray[np.int64]:
        """See StepTime."""
        return self._step.decode_steps_ns(batch, context, k)

    def decode_steps_within(
        self, batch: int, context: int, budget_ns: int, most: int
    ) -> tuple[int, int]:
        """See StepTime."""
        return self._step.decode_steps_within(batch, context, budget_ns, most)


class InTurn(_Changed):
    """An engine that reads prompts and decodes in turn: a step of both takes the sum of two."""

    def __init__(self, step: StepTime) -> None:
        super().__init__(step, "prompts and decodes in turn")

    def step_ns(self, prefill: Sequence[PrefillPart], batch: int, context: int) -> int:
        """See StepTime."""
        together = self._step.step_ns(prefill, 0, 0) if prefill else 0
        return together + (self._step.step_ns((), batch, context) if batch else 0)


class WholePrompts(_Changed):
    """A prompt in chunks costs in all what it costs whole: a later chunk, what it adds to that.

    For engines that run a prompt above their limit in one step. No cached prefixes.
    """

    def __init__(self, step: StepTime) -> None:
        super().__init__(step, "chunks at the price of the whole prompt")
        self._known: dict[int, int] = {}

    def _whole_ns(self, tokens: int) -> int:
        if tokens not in self._known:
            self._known[tokens] = self._step.step_ns([(tokens, 0)], 0, 0)
        return self._known[tokens]

    def step_ns(self, prefill: Sequence[PrefillPart], batch: int, context: int) -> int:
        """See StepTime."""
        first = [part for part in prefill if part[1] == 0]
        ns = self._step.step_ns(first, batch, context) if first or batch else 0
        for new, before in prefill:
            if before:
                ns += max(self._whole_ns(before + new) - self._whole_ns(before), 0)
        return max(ns, 1) if prefill or batch else 0


class Times(NamedTuple):
    """A request as the source measures it, in ms; all NEVER when it did not finish."""

    ttft: float
    tpot: float
    e2e: float


def one_token_less(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Answers less the token that the source's prefill workers sample."""
    return [
        TraceRequest(r.arrival_ns, r.input_tokens, max(1, r.output_tokens - 1)) for r in requests
    ]


def at_prefill(record: RequestRecord) -> Times:
    """For sources whose first token leaves the prefill worker, on requests cut by
    `one_token_less`: TTFT ends with prefill, and every token here is one of TPOT's.
    """
    if record.outcome != "finished":
        return Times(NEVER, NEVER, NEVER)
    first = record.phases_ns.get("prefill_queue", 0) + record.phases_ns.get("prefill", 0)
    e2e = record.token_times_ns[-1] - record.arrival_ns
    return Times(
        first / NS_PER_MS,
        (e2e - first) / len(record.token_times_ns) / NS_PER_MS,
        e2e / NS_PER_MS,
    )


def at_client(record: RequestRecord) -> Times:
    """TTFT and TPOT as a client of an unsplit server sees them; TPOT 0 for one token."""
    if record.outcome != "finished":
        return Times(NEVER, NEVER, NEVER)
    return Times(
        (record.ttft_ns or 0) / NS_PER_MS,
        (record.tpot_ns or 0) / NS_PER_MS,
        record.e2e_ns / NS_PER_MS,
    )


def attainment(times: Sequence[Times], ttft_ms: float, tpot_ms: float) -> float:
    """Percent of requests within both goals."""
    return 100.0 * sum(t.ttft <= ttft_ms and t.tpot <= tpot_ms for t in times) / len(times)


def crossing(xs: Sequence[float], ys: Sequence[float], goal: float) -> float:
    """Where the line through the points first passes `goal`, as DistServe's notebook finds it.

    The last x where all are above, the first where none is.
    """
    for i in range(len(xs) - 1):
        if (ys[i] < goal) != (ys[i + 1] < goal):
            return xs[i] + (goal - ys[i]) * (xs[i + 1] - xs[i]) / (ys[i + 1] - ys[i])
    return xs[-1] if ys[-1] >= goal else xs[0]


def highest(holds: Callable[[float], bool], low: float, high: float, within: float) -> float:
    """The highest rate that holds, to `within` (a ratio), between `low` and `high`; 0 for none."""
    if not holds(low):
        return 0.0
    if holds(high):
        return high
    while high / low > within:
        middle = (low * high) ** 0.5
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
