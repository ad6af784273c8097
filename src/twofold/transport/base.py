"""What every transport offers, and the part that all of them share.

A transport moves blocks and knows nothing of requests. It reads now; writing (for push) would be
a fifth call beside `read` with the same completions.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from twofold.transport.memory import PoolMemory

_log = logging.getLogger("twofold.transport")

PIECE_BYTES: Final = 1024 * 1024
"""Most bytes copied in one piece (or one block, if that is larger): bounds how long a cancel
waits, and keeps a piece in the processor's cache from its copy to its checksum."""


class Completion(msgspec.Struct, frozen=True):
    """One read has ended and writes to its blocks no more.

    `checksums` are xxh3_64 of the blocks as they landed, in the order of the pairs; empty when
    the read failed or the transport was made without checksums.
    """

    transfer_id: int
    ok: bool
    reason: str = ""
    n_bytes: int = 0
    checksums: tuple[int, ...] = ()


class Transport(Protocol):
    """Moves KV blocks between the pools of two workers.

    All calls are made from one thread and return at once, except `close`, which waits for the
    background thread. The `notify` given at construction is called, from any thread, when `poll`
    has something to give.
    """

    def register(self, memory: PoolMemory) -> str:
        """Offer `memory` to peers and take it as the destination of reads; once only.

        Gives the segment text by which peers find it.
        """

    def read(self, transfer_id: int, segment: str, pairs: Sequence[tuple[int, int]]) -> None:
        """Start copying blocks: `pairs` of (the peer's, ours). Exactly one completion follows.

        Whatever fails, a full queue and a bad segment included, shows in the completion. Raises
        ValueError only for a `transfer_id` that is still in flight.
        """

    def poll(self) -> list[Completion]:
        """Completions since the last call, in the order in which the reads ended."""

    def cancel(self, transfer_id: int) -> None:
        """Stop a read early; its completion still comes, once nothing is written any more.

        An id that is not in flight is ignored. A read that is done by then completes as it is.
        """

    def close(self) -> None:
        """Stop; reads in flight complete as failed and can still be polled."""


class Ledger:
    """Reads in flight and completions not yet polled, between a caller and a background thread."""

    def __init__(self, notify: Callable[[], None], max_transfers: int) -> None:
        self._notify = notify
        self._max_transfers = max_transfers
        self._lock = threading.Lock()
        self._cancelled: dict[int, bool] = {}
        self._done: list[Completion] = []
        self._closed = False

    def admit(self, transfer_id: int) -> str:
        """Take a read in; gives the reason if it is refused. Raises ValueError for a used id."""
        with self._lock:
            if transfer_id in self._cancelled:
                raise ValueError(f"transfer {transfer_id} is still in flight")
            full = len(self._cancelled) >= self._max_transfers
            self._cancelled[transfer_id] = False
        if self._closed:
            return "transport closed"
        return f"transfer queue full ({self._max_transfers})" if full else ""

    def cancel(self, transfer_id: int) -> bool:
        """Mark a read as cancelled; False when it is not in flight or was marked before."""
        with self._lock:
            if self._cancelled.get(transfer_id, True):
                return False
            self._cancelled[transfer_id] = True
            return True

    def cancelled(self, transfer_id: int) -> bool:
        """Whether a read in flight has been cancelled."""
        return self._cancelled.get(transfer_id, False)

    def finish(self, completion: Completion) -> None:
        """End a read that was admitted, or that was refused on admission."""
        with self._lock:
            self._cancelled.pop(completion.transfer_id, None)
            self._done.append(completion)
        try:
            self._notify()
        except Exception:
            # A driver that is shutting down may have closed its loop; the transport goes on.
            _log.warning("notify failed for transfer %d", completion.transfer_id, exc_info=True)

    def fail(self, transfer_id: int, reason: str) -> None:
        """End a read as failed."""
        self.finish(Completion(transfer_id, ok=False, reason=reason))

    def drain(self) -> list[Completion]:
        """All completions so far, which are then forgotten here."""
        with self._lock:
            done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Refuse reads from now on."""
        self._closed = True
