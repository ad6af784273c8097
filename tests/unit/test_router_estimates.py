"""What the router learns: rates, step times, and what is cached where."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.policy_support import FEW, MS
from twofold.core.estimates import Line, Rate
from twofold.core.routed_prefixes import RoutedPrefixes

S = 1000 * MS


def test_nothing_is_known_without_samples() -> None:
    assert Rate().per_s == 0
    assert not Line().known
    assert Line().at(5) == (0, 0)


@FEW
@given(tokens=st.integers(1, 100_000), ns=st.integers(1, 10**12), n=st.integers(1, 300))
def test_a_steady_rate_is_found_at_once_and_kept(tokens: int, ns: int, n: int) -> None:
    rate = Rate()
    for _ in range(n):
        rate.add(tokens, ns)
    exact = max(1, tokens * S // ns)
    assert abs(rate.per_s - exact) <= max(1, exact // 100)


def test_prompts_that_end_together_count_together() -> None:
    rate = Rate()
    rate.add(300, 0)
    assert rate.per_s == 0
    rate.add(700, S)
    assert 970 <= rate.per_s <= 1000


def test_a_worker_that_becomes_slow_is_seen_to_be() -> None:
    rate = Rate()
    for _ in range(1000):
        rate.add(1000, S)
    for _ in range(60):
        rate.add(1000, 4 * S)
    assert 250 <= rate.per_s <= 280


def line(*samples: tuple[int, int]) -> Line:
    made = Line()
    for _ in range(20):
        for sequences, ns in samples:
            made.add(sequences, ns)
    return made


def test_step_time_rises_along_the_samples() -> None:
    made = line((4, 14 * MS), (8, 18 * MS), (20, 30 * MS))
    ns, rise = made.at(10)
    assert abs(ns - 20 * MS) < MS // 100
    assert abs(rise - MS) < MS // 100
    assert abs(made.at(40)[0] - 50 * MS) < MS // 10


def test_where_samples_do_not_rise_their_mean_is_the_answer() -> None:
    assert line((5, 12 * MS)).at(50) == (12 * MS, 0)
    falling = line((4, 20 * MS), (8, 10 * MS))
    assert falling.at(0)[1] == 0
    assert falling.at(0) == falling.at(50)


def test_noise_between_alike_batches_is_no_slope_to_go_far_on() -> None:
    """A sequence adds at most its share of a step."""
    noisy = line((9, 10 * MS), (10, 30 * MS))
    ns, rise = noisy.at(19)
    assert rise < 22 * MS / 9
    assert ns < 50 * MS


@FEW
@given(
    samples=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 10**8)), min_size=1, max_size=30),
    sequences=st.integers(0, 90),
)
def test_more_sequences_never_make_a_shorter_step(
    samples: list[tuple[int, int]], sequences: int
) -> None:
    made = Line()
    for n, ns in samples:
        made.add(n, ns)
    ns, rise = made.at(sequences)
    assert ns >= 0
    assert rise >= 0
    assert made.at(sequences + 1)[0] >= ns


# ------------------------------------------------------------------------------- prefixes


def test_hits_are_counted_from_the_first_block_on() -> None:
    known = RoutedPrefixes()
    known.add("a", (1, 2, 3), 4)
    assert known.hits("a", (1, 2, 9, 3)) == 2
    assert known.hits("a", (9, 2, 3)) == 0
    assert known.hits("a", (1, 2, 3, 4)) == 3
    assert known.hits("b", (1, 2)) == 0
    assert known.hits("a", ()) == 0
    assert (known.kept("a"), known.kept("b")) == (3, 0)


def test_the_end_of_a_chain_is_forgotten_before_what_it_hangs_on() -> None:
    known = RoutedPrefixes()
    known.add("a", (1, 2, 3), 4)
    known.add("a", (7, 8), 4)
    assert known.hits("a", (1, 2, 3)) == 2
    assert known.hits("a", (7, 8)) == 2
    known.add("a", (1, 2, 3), 4)
    assert (known.hits("a", (1, 2, 3)), known.hits("a", (7, 8))) == (3, 1)


def test_a_new_life_has_an_empty_cache() -> None:
    known = RoutedPrefixes()
    known.add("a", (1,), 4)
    known.add("b", (1,), 4)
    known.forget("a")
    known.forget("a")
    assert (known.hits("a", (1,)), known.hits("b", (1,))) == (0, 1)


@FEW
@given(
    chains=st.lists(st.lists(st.integers(0, 20), max_size=9).map(tuple), max_size=20),
    most=st.integers(1, 12),
)
def test_memory_is_bounded(chains: list[tuple[int, ...]], most: int) -> None:
    known = RoutedPrefixes()
    for chain in chains:
        known.add("a", chain, most)
        assert known.kept("a") <= most
        assert known.hits("a", chain) >= min(most, len(set(chain)), 1)
