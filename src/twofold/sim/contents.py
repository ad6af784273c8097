"""What is in each KV block of a simulated worker, so that wrong KV is seen and not only counted.

A slot's content stands for keys and values of one token, which depend on that token and all
before it: it is a chained hash over them. A step may only read slots with the right content, and
a worker that lets a block go too early is found out here, whatever its books say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twofold.core.engine import Engine
from twofold.messages import RunStep
from twofold.trace.hashing import mix64
from twofold.types import BlockId, RequestId

_MASK = (1 << 64) - 1
_EMPTY = 0


def chain(tokens: Iterable[int], parent: int = 1) -> list[int]:
    """Content of the slots of `tokens`, after a slot with content `parent`."""
    slots: list[int] = []
    for token in tokens:
        parent = mix64((parent * 0x9E3779B97F4A7C15 + token + 1) & _MASK) | 1
        slots.append(parent)
    return slots


class Contents:
    """Slots of `n_blocks` blocks of `block_size` tokens; all empty at first."""

    def __init__(self, n_blocks: int, block_size: int) -> None:
        self._size = block_size
        self._slots = [[_EMPTY] * block_size for _ in range(n_blocks)]
        self._chains: dict[RequestId, list[int]] = {}

    def verify(self, engine: Engine, step: RunStep) -> None:
        """Raise AssertionError unless every slot that `step` reads is as it should be."""
        for request_id, start, _ in step.work:
            self._compare(engine, request_id, start)

    def write(self, engine: Engine, step: RunStep) -> None:
        """Store what `step` computes, then verify that nothing was written over."""
        for request_id, start, n in step.work:
            right = self._chain(engine, request_id)
            blocks = engine.row(request_id).blocks
            for at in range(start, start + n):
                self._slots[blocks[at // self._size]][at % self._size] = right[at]
        for request_id, start, n in step.work:
            self._compare(engine, request_id, start + n)

    def checksums(self, blocks: Sequence[BlockId]) -> tuple[int, ...]:
        """One number per block over all of its slots."""
        return tuple(chain(self._slots[block])[-1] for block in blocks)

    def copy(self, source: Contents, pairs: Sequence[tuple[BlockId, BlockId]]) -> tuple[int, ...]:
        """Copy whole blocks as (theirs, ours); returns the checksums of what was copied."""
        for theirs, ours in pairs:
            self._slots[ours] = list(source._slots[theirs])
        return self.checksums([ours for _, ours in pairs])

    def forget(self, request_id: RequestId) -> None:
        """A request has ended: what is remembered for it may go. Its blocks stay as they are."""
        self._chains.pop(request_id, None)

    def _chain(self, engine: Engine, request_id: RequestId) -> list[int]:
        tokens = engine.row(request_id).ids()
        known = self._chains.setdefault(request_id, [])
        if len(known) < len(tokens):
            known += chain(tokens[len(known) :], known[-1] if known else 1)
        return known

    def _compare(self, engine: Engine, request_id: RequestId, n: int) -> None:
        right = self._chain(engine, request_id)
        blocks = engine.row(request_id).blocks
        for index in range(0, n, self._size):
            end = min(index + self._size, n)
            block = blocks[index // self._size]
            assert self._slots[block][: end - index] == right[index:end], (
                f"request {request_id} would read wrong KV in block {block}, "
                f"tokens {index} to {end}"
            )
