"""Blocks in the order in which they were last used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twofold.types import BlockId


class Lru:
    """Some of the blocks 0 to `n_blocks` - 1, each at most once; iterates from the longest unused.

    Blocks come and go many at a time, so they are kept in one list in order of coming. A block
    that is taken out of the middle stays in the list and is passed over later: of its entries the
    first `_gone[block]` count no more.
    """

    __slots__ = ("_first", "_gone", "_most", "_n", "_order")

    def __init__(self, n_blocks: int) -> None:
        self._n = 0
        self._order: list[BlockId] = []
        self._first = 0  # entries of `_order` before this one have been popped
        self._gone = [0] * n_blocks
        self._most = 4 * n_blocks  # entries, before those that count no more are thrown out

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._counting())

    def _counting(self) -> list[BlockId]:
        gone = self._gone.copy()
        blocks: list[BlockId] = []
        for block in self._order[self._first :]:
            if gone[block]:
                gone[block] -= 1
            else:
                blocks.append(block)
        return blocks

    def append(self, blocks: Sequence[BlockId]) -> None:
        """Put in `blocks`, none of which is in here, as used just now in this order."""
        self._order += blocks
        self._n += len(blocks)
        if len(self._order) > self._most:
            self._order = self._counting()
            self._first = 0
            self._gone = [0] * len(self._gone)

    def remove(self, block: BlockId) -> None:
        """Take out `block`, which is in here."""
        self._gone[block] += 1
        self._n -= 1

    def pop(self, n: int) -> list[BlockId]:
        """Take out the `n` blocks that were used longest ago, which are in here."""
        order, gone, at = self._order, self._gone, self._first
        popped: list[BlockId] = []
        left = n
        while left:
            block = order[at]
            at += 1
            if gone[block]:
                gone[block] -= 1
            else:
                popped.append(block)
                left -= 1
        self._first = at
        self._n -= n
        return popped
