"""Every way in which a leg, a worker or a client fails, and what the gateway makes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from tests.live import fakes
from tests.live.fakes import (
    Asked,
    Behaviour,
    Client,
    FakeWorker,
    get,
    post,
    until,
)
from tests.live.gateway_rig import BODY, PATH, STREAM, Rig, d_of, p_of, with_rig

FAULTS: list[tuple[str, Behaviour, int]] = [
    ("prefill", fakes.status(500), 502),
    ("prefill", fakes.cut, 502),
    ("prefill", fakes.garbage, 502),
    ("prefill", fakes.no_params, 502),
    ("prefill", fakes.status(200, b"not json"), 502),
    ("prefill", fakes.status(200, b'{"kv_transfer_params":{"do_remote_prefill":false}}'), 502),
    ("prefill", fakes.status(400), 400),
    ("prefill", fakes.status(413), 413),
    ("prefill", fakes.status(429, headers="retry-after: 7\r\n"), 429),
    ("prefill", fakes.status(504), 504),
    ("decode", fakes.status(500), 502),
    ("decode", fakes.status(503), 502),
    ("decode", fakes.cut, 502),
    ("decode", fakes.garbage, 502),
    ("decode", fakes.status(200, b""), 502),
    ("decode", fakes.status(400), 400),
    ("decode", fakes.status(429), 429),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("where", "behaviour", "status"), FAULTS)
def test_leg_that_fails_gives_the_right_status_at_once(
    where: str, behaviour: Behaviour, status: int, stream: bool
) -> None:
    async def test(made: Rig) -> None:
        (p_of if where == "prefill" else d_of)(made).behaviour = behaviour
        async with asyncio.timeout(1):
            reply = await made.post(BODY | {"stream": stream}, "x-request-id: f\r\n")
        assert (reply.status, reply.whole) == (status, True)
        assert reply.json["error"]["message"]
        if status == 429:
            assert int(reply.headers["retry-after"]) >= 1
        found = await made.ledger("f")
        assert found["status"] == status
        assert found["outcome"] == ("refused" if 400 <= status < 500 else "failed")
        assert found["why"]
        if where == "decode":
            await until(lambda: p_of(made).releases == [{"request_id": 7, "generation": 0}])
        else:
            assert d_of(made).asked == []
        await made.canary()

    with_rig(test)


@pytest.mark.parametrize("last", [fakes.cut, lambda asked: asked.write(b"zz\r\nnot a chunk")])
def test_stream_that_breaks_between_chunks_ends_with_an_error_event(
    last: Callable[[Asked], None],
) -> None:
    async def test(made: Rig) -> None:
        d_of(made).behaviour = fakes.stream_then(2, last)
        async with asyncio.timeout(1):
            reply = await made.post(STREAM, "x-request-id: cut\r\n")
        assert reply.status == 200
        pieces = reply.body.split(b"\n\n")
        assert pieces[0] + b"\n\n" == fakes.event("t0")
        assert b"[DONE]" not in reply.body
        if last is fakes.cut:
            assert json.loads(pieces[2].removeprefix(b"data: "))["error"]["code"] == "worker_failed"
        else:
            assert not reply.whole
        assert (await made.ledger("cut"))["outcome"] == "failed"
        await made.canary()

    with_rig(test)


def test_stream_that_breaks_inside_a_chunk_is_cut_short() -> None:
    async def test(made: Rig) -> None:
        d_of(made).behaviour = fakes.stream_then(2, fakes.half_a_chunk)
        async with asyncio.timeout(1):
            reply = await made.post(STREAM)
        assert not reply.whole
        assert reply.body.startswith(fakes.event("t0"))
        await made.canary()

    with_rig(test)


def test_stream_that_the_worker_ends_with_an_error_counts_as_failed() -> None:
    def fail(asked: Asked) -> None:
        asked.write(fakes.chunk(b'data: {"error":{"message":"device"}}\n\n') + b"0\r\n\r\n")

    async def test(made: Rig) -> None:
        d_of(made).behaviour = fakes.stream_then(2, fail)
        reply = await made.post(STREAM, "x-request-id: own\r\n")
        assert reply.whole
        assert reply.body.endswith(b'data: {"error":{"message":"device"}}\n\n')
        found = await made.ledger("own")
        assert (found["outcome"], found["status"]) == ("failed", 502)
        assert "[DONE]" in found["why"]
        await made.canary()

    with_rig(test)


def test_end_of_a_stream_is_seen_however_it_is_split() -> None:
    async def bytewise(asked: Asked) -> None:
        asked.write(fakes.STREAM_HEAD + fakes.chunk(fakes.event("t0")))
        for byte in fakes.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n":
            asked.write(bytes([byte]))
            await asyncio.sleep(0.001)

    async def test(made: Rig) -> None:
        d_of(made).behaviour = bytewise
        assert (await made.post(STREAM, "x-request-id: slow\r\n")).whole
        assert (await made.ledger("slow"))["outcome"] == "finished"

    with_rig(test)


def test_stream_whose_head_comes_without_a_token_can_still_fail_with_a_status() -> None:
    async def head_then_cut(asked: Asked) -> None:
        asked.write(fakes.STREAM_HEAD)
        await asyncio.sleep(0.02)
        asked.cut()

    async def test(made: Rig) -> None:
        d_of(made).behaviour = head_then_cut
        assert (await made.post(STREAM)).status == 502
        await made.canary()

    with_rig(test)


def test_whole_answer_that_breaks_is_502() -> None:
    async def half(asked: Asked) -> None:
        asked.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
        await asyncio.sleep(0.02)
        asked.cut()

    async def test(made: Rig) -> None:
        d_of(made).behaviour = half
        assert (await made.post(BODY)).status == 502
        await made.canary()

    with_rig(test)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_deadline_is_504_and_the_legs_are_cut(where: str, stream: bool) -> None:
    async def test(made: Rig) -> None:
        worker = p_of(made) if where == "prefill" else d_of(made)
        worker.behaviour = fakes.hang
        reply = await made.post(BODY | {"stream": stream}, "x-request-id: late\r\n")
        assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
        await until(lambda: worker.asked[0].connection.lost)
        assert (await made.ledger("late"))["outcome"] == "failed"
        if where == "decode":
            await until(lambda: len(p_of(made).releases) == 1)
        made.gateway._timeout_ns = 10**10
        await made.canary()

    with_rig(test, request_timeout_s=0.15)


def test_deadline_inside_a_stream_ends_it_with_an_error_event() -> None:
    async def test(made: Rig) -> None:
        d_of(made).behaviour = fakes.stream_then(2, fakes.hang)
        reply = await made.post(STREAM)
        assert (reply.status, reply.whole) == (200, True)
        error = json.loads(reply.body.split(b"\n\n")[2].removeprefix(b"data: "))["error"]
        assert error["code"] == "deadline_exceeded"
        await made.settled()
        assert p_of(made).releases == []  # decode had it all

    with_rig(test, request_timeout_s=0.15)


@pytest.mark.parametrize("where", ["prefill", "decode", "stream"])
def test_client_that_leaves_cancels_its_legs(where: str) -> None:
    async def test(made: Rig) -> None:
        worker = p_of(made) if where == "prefill" else d_of(made)
        stuck = fakes.stream_then(2, fakes.hang) if where == "stream" else fakes.hang
        worker.behaviour = stuck
        client = await Client.open(made.port)
        client.send(post(PATH, STREAM, "x-request-id: gone\r\n"))
        if where == "stream":
            await client.reader.readuntil(b"t1")
        await until(lambda: len(worker.asked) == 1)
        await client.close()
        await until(lambda: worker.asked[0].connection.lost, 1)
        found = await made.ledger("gone")
        assert (found["outcome"], found["status"]) == ("cancelled", 499)
        if where == "decode":
            await until(lambda: p_of(made).releases == [{"request_id": 7, "generation": 0}])
        await made.canary()

    with_rig(test)


def test_worker_that_dies_is_noticed_and_comes_back() -> None:
    async def test(made: Rig) -> None:
        port = d_of(made).port
        d_of(made).stop()
        async with asyncio.timeout(1):
            reply = await made.post(STREAM)
        assert reply.status in (502, 503)
        await until(lambda: made.gateway.unready() is not None)
        assert (await get(made.port, "/ready")).status == 503
        reply = await made.post(STREAM)
        assert (reply.status, reply.error["code"]) == (503, "not_ready")
        assert reply.headers["retry-after"] == "1"
        again = FakeWorker("decode", "decode-0", engine_id="life-2")
        await again.start(port)
        made.workers[-1] = again
        await until(lambda: made.gateway.unready() is None)
        assert (await get(made.port, "/ready")).status == 200
        await made.canary()
        again.stop()

    with_rig(test)


def test_decode_worker_that_dies_while_streaming() -> None:
    async def test(made: Rig) -> None:
        d_of(made).behaviour = fakes.stream_then(2, fakes.hang)
        clients = []
        for _ in range(8):
            client = await Client.open(made.port)
            client.send(post(PATH, STREAM))
            await client.reader.readuntil(b"t1")
            clients.append(client)
        port = d_of(made).port
        d_of(made).stop()
        async with asyncio.timeout(1):
            for client in clients:
                rest = await client.reader.read()
                assert b'"error"' in rest
                assert b"[DONE]" not in rest
                await client.close()
        await until(lambda: not made.gateway.sessions)
        made.workers[-1] = FakeWorker("decode", "decode-0")
        await made.workers[-1].start(port)
        await made.canary()
        made.workers[-1].stop()

    with_rig(test)


def test_too_many_in_flight_are_refused() -> None:
    async def test(made: Rig) -> None:
        p_of(made).behaviour = fakes.hang
        held = await Client.open(made.port)
        held.send(post(PATH, STREAM))
        await until(lambda: len(made.gateway.sessions) == 1)
        reply = await made.post(STREAM)
        assert (reply.status, reply.error["code"]) == (429, "queue_full")
        assert int(reply.headers["retry-after"]) >= 1
        await held.close()
        await made.canary()

    with_rig(test, max_inflight=1)


def test_pair_that_differs_is_refused_before_any_prefill() -> None:
    async def test(made: Rig) -> None:
        d_of(made).layout["block_size"] = 32
        await until(lambda: made.gateway.unready() is not None)
        reply = await made.post(STREAM)
        assert reply.status == 503
        assert "block" in reply.error["message"]
        assert p_of(made).asked == []

    with_rig(test)


def test_slow_client_holds_the_worker_back() -> None:
    sent = 0

    async def flood(asked: Asked) -> None:
        nonlocal sent
        asked.write(fakes.STREAM_HEAD)
        piece = fakes.chunk(b"data: " + b"x" * 60000 + b"\n\n")
        while sent < 1 << 28 and asked.connection.transport.get_write_buffer_size() < 1 << 20:
            asked.write(piece)
            sent += len(piece)
            await asyncio.sleep(0)
        asked.write(b"0\r\n\r\n")

    async def test(made: Rig) -> None:
        d_of(made).behaviour = flood
        client = await Client.open(made.port)
        client.send(post(PATH, STREAM))
        await until(lambda: sent > 1 << 20 and not d_of(made).tasks)
        assert sent < 1 << 27  # it did not all go into the gateway's memory
        reply = await client.read()
        assert reply.whole
        assert reply.body.count(b"data: ") == sent // 60000
        await client.close()
        await made.canary()

    with_rig(test)
