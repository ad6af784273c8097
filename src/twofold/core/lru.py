"""Blocks in the order in which they were last used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twofold.types import BlockId


class Lru:
    """Some of the blocks 0 to `n_blocks` - 1, each at most once; iterates from the longest unused.

    A ring of blocks through `n_blocks`, which is none of them, kept in two flat lists: every
    request puts blocks in and takes some out of the middle.
    """

    __slots__ = ("_after", "_before", "_n", "_none")

    def __init__(self, n_blocks: int) -> None:
        self._n = 0
        self._none = n_blocks
        self._after = [n_blocks] * (n_blocks + 1)
        self._before = [n_blocks] * (n_blocks + 1)

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[BlockId]:
        block = self._after[self._none]
        while block != self._none:
            yield block
            block = self._after[block]

    def append(self, blocks: Sequence[BlockId]) -> None:
        """Put in `blocks`, none of which is in here, as used just now in this order."""
        after, before, none = self._after, self._before, self._none
        last = before[none]
        for block in blocks:
            after[last] = block
            before[block] = last
            last = block
        after[last] = none
        before[none] = last
        self._n += len(blocks)

    def remove(self, block: BlockId) -> None:
        """Take out `block`, which is in here."""
        left, right = self._before[block], self._after[block]
        self._after[left] = right
        self._before[right] = left
        self._n -= 1

    def pop(self, n: int) -> list[BlockId]:
        """Take out the `n` blocks that were used longest ago, which are in here."""
        after, none = self._after, self._none
        popped: list[BlockId] = []
        block = none
        for _ in range(n):
            block = after[block]
            popped.append(block)
        first = after[block]
        after[none] = first
        self._before[first] = none
        self._n -= n
        return popped
