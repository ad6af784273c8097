"""`--checksum`: on, a changed bit is never believed; off, nothing is hashed and all must come."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests import tiny
from tests.device.reference import expected, prompt_of
from tests.live.stack import Stack, running
from twofold.transport import checksum, shm
from twofold.transport.shm import ShmTransport
from twofold.transport.tcp import TcpTransport

B = 16
N = 3 * B + 5
MODES = ("pull", "push", "layerwise")
TRANSPORTS: dict[str, Any] = {"shm": ShmTransport, "tcp": TcpTransport}


def stack_of(**engine: Any) -> Any:
    engine = {"layerwise_min_tokens": 2 * B} | engine
    return running(tiny.cached_model("llama"), "1P1D", **engine)


async def ask(stack: Stack) -> Any:
    want = expected("llama", N)
    answer = await stack.complete(
        prompt=prompt_of(N), max_tokens=len(want.tokens), temperature=0, ignore_eos=True
    )
    if answer.status == 200:
        text = answer.json["choices"][0]["text"]
        assert text == stack.workers[0]._tokeniser.decode(want.tokens)
        assert int(answer.headers["x-twofold-transferred"]) > 0
    return answer


@pytest.mark.parametrize("handoff", MODES)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", ["xxh3", "off"])
def test_off_hashes_nothing_at_all(
    kind: str, transport: str, handoff: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def digest(data: Any) -> int:
        calls.append(len(data))
        return 1

    monkeypatch.setattr(checksum, "xxhash", SimpleNamespace(xxh3_64_intdigest=digest))

    async def main() -> None:
        async with stack_of(transport=transport, handoff=handoff, checksum=kind) as stack:
            assert (await ask(stack)).status == 200
            assert bool(calls) == (kind == "xxh3")
            await stack.at_baseline()

    asyncio.run(main())


@pytest.mark.parametrize(("kind", "status"), [("xxh3", 502), ("off", 200)])
def test_a_flipped_bit_is_found_by_the_checksum_and_by_nothing_else(
    kind: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shm._copy_run

    def flipping(own: Any, peer: Any, run: Any, size: int) -> None:
        copy(own, peer, run, size)
        own[run.dst * size] ^= 1  # the lowest bit of one key: far too little to change the text

    monkeypatch.setattr(shm, "_copy_run", flipping)

    async def main() -> None:
        async with stack_of(checksum=kind) as stack:
            answer = await ask(stack)
            assert answer.status == status
            driver = stack.worker("decode").driver
            assert driver is not None
            assert driver.core.reader.n_failed == (status == 502)
            await stack.at_baseline()

    asyncio.run(main())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_off_still_takes_no_part_for_the_whole(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = TRANSPORTS[transport]
    poll = kind.poll

    def short(self: Any) -> list[Any]:
        size = self._memory.block_bytes
        return [msgspec.structs.replace(done, n_bytes=done.n_bytes - size) for done in poll(self)]

    monkeypatch.setattr(kind, "poll", short)

    async def main() -> None:
        async with stack_of(transport=transport, checksum="off") as stack:
            assert (await ask(stack)).status == 502
            monkeypatch.undo()
            await stack.at_baseline()
            assert (await ask(stack)).status == 200

    asyncio.run(main())


@pytest.mark.parametrize("handoff", ["push", "layerwise"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_off_commits_no_push_of_which_a_part_failed(
    transport: str, handoff: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = TRANSPORTS[transport]
    write = kind.write

    def elsewhere(self: Any, number: int, segment: str, *rest: Any) -> None:
        write(self, number, "{}", *rest)

    monkeypatch.setattr(kind, "write", elsewhere)

    async def main() -> None:
        async with stack_of(transport=transport, handoff=handoff, checksum="off") as stack:
            assert (await ask(stack)).status == 502
            monkeypatch.undo()
            await stack.at_baseline()
            assert (await ask(stack)).status == 200

    asyncio.run(main())
