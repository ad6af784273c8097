"""Pull, the side that wants the KV: claim, reserve, read, verify, commit.

    state      message                    next
    CLAIMING   Grant                      WAITING, then LOADING as soon as blocks are free
    CLAIMING   Refusal, timeout           failed
    WAITING    Closed (lease was lost)    failed
    LOADING    ReadDone, checksums right  VERIFYING: Done(ok) sent, repeated until answered
    LOADING    ReadDone, otherwise        failed
    VERIFYING  Closed(valid)              RUNNING: only now is the copy believed
    VERIFYING  Closed(not valid)          failed
    any        PeerLost                   failed; while LOADING, blocks stay until ReadDone

A copy is one-sided: nothing stops the other worker from reusing a block in the middle of it. So
it is believed only after checksums matched and the other side said, afterwards, that the blocks
were still held for this generation.
"""

from __future__ import annotations

from twofold.core.abridged import known_links, token_list
from twofold.core.blocks import Hold
from twofold.core.engine import Engine
from twofold.core.request import Request, State
from twofold.messages import (
    CancelRead,
    Claim,
    Closed,
    Done,
    Grant,
    Heartbeat,
    PeerMessage,
    Read,
    ReadDone,
    Refusal,
    ToPeer,
    WorkerEffect,
)
from twofold.types import KVHandle, KVLayout, RequestId, ceil_div

Effects = list[WorkerEffect]
RemoteKey = tuple[str, RequestId, int]  # (engine id, the request there, generation)


def _remote_key(source: KVHandle) -> RemoteKey:
    return (source.engine_id, source.request_id, source.generation)


