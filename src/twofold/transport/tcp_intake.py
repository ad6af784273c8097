"""The serving side of a write over TCP: takes a peer's bytes into the blocks of a window."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

from twofold.transport import wire
from twofold.transport.memory import PoolMemory
from twofold.transport.windows import Windows

_VIEWS: Final = 32
"""Parts of blocks that one receive may fill. With one alone, copies on one host were a quarter
faster, and decode's steps slower: each receive takes the interpreter lock from them."""


class Intake:
    """One request to write: the bytes of its ranges come in order, straight into our blocks.

    They are taken only into blocks of the request's window, and only while that is open. `named`
    is the span of each block and then the ranges.
    """

    def __init__(
        self,
        request: wire.RequestHead,
        named: Sequence[tuple[int, int]],
        memory: PoolMemory,
        windows: Windows,
    ) -> None:
        self._window = request.tag
        self._windows = windows
        self._rests: deque[memoryview] = deque()  # what has not come yet
        self.n_bytes = 0
        self.n_last = 0
        """Bytes that the last `receive` took; 0: the peer has closed the connection."""
        self.refusal = wire.OK
        """Why no more is taken, as a status of an answer."""
        size = memory.block_bytes
        span, *ranges = named
        first, end = span
        if request.epoch != memory.epoch:
            self.refusal = wire.STALE
        elif not wire.fits(span, ranges, memory.n_blocks, size):
            self.refusal = wire.OUTSIDE
        elif not windows.allows(self._window, ranges):
            self.refusal = wire.CLOSED
        else:
            parts = [(block * size + first, n * (end - first)) for block, n in ranges]
            self._rests.extend(memory.buffer[at : at + n] for at, n in parts)

    @property
    def over(self) -> bool:
        """All has landed, or is refused."""
        return not self._rests or self.refusal != wire.OK

    def receive(self, sock: socket.socket) -> None:
        """One receive. Raises BlockingIOError when nothing has come, and OSError."""
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
