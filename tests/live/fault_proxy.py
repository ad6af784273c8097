"""A TCP proxy between workers that harms one chosen message: late, lost, twice, damaged, cut off.

It listens on a loopback address of its own at the ports that workers have on 127.0.0.1, so a
worker that advertises that address is reached through it and nothing that passes has to be
rewritten. Control frames are read on the way: a pool's data port, named in a Grant or a Claim, has
its front before the peer hears of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, NamedTuple

import msgspec

from twofold.transport import wire
from twofold.transport.segment import TcpSegment, parse_segment

BACK: Final = "127.0.0.1"
_PID: Final = os.getpid()
FRONT: Final = f"127.{1 + _PID // 65536 % 250}.{_PID // 256 % 256}.{1 + _PID % 254}"
"""Not the same for two processes that run at once: a worker's new data port may be a port at which
the other has a front."""

Fate = Literal["hold", "delay", "drop", "duplicate", "corrupt", "cut"]
FATES: Final[tuple[Fate, ...]] = ("hold", "delay", "drop", "duplicate", "corrupt", "cut")

CALLER_SAYS: Final = ("Hello>", "Claim", "Heartbeat", "Done", "request", "write", "bytes")
"""Kinds of message from whoever connected: a decode worker on control connections, the side that
moves bytes on data connections. `Hello>` is the caller's, `Hello<` the answer to it."""

LISTENER_SAYS: Final = ("Hello<", "Grant", "Written", "Refusal", "Closed", "answer")


class Message(NamedTuple):
    kind: str
    data: bytes


class Fault:
    """What to do to the `nth` message of a kind, counted from when the fault was set.

    `met` is set when the message has come. A held one goes on when `let_go` is set. `at` says
    which byte has a bit flipped, as a share of the message, or which with a negative number of
    bytes before its end; `delay_s` is how late it is.
    """

    def __init__(
        self, kind: str, fate: Fate, nth: int = 1, *, at: float = 0.5, delay_s: float = 0.1
    ) -> None:
        assert kind in (*CALLER_SAYS, *LISTENER_SAYS), kind
        self.kind = kind
        self.fate = fate
        self.nth = nth
        self.at = at
        self.delay_s = delay_s
        self.n_seen = 0
        self.met = asyncio.Event()
        self.let_go = asyncio.Event()

    def __repr__(self) -> str:
        return f"{self.fate} {self.kind} {self.nth}"

    def flipped(self, data: bytes) -> bytes:
        """`data` with one bit turned."""
        place = int(self.at * len(data)) if self.at >= 0 else len(data) + int(self.at)
        place = min(max(0, place), len(data) - 1)
        return data[:place] + bytes((data[place] ^ 0x04,)) + data[place + 1 :]


