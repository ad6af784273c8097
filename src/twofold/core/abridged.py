"""Prompts of which only the blocks' names are known, as published traces give them.

A simulated prompt of 100,000 tokens needs no 100,000 numbers: a core asks only how long it is
and which other prompts begin alike. `Abridged` stands for a tuple of ids in a message and for a
list of ids in a request, and carries the links of its full blocks, which requests with the same
beginning share. What cannot be known of it, single ids, it does not offer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from twofold.core.links import Link

_INDEX_BITS: Final = 32


class Abridged:
    """`n` tokens beginning with the full blocks `links`; `own` is no other request's, below 0.

    What comes after those blocks (a part-filled block, the answer) is this request's alone.
    """

    __slots__ = ("_n", "_own", "links")

    def __init__(self, n: int, links: tuple[Link, ...], own: int) -> None:
        self._n = n
        self._own = own
        self.links = links

    def __len__(self) -> int:
        return self._n

    def __bool__(self) -> bool:
        return True

    def append(self, token: int) -> None:
        """One more token, whichever it is."""
        self._n += 1

    def grow(self, n: int) -> None:
        """`n` more tokens."""
        self._n += n

    def link(self, index: int, parent: Link | None, salt: str) -> Link:
        """The link of full block `index`, which no other request has."""
        return Link(parent, (), salt, key=(self._own << _INDEX_BITS) + index)

    def first(self, n: int) -> Abridged:
        """The first `n` tokens, which hold all of `links`."""
        return Abridged(n, self.links, self._own)


Ids: TypeAlias = tuple[int, ...] | Abridged
TokenList: TypeAlias = list[int] | Abridged
KnownTokens: TypeAlias = Sequence[int] | Abridged


def ids_of(message: Any) -> Ids:
    """The ids in a Submit or a Grant, whose type does not say that they may be abridged."""
    ids: Ids = message.tokens
    return ids


def token_list(ids: Ids) -> TokenList:
    """A request's own list of `ids`, to append its answer to."""
    if isinstance(ids, Abridged):
        return ids.first(len(ids))
    return list(ids)


def first_ids(tokens: TokenList, n: int) -> Ids:
    """The first `n` of a request's tokens, as a message carries them."""
    if isinstance(tokens, Abridged):
        return tokens.first(n)
    return tuple(tokens[:n])


def known_links(tokens: TokenList) -> list[Link]:
    """Links that need not be computed."""
    return list(tokens.links) if isinstance(tokens, Abridged) else []


def full_block(tokens: KnownTokens, index: int, size: int, parent: Link | None, salt: str) -> Link:
    """The link of full block `index` of `tokens`."""
    if isinstance(tokens, Abridged):
        return tokens.link(index, parent, salt)
    chunk = tuple(tokens[index * size : (index + 1) * size])
    assert len(chunk) == size, "only full blocks are cached"
    return Link(parent, chunk, salt)
