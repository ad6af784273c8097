"""One client connection of the HTTP/1.1 server: parses, queues, answers in order, keeps limits."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, cast

import httptools

from twofold.live.clock import Clock
from twofold.live.exchange import Exchange, Request, sane_request_id
from twofold.live.openai.errors import error_body
from twofold.types import NS_PER_S

log = logging.getLogger("twofold.http")

Handler = Callable[[Request, Exchange], None]

_MAX_PIPELINED: Final = 8
_MAX_URL_BYTES: Final = 8192
_LINGER_NS: Final = 2 * NS_PER_S
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class _Bad(NamedTuple):
    """A request that is answered by the server itself; the connection is closed after it."""

    status: int
    code: str
    message: str


class Limits(NamedTuple):
    """What a client may ask of the server. A body may also take a second per `slow_body_bytes`."""

    max_body_bytes: int = 4 * 1024 * 1024
    max_header_bytes: int = 32 * 1024
    max_connections: int = 2048
    header_timeout_ns: int = 10_000_000_000
    idle_timeout_ns: int = 75_000_000_000
    slow_body_bytes: int = 64 * 1024


class Owner(Protocol):
    """What a connection needs from its server."""

    handler: Handler
    limits: Limits
    clock: Clock
    closing: bool

    def add(self, connection: Connection) -> int:
        """Note an open connection; the key is for `drop`."""
        ...

    def drop(self, key: int) -> None:
        """Forget a closed connection."""
        ...

    def crowded(self) -> bool:
        """Whether more connections are open than may be."""
        ...


class Connection(asyncio.Protocol):
    """One client connection: parses, queues, answers."""

    def __init__(self, server: Owner) -> None:
        self._server = server
        self._limits = server.limits
        self._clock = server.clock
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[Request | _Bad] = deque()
        self._exchange: Exchange | None = None
        self._bad: _Bad | None = None
        self._body: list[bytes] = []
        self._deaf = False  # nothing that arrives is parsed any more
        self._linger_until_ns = 0
        self._write_paused = False
        self._read_paused = False
        self._reset_message()
        self._message_ns = 0
        self._idle_since_ns = self._clock.now_ns()

    # ---------------------------------------------------------------- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Join the server, or be refused by it."""
        self._transport = cast(asyncio.Transport, transport)
        self._key = self._server.add(self)
        if self._server.crowded():
            self._refuse(_Bad(503, "too_many_connections", "too many connections; try again"))
        elif self._server.closing:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse, then answer what is complete."""
        if self._deaf:
            return
        if not self._message_ns:
            self._message_ns = self._clock.now_ns()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._after_upgrade()
        except httptools.HttpParserError as error:
            self._bad = self._bad or _Bad(400, "bad_http", f"not valid HTTP/1.1: {error}")
        if self._in_head and not self._bad:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.max_header_bytes:
                self._bad = self._too_large_head()
        if self._bad:
            self._refuse(self._bad)
        else:
            self._next()

    def eof_received(self) -> bool:
        """Close: a client that has stopped sending has left."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the server; tell the request under way."""
        self._server.drop(self._key)
        self._deaf = True
        self._queue.clear()
        if self._exchange is not None:
            exchange, self._exchange = self._exchange, None
            try:
                exchange.client_gone()
            except Exception:
                log.exception("request %s: error while handling a cut", exchange.request_id)

    def pause_writing(self) -> None:
        """Pass on that the client reads too slowly."""
        self._write_paused = True
        if self._exchange is not None:
            self._exchange.set_paused(True)

    def resume_writing(self) -> None:
        """Pass on that the client reads again."""
        self._write_paused = False
        if self._exchange is not None:
            self._exchange.set_paused(False)

    # --------------------------------------------------------------- httptools' callbacks

    def on_message_begin(self) -> None:
        """Start a request."""
        self._reset_message()
        self._in_head = True
        if not self._message_ns:
            self._message_ns = self._clock.now_ns()

    def on_url(self, url: bytes) -> None:
        """Take a piece of the request target."""
        self._url += url
        if len(self._url) > _MAX_URL_BYTES:
            self._bad = self._bad or _Bad(414, "url_too_long", "the URL is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header; the last of a name counts."""
        self._seen_header_bytes += len(name) + len(value) + 4
        if self._seen_header_bytes > self._limits.max_header_bytes:
            self._bad = self._bad or self._too_large_head()
            return
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Refuse a body by its announced length, before it comes."""
        self._in_head = False
        self._head_bytes = 0
        length = self._headers.get("content-length", "")
        if length.isdigit() and int(length) > self._limits.max_body_bytes:
            self._bad = self._bad or self._too_large_body()
        elif self._headers.get("expect", "").lower() == "100-continue" and not self._busy():
            self._transport.write(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        if self._bad:
            return
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.max_body_bytes:
            self._bad = self._too_large_body()
            self._body.clear()
            return
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Queue the request."""
        if self._bad:
            return
        path, _, query = self._url.partition(b"?")
        headers = self._headers
        self._queue.append(
            Request(
                method=self._parser.get_method().decode("ascii"),
                path=path.decode("latin-1"),
                query=query.decode("latin-1"),
                headers=headers,
                body=self._body[0] if len(self._body) == 1 else b"".join(self._body),
                received_ns=self._message_ns,
                request_id=sane_request_id(headers.get("x-request-id", "")),
                http10=self._parser.get_http_version() == "1.0",
                keep_alive=self._parser.should_keep_alive(),
            )
        )
        self._message_ns = 0
        self._body = []

    # --------------------------------------------------------------------------- queue

    def _busy(self) -> bool:
        return self._exchange is not None or bool(self._queue)

    def _reset_message(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body = []
        self._body_bytes = 0
        self._head_bytes = 0
        self._seen_header_bytes = 0
        self._in_head = False

    def _next(self) -> None:
        """Answer the oldest waiting request, if none is being answered."""
        while self._queue and self._exchange is None and not self._transport.is_closing():
            waiting = self._queue.popleft()
            if isinstance(waiting, _Bad):
                self._answer_bad(waiting)
                return
            self._handle(waiting)
        if not self._busy():
            self._idle_since_ns = self._clock.now_ns()
        self._set_reading()

    def _handle(self, request: Request) -> None:
        exchange = Exchange(
            self._transport,
            request.request_id,
            self._finished,
            http10=request.http10,
            keep_alive=request.keep_alive and not self._server.closing,
            no_body=request.method == "HEAD",
        )
        exchange.paused = self._write_paused
        self._exchange = exchange
        try:
            self._server.handler(request, exchange)
        except Exception:
            log.exception("request %s: error in the handler", request.request_id)
            if exchange.started:
                exchange.abort()
            else:
                text = "an error inside the server; its log has the details"
                exchange.respond(500, error_body(500, "internal_error", text))

    def _finished(self, exchange: Exchange, keep_alive: bool) -> None:
        self._exchange = None
        if not keep_alive or self._server.closing:
            self._queue.clear()
            self._half_close()
        elif self._queue:
            asyncio.get_running_loop().call_soon(self._next)
        else:
            self._idle_since_ns = self._clock.now_ns()
            if self._read_paused:
                self._set_reading()

    def _set_reading(self) -> None:
        """Stop reading while a client has too many requests waiting."""
        full = len(self._queue) >= _MAX_PIPELINED
        if full != self._read_paused and not self._transport.is_closing():
            self._read_paused = full
            if full:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    # -------------------------------------------------------------------------- refusals

    def _too_large_head(self) -> _Bad:
        most = self._limits.max_header_bytes
        return _Bad(431, "headers_too_large", f"the headers are larger than {most} bytes")

    def _too_large_body(self) -> _Bad:
        most = self._limits.max_body_bytes
        return _Bad(413, "body_too_large", f"the body is larger than {most} bytes")

    def _after_upgrade(self) -> None:
        """A request that asked for another protocol: answer it as HTTP/1.1 if it had no body."""
        last = self._queue[-1] if self._queue else None
        if isinstance(last, Request) and last.method in ("GET", "HEAD"):
            last.keep_alive = False
            self._deaf = True
            return
        if self._queue:
            self._queue.pop()
        self._bad = _Bad(400, "no_upgrade", "only HTTP/1.1 is spoken here; send no Upgrade header")

    def _refuse(self, bad: _Bad) -> None:
        """Answer `bad` after what is under way, and read no more requests."""
        self._deaf = True
        self._message_ns = 0
        self._queue.append(bad)
        self._next()

    def _answer_bad(self, bad: _Bad) -> None:
        request_id = sane_request_id(self._headers.get("x-request-id", ""))
        exchange = Exchange(self._transport, request_id, self._finished, keep_alive=False)
        self._exchange = exchange
        exchange.respond(bad.status, error_body(bad.status, bad.code, bad.message))
        log.info("%s refused: %d %s", request_id, bad.status, bad.message)

    # --------------------------------------------------------------------- time and closing

    def check_time(self, now_ns: int) -> None:
        """Close what is late: called several times a second."""
        limits = self._limits
        if self._linger_until_ns:
            if now_ns >= self._linger_until_ns:
                self._transport.abort()
        elif self._message_ns and not self._deaf and not self._read_paused:
            grown_ns = self._body_bytes * 1_000_000_000 // limits.slow_body_bytes
            if now_ns - self._message_ns > limits.header_timeout_ns + grown_ns:
                self._refuse(_Bad(408, "request_timeout", "the request did not arrive in time"))
        elif not self._busy() and now_ns - self._idle_since_ns > limits.idle_timeout_ns:
            self._transport.close()

    def close_if_idle(self) -> None:
        """Close now unless a request is under way."""
        if not self._busy():
            self._transport.close()

    def cut(self) -> None:
        """Close at once."""
        self._transport.abort()

    def _half_close(self) -> None:
        """End the sending side and drop what still comes, so that the answer is not lost.

        Closing a socket with unread input resets the connection, and a client that is still
        sending a large body would then never see why it was refused.
        """
        self._deaf = True
        if self._transport.is_closing():
            return
        self._linger_until_ns = self._clock.now_ns() + _LINGER_NS
        if self._read_paused:
            self._read_paused = False
            self._transport.resume_reading()
        if not self._transport.can_write_eof():
            self._transport.close()
            return
        try:
            self._transport.write_eof()
        except OSError:  # the client has reset the connection, which is yet to be read
            self._transport.abort()
