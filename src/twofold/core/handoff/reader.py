"""What both kinds of reader share: which request wants which KV, heartbeats, failing, ending."""

from __future__ import annotations

from twofold.core.blocks import Hold
from twofold.core.engine import Engine
from twofold.core.request import Request, State
from twofold.core.timers import Timers
from twofold.messages import (
    Digested,
    Done,
    Fenced,
    Heartbeat,
    PeerMessage,
    ReadDone,
    ToPeer,
    WorkerEffect,
)
from twofold.types import BlockId, KVHandle, KVLayout, RequestId

Effects = list[WorkerEffect]
RemoteKey = tuple[str, RequestId, int]  # (engine id, the transfer there, generation)


def remote_key(source: KVHandle) -> RemoteKey:
    """What names a request's KV at the other side."""
    return (source.engine_id, source.request_id, source.generation)


class Reader:
    """Fetches KV for requests whose prompt another worker reads. Subclasses say how.

    `claim_timeout_ns` bounds the wait for the answer to a Claim, `verify_timeout_ns` that for
    the answer to Done, which is repeated every `repeat_ns`; leases are renewed every
    `heartbeat_ns`. `segment` is where peers write to, in the transport's own words.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        layout: KVLayout,
        segment: str,
        heartbeat_ns: int,
        claim_timeout_ns: int,
        verify_timeout_ns: int,
        repeat_ns: int,
    ) -> None:
        self.n_received = 0
        self.n_failed = 0
        self.n_bytes = 0
        self._engine = engine
        self._pool = engine.pool
        self._timers: Timers = engine.timers
        self._layout = layout
        self._segment = segment
        self._heartbeat_ns = heartbeat_ns
        self._claim_timeout_ns = claim_timeout_ns
        self._verify_timeout_ns = verify_timeout_ns
        self._repeat_ns = repeat_ns
        self._of: dict[RemoteKey, Request] = {}

    # ------------------------------------------------------- what subclasses do

    def claim(self, request: Request, now_ns: int, out: Effects) -> None:
        """Begin with a request that was not refused."""
        raise AssertionError("a mode defines this")

    def placed(self, request: Request, hits: int, now_ns: int, out: Effects) -> None:
        """Blocks are reserved, the first `hits` of them with the right content already."""
        raise AssertionError("a mode defines this")

    def from_peer(self, peer: str, message: PeerMessage, now_ns: int, out: Effects) -> None:
        """Take a prefill worker's answer; a late one, or one of an old generation, is dropped."""
        raise AssertionError("a mode defines this")

    def read_done(self, message: ReadDone, now_ns: int, out: Effects) -> None:
        """A read has ended."""

    def digested(self, message: Digested, now_ns: int, out: Effects) -> None:
        """Checksums of a request's blocks are known."""

    def fenced(self, message: Fenced) -> None:
        """No write of a peer can reach a request's blocks any more."""

    # ------------------------------------------------------------------ common

    def _want(self, request: Request, now_ns: int, out: Effects) -> bool:
        """Take `request` in; False when its KV is wanted by another already."""
        source = request.source
        assert source is not None
        key = remote_key(source)
        if key in self._of:
            out.append(request.ended("refused", "duplicate_handle"))
            return False
        self._of[key] = request
        self._engine.add(request)
        if len(self._of) == 1:
            self._timers.set(("heartbeat", 0), now_ns + self._heartbeat_ns)
        return True

    def decline(self, request: Request, out: Effects) -> None:
        """`request` was refused before it began: the other side need not wait for a claim."""
        source = request.source
        if source is not None and remote_key(source) not in self._of:
            message = Done(source.request_id, source.generation, ok=False)
            out.append(ToPeer(source.engine_id, message, source.host, source.port))

    def _reserve(self, request: Request, blocks: list[BlockId], now_ns: int) -> None:
        """`blocks` will be filled from outside. The deadline of the request bounds that; the
        hold's own expiry is for the record."""
        assert request.source is not None
        request.state = State.LOADING
        self._pool.hold(
            Hold(
                owner=request.id,
                generation=request.generation,
                peer=request.source.engine_id,
                expiry_ns=now_ns + self._verify_timeout_ns,
                blocks=tuple(blocks),
            )
        )

    def _commit(self, request: Request, now_ns: int) -> None:
        """The KV is whole and right."""
        self.n_received += 1
        self.n_bytes += request.n_bytes
        self._pool.unhold(request.id)
        self._close(request)
        self._ready(request, now_ns)

    def _ready(self, request: Request, now_ns: int) -> None:
        request.ready_ns = now_ns
        self._engine.computed_to(request, request.n_prompt - 1)
        self._engine.start(request)

    def abandon(self, request: Request, out: Effects) -> None:
        """`request` ends before its KV is committed: tell the other side, stop what moves."""
        if request.source is None or self._of.get(remote_key(request.source)) is not request:
            return
        out.append(self._done(request.source, ok=False))
        if request.state is State.LOADING:
            self._stop_loading(request, out)
        self._close(request)

    def _stop_loading(self, request: Request, out: Effects) -> None:
        """Blocks are being filled, and should not be any more."""
        raise AssertionError("a mode defines this")

    def _fail(self, request: Request, reason: str, out: Effects, *, tell: bool = True) -> None:
        self.n_failed += 1
        if tell:
            self.abandon(request, out)
        elif request.state is State.LOADING:
            self._stop_loading(request, out)
        self._close(request)
        self._engine.end(request, "failed", reason, out)

    def peer_lost(self, peer: str, reason: str, out: Effects) -> None:
        """A prefill worker is gone: fail what was to come from it, at once."""
        for (engine_id, _, _), request in list(self._of.items()):
            if engine_id == peer:
                self._fail(request, f"prefill worker lost: {reason}", out, tell=False)

    def timer(self, kind: str, request_id: RequestId, now_ns: int, out: Effects) -> None:
        """A timer of this side has run out: "heartbeat", or one of the mode's own."""
        if kind == "heartbeat":
            self._heartbeat(now_ns, out)

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
        self._of.pop(remote_key(request.source), None)
        for kind in ("claim", "repeat", "verify"):
            self._timers.cancel((kind, request.id))

    @staticmethod
    def _done(source: KVHandle, *, ok: bool) -> ToPeer:
        message = Done(source.request_id, source.generation, ok)
        return ToPeer(source.engine_id, message, source.host, source.port)
