"""A request over two workers whose KV goes through an engine of the field's own."""

from __future__ import annotations

import asyncio

import pytest

from tests import tiny
from tests.device.reference import expected, prompt_of
from tests.live.stack import running
from tests.live.test_end_to_end import B, _assert_equal
from tests.unit.transport_support import FOREIGN, foreign_engine


@pytest.mark.parametrize("transport", FOREIGN)
def test_equals_generate(transport: str) -> None:
    foreign_engine(transport).close()  # or skip

    async def main() -> None:
        async with running(tiny.cached_model("llama"), "1P1D", transport=transport) as stack:
            for n in (1, B - 1, B, B + 1, 2 * B, 3 * B + 5):
                want = expected("llama", n)
                answer = await stack.complete(
                    prompt=prompt_of(n),
                    max_tokens=len(want.tokens),
                    temperature=0,
                    ignore_eos=True,
                    logprobs=len(want.top[0]),
                )
                assert answer.status == 200, answer.body
                _assert_equal(answer.json, want, stack)
                if n in (B - 1, 3 * B + 5):
                    assert int(answer.headers["x-twofold-transferred"]) > 0
            await stack.at_baseline()

    asyncio.run(main())
