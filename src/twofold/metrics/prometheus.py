"""The gateway's metrics for Prometheus, in a registry of their own.

Labels are bounded: worker names, outcomes and phases; never a request id or a client's string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from twofold.metrics.ledger import PHASES, Ledger
from twofold.types import NS_PER_S

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
OUTCOMES: Final = ("finished", "failed", "refused", "cancelled")
RECOVERIES: Final = (
    *("retried", "recomputed", "moved"),
    *("exhausted", "over_budget", "no_place"),
)

_TTFT_EDGES_S: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_E2E_EDGES_S: Final = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_PHASE_EDGES_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1.0, 5.0, 20.0)


class GatewayMetrics:
    """Counters, gauges and histograms of one gateway."""

    def __init__(self, workers: Sequence[tuple[str, str]]) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self._received = Counter(
            "twofold_requests_received", "Requests that were valid and taken in.", registry=r
        )
        ended = Counter(
            "twofold_requests_ended", "Requests ended, by outcome.", ["outcome"], registry=r
        )
        self._ended = {name: ended.labels(name) for name in OUTCOMES}
        self._invalid = Counter(
            "twofold_requests_invalid", "Requests answered as invalid.", registry=r
        )
        self._in_flight = Gauge("twofold_requests_in_flight", "Requests under way.", registry=r)
        self._ttft = Histogram(
            "twofold_time_to_first_token_seconds",
            "From a request's arrival to the first byte of its answer.",
            buckets=_TTFT_EDGES_S,
            registry=r,
        )
        self._e2e = Histogram(
            "twofold_e2e_request_latency_seconds",
            "From a request's arrival to the end of its answer.",
            buckets=_E2E_EDGES_S,
            registry=r,
        )
        phase = Histogram(
            "twofold_phase_seconds",
            "Time to the first byte, by phase.",
            ["phase"],
            buckets=_PHASE_EDGES_S,
            registry=r,
        )
        self._phases = {name: phase.labels(name) for name in PHASES}
        self._transferred = Counter(
            "twofold_kv_transferred_bytes", "KV bytes handed over, as workers say.", registry=r
        )
        recoveries = Counter(
            "twofold_recoveries",
            "Legs that failed before an answer began, by what the failure policy made of it.",
            ["result"],
            registry=r,
        )
        self._recoveries = {name: recoveries.labels(name) for name in RECOVERIES}
        legs = Counter(
            "twofold_legs", "Legs sent to a worker.", ["worker", "role", "leg"], registry=r
        )
        up = Gauge("twofold_worker_up", "Whether a worker answers.", ["worker", "role"], registry=r)
        self._legs = {
            (name, leg): legs.labels(name, role, leg)
            for name, role in workers
            for leg in ("prefill", "decode")
        }
        self._up = {name: up.labels(name, role) for name, role in workers}

    def received(self) -> None:
        """A valid request came in."""
        self._received.inc()
        self._in_flight.inc()

    def invalid(self) -> None:
        """A request was answered as invalid."""
        self._invalid.inc()

    def recovered(self, result: str) -> None:
        """A leg failed before the answer began; `result` is one of `RECOVERIES`."""
        self._recoveries[result].inc()

    def leg_sent(self, worker: str, leg: str) -> None:
        """A leg was sent."""
        self._legs[worker, leg].inc()

    def worker_up(self, worker: str, up: bool) -> None:
        """A worker answers, or no longer does."""
        self._up[worker].set(1 if up else 0)

    def first_byte(self, ledger: Ledger, transferred_bytes: int) -> None:
        """An answer begins."""
        phases = ledger.as_ns()
        self._ttft.observe(sum(phases.values()) / NS_PER_S)
        for name, ns in phases.items():
            if ns:
                self._phases[name].observe(ns / NS_PER_S)
        if transferred_bytes:
            self._transferred.inc(transferred_bytes)

    def ended(self, outcome: str, e2e_ns: int) -> None:
        """A request ended; `outcome` is one of `OUTCOMES`."""
        self._ended[outcome].inc()
        self._in_flight.dec()
        self._e2e.observe(e2e_ns / NS_PER_S)

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)
