"""The reading side of the TCP transport: takes peers' blocks straight into ours.

A transfer has its connections for itself while it lasts. So cancelling it is closing them, and
what goes wrong on one harms no other transfer. Connections that end well are kept for the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from twofold.transport import wire
from twofold.transport.checksum import checksums, combined
from twofold.transport.reactor import READ
from twofold.transport.runs import Run
from twofold.transport.tcp_connection import TURN_BYTES, Connection


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


class Stream(Connection[Share]):
    """A connection on which a peer's blocks are read. See `Connection`."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._request = memoryview(b"")
        self._head = bytearray(wire.ANSWER_BYTES)
        self._head_view = memoryview(self._head)
        self._filled = 0
        self._payload: memoryview | None = None
        self._checksum = 0
        super().__init__(*args, **settings)

    def _begin(self, task: Share) -> None:
        self._request = memoryview(task.request())
        self._filled = 0

    def _go_on(self, task: Share, events: int) -> None:
        if self._request:
            self._send()
        else:
            self._receive(task)

    def _drop(self) -> None:
        self._payload = None

    def _send(self) -> None:
        try:
            n = self.sock.send(self._request)
        except BlockingIOError:
            return
        self._request = self._request[n:]
        self._moved()
        if not self._request:
            self._reactor.watch(self, READ)

    def _receive(self, share: Share) -> None:
        """Take what has come: headers into a buffer, blocks to where they belong."""
        taken = 0
        while taken < TURN_BYTES:
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
            self._moved()

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
