"""Push and layer-wise over real sockets: the same text as pull, and nothing left whatever ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests import tiny
from tests.device.reference import expected, prompt_of
from tests.live.stack import HOST, Stack, get, post, request_bytes, running, until
from tests.live.test_churn import churn
from tests.live.test_end_to_end import _assert_equal
from twofold.device import runner
from twofold.device.weights import load_model
from twofold.transport import shm, tcp_writer

B = 16
LENGTHS = (1, B - 1, B, B + 1, 2 * B, 3 * B + 5, 12 * B + 3)
MODES = ("push", "layerwise")
TRANSPORTS = ("shm", "tcp")
ENGINE: dict[str, Any] = {
    "layerwise_min_tokens": 8,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 3 * B,  # the longest prompt goes in five steps
}

modes = pytest.mark.parametrize("handoff", MODES)
transports = pytest.mark.parametrize("transport", TRANSPORTS)


async def _equals_generate(stack: Stack, family: str, n: int) -> int:
    """Ask for what transformers was asked for; gives the bytes that were handed over."""
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
    return int(answer.headers["x-twofold-transferred"])


@modes
@transports
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_equals_generate(family: str, transport: str, handoff: str) -> None:
    async def main() -> None:
        async with running(
            tiny.cached_model(family), "1P1D", transport=transport, handoff=handoff, **ENGINE
        ) as stack:
            size = stack.workers[0].layout.block_bytes
            for n in LENGTHS:
                moved = await _equals_generate(stack, family, n)
                # The first n - 1 tokens' blocks pass, less those that decode has cached.
                assert moved <= -(-(n - 1) // B) * size
                if n in (B - 1, 3 * B + 5, 12 * B + 3):
                    assert moved > 0
            await stack.at_baseline()

    asyncio.run(main())


@modes
@transports
def test_many_prompts_at_once_are_told_apart(transport: str, handoff: str) -> None:
    """Chunks of some are sent while others compute, into a pool that holds a few of them."""

    async def main() -> None:
        engine = {**ENGINE, "kv_blocks": 48, "transport": transport, "handoff": handoff}
        async with running(tiny.cached_model("llama"), "1P1D", **engine) as stack:
            asked = [LENGTHS[i % len(LENGTHS)] for i in range(21)]
            await asyncio.gather(*[_equals_generate(stack, "llama", n) for n in asked])
            await stack.at_baseline()

    asyncio.run(main())


@modes
def test_staged_pool_gives_the_same(handoff: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a device whose memory is not the host's: blocks exported and imported."""
    init = runner.Runner.__init__

    def staged(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "staged": True})

    monkeypatch.setattr(runner.Runner, "__init__", staged)

    async def main() -> None:
        async with running(tiny.cached_model("llama"), "1P1D", handoff=handoff, **ENGINE) as stack:
            for n in LENGTHS:
                await _equals_generate(stack, "llama", n)
            await stack.at_baseline()

    asyncio.run(main())


