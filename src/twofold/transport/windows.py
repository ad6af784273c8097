"""Which blocks peers may write to now, over connections that they made to us."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Sequence
from itertools import chain, count


class Windows:
    """Sets of blocks that are open for writing, each under a number that is never used again.

    A receive into a block and the closing of its window exclude each other. So once `close` has
    returned, nothing lands in those blocks any more, however late it was sent.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._open: dict[int, frozenset[int]] = {}

    def open(self, blocks: Iterable[int]) -> int:
        """Let `blocks` be written; gives the window's number."""
        with self._lock:
            number = next(self._numbers)
            self._open[number] = frozenset(blocks)
        return number

    def close(self, number: int) -> None:
        """Let nothing more be written through a window. One that is not open is ignored."""
        with self._lock:
            self._open.pop(number, None)

    def allows(self, number: int, ranges: Iterable[tuple[int, int]]) -> bool:
        """Whether the blocks of `ranges`, (first, number of blocks), may be written through a
        window."""
        blocks = self._open.get(number, frozenset())
        return blocks.issuperset(
            chain.from_iterable(range(first, first + n) for first, n in ranges)
        )

    def receive(self, number: int, sock: socket.socket, into: Sequence[memoryview]) -> int:
        """Receive into blocks of a window; the bytes that came, 0 at the end, -1 if it is closed.

        `into` is filled in order. The socket does not block: raises BlockingIOError when nothing
        has come, and OSError.
        """
        with self._lock:
            if number not in self._open:
                return -1
            return sock.recvmsg_into(into)[0]
