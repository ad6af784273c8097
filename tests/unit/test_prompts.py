"""Prompts that name their blocks: equal names exactly where all before is equal too."""

from __future__ import annotations

import pytest

from twofold.core.abridged import Abridged
from twofold.core.links import Key
from twofold.sim.prompts import AbridgedPrompts
from twofold.trace import TraceRequest


def _keys(prompts: AbridgedPrompts, ids: tuple[int, ...], block_tokens: int) -> list[Key]:
    made = prompts.tokens(TraceRequest(0, len(ids) * block_tokens, 1, ids, block_tokens))
    assert isinstance(made, Abridged)
    return [link.key for link in made.links]


@pytest.mark.parametrize("block_tokens", [8, 16])
def test_an_id_after_another_block_is_another_block(block_tokens: int) -> None:
    prompts = AbridgedPrompts(8)
    each = block_tokens // 8  # blocks of ours for an id
    first = _keys(prompts, (1, 2, 3), block_tokens)
    other = _keys(prompts, (4, 2, 3), block_tokens)
    assert not set(first) & set(other)
    assert _keys(prompts, (1, 2, 5), block_tokens)[: 2 * each] == first[: 2 * each]
    assert _keys(prompts, (4, 2, 3), block_tokens) == other
    assert _keys(prompts, (1, 2, 3), block_tokens) == first
    assert not set(_keys(prompts, (2, 3), block_tokens)) & {*first, *other}
