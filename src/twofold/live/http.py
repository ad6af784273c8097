"""An HTTP/1.1 server as an asyncio protocol on httptools: limits, timeouts, keep-alive, order.

A handler is called once the whole request has arrived. Requests of one connection are answered
one at a time and in order. Whatever a client sends, it gets a status or loses its connection,
and the server lives on.
"""

from __future__ import annotations

import asyncio
from typing import Final

from twofold.live.clock import Clock, LoopClock, Timer
from twofold.live.connection import Connection, Handler, Limits
from twofold.live.exchange import EVENT_STREAM, JSON, Exchange, Request
from twofold.types import NS_PER_S, seconds_to_ns

__all__ = ["EVENT_STREAM", "JSON", "Exchange", "Handler", "HttpServer", "Request"]

_SWEEP_NS: Final = NS_PER_S // 4


class HttpServer:
    """Listens on one address and calls `handler(request, exchange)` for every request."""

    def __init__(
        self,
        handler: Handler,
        *,
        max_body_bytes: int = 4 * 1024 * 1024,
        max_header_bytes: int = 32 * 1024,
        max_connections: int = 2048,
        header_timeout_s: float = 10.0,
        idle_timeout_s: float = 75.0,
        clock: Clock | None = None,
    ) -> None:
        self.handler = handler
        self.clock = clock or LoopClock()
        self.limits = Limits(
            max_body_bytes,
            max_header_bytes,
            max_connections,
            seconds_to_ns(header_timeout_s),
            seconds_to_ns(idle_timeout_s),
        )
        self.closing = False
        self.port = 0
        self.connections: dict[int, Connection] = {}
        self._next_key = 0
        self._server: asyncio.Server | None = None
        self._sweep: Timer | None = None

    async def start(self, host: str, port: int) -> None:
        """Listen. Port 0 takes a free one; `port` then says which. Raises OSError if taken."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), host, port, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]
        self._sweep_later()

    def add(self, connection: Connection) -> int:
        """Note an open connection; the key is for `drop`."""
        self._next_key += 1
        self.connections[self._next_key] = connection
        return self._next_key

    def drop(self, key: int) -> None:
        """Forget a closed connection."""
        self.connections.pop(key, None)

    def crowded(self) -> bool:
        """Whether more connections are open than may be."""
        return len(self.connections) > self.limits.max_connections

    async def close(self, grace_s: float = 5.0) -> None:
        """Stop listening, let answers under way end for up to `grace_s`, cut the rest."""
        self.closing = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections.values()):
            connection.close_if_idle()
        until_ns = self.clock.now_ns() + seconds_to_ns(grace_s)
        while self.connections and self.clock.now_ns() < until_ns:
            await asyncio.sleep(0.01)
        for connection in list(self.connections.values()):
            connection.cut()
        if self._sweep is not None:
            self._sweep.cancel()

    def _look_around(self) -> None:
        now_ns = self.clock.now_ns()
        for connection in list(self.connections.values()):
            connection.check_time(now_ns)
        self._sweep_later()

    def _sweep_later(self) -> None:
        self._sweep = self.clock.call_at(self.clock.now_ns() + _SWEEP_NS, self._look_around)
