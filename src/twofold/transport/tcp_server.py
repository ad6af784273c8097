"""The serving side of the TCP transport: sends blocks of our pool to peers, and takes theirs in."""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from twofold.transport import wire
from twofold.transport.checksum import checksums, combined
from twofold.transport.memory import PoolMemory
from twofold.transport.reactor import READ, WRITE, Reactor
from twofold.transport.tcp_intake import Intake
from twofold.transport.windows import Windows
from twofold.types import NS_PER_MS, seconds_to_ns

_log = logging.getLogger("twofold.transport")

_TURN_BYTES: Final = 8 * 1024 * 1024
"""Most bytes moved for one peer before the others have a turn."""

_AHEAD_BYTES: Final = 1024 * 1024
_AHEAD_FRAMES: Final = 64
"""How much is made ready for one call to the kernel, so that small blocks cost few calls."""


class Listener:
    """The data port of one pool. Raises OSError when it cannot be bound.

    `idle_s` bounds how long a connection may stand without a request, `timeout_s` how long half
    a request or a blocked send may stand still, `max_connections` how many are open at a time.
    """

    def __init__(
        self,
        reactor: Reactor,
        memory: PoolMemory,
        windows: Windows,
        host: str,
        port: int,
        *,
        timeout_s: float,
        idle_s: float,
        max_connections: int,
    ) -> None:
        self._reactor = reactor
        self._memory = memory
        self._windows = windows
        self._timeout_ns = seconds_to_ns(timeout_s)
        self._idle_ns = seconds_to_ns(idle_s)
        self._max_connections = max_connections
        self._connections: dict[int, _Serving] = {}
        self.deadline_ns = 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.sock = socket.create_server((host, port), family=family, backlog=128)
        self.sock.setblocking(False)
        self.address: str = self.sock.getsockname()[0]
        self.port: int = self.sock.getsockname()[1]

    def open(self) -> None:
        """Begin to accept. On the reactor's thread, like all below."""
        self.deadline_ns = 0
        self._reactor.watch(self, READ)

    def ready(self, events: int) -> None:
        """Take in a new connection."""
        try:
            sock, _ = self.sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors, most likely. A port is never writable, so this is a pause until
            # the deadline; otherwise the same event would come again at once, for ever.
            _log.warning("data port cannot accept: %s", error)
            self._reactor.watch(self, WRITE)
            self.deadline_ns = time.monotonic_ns() + 100 * NS_PER_MS
            return
        if len(self._connections) >= self._max_connections:
            _log.warning("data port refused a connection: %d are open", len(self._connections))
            sock.close()
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number = sock.fileno()
        self._connections[number] = _Serving(
            sock,
            self._reactor,
            self._memory,
            self._windows,
            self._timeout_ns,
            self._idle_ns,
            lambda: self._connections.pop(number, None),
        )

    def fail(self, reason: str) -> None:
        """The pause after a failed accept is over: go on."""
        self.open()

    def close(self) -> None:
        """Close the port and every connection."""
        for serving in list(self._connections.values()):
            serving.close()
        self._reactor.forget(self)
        self.sock.close()


