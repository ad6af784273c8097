"""Prefix cache: which full KV blocks hold which tokens, by chained hash.

A block's key is a 16-byte BLAKE2b over (parent key, its tokens); the chain's root is a hash of
the salt, so equal text under another tenant, adapter or model never meets. A key only proposes a
block: a hit also compares the tokens, those of the block and of every one before it. A parent's
key would not do for that: it says nothing certain of what came before.
"""

from __future__ import annotations

from twofold.core.abridged import TokenList, full_block
from twofold.core.links import Key, Link, same_chain
from twofold.types import BlockId


class PrefixCache:
    """Maps chain keys to blocks. Holds no references: the pool tells it which blocks it loses."""

    def __init__(self, block_size: int) -> None:
        self.n_inserted = 0
        self._block_size = block_size
        self._block_of: dict[Key, BlockId] = {}
        self._link_of: dict[BlockId, Link] = {}

    def __len__(self) -> int:
        return len(self._link_of)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._link_of

    def lookup(self, tokens: TokenList, salt: str, links: list[Link]) -> list[BlockId]:
        """Longest chain of cached blocks that `tokens` starts with, in order.

        The chain never covers all of `tokens`: one token is left to compute, since the model's
        answer to the last one is what a request is for. `links` is the caller's memo of the
        links of its blocks and is extended by those computed here.
        """
        size = self._block_size
        found: list[BlockId] = []
        for i in range((len(tokens) - 1) // size):
            if i == len(links):
                links.append(full_block(tokens, i, size, links[-1] if links else None, salt))
            link = links[i]
            block = self._block_of.get(link.key)
            if block is None:
                break
            cached = self._link_of[block]
            if cached is not link:
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
        self, block: BlockId, index: int, tokens: TokenList, salt: str, links: list[Link]
    ) -> None:
        """Record that `block` holds the full block number `index` of `tokens`.

        Does nothing when another block already has that key, or when `block` is recorded.
        `links` must reach up to `index - 1` and is extended to `index`.
        """
        if index == len(links):
            size = self._block_size
            links.append(full_block(tokens, index, size, links[-1] if links else None, salt))
        link = links[index]
        if link.key not in self._block_of and block not in self._link_of:
            self._block_of[link.key] = block
            self._link_of[block] = link
            self.n_inserted += 1

    def forget(self, block: BlockId) -> None:
        """Drop `block`: it is about to hold something else. Unknown blocks are ignored."""
        link = self._link_of.pop(block, None)
        if link is not None:
            del self._block_of[link.key]

    def clear(self) -> list[BlockId]:
        """Forget everything; returns the blocks forgotten, in order of insertion."""
        blocks = list(self._link_of)
        self._link_of.clear()
        self._block_of.clear()
        return blocks
