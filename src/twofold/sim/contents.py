"""What is in each KV block of a simulated worker, so that wrong KV is seen and not only counted.

A slot's content stands for keys and values of one token, which depend on that token and all
before it: it is a chained hash over them. A step may only read slots with the right content, in
all layers, and a worker that lets a block go too early is found out here, whatever its books say.
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
    """Slots of the blocks of `pool`, for each of `layers` layers; all empty at first.

    Mostly all layers of a block hold the same, which is kept once. Those of the others, of which
    some layers have been computed or copied and some have not, or are damaged, are in `_apart`.
    """

    def __init__(self, pool: BlockPool, layers: int) -> None:
        self._pool = pool
        self._size = pool.block_size
        self._layers = layers
        self._slots = [[_EMPTY] * self._size for _ in range(pool.n_blocks)]
        self._apart: dict[BlockId, list[list[int]]] = {}
        self._chains: dict[RequestId, list[int]] = {}

    def verify(self, engine: Engine, step: RunStep) -> None:
        """Raise AssertionError unless every slot that `step` reads is as it should be."""
        for request_id, start, _ in step.work:
            self._compare(engine, request_id, start)

    def write(self, engine: Engine, step: RunStep) -> None:
        """Store what `step` computes, then verify that all up to there is as it should be."""
        self.write_layers(engine, step, self._layers)
        for request_id, start, n in step.work:
            # Not so for a prompt of which an earlier step failed while this one was in flight.
            if engine.row(request_id).computed == start:
                self._compare(engine, request_id, start + n)

    def write_layers(self, engine: Engine, step: RunStep, end: int) -> None:
        """Store what `step` computes in its layers before `end`."""
        for request_id, start, n in step.work:
            right = self._chain(engine, request_id)
            blocks = engine.row(request_id).blocks
            for at in range(start, start + n):
                block = blocks[at // self._size]
                if end == self._layers and block not in self._apart:
                    self._slots[block][at % self._size] = right[at]
                    continue
                for layer in self._take_apart(block)[:end]:
                    layer[at % self._size] = right[at]
            for block in blocks[start // self._size : (start + n - 1) // self._size + 1]:
                self._join(block)

    def checksums(self, blocks: Sequence[BlockId]) -> tuple[int, ...]:
        """One number per block over all of its slots in all layers."""
        return tuple([self._checksum(block) for block in blocks])

    def _checksum(self, block: BlockId) -> int:
        apart = self._apart.get(block)
        if apart is None:
            return hash(tuple(self._slots[block]))
        return hash(tuple([hash(tuple(layer)) for layer in apart]))

    def copy(
        self,
        source: Contents,
        pairs: Sequence[tuple[BlockId, BlockId]],
        layers: tuple[int, int] | None = None,
    ) -> tuple[int, ...]:
        """Copy blocks as (theirs, ours), whole or only layers `layers[0]` to `layers[1]`.

        Returns the checksums of what is in ours now. Raises AssertionError when one of ours is
        not held for a handoff: nothing may land in it.
        """
        self._may_land([ours for _, ours in pairs])
        first, end = layers or (0, self._layers)
        whole = end - first == self._layers
        for theirs, ours in pairs:
            if whole and theirs not in source._apart:
                self._apart.pop(ours, None)
                self._slots[ours] = list(source._slots[theirs])
                continue
            found = source._apart.get(theirs) or [source._slots[theirs]] * self._layers
            self._take_apart(ours)[first:end] = [list(layer) for layer in found[first:end]]
            self._join(ours)
        return self.checksums([ours for _, ours in pairs])

    def _may_land(self, blocks: Sequence[BlockId]) -> None:
        held = [block for hold in self._pool.holds.values() for block in hold.blocks]
        for block in blocks:
            assert block in held, f"bytes land in block {block}, which no handoff holds"

    def flip(self, block: BlockId, layer: int = 0) -> int:
        """Damage one slot of one layer of `block`; returns the block's checksum."""
        self._take_apart(block)[layer][0] ^= 2
        self._join(block)
        return self._checksum(block)

    def _take_apart(self, block: BlockId) -> list[list[int]]:
        """The layers of `block`, each of its own."""
        apart = self._apart.get(block)
        if apart is None:
            apart = self._apart[block] = [list(self._slots[block]) for _ in range(self._layers)]
        return apart

    def _join(self, block: BlockId) -> None:
        """Keep `block` once again if all its layers are alike."""
        apart = self._apart.get(block)
        if apart is not None and all(layer == apart[0] for layer in apart):
            self._slots[block] = self._apart.pop(block)[0]

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
            for layer in self._apart.get(block) or (self._slots[block],):
                assert layer[: end - index] == right[index:end], (
                    f"request {request_id} would read wrong KV in block {block}, "
                    f"tokens {index} to {end}"
                )
