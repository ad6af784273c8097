"""Synthetic prompts: token ids that share prefixes exactly where a trace says so."""

from __future__ import annotations

from twofold.trace import TraceRequest


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