class PullReader:
    """Fetches KV for requests whose prompt another worker has read.

    `claim_timeout_ns` bounds the wait for a Grant, `verify_timeout_ns` that for the answer to
    Done, which is repeated every `repeat_ns`; leases are renewed every `heartbeat_ns`.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        layout: KVLayout,
        heartbeat_ns: int,
        claim_timeout_ns: int,
        verify_timeout_ns: int,
        repeat_ns: int,
    ) -> None:
        self._engine = engine
        self._pool = engine.pool
        self._timers = engine.timers
        self._layout = layout
        self._heartbeat_ns = heartbeat_ns
        self._claim_timeout_ns = claim_timeout_ns
        self._verify_timeout_ns = verify_timeout_ns
        self._repeat_ns = repeat_ns
        self._of: dict[RemoteKey, Request] = {}
        self.n_received = 0
        self.n_failed = 0
        self.n_bytes = 0

    # ----------------------------------------------------------------- claiming

    def claim(self, request: Request, now_ns: int, out: Effects) -> None:
        """Begin: ask the other worker for the KV of `request`."""
        source = request.source
        assert source is not None
        key = _remote_key(source)
        if key in self._of:
            out.append(request.ended("refused", "duplicate_handle"))
            return
        self._of[key] = request
        self._engine.add(request)
        request.state = State.CLAIMING
        message = Claim(source.request_id, source.generation, self._layout)
        out.append(ToPeer(source.engine_id, message, source.host, source.port))
        self._timers.set(("claim", request.id), now_ns + self._claim_timeout_ns)
        if len(self._of) == 1:
            self._timers.set(("heartbeat", 0), now_ns + self._heartbeat_ns)

    def decline(self, request: Request, out: Effects) -> None:
        """`request` was refused before it began: the other side need not wait for a claim."""
        source = request.source
        if source is not None and _remote_key(source) not in self._of:
            message = Done(source.request_id, source.generation, ok=False)
            out.append(ToPeer(source.engine_id, message, source.host, source.port))

    def from_peer(self, peer: str, message: PeerMessage, now_ns: int, out: Effects) -> None:
        """Take a prefill worker's answer; a late one, or one of an old generation, is dropped."""
        if not isinstance(message, Grant | Refusal | Closed):
            return
        request = self._of.get((peer, message.request_id, message.generation))
        if request is None:
            return
        if isinstance(message, Grant):
            if request.state is State.CLAIMING:
                self._granted(request, message, now_ns, out)
        elif isinstance(message, Refusal):
            if request.state is State.CLAIMING:
                self._fail(request, f"handoff refused: {message.reason}", out, tell=False)
        elif request.state is State.VERIFYING and message.valid:
            self._commit(request, now_ns)
        else:
            self._fail(request, "handoff: the lease was lost while reading", out, tell=False)

    def _granted(self, request: Request, grant: Grant, now_ns: int, out: Effects) -> None:
        size = self._pool.block_size
        n_blocks = ceil_div(request.n_prompt - 1, size)
        if (len(grant.tokens), len(grant.blocks), len(grant.checksums)) != (
            request.n_prompt,
            n_blocks,
            n_blocks,
        ):
            self._fail(request, "handoff: the grant does not fit the handle", out)
            return
        self._timers.cancel(("claim", request.id))
        request.tokens = token_list(grant.tokens)
        request.n_known = len(grant.tokens)
        request.links = known_links(request.tokens)
        request.remote_blocks = grant.blocks
        request.checksums = grant.checksums
        request.segment = grant.segment
        request.n_cached = grant.n_cached
        self._engine.enqueue(request)
        self._engine.place_granted(request, now_ns, out)

    # ------------------------------------------------------------------ reading

    def placed(self, request: Request, hits: int, now_ns: int, out: Effects) -> None:
        """Blocks are reserved, the first `hits` of them with the right content already."""
        source = request.source
        assert source is not None
        request.placed_ns = now_ns
        n_blocks = len(request.remote_blocks)
        if hits == n_blocks:
            out.append(self._done(source, ok=True))
            self._close(request)
            self._ready(request, now_ns)
            return
        request.state = State.LOADING
        ours = request.blocks[hits:n_blocks]
        # The deadline of the request bounds the read; the hold's own expiry is for the record.
        self._pool.hold(
            Hold(
                owner=request.id,
                generation=request.generation,
                peer=source.engine_id,
                expiry_ns=now_ns + self._verify_timeout_ns,
                blocks=tuple(ours),
            )
        )
        request.checksums = request.checksums[hits:]
        pairs = tuple(zip(request.remote_blocks[hits:], ours, strict=True))
        out.append(Read(request.id, source.engine_id, request.segment, pairs))

    def read_done(self, message: ReadDone, now_ns: int, out: Effects) -> None:
        """Nothing writes the blocks any more: verify, or give them back."""
        request = self._engine.requests.get(message.request_id)
        if request is None:
            return
        if request.state is State.DRAINING:
            self._engine.drained(request)
            return
        assert request.state is State.LOADING, f"read ended in {request.state.name}"
        request.n_bytes = message.n_bytes
        request.state = State.VERIFYING
        if not message.ok:
            self._fail(request, f"transfer failed: {message.reason}", out)
        elif message.checksums != request.checksums:
            self._fail(request, "transfer failed: checksum mismatch", out)
        else:
            assert request.source is not None
            out.append(self._done(request.source, ok=True))
            self._timers.set(("repeat", request.id), now_ns + self._repeat_ns)
            self._timers.set(("verify", request.id), now_ns + self._verify_timeout_ns)

    def _commit(self, request: Request, now_ns: int) -> None:
        self.n_received += 1
        self.n_bytes += request.n_bytes
        self._pool.unhold(request.id)
        self._close(request)
        self._ready(request, now_ns)

    def _ready(self, request: Request, now_ns: int) -> None:
        request.ready_ns = now_ns
        self._engine.computed_to(request, request.n_prompt - 1)
        self._engine.start(request)

    # -------------------------------------------------------------------- ends

    def abandon(self, request: Request, out: Effects) -> None:
        """`request` ends before its KV is committed: tell the other side, stop a read."""
        if request.source is None or self._of.get(_remote_key(request.source)) is not request:
            return
        out.append(self._done(request.source, ok=False))
        if request.state is State.LOADING:
            out.append(CancelRead(request.id))
        self._close(request)

    def _fail(self, request: Request, reason: str, out: Effects, *, tell: bool = True) -> None:
        self.n_failed += 1
        if tell:
            self.abandon(request, out)
        elif request.state is State.LOADING:
            out.append(CancelRead(request.id))
        self._close(request)
        self._engine.end(request, "failed", reason, out)

    def peer_lost(self, peer: str, reason: str, out: Effects) -> None:
        """A prefill worker is gone: fail what was to come from it, at once."""
        for (engine_id, _, _), request in list(self._of.items()):
            if engine_id == peer:
                self._fail(request, f"prefill worker lost: {reason}", out, tell=False)

    def timer(self, kind: str, request_id: RequestId, now_ns: int, out: Effects) -> None:
        """A timer of this side has run out: "heartbeat", "claim", "repeat" or "verify"."""
        if kind == "heartbeat":
            self._heartbeat(now_ns, out)
            return
        request = self._engine.requests.get(request_id)
        wanted = State.CLAIMING if kind == "claim" else State.VERIFYING
        if request is None or request.state is not wanted:
            return  # ended by another timer that ran out in the same moment
        if kind == "repeat":
            assert request.source is not None
            out.append(self._done(request.source, ok=True))
            self._timers.set(("repeat", request_id), now_ns + self._repeat_ns)
        elif kind == "claim":
            self._fail(request, "handoff: no answer to the claim", out)
        else:
            self._fail(request, "handoff: no answer after reading", out)

    def _heartbeat(self, now_ns: int, out: Effects) -> None:
        by_peer: dict[str, list[tuple[RequestId, int]]] = {}
        for engine_id, request_id, generation in self._of:
            by_peer.setdefault(engine_id, []).append((request_id, generation))
        for peer, held in by_peer.items():
            out.append(ToPeer(peer, Heartbeat(tuple(held))))
        if by_peer:
            self._timers.set(("heartbeat", 0), now_ns + self._heartbeat_ns)

    def _close(self, request: Request) -> None:
        assert request.source is not None
        self._of.pop(_remote_key(request.source), None)
        for kind in ("claim", "repeat", "verify"):
            self._timers.cancel((kind, request.id))

    @staticmethod
    def _done(source: KVHandle, *, ok: bool) -> ToPeer:
        return ToPeer(source.engine_id, Done(source.request_id, source.generation, ok))
