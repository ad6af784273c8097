"""A recorded live inbox through fresh cores gives identical effects."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.device.reference import prompt_of
from tests.live.stack import HOST, request_bytes, running
from twofold.core import journal


async def _leave_early(port: int, data: bytes) -> None:
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(data)
    await reader.read(200)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def _traffic(record: str, router_frames: list[bytes], handoff: str) -> None:
    async with running(
        tiny.cached_model("llama"),
        "1P1D",
        record=record,
        kv_blocks=9,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        handoff=handoff,
        layerwise_min_tokens=16,
    ) as stack:
        router = stack.gateway.router
        handle = router.handle

        def recording(message: Any, now_ns: int) -> Any:
            effects = handle(message, now_ns)
            router_frames.append(journal.entry(now_ns, message, effects))
            return effects

        router.handle = recording  # type: ignore[method-assign]
        asks: list[Any] = []
        for i in range(40):
            body = {
                "prompt": prompt_of(20 + i % 30, seed=i % 3),
                "max_tokens": 5 + i % 20,
                "seed": i,
                "ignore_eos": i % 2 == 0,
            }
            if i % 5 == 4:
                raw = json.dumps({"model": stack.model, "stream": True, **body}).encode()
                asks.append(_leave_early(stack.port, request_bytes("POST", "/v1/completions", raw)))
            else:
                asks.append(stack.complete(**body))
        await asyncio.gather(*asks)
        await stack.at_baseline()
        assert any(w.driver and w.driver.core.engine.n_preemptions for w in stack.workers)


@pytest.mark.parametrize("handoff", ["pull", "push", "layerwise"])
def test_recorded_inboxes_replay(tmp_path: Path, handoff: str) -> None:
    # The router had seen its workers before recording began: its journal starts with them.
    frames: list[bytes] = []
    asyncio.run(_traffic(str(tmp_path), frames, handoff))
    for name in ("prefill-0", "decode-1"):
        data = (tmp_path / f"{name}.journal").read_bytes()
        found = journal.replay(data)
        assert found.difference is None
        assert found.truncated_bytes == 0
        assert found.n_messages > 100
        assert found.n_effects > 100
        # One flipped bit in a recorded token is found, whichever way the bytes still decode.
        flipped = bytearray(data)
        flipped[-40] ^= 1
        with contextlib.suppress(journal.JournalError):
            again = journal.replay(bytes(flipped))
            assert again.difference is not None or again.truncated_bytes > 0
    assert len(frames) > 100
