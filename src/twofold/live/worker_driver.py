"""Drives one `WorkerCore` with real time, a device thread, a transport and peers.

Every message goes through `deliver`, one at a time: the core's effects are carried out before the
next message is looked at. Nothing here decides anything.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, Protocol

from twofold.core import journal
from twofold.core.worker import WorkerCore
from twofold.device.runner import Row
from twofold.device.sampling import Sampled
from twofold.live.clock import Clock, Timer
from twofold.live.device_thread import DeviceThread
from twofold.live.peer import PeerLinks
from twofold.messages import (
    CancelRead,
    Digest,
    Digested,
    Ended,
    Read,
    ReadDone,
    RunStep,
    StepDone,
    StepFailed,
    Token,
    ToPeer,
    Wake,
    WakeAt,
    WorkerEffect,
    WorkerMessage,
)
from twofold.transport.base import Completion, Transport
from twofold.transport.checksum import checksums
from twofold.transport.memory import PoolMemory
from twofold.types import BlockId, RequestId, SamplingParams

_log = logging.getLogger("twofold.worker")


class StepRunner(Protocol):
    """What the driver needs of a device: see `device.runner.Runner`."""

    def run(self, rows: Sequence[Row]) -> list[Sampled | None]: ...  # noqa: D102
    def export_blocks(self, ids: Sequence[BlockId]) -> None: ...  # noqa: D102
    def import_blocks(self, ids: Sequence[BlockId]) -> None: ...  # noqa: D102


class WorkerDriver:
    """Carries messages to a core and its effects out.

    `on_token(effect, sampled)` and `on_ended(effect)` get the answers. `journal_file`, when given,
    gets every message and its effects, for `core.journal.replay`.
    """

    def __init__(
        self,
        *,
        core: WorkerCore,
        runner: StepRunner,
        memory: PoolMemory,
        transport: Transport,
        clock: Clock,
        call_soon_threadsafe: Callable[[Callable[[], None]], object],
        on_token: Callable[[Token, Sampled], None],
        on_ended: Callable[[Ended], None],
        journal_file: BinaryIO | None = None,
    ) -> None:
        self.core = core
        self.device = DeviceThread()
        self.links: PeerLinks | None = None
        self.n_bytes_read = 0
        self._runner = runner
        self._memory = memory
        self._clock = clock
        self._on_token = on_token
        self._on_ended = on_ended
        self._journal = journal_file
        self._soon = call_soon_threadsafe
        self._transport = transport
        self._hasher = ThreadPoolExecutor(1, "checksums")
        self._inbox: deque[WorkerMessage] = deque()
        self._busy = False
        self._timer: Timer | None = None
        self._sampling: dict[RequestId, SamplingParams] = {}
        self._sampled: dict[RequestId, Sampled] = {}
        self._imports: dict[RequestId, tuple[BlockId, ...]] = {}

    def sample_by(self, request_id: RequestId, params: SamplingParams) -> None:
        """Remember how a request's tokens are chosen; the core has no need to know."""
        self._sampling[request_id] = params

    # ---------------------------------------------------------------- messages

    def deliver(self, message: WorkerMessage) -> None:
        """Give the core a message and carry out what follows."""
        self._inbox.append(message)
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox:
                self._handle(self._inbox.popleft())
        finally:
            self._busy = False

    def _handle(self, message: WorkerMessage) -> None:
        now_ns = self._clock.now_ns()
        effects = self.core.handle(message, now_ns)
        if self._journal is not None:
            self._journal.write(journal.entry(now_ns, message, effects))
        # The next step first: the device should not idle while answers are written.
        for effect in effects:
            if isinstance(effect, RunStep):
                self._run_step(effect)
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: WorkerEffect) -> None:
        if isinstance(effect, Token):
            self._on_token(effect, self._sampled[effect.request_id])
        elif isinstance(effect, Ended):
            self._sampling.pop(effect.request_id, None)
            self._on_ended(effect)
        elif isinstance(effect, ToPeer):
            if self.links is not None:
                self.links.send(effect)
        elif isinstance(effect, Digest):
            self._digest(effect)
        elif isinstance(effect, Read):
            self._imports[effect.request_id] = tuple(ours for _, ours in effect.pairs)
            self._transport.read(effect.request_id, effect.segment, effect.pairs)
        elif isinstance(effect, CancelRead):
            self._transport.cancel(effect.request_id)
        elif isinstance(effect, WakeAt):
            self._wake_at(effect.at_ns)

    def _wake_at(self, at_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._clock.call_at(at_ns, lambda: self.deliver(Wake()))

    # ------------------------------------------------------------------ device

    def _run_step(self, step: RunStep) -> None:
        rows = [self._row(*work) for work in step.work]

        def done(result: list[Sampled | None] | None, error: BaseException | None) -> None:
            if error is not None or result is None:
                self.deliver(StepFailed(step.step, f"{type(error).__name__}: {error}"))
                return
            self._sampled = {
                work[0]: sampled
                for work, sampled in zip(step.work, result, strict=True)
                if sampled is not None
            }
            tokens = tuple((request_id, s.token) for request_id, s in self._sampled.items())
            self.deliver(StepDone(step.step, tokens))

        self.device.submit(lambda: self._runner.run(rows), done)

    def _row(self, request_id: RequestId, start: int, n: int) -> Row:
        request = self.core.engine.row(request_id)
        tokens = request.ids()
        sample = start + n == len(tokens)
        early = sample and request.n_output < request.min_tokens
        return Row(
            tokens=tokens[start : start + n],
            start=start,
            blocks=request.blocks,
            sample=sample,
            params=self._sampling.get(request_id, SamplingParams()),
            # A copy: an abort may end the request while the device still reads this.
            history=tuple(tokens) if sample else (),
            n_prompt=request.n_prompt,
            forbid=request.stop_token_ids if early else (),
        )

    # ---------------------------------------------------------------- KV bytes

    def _digest(self, effect: Digest) -> None:
        """Export (where the device is not host memory), then checksum, both off the loop."""

        def hash_blocks() -> None:
            sums = checksums(self._memory.buffer, effect.blocks, self._memory.block_bytes)
            self._soon(lambda: self.deliver(Digested(effect.request_id, sums)))

        def exported(_: None, error: BaseException | None) -> None:
            if error is None:
                self._hasher.submit(hash_blocks)

        self.device.submit(lambda: self._runner.export_blocks(effect.blocks), exported)

    def completions(self) -> None:
        """The transport has completions; to be called in the loop when it notifies."""
        for completion in self._transport.poll():
            self._read_done(completion)

    def _read_done(self, completion: Completion) -> None:
        blocks = self._imports.pop(completion.transfer_id)
        message = ReadDone(
            completion.transfer_id,
            completion.ok,
            completion.reason,
            completion.n_bytes,
            completion.checksums,
        )
        self.n_bytes_read += completion.n_bytes
        if not completion.ok:
            self.deliver(message)
            return

        def imported(_: None, error: BaseException | None) -> None:
            if error is None:
                self.deliver(message)
            else:
                self.deliver(ReadDone(completion.transfer_id, ok=False, reason=str(error)))

        self.device.submit(lambda: self._runner.import_blocks(blocks), imported)

    # --------------------------------------------------------------------- end

    def state(self) -> Mapping[str, object]:
        """What this worker holds, for `/conservation`."""
        counts = self.core.pool.counts()
        engine, source = self.core.engine, self.core.source.counts
        return {
            "blocks": {
                "total": counts.total,
                "free": counts.free,
                "cached": counts.cached,
                "active": counts.active,
                "held": counts.held,
            },
            "requests": {"running": len(engine.running), "waiting": len(engine.waiting)}
            | {"placed": engine.n_placed, "known": len(engine.requests)},
            "handed_over": {
                "in_hand": source.in_hand,
                "received": source.received,
                "released": source.released,
                "expired": source.expired,
            },
            "taken_over": {
                "received": self.core.reader.n_received,
                "failed": self.core.reader.n_failed,
                "bytes": self.core.reader.n_bytes,
            },
        }

    async def close(self) -> None:
        """Stop peers, transport and threads; requests still here are dropped."""
        if self._timer is not None:
            self._timer.cancel()
        if self.links is not None:
            await self.links.close()
        self._transport.close()
        self._hasher.shutdown(wait=True)
        self.device.close()
        if self._journal is not None:
            self._journal.flush()
