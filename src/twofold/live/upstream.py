"""A pool of connections to one worker."""

from __future__ import annotations

import asyncio
from typing import Final

from twofold.live.clock import Clock, LoopClock
from twofold.live.leg import Head, Leg
from twofold.live.upstream_connection import UpstreamConnection
from twofold.types import NS_PER_S, seconds_to_ns

__all__ = ["Head", "Leg", "Upstream"]

_MAX_IDLE: Final = 256
_IDLE_NS: Final = 30 * NS_PER_S


class Upstream:
    """A pool of keep-alive connections to one worker."""

    def __init__(
        self, host: str, port: int, *, connect_timeout_s: float = 0.75, clock: Clock | None = None
    ) -> None:
        self.host = host
        self.port = port
        self.clock = clock or LoopClock()
        self._host_header = f"host: {host}:{port}\r\n"
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[UpstreamConnection] = []
        self._open: dict[int, UpstreamConnection] = {}
        self._dials: set[asyncio.Task[None]] = set()
        self._next_key = 0

    def send(
        self,
        leg: Leg,
        method: str,
        path: str,
        body: bytes = b"",
        headers: str = "",
        timeout_s: float = 0.0,
    ) -> None:
        """Send a request. `headers` are further lines, each ended by CRLF. 0 is no time limit."""
        head = f"{method} {path} HTTP/1.1\r\n{self._host_header}{headers}"
        if body or method == "POST":
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        request = head.encode("latin-1", "replace") + b"\r\n" + body
        if timeout_s:
            at_ns = self.clock.now_ns() + seconds_to_ns(timeout_s)
            leg.ends_by(self.clock.call_at(at_ns, lambda: self._late(leg)))
        while self._idle:
            connection = self._idle.pop()
            if connection.usable():
                connection.begin(leg, request)
                return
        task = asyncio.get_running_loop().create_task(self._connect(leg, request))
        leg.dialling(task)
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    async def fetch(
        self, method: str, path: str, body: bytes = b"", timeout_s: float = 2.0
    ) -> tuple[Head, bytes]:
        """A whole answer. Raises ConnectionError if none came in time."""
        future: asyncio.Future[tuple[Head, bytes]] = asyncio.get_running_loop().create_future()

        def whole(head: Head, answer: bytes) -> None:
            if not future.done():
                future.set_result((head, answer))

        def broken(reason: str, reached: bool) -> None:
            if not future.done():
                future.set_exception(ConnectionError(reason))

        leg = Leg(on_whole=whole, on_broken=broken)
        self.send(leg, method, path, body, timeout_s=timeout_s)
        try:
            return await future
        finally:
            if leg.state != "over":
                leg.cancel()

    def close(self) -> None:
        """Cut every connection; legs under way break."""
        for task in list(self._dials):
            task.cancel()
        for connection in list(self._open.values()):
            connection.cut()
        self._idle.clear()

    def drop_idle(self) -> None:
        """Close the connections that carry nothing: the worker behind them may be another now."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.cut()

    def opened(self, connection: UpstreamConnection) -> int:
        """For a connection: it is open; the key is for `closed`."""
        self._next_key += 1
        self._open[self._next_key] = connection
        return self._next_key

    def closed(self, connection: UpstreamConnection, key: int) -> None:
        """For a connection: it is closed."""
        self._open.pop(key, None)
        if connection in self._idle:
            self._idle.remove(connection)

    def give_back(self, connection: UpstreamConnection) -> None:
        """For a connection: it is free for another request."""
        now_ns = self.clock.now_ns()
        connection.idle_since_ns = now_ns
        self._idle.append(connection)
        oldest = self._idle[0]
        if len(self._idle) > _MAX_IDLE or now_ns - oldest.idle_since_ns > _IDLE_NS:
            self._idle.pop(0)
            oldest.cut()

    def _late(self, leg: Leg) -> None:
        if leg.state != "over":
            reached = leg.state != "connecting"
            leg.cancel()
            leg.on_broken("the worker did not answer in time", reached)

    async def _connect(self, leg: Leg, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self), self.host, self.port
                )
        except TimeoutError:
            leg.broken("connecting to the worker timed out", False)
        except OSError as error:
            leg.broken(f"cannot connect to the worker: {error.strerror or error}", False)
        else:
            if leg.state == "over":
                self.give_back(connection)
            else:
                connection.begin(leg, request)
