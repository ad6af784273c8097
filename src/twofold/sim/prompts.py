"""Synthetic prompts: token ids that share prefixes exactly where a trace says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from twofold.core.abridged import Abridged, Ids
from twofold.core.links import Key, Link
from twofold.trace import TraceRequest
from twofold.types import RequestId, ceil_div


def sampled_token(request_id: RequestId, index: int) -> int:
    """The `index`-th token of a request's answer: the same on whichever worker, in any batch."""
    x = (request_id + 1) * 0x9E3779B97F4A7C15 + (index + 1) * 0xBF58476D1CE4E5B9
    return ((x ^ (x >> 29)) * 0x94D049BB133111EB >> 33) & 0x3FFFFFFF


class PromptSource(Protocol):
    """Makes the prompts of a trace's requests."""

    def tokens(self, request: TraceRequest) -> Ids:
        """The prompt of `request`, of `input_tokens` ids."""


class Prompts:
    """Makes prompts. Equal hash ids give equal blocks of tokens; without ids all tokens are new.

    Ids of shared blocks count up from 0, those of unshared prompts down from -1, so the two never
    meet. Nothing is known of answers, so no later prompt repeats one.
    """

    def __init__(self) -> None:
        self._block_of: dict[tuple[int, int], int] = {}
        self._next_shared = 0
        self._next_own = -1

    def tokens(self, request: TraceRequest) -> tuple[int, ...]:
        """The prompt of `request`, of `input_tokens` ids."""
        n = request.input_tokens
        if request.hash_ids is None or not request.block_tokens:
            self._next_own -= n
            return tuple(range(self._next_own + 1, self._next_own + 1 + n))
        tokens: list[int] = []
        for hash_id in request.hash_ids:
            first = self._first(hash_id, request.block_tokens)
            tokens += range(first, first + min(request.block_tokens, n - len(tokens)))
        if len(tokens) < n:  # the trace names too few blocks: the rest is this request's own
            self._next_own -= n - len(tokens)
            tokens += range(self._next_own + 1, self._next_own + 1 + n - len(tokens))
        return tuple(tokens)

    def _first(self, hash_id: int, block_tokens: int) -> int:
        key = (hash_id, block_tokens)
        first = self._block_of.get(key)
        if first is None:
            first = self._block_of[key] = self._next_shared
            self._next_shared += block_tokens
        return first


class AbridgedPrompts:
    """Makes prompts that name their blocks of `block_size` tokens instead of listing ids.

    Equal hash ids from the start on give the same links, which is all that a prefix cache asks.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._n_links = 0
        self._usual: dict[int, Link] = {}
        self._others: dict[tuple[Key, int | tuple[int, ...]], Link] = {}
        self._next_own = -1

    def tokens(self, request: TraceRequest) -> Ids:
        """The prompt of `request`, of `input_tokens` tokens."""
        self._next_own -= 1
        links: Sequence[Link] = ()
        if request.hash_ids and request.block_tokens:
            links = self._chain(request.hash_ids, request.block_tokens, request.input_tokens)
        return Abridged(request.input_tokens, tuple(links), self._next_own)

    def _chain(self, ids: Sequence[int], per_id: int, n_tokens: int) -> list[Link]:
        size = self._size
        n = min(n_tokens, len(ids) * per_id) // size
        made: list[Link] = []
        parent: Link | None = None
        if per_id != size:
            for index in range(n):
                name = ids[index * size // per_id : ceil_div((index + 1) * size, per_id)]
                parent = self._other(parent, tuple(name))
                made.append(parent)
            return made
        # Nearly all ids come after the same block wherever they come.
        usual = self._usual
        for hash_id in ids[:n]:
            link = usual.get(hash_id)
            if link is None:
                link = usual[hash_id] = self._new(parent)
            elif link.parent is not parent:
                link = self._other(parent, hash_id)
            made.append(link)
            parent = link
        return made

    def _other(self, parent: Link | None, name: int | tuple[int, ...]) -> Link:
        """The block `name` that follows `parent`."""
        key = (parent.key if parent is not None else -1, name)
        link = self._others.get(key)
        if link is None:
            link = self._others[key] = self._new(parent)
        return link

    def _new(self, parent: Link | None) -> Link:
        # Numbered from 0 on, apart from the names of unshared blocks, which are below.
        self._n_links += 1
        return Link(parent, (), "", key=self._n_links - 1)
