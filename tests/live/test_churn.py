"""Many requests with shared prefixes, aborts and a pool small enough to preempt."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from typing import Any

from tests import tiny
from tests.device.reference import expected, prompt_of
from tests.live.stack import HOST, Stack, request_bytes, running, until

N = 300
PREFIXES = [prompt_of(n, seed=100 + n) for n in (5, 37, 64, 96)]


def _ask(stack: Stack, rng: random.Random) -> bytes:
    prefix = rng.choice(PREFIXES)
    body = {
        "model": stack.model,
        "prompt": prefix + prompt_of(rng.randint(1, 40), seed=rng.randint(0, 5)),
        "max_tokens": rng.randint(1, 40),
        "temperature": 0,
        "ignore_eos": True,
        "stream": rng.random() < 0.7,
    }
    return request_bytes("POST", "/v1/completions", json.dumps(body).encode())


async def _one(stack: Stack, data: bytes, give_up_after: int | None) -> str:
    """Send, read to the end or leave after `give_up_after` reads; how it went."""
    reader, writer = await asyncio.open_connection(HOST, stack.port)
    try:
        writer.write(data)
        got, reads = b"", 0
        while True:
            if give_up_after is not None and reads >= give_up_after:
                return "left"
            piece = await asyncio.wait_for(reader.read(4096), 60)
            reads += 1
            if not piece:
                break
            got += piece
        if not got.startswith(b"HTTP/1.1 200"):
            return got.split(b"\r\n", 1)[0].decode()
        whole = b"content-length" in got.lower() or got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        return "whole" if whole else "cut"
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def _canary(stack: Stack) -> None:
    want = expected("llama", 53)
    answer = await stack.complete(
        prompt=prompt_of(53), max_tokens=len(want.tokens), temperature=0, ignore_eos=True
    )
    text = stack.workers[0]._tokeniser.decode(want.tokens)
    assert answer.json["choices"][0]["text"] == text


def _ended(stack: Stack) -> dict[str, int]:
    counts: dict[str, Any] = dict(stack.gateway.conservation())
    return counts


def churn(**engine: Any) -> None:
    """300 requests, of which a quarter is left early, through 1P1D; all comes back."""

    async def main() -> None:
        async with running(
            tiny.cached_model("llama"),
            "1P1D",
            kv_blocks=40,
            max_num_seqs=16,
            max_num_batched_tokens=64,
            lease_s=5.0,
            **engine,
        ) as stack:
            # One loop is three processes here: the burst below keeps it from accepting a while.
            for worker in stack.gateway.workers.values():
                worker.upstream._connect_timeout_s = 10.0
            rng = random.Random(1)
            await _canary(stack)
            gate = asyncio.Semaphore(24)

            async def client(data: bytes, give_up_after: int | None) -> str:
                async with gate:
                    return await _one(stack, data, give_up_after)

            jobs = []
            for _ in range(N):
                leave = rng.randint(0, 6) if rng.random() < 0.25 else None
                jobs.append(client(_ask(stack, rng), leave))
            ends = Counter(await asyncio.gather(*jobs))
            assert set(ends) <= {"whole", "left"}, ends
            assert ends["whole"] >= N // 2
            assert ends["left"] >= 40
            await stack.at_baseline()
            counts = _ended(stack)
            assert counts["received"] == N + 1
            assert counts["in_flight"] == 0
            assert (
                counts["finished"] + counts["cancelled"] + counts["failed"] + counts["refused"]
                == N + 1
            )
            assert counts["failed"] == counts["refused"] == 0, counts
            decode = stack.worker("decode").driver
            assert decode is not None
            assert decode.core.engine.n_preemptions > 0, "the pool was not small enough"
            assert decode.core.reader.n_received > 100
            await _canary(stack)
            await until(stack.settled)

    asyncio.run(main())


def test_churn_ends_clean() -> None:
    churn()
