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

from twofold.core.abridged import ids_of, known_links, token_list
from twofold.core.handoff.reader import Effects, Reader
from twofold.core.request import Request, State
from twofold.messages import (
    CancelRead,
    Claim,
    Closed,
    Grant,
    PeerMessage,
    Read,
    ReadDone,
    Refusal,
    ToPeer,
)
from twofold.types import RequestId, ceil_div


class PullReader(Reader):
    """Reads KV once it is complete. See `Reader`."""

    # ----------------------------------------------------------------- claiming

    def claim(self, request: Request, now_ns: int, out: Effects) -> None:
        """Ask the other worker for the KV of `request`."""
        if not self._want(request, now_ns, out):
            return
        source = request.source
        assert source is not None
        request.state = State.CLAIMING
        message = Claim(source.request_id, source.generation, self._layout)
        out.append(ToPeer(source.engine_id, message, source.host, source.port))
        self._timers.set(("claim", request.id), now_ns + self._claim_timeout_ns)

    def from_peer(self, peer: str, message: PeerMessage, now_ns: int, out: Effects) -> None:
        """Take a prefill worker's answer; a late one, or one of an old generation, is dropped."""
        if not isinstance(message, (Grant, Closed, Refusal)):
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
        ids = ids_of(grant)
        if (len(ids), len(grant.blocks), len(grant.checksums)) != (
            request.n_prompt,
            n_blocks,
            n_blocks,
        ):
            self._fail(request, "handoff: the grant does not fit the handle", out)
            return
        self._timers.cancel(("claim", request.id))
        request.tokens = token_list(ids)
        request.n_known = len(ids)
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
        ours = request.blocks[hits:n_blocks]
        self._reserve(request, ours, now_ns)
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

    def _stop_loading(self, request: Request, out: Effects) -> None:
        out.append(CancelRead(request.id))

    def timer(self, kind: str, request_id: RequestId, now_ns: int, out: Effects) -> None:
        """Also "claim", "repeat" and "verify": an answer has not come."""
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
