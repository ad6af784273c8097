"""Places in the batch of one engine: who has one, who waits for one, and who would fit."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter
from typing import Final

from twofold.core.blocks import BlockPool
from twofold.core.request import Request, State
from twofold.policy import batch
from twofold.types import BlockId

age: Final = attrgetter("id")


class Places:
    """Slots of one engine and blocks of its pool. Oldest first, both those that run and those that
    wait; a worker hands out ids in order of arrival.
    """

    def __init__(self, pool: BlockPool, max_num_seqs: int) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.n_placed = 0  # requests that hold a slot: running, loading, verifying
        self._n_enqueued = 0
        self._tried: tuple[int, int, int] | None = None

    def enqueue(self, request: Request) -> None:
        """Let `request`, whose ids are known, wait for its place."""
        request.state = State.WAITING
        self._n_enqueued += 1
        insort(self.waiting, request, key=age)

    def _need(self, request: Request) -> tuple[int, list[BlockId]]:
        """Available blocks that placing would use up, and the cached blocks it starts with."""
        hits = self.pool.lookup(request.tokens, request.salt, request.links)
        return request.n_blocks_known(self.pool.block_size) - self.pool.busy(hits), hits

    def _fits(self, need: int) -> bool:
        spare = batch.spare_blocks(len(self.running), self.pool.n_blocks)
        return self.n_placed < self.max_num_seqs and need + spare <= self.pool.available

    def _would_fit(self, request: Request, without: list[Request]) -> bool:
        """Whether `request` could be placed if `without` gave their slots and blocks back."""
        if self.n_placed - len(without) >= self.max_num_seqs:
            return False
        need, hits = self._need(request)
        # Blocks that it starts with are counted as taken, not as needed.
        gain = self.pool.freed_by([r.blocks for r in without], hits)
        spare = batch.spare_blocks(len(self.running) - len(without), self.pool.n_blocks)
        return need + spare <= self.pool.available + gain

    def _changes(self) -> tuple[int, int, int]:
        """Counts that stand still as long as no waiting request has got a better chance."""
        return self.pool.n_released, self._n_enqueued, self.pool.cache.n_inserted

    def look_again(self) -> None:
        """What `may_start` says has changed."""
        self._tried = None

    @property
    def is_settled(self) -> bool:
        """Whether trying to place what waits is in vain until blocks come back or one arrives."""
        return not self.waiting or (self._tried or ())[:2] == self._changes()[:2]
