"""Prefill policies: what holds for all of them, and the faults that people met in others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.policy_support import FEW, MS, incomings, prefill_views
from twofold.policy.choice import Choice, describe, lookup, mix
from twofold.policy.prefill import PREFILL_CHOICES, READ_PREFIXES, usable
from twofold.policy.views import Incoming, PrefillView, projected_ttft_ns, work_ns

ALL = sorted(PREFILL_CHOICES)
BY_LOAD = ("jsq", "least_tokens", "prefix_aware", "projected_ttft")
IN_TIME = ("prefix_aware", "projected_ttft")


def choose(policy: str, views: Sequence[PrefillView], number: int = 0) -> str:
    return PREFILL_CHOICES[policy](views, Incoming(number)).worker


@pytest.mark.parametrize("policy", ALL)
@FEW
@given(views=prefill_views, incoming=incomings)
def test_takes_a_usable_worker_or_says_that_there_is_none(
    policy: str, views: tuple[PrefillView, ...], incoming: Incoming
) -> None:
    choice = PREFILL_CHOICES[policy](views, incoming)
    names = [view.name for view in usable(views)]
    assert choice.worker in names if names else choice.worker == ""
    assert {name for name, _ in choice.scores} <= set(names)
    up = any(view.up for view in views)
    if not names:
        wanted = "every prefill queue is over its budget" if up else "no prefill worker is up"
        assert choice == Choice("", wanted)


def test_down_or_over_budget_is_not_usable() -> None:
    down = PrefillView("a", up=False)
    full = PrefillView("b", queued_tokens=90, uncached_tokens=11, budget_tokens=100)
    just = PrefillView("c", queued_tokens=90, uncached_tokens=10, budget_tokens=100)
    free = PrefillView("d", queued_tokens=10**9)
    assert usable([down, full, just, free]) == [just, free]


@pytest.mark.parametrize("policy", ALL)
@FEW
@given(views=prefill_views, incoming=incomings, order=st.permutations(range(4)))
def test_the_order_of_workers_does_not_matter(
    policy: str, views: tuple[PrefillView, ...], incoming: Incoming, order: list[int]
) -> None:
    choice = PREFILL_CHOICES[policy](views, incoming)
    assert PREFILL_CHOICES[policy]([views[i] for i in order], incoming).worker == choice.worker


@pytest.mark.parametrize("policy", BY_LOAD)
def test_equals_go_by_name(policy: str) -> None:
    views = [PrefillView(name, True, 5, 700, 30, 1000) for name in "cab"]
    assert choose(policy, views) == "a"


@pytest.mark.parametrize("policy", ALL)
@FEW
@given(
    views=prefill_views,
    incoming=incomings,
    which=st.integers(0, 3),
    requests=st.integers(0, 50),
    queued=st.integers(0, 90_000),
)
def test_more_queue_never_makes_a_worker_more_attractive(
    policy: str,
    views: tuple[PrefillView, ...],
    incoming: Incoming,
    which: int,
    requests: int,
    queued: int,
) -> None:
    before = PREFILL_CHOICES[policy](views, incoming).worker
    view = views[which]
    more = view._replace(
        requests=view.requests + requests, queued_tokens=view.queued_tokens + queued
    )
    loaded = [*views[:which], more, *views[which + 1 :]]
    if before != view.name:
        assert PREFILL_CHOICES[policy](loaded, incoming).worker != view.name


@pytest.mark.parametrize("policy", IN_TIME)
@FEW
@given(views=prefill_views, incoming=incomings, k=st.integers(2, 1000))
def test_time_is_the_one_scale(
    policy: str, views: tuple[PrefillView, ...], incoming: Incoming, k: int
) -> None:
    """k times the tokens at k times the rate is the same, beside the same transfer."""
    scaled = [
        view._replace(
            queued_tokens=k * view.queued_tokens,
            uncached_tokens=k * view.uncached_tokens,
            tokens_per_s=k * view.tokens_per_s,
            budget_tokens=k * view.budget_tokens,
        )
        for view in views
    ]
    assert PREFILL_CHOICES[policy](scaled, incoming) == PREFILL_CHOICES[policy](views, incoming)


def test_projected_ttft_adds_queue_work_and_transfer() -> None:
    view = PrefillView(
        "a", queued_tokens=3000, uncached_tokens=1000, tokens_per_s=2000, transfer_ns=7 * MS
    )
    assert projected_ttft_ns(view) == 2007 * MS
    assert work_ns(1, 3) == 333_333_334


def test_projected_ttft_takes_the_faster_worker_with_the_longer_queue() -> None:
    slow = PrefillView("a", queued_tokens=1000, uncached_tokens=1000, tokens_per_s=1000)
    fast = PrefillView("b", queued_tokens=5000, uncached_tokens=1000, tokens_per_s=4000)
    assert choose("projected_ttft", [slow, fast]) == "b"
    assert choose("least_tokens", [slow, fast]) == "a"
    assert choose("projected_ttft", [slow, fast._replace(transfer_ns=501 * MS)]) == "a"


def test_round_robin_goes_by_name_and_number() -> None:
    views = [PrefillView(name) for name in "bca"]
    assert [choose("round_robin", views, n) for n in range(5)] == ["a", "b", "c", "a", "b"]


def test_power_of_two_draws_every_pair_alike_and_takes_the_lesser() -> None:
    views = [PrefillView(name, queued_tokens=i) for i, name in enumerate("abcd")]
    pairs: Counter[tuple[str, ...]] = Counter()
    for number in range(6000):
        choice = PREFILL_CHOICES["power_of_two"](views, Incoming(number, seed=3))
        drawn = tuple(sorted(name for name, _ in choice.scores))
        assert choice.worker == drawn[0]
        pairs[drawn] += 1
    assert len(pairs) == 6
    assert all(850 < n < 1150 for n in pairs.values())
    others = [PREFILL_CHOICES["power_of_two"](views, Incoming(n, 4)).worker for n in range(50)]
    same = [PREFILL_CHOICES["power_of_two"](views, Incoming(n, 3)).worker for n in range(50)]
    assert others != same


def test_mix_is_fixed_for_ever() -> None:
    """Runs recorded by one version are replayed by the next."""
    assert [mix(0, 0), mix(0, 1), mix(1, 0)] == [
        16294208416658607535,
        3246858695411730098,
        7960286522194355700,
    ]


# ------------------------------------------------------------------ faults met elsewhere


def queue_up(policy: str, lengths: Sequence[int], n_workers: int = 4) -> list[int]:
    """Tokens queued per worker after requests of these lengths came at once."""
    views = [PrefillView(f"p{i}", tokens_per_s=10_000) for i in range(n_workers)]
    for number, n in enumerate(lengths):
        asked = [view._replace(uncached_tokens=n) for view in views]
        worker = choose(policy, asked, number)
        i = int(worker[1:])
        views[i] = views[i]._replace(
            queued_tokens=views[i].queued_tokens + n, requests=views[i].requests + 1
        )
    return [view.queued_tokens for view in views]


@pytest.mark.parametrize("policy", ["least_tokens", "prefix_aware", "projected_ttft"])
@FEW
@given(lengths=st.lists(st.sampled_from([200, 1_000, 20_000, 200_000]), min_size=1, max_size=60))
def test_mixed_lengths_keep_queues_even(policy: str, lengths: list[int]) -> None:
    """One worker with everything waiting while others idle: at most one request apart."""
    queued = queue_up(policy, lengths)
    assert max(queued) <= sum(queued) // len(queued) + max(lengths)
    assert max(queued) - min(queued) <= max(lengths)


def test_counting_requests_alone_does_not_keep_queues_even() -> None:
    """The reason for the rule above: the baselines break it."""
    lengths = [200_000, 200, 200, 200] * 8
    assert max(queue_up("round_robin", lengths)) > 3 * max(queue_up("least_tokens", lengths))
    behind_a_long_one = [200_000] + [200] * 15
    assert max(queue_up("jsq", behind_a_long_one)) == 200_000 + 3 * 200
    assert max(queue_up("least_tokens", behind_a_long_one)) == 200_000


def hit_on(worker: str, queued: dict[str, int]) -> list[PrefillView]:
    """Ten thousand tokens, all but 100 cached at `worker`."""
    return [
        PrefillView(
            name,
            queued_tokens=queued.get(name, 0),
            uncached_tokens=100 if name == worker else 10_000,
            tokens_per_s=10_000,
            kept_keys=50,
        )
        for name in "abc"
    ]


@pytest.mark.parametrize("policy", READ_PREFIXES)
def test_a_hit_does_not_pin_traffic_to_a_long_queue(policy: str) -> None:
    assert choose(policy, hit_on("b", {"b": 5_000})) == "b"
    assert choose(policy, hit_on("b", {"b": 20_000})) == "a"


def test_prefix_aware_values_a_hit_at_twice_the_time_it_saves() -> None:
    assert choose("projected_ttft", hit_on("b", {"b": 15_000})) == "a"
    assert choose("prefix_aware", hit_on("b", {"b": 15_000})) == "b"
    assert choose("prefix_aware", hit_on("b", {"b": 19_799})) == "b"
    assert choose("prefix_aware", hit_on("b", {"b": 19_801})) == "a"


@pytest.mark.parametrize("policy", READ_PREFIXES)
def test_one_hot_worker_does_not_disable_affinity_for_all(policy: str) -> None:
    hot = {"a": 1_000_000}
    assert choose(policy, hit_on("b", hot)) == "b"
    assert choose(policy, hit_on("c", hot)) == "c"
    assert choose(policy, hit_on("a", hot)) == "b"


def test_misses_do_not_go_to_the_smallest_cache_though_it_is_loaded() -> None:
    views = [
        PrefillView("a", queued_tokens=100, uncached_tokens=500, tokens_per_s=1000, kept_keys=0),
        PrefillView("b", queued_tokens=0, uncached_tokens=500, tokens_per_s=1000, kept_keys=900),
    ]
    assert choose("prefix_aware", views) == "b"
    assert choose("prefix_aware", [v._replace(queued_tokens=0) for v in views]) == "a"


@pytest.mark.parametrize("policy", READ_PREFIXES)
def test_unique_prompts_spread(policy: str) -> None:
    assert queue_up(policy, [1_000] * 40) == [10_000] * 4


def test_the_reason_is_one_line_with_all_scores() -> None:
    views = [
        PrefillView("a", queued_tokens=2_000, uncached_tokens=10, tokens_per_s=1_000),
        PrefillView("b", uncached_tokens=1_250, tokens_per_s=1_000),
        PrefillView("c", up=False),
    ]
    ttft = PREFILL_CHOICES["projected_ttft"](views, Incoming(0))
    assert describe(ttft) == "least projected TTFT: a 2010.0 ms, b 1250.0 ms"
    assert describe(PREFILL_CHOICES["round_robin"](views, Incoming(0))) == "its turn"
    tokens = PREFILL_CHOICES["least_tokens"](views, Incoming(0))
    assert describe(tokens) == "fewest queued tokens: a 2000 tokens, b 0 tokens"


def test_an_unknown_name_lists_the_choices() -> None:
    with pytest.raises(
        ValueError, match=r"prefill_policy 'fast': least_tokens, .*power_of_two are"
    ):
        lookup(PREFILL_CHOICES, "fast", "prefill_policy")
