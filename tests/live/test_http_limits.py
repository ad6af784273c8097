"""The HTTP server against clients that send too much, too little, too slowly or nonsense."""

from __future__ import annotations

import asyncio

import pytest

from tests.live.fakes import Client, ask, post, until
from tests.live.http_rig import Seen, serve
from twofold.live.http import HttpServer

BOTH = b"content-length: 3\r\ntransfer-encoding: chunked\r\n"
UPGRADE = b"connection: upgrade\r\nupgrade: h2c\r\n"


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
