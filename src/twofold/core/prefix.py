"""Prefix cache: which full KV blocks hold which tokens, by chained hash.

A block's key is a 16-byte BLAKE2b over (parent key, its tokens); the chain's root is a hash of
the salt, so equal text under another tenant, adapter or model never meets. A key only proposes a
block: a hit also compares the tokens, those of the block and of every one before it. A parent's
key would not do for that: it says nothing certain of what came before.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from twofold.types import BlockId

Key = bytes


def root_key(salt: str) -> Key:
    """Key that stands before the first block of every chain under `salt`."""
    return blake2b(salt.encode(), digest_size=16, person=b"twofold-root").digest()


def block_key(parent: Key, tokens: Sequence[int]) -> Key:
    """Key of a full block of `tokens` that follows the block with key `parent`."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class Link:
    """One full block's tokens and the link of the block before it; None before the first."""

    __slots__ = ("key", "parent", "salt", "tokens")

    def __init__(self, parent: Link | None, tokens: tuple[int, ...], salt: str) -> None:
        self.parent = parent
        self.tokens = tokens
        self.salt = salt
        self.key: Key = block_key(parent.key if parent is not None else root_key(salt), tokens)


def _same(a: Link | None, b: Link | None) -> bool:
    """Whether two chains hold the same tokens from the start on. Shared parts are skipped."""
    while a is not b:
        if a is None or b is None or a.tokens != b.tokens or a.salt != b.salt:
            return False
        a, b = a.parent, b.parent
    return True


class PrefixCache:
    """Maps chain keys to blocks. Holds no references: the pool tells it which blocks it loses."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._block_of: dict[Key, BlockId] = {}
        self._link_of: dict[BlockId, Link] = {}

    def __len__(self) -> int:
        return len(self._link_of)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._link_of

    def lookup(self, tokens: Sequence[int], salt: str, links: list[Link]) -> list[BlockId]:
        """Longest chain of cached blocks that `tokens` starts with, in order.

        The chain never covers all of `tokens`: one token is left to compute, since the model's
        answer to the last one is what a request is for. `links` is the caller's memo of the
        links of its blocks and is extended by those computed here.
        """
        found: list[BlockId] = []
        for i in range((len(tokens) - 1) // self._block_size):
            if i == len(links):
                self._extend(links, tokens, salt)
            link = links[i]
            block = self._block_of.get(link.key)
            if block is None:
                break
            cached = self._link_of[block]
            if cached is not link:
                # Taking over the cache's own links keeps the comparison to one block each time.
                parent = links[i - 1] if i else None
                link.parent = parent
                if not _same(cached, link):
                    break
                cached.parent = parent
                links[i] = cached
            found.append(block)
        return found

    def insert(
        self, block: BlockId, index: int, tokens: Sequence[int], salt: str, links: list[Link]
    ) -> None:
        """Record that `block` holds the full block number `index` of `tokens`.

        Does nothing when another block already has that key, or when `block` is recorded.
        `links` must reach up to `index - 1` and is extended to `index`.
        """
        if index == len(links):
            self._extend(links, tokens, salt)
        link = links[index]
        if link.key not in self._block_of and block not in self._link_of:
            self._block_of[link.key] = block
            self._link_of[block] = link

    def _extend(self, links: list[Link], tokens: Sequence[int], salt: str) -> None:
        start = len(links) * self._block_size
        chunk = tuple(tokens[start : start + self._block_size])
        assert len(chunk) == self._block_size, "only full blocks are cached"
        links.append(Link(links[-1] if links else None, chunk, salt))

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
