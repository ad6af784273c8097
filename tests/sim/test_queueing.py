"""Queueing theory: where the model reduces to M/D/1 or M/M/k, its waits are the formulas'.

A mean wait within 2 % takes many more requests than a test can simulate, as waits of neighbours are
alike. So the simulator is shown to follow the recursion that defines the queue (Lindley's, and that
of Kiefer and Wolfowitz for k servers) to the nanosecond over some thousand requests, and the same
recursion, with the same seeds, to have the formula's mean over many.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import islice

import pytest

from tests.sim.support import LEG, MS, cluster
from twofold.cost.step import LinearStep
from twofold.trace import Lengths, TraceRequest, poisson
from twofold.trace.hashing import exponential
from twofold.types import NS_PER_S

STEP_NS = MS
SERVICE_STEPS = 400


def waits(requests: Iterator[TraceRequest], servers: int, step_ns: int) -> Iterator[int]:
    """How long each request waits for the first of `servers` that is free, in order of arrival.

    One that comes while others are served joins their next step, though a server is free.
    """
    free = [0] * servers
    last = 0
    for request in requests:
        start_ns = max(request.arrival_ns, free[0])
        if start_ns == request.arrival_ns < last:
            start_ns += step_ns
        last = max(last, start_ns + request.output_tokens * step_ns)
        heapq.heapreplace(free, start_ns + request.output_tokens * step_ns)
        yield start_ns - request.arrival_ns


def memoryless(load: float, servers: int, seed: int) -> Iterator[TraceRequest]:
    """Poisson arrivals with answers of exponential length, both rounded up to whole steps.

    On one grid of steps no request waits for more than the next one, a 400th of the service.
    """
    now = 0
    index = 0
    while True:
        now += math.ceil(exponential(seed, 2 * index) * SERVICE_STEPS / load / servers)
        tokens = math.ceil(exponential(seed, 2 * index + 1) * SERVICE_STEPS)
        yield TraceRequest(now * STEP_NS, 1, max(1, tokens))
        index += 1


def simulated_waits(requests: list[TraceRequest], servers: int, step_ns: int) -> list[int]:
    """From arriving at the worker to the first step, of one mixed worker with `servers` slots."""
    records = cluster(
        "1M",
        step=LinearStep(step_ns, 0.0),
        settings={
            "max_num_seqs": servers,
            "prefix_caching": False,
            "max_waiting": len(requests),
            "n_blocks": 100_000,
            "max_model_len": 1 << 30,
        },
    ).run(requests)
    assert {record.outcome for record in records} == {"finished"}
    for record, request in zip(records, requests, strict=True):
        assert record.token_times_ns[-1] - record.token_times_ns[0] == (
            (request.output_tokens - 1) * step_ns
        )
    return [record.token_times_ns[0] - record.arrival_ns - step_ns - 2 * LEG for record in records]


def erlang_c(servers: int, load: float) -> float:
    """The share of requests that wait."""
    offered = servers * load
    terms = [offered**i / math.factorial(i) for i in range(servers)]
    last = offered**servers / math.factorial(servers) / (1 - load)
    return last / (sum(terms) + last)


@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (2, 0.6), (6, 0.7)])
def test_k_slots_with_exponential_answers_wait_as_m_m_k_does(servers: int, load: float) -> None:
    """M/M/k: mean wait = C(k, k rho) / (k mu - lambda), with Erlang's C."""
    requests = list(islice(memoryless(load, servers, seed=servers), 4000))
    expected = list(waits(iter(requests), servers, STEP_NS))
    assert simulated_waits(requests, servers, STEP_NS) == expected
    n = 400_000
    many = waits(memoryless(load, servers, seed=servers), servers, STEP_NS)
    mean_ns = sum(islice(many, n)) / n
    service_ns = SERVICE_STEPS * STEP_NS
    theory_ns = erlang_c(servers, load) * service_ns / (servers * (1 - load))
    assert mean_ns == pytest.approx(theory_ns, rel=0.02)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_slot_with_equal_answers_waits_as_m_d_1_does(load: float) -> None:
    """M/D/1: mean wait = rho D / 2 (1 - rho), also where the answer takes one step alone."""
    service_ns = 10 * MS
    n = 300_000

    def requests() -> Iterator[TraceRequest]:
        return poisson((Lengths(2, 1) for _ in range(n)), load * NS_PER_S / service_ns, seed=2)

    some = list(islice(requests(), 4000))
    expected = list(islice(waits(requests(), 1, service_ns), len(some)))
    assert simulated_waits(some, 1, service_ns) == expected
    theory_ns = load * service_ns / (2 * (1 - load))
    assert sum(waits(requests(), 1, service_ns)) / n == pytest.approx(theory_ns, rel=0.02)
