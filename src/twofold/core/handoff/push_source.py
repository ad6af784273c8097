"""Push, the side that has the KV: offers of blocks, writes into them, leases.

A transfer is named by the gateway, so that offer and prompt may come in either order.

    offer (Claim)  prompt        what happens
    come           not yet       the offer waits for `lease_ns`, then Refusal
    come           computing     layer-wise: finished blocks, and layers of the step in flight, are
                                 written; pushed whole: nothing yet
    come           finished      what is left is written; when all of it has landed, Written
    not yet        finished      held under a lease until an offer comes

    Done(ok)   blocks freed, Closed(valid)
    Done(no)   writes cancelled; when the last has ended, blocks freed and Closed
    lease over, Release, prompt failed, PeerLost: the same, with Refusal for an offer

Nothing is said to a peer that might let it use its blocks again (Closed, Refusal) while a write
into them is in flight. Only full blocks are written before the prompt is finished, and a block of
which a step computes a part is not written before that step is done.
"""

from __future__ import annotations

from collections import OrderedDict

from twofold.core.blocks import BlockPool, Hold
from twofold.core.handoff.layout import incompatibility
from twofold.core.handoff.push_admission import PushAdmission
from twofold.core.handoff.source import Effects
from twofold.core.handoff.transfer import MOST_EARLY, Transfer
from twofold.core.request import Request
from twofold.core.timers import Timers
from twofold.messages import (
    CancelWrite,
    Claim,
    Closed,
    Digest,
    Done,
    Heartbeat,
    LayersDone,
    PeerMessage,
    Refusal,
    Release,
    RunStep,
    ToPeer,
    Write,
    WriteDone,
    Written,
)
from twofold.types import KVLayout, RequestId, ceil_div


