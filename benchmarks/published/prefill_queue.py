"""Mooncake's scheduling as a plain queue: prefill nodes that read one prompt after the other.

A reference of a few lines with none of the deployed cores in it. It tells what the difference in
mean TTFT comes from: with the table's times it waits as the simulator does, and with longer ones
as the paper does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from benchmarks.published.data import Data, mean
from benchmarks.published.mooncake import DRAM_TOKENS, SOURCE, prefill_step, requests_of
from benchmarks.published.rows import Row, close
from twofold.cost.step import StepTime
from twofold.policy.choice import mix
from twofold.trace import TraceRequest
from twofold.types import NS_PER_S

NODES: Final = 8
CHUNK: Final = 8192
HASHED: Final = 512
FITTED: Final = {"random": 1.45, "load balancing": 1.55, "local cache": 1.75}
"""Times as long as the table's, each fitted to its row to 0.05."""


class Queue:
    """NODES queues with a prefix cache each; prompts take `slower` times the table's."""

    def __init__(self, step: StepTime, slower: float) -> None:
        self._step = step
        self._slower = slower
        self._known: dict[tuple[int, int], float] = {}

    def ttft_s(self, requests: Sequence[TraceRequest], policy: str) -> float:
        """The mean time to the end of prefill."""
        free = [0.0] * NODES
        caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(NODES)]
        took = []
        for number, request in enumerate(requests):
            now = request.arrival_ns / NS_PER_S
            ends = [max(at - now, 0.0) for at in free]
            hits = [_hits(cache, request) for cache in caches]
            if policy == "random":
                node = mix(0, number) % NODES
            elif policy == "load balancing":
                node = ends.index(min(ends))
            else:
                cost = [
                    wait + self._read_s(request, hit) for wait, hit in zip(ends, hits, strict=True)
                ]
                node = cost.index(min(cost))
            took.append(ends[node] + self._read_s(request, hits[node]))
            free[node] = now + took[-1]
            _remember(caches[node], request)
        return mean(took)

    def _read_s(self, request: TraceRequest, cached: int) -> float:
        seconds = 0.0
        while cached < request.input_tokens:
            new = min(request.input_tokens - cached, CHUNK)
            # Rounded so that few steps are looked up: 128 new tokens, 1,024 of context.
            seconds += self._chunk_s(-(-new // 128) * 128, cached // 1024 * 1024)
            cached += new
        return seconds * self._slower

    def _chunk_s(self, new: int, before: int) -> float:
        key = (new, before)
        if key not in self._known:
            self._known[key] = self._step.step_ns([key], 0, 0) / NS_PER_S
        return self._known[key]


def _hits(cache: OrderedDict[int, None], request: TraceRequest) -> int:
    n = 0
    for block in (request.hash_ids or ())[: request.input_tokens // HASHED]:
        if block not in cache:
            break
        n += 1
    return min(n * HASHED, request.input_tokens - 1)


def _remember(cache: OrderedDict[int, None], request: TraceRequest) -> None:
    for block in request.hash_ids or ():
        cache[block] = None
        cache.move_to_end(block)
    while len(cache) > DRAM_TOKENS // HASHED:
        cache.popitem(last=False)


def queue_rows(data: Data) -> list[Row]:
    """Mean TTFT by prefill choice, with prefill slower than the table by a fitted factor."""
    told = data.paper("mooncake")["scheduling_avg_ttft_s"]
    keys = ("random", "load_balancing", "local_cache_aware")
    requests = requests_of(data, "conversation")
    step = prefill_step(data)
    rows = []
    for key, (policy, slower) in zip(keys, FITTED.items(), strict=True):
        asis = Queue(step, 1.0).ttft_s(requests, policy)
        rows.append(
            close(
                SOURCE,
                f"mean TTFT as a plain queue, {policy}, prefill {slower:g} times as long",
                told[key],
                Queue(step, slower).ttft_s(requests, policy),
                unit="s",
                conditions=(
                    f"{NODES} nodes that read one prompt after the other in chunks of {CHUNK:,} "
                    f"(prefill_queue.py, no cores), the same table, trace and caches as the rows "
                    f"above; the factor {slower:g} is fitted to this row; with the table's own "
                    f"times {asis:.2f} s"
                ),
            )
        )
    return rows
