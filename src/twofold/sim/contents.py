"""What is in each KV block of a simulated worker, so that wrong KV is seen and not only counted.

A slot's content stands for keys and values of one token, which depend on that token and all
before it: it is a chained hash over them. A step may only read slots with the right content, and
a worker that lets a block go too early is found out here, whatever its books say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twofold.core.blocks import BlockPool
from twofold.core.engine import Engine
from twofold.messages import RunStep
from twofold.types import BlockId, RequestId

_EMPTY = 0
_POSITIVE = 1 << 48  # added to tokens: hashes of small negative numbers are not all different


def chain(tokens: Iterable[int], parent: int = 1) -> list[int]:
    """Content of the slots of `tokens`, after a slot with content `parent`.

    Python's hash of a pair of integers is the same everywhere, unlike that of a string.
    """
    slots: list[int] = []
    for token in tokens:
        parent = hash((parent, token + _POSITIVE)) | 1
        slots.append(parent)
    return slots


class Contents:
    """Slots of the blocks of `pool`; all empty at first."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._size = pool.block_size
        self._slots = [[_EMPTY] * self._size for _ in range(pool.n_blocks)]
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
        return tuple([hash(tuple(self._slots[block])) for block in blocks])

    def copy(self, source: Contents, pairs: Sequence[tuple[BlockId, BlockId]]) -> tuple[int, ...]:
        """Copy whole blocks as (theirs, ours); returns the checksums of what was copied.

        Raises AssertionError when one of ours is not held for a handoff: nothing may land in it.
        """
        held = [block for hold in self._pool.holds.values() for block in hold.blocks]
        for _, ours in pairs:
            assert ours in held, f"bytes land in block {ours}, which no handoff holds"
        for theirs, ours in pairs:
            self._slots[ours] = list(source._slots[theirs])
        return self.checksums([ours for _, ours in pairs])

    def flip(self, block: BlockId) -> int:
        """Damage one slot of `block`; returns the block's checksum."""
        self._slots[block][0] ^= 2
        return self.checksums((block,))[0]

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