class PushSource(PushAdmission):
    """Writes KV into decode workers' blocks once a prompt is finished.

    With `min_layerwise_tokens` 0 or more, KV of longer prompts is written while later chunks and
    layers compute; -1: never.
    """

    def __init__(
        self,
        *,
        pool: BlockPool,
        timers: Timers,
        layout: KVLayout,
        segment: str,
        lease_ns: int,
        min_layerwise_tokens: int = -1,
        reserve_blocks: int = 0,
        remembered: int = 1024,
    ) -> None:
        super().__init__(pool, reserve_blocks)
        self._timers = timers
        self._layout = layout
        self._lease_ns = lease_ns
        self._min_layerwise_tokens = min_layerwise_tokens
        self._remembered = remembered
        self._closed: OrderedDict[tuple[int, int], bool] = OrderedDict()

    # --------------------------------------------------------------- the prompt

    def holds(self, request_id: RequestId) -> bool:
        """Whether this request's KV is still here for a peer."""
        sending = self._of(request_id)
        return sending is not None and sending.hold is not None

    def expect(self, request: Request, now_ns: int, out: Effects) -> None:
        """A request has come whose KV will be pushed."""
        sending = self._sending.get(request.transfer)
        if sending is None or sending.generation != request.generation:
            if sending is not None:
                self._end(sending, "another generation of it has come", "released", out)
            sending = Transfer(request.transfer, request.generation)
            self._sending[request.transfer] = sending
        self._timers.cancel(("lease", request.transfer))
        sending.request, sending.request_id = request, request.id
        self._transfer_of[request.id] = request.transfer
        # A transfer that is over before its prompt comes will not be asked for any more.
        if (sending.transfer, sending.generation) in self._closed:
            sending.unwanted = True
        self._make_room(out)

    def progress(self, request: Request, now_ns: int, out: Effects) -> None:
        """Layer-wise: the blocks that are full now can go."""
        sending = self._of(request.id)
        if sending is not None and self._is_layerwise(sending):
            self._send(sending, sending.n_final(request.computed, self._pool.block_size), out)

    def layers_done(self, message: LayersDone, step: RunStep, out: Effects) -> None:
        """Layer-wise: layers of the blocks that this step completes can go."""
        size = self._pool.block_size
        for request_id, start, n in step.work:
            sending = self._of(request_id)
            if sending is None or sending.request is None or not self._is_layerwise(sending):
                continue
            if message.layers <= sending.n_layers or message.layers >= self._layout.layers:
                continue  # the rest goes when the step is done
            end = sending.n_final(start + n, size)
            if end > sending.n_sent:
                blocks = sending.pairs(sending.n_sent, end)
                self._write(sending, blocks, (sending.n_layers, message.layers), out)
                sending.n_layers = message.layers

    def _is_layerwise(self, sending: Transfer) -> bool:
        request = sending.request
        if request is None or sending.claim is None or sending.ending:
            return False
        if sending.n_preempted != request.n_preempted:
            # Computed again, and not to the last bit: what was sent must be sent again.
            sending.n_preempted = request.n_preempted
            sending.n_sent = sending.n_layers = 0
        return 0 <= self._min_layerwise_tokens <= request.n_prompt

    def keep(self, request: Request, now_ns: int, out: Effects) -> None:
        """Take over the blocks of a finished prompt and send what is left of them."""
        sending = self._sending[request.transfer]
        self._is_layerwise(sending)
        n_blocks = ceil_div(request.n_prompt - 1, self._pool.block_size)
        self._pool.release(request.blocks[n_blocks:])
        sending.hold = Hold(
            owner=request.id,
            generation=request.generation,
            peer=sending.peer,
            expiry_ns=now_ns + self._lease_ns,
            blocks=tuple(request.blocks[:n_blocks]),
        )
        self._pool.hold(sending.hold)
        self.counts.in_hand += 1
        sending.request = None
        sending.n_cached = request.n_cached
        sending.finished_ns = now_ns
        sending.compute_ns = now_ns - request.first_step_ns
        sending.queue_ns = request.first_step_ns - request.arrived_ns
        self._timers.set(("lease", sending.transfer), sending.hold.expiry_ns)
        if sending.unwanted:
            self._end(sending, "", "received", out)
        elif sending.ending:
            self._finish(sending, out)
        else:
            out.append(Digest(request.id, sending.hold.blocks))
            self._send(sending, n_blocks, out)
            self._make_room(out)

    def _make_room(self, out: Effects) -> None:
        """Give up KV that nobody has offered blocks for, if a prompt that has them waits for it."""
        for sending in self.in_the_way():
            self._end(sending, "a prompt that decode waits for needs its room", "released", out)

    def gave_up(self, request: Request, reason: str, out: Effects) -> None:
        """The prompt will never be finished: whoever waits for it is told."""
        sending = self._of(request.id)
        if sending is not None:
            sending.request = None
            self._end(sending, f"prefill ended: {reason}", "released", out)

    # ------------------------------------------------------------------ writing

    def _send(self, sending: Transfer, end: int, out: Effects) -> None:
        """Start writing the blocks up to number `end` whose KV is final."""
        if sending.claim is None or end <= sending.n_sent:
            return
        layers = (sending.n_layers, self._layout.layers)
        self._write(sending, sending.pairs(sending.n_sent, end), layers, out)
        sending.n_sent, sending.n_layers = end, 0

    def _write(
        self,
        sending: Transfer,
        pairs: tuple[tuple[int, int], ...],
        layers: tuple[int, int],
        out: Effects,
    ) -> None:
        claim, name = sending.claim, sending.request_id
        assert claim is not None
        if pairs:
            sending.n_writes += 1
            sending.in_flight += 1
            out.append(Write(name, sending.n_writes, sending.peer, claim.segment, pairs, layers))

    def write_done(self, message: WriteDone, now_ns: int, out: Effects) -> None:
        """A write has ended; after the last one there may be something to say."""
        sending = self._of(message.request_id)
        if sending is None:
            return
        sending.in_flight -= 1
        sending.n_bytes += message.n_bytes
        if not message.ok and not sending.ending:
            self._end(sending, f"transfer failed: {message.reason}", "released", out)
        elif sending.ending:
            self._finish(sending, out)
        else:
            self._tell(sending, now_ns, out)

    def digested(self, request_id: RequestId, checksums: tuple[int, ...], now_ns: int) -> Effects:
        """Checksums of held blocks are known: the last thing needed, perhaps."""
        out: Effects = []
        sending = self._of(request_id)
        if sending is not None and sending.hold is not None:
            sending.checksums = checksums
            self._tell(sending, now_ns, out)
        return out

    def _tell(self, sending: Transfer, now_ns: int, out: Effects) -> None:
        """Say that all has been written, once it has."""
        claim = sending.claim
        if (
            claim is None
            or sending.hold is None
            or sending.checksums is None
            or sending.in_flight
            or sending.told
            or sending.ending
            or sending.n_sent < len(sending.hold.blocks)
        ):
            return
        sending.told = True
        written = Written(
            claim.request_id,
            claim.generation,
            sending.checksums[claim.first : claim.first + len(claim.blocks)],
            sending.n_bytes,
            sending.n_cached,
            sending.queue_ns,
            sending.compute_ns,
            now_ns - sending.finished_ns,
        )
        out.append(ToPeer(sending.peer, written))

    # -------------------------------------------------------------------- peers

    def from_peer(self, peer: str, message: PeerMessage, now_ns: int) -> Effects:
        """Answer a decode worker."""
        out: Effects = []
        if isinstance(message, Claim):
            self._claim(peer, message, now_ns, out)
        elif isinstance(message, Heartbeat):
            for transfer, generation in message.held:
                self._heartbeat(peer, transfer, generation, now_ns, out)
        elif isinstance(message, Done):
            self._done(peer, message, now_ns, out)
        return out

    def _claim(self, peer: str, claim: Claim, now_ns: int, out: Effects) -> None:
        sending = self._sending.get(claim.request_id)
        key = (claim.request_id, claim.generation)
        reason = incompatibility(self._layout, claim.layout)
        if reason is None and key in self._closed:
            reason = "stale: this transfer is over"
        elif reason is None and sending is None and len(self._sending) >= MOST_EARLY:
            reason = "too many transfers wait for their prompt"
        elif reason is None and sending is not None:
            if sending.generation != claim.generation:
                reason = f"stale: generation {claim.generation} of {sending.generation}"
            elif sending.claim is not None and sending.peer == peer:
                # Said twice: a refusal now would be taken for the end of all writes.
                sending.told = False
                self._tell(sending, now_ns, out)
                return
            elif sending.unwanted:
                reason = "stale: decode wants it no more"
            elif sending.peer not in ("", peer) or sending.ending:
                reason = sending.ending or "another worker has claimed it"
        if reason is not None:
            out.append(ToPeer(peer, Refusal(claim.request_id, claim.generation, reason)))
            return
        if sending is None:
            sending = self._sending[claim.request_id] = Transfer(*key)
            self._timers.set(("lease", claim.request_id), now_ns + self._lease_ns)
        sending.peer, sending.claim = peer, claim
        if sending.hold is not None:
            sending.hold.peer = peer
            self._renew(sending, now_ns)
            self._send(sending, len(sending.hold.blocks), out)
            self._tell(sending, now_ns, out)
        elif sending.request is not None:
            self.progress(sending.request, now_ns, out)
            self._make_room(out)

    def _renew(self, sending: Transfer, now_ns: int) -> None:
        assert sending.hold is not None
        sending.hold.expiry_ns = now_ns + self._lease_ns
        self._timers.set(("lease", sending.transfer), sending.hold.expiry_ns)

    def _heartbeat(
        self, peer: str, transfer: int, generation: int, now_ns: int, out: Effects
    ) -> None:
        sending = self._sending.get(transfer)
        if sending is None or sending.generation != generation:
            # One that was never heard of may still come; one that is over will not.
            if (transfer, generation) in self._closed:
                out.append(self._closing(peer, (transfer, generation)))
        elif sending.hold is not None and sending.peer in ("", peer) and not sending.ending:
            self._renew(sending, now_ns)

    def _done(self, peer: str, message: Done, now_ns: int, out: Effects) -> None:
        key = (message.request_id, message.generation)
        sending = self._sending.get(message.request_id)
        if sending is None or sending.generation != message.generation:
            if sending is None and key not in self._closed:
                # It decided before the prompt came: remember that for when it does.
                sending = self._sending[message.request_id] = Transfer(*key, peer=peer)
                sending.unwanted = True
                self._timers.set(("lease", message.request_id), now_ns + self._lease_ns)
            out.append(self._closing(peer, key))
            return
        if sending.peer not in ("", peer):
            out.append(self._closing(peer, key))
            return
        sending.peer = peer
        if message.ok and sending.hold is None:
            sending.unwanted = True  # kept until the prompt's own answer is out
            out.append(self._closing(peer, key))
        elif not sending.ending:
            self._end(sending, "", "received" if message.ok else "released", out)

    def _closing(self, peer: str, key: tuple[int, int]) -> ToPeer:
        return ToPeer(peer, Closed(*key, valid=self._closed.get(key, False)))

    # --------------------------------------------------------------------- ends

    def _end(self, sending: Transfer, reason: str, ends_as: str, out: Effects) -> None:
        """End a transfer as soon as none of its writes is in flight."""
        sending.ending = reason or "over"
        sending.ends_as = ends_as
        if sending.in_flight:
            out.append(CancelWrite(sending.request_id))
        else:
            self._finish(sending, out)

    def _finish(self, sending: Transfer, out: Effects) -> None:
        if sending.in_flight or sending.request is not None:
            return
        key = (sending.transfer, sending.generation)
        del self._sending[sending.transfer]
        self._transfer_of.pop(sending.request_id, None)
        self._timers.cancel(("lease", sending.transfer))
        self._closed[key] = sending.ends_as == "received"
        if len(self._closed) > self._remembered:
            self._closed.popitem(last=False)
        if sending.hold is not None:
            self.counts.in_hand -= 1
            setattr(self.counts, sending.ends_as, getattr(self.counts, sending.ends_as) + 1)
            self._pool.release(self._pool.unhold(sending.hold.owner))
        if sending.ending != "over" and sending.claim is not None:
            out.append(ToPeer(sending.peer, Refusal(*key, sending.ending)))
        elif sending.peer:
            out.append(self._closing(sending.peer, key))

    def release(self, message: Release) -> Effects:
        """The gateway knows that nobody will come for this one; named by the request's own id."""
        out: Effects = []
        sending = self._of(message.request_id)
        if (
            sending is not None
            and sending.generation == message.generation
            and sending.hold is not None
            and not sending.ending
        ):
            self._end(sending, "the gateway released it", "released", out)
        return out

    def peer_lost(self, peer: str, now_ns: int, out: Effects) -> None:
        """A decode worker's connection broke: even one that lives has given up what it offered."""
        for sending in list(self._sending.values()):
            if sending.peer == peer and sending.claim is not None and not sending.ending:
                self._end(sending, "the connection was lost", "released", out)

    def lease_over(self, transfer: int) -> Effects:
        """Nobody came, neither prompt nor offer, or whoever came is gone."""
        out: Effects = []
        sending = self._sending[transfer]
        if not sending.ending:
            self._end(sending, "its lease has run out", "expired", out)
        return out
