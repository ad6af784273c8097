"""Checks of a simulated run, after every event and at the end. For tests and for search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from twofold.core.router import Router
from twofold.core.worker import WorkerCore
from twofold.messages import (
    Arrive,
    Claim,
    Closed,
    Done,
    Ended,
    FromPeer,
    Grant,
    PeerMessage,
    RouterEffect,
    RouterMessage,
    Submit,
    Terminal,
    ToPeer,
    Write,
)
from twofold.sim.audit_router import RouterBook
from twofold.sim.observer import Core, Effects, Message


def _valid(message: Claim | Done) -> Closed:
    return Closed(message.request_id, message.generation, valid=True)


class Audit:
    """An observer that raises AssertionError as soon as an invariant is broken.

    After every message: a worker's blocks, holds and slots add up; no request ends twice, or
    without having begun. At the end (`finish`): every request has ended, at the gateway and on
    every worker that lives and was sent it, and every block and every slot is back.
    KV is never granted, written or confirmed for another generation than it was made for. What a
    gateway tells workers is checked by `RouterBook`.

    Counting every block takes time, and a block once lost stays so: with `full_every` above 1
    that is done for every so-manyth message only, and at the end.
    """

    def __init__(self, full_every: int = 1) -> None:
        self._full_every = full_every
        self.n_handled = 0
        self.n_ended = 0
        self._cores: dict[str, Core] = {}
        self._open: dict[str, dict[int, None]] = {}
        self._books: dict[str, RouterBook] = {}
        self._made: dict[tuple[str, int], int] = {}  # generation of the KV that a worker makes
        self._transfers: dict[tuple[str, int], int] = {}  # of its requests
        self._offers: dict[tuple[str, int], list[tuple[str, Claim]]] = {}

    def born(self, name: str, core: Core, settings: Mapping[str, Any]) -> None:
        """See `Observer`."""
        self._cores[name] = core
        self._open[name] = {}
        if isinstance(core, Router):
            self._books[name] = RouterBook(settings)

    def died(self, name: str) -> None:
        """See `Observer`. Nothing is asked of the dead."""
        del self._cores[name]
        del self._open[name]

    def handled(
        self, name: str, core: Core, now_ns: int, message: Message, effects: Effects
    ) -> None:
        """See `Observer`."""
        self.n_handled += 1
        begun = self._open[name]
        if isinstance(message, Submit | Arrive):
            begun[message.request_id] = None
        for effect in effects:
            if isinstance(effect, Ended | Terminal):
                assert effect.request_id in begun, (
                    f"{name} at {now_ns} ns: request {effect.request_id} ended twice, or never "
                    f"began: {effect}"
                )
                del begun[effect.request_id]
                self.n_ended += 1
        if isinstance(core, Router):
            routed = cast("tuple[RouterMessage, Sequence[RouterEffect]]", (message, effects))
            self._books[name].handled(core, now_ns, *routed)
        if isinstance(message, Submit) and message.hold:
            transfer = message.transfer or message.request_id
            self._made[name, transfer] = message.generation
            self._transfers[name, message.request_id] = transfer
        elif isinstance(message, FromPeer):
            if isinstance(message.message, Claim):
                key = (name, message.message.request_id)
                self._offers.setdefault(key, []).append((message.peer, message.message))
            self._generations(name, message.message, effects)
        for effect in effects:
            if isinstance(effect, Write):
                self._written(name, effect)
        if isinstance(core, WorkerCore):
            if self.n_handled % self._full_every == 0:
                core.check()
            else:
                self._counters(core)

    def _generations(self, name: str, message: PeerMessage, effects: Effects) -> None:
        """Nobody is given KV of another generation than he asks for."""
        if not isinstance(message, Claim | Done):
            return
        made = self._made.get((name, message.request_id))
        if made is None or made == message.generation:
            return
        for effect in effects:
            given = isinstance(effect, ToPeer) and (
                isinstance(effect.message, Grant) or effect.message == _valid(message)
            )
            assert not given, f"{name}: {message} is answered, of generation {made}, by {effect}"

    def _written(self, name: str, write: Write) -> None:
        """Blocks are written that the peer has offered, for what is made here."""
        transfer = self._transfers[name, write.request_id]
        offered = [
            block
            for peer, claim in self._offers.get((name, transfer), [])
            if peer == write.peer and claim.generation == self._made[name, transfer]
            for block in claim.blocks
        ]
        for _, block in write.pairs:
            assert block in offered, f"{name}: {write} fills what was not offered for it"

    @staticmethod
    def _counters(core: WorkerCore) -> None:
        """What can be seen without looking at each block."""
        engine, counts = core.engine, core.pool.counts()
        assert min(counts.free, counts.cached, counts.active, counts.held) >= 0, counts
        assert 0 <= engine.n_placed <= engine.max_num_seqs, f"{engine.n_placed} slots are taken"
        most = engine.max_waiting + engine.max_num_seqs  # preempted ones wait as well
        assert len(engine.requests) - engine.n_placed <= most, "a queue has no bound"
        assert core.source.counts.in_hand <= len(core.pool.holds), "a handoff holds nothing"

    def finish(self) -> None:
        """Raise AssertionError unless everything has ended and come back."""
        for name, begun in self._open.items():
            assert not begun, f"{name}: requests {list(begun)} never ended"
        for name, core in self._cores.items():
            if isinstance(core, WorkerCore):
                core.check()
                self._at_rest(name, core)
            else:
                self._router_at_rest(core)

    @staticmethod
    def _at_rest(name: str, core: WorkerCore) -> None:
        engine, counts = core.engine, core.pool.counts()
        assert not engine.requests, f"{name}: requests {list(engine.requests)} are still known"
        assert counts.active == 0, f"{name}: {counts.active} blocks are still active"
        assert counts.held == 0, f"{name}: {counts.held} blocks are still held"
        assert engine.n_placed == 0, f"{name}: {engine.n_placed} slots are still taken"
        assert core.source.counts.in_hand == 0, f"{name}: a handoff was never closed"

    @staticmethod
    def _router_at_rest(core: Router) -> None:
        assert not core.requests, f"router: requests {list(core.requests)} are still known"
        for name, worker in core.workers.items():
            load = (worker.requests, worker.tokens)
            assert load == (0, 0), f"router: {name} is still charged with {load}"
        counts = core.counts
        ended = counts.finished + counts.refused + counts.failed + counts.cancelled
        assert counts.received == ended, "router: received is not the sum of the ends"
