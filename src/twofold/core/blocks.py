"""Paged KV pool: fixed-size blocks with reference counts, holds and an LRU of cached blocks.

Every block is in exactly one of four states, and the four counts always sum to the pool:

    free    no reference, nothing worth keeping in it
    cached  no reference, but the prefix cache knows its content; evicted when free ones run out
    active  referenced by requests, by none of them across a handoff
    held    referenced, and owned by at least one hold: a peer reads it, or a read fills it

A hold has an owner (request, generation, peer) and an expiry; nothing is held without end.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from twofold.core.abridged import KnownTokens
from twofold.core.links import Link
from twofold.core.lru import Lru
from twofold.core.prefix import PrefixCache
from twofold.types import BlockId, RequestId


class Hold(msgspec.Struct, kw_only=True):
    """Blocks that a handoff owns, until `expiry_ns` at the latest. `peer` "" is nobody yet."""

    owner: RequestId
    generation: int
    peer: str
    expiry_ns: int
    blocks: tuple[BlockId, ...]


class PoolCounts(msgspec.Struct, frozen=True):
    """Blocks by state, as `BlockPool` defines the states."""

    free: int
    cached: int
    active: int
    held: int

    @property
    def total(self) -> int:
        """All blocks of the pool."""
        return self.free + self.cached + self.active + self.held


class BlockPool:
    """Blocks 0 to `n_blocks` - 1 of `block_size` tokens each.

    `caching` False keeps nothing of ended requests.
    """

    def __init__(self, n_blocks: int, block_size: int, *, caching: bool = True) -> None:
        if n_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and tokens, not {n_blocks} of {block_size}")
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.cache = PrefixCache(block_size, n_blocks)
        self.holds: dict[RequestId, Hold] = {}
        self._caching = caching
        self._refs = [0] * n_blocks
        self._holders = [0] * n_blocks
        self._free = list(range(n_blocks - 1, -1, -1))
        self._lru = Lru(n_blocks)
        self._n_held = 0
        self.n_evicted = 0
        self.n_released = 0

    # ------------------------------------------------------------------ counts

    @property
    def available(self) -> int:
        """Blocks that can be allocated now: free ones and cached ones."""
        return len(self._free) + len(self._lru)

    def counts(self) -> PoolCounts:
        """Blocks by state."""
        free, cached = len(self._free), len(self._lru)
        return PoolCounts(free, cached, self.n_blocks - free - cached - self._n_held, self._n_held)

    def busy(self, blocks: Sequence[BlockId]) -> int:
        """How many of `blocks` somebody references, so that sharing uses up no available one."""
        refs = self._refs
        return sum([refs[block] > 0 for block in blocks])

    def references(self, block: BlockId) -> int:
        """How many requests and handoffs use `block`."""
        return self._refs[block]

    def freed_by(self, releases: Sequence[Sequence[BlockId]], but: Sequence[BlockId]) -> int:
        """How many blocks other than `but` would be idle after all of `releases`."""
        uses: dict[BlockId, int] = {}
        for blocks in releases:
            for block in blocks:
                uses[block] = uses.get(block, 0) + 1
        for block in but:
            uses.pop(block, None)
        return sum(1 for block, n in uses.items() if n == self._refs[block])

    # -------------------------------------------------------------- references

    def allocate(self, n: int) -> list[BlockId]:
        """`n` blocks with one reference each and unknown content.

        Free blocks go first; then the cached block that was used longest ago is evicted.
        The caller has checked `available`.
        """
        assert 0 <= n <= self.available, f"{n} blocks asked, {self.available} available"
        free = self._free
        n_free = min(n, len(free))
        blocks = free[len(free) - n_free :]
        blocks.reverse()
        del free[len(free) - n_free :]
        if n > n_free:
            evicted = self._lru.pop(n - n_free)
            self.cache.forget(evicted)
            self.n_evicted += len(evicted)
            blocks += evicted
        refs = self._refs
        for block in blocks:
            refs[block] = 1
        return blocks

    def share(self, blocks: Sequence[BlockId]) -> None:
        """One more reference to each block: cached ones become active again."""
        refs, lru = self._refs, self._lru
        for block in blocks:
            n = refs[block]
            refs[block] = n + 1
            if n == 0:
                lru.remove(block)

    def release(self, blocks: Sequence[BlockId]) -> None:
        """One reference fewer to each block.

        Goes from the last block to the first, so that of one prompt's cached blocks the tail is
        evicted before the head, which more prompts share.
        """
        self.n_released += 1
        refs, holders, free = self._refs, self._holders, self._free
        known = self.cache.links
        cached: list[BlockId] = []
        for block in reversed(blocks):
            left = refs[block] - 1
            assert left >= 0, f"block {block} released more often than taken"
            refs[block] = left
            if left == 0:
                assert holders[block] == 0, f"block {block} let go while held"
                if known[block] is not None:
                    cached.append(block)
                else:
                    free.append(block)
        if cached:
            self._lru.append(cached)

    # ------------------------------------------------------------------- holds

    def hold(self, hold: Hold) -> None:
        """A handoff takes over the references that its owner has to `hold.blocks`."""
        assert hold.owner not in self.holds, f"request {hold.owner} holds already"
        self.holds[hold.owner] = hold
        refs, holders = self._refs, self._holders
        for block in hold.blocks:
            assert refs[block] > 0, f"block {block} held without a reference"
            n = holders[block]
            holders[block] = n + 1
            if n == 0:
                self._n_held += 1

    def unhold(self, owner: RequestId) -> tuple[BlockId, ...]:
        """End a hold; the references pass to the caller, who keeps or releases them."""
        hold = self.holds.pop(owner)
        holders = self._holders
        for block in hold.blocks:
            n = holders[block] - 1
            holders[block] = n
            if n == 0:
                self._n_held -= 1
        return hold.blocks

    # ------------------------------------------------------------ prefix cache

    def remember(
        self,
        blocks: Sequence[BlockId],
        first: int,
        end: int,
        tokens: KnownTokens,
        salt: str,
        links: list[Link],
    ) -> None:
        """The full blocks number `first` to `end` of `tokens` have been computed."""
        if self._caching:
            self.cache.insert(blocks, first, end, tokens, salt, links)

    def lookup(self, tokens: KnownTokens, salt: str, links: list[Link]) -> list[BlockId]:
        """Cached blocks that `tokens` starts with (see `PrefixCache.lookup`); takes none."""
        return self.cache.lookup(tokens, salt, links) if self._caching else []

    def drop_cache(self) -> None:
        """Forget all cached content, as after a change of weights."""
        self.cache.clear()
        self._free.extend(self._lru.pop(len(self._lru)))

    # --------------------------------------------------------------- integrity

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one state and all counts agree."""
        free, lru = set(self._free), set(self._lru)
        assert len(free) == len(self._free), "a block is free twice"
        assert len(lru) == len(self._lru), "cached blocks miscounted"
        assert not free & lru, "a block is both free and cached"
        held: dict[BlockId, int] = {}
        for hold in self.holds.values():
            for block in hold.blocks:
                held[block] = held.get(block, 0) + 1
        for block in range(self.n_blocks):
            idle = self._refs[block] == 0
            assert idle == (block in free or block in lru), f"block {block}: count and state differ"
            assert self._holders[block] == held.get(block, 0), f"block {block}: holds miscounted"
            assert self._holders[block] <= self._refs[block], f"block {block}: held unreferenced"
            assert block not in lru or block in self.cache, f"block {block}: cached, unknown"
            assert block not in free or block not in self.cache, f"block {block}: free, known"
        assert self._n_held == len(held), "held blocks miscounted"
        assert self.counts().total == self.n_blocks
