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

import msgspec

from twofold.core import journal
from twofold.core.worker import WorkerCore
from twofold.device.runner import Row
from twofold.device.sampling import Sampled
from twofold.live.clock import Clock, Timer
from twofold.live.device_thread import DeviceThread
from twofold.live.peer import PeerLinks
from twofold.live.processes import Processes
from twofold.live.push import Incoming, Outgoing
from twofold.messages import (
    CancelRead,
    CancelWrite,
    Digest,
    Digested,
    Ended,
    Fence,
    FromPeer,
    LayersDone,
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
    Write,
)
from twofold.transport.base import Completion, Transport
from twofold.transport.checksum import checksums, unhashed
from twofold.transport.memory import PoolMemory
from twofold.types import BlockId, RequestId, SamplingParams

_log = logging.getLogger("twofold.worker")


class StepRunner(Protocol):
    """What the driver needs of a device: see `device.runner.Runner`."""

    @property
    def in_place(self) -> bool: ...  # noqa: D102
    def run(  # noqa: D102
        self, rows: Sequence[Row], on_layers: Callable[[int], None] | None = None
    ) -> list[Sampled | None]: ...
    def export_blocks(self, ids: Sequence[BlockId]) -> None: ...  # noqa: D102
    def import_blocks(self, ids: Sequence[BlockId]) -> None: ...  # noqa: D102


class WorkerDriver:
    """Carries messages to a core and its effects out.

    `on_token(effect, sampled)` and `on_ended(effect)` get the answers. `journal_file`, when given,
    gets every message and its effects, for `core.journal.replay`. With `by_layer` the core hears
    how far a step has got. Without `checksum` no block is hashed, here or by the transport.
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
        by_layer: bool = False,
        n_layers: int = 1,
        checksum: bool = True,
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
        self._checksum = checksum
        self._hasher = ThreadPoolExecutor(1, "checksums")
        self._inbox: deque[WorkerMessage] = deque()
        self._busy = False
        self._timer: Timer | None = None
        self._sampling: dict[RequestId, SamplingParams] = {}
        self._sampled: dict[RequestId, Sampled] = {}
        self._imports: dict[RequestId, tuple[BlockId, ...]] = {}
        self._by_layer = by_layer and runner.in_place
        self.processes = Processes(clock)
        self._outgoing = Outgoing(
            transport=transport, n_layers=n_layers, export=self._export, deliver=self.deliver
        )
        self._incoming = Incoming(
            transport=transport, processes=self.processes, deliver=self.deliver
        )

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
        if isinstance(message, FromPeer):
            self._incoming.heard(message)
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
                self.links.send(self._incoming.claim(effect))
        elif isinstance(effect, Digest):
            self._digest(effect)
        elif isinstance(effect, Read):
            self._imports[effect.request_id] = tuple(ours for _, ours in effect.pairs)
            self._transport.read(effect.request_id, effect.segment, effect.pairs)
        elif isinstance(effect, CancelRead):
            self._transport.cancel(effect.request_id)
        elif isinstance(effect, Write):
            self._outgoing.write(effect)
        elif isinstance(effect, CancelWrite):
            self._outgoing.cancel(effect.request_id)
        elif isinstance(effect, Fence):
            source = self.core.engine.requests[effect.request_id].source
            assert source is not None
            self._incoming.fence(effect.request_id, source)
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

        def on_layers(n_layers: int) -> None:
            self._soon(lambda: self.deliver(LayersDone(step.step, n_layers)))

        tell = self._by_layer and any(n > 1 for _, _, n in step.work)
        self.device.submit(lambda: self._runner.run(rows, on_layers if tell else None), done)

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

    def _export(self, blocks: Sequence[BlockId], then: Callable[[str], None]) -> None:
        """Make the host buffer hold blocks as they are on the device; `then(reason)` if not."""

        def exported(_: None, error: BaseException | None) -> None:
            then("" if error is None else f"export failed: {error}")

        if self._runner.in_place:
            then("")
        else:
            self.device.submit(lambda: self._runner.export_blocks(blocks), exported)

    def _import(self, blocks: Sequence[BlockId], then: Callable[[str], None]) -> None:
        """Make the device hold blocks as they are in the host buffer; `then(reason)` if not."""

        def imported(_: None, error: BaseException | None) -> None:
            then("" if error is None else f"import failed: {error}")

        if self._runner.in_place:
            then("")
        else:
            self.device.submit(lambda: self._runner.import_blocks(blocks), imported)

    def _digest(self, effect: Digest) -> None:
        """Checksum blocks off the loop: what a peer wrote as it landed, our own as exported."""
        blocks = effect.blocks

        def hash_blocks() -> None:
            sums = checksums(self._memory.buffer, blocks, self._memory.block_bytes)
            self._soon(lambda: self._digested(Digested(effect.request_id, sums), blocks))

        def exported(reason: str) -> None:
            if not reason and self._checksum:
                self._hasher.submit(hash_blocks)
            elif not reason:
                self._digested(Digested(effect.request_id, unhashed(len(blocks))), blocks)

        if self._is_taken_over(effect.request_id):
            exported("")
        else:
            self._export(blocks, exported)

    def _is_taken_over(self, request_id: RequestId) -> bool:
        """Whether a request's KV is a peer's, and not believed yet."""
        request = self.core.engine.requests.get(request_id)
        return (
            request is not None
            and request.source is not None
            and request_id in self.core.pool.holds
        )

    def _digested(self, message: Digested, blocks: tuple[BlockId, ...]) -> None:
        """What was taken over is on the device before the core can believe it.

        The device thread keeps the order: whoever may have these blocks next runs after that.
        """
        if not self._is_taken_over(message.request_id):
            self.deliver(message)
            return
        wrong = Digested(message.request_id, ())
        self._import(blocks, lambda reason: self.deliver(wrong if reason else message))

    def completions(self) -> None:
        """The transport has completions; to be called in the loop when it notifies."""
        for completion in self._transport.poll():
            if completion.transfer_id < 0:
                self._outgoing.done(completion)
            else:
                self._read_done(completion)

    def _read_done(self, completion: Completion) -> None:
        blocks = self._imports.pop(completion.transfer_id)
        sums = completion.checksums
        if not self._checksum:
            sums = unhashed(completion.n_bytes // self._memory.block_bytes)
        message = ReadDone(
            completion.transfer_id,
            completion.ok,
            completion.reason,
            completion.n_bytes,
            sums,
        )
        self.n_bytes_read += completion.n_bytes
        if not completion.ok:
            self.deliver(message)
            return
        lost = ReadDone(completion.transfer_id, ok=False)

        def imported(reason: str) -> None:
            self.deliver(msgspec.structs.replace(lost, reason=reason) if reason else message)

        self._import(blocks, imported)

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
        self.processes.close()
        self._hasher.shutdown(wait=True)
        self.device.close()
        if self._journal is not None:
            self._journal.flush()
