"""The core of one worker: engine, both sides of the handoff, and their timers, as one machine.

Drivers call `handle` with each message and carry out the effects in order.
"""

from __future__ import annotations

from twofold.core.abridged import ids_of
from twofold.core.blocks import BlockPool
from twofold.core.chunks import make_chunks
from twofold.core.engine import Effects, Engine
from twofold.core.handoff import MODES, Mode
from twofold.core.request import Request, State
from twofold.core.timers import Timers
from twofold.messages import (
    Abort,
    Claim,
    Digested,
    Done,
    Fenced,
    FromPeer,
    Heartbeat,
    LayersDone,
    PeerLost,
    ReadDone,
    Release,
    StepDone,
    Submit,
    Wake,
    WakeAt,
    WorkerEffect,
    WorkerMessage,
    WriteDone,
)
from twofold.types import NS_PER_MS, NS_PER_S, KVLayout, ceil_div


def _of_mode(
    mode: Mode, lost_grace_ns: int, min_layerwise_tokens: int, pool: BlockPool, max_model_len: int
) -> dict[str, int]:
    """Settings that only some modes' sources have; no request needs more blocks than are kept."""
    most_blocks = min(pool.n_blocks, ceil_div(max_model_len, pool.block_size))
    own = {"reserve_blocks": most_blocks} if mode.at_once else {"lost_grace_ns": lost_grace_ns}
    return own | ({"min_layerwise_tokens": min_layerwise_tokens} if mode.by_layer else {})


