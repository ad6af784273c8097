"""Decode policies and buckets of predicted length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.policy_support import FEW, MS, decode_views, incomings
from twofold.policy.decode import DECODE_CHOICES
from twofold.policy.lengths import EDGES_TOKENS, N_BUCKETS, bucket, reserve_tokens
from twofold.policy.views import DecodeView, Incoming, has_room

ALL = sorted(DECODE_CHOICES)
ROOMY = [name for name in ALL if name != "least_requests"]


def choose(policy: str, *views: DecodeView, need: int = 0, predicted: int = 0) -> str:
    incoming = Incoming(0, need_blocks=need, predicted_tokens=predicted)
    return DECODE_CHOICES[policy](views, incoming).worker


@pytest.mark.parametrize("policy", ALL)
@FEW
@given(views=decode_views, incoming=incomings, order=st.permutations(range(4)))
def test_takes_a_worker_that_is_up_whatever_their_order(
    policy: str, views: tuple[DecodeView, ...], incoming: Incoming, order: list[int]
) -> None:
    choice = DECODE_CHOICES[policy](views, incoming)
    names = [view.name for view in views if view.up]
    assert choice.worker in names if names else choice.worker == ""
    assert DECODE_CHOICES[policy]([views[i] for i in order], incoming).worker == choice.worker


@pytest.mark.parametrize("policy", ROOMY)
@FEW
@given(views=decode_views, incoming=incomings)
def test_room_comes_first(policy: str, views: tuple[DecodeView, ...], incoming: Incoming) -> None:
    roomy = [v.name for v in views if v.up and has_room(v, incoming.need_blocks)]
    chosen = DECODE_CHOICES[policy](views, incoming).worker
    assert not roomy or chosen in roomy


@pytest.mark.parametrize("policy", ALL)
@FEW
@given(views=decode_views, incoming=incomings, which=st.integers(0, 3), by=st.integers(0, 60))
def test_more_load_never_makes_a_worker_more_attractive(
    policy: str, views: tuple[DecodeView, ...], incoming: Incoming, which: int, by: int
) -> None:
    before = DECODE_CHOICES[policy](views, incoming).worker
    view = views[which]
    more = view._replace(
        sequences=view.sequences + by,
        tokens=view.tokens + 100 * by,
        output_left=view.output_left + 50 * by,
        used_blocks=view.used_blocks + 2 * by,
        tpot_ns=view.tpot_ns + by * view.tpot_rise_ns,
        by_length=tuple([n + by for n in view.by_length]),
    )
    loaded = [*views[:which], more, *views[which + 1 :]]
    # Where it leaves the others as the only ones with room, one of them was with room before.
    if before != view.name and has_room(view, 0) == has_room(more, 0):
        assert DECODE_CHOICES[policy](loaded, incoming).worker != view.name


@pytest.mark.parametrize("policy", ALL)
def test_equals_go_by_name(policy: str) -> None:
    assert choose(policy, *[DecodeView(name, sequences=3, slots=8) for name in "cab"]) == "a"


def test_least_requests_counts_sequences_then_tokens() -> None:
    assert choose("least_requests", DecodeView("a", sequences=2), DecodeView("b", tokens=9)) == "b"
    assert choose("least_requests", DecodeView("a", tokens=9), DecodeView("b", tokens=8)) == "b"


def test_active_sequences_fills_workers_in_proportion_to_their_slots() -> None:
    big = DecodeView("a", sequences=8, slots=32)
    small = DecodeView("b", sequences=3, slots=8)
    assert choose("active_sequences", big, small) == "a"
    assert choose("least_requests", big, small) == "b"
    full = DecodeView("a", sequences=32, slots=32)
    assert choose("active_sequences", full, DecodeView("b", sequences=7, slots=8)) == "b"


def test_free_blocks_looks_at_memory_not_at_sequences() -> None:
    few_long = DecodeView("a", sequences=2, used_blocks=90, total_blocks=100)
    many_short = DecodeView("b", sequences=9, used_blocks=30, total_blocks=100)
    assert choose("free_blocks", few_long, many_short) == "b"
    assert choose("least_requests", few_long, many_short) == "a"
    larger = DecodeView("c", sequences=9, used_blocks=900, total_blocks=1000)
    assert choose("free_blocks", many_short, larger) == "c"


def test_projected_tpot_counts_what_this_sequence_adds() -> None:
    steady = DecodeView("a", sequences=30, tpot_ns=21 * MS, tpot_rise_ns=MS // 10)
    steep = DecodeView("b", sequences=2, tpot_ns=20 * MS, tpot_rise_ns=3 * MS)
    assert choose("projected_tpot", steady, steep) == "a"
    assert choose("projected_tpot", DecodeView("a", sequences=4), DecodeView("b")) == "b"


def test_room_decides_before_the_score() -> None:
    idle_but_full = DecodeView("a", used_blocks=95, total_blocks=100)
    busy = DecodeView("b", sequences=20, used_blocks=60, total_blocks=100, tpot_ns=MS)
    for policy in ROOMY:
        assert choose(policy, idle_but_full, busy, need=10) == "b"
    assert choose("least_requests", idle_but_full, busy, need=10) == "a"
    assert choose("projected_tpot", idle_but_full, busy, need=60) == "a"


def test_length_buckets_spread_each_length_alone() -> None:
    heavy = DecodeView("a", sequences=3, by_length=(0, 0, 0, 3))
    light = DecodeView("b", sequences=9, by_length=(9, 0, 0, 0))
    assert choose("length_buckets", heavy, light, predicted=4000) == "b"
    assert choose("length_buckets", heavy, light, predicted=50) == "a"
    assert choose("length_buckets", heavy, light, predicted=300) == "a"


def test_buckets_have_their_edges() -> None:
    assert [bucket(n) for n in (0, 1, 128, 129, 512, 513, 2048, 2049)] == [0, 0, 0, 1, 1, 2, 2, 3]
    assert N_BUCKETS == 4


@FEW
@given(predicted=st.integers(0, 10_000), most=st.integers(0, 10_000))
def test_reserved_tokens_cover_the_prediction_within_the_request(predicted: int, most: int) -> None:
    n = reserve_tokens(predicted, most)
    if not predicted:
        assert n == most
    elif most:
        assert min(predicted, most) <= n <= most
    else:
        assert n >= predicted
    assert not predicted or n <= max(
        predicted, *[e for e in EDGES_TOKENS if e < 4 * predicted + 128]
    )
