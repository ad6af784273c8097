"""Names of full KV blocks: a chained hash over the tokens of a block and all before it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

Key = bytes | int
"""A hash of tokens, or the name of a block whose tokens are not known (see `abridged`)."""


def root_key(salt: str) -> bytes:
    """Key that stands before the first block of every chain under `salt`."""
    return blake2b(salt.encode(), digest_size=16, person=b"twofold-root").digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a full block of `tokens` that follows the block with key `parent`."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class Link:
    """One full block's tokens and the link of the block before it; None before the first.

    Where the tokens are not known there are none, and `key` names block and all before it.
    """

    __slots__ = ("key", "parent", "salt", "tokens")

    def __init__(
        self, parent: Link | None, tokens: tuple[int, ...], salt: str, key: Key | None = None
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.salt = salt
        if key is None:
            before = parent.key if parent is not None else root_key(salt)
            assert isinstance(before, bytes), "tokens after a block whose tokens are not known"
            key = block_key(before, tokens)
        self.key: Key = key


def same_chain(a: Link | None, b: Link | None) -> bool:
    """Whether two chains hold the same tokens from the start on. Shared parts are skipped."""
    while a is not b:
        if a is None or b is None or a.tokens != b.tokens or a.salt != b.salt:
            return False
        a, b = a.parent, b.parent
    return True
