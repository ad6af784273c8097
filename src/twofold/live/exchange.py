"""One request and its answer, as a handler sees them: no parsing, no limits, only bytes out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Final

import msgspec

JSON: Final = "application/json"
EVENT_STREAM: Final = "text/event-stream; charset=utf-8"
MAX_REQUEST_ID_CHARS: Final = 128

Header = tuple[str, str]

_STATUS_LINES: Final = {
    s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode("ascii") for s in HTTPStatus
}
_CHUNK_END: Final = b"0\r\n\r\n"


class Request(msgspec.Struct, kw_only=True):
    """A whole request. Header names are lower case; `received_ns` is when its first byte came."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    received_ns: int
    request_id: str
    http10: bool = False
    keep_alive: bool = True


def sane_request_id(text: str) -> str:
    """`text` if it is 1 to 128 printable ASCII characters without spaces, else a fresh id."""
    short = 0 < len(text) <= MAX_REQUEST_ID_CHARS
    if short and text.isascii() and text.isprintable() and " " not in text:
        return text
    return os.urandom(16).hex()


def status_line(status: int) -> bytes:
    """The first line of an answer."""
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d Status\r\n" % status


def chunk(data: bytes) -> bytes:
    """`data` in chunked framing."""
    return b"%x\r\n%s\r\n" % (len(data), data)


class Exchange:
    """The answer to one request.

    Either one `respond`, or `start`, any number of writes and `end`. Calls after the end, or
    after the client has gone, do nothing, so callers need not check. `on_gone` is called once if
    the client leaves before the end; `on_drain` when `paused` becomes false again.
    """

    __slots__ = (
        "_http10",
        "_keep_alive",
        "_no_body",
        "_on_finished",
        "_transport",
        "finished",
        "gone",
        "on_drain",
        "on_gone",
        "paused",
        "request_id",
        "started",
    )

    def __init__(
        self,
        transport: asyncio.Transport,
        request_id: str,
        on_finished: Callable[[Exchange, bool], None],
        *,
        http10: bool = False,
        keep_alive: bool = True,
        no_body: bool = False,
    ) -> None:
        self._transport = transport
        self._on_finished = on_finished
        self._http10 = http10
        self._keep_alive = keep_alive
        self._no_body = no_body
        self.request_id = request_id
        self.started = False
        self.finished = False
        self.gone = False
        self.paused = False
        self.on_drain: Callable[[], None] | None = None
        self.on_gone: Callable[[], None] | None = None

    @property
    def chunked(self) -> bool:
        """Whether a started answer is sent in chunks, so that `write_raw` may be used."""
        return not self._http10 and not self._no_body

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: str = JSON,
        headers: Iterable[Header] = (),
    ) -> None:
        """Send a whole answer with its length."""
        if self.started or self.finished or self.gone:
            return
        self.started = True
        head = self._head(status, content_type, headers)
        if status not in (204, 304):
            head += b"content-length: %d\r\n" % len(body)
        self._transport.write(head + b"\r\n" + (b"" if self._no_body else body))
        self._finish()

    def start(
        self, status: int, content_type: str = EVENT_STREAM, headers: Iterable[Header] = ()
    ) -> None:
        """Send the head of an answer whose length is not known yet."""
        if self.started or self.finished or self.gone:
            return
        self.started = True
        if self._http10:
            self._keep_alive = False
        head = self._head(status, content_type, headers)
        if not self._http10:
            head += b"transfer-encoding: chunked\r\n"
        self._transport.write(head + b"\r\n")

    def write(self, data: bytes) -> None:
        """Send a piece of a started answer."""
        if self.finished or self.gone or not data or self._no_body:
            return
        self._transport.write(data if self._http10 else chunk(data))

    def write_raw(self, data: bytes) -> None:
        """Send bytes that are in chunked framing already; only where `chunked` is true."""
        if not self.finished and not self.gone:
            self._transport.write(data)

    def end(self, last: bytes = b"") -> None:
        """End a started answer, `last` being its last piece.

        Both go out in one write, or a client that stops at the last piece would seem to leave
        before the end.
        """
        if self.finished or self.gone:
            return
        if self.chunked:
            self._transport.write((chunk(last) if last else b"") + _CHUNK_END)
        elif last and not self._no_body:
            self._transport.write(last)
        self._finish()

    def end_raw(self) -> None:
        """Note that the last of the raw bytes were the end of the answer."""
        if not self.finished and not self.gone:
            self._finish()

    def abort(self) -> None:
        """Cut the connection, so that the client cannot take what it has for the whole."""
        if not self.finished and not self.gone:
            self.finished = True
            self._transport.abort()

    def close_after(self) -> None:
        """Close the connection once this answer has been sent."""
        self._keep_alive = False

    def client_gone(self) -> None:
        """For the connection: the client has left."""
        if self.finished or self.gone:
            return
        self.gone = True
        if self.on_gone is not None:
            self.on_gone()

    def set_paused(self, paused: bool) -> None:
        """For the connection: the client reads too slowly, or reads again."""
        self.paused = paused
        if not paused and self.on_drain is not None and not self.finished and not self.gone:
            self.on_drain()

    def _head(self, status: int, content_type: str, headers: Iterable[Header]) -> bytes:
        lines = [f"x-request-id: {self.request_id}\r\n"]
        if content_type:
            lines.append(f"content-type: {content_type}\r\n")
        lines += [f"{name}: {value}\r\n" for name, value in headers]
        if not self._keep_alive:
            lines.append("connection: close\r\n")
        elif self._http10:
            lines.append("connection: keep-alive\r\n")
        return status_line(status) + "".join(lines).encode("latin-1", "replace")

    def _finish(self) -> None:
        self.finished = True
        self._on_finished(self, self._keep_alive)
