"""A published trace through split and unsplit workers of the same size."""

from __future__ import annotations

import pytest

from tests.sim.support import MS, audited, cluster
from tests.unit.published import published
from twofold.cost.step import LinearStep
from twofold.metrics.digest import digest
from twofold.metrics.slo import figures
from twofold.sim.prompts import Prompts
from twofold.trace import TraceRequest, head, length_scale, open_trace


@pytest.mark.parametrize("pools", ["1P1D", "2M"])
def test_the_azure_conversation_trace_runs_through(pools: str) -> None:
    path = published("traces/azure2023_conv.csv")
    requests = list(length_scale(head(open_trace(path), 200), 16))
    step = LinearStep(5 * MS, 100_000.0, 500_000.0, 100.0)
    records, made = audited(pools, requests, step=step)
    assert len(records) == 200
    assert {r.outcome for r in records} == {"finished"}
    assert [len(r.token_times_ns) for r in records] == [r.output_tokens for r in requests]
    assert all(sum(r.phases_ns.values()) == r.ttft_ns for r in records)
    shown = figures(records)
    assert 0 < shown.ttft_ms.p50 <= shown.ttft_ms.p99 < 1000
    # Watching changes nothing.
    assert digest(cluster(pools, step=step).run(requests)) == digest(records)
    assert (made.gateway.router.counts.remote == 200) == (pools == "1P1D")


def test_equal_hash_ids_are_equal_tokens() -> None:
    prompts = Prompts()
    a = prompts.tokens(TraceRequest(0, 10, 1, (5, 6, 7), 4))
    b = prompts.tokens(TraceRequest(0, 11, 1, (5, 6, 8), 4))
    assert (len(a), len(b)) == (10, 11)
    assert a[:8] == b[:8]
    assert not set(a[8:]) & set(b[8:])
    assert len(set(a)) == 10


def test_prompts_without_hash_ids_share_nothing() -> None:
    prompts = Prompts()
    made = [
        prompts.tokens(TraceRequest(0, 7, 1)),
        prompts.tokens(TraceRequest(0, 7, 1)),
        prompts.tokens(TraceRequest(0, 7, 1, (2**64 - 1,), 4)),
    ]
    assert [len(tokens) for tokens in made] == [7, 7, 7]
    assert len({token for tokens in made for token in tokens}) == 21
    assert all(-(2**63) <= token < 2**63 for tokens in made for token in tokens)
