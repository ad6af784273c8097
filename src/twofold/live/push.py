"""Both ends of a push, for a worker's driver: writes that leave, and blocks that take them in."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from twofold.live.processes import Processes
from twofold.messages import (
    Claim,
    Closed,
    Fenced,
    FromPeer,
    Refusal,
    ToPeer,
    Write,
    WriteDone,
    Written,
)
from twofold.transport.base import Completion, Transport
from twofold.types import BlockId, KVHandle, RequestId

Deliver = Callable[[WriteDone | Fenced], None]
Export = Callable[[Sequence[BlockId], Callable[[str], None]], None]
_Key = tuple[str, int, int]  # peer, transfer, generation


class Outgoing:
    """Carries out `Write`s: one at a time of each request and in order.

    In order, because a prompt that was preempted is computed and written again, and what was
    written last must stay. `export(blocks, then)` makes the host buffer hold blocks and calls
    `then` with the reason if that failed. Writes are named -1, -2, ... to the transport.
    """

    def __init__(
        self, *, transport: Transport, n_layers: int, export: Export, deliver: Deliver
    ) -> None:
        self._transport = transport
        self._n_layers = n_layers
        self._export = export
        self._deliver = deliver
        self._names = itertools.count(-1, -1)
        self._queues: dict[RequestId, deque[Write]] = {}
        self._under_way: dict[RequestId, int] = {}
        self._of: dict[int, RequestId] = {}
        self._cancelled: dict[RequestId, None] = {}

    def write(self, effect: Write) -> None:
        """Begin a write, or let it wait for those before it."""
        queue = self._queues.setdefault(effect.request_id, deque())
        queue.append(effect)
        if len(queue) == 1:
            self._next(effect.request_id)

    def cancel(self, request_id: RequestId) -> None:
        """End a request's writes early; each is still answered."""
        queue = self._queues.get(request_id)
        if queue is None:
            return
        if request_id in self._under_way:
            self._transport.cancel(self._under_way[request_id])
        else:
            self._cancelled[request_id] = None
        while len(queue) > 1:
            number = queue.pop().number
            self._deliver(WriteDone(request_id, number, ok=False, reason="cancelled"))

    def done(self, completion: Completion) -> None:
        """A write has ended."""
        request_id = self._of.pop(completion.transfer_id)
        del self._under_way[request_id]
        self._end(request_id, completion.ok, completion.reason, completion.n_bytes)

    def _next(self, request_id: RequestId) -> None:
        effect = self._queues[request_id][0]

        def exported(reason: str) -> None:
            if request_id in self._cancelled:
                reason = reason or "cancelled"
            if reason:
                self._end(request_id, False, reason, 0)
                return
            name = next(self._names)
            self._of[name] = request_id
            self._under_way[request_id] = name
            self._transport.write(name, effect.segment, effect.pairs, effect.layers, self._n_layers)

        self._export([ours for ours, _ in effect.pairs], exported)

    def _end(self, request_id: RequestId, ok: bool, reason: str, n_bytes: int) -> None:
        queue = self._queues[request_id]
        effect = queue.popleft()
        if not queue:
            del self._queues[request_id]
            self._cancelled.pop(request_id, None)
        self._deliver(WriteDone(request_id, effect.number, ok, reason, n_bytes))
        if queue and self._queues.get(request_id) is queue:
            self._next(request_id)


class Incoming:
    """Blocks that peers may write to: a window of the transport for each claim.

    A window is closed before the core hears that the writes are over, so that no byte that was
    delayed on the way can land in blocks that are checked or used again by then.
    """

    def __init__(self, *, transport: Transport, processes: Processes, deliver: Deliver) -> None:
        self._transport = transport
        self._processes = processes
        self._deliver = deliver
        self._windows: dict[_Key, str] = {}
        self._fencing: dict[_Key, RequestId] = {}

    def claim(self, effect: ToPeer) -> ToPeer:
        """The claim as it is to be sent: a peer finds the blocks through a window of its own."""
        claim = effect.message
        if not isinstance(claim, Claim) or not claim.blocks:
            return effect
        key = (effect.peer, claim.request_id, claim.generation)
        segment = self._windows.get(key) or self._transport.open_window(claim.blocks)
        self._windows[key] = segment
        return msgspec.structs.replace(
            effect, message=msgspec.structs.replace(claim, segment=segment)
        )

    def heard(self, message: FromPeer) -> None:
        """The core is about to hear this: where it ends a claim, its window is closed first."""
        said = message.message
        if isinstance(said, Written | Closed | Refusal):
            key = (message.peer, said.request_id, said.generation)
            self._fencing.pop(key, None)
            segment = self._windows.pop(key, None)
            if segment is not None:
                self._transport.close_window(segment)

    def fence(self, request_id: RequestId, source: KVHandle) -> None:
        """Answer with `Fenced` once no write of the request's peer can land any more."""
        key = (source.engine_id, source.request_id, source.generation)
        segment = self._windows.get(key)
        if segment is None or self._transport.close_window(segment):
            self._windows.pop(key, None)
            self._deliver(Fenced(request_id))
            return
        # The peer writes by itself. It has not said that it stopped, so it must be dead first.
        self._fencing[key] = request_id
        self._processes.when_gone(source.engine_id, lambda: self._gone(source.engine_id))

    def _gone(self, peer: str) -> None:
        for key, request_id in list(self._fencing.items()):
            if key[0] == peer:
                del self._fencing[key], self._windows[key]
                self._deliver(Fenced(request_id))