class _Serving:
    """One peer's connection: a request comes in whole, then its answer goes out, and again."""

    def __init__(
        self,
        sock: socket.socket,
        reactor: Reactor,
        memory: PoolMemory,
        windows: Windows,
        timeout_ns: int,
        idle_ns: int,
        on_close: Callable[[], object],
    ) -> None:
        self.sock = sock
        self._reactor = reactor
        self._memory = memory
        self._windows = windows
        self._timeout_ns = timeout_ns
        self._idle_ns = idle_ns
        self._on_close = on_close
        self._request: wire.RequestHead | None = None
        self._intake: Intake | None = None
        self._last = False  # close once the answer is out
        self._ranges: deque[wire.Range] = deque()
        self._out: deque[memoryview] = deque()
        self._await_request()

    def ready(self, events: int) -> None:
        """Go on with the request or its answer."""
        try:
            if events & WRITE:
                self._send()
            elif self._intake is not None:
                self._take_in(self._intake)
            else:
                self._receive()
        except wire.FrameError as error:
            self.fail(str(error))

    def fail(self, reason: str) -> None:
        """Close, with a line in the log unless the connection was merely idle."""
        if self._filled or self._request is not None:
            _log.warning("data connection closed: %s", reason)
        self.close()

    def close(self) -> None:
        """Close the connection, whatever it is doing."""
        self._out.clear()
        self._ranges.clear()
        self._reactor.forget(self)
        self._on_close()
        self.sock.close()

    def _await_request(self) -> None:
        self._request = None
        self._intake = None
        self._buffer = bytearray(wire.REQUEST_BYTES)
        self._filled = 0
        self.deadline_ns = time.monotonic_ns() + self._idle_ns
        self._reactor.watch(self, READ)

    def _receive(self) -> None:
        """Read until the request is whole or nothing more has come."""
        while True:
            try:
                n = self.sock.recv_into(memoryview(self._buffer)[self._filled :])
            except BlockingIOError:
                return
            if n == 0:
                self.fail("the peer closed it amid a request")
                return
            if not self._filled and self._request is None:
                # From its first byte on, a request has this long to arrive in whole.
                self.deadline_ns = time.monotonic_ns() + self._timeout_ns
            self._filled += n
            if self._filled < len(self._buffer):
                continue
            if self._request is None:
                self._request = wire.unpack_request(self._buffer)
                self._buffer = bytearray(self._request.rest_bytes)
                self._filled = 0
                continue
            ranges = wire.unpack_ranges(self._buffer)
            if self._request.writes:
                self._intake = Intake(self._request, ranges, self._memory, self._windows)
                self._take_in(self._intake)
            else:
                self._answer(self._request, ranges)
            return

    def _take_in(self, intake: Intake) -> None:
        """Go on with a write; once it is over, say how it went."""
        taken = 0
        while not intake.over and taken < _TURN_BYTES:
            try:
                intake.receive(self.sock)
            except BlockingIOError:
                break
            if intake.n_last == 0:
                self.fail("the peer closed it amid a write")
                return
            taken += max(0, intake.n_last)
        if taken or intake.over:
            self.deadline_ns = time.monotonic_ns() + self._timeout_ns
        if not intake.over:
            return
        assert self._request is not None
        # After a refusal, what the peer still sends would be taken for something else.
        self._last = intake.refusal != wire.OK
        nothing = wire.Range(0, 0)
        head = wire.pack_answer(
            intake.refusal, self._memory.epoch, self._request.tag, nothing, intake.n_bytes, 0
        )
        self._out.append(memoryview(head))
        self._reactor.watch(self, WRITE)
        self._send()

    def _answer(self, request: wire.RequestHead, ranges: list[wire.Range]) -> None:
        """Begin the answer to a whole request."""
        memory = self._memory
        status = wire.OK
        if request.epoch != memory.epoch:
            status = wire.STALE
        elif not wire.inside(ranges, memory.n_blocks, memory.block_bytes):
            status = wire.OUTSIDE
        if status == wire.OK:
            self._ranges.extend(ranges)
        else:
            head = wire.pack_answer(status, memory.epoch, request.tag, wire.Range(0, 0), 0, 0)
            self._out.append(memoryview(head))
        self.deadline_ns = time.monotonic_ns() + self._timeout_ns
        self._reactor.watch(self, WRITE)
        self._send()

    def _send(self) -> None:
        """Hand frames to the kernel, straight from the pool, until it takes no more."""
        sent = 0
        while sent < _TURN_BYTES:
            self._prepare()
            if not self._out:
                if self._last:
                    self.close()
                else:
                    self._await_request()
                return
            try:
                n = self.sock.sendmsg(self._out)
            except BlockingIOError:
                return
            sent += n
            self.deadline_ns = time.monotonic_ns() + self._timeout_ns
            while n:
                first = self._out.popleft()
                if n < len(first):
                    self._out.appendleft(first[n:])
                    break
                n -= len(first)

    def _prepare(self) -> None:
        """Queue the next frames, a little ahead of what the kernel has taken."""
        ahead = sum(map(len, self._out))
        while self._ranges and ahead < _AHEAD_BYTES and len(self._out) < _AHEAD_FRAMES:
            assert self._request is not None
            memory = self._memory
            blocks = self._ranges.popleft()
            start = blocks.first * memory.block_bytes
            n_bytes = blocks.n * memory.block_bytes
            checksum = 0
            if self._request.checksum:
                numbers = range(blocks.first, blocks.first + blocks.n)
                checksum = combined(checksums(memory.buffer, numbers, memory.block_bytes))
            head = wire.pack_answer(
                wire.OK, memory.epoch, self._request.tag, blocks, n_bytes, checksum
            )
            self._out.append(memoryview(head))
            self._out.append(memory.buffer[start : start + n_bytes])
            ahead += len(head) + n_bytes
