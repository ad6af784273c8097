"""Simulated times against times worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.sim.support import (
    BLOCK,
    BYTES_PER_S,
    LAYOUT,
    LEG,
    MS,
    PEER,
    READ,
    STEP,
    audited,
    cluster,
    mixture,
    one,
)
from twofold.cost.step import LinearStep
from twofold.metrics.record import RequestRecord
from twofold.metrics.slo import figures
from twofold.sim.events import Events
from twofold.sim.link import Lane
from twofold.trace import Lengths, TraceRequest, poisson
from twofold.types import NS_PER_S, ceil_div

LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK, 3 * BLOCK + 5, 200)


def prompt_ns(n: int, context: int = 0) -> int:
    """A step that reads `n` tokens of one prompt: one token costs what a decode row does."""
    return STEP.step_ns([(n, context)], 0, 0) if n > 1 else STEP.step_ns([], 1, context + 1)


@pytest.mark.parametrize("n", LENGTHS)
def test_one_request_alone_on_a_mixed_worker(n: int) -> None:
    records, _ = audited("1M", [one(n)])
    record = records[0]
    assert record.ttft_ns == 2 * LEG + prompt_ns(n)
    gaps = [b - a for a, b in pairwise(record.token_times_ns)]
    assert gaps == [STEP.step_ns([], 1, n + 1), STEP.step_ns([], 1, n + 2)]
    assert record.e2e_ns == record.ttft_ns + sum(gaps)
    assert record.tpot_ns == sum(gaps) // 2
    assert (record.prefill, record.decode, record.n_bytes) == ("", "mixed-0", 0)


@pytest.mark.parametrize("n", LENGTHS)
def test_one_request_alone_over_two_pools(n: int) -> None:
    """Two legs there and back, claim and grant, the read, done and closed, the last token."""
    records, _ = audited("1P1D", [one(n)])
    record = records[0]
    n_bytes = ceil_div(n - 1, BLOCK) * LAYOUT.block_bytes
    read_ns = READ + ceil_div(n_bytes * NS_PER_S, BYTES_PER_S) + 2 * PEER if n_bytes else 0
    first_ns = STEP.step_ns([], 1, n)
    assert record.ttft_ns == 4 * LEG + prompt_ns(n) + 2 * PEER + read_ns + first_ns
    assert {k: v for k, v in record.phases_ns.items() if v} == {
        "prefill": prompt_ns(n),
        "handoff_wait": 2 * PEER,
        **({"transfer": read_ns} if read_ns else {}),
        "first_step": first_ns,
        "relay": 4 * LEG,
    }
    assert (record.prefill, record.decode) == ("prefill-0", "decode-0")
    assert record.n_bytes == n_bytes


@pytest.mark.parametrize(("pools", "n_legs"), [("1M", 1), ("2M", 1), ("1P1D", 2), ("2P2D", 2)])
def test_phases_of_each_request_sum_to_its_ttft(pools: str, n_legs: int) -> None:
    records, _ = audited(pools, mixture(80, 3, gap_ns=MS))
    for record in records:
        assert record.outcome == "finished"
        assert sum(record.phases_ns.values()) == record.ttft_ns
        # What is left over is the network's and nothing else: the workers explain the rest.
        assert record.phases_ns["relay"] == 2 * LEG * n_legs
        assert record.phases_ns["unattributed"] == 0
    assert any(record.phases_ns["prefill_queue"] for record in records)


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_k_transfers_at_a_time_take_k_times_as_long(k: int) -> None:
    # The first occupies prefill, so that the others are read in one step and end together.
    requests = [one(40), *(one(40, at_ns=MS) for _ in range(k))]
    records, _ = audited("1P1D", requests, settings={"max_num_batched_tokens": 40 * k})
    alone_ns = 3 * LAYOUT.block_bytes * NS_PER_S // BYTES_PER_S
    waits = [r.phases_ns["transfer"] - READ - 2 * PEER for r in records]
    assert waits == [alone_ns] + [k * alone_ns] * k


def test_transfers_of_different_pairs_do_not_share() -> None:
    requests = [one(40), one(40)]
    records, _ = audited("2P2D", requests)
    alone, _ = audited("1P1D", requests[:1])
    assert len({(r.prefill, r.decode) for r in records}) == 2
    assert [r.phases_ns["transfer"] for r in records] == [alone[0].phases_ns["transfer"]] * 2


def test_a_lane_speeds_up_when_a_transfer_leaves() -> None:
    events = Events()
    lane = Lane(events, NS_PER_S)  # 1 byte per ns
    ends: list[tuple[str, int]] = []
    lane.start(100, lambda: ends.append(("a", events.now_ns)))
    stopped = lane.start(1000, lambda: ends.append(("b", events.now_ns)))
    events.at(50, 1, 0, lambda: lane.start(10, lambda: ends.append(("c", events.now_ns))))  # type: ignore[arg-type]
    events.at(110, 1, 0, lambda: lane.stop(stopped))
    events.run()
    # To 50: a has 25. Three share to 80: c has its 10, a 35. Two to 110: a has 50; alone to 160.
    assert ends == [("c", 80), ("a", 160)]


def test_a_smaller_decode_pool_brings_queueing() -> None:
    requests = mixture(60, 5, gap_ns=MS)
    roomy, _ = audited("1P1D", requests)
    tight, _ = audited("1P1D", requests, by_role={"decode": {"n_blocks": 8}})

    def waited(records: list[RequestRecord]) -> int:
        return sum(r.phases_ns["handoff_wait"] + r.phases_ns["decode_queue"] for r in records)

    assert {r.outcome for r in tight} == {"finished"}
    assert waited(tight) > 5 * waited(roomy)
    assert figures(tight).ttft_ms.p99 > figures(roomy).ttft_ms.p99


@pytest.mark.parametrize("pools", ["1M", "1P1D"])
def test_a_shared_prefix_shortens_the_second_prefill(pools: str) -> None:
    first = TraceRequest(0, 70, 2, (7, 8, 9, 10, 11), BLOCK)
    second = TraceRequest(100 * MS, 66, 2, (7, 8, 9, 20, 21), BLOCK)
    records, _ = audited(pools, [first, second])
    assert [r.n_cached for r in records] == [0, 3 * BLOCK]
    assert records[0].phases_ns["prefill"] == prompt_ns(70)
    assert records[1].phases_ns["prefill"] == prompt_ns(66 - 3 * BLOCK, 3 * BLOCK)
    # The decode worker has the shared blocks too: only the others move.
    blocks = 0 if pools == "1M" else ceil_div(65, BLOCK) - 3
    assert records[1].n_bytes == blocks * LAYOUT.block_bytes


def test_one_server_with_deterministic_service_waits_as_theory_says() -> None:
    """M/D/1: mean wait = rho D / 2 (1 - rho).

    Waits are correlated, so a mean within 1 % takes 400,000 of them. The simulator is shown to
    follow Lindley's recursion to the nanosecond, and the recursion to have the right mean.
    """
    service_ns, rho, n, n_simulated = 10 * MS, 0.5, 400_000, 15_000
    lengths = (Lengths(2, 1) for _ in range(n))
    requests = list(poisson(lengths, rho * NS_PER_S / service_ns, seed=1))
    waits = [0]
    for before, after in pairwise(requests):
        gap_ns = after.arrival_ns - before.arrival_ns
        waits.append(max(0, waits[-1] + service_ns - gap_ns))
    records = cluster(
        "1M",
        step=LinearStep(service_ns, 0.0),
        settings={"max_num_seqs": 1, "prefix_caching": False, "max_waiting": n},
    ).run(requests[:n_simulated])
    assert [r.phases_ns["prefill_queue"] for r in records] == waits[:n_simulated]
    theory_ns = rho * service_ns / (2 * (1 - rho))
    assert sum(waits) / n == pytest.approx(theory_ns, rel=0.01)
