"""The main job over real sockets: one request over two workers, equal to transformers' own."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests import tiny
from tests.device.reference import Answer as Reference
from tests.device.reference import expected, prompt_of
from tests.live.stack import HOST, Stack, get, post, request_bytes, running

B = 16
LENGTHS = (1, B - 1, B, B + 1, 2 * B, 3 * B + 5)
SETUPS = {
    "1M": {"pools": "1M"},
    "1P1D-shm": {"pools": "1P1D", "transport": "shm"},
    "1P1D-tcp": {"pools": "1P1D", "transport": "tcp"},
}


def _assert_equal(got: Any, want: Reference, stack: Stack) -> None:
    """Same greedy tokens, same top logprobs within 1e-4."""
    text = stack.workers[0]._tokeniser
    logprobs = got["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [text.token_text(t) for t in want.tokens]
    assert got["choices"][0]["text"] == text.decode(want.tokens)
    for i, (token, top) in enumerate(zip(want.tokens, want.top, strict=True)):
        assert logprobs["token_logprobs"][i] == pytest.approx(top[token], abs=1e-4)
        by_text = {text.token_text(t): value for t, value in top.items()}
        assert logprobs["top_logprobs"][i] == pytest.approx(by_text, abs=1e-4)


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_equals_generate(family: str, setup: str) -> None:
    async def main() -> None:
        async with running(tiny.cached_model(family), **SETUPS[setup]) as stack:  # type: ignore[arg-type]
            for n in LENGTHS:
                want = expected(family, n)
                answer = await stack.complete(
                    prompt=prompt_of(n),
                    max_tokens=len(want.tokens),
                    temperature=0,
                    ignore_eos=True,
                    logprobs=len(want.top[0]),
                )
                assert answer.status == 200, answer.body
                _assert_equal(answer.json, want, stack)
                moved = int(answer.headers.get("x-twofold-transferred", "0"))
                # The first n - 1 tokens' blocks pass, less those that decode has cached.
                blocks = -(-(n - 1) // B) if "P" in setup else 0
                assert moved <= blocks * stack.workers[0].layout.block_bytes
                if n in (B - 1, 3 * B + 5):
                    assert (moved > 0) == ("P" in setup)
            await stack.at_baseline()

    asyncio.run(main())


def test_stream_and_whole_say_the_same() -> None:
    async def main() -> None:
        async with running(tiny.cached_model("llama"), "1P1D") as stack:
            ask: dict[str, Any] = {
                "messages": [{"role": "user", "content": "你好 🙂 naïve?"}],
                "max_tokens": 24,
                "temperature": 0.7,
                "seed": 7,
                "ignore_eos": True,
            }
            whole = await stack.chat(**ask)
            streamed = await stack.chat(**ask, stream=True, stream_options={"include_usage": True})
            assert whole.status == streamed.status == 200
            assert streamed.done
            events = streamed.events
            text = "".join(
                e["choices"][0]["delta"].get("content", "") for e in events if e["choices"]
            )
            assert text == whole.json["choices"][0]["message"]["content"]
            assert events[0]["choices"][0]["delta"]["role"] == "assistant"
            assert events[-1]["usage"] == whole.json["usage"] | {
                "prompt_tokens_details": events[-1]["usage"]["prompt_tokens_details"]
            }
            assert whole.json["usage"]["completion_tokens"] == 24
            assert events[-2]["choices"][0]["finish_reason"] == "length"

    asyncio.run(main())


@pytest.mark.parametrize("max_tokens", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_few_tokens(max_tokens: int, stream: bool) -> None:
    """The prefill worker's own token is never counted or shown twice."""

    async def main() -> None:
        async with running(tiny.cached_model("llama"), "1P1D") as stack:
            want = expected("llama", 20)
            answer = await stack.complete(
                prompt=prompt_of(20),
                max_tokens=max_tokens,
                temperature=0,
                ignore_eos=True,
                stream=stream,
                **({"stream_options": {"include_usage": True}} if stream else {}),
            )
            text = stack.workers[0]._tokeniser.decode(want.tokens[:max_tokens])
            if stream:
                got = "".join(e["choices"][0]["text"] for e in answer.events if e["choices"])
                usage = answer.events[-1]["usage"]
            else:
                got, usage = answer.json["choices"][0]["text"], answer.json["usage"]
            assert got == text
            assert usage["completion_tokens"] == max_tokens

    asyncio.run(main())


