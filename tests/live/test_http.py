"""The HTTP server: order, streams, clients that leave, errors, routes."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.live.fakes import Client, ask, get, post, run, until
from tests.live.http_rig import Seen, serve, serving
from twofold.live.exchange import Exchange, Request, sane_request_id
from twofold.live.http import HttpServer
from twofold.live.openai import ApiError
from twofold.live.routes import Routes


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


def test_an_answer_may_end_after_its_client_has_reset_the_connection() -> None:
    """Before that is read. On asyncio's own loop, ending the sending side then fails, and whoever
    answers must not.
    """

    async def main() -> None:
        async with serving() as (server, seen):
            await test(server, seen)

    async def test(server: HttpServer, seen: Seen) -> None:
        client = socket.create_connection(("127.0.0.1", server.port))
        loop = asyncio.get_running_loop()
        client.setblocking(False)
        client.sendall(b"POST /hold HTTP/1.0\r\ncontent-length: 0\r\n\r\n")
        await until(lambda: len(seen.held) == 1)
        exchange = seen.held[0]
        exchange.start(200)
        exchange.write(b"half")
        got = b""
        while not got.endswith(b"half"):  # so that nothing is left to be sent
            got += await loop.sock_recv(client, 1000)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        exchange.end()
        await until(lambda: not server.connections)

    asyncio.run(main())


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
