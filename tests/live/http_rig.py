"""An HTTP server with a handler for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from tests.live.fakes import get, run
from twofold.live.exchange import Exchange, Request
from twofold.live.http import HttpServer


class Seen:
    """A handler that echoes, streams, fails or waits, by path."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.held: list[Exchange] = []
        self.gone = 0

    def __call__(self, request: Request, exchange: Exchange) -> None:
        self.requests.append(request)
        if request.path == "/fail":
            raise ValueError("on purpose")
        if request.path == "/fail-late":
            exchange.start(200)
            exchange.write(b"a")
            raise ValueError("on purpose")
        if request.path == "/hold":
            exchange.on_gone = self._on_gone
            self.held.append(exchange)
        elif request.path == "/stream":
            exchange.start(200, "text/plain")
            exchange.write(b"one ")
            exchange.write(b"two")
            exchange.end()
        else:
            exchange.respond(200, request.body or request.path.encode(), "text/plain")

    def _on_gone(self) -> None:
        self.gone += 1


@asynccontextmanager
async def serving(**limits: Any) -> AsyncIterator[tuple[HttpServer, Seen]]:
    seen = Seen()
    server = HttpServer(seen, **limits)
    await server.start("127.0.0.1", 0)
    try:
        yield server, seen
    finally:
        await server.close(grace_s=0)


def serve(test: Callable[[HttpServer, Seen], Coroutine[Any, Any, None]], **limits: Any) -> None:
    async def main() -> None:
        async with serving(**limits) as (server, seen):
            await test(server, seen)
            assert (await get(server.port, "/canary")).body == b"/canary"

    run(main())
