"""The writing side of the TCP transport: sends our blocks into those that a peer has opened."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from twofold.transport import wire
from twofold.transport.memory import PoolMemory
from twofold.transport.reactor import READ, WRITE
from twofold.transport.runs import Piece
from twofold.transport.tcp_connection import TURN_BYTES, Connection

_AHEAD_BYTES: Final = 1024 * 1024
_AHEAD_VIEWS: Final = 256
"""How much is made ready for one call to the kernel, so that small pieces cost few calls."""


class Outflow:
    """The part of one write that goes over one connection, and where it has got to.

    `on_end` is called once: with nothing when the peer has said that all has landed, else with
    the reason.
    """

    def __init__(
        self,
        window: int,
        epoch: bytes,
        pieces: Sequence[Piece],
        on_end: Callable[[str], None],
    ) -> None:
        self.window = window
        self.epoch = epoch
        self.pieces = deque(pieces)
        self.on_end = on_end
        self.n_bytes = sum(piece.n_bytes for piece in pieces)

    def head(self) -> bytes:
        """What comes before the bytes of all pieces."""
        first = self.pieces[0]  # all are of the same span
        ranges = [wire.Range(piece.dst, piece.n) for piece in self.pieces]
        span = (first.offset, first.offset + first.n_bytes // first.n)
        return wire.pack_write(self.epoch, self.window, ranges, span)

    def next(self, memory: PoolMemory) -> memoryview:
        """The bytes of the next piece, straight from the pool."""
        piece = self.pieces.popleft()
        start = piece.src * memory.block_bytes + piece.offset
        return memory.buffer[start : start + piece.n_bytes]


class Sender(Connection[Outflow]):
    """A connection on which our blocks are written to a peer. See `Connection`."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._out: deque[memoryview] = deque()
        self._answer = bytearray(wire.ANSWER_BYTES)
        self._filled = 0
        self._sent = False
        super().__init__(*args, **settings)

    def _begin(self, task: Outflow) -> None:
        self._out.clear()
        self._out.append(memoryview(task.head()))
        self._filled = 0
        self._sent = False

    def _go_on(self, task: Outflow, events: int) -> None:
        # A peer that refuses says so before it has taken everything in.
        if events & READ and self._heard(task):
            return
        if events & WRITE and not self._sent:
            self._send(task)

    def _drop(self) -> None:
        self._out.clear()

    def _silence(self) -> str:
        return "the peer took nothing in and said nothing"

    def _send(self, task: Outflow) -> None:
        """Hand frames to the kernel until it takes no more."""
        n_sent = 0
        while n_sent < TURN_BYTES:
            ahead = sum(map(len, self._out))
            while task.pieces and ahead < _AHEAD_BYTES and len(self._out) < _AHEAD_VIEWS:
                self._out.append(task.next(self._memory))
                ahead += len(self._out[-1])
            if not self._out:
                break
            try:
                n = self.sock.sendmsg(self._out)
            except BlockingIOError:
                break
            except ConnectionError:
                if not self._heard(task):
                    raise
                return
            n_sent += n
            self._moved()
            self._forget_sent(n)
        # Also when a turn ends with the last byte: the peer may answer before our next turn.
        self._sent = not self._out and not task.pieces
        self._reactor.watch(self, READ if self._sent else READ | WRITE)

    def _forget_sent(self, n: int) -> None:
        while n:
            first = self._out.popleft()
            if n < len(first):
                self._out.appendleft(first[n:])
                return
            n -= len(first)

    def _heard(self, task: Outflow) -> bool:
        """Take in what the peer says; whether the task is over with that."""
        try:
            n = self.sock.recv_into(memoryview(self._answer)[self._filled :])
        except BlockingIOError:
            return False
        if n == 0:
            self.fail("the peer closed the connection")
            return True
        self._filled += n
        if self._filled < len(self._answer):
            return False
        nothing = wire.Range(0, 0)
        wire.check_answer(self._answer, task.epoch, task.window, nothing, task.n_bytes)
        if not self._sent:
            raise wire.FrameError("the peer says that all has landed before it was sent")
        self._rest(task)
        return True
