"""The prefix cache by itself: what is a hit, and what never is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.core import links as links_module
from twofold.core.links import Link
from twofold.core.prefix import PrefixCache

B = 3


def fill(cache: PrefixCache, tokens: Sequence[int], first: int, salt: str = "") -> None:
    """Record every full block of `tokens` as blocks `first`, `first` + 1, ..."""
    links: list[Link] = []
    for i in range(len(tokens) // B):
        cache.insert(range(first, first + i + 1), i, i + 1, tokens, salt, links)


@pytest.mark.parametrize(
    ("n", "hits"), [(1, 0), (B - 1, 0), (B, 0), (B + 1, 1), (2 * B, 1), (2 * B + 1, 2), (3 * B, 2)]
)
def test_a_hit_is_of_full_blocks_and_never_the_whole_prompt(n: int, hits: int) -> None:
    cache = PrefixCache(B, 64)
    tokens = list(range(3 * B))
    fill(cache, tokens, 0)
    assert cache.lookup(tokens[:n], "", []) == list(range(hits))


def test_a_block_that_is_not_full_is_no_block() -> None:
    with pytest.raises(AssertionError, match="only full blocks"):
        PrefixCache(B, 64).insert([0], 0, 1, [1, 2], "", [])


def test_salts_never_meet() -> None:
    cache = PrefixCache(B, 64)
    tokens = list(range(3 * B))
    fill(cache, tokens, 0, "one")
    assert cache.lookup(tokens, "two", []) == []
    assert cache.lookup(tokens, "", []) == []
    assert cache.lookup(tokens, "one", []) == [0, 1]


def test_salts_never_meet_even_when_keys_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "block_key", lambda parent, tokens: b"same")
    monkeypatch.setattr(links_module, "root_key", lambda salt: b"root")
    cache = PrefixCache(B, 64)
    tokens = list(range(2 * B))
    fill(cache, tokens, 0, "one")
    assert cache.lookup(tokens, "two", []) == []


def test_same_tokens_after_another_head_are_no_hit() -> None:
    cache = PrefixCache(B, 64)
    fill(cache, [1, 1, 1, 5, 5, 5], 0)
    fill(cache, [2, 2, 2], 2)
    assert cache.lookup([2, 2, 2, 5, 5, 5, 9], "", []) == [2]


def test_colliding_key_of_other_tokens_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "block_key", lambda parent, tokens: b"same")
    cache = PrefixCache(B, 64)
    fill(cache, [1, 1, 1], 0)
    assert cache.lookup([1, 1, 1, 9], "", []) == [0]
    assert cache.lookup([2, 2, 2, 9], "", []) == []


def test_tail_behind_a_head_that_collided_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    # Heads 1 and 2 collide; only the first is recorded. The tail recorded behind the second must
    # not be found behind the first, although its parent's key is the same.
    real = links_module.block_key

    def colliding(parent: bytes, tokens: Sequence[int]) -> bytes:
        return b"head" if tuple(tokens) in ((1, 1, 1), (2, 2, 2)) else real(parent, tokens)

    monkeypatch.setattr(links_module, "block_key", colliding)
    cache = PrefixCache(B, 64)
    fill(cache, [1, 1, 1], 0)
    fill(cache, [2, 2, 2, 5, 5, 5], 1)
    assert cache.lookup([1, 1, 1, 5, 5, 5, 9], "", []) == [0]
    cache.forget([0])
    fill(cache, [2, 2, 2], 3)
    assert cache.lookup([2, 2, 2, 5, 5, 5, 9], "", []) == [3, 2]


def test_first_block_recorded_stays_the_one() -> None:
    cache = PrefixCache(B, 64)
    fill(cache, [1, 1, 1], 0)
    fill(cache, [1, 1, 1], 1)
    assert len(cache) == 1
    assert 1 not in cache
    cache.forget([1])
    assert cache.lookup([1, 1, 1, 9], "", []) == [0]


def test_forgotten_block_is_no_hit_and_can_be_recorded_anew() -> None:
    cache = PrefixCache(B, 64)
    fill(cache, [1, 1, 1, 2, 2, 2], 0)
    cache.forget([0])
    assert cache.lookup([1, 1, 1, 2, 2, 2, 3], "", []) == []
    fill(cache, [1, 1, 1], 7)
    assert cache.lookup([1, 1, 1, 2, 2, 2, 3], "", []) == [7, 1]
    assert cache.clear() == [1, 7]
    assert len(cache) == 0


@settings(max_examples=100)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=10), max_size=6),
    st.lists(st.integers(0, 1), min_size=1, max_size=10),
)
def test_memo_of_keys_changes_nothing(prompts: list[list[int]], tokens: list[int]) -> None:
    cache = PrefixCache(B, 64)
    memo: list[Link] = []
    for i, prompt in enumerate(prompts):
        fill(cache, prompt, 10 * i)
        assert cache.lookup(tokens, "", memo) == cache.lookup(tokens, "", [])
