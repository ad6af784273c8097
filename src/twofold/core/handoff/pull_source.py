"""Pull, the side that has the KV: holds, leases, grants.

    message     held, right generation               otherwise
    Claim       Grant (once checksums are known)     Refusal: unknown, stale, taken, or the layout
    Heartbeat   lease renewed                        Closed as answered before, or valid=False
    Done(ok)    blocks freed, Closed(valid=True)     Closed as answered before, or valid=False
    Done(no)    blocks freed, Closed(valid=False)    the same; also before any Claim has come
    Release     blocks freed                         ignored
    PeerLost    lease cut to `lost_grace_ns`         ignored
    timer       lease over: blocks freed             -

A lease runs from the moment the KV is ready, whether or not anyone has asked for it. A repeated
message gets the same answer, so a lost answer costs a retry and never a block.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from twofold.core.abridged import Ids, first_ids
from twofold.core.blocks import BlockPool, Hold
from twofold.core.handoff.layout import incompatibility
from twofold.core.handoff.source import Effects, Source
from twofold.core.request import Request
from twofold.core.timers import Timers
from twofold.messages import (
    Claim,
    Closed,
    Digest,
    Done,
    Grant,
    Heartbeat,
    PeerMessage,
    Refusal,
    Release,
    ToPeer,
)
from twofold.types import KVLayout, RequestId, ceil_div


class _Held(msgspec.Struct):
    hold: Hold
    tokens: Ids
    n_cached: int
    checksums: tuple[int, ...] | None = None
    claimed: bool = False


class PullSource(Source):
    """Keeps finished prefills until a decode worker has them, for `lease_ns` at a time.

    `segment` tells peers where the pool's bytes are, in the transport's own words.
    """

    def __init__(
        self,
        *,
        pool: BlockPool,
        timers: Timers,
        layout: KVLayout,
        segment: str,
        lease_ns: int,
        lost_grace_ns: int,
        remembered: int = 1024,
    ) -> None:
        super().__init__()
        self._pool = pool
        self._timers = timers
        self._layout = layout
        self._segment = segment
        self._lease_ns = lease_ns
        self._lost_grace_ns = lost_grace_ns
        self._held: dict[RequestId, _Held] = {}
        self._closed: OrderedDict[tuple[RequestId, int], bool] = OrderedDict()
        self._remembered = remembered

    def holds(self, request_id: RequestId) -> bool:
        """Whether this request's KV is still here for a peer."""
        return request_id in self._held

    def keep(self, request: Request, now_ns: int, out: Effects) -> None:
        """Take over the blocks of a finished prefill.

        Decode computes the last prompt token itself, so only the blocks of those before it are
        kept: none at all for a prompt of one token, which is handed over all the same.
        """
        tokens = first_ids(request.tokens, request.n_prompt)
        n_blocks = ceil_div(len(tokens) - 1, self._pool.block_size)
        blocks, rest = request.blocks[:n_blocks], request.blocks[n_blocks:]
        self._pool.release(rest)
        hold = Hold(
            owner=request.id,
            generation=request.generation,
            peer="",
            expiry_ns=now_ns + self._lease_ns,
            blocks=tuple(blocks),
        )
        self._pool.hold(hold)
        self._held[request.id] = _Held(hold, tokens, request.n_cached)
        self.counts.in_hand += 1
        self._timers.set(("lease", request.id), hold.expiry_ns)
        out.append(Digest(request.id, hold.blocks))

    def digested(self, request_id: RequestId, checksums: tuple[int, ...], now_ns: int) -> Effects:
        """Checksums are known: a claim that came before them is answered now."""
        held = self._held.get(request_id)
        if held is None:
            return []
        held.checksums = checksums
        return [self._grant(held, now_ns)] if held.claimed else []

    def from_peer(self, peer: str, message: PeerMessage, now_ns: int) -> Effects:
        """Answer a decode worker."""
        if isinstance(message, Claim):
            return self._claim(peer, message, now_ns)
        if isinstance(message, Heartbeat):
            return self._heartbeat(peer, message, now_ns)
        if isinstance(message, Done):
            return self._done(peer, message)
        return []

    def _claim(self, peer: str, claim: Claim, now_ns: int) -> Effects:
        held = self._held.get(claim.request_id)
        if held is None:
            reason: str | None = "unknown request, or its lease has run out"
        elif held.hold.generation != claim.generation:
            reason = f"stale: generation {claim.generation}, held is {held.hold.generation}"
        elif held.claimed and held.hold.peer != peer:
            reason = "another worker is reading it"
        else:
            reason = incompatibility(self._layout, claim.layout)
        if held is None or reason is not None:
            refusal = Refusal(claim.request_id, claim.generation, reason or "")
            return [ToPeer(peer, refusal)]
        held.hold.peer = peer
        held.claimed = True
        self._renew(held, now_ns)
        return [self._grant(held, now_ns)] if held.checksums is not None else []

    def _grant(self, held: _Held, now_ns: int) -> ToPeer:
        assert held.checksums is not None
        hold = held.hold
        grant = Grant(
            hold.owner,
            hold.generation,
            held.tokens,  # type: ignore[arg-type]  # abridged ones are never encoded
            hold.blocks,
            held.checksums,
            self._segment,
            held.n_cached,
            hold.expiry_ns - now_ns,
        )
        return ToPeer(hold.peer, grant)

    def _renew(self, held: _Held, now_ns: int) -> None:
        held.hold.expiry_ns = now_ns + self._lease_ns
        self._timers.set(("lease", held.hold.owner), held.hold.expiry_ns)

    def _heartbeat(self, peer: str, message: Heartbeat, now_ns: int) -> Effects:
        out: Effects = []
        for request_id, generation in message.held:
            held = self._held.get(request_id)
            if held is not None and (held.hold.generation, held.hold.peer) == (generation, peer):
                self._renew(held, now_ns)
            else:
                out.append(self._close(peer, (request_id, generation)))
        return out

    def _done(self, peer: str, message: Done) -> Effects:
        key = (message.request_id, message.generation)
        held = self._held.get(message.request_id)
        # One that gives up may never have claimed: it refused the request, or its claim was lost.
        owners = (peer,) if message.ok else (peer, "")
        if (
            held is not None
            and held.hold.generation == message.generation
            and held.hold.peer in owners
        ):
            if message.ok:
                self.counts.received += 1
            else:
                self.counts.released += 1
            self._free(held)
            self._closed[key] = message.ok
            if len(self._closed) > self._remembered:
                self._closed.popitem(last=False)
        return [self._close(peer, key)]

    def _close(self, peer: str, key: tuple[RequestId, int]) -> ToPeer:
        return ToPeer(peer, Closed(*key, valid=self._closed.get(key, False)))

    def release(self, message: Release) -> Effects:
        """The gateway knows that nobody will come for this one."""
        held = self._held.get(message.request_id)
        if held is not None and held.hold.generation == message.generation:
            self.counts.released += 1
            self._free(held)
        return []

    def peer_lost(self, peer: str, now_ns: int, out: Effects) -> None:
        """A decode worker's connection broke: dead, or back in a moment. Wait a moment."""
        for held in self._held.values():
            if held.hold.peer == peer:
                held.hold.expiry_ns = min(held.hold.expiry_ns, now_ns + self._lost_grace_ns)
                self._timers.set(("lease", held.hold.owner), held.hold.expiry_ns)

    def lease_over(self, transfer: int) -> Effects:
        """Nobody renewed the lease: the blocks are free, and late readers are told so."""
        self.counts.expired += 1
        self._free(self._held[transfer])
        return []

    def _free(self, held: _Held) -> None:
        del self._held[held.hold.owner]
        self._timers.cancel(("lease", held.hold.owner))
        self.counts.in_hand -= 1
        self._pool.release(self._pool.unhold(held.hold.owner))
