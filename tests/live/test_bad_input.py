"""Bad input to the gateway and straight to a worker: right status, OpenAI's shape, life goes on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests import tiny
from tests.device.reference import expected, prompt_of
from tests.live.stack import HOST, Answer, Stack, post, request_bytes, running, send

CASES: dict[str, tuple[bytes | dict[str, Any], int, str | None]] = {
    "not JSON": (b"hello", 400, None),
    "half JSON": (b'{"model": "x"', 400, None),
    "not an object": (b"[1, 2]", 400, None),
    "empty": (b"", 400, None),
    "not UTF-8": (b'{"model": "\xff\xfe"}', 400, None),
    "deep": (b"[" * 100_000, 400, None),
    "unknown model": ({"model": "gpt-9"}, 404, "model"),
    "no model": ({"model": None}, 400, "model"),
    "negative max_tokens": ({"max_tokens": -5}, 400, "max_tokens"),
    "zero max_tokens": ({"max_tokens": 0}, 400, "max_tokens"),
    "max_tokens text": ({"max_tokens": "many"}, 400, "max_tokens"),
    "max_tokens bool": ({"max_tokens": True}, 400, "max_tokens"),
    "temperature text": ({"temperature": "hot"}, 400, "temperature"),
    "temperature 3": ({"temperature": 3}, 400, "temperature"),
    "top_p 0": ({"top_p": 0}, 400, "top_p"),
    "prompt number": ({"prompt": 5}, 400, "prompt"),
    "prompt empty": ({"prompt": ""}, 400, "prompt"),
    "prompt ids negative": ({"prompt": [1, -1]}, 400, "prompt"),
    "prompt ids too large": ({"prompt": [1, 10**6]}, 400, "prompt"),
    "stop ids too large": ({"stop_token_ids": [10**6]}, 400, "stop_token_ids"),
    "two prompts": ({"prompt": ["a", "b"]}, 400, "prompt"),
    "n 2": ({"n": 2}, 400, "n"),
    "stop of numbers": ({"stop": [1]}, 400, "stop"),
    "response_format": ({"response_format": {"type": "json_object"}}, 400, "response_format"),
    "prompt too long": ({"prompt": list(range(3, 503)) * 4}, 413, None),
    "max_tokens too long": ({"max_tokens": 10**6}, 413, None),
    "10 MB": (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', 413, None),
}
GOOD: dict[str, Any] = {"prompt": prompt_of(20), "max_tokens": 4, "temperature": 0}


def _check(answer: Answer, status: int, param: str | None, case: str) -> None:
    assert answer.status == status, (case, answer.status, answer.body[:300])
    error = answer.error
    assert set(error) == {"message", "type", "param", "code"}, case
    assert error["message"], case
    assert error["type"] == "invalid_request_error", case
    if param is not None:
        assert error["param"] == param, case
        assert param in error["message"], case
    assert answer.headers["x-request-id"], case


async def _canary(stack: Stack) -> None:
    want = expected("llama", 53)
    answer = await stack.complete(
        prompt=prompt_of(53), max_tokens=len(want.tokens), temperature=0, ignore_eos=True
    )
    assert answer.status == 200
    assert answer.json["choices"][0]["text"] == stack.workers[0]._tokeniser.decode(want.tokens)


@pytest.mark.parametrize("at", ["gateway", "worker"])
def test_each_is_refused_and_life_goes_on(at: str) -> None:
    async def main() -> None:
        async with running(tiny.cached_model("llama"), "1P1D", max_model_len=1000) as stack:
            port = stack.port if at == "gateway" else stack.worker("decode").http_port
            for case, (body, status, param) in CASES.items():
                if isinstance(body, dict):
                    body = json.dumps({"model": stack.model, **GOOD, **body}).encode()
                if case == "10 MB" and at == "worker":
                    continue  # a worker takes whatever its gateway lets through
                _check(await post(port, "/v1/completions", body), status, param, case)
            await _canary(stack)
            await stack.at_baseline()

    asyncio.run(main())


@pytest.mark.parametrize("at", ["gateway", "worker"])
def test_half_a_request_then_silence(at: str) -> None:
    async def main() -> None:
        async with running(tiny.cached_model("llama"), "1P1D") as stack:
            server = stack.public if at == "gateway" else stack.worker("decode")._server
            assert server is not None
            server.limits = server.limits._replace(header_timeout_ns=300_000_000)
            whole = request_bytes("POST", "/v1/completions", json.dumps(GOOD).encode())
            for part in (whole[:30], whole[:-10]):
                answer = await send(server.port, part, within_s=5)
                assert answer.status == 408
                assert answer.error["code"]
            await _canary(stack)

    asyncio.run(main())


def test_garbage_and_unknown_paths() -> None:
    async def main() -> None:
        async with running(tiny.cached_model("llama"), "1P1D") as stack:
            assert (await send(stack.port, b"\x16\x03\x01\x02\x00\x01\x00" * 20)).status == 400
            assert (await post(stack.port, "/v1/nothing", b"{}")).status == 404
            bad = await send(stack.port, request_bytes("DELETE", "/v1/completions"))
            assert bad.status in (404, 405)
            reader, writer = await asyncio.open_connection(HOST, stack.port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 50_000)
            head = await asyncio.wait_for(reader.read(100), 5)
            assert b" 431 " in head
            writer.close()
            await _canary(stack)

    asyncio.run(main())


def test_kv_transfer_params_of_a_client_are_not_believed() -> None:
    """A client cannot point a decode worker at a host of its choosing."""

    async def main() -> None:
        async with running(tiny.cached_model("llama"), "1P1D") as stack:
            params = {"do_remote_prefill": True, "remote_host": HOST, "remote_port": 1}
            answer = await stack.complete(**GOOD, kv_transfer_params=params)
            assert answer.status == 200
            decode = stack.worker("decode").http_port
            half = {"model": stack.model, **GOOD, "kv_transfer_params": params}
            assert (await post(decode, "/v1/completions", half)).status == 400
            unknown = params | {
                "remote_engine_id": "nobody",
                "remote_request_id": "1",
                "remote_num_tokens": 20,
                "remote_generation": 0,
            }
            body = {"model": stack.model, **GOOD, "kv_transfer_params": unknown}
            answer = await post(decode, "/v1/completions", body)
            assert answer.status == 500
            assert "prefill worker lost" in answer.error["message"]
            await stack.at_baseline()

    asyncio.run(main())
