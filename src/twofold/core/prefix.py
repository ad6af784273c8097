"""Prefix cache: which full KV blocks hold which tokens, by chained hash.

A block's key is a 16-byte BLAKE2b over (parent key, its tokens); the chain's root is a hash of
the salt, so equal text under another tenant, adapter or model never meets. A key only proposes a
block: a hit also compares the tokens, and since the walk starts at the root, every earlier block
of the chain has been compared too.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from twofold.types import BlockId

Key = bytes


class _Entry(NamedTuple):
    key: Key
    parent: Key
    tokens: tuple[int, ...]


def root_key(salt: str) -> Key:
    """Key that stands before the first block of every chain under `salt`."""
    return blake2b(salt.encode(), digest_size=16, person=b"twofold-root").digest()


def block_key(parent: Key, tokens: Sequence[int]) -> Key:
    """Key of a full block of `tokens` that follows the block with key `parent`."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class PrefixCache:
    """Maps chain keys to blocks. Holds no references: the pool tells it which blocks it loses."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._block_of: dict[Key, BlockId] = {}
        self._entry_of: dict[BlockId, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entry_of)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._entry_of

    def lookup(self, tokens: Sequence[int], salt: str, keys: list[Key]) -> list[BlockId]:
        """Longest chain of cached blocks that `tokens` starts with, in order.

        The chain never covers all of `tokens`: one token is left to compute, since the model's
        answer to the last one is what a request is for. `keys` is the caller's memo of the keys
        of its blocks and is extended by those computed here.
        """
        size = self._block_size
        found: list[BlockId] = []
        parent = root_key(salt)
        for i in range((len(tokens) - 1) // size):
            chunk = tuple(tokens[i * size : (i + 1) * size])
            if i == len(keys):
                keys.append(block_key(parent, chunk))
            block = self._block_of.get(keys[i])
            if block is None:
                break
            entry = self._entry_of[block]
            if entry.parent != parent or entry.tokens != chunk:
                break
            found.append(block)
            parent = keys[i]
        return found

    def insert(
        self, block: BlockId, index: int, tokens: Sequence[int], salt: str, keys: list[Key]
    ) -> None:
        """Record that `block` holds the full block number `index` of `tokens`.

        Does nothing when another block already holds the same, or when `block` is recorded.
        `keys` must reach up to `index - 1` and is extended to `index`.
        """
        size = self._block_size
        parent = keys[index - 1] if index else root_key(salt)
        chunk = tuple(tokens[index * size : (index + 1) * size])
        assert len(chunk) == size, "only full blocks are cached"
        if index == len(keys):
            keys.append(block_key(parent, chunk))
        key = keys[index]
        if key not in self._block_of and block not in self._entry_of:
            self._block_of[key] = block
            self._entry_of[block] = _Entry(key, parent, chunk)

    def forget(self, block: BlockId) -> None:
        """Drop `block`: it is about to hold something else. Unknown blocks are ignored."""
        entry = self._entry_of.pop(block, None)
        if entry is not None:
            del self._block_of[entry.key]

    def clear(self) -> list[BlockId]:
        """Forget everything; returns the blocks forgotten, in order of insertion."""
        blocks = list(self._entry_of)
        self._entry_of.clear()
        self._block_of.clear()
        return blocks
