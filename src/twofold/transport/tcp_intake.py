"""The serving side of a write over TCP: takes a peer's batches into the blocks of a window."""

from __future__ import annotations

import socket
from collections import deque
from itertools import islice
from typing import Final

from twofold.transport import wire
from twofold.transport.memory import PoolMemory
from twofold.transport.windows import Windows

_VIEWS: Final = 32
"""Parts of blocks that one receive may fill."""


class Intake:
    """One request to write: its batches come one after another, straight into our blocks.

    They are taken only into blocks of the request's window, and only while that is open.
    """

    def __init__(self, request: wire.RequestHead, memory: PoolMemory, windows: Windows) -> None:
        self._window = request.tag
        self._memory = memory
        self._windows = windows
        self._left = request.n_ranges  # in batches that have not begun
        self._await_batch()
        self._rests: deque[memoryview] = deque()  # of the batch, what has not come yet
        self.n_bytes = 0
        self.n_last = 0
        """Bytes that the last `receive` took; 0: the peer has closed the connection."""
        self.refusal = wire.OK if request.epoch == memory.epoch else wire.STALE
        """Why no more is taken, as a status of an answer."""

    def receive(self, sock: socket.socket) -> bool:
        """One receive. Whether the request is over: all has landed, or is refused.

        Raises BlockingIOError when nothing has come, OSError, and wire.FrameError.
        """
        if self.refusal != wire.OK:
            return True
        if self._rests:
            self._take_bytes(sock)
        else:
            self._take_head(sock)
        return self.refusal != wire.OK or not (self._left or self._rests)

    def _await_batch(self) -> None:
        self._head: wire.BatchHead | None = None
        self._buffer = bytearray(wire.BATCH_BYTES)
        self._filled = 0

    def _take_head(self, sock: socket.socket) -> None:
        self.n_last = sock.recv_into(memoryview(self._buffer)[self._filled :])
        self._filled += self.n_last
        if self._filled < len(self._buffer):
            return
        if self._head is not None:
            self._begin(self._head, wire.unpack_ranges(self._buffer))
            return
        self._head = wire.unpack_batch(self._buffer, self._left)
        self._buffer = bytearray(self._head.n_ranges * wire.RANGE_BYTES)
        self._filled = 0

    def _begin(self, head: wire.BatchHead, ranges: list[wire.Range]) -> None:
        memory = self._memory
        size = memory.block_bytes
        if not wire.fits(head, ranges, memory.n_blocks, size):
            self.refusal = wire.OUTSIDE
        elif not self._windows.allows(self._window, ranges):
            self.refusal = wire.CLOSED
        else:
            starts = [(each.first * size + head.offset, each.n * head.n_bytes) for each in ranges]
            self._rests.extend(memory.buffer[start : start + n] for start, n in starts)
            self._left -= head.n_ranges
            self._await_batch()

    def _take_bytes(self, sock: socket.socket) -> None:
        rests = self._rests
        into = list(islice(rests, _VIEWS))
        self.n_last = n = self._windows.receive(self._window, sock, into)
        if n < 0:
            self.refusal = wire.CLOSED
            return
        self.n_bytes += n
        while rests and n >= len(rests[0]):
            n -= len(rests.popleft())
        if n:
            rests[0] = rests[0][n:]
