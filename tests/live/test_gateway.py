"""The gateway over fake workers and real sockets: both legs, the ledger, the other routes."""

from __future__ import annotations

import asyncio

import pytest

from tests.live import fakes
from tests.live.fakes import (
    Asked,
    Client,
    FakeWorker,
    get,
    post,
    run,
    until,
)
from tests.live.gateway_rig import BODY, PATH, STREAM, Rig, d_of, p_of, with_rig
from twofold.live.gateway import Gateway
from twofold.live.gateway_watch import models_of
from twofold.metrics.ledger import PHASES, parse_server_timing


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
        assert set(timing) == {*PHASES, "ttft"} - {"recovery"}
        assert abs(sum(timing.values()) - 2 * timing["ttft"]) < 10_000
        assert (timing["prefill"], timing["transfer"]) == (3_000, 2_000)
        assert timing["unattributed"] == 2_000 + 1_000
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


@pytest.mark.parametrize("stream", [True, False])
def test_connections_to_workers_are_used_again(stream: bool) -> None:
    async def test(made: Rig) -> None:
        for _ in range(20):
            assert (await made.post(BODY | {"stream": stream})).whole
        for worker in made.workers:
            assert len(worker.asked) == 20
            assert len(worker.connections) <= 3  # the watcher's among them

    with_rig(test)


def test_worker_that_closes_after_each_answer_is_served_by_new_connections() -> None:
    def close(asked: Asked) -> None:
        asked.write(fakes.answer(200, b'{"choices":[]}', "connection: close\r\n"))
        asked.cut()

    async def test(made: Rig) -> None:
        made.workers[0].behaviour = close
        for _ in range(5):
            assert (await made.post()).status == 200
        await made.canary()

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


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_refused_and_those_served_are_named(path: str, stream: bool) -> None:
    async def test(made: Rig) -> None:
        body = {"model": "gpt-4", "max_tokens": 3, "stream": stream}
        body |= {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {}
        reply = await made.post(body | ({} if "chat" in path else {"prompt": "x"}), path=path)
        assert reply.status == 404
        assert reply.error == {
            "message": "model: there is no model 'gpt-4' here; there is tiny",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        assert not any(w.asked for w in made.workers)

    with_rig(test)


def test_each_model_has_its_own_workers() -> None:
    async def main() -> None:
        workers = [FakeWorker("mixed", f"m-{model}", model=model) for model in ("one", "two")]
        made = Rig(Gateway([await worker.start() for worker in workers]), workers)
        await made.public.start("127.0.0.1", 0)
        await made.gateway.start()
        try:
            await until(lambda: len(models_of(made.gateway.workers.values())) == 2)
            for model in ("two", "two", "one", "two"):
                assert (await made.post(BODY | {"model": model})).status == 200
            reply = await made.post(BODY | {"model": "three"})
            assert reply.error["message"].endswith("no model 'three' here; there is one, two")
        finally:
            await made.gateway.stop()
            await made.public.close(0)
            for worker in workers:
                worker.stop()
        assert [len(worker.asked) for worker in workers] == [1, 3]

    run(main())


def test_the_log_says_how_many_tokens_where_it_knows() -> None:
    async def test(made: Rig) -> None:
        for body, known in ((BODY, True), (STREAM, False)):
            reply = await made.post(body)
            request_id = reply.headers["x-request-id"]
            await made.ledger(request_id)
            line = made.gateway.ended[request_id].line()
            assert ("tokens=" in line) is known
            assert "=-" not in line
            assert " prefill-0>decode-0" in line

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
