"""A worker's metrics for Prometheus, under vLLM's names where they mean the same.

Gauges and counters are read off the core when they are scraped, so they cannot drift from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twofold.core.worker import WorkerCore
from twofold.messages import Ended, Phases
from twofold.types import NS_PER_S

_EDGES_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0),
)


class _CoreCollector(Collector):
    def __init__(self, core: WorkerCore, labels: dict[str, str]) -> None:
        self._core = core
        self._names = list(labels)
        self._values = list(labels.values())

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def collect(self) -> Iterable[Metric]:
        engine, pool = self._core.engine, self._core.pool
        source, reader = self._core.source.counts, self._core.reader
        counts = pool.counts()
        used = (counts.active + counts.held) / counts.total
        yield self._gauge("vllm:num_requests_running", "Requests in the batch.", engine.n_placed)
        yield self._gauge("vllm:num_requests_waiting", "Requests queued.", len(engine.waiting))
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use.", used)
        yield self._counter("vllm:num_preemptions", "Preemptions.", engine.n_preemptions)
        yield self._counter("vllm:nixl_bytes_transferred", "KV bytes read.", reader.n_bytes)
        yield self._counter(
            "vllm:nixl_num_failed_transfers", "KV handoffs that failed.", reader.n_failed
        )
        yield self._counter(
            "vllm:nixl_num_kv_expired_reqs", "Held KV whose lease ran out.", source.expired
        )
        family = GaugeMetricFamily(
            "twofold_kv_blocks", "KV blocks by state.", labels=[*self._names, "state"]
        )
        for state in ("free", "cached", "active", "held"):
            family.add_metric([*self._values, state], getattr(counts, state))
        yield family
        handed = CounterMetricFamily(
            "twofold_kv_handed_over",
            "Requests whose KV was held, by end.",
            labels=[*self._names, "outcome"],
        )
        for outcome in ("received", "released", "expired"):
            handed.add_metric([*self._values, outcome], getattr(source, outcome))
        yield handed


class WorkerMetrics:
    """Metrics of one worker; `labels` are the model's name and the worker's name and role."""

    def __init__(self, core: WorkerCore, labels: dict[str, str]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_CoreCollector(core, labels))
        names, values = list(labels), list(labels.values())

        def histogram(name: str, text: str) -> Callable[[float], None]:
            made = Histogram(name, text, names, buckets=_EDGES_S, registry=self._registry)
            return made.labels(*values).observe

        self._ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.")
        self._queue = histogram("vllm:request_queue_time_seconds", "Waiting for the first step.")
        self._prefill = histogram("vllm:request_prefill_time_seconds", "First step to first token.")
        self._transfer = histogram("vllm:nixl_xfer_time_seconds", "Reading KV from a peer.")
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to end.")

    def first_token(self, phases: Phases) -> None:
        """A request has its first token."""
        before = phases.peer_queue_ns + phases.peer_compute_ns + phases.handoff_wait_ns
        own = phases.transfer_ns + phases.queue_ns + phases.compute_ns
        self._ttft((before + own) / NS_PER_S)
        self._queue(phases.queue_ns / NS_PER_S)
        self._prefill(phases.compute_ns / NS_PER_S)
        if phases.n_bytes:
            self._transfer(phases.transfer_ns / NS_PER_S)

    def ended(self, effect: Ended, took_ns: int) -> None:
        """A request has ended after `took_ns`."""
        if effect.outcome == "finished":
            self._e2e(took_ns / NS_PER_S)

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self._registry)
