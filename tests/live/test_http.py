"""The HTTP server against clients that are good, odd and hostile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.live.fakes import Client, ask, get, post, run, until
from twofold.live.exchange import Exchange, Request, sane_request_id
from twofold.live.http import HttpServer
from twofold.live.openai import ApiError
from twofold.live.routes import Routes

BOTH = b"content-length: 3\r\ntransfer-encoding: chunked\r\n"
UPGRADE = b"connection: upgrade\r\nupgrade: h2c\r\n"


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


def test_request_reaches_the_handler_whole() -> None:
    async def test(server: HttpServer, seen: Seen) -> None:
        client = await Client.open(server.port)
        data = post("/echo?a=1&b", b"body", "X-Request-Id: mine-1\r\nX-Thing: Value\r\n")
        for i in range(len(data)):
            client.send(data[i : i + 1])
            await asyncio.sleep(0)
        reply = await client.read()
        await client.close()
        assert (reply.status, reply.body) == (200, b"body")
        assert reply.headers["x-request-id"] == "mine-1"
        request = seen.requests[0]
        assert (request.method, request.path, request.query) == ("POST", "/echo", "a=1&b")
        assert request.headers["x-thing"] == "Value"
        assert request.received_ns > 0

    serve(test)


def test_keep_alive_and_pipelining_answer_in_order() -> None:
    async def test(server: HttpServer, seen: Seen) -> None:
        client = await Client.open(server.port)
        client.send(b"".join([post(f"/p{i}", f"body {i}".encode()) for i in range(40)]))
        for i in range(40):
            assert (await client.read()).body == f"body {i}".encode()
        await client.close()
        assert len({id(r) for r in seen.requests}) == 40

    serve(test)


def test_second_request_waits_for_the_first_answer() -> None:
    async def test(server: HttpServer, seen: Seen) -> None:
        client = await Client.open(server.port)
        client.send(post("/hold", b"1") + post("/echo", b"2"))
        await until(lambda: len(seen.held) == 1)
        assert len(seen.requests) == 1
        seen.held[0].respond(200, b"first")
        assert (await client.read()).body == b"first"
        assert (await client.read()).body == b"2"
        await client.close()

    serve(test)


def test_streams_are_chunked_and_plain_for_http_10() -> None:
    async def test(server: HttpServer, seen: Seen) -> None:
        client = await Client.open(server.port)
        client.send(post("/stream", b""))
        reply = await client.read()
        assert reply.headers["transfer-encoding"] == "chunked"
        assert (reply.body, reply.whole) == (b"one two", True)
        await client.close()
        client = await Client.open(server.port)
        client.send(post("/stream", b"", version="1.0"))
        raw = await client.reader.read()
        await client.close()
        head, _, body = raw.partition(b"\r\n\r\n")
        assert body == b"one two"
        assert b"chunked" not in head

    serve(test)


def test_http_10_connection_is_closed_after_the_answer() -> None:
    async def test(server: HttpServer, seen: Seen) -> None:
        client = await Client.open(server.port)
        client.send(b"GET /x HTTP/1.0\r\n\r\n")
        assert (await client.read()).headers["connection"] == "close"
        assert await client.at_end()
        await client.close()

    serve(test)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab", 400),
        (
            b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (
            b"POST / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 1\r\n\r\na",
            400,
        ),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 40000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 40000, 431),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 8000, 431),
        (b"POST / HTTP/1.1\r\ncontent-length: 1001\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n7d0\r\n" + b"a" * 2000, 413),
    ],
)
def test_bad_http_gets_a_status_in_openais_shape(sent: bytes, status: int) -> None:
    async def test(server: HttpServer, seen: Seen) -> None:
        client = await Client.open(server.port)
        client.send(sent)
        reply = await client.read()
        assert reply.status == status
        assert reply.error["type"] == "invalid_request_error"
        assert reply.headers["x-request-id"]
        assert await client.at_end()
        await client.close()
        assert seen.requests == []

    serve(test, max_body_bytes=1000)


def test_refusal_of_a_large_body_reaches_a_client_that_is_still_sending() -> None:
    async def test(server: HttpServer, seen: Seen) -> None:
        client = await Client.open(server.port)
        client.send(post("/x", b"a" * (10 * 1024 * 1024)))
        await client.writer.drain()
        reply = await client.read()
        assert reply.status == 413
        await client.close()

    serve(test)


def test_a_get_that_offers_an_upgrade_is_answered_as_http_11() -> None:
    async def test(server: HttpServer, seen: Seen) -> None:
        reply = await ask(server.port, b"GET /up HTTP/1.1\r\n" + UPGRADE + b"\r\n")
        assert (reply.status, reply.body) == (200, b"/up")

    serve(test)


def test_expect_100_continue() -> None:
    async def test(server: HttpServer, seen: Seen) -> None:
        client = await Client.open(server.port)
        head = "Expect: 100-continue\r\ncontent-length: "
        client.send(f"POST /e HTTP/1.1\r\n{head}4\r\n\r\n".encode())
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"body")
        assert (await client.read()).body == b"body"
        client.send(f"POST /e HTTP/1.1\r\n{head}4000\r\n\r\n".encode())
        assert (await client.read()).status == 413
        await client.close()

    serve(test, max_body_bytes=1000)


@pytest.mark.parametrize(
    "half",
    [
        b"POST /x HT",
        b"POST /x HTTP/1.1\r\nhost: x\r\n",
        b"POST /x HTTP/1.1\r\ncontent-length: 10\r\n\r\nabc",
    ],
)
def test_half_a_request_then_silence_is_408(half: bytes) -> None:
    async def test(server: HttpServer, seen: Seen) -> None:
        client = await Client.open(server.port)
        client.send(half)
        async with asyncio.timeout(2):
            reply = await client.read()
        assert reply.status == 408
        assert await client.at_end()
        await client.close()

    serve(test, header_timeout_s=0.1)


def test_408_waits_for_the_answer_before_it() -> None:
    async def test(server: HttpServer, seen: Seen) -> None:
        client = await Client.open(server.port)
        client.send(post("/hold", b"1") + b"POST /x HT")
        await until(lambda: len(seen.held) == 1)
        await asyncio.sleep(0.5)
        seen.held[0].respond(200, b"first")
        assert (await client.read()).body == b"first"
        assert (await client.read()).status == 408
        await client.close()

    serve(test, header_timeout_s=0.1)


def test_idle_connections_are_closed() -> None:
    async def test(server: HttpServer, seen: Seen) -> None:
        client = await Client.open(server.port)
        client.send(post("/x", b"1"))
        assert (await client.read()).status == 200
        assert await client.at_end()
        await client.close()

    serve(test, idle_timeout_s=0.05)


def test_too_many_connections_are_refused() -> None:
    async def test(server: HttpServer, seen: Seen) -> None:
        clients = [await Client.open(server.port) for _ in range(2)]
        await until(lambda: len(server.connections) == 2)
        reply = await ask(server.port, post("/x", b"1"))
        assert (reply.status, reply.error["code"]) == (503, "too_many_connections")
        for client in clients:
            await client.close()
        await until(lambda: len(server.connections) == 0)

    serve(test, max_connections=2)


def test_handler_errors_are_500_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def test(server: HttpServer, seen: Seen) -> None:
        reply = await ask(server.port, post("/fail", b""))
        assert (reply.status, reply.error["type"]) == (500, "server_error")
        assert "on purpose" not in reply.error["message"]
        assert not (await ask(server.port, post("/fail-late", b""))).whole

    serve(test)
    assert [r.message.split(":")[1] for r in caplog.records if r.name == "twofold.http"] == [
        " error in the handler",
        " error in the handler",
    ]


def test_client_that_leaves_is_noticed_once() -> None:
    async def test(server: HttpServer, seen: Seen) -> None:
        client = await Client.open(server.port)
        client.send(post("/hold", b""))
        await until(lambda: len(seen.held) == 1)
        await client.close()
        await until(lambda: seen.gone == 1)
        seen.held[0].respond(200, b"to nobody")
        assert seen.held[0].gone
        assert seen.gone == 1

    serve(test)


def test_what_is_written_after_the_end_goes_nowhere() -> None:
    async def test(server: HttpServer, seen: Seen) -> None:
        client = await Client.open(server.port)
        client.send(post("/hold", b"") + post("/x", b"second"))
        await until(lambda: len(seen.held) == 1)
        exchange = seen.held[0]
        exchange.start(200)
        exchange.write(b"first")
        exchange.end()
        exchange.write(b"late")
        exchange.write_raw(b"late")
        exchange.respond(200, b"late")
        exchange.end()
        assert (await client.read()).body == b"first"
        assert (await client.read()).body == b"second"
        await client.close()

    serve(test)


def test_slow_reader_pauses_and_drains() -> None:
    async def test(server: HttpServer, seen: Seen) -> None:
        client = await Client.open(server.port)
        client.send(post("/hold", b""))
        await until(lambda: len(seen.held) == 1)
        exchange = seen.held[0]
        drained: list[int] = []
        exchange.on_drain = lambda: drained.append(1)
        exchange.start(200)
        sent = 0
        while not exchange.paused:
            exchange.write(b"x" * 65536)
            sent += 65536
            await asyncio.sleep(0)
            assert sent < 1 << 28
        assert not drained
        exchange.end()
        assert len((await client.read()).body) == sent
        await client.close()

    serve(test)


def test_close_lets_answers_end_and_turns_new_clients_away() -> None:
    async def main() -> None:
        async with serving() as (server, seen):
            idle = await Client.open(server.port)
            busy = await Client.open(server.port)
            busy.send(post("/hold", b""))
            await until(lambda: len(seen.held) == 1 and len(server.connections) == 2)
            closing = asyncio.create_task(server.close(grace_s=5))
            assert await idle.at_end()
            seen.held[0].respond(200, b"done")
            reply = await busy.read()
            assert reply.body == b"done"
            await idle.close()
            await busy.close()
            await closing
            with pytest.raises(OSError):
                await Client.open(server.port)

    run(main())


def test_routes_know_head_options_and_errors() -> None:
    def boom(request: Request, exchange: Exchange) -> None:
        raise ApiError(429, "full", "try later", retry_after_s=3)

    routes = Routes(
        {
            ("GET", "/a"): lambda request, exchange: exchange.respond(200, b"abc"),
            ("GET", "/below/*"): lambda request, exchange: exchange.respond(200, b"b"),
            ("POST", "/boom"): boom,
        }
    )

    async def main() -> None:
        server = HttpServer(routes)
        await server.start("127.0.0.1", 0)
        client = await Client.open(server.port)
        client.send(b"HEAD /a HTTP/1.1\r\n\r\nGET /a HTTP/1.1\r\n\r\n")
        raw = await client.reader.readuntil(b"abc")
        assert raw.count(b"content-length: 3") == 2
        assert raw.count(b"abc") == 1
        await client.close()
        assert (await get(server.port, "/below/x/y")).body == b"b"
        assert (await get(server.port, "/below/")).status == 404
        assert (await get(server.port, "/nowhere")).error["code"] == "not_found"
        reply = await ask(server.port, post("/a", b""))
        assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
        reply = await ask(server.port, b"OPTIONS /boom HTTP/1.1\r\n\r\n")
        assert (reply.status, reply.headers["allow"]) == (204, "POST, OPTIONS")
        reply = await ask(server.port, post("/boom", b""))
        assert (reply.status, reply.headers["retry-after"]) == (429, "3")
        await server.close(0)

    run(main())


@pytest.mark.parametrize("bad", ["", "a b", "x" * 129, "caf\xe9", "tab\t", "line\r\nx: y", "\x7f"])
def test_request_ids_that_are_not_sane_are_replaced(bad: str) -> None:
    fresh = sane_request_id(bad)
    assert fresh != bad
    assert len(fresh) == 32
    assert sane_request_id("ok-" + "x" * 125) == "ok-" + "x" * 125


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=80), max_size=6))
def test_no_bytes_bring_the_server_down(pieces: list[bytes]) -> None:
    async def test(server: HttpServer, seen: Seen) -> None:
        client = await Client.open(server.port)
        for piece in [b"POST /x HTTP/1.1\r\n", *pieces]:
            client.send(piece)
            await asyncio.sleep(0)
        await client.close()

    serve(test)
