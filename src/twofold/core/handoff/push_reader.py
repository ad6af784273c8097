"""Push, the side that wants the KV: reserve, offer the blocks, check what was written, commit.

    state      message                    next
    WAITING    placed                     LOADING: Claim sent, with the blocks to write to
    LOADING    Written                    VERIFYING: checksums of what landed are computed
    LOADING    heartbeat                  the Claim is said again, lest it or Written were lost
    LOADING    Refusal, Closed            failed: the other side writes no more
    VERIFYING  Digested, checksums equal  RUNNING, Done(ok) sent
    VERIFYING  Digested, otherwise        failed
    DRAINING   Closed, Fenced             blocks given back
    any        PeerLost                   failed; LOADING blocks stay until Fenced

The blocks of a request that ends while a peer may write them are not used again before the peer
says that it has stopped, or, when it can say nothing any more, before the transport has fenced
it off. So no late write can land in another request's KV.
"""

from __future__ import annotations

from twofold.core.engine import Engine
from twofold.core.handoff.reader import Effects, Reader, RemoteKey, remote_key
from twofold.core.request import Request, State
from twofold.messages import (
    Claim,
    Closed,
    Digest,
    Digested,
    Fence,
    Fenced,
    PeerMessage,
    Refusal,
    ToPeer,
    Written,
)
from twofold.types import KVLayout, ceil_div


class PushReader(Reader):
    """Reserves blocks on arrival and has a peer write them. See `Reader`."""

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
        super().__init__(
            engine=engine,
            layout=layout,
            segment=segment,
            heartbeat_ns=heartbeat_ns,
            claim_timeout_ns=claim_timeout_ns,
            verify_timeout_ns=verify_timeout_ns,
            repeat_ns=repeat_ns,
        )
        self._draining: dict[RemoteKey, Request] = {}

    def claim(self, request: Request, now_ns: int, out: Effects) -> None:
        """Let `request`, whose ids are known, wait for its blocks; the claim comes with them."""
        if self._want(request, now_ns, out):
            self._engine.enqueue(request)
            self._engine.place_granted(request, now_ns, out)

    def placed(self, request: Request, hits: int, now_ns: int, out: Effects) -> None:
        """Blocks are reserved, the first `hits` of them with the right content already."""
        source = request.source
        assert source is not None
        request.placed_ns = now_ns
        request.n_cached = hits * self._pool.block_size
        n_blocks = ceil_div(request.n_prompt - 1, self._pool.block_size)
        if hits == n_blocks:
            out.append(self._done(source, ok=True))
            self._close(request)
            self._ready(request, now_ns)
            return
        self._reserve(request, request.blocks[hits:n_blocks], now_ns)
        out.append(self._offer(request))

    def _offer(self, request: Request) -> ToPeer:
        """The Claim with the blocks that are reserved for `request`."""
        source, ours = request.source, self._pool.holds[request.id].blocks
        assert source is not None
        first = ceil_div(request.n_prompt - 1, self._pool.block_size) - len(ours)
        message = Claim(
            source.request_id, source.generation, self._layout, self._segment, first, ours
        )
        return ToPeer(source.engine_id, message, source.host, source.port)

    def from_peer(self, peer: str, message: PeerMessage, now_ns: int, out: Effects) -> None:
        """Take a prefill worker's answer; a late one, or one of an old generation, is dropped."""
        if not isinstance(message, (Written, Refusal, Closed)):
            return
        key = (peer, message.request_id, message.generation)
        request = self._of.get(key)
        if request is None:
            if not isinstance(message, Written):
                self._drained(key)
            return
        if isinstance(message, Written):
            if request.state is State.LOADING:
                self._written(request, message, now_ns, out)
            return
        reason = message.reason if isinstance(message, Refusal) else "the lease was lost"
        # The other side answers so only when it writes no more.
        loading = request.state is State.LOADING
        request.state = State.VERIFYING if loading else request.state
        self._fail(request, f"handoff refused: {reason}", out, tell=False)

    def _written(self, request: Request, message: Written, now_ns: int, out: Effects) -> None:
        hold = self._pool.holds[request.id]
        if len(message.checksums) != len(hold.blocks):
            request.state = State.VERIFYING
            self._fail(request, "handoff: what was written is not what was claimed", out)
            return
        request.state = State.VERIFYING
        request.checksums = message.checksums
        request.n_bytes = message.n_bytes
        request.n_cached = max(request.n_cached, message.n_cached)
        request.pushed = (message.queue_ns, message.compute_ns, message.write_ns, now_ns)
        out.append(Digest(request.id, hold.blocks))

    def digested(self, message: Digested, now_ns: int, out: Effects) -> None:
        """Checksums of what landed: believe it, or not."""
        request = self._engine.requests.get(message.request_id)
        if request is None or request.state is not State.VERIFYING or request.source is None:
            return
        if message.checksums != request.checksums:
            self._fail(request, "transfer failed: checksum mismatch", out)
            return
        out.append(self._done(request.source, ok=True))
        self._commit(request, now_ns)

    # -------------------------------------------------------------------- ends

    def _stop_loading(self, request: Request, out: Effects) -> None:
        """Wait for the other side to say that it has stopped; it is asked again and again."""
        assert request.source is not None
        self._draining[remote_key(request.source)] = request

    def peer_lost(self, peer: str, reason: str, out: Effects) -> None:
        """A prefill worker is gone: fail what was to come from it, and fence it off."""
        super().peer_lost(peer, reason, out)
        for (engine_id, _, _), request in list(self._draining.items()):
            if engine_id == peer:
                out.append(Fence(request.id))

    def fenced(self, message: Fenced) -> None:
        """No write of a peer can reach a request's blocks any more."""
        for key, request in list(self._draining.items()):
            if request.id == message.request_id:
                self._drained(key)

    def _drained(self, key: RemoteKey) -> None:
        request = self._draining.pop(key, None)
        if request is not None:
            self._engine.drained(request)

    def _heartbeat(self, now_ns: int, out: Effects) -> None:
        """Also say again what may have been lost: offers, and that those who write shall stop.

        An offer that has come is answered once all is written, and so is each copy of it after
        that: this finds a lost Claim and a lost Written.
        """
        super()._heartbeat(now_ns, out)
        for request in self._of.values():
            loading = request.state is State.LOADING
            if loading and request.placed_ns + self._heartbeat_ns <= now_ns:
                out.append(self._offer(request))
        for request in self._draining.values():
            assert request.source is not None
            out.append(self._done(request.source, ok=False))
        if self._draining:
            self._timers.set(("heartbeat", 0), now_ns + self._heartbeat_ns)