class FaultProxy:
    """Fronts for workers' ports, all on the running loop. See the module."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.seen: Counter[str] = Counter()
        self._servers: dict[int, asyncio.Server] = {}
        self._links: dict[asyncio.Task[None], None] = {}
        self._closed = False
        self.broken: list[BaseException] = []
        """What went wrong in the proxy itself: connections were cut that no fault was to cut."""

    @property
    def n_links(self) -> int:
        """Connections that pass through it now."""
        return len(self._links)

    def set(self, *faults: Fault) -> None:
        """Have these faults and no others from now on; what was held goes on."""
        for fault in self.faults:
            fault.let_go.set()
        self.faults = list(faults)

    async def front(self, port: int, *, data: bool = False) -> None:
        """Listen in front of a worker's control port, or of a pool's data port."""
        if port in self._servers or self._closed:
            return

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._links[task] = None
            try:
                # asyncio logs a handler that was cancelled as a fault of the program.
                with contextlib.suppress(asyncio.CancelledError):
                    await self._link(port, data, reader, writer)
            finally:
                del self._links[task]

        self._servers[port] = await asyncio.start_server(accept, FRONT, port, limit=2**20)

    async def sever(self) -> None:
        """Close every connection that there is now: workers lose each other, and come back."""
        links = list(self._links)
        for task in links:
            task.cancel()
        await asyncio.gather(*links, return_exceptions=True)

    async def close(self) -> None:
        """Close every front and connection."""
        self._closed = True
        self.set()
        for server in self._servers.values():
            server.close()
        await self.sever()
        for server in self._servers.values():
            await server.wait_closed()

    # ------------------------------------------------------------------ one connection

    async def _link(
        self,
        port: int,
        data: bool,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Carry messages both ways until either side ends; then both are closed."""
        ends = [writer]
        try:
            try:
                behind, ahead = await asyncio.open_connection(BACK, port, limit=2**20)
            except OSError:
                return  # nobody is there: closing says so
            ends.append(ahead)
            parse: _Control | _Data = _Data() if data else _Control()
            pumps = [
                asyncio.ensure_future(self._pump(parse.from_caller, reader, ahead)),
                asyncio.ensure_future(self._pump(parse.from_listener, behind, writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                ended = await asyncio.gather(*pumps, return_exceptions=True)
            # No bug of what is tested: of the proxy's parsing, or a front that it cannot have.
            self.broken += [
                e for e in ended if isinstance(e, Exception) and not isinstance(e, _ENDS)
            ]
        finally:
            for end in ends:
                end.close()
            for end in ends:
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _pump(
        self,
        read: Callable[[asyncio.StreamReader], Awaitable[Message]],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        while True:
            message = await read(reader)
            self.seen[message.kind] += 1
            await self._open_fronts(message)
            cut, pieces = await self._fated(message)
            for data in pieces:
                writer.write(data)
            if cut:
                return
            await writer.drain()

    async def _open_fronts(self, message: Message) -> None:
        if message.kind in ("Grant", "Claim"):
            said = msgspec.msgpack.decode(message.data[_CONTROL.size :])
            if said["segment"]:
                segment = parse_segment(said["segment"], TcpSegment)
                assert segment.host == FRONT, "a worker does not advertise the proxy's address"
                await self.front(segment.port, data=True)

    async def _fated(self, message: Message) -> tuple[bool, list[bytes]]:
        """Whether the connection ends with `message`, and what is to be sent on for it."""
        data = message.data
        for fault in list(self.faults):
            if fault.kind != message.kind:
                continue
            fault.n_seen += 1
            if fault.n_seen != fault.nth:
                continue
            fault.met.set()
            if fault.fate == "hold":
                await fault.let_go.wait()
            elif fault.fate == "delay":
                await asyncio.sleep(fault.delay_s)
            elif fault.fate == "drop":
                return False, []
            elif fault.fate == "duplicate":
                return False, [data, data]
            elif fault.fate == "corrupt":
                return False, [fault.flipped(data)]
            elif fault.fate == "cut":
                return True, [data[: len(data) // 2]]
        return False, [data]


_ENDS: Final = (asyncio.IncompleteReadError, ConnectionError, TimeoutError)


# ------------------------------------------------------------------------------- framing


_CONTROL: Final = struct.Struct(">IIQ")
"""Length of the message, checksum."""


class _Control:
    """Control connections: the frames of `live.peer`."""

    async def from_caller(self, reader: asyncio.StreamReader) -> Message:
        return await self._frame(reader, ">")

    async def from_listener(self, reader: asyncio.StreamReader) -> Message:
        return await self._frame(reader, "<")

    async def _frame(self, reader: asyncio.StreamReader, way: str) -> Message:
        head = await reader.readexactly(_CONTROL.size)
        body = await reader.readexactly(_CONTROL.unpack(head)[0])
        kind: str = msgspec.msgpack.decode(body)["type"]
        return Message(kind + way if kind == "Hello" else kind, head + body)


class _Data:
    """Data connections: the frames of `transport.wire`. Requests are not sent ahead of answers."""

    def __init__(self) -> None:
        self._writes = False
        self._n_bytes = 0

    async def from_caller(self, reader: asyncio.StreamReader) -> Message:
        if self._n_bytes:
            n_bytes, self._n_bytes = self._n_bytes, 0
            return Message("bytes", await reader.readexactly(n_bytes))
        head = await reader.readexactly(wire.REQUEST_BYTES)
        request = wire.unpack_request(bytearray(head))
        rest = await reader.readexactly(request.rest_bytes)
        self._writes = request.writes
        if not request.writes:
            return Message("request", head + rest)
        (first, end), *ranges = wire.unpack_ranges(bytearray(rest))
        self._n_bytes = sum(n for _, n in ranges) * (end - first)
        return Message("write", head + rest)

    async def from_listener(self, reader: asyncio.StreamReader) -> Message:
        head = await reader.readexactly(wire.ANSWER_BYTES)
        fields: Any = wire._ANSWER.unpack(head)
        n_bytes = 0 if self._writes else fields[-2]
        return Message("answer", head + await reader.readexactly(n_bytes))