def test_stop_string_over_a_token_boundary() -> None:
    async def main() -> None:
        async with running(tiny.cached_model("llama"), "1P1D") as stack:
            ask: dict[str, Any] = {
                "prompt": prompt_of(20),
                "max_tokens": 40,
                "temperature": 0,
                "ignore_eos": True,
            }
            full: str = (await stack.complete(**ask)).json["choices"][0]["text"]
            stop = full[5:9]
            cut = full[: full.index(stop)]
            for stream in (False, True):
                answer = await stack.complete(**ask, stop=[stop], stream=stream)
                if stream:
                    choices = [e["choices"][0] for e in answer.events]
                    got = "".join(c["text"] for c in choices)
                    finish = choices[-1]["finish_reason"]
                else:
                    got = answer.json["choices"][0]["text"]
                    finish = answer.json["choices"][0]["finish_reason"]
                assert (got, finish) == (cut, "stop")
            await stack.at_baseline()

    asyncio.run(main())


def test_second_ask_is_cached_and_says_so() -> None:
    """Cold: 0 cached tokens. Warm: decode has every full block, so nothing is transferred."""

    async def main() -> None:
        async with running(tiny.cached_model("llama"), "1P1D") as stack:
            ask: dict[str, Any] = {
                "prompt": prompt_of(2 * B + 1),
                "max_tokens": 4,
                "temperature": 0,
                "ignore_eos": True,
            }
            cold, warm = await stack.complete(**ask), await stack.complete(**ask)
            size = stack.workers[0].layout.block_bytes
            assert cold.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert warm.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * B
            assert int(cold.headers["x-twofold-transferred"]) == 2 * size
            assert int(warm.headers["x-twofold-transferred"]) == 0
            assert cold.json["choices"] == warm.json["choices"]
            await stack.at_baseline()

    asyncio.run(main())


def test_ledger_sums_to_ttft_and_can_be_asked_for() -> None:
    async def main() -> None:
        async with running(tiny.cached_model("llama"), "1P1D") as stack:
            answer = await post(
                stack.port,
                "/v1/completions",
                {
                    "model": stack.model,
                    "prompt": prompt_of(40),
                    "max_tokens": 4,
                    "temperature": 0,
                    "stream": True,
                },
                {"x-request-id": "my-id"},
            )
            parts = [p.partition(";") for p in answer.headers["server-timing"].split(",")]
            timing = {name.strip(): float(rest.split("dur=")[1]) for name, _, rest in parts}
            ttft = timing.pop("ttft")
            assert sum(timing.values()) == pytest.approx(ttft, abs=0.02)
            for phase in ("tokenise", "prefill", "handoff_wait", "transfer", "first_step", "relay"):
                assert timing[phase] > 0, phase
            kept = await post(stack.admin.port, "/", b"")
            assert kept.status in (404, 405)
            ledger = (await get(stack.admin.port, "/admin/requests/my-id")).json
            assert ledger["outcome"] == "finished"
            assert sum(ledger["phases_ms"].values()) == pytest.approx(ledger["ttft_ms"], abs=0.02)
            assert ledger["transferred_bytes"] == int(answer.headers["x-twofold-transferred"]) > 0
            assert (ledger["prefill_worker"], ledger["decode_worker"]) == ("prefill-0", "decode-1")

    asyncio.run(main())


def test_a_client_that_stops_reading_at_done_was_served() -> None:
    async def main() -> None:
        async with running(tiny.cached_model("llama"), "1P1D") as stack:
            for i in range(5):
                body = {"model": stack.model, "prompt": prompt_of(9, seed=i), "stream": True}
                data = request_bytes("POST", "/v1/completions", json.dumps(body).encode())
                reader, writer = await asyncio.open_connection(HOST, stack.port)
                writer.write(data)
                await reader.readuntil(b"data: [DONE]")
                writer.transport.abort()
            await stack.at_baseline()
            counts = stack.gateway.conservation()
            assert (counts["finished"], counts["cancelled"]) == (5, 0)

    asyncio.run(main())


def test_staged_pool_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a device whose memory is not the host's: blocks exported and imported."""
    from twofold.device import runner as module

    made: list[Any] = []
    init = module.Runner.__init__

    def staged(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "staged": True})
        made.append(self)

    monkeypatch.setattr(module.Runner, "__init__", staged)

    async def main() -> None:
        async with running(tiny.cached_model("llama"), "1P1D") as stack:
            for n in LENGTHS:
                want = expected("llama", n)
                answer = await stack.complete(
                    prompt=prompt_of(n),
                    max_tokens=len(want.tokens),
                    temperature=0,
                    ignore_eos=True,
                    logprobs=len(want.top[0]),
                )
                _assert_equal(answer.json, want, stack)
            await stack.at_baseline()

    asyncio.run(main())
    assert len(made) == 2


def test_tokenize() -> None:
    async def main() -> None:
        async with running(tiny.cached_model("llama"), "1P1D") as stack:
            answer = await post(
                stack.port, "/v1/tokenize", {"model": stack.model, "prompt": "hello world"}
            )
            ids = answer.json["tokens"]
            assert stack.workers[0]._tokeniser.decode(ids) == "hello world"
            assert answer.json["count"] == len(ids)
            assert json.loads((await post(stack.port, "/v1/tokenize", b"{")).body)["error"]

    asyncio.run(main())
