"""What every transport offers, and the part that all of them share.

A transport moves blocks and knows nothing of requests. It reads them from a peer's pool, or writes
them there through a window that the peer has opened.
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
    """One read or write has ended and writes to its blocks no more.

    `checksums` are xxh3_64 of the blocks as they landed, in the order of the pairs; empty for a
    write, when the read failed, and when the transport was made without checksums.
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

    def write(
        self,
        transfer_id: int,
        segment: str,
        pairs: Sequence[tuple[int, int]],
        layers: tuple[int, int],
        n_layers: int,
    ) -> None:
        """Start copying blocks to a peer: `pairs` of (ours, the peer's), through its window.

        A block is `n_layers` equal parts; parts `layers[0]` to `layers[1]` of each are written.
        Exactly one completion follows, as for `read`. When it failed, what was under way may
        still land, until the peer has closed the window.
        """

    def open_window(self, blocks: Sequence[int]) -> str:
        """Let a peer write to `blocks`; gives the segment text that it needs for that."""

    def close_window(self, segment: str) -> bool:
        """End what `open_window` began. Whether nothing can land any more from now on.

        False where peers reach into our memory by themselves: such a peer has to say that it
        has stopped, or be dead.
        """

    def poll(self) -> list[Completion]:
        """Completions since the last call, in the order in which reads and writes ended."""

    def cancel(self, transfer_id: int) -> None:
        """Stop a read or write early; its completion still comes.

        An id that is not in flight is ignored. One that is done by then completes as it is.
        """

    def close(self) -> None:
        """Stop; what is in flight completes as failed and can still be polled."""


class Ledger:
    """Transfers in flight and completions not yet polled, between a caller and a thread."""

    def __init__(self, notify: Callable[[], None], max_transfers: int) -> None:
        self._notify = notify
        self._max_transfers = max_transfers
        self._lock = threading.Lock()
        self._cancelled: dict[int, bool] = {}
        self._done: list[Completion] = []
        self._closed = False

    def admit(self, transfer_id: int) -> str:
        """Take a transfer in; the reason if it is refused. Raises ValueError for a used id."""
        with self._lock:
            if transfer_id in self._cancelled:
                raise ValueError(f"transfer {transfer_id} is still in flight")
            full = len(self._cancelled) >= self._max_transfers
            self._cancelled[transfer_id] = False
        if self._closed:
            return "transport closed"
        return f"transfer queue full ({self._max_transfers})" if full else ""

    def cancel(self, transfer_id: int) -> bool:
        """Mark a transfer as cancelled; False when it is not in flight or was marked before."""
        with self._lock:
            if self._cancelled.get(transfer_id, True):
                return False
            self._cancelled[transfer_id] = True
            return True

    def cancelled(self, transfer_id: int) -> bool:
        """Whether a transfer in flight has been cancelled."""
        return self._cancelled.get(transfer_id, False)

    def finish(self, completion: Completion) -> None:
        """End a transfer that was admitted, or that was refused on admission."""
        with self._lock:
            self._cancelled.pop(completion.transfer_id, None)
            self._done.append(completion)
        try:
            self._notify()
        except Exception:
            # A driver that is shutting down may have closed its loop; the transport goes on.
            _log.warning("notify failed for transfer %d", completion.transfer_id, exc_info=True)

    def fail(self, transfer_id: int, reason: str) -> None:
        """End a transfer as failed."""
        self.finish(Completion(transfer_id, ok=False, reason=reason))

    def drain(self) -> list[Completion]:
        """All completions so far, which are then forgotten here."""
        with self._lock:
            done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Refuse transfers from now on."""
        self._closed = True
