"""The serving side of a write over TCP: takes a peer's pieces into the blocks of a window."""

from __future__ import annotations

import socket

from twofold.transport import wire
from twofold.transport.checksum import block_checksum
from twofold.transport.memory import PoolMemory
from twofold.transport.windows import Windows


class Intake:
    """One request to write: its pieces come one after another, straight into our blocks.

    A piece is taken only into blocks of the request's window, and only while that is open.
    """

    def __init__(self, request: wire.RequestHead, memory: PoolMemory, windows: Windows) -> None:
        self._window = request.tag
        self._checksum = request.checksum
        self._memory = memory
        self._windows = windows
        self._left = request.n_ranges
        self._head = bytearray(wire.PIECE_BYTES)
        self._filled = 0
        self._piece: wire.PieceHead | None = None
        self._rest = memoryview(b"")
        self.n_bytes = 0
        self.n_last = 0
        """Bytes that the last `receive` took; 0: the peer has closed the connection."""
        self.refusal = wire.OK if request.epoch == memory.epoch else wire.STALE
        """Why no more is taken, as a status of an answer."""

    def receive(self, sock: socket.socket) -> bool:
        """One receive. Whether the request is over: all has landed, or is refused.

        Raises BlockingIOError when nothing has come, and OSError.
        """
        if self.refusal != wire.OK:
            return True
        if self._piece is None:
            self.n_last = sock.recv_into(memoryview(self._head)[self._filled :])
            self._filled += self.n_last
            if self._filled == len(self._head):
                self._begin()
        else:
            self.n_last = self._windows.receive(self._window, sock, self._rest)
            if self.n_last < 0:
                self.refusal = wire.CLOSED
                return True
            self._rest = self._rest[self.n_last :]
            if not self._rest:
                self._landed(self._piece)
        return self.refusal != wire.OK or not self._left

    def _begin(self) -> None:
        memory = self._memory
        piece = wire.unpack_piece(self._head, memory.n_blocks, memory.block_bytes)
        self._filled = 0
        if piece is None:
            self.refusal = wire.OUTSIDE
        elif not self._windows.allows(self._window, piece.first, piece.n):
            self.refusal = wire.CLOSED
        else:
            self._piece = piece
            self._rest = self._bytes_of(piece)

    def _bytes_of(self, piece: wire.PieceHead) -> memoryview:
        start = piece.first * self._memory.block_bytes + piece.offset
        return self._memory.buffer[start : start + piece.n_bytes]

    def _landed(self, piece: wire.PieceHead) -> None:
        if self._checksum and block_checksum(self._bytes_of(piece)) != piece.checksum:
            self.refusal = wire.DAMAGED
        self.n_bytes += piece.n_bytes
        self._left -= 1
        self._piece = None
        self._rest = memoryview(b"")
