"""The reading side of the TCP transport: takes peers' blocks straight into ours.

A transfer has its connections for itself while it lasts. So cancelling it is closing them, and
what goes wrong on one harms no other transfer. Connections that end well are kept for the next.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from twofold.transport import wire
from twofold.transport.checksum import checksums, combined
from twofold.transport.memory import PoolMemory
from twofold.transport.reactor import READ, TIMED_OUT, WRITE, Reactor
from twofold.transport.runs import Run
from twofold.types import seconds_to_ns

_TURN_BYTES: Final = 8 * 1024 * 1024
"""Most bytes taken from one connection before the others have a turn."""


class Share:
    """The part of one transfer that goes over one connection, and where it has got to.

    `on_end` is called once, with the reason if it failed, when nothing is written any more.
    `sums[i]` is set to the checksum of the i-th pair's block as it landed.
    """

    def __init__(
        self,
        tag: int,
        epoch: bytes,
        runs: Sequence[Run],
        sums: list[int] | None,
        on_end: Callable[[str], None],
    ) -> None:
        self.tag = tag
        self.epoch = epoch
        self.runs = deque(runs)
        self.sums = sums
        self.on_end = on_end

    def request(self) -> bytes:
        """The request frame for all runs."""
        ranges = [wire.Range(run.src, run.n) for run in self.runs]
        return wire.pack_request(self.epoch, self.tag, ranges, self.sums is not None)


class Stream:
    """A connection to one peer's data port. Raises OSError when connecting fails at once.

    Without a share it is idle: `on_idle_end` is called when it closes then.
    """

    def __init__(
        self,
        reactor: Reactor,
        memory: PoolMemory,
        host: str,
        port: int,
        *,
        timeout_s: float,
        idle_s: float,
        on_idle_end: Callable[[Stream], None],
    ) -> None:
        self._reactor = reactor
        self._memory = memory
        self._timeout_s = timeout_s
        self._timeout_ns = seconds_to_ns(timeout_s)
        self._idle_ns = seconds_to_ns(idle_s)
        self._on_idle_end = on_idle_end
        self._share: Share | None = None
        self._request = memoryview(b"")
        self._head = bytearray(wire.ANSWER_BYTES)
        self._head_view = memoryview(self._head)
        self._filled = 0
        self._payload: memoryview | None = None
        self._checksum = 0
        self.deadline_ns = 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            self.sock.setblocking(False)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = self.sock.connect_ex((host, port))
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except BaseException:
            self.sock.close()
            raise
        self._connecting = True

    def start(self, share: Share) -> None:
        """Fetch `share`. The stream must be idle."""
        self._share = share
        self._request = memoryview(share.request())
        self._filled = 0
        self.deadline_ns = time.monotonic_ns() + self._timeout_ns
        self._reactor.watch(self, WRITE)

    def ready(self, events: int) -> None:
        """Go on with connecting, the request or the answer."""
        if self._connecting:
            code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self.fail(os.strerror(code))
                return
            self._connecting = False
        if self._share is None:
            # Nothing is due on an idle connection, so this is its end or not our protocol.
            self.fail("closed while idle")
        elif self._request:
            self._send()
        else:
            try:
                self._receive(self._share)
            except wire.FrameError as error:
                self.fail(str(error))

    def fail(self, reason: str) -> None:
        """Close, and end the share with `reason`."""
        if reason == TIMED_OUT:
            reason = f"timed out: the peer sent nothing for {self._timeout_s:g} s"
        share = self._share
        self.close()
        if share is None:
            self._on_idle_end(self)
        else:
            share.on_end(reason)

    def close(self) -> None:
        """Close without a word to the share. May be called again."""
        self._share = None
        self._payload = None
        if self.sock.fileno() >= 0:
            self._reactor.forget(self)
            self.sock.close()

    def _send(self) -> None:
        try:
            n = self.sock.send(self._request)
        except BlockingIOError:
            return
        self._request = self._request[n:]
        self.deadline_ns = time.monotonic_ns() + self._timeout_ns
        if not self._request:
            self._reactor.watch(self, READ)

    def _receive(self, share: Share) -> None:
        """Take what has come: headers into a buffer, blocks to where they belong."""
        taken = 0
        while taken < _TURN_BYTES:
            try:
                n = self._take(last=len(share.runs) == 1)
            except BlockingIOError:
                break
            if n == 0:
                self.fail("the peer closed the connection")
                return
            taken += n
            if self._payload is not None and not self._payload:
                self._landed(share, share.runs.popleft())
                if not share.runs:
                    self._rest(share)
                    return
            if self._payload is None and self._filled == len(self._head):
                self._expect(share, share.runs[0])
        if taken:
            self.deadline_ns = time.monotonic_ns() + self._timeout_ns

    def _take(self, last: bool) -> int:
        """One receive: the rest of a run together with the next header, if there is one."""
        head = self._head_view[self._filled :]
        if self._payload is None:
            n = self.sock.recv_into(head)
            self._filled += n
            return n
        if last:
            n = self.sock.recv_into(self._payload)
        else:
            n = self.sock.recvmsg_into([self._payload, head])[0]
        of_run = min(n, len(self._payload))
        self._payload = self._payload[of_run:]
        self._filled += n - of_run
        return n

    def _expect(self, share: Share, run: Run) -> None:
        """A header is whole: check it, and point the next receive at our blocks."""
        size = self._memory.block_bytes
        blocks = wire.Range(run.src, run.n)
        self._checksum = wire.check_answer(self._head, share.epoch, share.tag, blocks, run.n * size)
        self._payload = self._memory.buffer[run.dst * size : (run.dst + run.n) * size]
        self._filled = 0

    def _landed(self, share: Share, run: Run) -> None:
        """A run is whole: check what landed against what was sent."""
        self._payload = None
        if share.sums is None:
            return
        numbers = range(run.dst, run.dst + run.n)
        sums = checksums(self._memory.buffer, numbers, self._memory.block_bytes)
        if combined(sums) != self._checksum:
            raise wire.FrameError("checksum differs: blocks changed on the way")
        share.sums[run.at : run.at + run.n] = sums

    def _rest(self, share: Share) -> None:
        """The share is whole; the connection is free for another."""
        self._share = None
        self.deadline_ns = time.monotonic_ns() + self._idle_ns
        share.on_end("")
