"""One keep-alive connection to a worker: collects an answer, or passes a stream on as it comes."""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol, cast

import httptools

from twofold.live.leg import Head, Leg

log = logging.getLogger("twofold.upstream")

_MAX_WHOLE_BYTES: Final = 64 * 1024 * 1024


class Pool(Protocol):
    """What a connection needs of its pool."""

    def opened(self, connection: UpstreamConnection) -> int:
        """It is open; the key is for `closed`."""
        ...

    def closed(self, connection: UpstreamConnection, key: int) -> None:
        """It is closed."""
        ...

    def give_back(self, connection: UpstreamConnection) -> None:
        """It is free for another request."""
        ...


class _Collector:
    """Parser callbacks that keep an answer whole."""

    def __init__(self) -> None:
        self.head = Head()
        self.body: list[bytes] = []
        self.in_body = False
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header."""
        self.head.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self.in_body = True

    def on_body(self, data: bytes) -> None:
        """Take a piece of the body."""
        self.body.append(data)

    def on_message_complete(self) -> None:
        """The answer is complete."""
        self.complete = True


class _EndWatch:
    """Parser callbacks that only see the end, which is what makes a stream cheap."""

    __slots__ = ("complete",)

    def __init__(self) -> None:
        self.complete = False

    def on_message_complete(self) -> None:
        """The answer is complete."""
        self.complete = True


class _BodyWatch(_EndWatch):
    """Parser callbacks that take a stream out of its framing."""

    __slots__ = ("pieces",)

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []

    def on_body(self, data: bytes) -> None:
        """Take a piece of the body."""
        self.pieces.append(data)

    def take(self) -> bytes:
        """What came since the last call."""
        pieces, self.pieces = self.pieces, []
        return b"".join(pieces)


class UpstreamConnection(asyncio.Protocol):
    """One connection to a worker, carrying one leg at a time."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.leg: Leg | None = None
        self.idle_since_ns = 0
        self._reading = True
        self._keep_alive = False
        self._buffered = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Join the pool."""
        self._transport = cast(asyncio.Transport, transport)
        self._key = self._pool.opened(self)

    def usable(self) -> bool:
        """Whether a request may still be sent here."""
        return not self._transport.is_closing()

    def begin(self, leg: Leg, request: bytes) -> None:
        """Send a leg's request."""
        self.leg = leg
        leg.begin(self)
        self._buffered = b""
        self._size = 0
        self._whole = _Collector()
        self._parser = httptools.HttpResponseParser(self._whole)
        self._end = _BodyWatch() if leg.unframed else _EndWatch()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Collect, or pass on."""
        leg = self.leg
        if leg is None:
            self._transport.abort()  # nothing was asked
            return
        try:
            if leg.state == "streaming":
                self._raw(leg, data)
            else:
                self._collect(leg, data)
        except httptools.HttpParserError as error:
            self._break(f"the worker's answer is not valid HTTP: {error}")
        except Exception:
            log.exception("error while passing on an answer")
            self._break("an error inside the gateway; its log has the details")

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the pool; break the leg under way."""
        self._pool.closed(self, self._key)
        leg, self.leg = self.leg, None
        if leg is not None:
            leg.broken("the worker closed the connection before its answer was complete", True)

    def set_reading(self, reading: bool) -> None:
        """Take bytes from the worker, or leave them where they are."""
        if reading != self._reading and not self._transport.is_closing():
            self._reading = reading
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def ends_here(self) -> bool:
        """Whether a stream could end after what has been passed on.

        The parser is given the end of a message: it takes that for one only between two chunks.
        No more can be parsed after that.
        """
        try:
            self._parser.feed_data(b"0\r\n\r\n")
        except httptools.HttpParserError:
            return False
        return self._end.complete

    def cut(self) -> None:
        """Close at once."""
        self._transport.abort()

    def _collect(self, leg: Leg, data: bytes) -> None:
        whole = self._whole
        self._size += len(data)
        if self._size > _MAX_WHOLE_BYTES:
            self._break("the worker's answer is too large")
            return
        if leg.stream:
            self._buffered += data
        self._parser.feed_data(data)
        if not whole.in_body:
            return
        head = whole.head
        head.status = self._parser.get_status_code()
        # The parser's own word on this is only right while it is inside a message.
        closing = "close" in head.get("connection").lower()
        self._keep_alive = not closing and self._parser.get_http_version() == "1.1"
        if leg.stream and head.status == 200 and whole.body:
            if head.get("transfer-encoding").lower() == "chunked":
                self._start_stream(leg, head)
                return
            leg.stream = False
            self._buffered = b""
        if whole.complete:
            self._free()
            leg.over()
            leg.on_whole(head, b"".join(whole.body))

    def _start_stream(self, leg: Leg, head: Head) -> None:
        """The first bytes of the body are there: from now on they are passed on as they are."""
        first = self._buffered
        self._buffered = b""
        self._whole = _Collector()
        self._parser = httptools.HttpResponseParser(self._end)
        self._parser.feed_data(first)
        leg.state = "streaming"
        assert leg.on_stream is not None
        leg.on_stream(head)
        if self.leg is leg:
            self._pass_on(leg, first[first.index(b"\r\n\r\n") + 4 :])

    def _raw(self, leg: Leg, data: bytes) -> None:
        self._parser.feed_data(data)
        self._pass_on(leg, data)

    def _pass_on(self, leg: Leg, data: bytes) -> None:
        assert leg.on_raw is not None
        leg.on_raw(self._end.take() if isinstance(self._end, _BodyWatch) else data)
        if self._end.complete and self.leg is leg:
            assert leg.on_end is not None
            self._free()
            leg.over()
            leg.on_end()

    def _free(self) -> None:
        self.leg = None
        self.set_reading(True)
        if self._keep_alive:
            self._pool.give_back(self)
        else:
            self._transport.close()

    def _break(self, reason: str) -> None:
        leg, self.leg = self.leg, None
        self._transport.abort()
        if leg is not None:
            leg.broken(reason, True)
