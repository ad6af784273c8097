"""Prefix cache: which full KV blocks hold which tokens, by chained hash.

A block's key is a 16-byte BLAKE2b over (parent key, its tokens); the chain's root is a hash of
the salt, so equal text under another tenant, adapter or model never meets. A key only proposes a
block: a hit also compares the tokens, those of the block and of every one before it. A parent's
key would not do for that: it says nothing certain of what came before.
"""

from __future__ import annotations

from collections.abc import Sequence

from twofold.core.abridged import KnownTokens, full_block
from twofold.core.links import Key, Link, same_chain
from twofold.types import BlockId


class PrefixCache:
    """Maps chain keys to blocks. Holds no references: the pool tells it which blocks it loses."""

    def __init__(self, block_size: int, n_blocks: int) -> None:
        self.n_inserted = 0
        self._block_size = block_size
        self._block_of: dict[Key, BlockId] = {}
        self.links: list[Link | None] = [None] * n_blocks
        """What each block is known to hold."""

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: BlockId) -> bool:
        return self.links[block] is not None

    def lookup(self, tokens: KnownTokens, salt: str, links: list[Link]) -> list[BlockId]:
        """Longest chain of cached blocks that `tokens` starts with, in order.

        The chain never covers all of `tokens`: one token is left to compute, since the model's
        answer to the last one is what a request is for. `links` is the caller's memo of the
        links of its blocks and is extended by those computed here.
        """
        size, block_of, known = self._block_size, self._block_of.get, self.links
        found: list[BlockId] = []
        for i in range((len(tokens) - 1) // size):
            if i == len(links):
                links.append(full_block(tokens, i, size, links[-1] if links else None, salt))
            link = links[i]
            block = block_of(link.key)
            if block is None:
                break
            cached = known[block]
            if cached is not link:
                assert cached is not None, "a key of a block that holds nothing"
                # Taking over the cache's own links keeps the comparison to one block each time.
                parent = links[i - 1] if i else None
                link.parent = parent
                if not same_chain(cached, link):
                    break
                cached.parent = parent
                links[i] = cached
            found.append(block)
        return found

    def insert(
        self,
        blocks: Sequence[BlockId],
        first: int,
        end: int,
        tokens: KnownTokens,
        salt: str,
        links: list[Link],
    ) -> None:
        """Record that `blocks[i]` holds the full block number i of `tokens`, first <= i < end.

        Skips those whose key another block already has, or that are recorded. `links` must reach
        up to `first` and is extended to `end`.
        """
        block_of, known, size = self._block_of, self.links, self._block_size
        while len(links) < end:
            parent = links[-1] if links else None
            links.append(full_block(tokens, len(links), size, parent, salt))
        for link, block in zip(links[first:end], blocks[first:end], strict=True):
            if known[block] is None and block_of.setdefault(link.key, block) == block:
                known[block] = link
        self.n_inserted += end - first

    def forget(self, blocks: Sequence[BlockId]) -> None:
        """Drop `blocks`: they are about to hold something else. Unknown ones are ignored."""
        block_of, known = self._block_of, self.links
        for block in blocks:
            link = known[block]
            if link is not None:
                known[block] = None
                del block_of[link.key]

    def clear(self) -> list[BlockId]:
        """Forget everything; returns the blocks forgotten, in order of insertion."""
        blocks = list(self._block_of.values())
        self.forget(blocks)
        return blocks
