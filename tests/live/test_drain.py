"""A worker that is told to stop, and one that reads long prompts: both go on answering."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests import tiny
from tests.device.reference import expected, prompt_of
from tests.live.stack import Stack, get, running, until
from twofold.live.worker import Worker

B = 16
LENGTHS = (19 * B + 3, 20 * B, 21 * B + 1, 22 * B - 1, 23 * B + 7, 24 * B)


def books(worker: Worker) -> Any:
    assert worker.driver is not None
    return worker.driver.core


async def ask(stack: Stack, n: int) -> Any:
    want = expected("llama", n)
    return await stack.complete(
        prompt=prompt_of(n), max_tokens=len(want.tokens), temperature=0, ignore_eos=True
    )


@pytest.mark.parametrize("handoff", ["pull", "push", "layerwise"])
def test_a_worker_told_to_stop_hands_over_what_it_holds_first(
    handoff: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scaling down: all that was taken on is read, held, handed over and answered, and no more."""

    async def main() -> None:
        model = tiny.cached_model("llama")
        # Not shared memory: there a peer is fenced off when its process ends, and that is ours.
        engine: dict[str, Any] = {"transport": "tcp", "handoff": handoff, "prefix_caching": False}
        async with running(model, "1P1D", **engine) as stack:
            prefill = stack.worker("prefill")
            core = books(prefill)
            asked = [asyncio.create_task(ask(stack, n)) for n in LENGTHS]
            # The first has been read and is on its way; others wait to be read.
            await until(lambda: core.source.counts.in_hand > 0, what="KV is held")
            taken = len(core.engine.requests) + core.source.counts.in_hand
            assert core.engine.requests, "nothing was left to read: the test shows nothing"
            assert taken + core.source.counts.received == len(LENGTHS)
            await prefill.stop()
            counts = core.source.counts
            assert (counts.in_hand, counts.expired, counts.released) == (0, 0, 0)

            async def again() -> None:
                """It has stopped."""

            monkeypatch.setattr(prefill, "stop", again)
            decode_text = prefill._tokeniser.decode
            for n, answer in zip(LENGTHS, await asyncio.gather(*asked), strict=True):
                assert answer.status == 200
                text = decode_text(expected("llama", n).tokens)
                assert answer.json["choices"][0]["text"] == text
            late = await ask(stack, LENGTHS[0])
            assert late.status in (502, 503)
            core = books(stack.worker("decode"))
            await until(lambda: not core.engine.requests and not core.pool.counts().active)
            core.check()

    asyncio.run(main())


def test_health_answers_while_long_prompts_are_read() -> None:
    """Prompts are read on a thread of their own: gateway and workers answer probes meanwhile."""

    async def main() -> None:
        model = tiny.cached_model("llama")
        async with running(model, "1P1D") as stack:
            prefill = stack.worker("prefill")
            asked = [
                asyncio.create_task(stack.complete(prompt=prompt_of(500), max_tokens=2))
                for _ in range(24)
            ]
            core = books(prefill)
            await until(lambda: core.engine.step is not None, what="a prompt is read")
            probed = 0
            while core.engine.requests:
                for port in (stack.port, prefill.http_port, stack.worker("decode").http_port):
                    assert (await asyncio.wait_for(get(port, "/health"), 5)).status == 200
                probed += 1
            assert probed > 2, "they were read too fast: the test shows nothing"
            assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 24
            await stack.at_baseline()

    asyncio.run(main())
