"""The gateway over fake workers and real sockets: both legs, and every way in which they fail."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from tests.live import fakes
from tests.live.fakes import (
    Answer,
    Asked,
    Behaviour,
    Client,
    FakeWorker,
    ask,
    get,
    post,
    run,
    until,
)
from twofold.config import GatewaySettings
from twofold.live.gateway import Gateway
from twofold.live.gateway_admin import AdminApi
from twofold.live.gateway_public import PublicApi
from twofold.live.http import HttpServer
from twofold.live.ports import free_ports
from twofold.metrics.ledger import PHASES, parse_server_timing

BODY = {"model": "tiny", "prompt": "hello there", "max_tokens": 3}
STREAM = BODY | {"stream": True}
PATH = "/v1/completions"


class Rig:
    """A gateway, its two ports and its workers."""

    def __init__(self, gateway: Gateway, workers: list[FakeWorker]) -> None:
        self.gateway = gateway
        self.workers = workers
        self.public = HttpServer(PublicApi(gateway).handle)
        self.admin = HttpServer(AdminApi(gateway).handle)

    @property
    def port(self) -> int:
        return self.public.port

    async def post(self, body: object = BODY, headers: str = "", path: str = PATH) -> Answer:
        return await ask(self.port, post(path, body, headers))

    async def get_json(self, path: str) -> Any:
        return (await get(self.admin.port, path)).json

    async def ledger(self, request_id: str) -> Any:
        await until(lambda: request_id in self.gateway.ended)
        return await self.get_json(f"/admin/requests/{request_id}")

    async def settled(self) -> None:
        """Nothing is under way, and the count of requests holds."""
        await until(lambda: not self.gateway.sessions)
        found = await self.get_json("/admin/conservation")
        assert found["holds"]
        assert found["requests"]["in_flight"] == 0
        assert not any(w.requests for w in self.gateway.router.workers.values())

    async def canary(self) -> None:
        """The next request is served as if nothing had happened."""
        for worker in self.workers:
            worker.behaviour = None
        await until(lambda: self.gateway.unready() is None)
        reply = await self.post(STREAM)
        assert (reply.status, reply.whole) == (200, True)
        assert reply.body.endswith(b"data: [DONE]\n\n")
        await self.settled()


@asynccontextmanager
async def rig(*roles: Any, **options: Any) -> AsyncIterator[Rig]:
    names: dict[str, int] = {}
    workers = []
    for role in roles:
        names[role] = names.get(role, -1) + 1
        workers.append(FakeWorker(role, f"{role}-{names[role]}"))
    gateway = Gateway([await w.start() for w in workers], **options)
    made = Rig(gateway, workers)
    await made.public.start("127.0.0.1", 0)
    await made.admin.start("127.0.0.1", 0)
    await gateway.start()
    try:
        await until(lambda: all(w.identity is not None for w in gateway.workers.values()))
        yield made
    finally:
        await gateway.stop()
        await made.public.close(0)
        await made.admin.close(0)
        for worker in workers:
            worker.stop()


def with_rig(test: Callable[[Rig], Coroutine[Any, Any, None]], *roles: str, **options: Any) -> None:
    async def main() -> None:
        async with rig(*(roles or ("prefill", "decode")), **options) as made:
            await test(made)

    run(main())


def p_of(made: Rig) -> FakeWorker:
    return made.workers[0]


def d_of(made: Rig) -> FakeWorker:
    return made.workers[-1]


# ------------------------------------------------------------------------------- two legs


def test_both_legs_are_sent_as_vllm_wants_them() -> None:
    async def test(made: Rig) -> None:
        body = STREAM | {
            "stream_options": {"include_usage": True},
            "min_tokens": 2,
            "kv_transfer_params": {"evil": 1},
            "bootstrap_room": 3,
        }
        reply = await made.post(body, "x-request-id: r-1\r\nauthorization: Bearer k\r\n")
        assert (reply.status, reply.whole) == (200, True)
        (p,), (d,) = p_of(made).asked, d_of(made).asked
        assert p.path == d.path == PATH
        assert p.json == BODY | {
            "stream": False,
            "max_tokens": 1,
            "max_completion_tokens": 1,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            },
        }
        assert fakes.KV_PARAMS in d.raw  # byte for byte
        sent = d.json
        del sent["kv_transfer_params"]
        assert sent == {
            k: v for k, v in body.items() if k not in ("kv_transfer_params", "bootstrap_room")
        }
        for leg in (p, d):
            assert leg.headers["x-request-id"] == "r-1"
            assert leg.headers["x-twofold-generation"] == "0"
            assert leg.headers["authorization"] == "Bearer k"
            assert 0 < int(leg.headers["x-twofold-time-left-ms"]) <= 600_000
        await made.settled()
        assert p_of(made).releases == []

    with_rig(test)


def test_stream_passes_through_byte_for_byte() -> None:
    async def test(made: Rig) -> None:
        d_of(made).n_tokens = 500
        reply = await made.post(STREAM, "x-request-id: r-2\r\n")
        expected = b"".join([fakes.event(f"t{i}") for i in range(500)]) + b"data: [DONE]\n\n"
        assert reply.body == expected
        assert reply.headers["content-type"] == "text/event-stream"
        assert reply.headers["x-request-id"] == "r-2"
        found = await made.ledger("r-2")
        assert (found["outcome"], found["n_events"]) == ("finished", 501)

    with_rig(test)


def test_http_10_client_gets_the_stream_unframed() -> None:
    async def test(made: Rig) -> None:
        client = await Client.open(made.port)
        client.send(post(PATH, STREAM, version="1.0"))
        raw = await client.reader.read()
        await client.close()
        body = b"".join([fakes.event(f"t{i}") for i in range(3)]) + b"data: [DONE]\n\n"
        assert raw.partition(b"\r\n\r\n")[2] == body

    with_rig(test)


@pytest.mark.parametrize("stream", [True, False])
def test_ledger_sums_to_the_time_to_the_first_byte(stream: bool) -> None:
    async def test(made: Rig) -> None:
        reply = await made.post(BODY | {"stream": stream}, "x-request-id: led\r\n")
        assert reply.headers["x-twofold-transferred"] == "4096"
        timing = parse_server_timing(reply.headers["server-timing"])
        assert set(timing) == {*PHASES, "ttft"}
        assert abs(sum(timing[p] for p in PHASES) - timing["ttft"]) < 10_000
        assert (timing["prefill"], timing["transfer"]) == (30_000, 20_000)
        assert timing["unattributed"] == 20_000 + 10_000
        assert timing["relay"] > 0
        found = await made.ledger("led")
        assert found["outcome"] == "finished"
        assert abs(sum(found["phases_ms"].values()) - found["ttft_ms"]) < 0.01
        assert found["ttft_ms"] <= found["e2e_ms"]
        assert found["transferred_bytes"] == 4096
        assert (found["prefill_worker"], found["decode_worker"]) == ("prefill-0", "decode-0")
        assert found["n_output"] == (None if stream else 3)

    with_rig(test)


def test_mixed_worker_gets_one_leg_with_the_body_as_it_is() -> None:
    async def test(made: Rig) -> None:
        raw = b'{ "model":"tiny",  "prompt":"x", "temperature":1.0, "stream":true}'
        reply = await made.post(raw)
        assert reply.whole
        assert made.workers[0].asked[0].raw == raw
        await made.settled()

    with_rig(test, "mixed")


def test_many_at_once_keep_their_answers_apart() -> None:
    def echo(asked: Asked) -> None:
        asked.write(fakes.STREAM_HEAD + fakes.chunk(fakes.event(asked.json["prompt"])))
        asked.write(fakes.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async def test(made: Rig) -> None:
        d_of(made).behaviour = echo
        replies = await asyncio.gather(
            *[made.post(STREAM | {"prompt": f"prompt {i}"}) for i in range(100)]
        )
        for i, reply in enumerate(replies):
            assert reply.body == fakes.event(f"prompt {i}") + b"data: [DONE]\n\n"
        await made.settled()
        counts = (await made.get_json("/admin/conservation"))["requests"]
        assert (counts["received"], counts["finished"]) == (100, 100)

    with_rig(test)


# --------------------------------------------------------------------------------- faults

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


# -------------------------------------------------------------------------- requests, admin


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{not json", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (BODY | {"max_tokens": -1}, 400, "invalid_value"),
        (BODY | {"prompt": 3}, 400, "invalid_value"),
        (BODY | {"n": 2}, 400, "unsupported"),
        (BODY | {"model": "other"}, 404, "model_not_found"),
        (b"x" * (5 << 20), 413, "body_too_large"),
    ],
)
def test_bad_requests_never_reach_a_worker(body: object, status: int, code: str) -> None:
    async def test(made: Rig) -> None:
        reply = await made.post(body)
        assert (reply.status, reply.error["code"]) == (status, code)
        assert reply.headers["x-request-id"]
        assert not any(w.asked for w in made.workers)
        await made.canary()

    with_rig(test)


def test_models_health_ready_tokenize() -> None:
    async def test(made: Rig) -> None:
        models = (await get(made.port, "/v1/models")).json
        assert [m["id"] for m in models["data"]] == ["tiny"]
        assert (await get(made.port, "/v1/models/tiny")).json["max_model_len"] == 512
        assert (await get(made.port, "/v1/models/none")).status == 404
        assert (await get(made.port, "/health")).body == b""
        assert (await get(made.port, "/ready")).status == 200
        reply = await made.post({"model": "tiny", "prompt": "x"}, path="/v1/tokenize")
        assert reply.json["count"] == 3
        assert (await made.post({"model": 4}, path="/v1/tokenize")).status == 400
        assert (await get(made.port, "/admin/pools")).status == 404

    with_rig(test)


def test_before_any_worker_answers_requests_are_503() -> None:
    async def main() -> None:
        worker = FakeWorker("mixed", "m")
        address = await worker.start()
        worker.stop()
        made = Rig(Gateway([address]), [])
        await made.public.start("127.0.0.1", 0)
        await made.gateway.start()
        assert (await made.post()).status == 503
        assert (await get(made.port, "/v1/models")).json["data"] == []
        assert (await get(made.port, "/health")).status == 200
        await made.gateway.stop()
        await made.public.close(0)

    run(main())


def test_admin() -> None:
    async def test(made: Rig) -> None:
        await made.post(STREAM, "x-request-id: a/b c\r\n".replace(" c", "%20c"))
        await made.settled()
        pools = await made.get_json("/admin/pools")
        assert pools["ready"]
        assert [(w["name"], w["role"], w["up"]) for w in pools["workers"]] == [
            ("prefill-0", "prefill", True),
            ("decode-0", "decode", True),
        ]
        found = await made.get_json("/admin/conservation")
        assert found["workers"]["decode-0"] == {"free": 8, "blocks": 8}
        metrics = (await get(made.admin.port, "/metrics")).body.decode()
        assert 'twofold_requests_ended_total{outcome="finished"} 1.0' in metrics
        assert "twofold_time_to_first_token_seconds_count 1.0" in metrics
        assert "twofold_kv_transferred_bytes_total 4096.0" in metrics
        assert 'twofold_worker_up{role="decode",worker="decode-0"} 1.0' in metrics
        assert "a/b" not in metrics
        assert (await get(made.admin.port, "/admin/requests/none")).status == 404

    with_rig(test)


def test_ledgers_are_kept_up_to_a_bound() -> None:
    async def test(made: Rig) -> None:
        for i in range(5):
            await made.post(STREAM, f"x-request-id: k{i}\r\n")
        await until(lambda: "k4" in made.gateway.ended)
        assert list(made.gateway.ended) == ["k2", "k3", "k4"]

    with_rig(test, kept_ledgers=3)


# --------------------------------------------------------------------------------- process

RUN = """
import sys, msgspec
from twofold.config import GatewaySettings
from twofold.live.gateway_process import run_gateway
sys.exit(run_gateway(msgspec.json.decode(sys.argv[1], type=GatewaySettings)))
"""


async def start_process(
    worker: FakeWorker, port: int, admin_port: int
) -> asyncio.subprocess.Process:
    settings = GatewaySettings(
        host="127.0.0.1",
        port=port,
        admin_host="127.0.0.1",
        admin_port=admin_port,
        workers=(await worker.start(),),
    )
    flags = (sys.executable, "-c", RUN, msgspec.json.encode(settings).decode())
    return await asyncio.create_subprocess_exec(*flags, stderr=asyncio.subprocess.PIPE)


async def ready(port: int) -> None:
    while True:
        try:
            if (await get(port, "/ready")).status == 200:
                return
        except OSError:
            pass
        await asyncio.sleep(0.02)


def test_process_lets_streams_end_when_told_to_stop() -> None:
    async def main() -> None:
        worker = FakeWorker("mixed", "m")
        port, admin = free_ports(2)
        go = asyncio.Event()

        async def slow(asked: Asked) -> None:
            asked.write(fakes.STREAM_HEAD + fakes.chunk(fakes.event("t0")))
            await go.wait()
            asked.write(fakes.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

        process = await start_process(worker, port, admin)
        worker.behaviour = slow
        await ready(port)
        client = await Client.open(port)
        client.send(post(PATH, STREAM))
        await client.reader.readuntil(b"t0")
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        await process.stderr.readuntil(b"stopping")
        go.set()
        assert b"[DONE]" in await client.reader.read()
        assert await process.wait() == 0
        await client.close()
        worker.stop()

    run(main())


def test_process_that_cannot_listen_says_so_and_ends() -> None:
    async def main() -> None:
        worker = FakeWorker("mixed", "m")
        taken = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        port = taken.sockets[0].getsockname()[1]
        process = await start_process(worker, port, 0)
        _, err = await process.communicate()
        assert process.returncode == 2
        assert f"cannot listen at 127.0.0.1:{port}".encode() in err
        assert b"Traceback" not in err
        taken.close()
        worker.stop()

    run(main())
