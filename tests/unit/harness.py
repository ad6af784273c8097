"""Fakes that make wrong KV visible: a memory, a device that checks it, a worker around a core.

The KV of a token is a number that depends on all tokens up to it and on the salt, and the next
token is a function of that number. So whatever was recomputed, shared or handed over, the text is
right only if every block held what it should have; the device checks each one before it is used.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Final

from twofold.core.request import Request, State
from twofold.core.worker import WorkerCore
from twofold.messages import (
    CancelRead,
    Digest,
    Digested,
    Ended,
    Read,
    RunStep,
    StepDone,
    StepFailed,
    Submit,
    Token,
    ToPeer,
    WakeAt,
    WorkerEffect,
    WorkerMessage,
)
from twofold.types import NS_PER_MS, BlockId, KVLayout, RequestId

B: Final = 4
"""Tokens of a block in these tests."""
MS: Final = NS_PER_MS
VOCABULARY: Final = 5
_MASK: Final = (1 << 61) - 1

LAYOUT: Final = KVLayout(
    protocol=1,
    engine="fake",
    model_digest="m",
    tokenizer_digest="t",
    dtype="float32",
    block_size=B,
    layers=1,
    kv_heads=1,
    head_dim=4,
    rope="none",
)


def kv_of(tokens: Sequence[int], salt: str = "") -> list[int]:
    """What the KV of each token is, given those before it."""
    state, out = zlib.crc32(salt.encode()) + 1, []
    for token in tokens:
        state = ((state ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK
        state ^= state >> 29
        out.append(state)
    return out


def next_token(kv: int) -> int:
    """The token that greedy choice gives after the token whose KV is `kv`."""
    return (kv >> 7) % VOCABULARY


def reference(submit: Submit) -> tuple[list[int], str]:
    """The answer of a single worker without cache, batch or handoff, and why it ended."""
    tokens: list[int] = list(submit.tokens)
    n_prompt = len(tokens)
    while True:
        tokens.append(next_token(kv_of(tokens, submit.salt)[-1]))
        n_output = len(tokens) - n_prompt
        if tokens[-1] in submit.stop_token_ids and n_output > submit.min_tokens:
            return tokens[n_prompt:], "stop"
        if n_output == submit.max_tokens:
            return tokens[n_prompt:], "length"


class Memory:
    """The bytes of a pool: one number per token of each block, junk at first."""

    def __init__(self, n_blocks: int, seed: int = 0) -> None:
        self.cells = [[-(seed + i * B + j) - 1 for j in range(B)] for i in range(n_blocks)]

    def checksum(self, block: BlockId) -> int:
        """Checksum of the whole block."""
        return zlib.crc32(repr(self.cells[block]).encode())

    def verify(self, row: Request, n: int) -> None:
        """Raise AssertionError unless the first `n` tokens of `row` have their KV here."""
        for i, kv in enumerate(kv_of(row.ids()[:n], row.salt)):
            found = self.cells[row.blocks[i // B]][i % B]
            assert found == kv, f"request {row.id}: KV of token {i} is not its own"

    def run(self, core: WorkerCore, step: RunStep) -> StepDone:
        """What the device does with a step: read the KV before each row, write the rows' own.

        No row may count on what another one of the same step writes.
        """
        sampled: list[tuple[RequestId, int]] = []
        for request_id, start, _ in step.work:
            row = core.engine.row(request_id)
            if row.computed < start:  # a step before this one, of the same prompt, has failed
                assert row.state is State.DRAINING
            else:
                self.verify(row, start)
        for request_id, start, n in step.work:
            row = core.engine.row(request_id)
            kv = kv_of(row.ids()[: start + n], row.salt)
            for i in range(start, start + n):
                self.cells[row.blocks[i // B]][i % B] = kv[i]
            if start + n == len(row.tokens):
                sampled.append((request_id, next_token(kv[-1])))
        return StepDone(step.step, tuple(sampled))


class Reading:
    """A read under way: blocks land one at a time, from whatever is at the source by then."""

    def __init__(self, effect: Read) -> None:
        self.effect = effect
        self.landed: list[int] = []
        self.cancelled = False


class FakeWorker:
    """A core with its memory, and everything that a driver would keep about it."""

    def __init__(self, name: str, *, n_blocks: int = 16, seed: int = 0, **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "layout": LAYOUT,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 8,
            "max_model_len": 1000,
            "max_waiting": 100,
            "segment": f"segment of {name}",
        }
        self.name = name
        self.core = WorkerCore(n_blocks=n_blocks, **{**defaults, **settings})
        self.memory = Memory(n_blocks, seed)
        self.in_flight: list[RunStep] = []
        self.steps: list[RunStep] = []
        self.digests: list[Digest] = []
        self.reads: dict[RequestId, Reading] = {}
        self.outbox: list[ToPeer] = []
        self.wake_ns: int | None = None
        self.submitted: dict[RequestId, Submit] = {}
        self.outputs: dict[RequestId, list[int]] = {}
        self.ended: dict[RequestId, Ended] = {}

    # ------------------------------------------------------------------ driving

    def send(self, message: WorkerMessage, now_ns: int = 0) -> list[WorkerEffect]:
        """Deliver `message`, carry out what needs no time, and check every invariant."""
        if isinstance(message, Submit):
            self.submitted[message.request_id] = message
            self.outputs[message.request_id] = []
        effects = self.core.handle(message, now_ns)
        for effect in effects:
            self._absorb(effect)
        self.core.check()
        return effects

    def _absorb(self, effect: WorkerEffect) -> None:
        if isinstance(effect, RunStep):
            self._start(effect)
        elif isinstance(effect, Token):
            assert effect.request_id not in self.ended, "a token after the end"
            output = self.outputs[effect.request_id]
            assert effect.index == len(output), "a token missing or twice"
            assert (effect.phases is not None) == (effect.index == 0)
            output.append(effect.token)
        elif isinstance(effect, Ended):
            assert effect.request_id in self.submitted, "the end of an unknown request"
            assert effect.request_id not in self.ended, "two ends of one request"
            assert effect.n_output == len(self.outputs[effect.request_id])
            self.ended[effect.request_id] = effect
        elif isinstance(effect, Digest):
            self.digests.append(effect)
        elif isinstance(effect, Read):
            assert effect.request_id not in self.reads, "two reads for one request"
            self.reads[effect.request_id] = Reading(effect)
        elif isinstance(effect, CancelRead):
            self.reads[effect.request_id].cancelled = True
        elif isinstance(effect, ToPeer):
            self.outbox.append(effect)
        else:
            assert isinstance(effect, WakeAt)
            self.wake_ns = effect.at_ns

    def _start(self, step: RunStep) -> None:
        engine = self.core.engine
        assert len(self.in_flight) < engine.max_steps, "too many steps at once"
        ids = [request_id for request_id, _, _ in step.work]
        assert ids
        assert len(set(ids)) == len(ids) <= engine.max_num_seqs
        assert sum(n for _, _, n in step.work) <= engine.max_num_batched_tokens
        for request_id, start, n in step.work:
            row = engine.row(request_id)
            on_the_way = [w[2] for s in self.in_flight for w in s.work if w[0] == request_id]
            assert start == row.computed + sum(on_the_way)
            assert 0 < n <= len(row.tokens) - start
            assert len(row.blocks) * B >= start + n, "a row without room for its KV"
        self.in_flight.append(step)
        self.steps.append(step)

    @property
    def step(self) -> RunStep | None:
        """The step in flight that is the next to end."""
        return self.in_flight[0] if self.in_flight else None

    def finish_step(self, now_ns: int = 0) -> None:
        """The device is done with the oldest step in flight."""
        step = self.in_flight.pop(0)
        self.send(self.memory.run(self.core, step), now_ns)

    def fail_step(self, now_ns: int = 0) -> None:
        """The device could not run the oldest step, having written nobody knows what."""
        step = self.in_flight.pop(0)
        for request_id, start, n in step.work:
            row = self.core.engine.row(request_id)
            for i in range(start, start + n):
                self.memory.cells[row.blocks[i // B]][i % B] = -7
        self.send(StepFailed(step.step, "broken"), now_ns)

    def digest(self, index: int = 0, now_ns: int = 0) -> None:
        """Answer one of the digests asked for."""
        effect = self.digests.pop(index)
        sums = tuple(self.memory.checksum(block) for block in effect.blocks)
        self.send(Digested(effect.request_id, sums), now_ns)

    def run(self, now_ns: int = 0, *, limit: int = 10_000) -> int:
        """Steps until nothing is left to compute; returns how many it took."""
        for n in range(limit):
            if self.step is None:
                return n
            self.finish_step(now_ns)
        raise AssertionError(f"still running after {limit} steps")

    # ------------------------------------------------------------------ verdicts

    def verify_output(self, request_id: RequestId, prompt: Submit | None = None) -> None:
        """A finished answer equals the reference, one that was cut off is its beginning."""
        wanted, reason = reference(prompt or self.submitted[request_id])
        got, ended = self.outputs[request_id], self.ended[request_id]
        if ended.outcome == "finished":
            assert (got, ended.reason) == (wanted, reason)
        else:
            assert got == wanted[: len(got)]

    def verify_idle(self) -> None:
        """Every request has its end and every block and timer is back."""
        assert set(self.ended) == set(self.submitted), "a request without an end"
        counts = self.core.pool.counts()
        assert (counts.active, counts.held) == (0, 0)
        assert counts.free + counts.cached == self.core.pool.n_blocks
        assert not self.core.engine.requests
        assert self.core.source.counts.in_hand == 0
        assert len(self.core.timers) == 0, "a timer is left"
