"""Crossing alike decode steps at once gives what single steps give, to the digit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.support import MS, cluster, mixture
from tests.unit.published import published
from twofold.cost.readers import read_profile
from twofold.cost.step_profile import step_time
from twofold.metrics.digest import digest
from twofold.sim import Crash
from twofold.trace import head, length_scale, open_trace
from twofold.types import NS_PER_US


@settings(max_examples=200)
@given(
    pools=st.sampled_from(["1P1D", "2M", "1M", "2P2D", "1P2D", "1P1D1M"]),
    n=st.integers(5, 60),
    seed=st.integers(0, 1000),
    gap_ms=st.sampled_from([1, 3, 10, 50]),
    n_blocks=st.sampled_from([20, 40, 400]),
    max_num_seqs=st.sampled_from([2, 4, 16]),
    gone_ms=st.sampled_from([0, 0, 35, 200]),
    left_ms=st.sampled_from([0, 0, 500]),
    handoff=st.sampled_from(["pull", "push", "layerwise"]),
    chunk_policy=st.sampled_from(["fixed", "fixed", "capped", "tpot_goal"]),
    prepare_us=st.sampled_from([0, 0, 700, 4000]),
    share_nics=st.booleans(),
)
def test_same_digest(
    pools: str,
    n: int,
    seed: int,
    gap_ms: int,
    n_blocks: int,
    max_num_seqs: int,
    gone_ms: int,
    left_ms: int,
    handoff: str,
    chunk_policy: str,
    prepare_us: int,
    share_nics: bool,
) -> None:
    digests = []
    for singly in (True, False):
        made = cluster(
            pools,
            settings={
                "n_blocks": n_blocks,
                "max_num_seqs": max_num_seqs,
                "handoff": handoff,
                "min_layerwise_tokens": 30,
                "chunk_policy": chunk_policy,
                "chunk_cap_tokens": 24,
                # Steps of more than two sequences take longer by themselves.
                "chunk_goal_ns": 2 * MS + 150_000,
            },
            singly=singly,
            prepare_ns=prepare_us * NS_PER_US,
            share_nics=share_nics,
            gone_after_ns=lambda i: gone_ms * MS if i % 5 == 2 else 0,
            time_left_ns=left_ms * MS,
        )
        digests.append(digest(made.run(iter(mixture(n, seed, gap_ns=gap_ms * MS)))))
    assert digests[0] == digests[1]


def test_same_digest_with_deaths() -> None:
    digests, n_events = [], []
    for singly in (True, False):
        made = cluster(
            "2P2D",
            singly=singly,
            crashes=[
                Crash(worker="decode-1", at_ns=90 * MS, down_ns=50 * MS),
                Crash(worker="prefill-0", at_ns=110 * MS, down_ns=40 * MS),
            ],
            time_left_ns=3000 * MS,
        )
        records = made.run(iter(mixture(80, 5, gap_ns=3 * MS)))
        assert any(r.outcome == "failed" for r in records)
        digests.append(digest(records))
        n_events.append(made.events.n_run)
    assert digests[0] == digests[1]
    assert n_events[1] < n_events[0], "nothing was crossed at once"


@pytest.mark.parametrize("pools", ["1P1D", "2M"])
def test_same_digest_on_real_traces_and_a_measured_table(pools: str) -> None:
    azure = list(length_scale(head(open_trace(published("traces/azure2023_conv.csv")), 150), 4))
    mooncake = list(
        length_scale(
            head(open_trace(published("traces/mooncake_conversation_trace.jsonl")), 60), 32
        )
    )
    profile = read_profile(
        published("profiles/aiconfigurator_steps/Meta-Llama-3.1-8B__h100_sxm__vllm__tp1.csv")
    )
    for rows in (azure, mooncake):
        digests = [
            digest(
                cluster(
                    pools,
                    step=step_time(profile, extrapolate=True),
                    settings={"n_blocks": 2000, "max_model_len": 100_000},
                    singly=singly,
                ).run(iter(rows))
            )
            for singly in (True, False)
        ]
        assert digests[0] == digests[1]
