"""Reads through a transfer engine of the field's own: what all such engines have in common.

Such an engine copies between two addresses and knows nothing of epochs, generations or cancels.
So here a peer's life is looked up in the header before its blocks, through the engine itself,
before and after every copy. And what may still be under way is ended by closing the link to that
peer, which is the one thing after which the engines put nothing more into our blocks.

A peer cannot be kept from writing what it once began: its bytes may be in the kernel's buffers
when it is long dead. So blocks are read this way and never written.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from twofold.transport.base import Completion, Ledger
from twofold.transport.foreign_link import Engine, EngineError
from twofold.transport.foreign_peer import Job, Peer, address_of
from twofold.transport.memory import HEADER_BYTES, PoolMemory
from twofold.transport.runs import part
from twofold.transport.segment import (
    EngineSegment,
    SegmentError,
    format_segment,
    parse_segment,
)

NO_WRITES: Final = "this transport only reads: a late write could not be kept out"


class ForeignTransport:
    """Reads blocks through `engine`. See `Transport` for the calls; `write` fails, always.

    `max_transfers` bounds the reads in flight, `max_peers` the links kept to peers. A peer
    that is silent for `timeout_s` fails a read. `checksums` False leaves out the checksums of
    completions.
    """

    def __init__(
        self,
        notify: Callable[[], None],
        engine: Engine,
        *,
        max_transfers: int = 256,
        max_peers: int = 64,
        timeout_s: float = 5.0,
        checksums: bool = True,
    ) -> None:
        self.engine = engine
        self.timeout_s = timeout_s
        self.checksums = checksums
        self._closing = False
        self._max_peers = max_peers
        self._ledger = Ledger(notify, max_transfers)
        self._memory: PoolMemory | None = None
        self._segment: EngineSegment | None = None
        self._lock = threading.Lock()
        self._peers: dict[EngineSegment, Peer] = {}
        self._gone: deque[Peer] = deque(maxlen=max_peers)

    def register(self, memory: PoolMemory) -> str:
        """See `Transport.register`. Raises OSError when the engine does not start."""
        if self._memory is not None or self._closing:
            raise RuntimeError("memory is registered once, before close")
        base = address_of(memory)
        try:
            endpoint = self.engine.serve(base, HEADER_BYTES + memory.n_bytes)
        except EngineError as error:
            raise OSError(str(error)) from error
        self._memory = memory
        self._segment = self.engine.segment(
            endpoint=endpoint,
            base=base,
            epoch=memory.epoch.hex(),
            n_blocks=memory.n_blocks,
            block_bytes=memory.block_bytes,
        )
        return format_segment(self._segment)

    def read(self, transfer_id: int, segment: str, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Transport.read`."""
        reason = self._ledger.admit(transfer_id)
        if not reason and self._memory is None:
            reason = "no memory is registered"
        if not reason:
            reason = self._hand_out(segment, Job(transfer_id, tuple(pairs)))
        if reason:
            self._ledger.fail(transfer_id, reason)

    def _hand_out(self, text: str, job: Job) -> str:
        """Give a read to its peer's thread; the reason if that cannot be."""
        assert self._memory is not None
        try:
            segment = parse_segment(text, self.engine.segment)
        except SegmentError as error:
            return str(error)
        with self._lock:
            peer = self._peers.pop(segment, None)
            if peer is None:
                if len(self._peers) >= self._max_peers and not self._let_go():
                    return f"too many peers at a time ({self._max_peers})"
                peer = Peer(self, segment, self._memory)
                peer.thread.start()
            self._peers[segment] = peer  # at the end: the order is that of last use
            peer.n_jobs += 1
            peer.jobs.put(job)
        return ""

    def _let_go(self) -> bool:
        """End the link that has not been used for longest; False when all are in use."""
        for segment, peer in self._peers.items():
            if not peer.n_jobs:
                del self._peers[segment]
                peer.jobs.put(None)
                self._gone.append(peer)
                return True
        return False

    def write(
        self,
        transfer_id: int,
        segment: str,
        pairs: Sequence[tuple[int, int]],
        layers: tuple[int, int],
        n_layers: int,
    ) -> None:
        """Fails: see this module. Raises ValueError for layers that a block has not."""
        part(layers, n_layers, self._memory.block_bytes if self._memory is not None else n_layers)
        self._ledger.fail(transfer_id, self._ledger.admit(transfer_id) or NO_WRITES)

    def open_window(self, blocks: Sequence[int]) -> str:
        """See `Transport.open_window`. Nobody can write through it."""
        if self._segment is None:
            raise RuntimeError("no memory is registered")
        return format_segment(self._segment)

    def close_window(self, segment: str) -> bool:
        """See `Transport.close_window`: true, since nothing was ever let in."""
        return True

    def poll(self) -> list[Completion]:
        """See `Transport.poll`."""
        return self._ledger.drain()

    def cancel(self, transfer_id: int) -> None:
        """See `Transport.cancel`."""
        self._ledger.cancel(transfer_id)

    def close(self) -> None:
        """See `Transport.close`."""
        self._closing = True
        self._ledger.close()
        with self._lock:
            peers = list(self._peers.values())
            self._peers.clear()
        for peer in peers:
            peer.jobs.put(None)
        for peer in (*peers, *self._gone):
            peer.thread.join()
        self._gone.clear()
        self.engine.close()

    # ------------------------------------------------------------------ the peers' threads

    def stopped(self, transfer_id: int) -> str:
        """Why a read should go no further; empty when it should."""
        if self._closing:
            return "transport closed"
        return "cancelled" if self._ledger.cancelled(transfer_id) else ""

    def end(self, peer: Peer, completion: Completion) -> None:
        """A read has ended."""
        with self._lock:
            peer.n_jobs -= 1
        self._ledger.finish(completion)
