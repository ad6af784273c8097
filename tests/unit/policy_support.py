"""Hypothesis strategies of what policies look at."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from twofold.policy.lengths import N_BUCKETS
from twofold.policy.views import DecodeView, Incoming, PrefillView, SplitView, WholeView

NAMES = ("a", "b", "c", "d")
MS = 1_000_000
FEW = settings(max_examples=50)

counts = st.integers(0, 40)
tokens = st.integers(0, 50_000)
rates = st.sampled_from([500, 4_000, 10_000, 77_777])

incomings = st.builds(
    Incoming,
    number=st.integers(0, 2**40),
    seed=st.integers(0, 9),
    prompt_tokens=tokens,
    need_blocks=st.integers(0, 20),
    predicted_tokens=st.integers(0, 4_000),
)


def prefill_view(name: str) -> st.SearchStrategy[PrefillView]:
    return st.builds(
        PrefillView,
        name=st.just(name),
        up=st.booleans(),
        requests=counts,
        queued_tokens=tokens,
        uncached_tokens=tokens,
        tokens_per_s=rates,
        transfer_ns=st.integers(0, 500 * MS),
        budget_tokens=st.sampled_from([0, 0, 20_000, 60_000]),
        kept_keys=counts,
    )


def decode_view(name: str) -> st.SearchStrategy[DecodeView]:
    return st.builds(
        DecodeView,
        name=st.just(name),
        up=st.booleans(),
        sequences=counts,
        tokens=tokens,
        output_left=tokens,
        used_blocks=st.integers(0, 100),
        total_blocks=st.sampled_from([0, 50, 100]),
        slots=st.sampled_from([0, 8, 32]),
        tpot_ns=st.integers(0, 90 * MS),
        tpot_rise_ns=st.integers(0, 3 * MS),
        by_length=st.tuples(*[counts] * N_BUCKETS),
    )


def whole_view(name: str) -> st.SearchStrategy[WholeView]:
    return st.builds(
        WholeView,
        name=st.just(name),
        home=st.sampled_from(["prefill", "decode", "mixed"]),
        up=st.booleans(),
        queued_tokens=tokens,
        uncached_tokens=tokens,
        tokens_per_s=rates,
        sequences=counts,
        tokens=tokens,
        requests=counts,
        used_blocks=st.integers(0, 100),
        total_blocks=st.sampled_from([0, 50, 100]),
        slots=st.sampled_from([0, 8, 32]),
    )


prefill_views = st.tuples(*[prefill_view(name) for name in NAMES])
decode_views = st.tuples(*[decode_view(name) for name in NAMES])
whole_views = st.tuples(*[whole_view(name) for name in NAMES])
split_views = st.builds(
    SplitView,
    incoming=incomings,
    remote=st.none() | prefill_view("p").map(lambda view: view._replace(up=True)),
    whole=whole_views,
    local_below_tokens=tokens,
    mixed_above_tokens=tokens,
)