def test_what_is_told_of_a_step_is_final() -> None:
    """The KV of the first layers, when they are said to be done, is as it is in the end."""
    loaded = load_model(tiny.cached_model("llama"))
    n_blocks, layers = 4, loaded.shape.layers
    made = runner.Runner(loaded, num_blocks=n_blocks, block_size=B)
    pool = made._pool.blocks
    seen: list[tuple[int, Any]] = []
    row = runner.Row(tokens=prompt_of(3 * B + 5), start=0, blocks=range(n_blocks), sample=True)
    pool.fill_(7.0)
    made.run([row], lambda n: seen.append((n, pool.clone())))
    assert [n for n, _ in seen] == sorted({layers * i // 4 for i in (1, 2, 3)} - {0})
    for n, then in seen:
        assert (then[:, :n] == pool[:, :n]).all()
        assert (then[:, n:, :, 0] == 7.0).all(), "a later layer was there already"


@modes
def test_layers_are_sent_while_later_ones_compute(
    handoff: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[int, int]] = []
    write = shm.ShmTransport.write

    def noted(self: Any, number: int, segment: str, pairs: Any, layers: Any, n: int) -> None:
        written.append(layers)
        write(self, number, segment, pairs, layers, n)

    monkeypatch.setattr(shm.ShmTransport, "write", noted)

    async def main() -> None:
        async with running(tiny.cached_model("llama"), "1P1D", handoff=handoff, **ENGINE) as stack:
            await _equals_generate(stack, "llama", 12 * B + 3)
            layers = stack.workers[0].layout.layers
            if handoff == "push":
                assert written == [(0, layers)]
            else:
                assert {(first > 0, end < layers) for first, end in written} >= {
                    (True, False),
                    (False, True),
                }

    asyncio.run(main())


@modes
@pytest.mark.parametrize("tokens", [7, B, 2 * B + 1])
def test_chunks_that_end_amid_a_block_are_sent_once(handoff: str, tokens: int) -> None:
    async def main() -> None:
        engine = {**ENGINE, "max_num_seqs": 4, "max_num_batched_tokens": tokens}
        async with running(tiny.cached_model("llama"), "1P1D", handoff=handoff, **engine) as stack:
            moved = await _equals_generate(stack, "llama", 12 * B + 3)
            assert moved == 13 * stack.workers[0].layout.block_bytes
            await stack.at_baseline()

    asyncio.run(main())


@modes
@transports
def test_full_hit_on_decode_transfers_nothing(transport: str, handoff: str) -> None:
    async def main() -> None:
        engine = {**ENGINE, "transport": transport, "handoff": handoff}
        async with running(tiny.cached_model("llama"), "1P1D", **engine) as stack:
            size = stack.workers[0].layout.block_bytes
            ask = {"prompt": prompt_of(2 * B + 1), "max_tokens": 4, "temperature": 0}
            cold, warm = await stack.complete(**ask), await stack.complete(**ask)
            assert int(cold.headers["x-twofold-transferred"]) == 2 * size
            assert int(warm.headers["x-twofold-transferred"]) == 0
            assert cold.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert warm.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * B
            assert cold.json["choices"] == warm.json["choices"]
            await stack.at_baseline()

    asyncio.run(main())


@modes
def test_the_ledger_counts_what_both_legs_did_once(handoff: str) -> None:
    async def main() -> None:
        async with running(tiny.cached_model("llama"), "1P1D", handoff=handoff, **ENGINE) as stack:
            body = {"model": stack.model, "prompt": prompt_of(150), "max_tokens": 4, "stream": True}
            answer = await post(stack.port, "/v1/completions", body, {"x-request-id": "mine"})
            assert answer.done
            await stack.at_baseline()
            ledger = (await get(stack.admin.port, "/admin/requests/mine")).json
            phases = ledger["phases_ms"]
            assert sum(phases.values()) == pytest.approx(ledger["ttft_ms"], abs=0.02)
            assert min(phases.values()) >= 0, phases
            for phase in ("tokenise", "prefill", "transfer", "first_step", "relay"):
                assert phases[phase] > 0, phase
            assert ledger["transferred_bytes"] > 0
            assert (ledger["prefill_worker"], ledger["decode_worker"]) == ("prefill-0", "decode-1")

    asyncio.run(main())


# ---------------------------------------------------------------------------------- faults


@modes
@transports
def test_churn_ends_clean(transport: str, handoff: str) -> None:
    churn(transport=transport, handoff=handoff, layerwise_min_tokens=32)


class Gate:
    """Holds up the first write, on the side that sends it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.open.wait(20)


@pytest.fixture
def gate(transport: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    owner: Any = shm if transport == "shm" else tcp_writer.Outflow
    name = "_write_run" if transport == "shm" else "next"
    original = getattr(owner, name)

    def held(*args: Any) -> Any:
        gate()
        return original(*args)

    monkeypatch.setattr(owner, name, held)
    yield gate
    gate.open.set()


@modes
@transports
def test_pages_with_a_write_in_flight_are_not_used_again(
    transport: str, handoff: str, gate: Gate
) -> None:
    """The client leaves amid a write; the next request needs the very same pages."""

    async def main() -> None:
        engine = {**ENGINE, "kv_blocks": 16, "transport": transport, "handoff": handoff}
        async with running(tiny.cached_model("llama"), "1P1D", **engine) as stack:
            decode = stack.worker("decode").driver
            assert decode is not None
            body = {"model": stack.model, "prompt": prompt_of(12 * B, seed=9), "max_tokens": 16}
            data = request_bytes("POST", "/v1/completions", json.dumps(body).encode())
            _, writer = await asyncio.open_connection(HOST, stack.port)
            writer.write(data)
            await until(gate.reached.is_set, what="a write")
            writer.close()
            await until(lambda: not stack.gateway.sessions, what="end at the gateway")
            pool = decode.core.pool
            await until(lambda: decode.core.reader._draining, what="draining")  # type: ignore[union-attr,arg-type,return-value]
            assert pool.counts().held == 12
            following = asyncio.create_task(_equals_generate(stack, "llama", 12 * B + 3))
            await until(lambda: bool(decode.core.engine.waiting), what="the next request")
            assert pool.counts().held == 12, "pages were taken from under a write"
            gate.open.set()
            assert await following > 0
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            await stack.at_baseline()

    asyncio.run(main())


@modes
@transports
def test_a_write_that_fails_ends_its_request_only(
    transport: str, handoff: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner: Any = shm if transport == "shm" else tcp_writer.Outflow
    name = "_write_run" if transport == "shm" else "next"
    original = getattr(owner, name)
    broken = [True]

    def fails(*args: Any) -> Any:
        if broken.pop() if broken else False:
            raise OSError("broken on purpose")
        return original(*args)

    async def main() -> None:
        engine = {**ENGINE, "transport": transport, "handoff": handoff}
        async with running(tiny.cached_model("llama"), "1P1D", **engine) as stack:
            monkeypatch.setattr(owner, name, fails)
            answer = await stack.complete(prompt=prompt_of(5 * B), max_tokens=2)
            assert answer.status == 502, answer.body
            assert not broken
            await stack.at_baseline()
            assert await _equals_generate(stack, "llama", 12 * B + 3) > 0
            await stack.at_baseline()

    asyncio.run(main())


@modes
@transports
def test_bytes_that_change_on_the_way_are_never_believed(
    transport: str, handoff: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twofold.core.handoff.push_reader import PushReader

    async def main() -> None:
        engine = {**ENGINE, "transport": transport, "handoff": handoff}
        async with running(tiny.cached_model("llama"), "1P1D", **engine) as stack:
            decode = stack.worker("decode")
            written = PushReader._written

            def flipped(self: Any, request: Any, message: Any, now_ns: int, out: Any) -> None:
                block = self._pool.holds[request.id].blocks[0]
                decode.memory.buffer[block * decode.memory.block_bytes + 5] ^= 1
                written(self, request, message, now_ns, out)

            monkeypatch.setattr(PushReader, "_written", flipped)
            answer = await stack.complete(prompt=prompt_of(5 * B), max_tokens=2)
            assert answer.status == 502
            monkeypatch.undo()
            await stack.at_baseline()
            await _equals_generate(stack, "llama", 3 * B + 5)

    asyncio.run(main())