class WorkerCore:
    """One worker. `layout.block_size` is the pool's; times are integer nanoseconds.

    `segment` is what peers need to find this worker's blocks (the transport gives it). Of a device
    of several `pipeline_stages`, each may have a step.
    Raises ValueError for settings that cannot work together.
    """

    def __init__(
        self,
        *,
        layout: KVLayout,
        n_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_waiting: int,
        segment: str = "",
        prefix_caching: bool = True,
        handoff: str = "pull",
        lease_ns: int = 10 * NS_PER_S,
        heartbeat_ns: int = NS_PER_S,
        lost_grace_ns: int = 500 * NS_PER_MS,
        claim_timeout_ns: int = 5 * NS_PER_S,
        verify_timeout_ns: int = 5 * NS_PER_S,
        repeat_ns: int = 250 * NS_PER_MS,
        min_layerwise_tokens: int = 512,
        chunk_policy: str = "fixed",
        chunk_cap_tokens: int = 0,
        chunk_goal_ns: int = 0,
        pipeline_stages: int = 1,
    ) -> None:
        mode, self.timers = MODES[handoff], Timers()
        self.pool = BlockPool(n_blocks, layout.block_size, caching=prefix_caching)
        own = _of_mode(mode, lost_grace_ns, min_layerwise_tokens, self.pool, max_model_len)
        self.source = mode.source(
            pool=self.pool,
            timers=self.timers,
            layout=layout,
            segment=segment,
            lease_ns=lease_ns,
            **own,
        )
        self.engine = Engine(
            pool=self.pool,
            timers=self.timers,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            max_waiting=max_waiting,
            on_placed_remote=self._placed_remote,
            on_progress=self.source.progress,
            on_held=self.source.keep,
            on_gave_up=self.source.gave_up,
            may_start=self.source.may_start,
            chunks=make_chunks(chunk_policy, chunk_cap_tokens, chunk_goal_ns, layout.block_size),
            max_steps=pipeline_stages,
        )
        self.reader = mode.reader(
            engine=self.engine,
            layout=layout,
            segment=segment,
            heartbeat_ns=heartbeat_ns,
            claim_timeout_ns=claim_timeout_ns,
            verify_timeout_ns=verify_timeout_ns,
            repeat_ns=repeat_ns,
        )

    def handle(self, message: WorkerMessage, now_ns: int) -> list[WorkerEffect]:
        """Effects of `message`, in the order in which they are to be carried out."""
        out: Effects = []
        self._dispatch(message, now_ns, out)
        self.engine.schedule(now_ns, out)
        at_ns = self.timers.arm()
        if at_ns is not None:
            out.append(WakeAt(at_ns))
        return out

    def _dispatch(self, message: WorkerMessage, now_ns: int, out: Effects) -> None:
        if isinstance(message, StepDone):
            self.engine.step_done(message, now_ns, out)
        elif isinstance(message, FromPeer):
            self._from_peer(message, now_ns, out)
        elif isinstance(message, Submit):
            self._submit(message, now_ns, out)
        elif isinstance(message, Abort):
            self._abort(message, out)
        elif isinstance(message, ReadDone):
            self.reader.read_done(message, now_ns, out)
        elif isinstance(message, Digested):
            out += self.source.digested(message.request_id, message.checksums, now_ns)
            self.reader.digested(message, now_ns, out)
        elif isinstance(message, WriteDone):
            self.source.write_done(message, now_ns, out)
        elif isinstance(message, LayersDone):
            step = self.engine.step
            if step is not None and step.step == message.step:
                self.source.layers_done(message, step, out)
        elif isinstance(message, Fenced):
            self.reader.fenced(message)
        elif isinstance(message, Wake):
            self._wake(now_ns, out)
        elif isinstance(message, PeerLost):
            self.source.peer_lost(message.peer, now_ns, out)
            self.reader.peer_lost(message.peer, message.reason, out)
        elif isinstance(message, Release):
            self._release(message, out)
        else:
            self.engine.step_failed(message, now_ns, out)

    def _from_peer(self, message: FromPeer, now_ns: int, out: Effects) -> None:
        said = message.message
        if isinstance(said, (Claim, Done, Heartbeat)):
            out += self.source.from_peer(message.peer, said, now_ns)
            if not isinstance(said, Heartbeat):
                self.engine.look_again()
        else:
            self.reader.from_peer(message.peer, said, now_ns, out)

    def _submit(self, message: Submit, now_ns: int, out: Effects) -> None:
        request = Request(
            message.request_id,
            ids_of(message),
            max_tokens=message.max_tokens,
            min_tokens=message.min_tokens,
            stop_token_ids=message.stop_token_ids,
            salt=message.salt,
            hold=message.hold,
            source=message.source,
            generation=message.generation,
            now_ns=now_ns,
            transfer=message.transfer,
        )
        assert message.request_id not in self.engine.requests, "a driver reused a request id"
        reason = self.engine.refusal(request)
        if request.hold and not self.source.takes(request):
            out.append(request.ended("refused", "duplicate_handle"))
            return
        if reason is not None:
            out.append(request.ended("refused", reason))
            self.reader.decline(request, out)
            if request.hold:
                self.source.expect(request, now_ns, out)
                self.source.gave_up(request, reason, out)
            return
        if message.source is not None:
            self.reader.claim(request, now_ns, out)
        else:
            self.engine.add(request)
            self.engine.enqueue(request)
            if request.hold:
                self.source.expect(request, now_ns, out)
        if message.time_left_ns and message.request_id in self.engine.requests:
            self.timers.set(("deadline", request.id), now_ns + message.time_left_ns)

    def _abort(self, message: Abort, out: Effects) -> None:
        request = self.engine.requests.get(message.request_id)
        if request is not None and request.state is not State.DRAINING:
            self.reader.abandon(request, out)
            self.engine.end(request, message.outcome, message.reason, out)

    def _release(self, message: Release, out: Effects) -> None:
        """The gateway gave up: free what is held, or stop what would become held."""
        request = self.engine.requests.get(message.request_id)
        if request is not None and request.hold and request.generation == message.generation:
            self._abort(Abort(message.request_id, "cancelled", "released"), out)
        else:
            out += self.source.release(message)

    def _wake(self, now_ns: int, out: Effects) -> None:
        for kind, request_id in self.timers.due(now_ns):
            if kind == "lease":
                out += self.source.lease_over(request_id)
            elif kind == "deadline":
                self._abort(Abort(request_id, "failed", "deadline"), out)
            else:
                self.reader.timer(kind, request_id, now_ns, out)

    def _placed_remote(self, request: Request, hits: int, now_ns: int, out: Effects) -> None:
        self.reader.placed(request, hits, now_ns, out)

    def check(self) -> None:
        """Raise AssertionError unless blocks, holds and requests add up."""
        self.pool.check()
        engine = self.engine
        assert engine.n_placed <= engine.max_num_seqs
        placed = [r for r in engine.requests.values() if r.blocks]
        assert engine.n_placed == len(placed), "slots miscounted"
        owned: dict[int, int] = {}
        for blocks in [r.blocks for r in placed] + [
            list(h.blocks) for h in self.pool.holds.values() if h.owner not in engine.requests
        ]:
            for block in blocks:
                owned[block] = owned.get(block, 0) + 1
        for block in range(self.pool.n_blocks):
            assert self.pool.references(block) == owned.get(block, 0), f"block {block} leaks"
