"""The simulated network: legs, handoff messages and reads, with their latencies and faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from twofold.cost.link import Link
from twofold.messages import (
    CancelRead,
    CancelWrite,
    Fence,
    Fenced,
    FromPeer,
    LegFailed,
    PeerLost,
    Read,
    ReadDone,
    RouterMessage,
    ToPeer,
    WorkerMessage,
    Write,
    WriteDone,
)
from twofold.sim.events import Events, Kind
from twofold.sim.faults import AS_SENT, Fate, Faults
from twofold.sim.leg import Leg
from twofold.sim.link import Lane
from twofold.sim.nics import Nics
from twofold.sim.node import Node
from twofold.types import BlockId, RequestId


class _Moving:
    """Blocks on their way, by a read or a write; on a lane as transfer `number` once set up.

    All `layers` of them where that is None, else from the first to the second.
    `answer(ok, reason, checksums)` is what the asking worker is told at the end.
    """

    __slots__ = (
        "answer",
        "asker",
        "key",
        "lane",
        "layers",
        "n_bytes",
        "number",
        "ours",
        "over",
        "pairs",
        "ruined",
        "source",
        "target",
        "theirs",
    )

    def __init__(
        self,
        key: tuple[str, RequestId, int],
        asker: Node,
        source: Node,
        target: Node,
        pairs: Sequence[tuple[BlockId, BlockId]],
        n_bytes: int,
        answer: Callable[[bool, str, tuple[int, ...]], WorkerMessage],
        layers: tuple[int, int] | None = None,
    ) -> None:
        self.layers = layers
        self.key = key
        self.asker = asker
        self.source = source
        self.target = target
        self.pairs = pairs
        self.n_bytes = n_bytes
        self.answer = answer
        self.lane: Lane | Nics | None = None
        self.number = 0
        self.over = False
        self.ruined: tuple[BlockId, ...] = ()
        # Of these lives of source and target, should they get others.
        self.ours = target.contents
        self.theirs = source.contents

    def copy(self) -> tuple[int, ...]:
        """Write the blocks as they are at the source now; returns their checksums."""
        if self.ours is None or self.theirs is None:
            return (0,) * len(self.pairs)
        checksums = list(self.ours.copy(self.theirs, self.pairs, self.layers))
        first, end = self.layers or (0, 1)
        for index in self.ruined:
            at, layer = index % len(self.pairs), first + index // len(self.pairs) % (end - first)
            checksums[at] = self.ours.flip(self.pairs[at][1], layer)
        return tuple(checksums)


class Network:
    """Carries what workers and gateway send each other. Latencies are one way, in ns.

    Transfers of one pair of workers share `link` in their direction, or with `nics` all of one
    worker share its own; each first takes what `link` says beside the shared wire.
    """

    def __init__(
        self,
        events: Events,
        *,
        leg_latency_ns: int,
        peer_latency_ns: int,
        link: Link,
        nics: Nics | None = None,
        faults: Faults | None = None,
    ) -> None:
        self._events = events
        self.leg_latency_ns = leg_latency_ns
        self._peer_latency_ns = peer_latency_ns
        self.link = link
        self._read_latency_ns = link.latency_ns
        self._nics = nics
        self._faults = faults
        self._n_fates = 0
        self.n_faults = 0
        self._nodes: dict[str, Node] = {}
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._moving: dict[tuple[str, RequestId, int], _Moving] = {}
        self._landing: dict[_Moving, None] = {}  # broken off, with bytes still to land
        self._severed: dict[tuple[str, str], int] = {}  # how often the two's connection was
        self._known: dict[tuple[str, str], int] = {}  # how often the first knows that it was
        self.deliver: Callable[[Leg, RouterMessage], None] = lambda leg, message: None

    def fate(self, message: object) -> Fate:
        """What becomes of `message`."""
        if self._faults is None:
            return AS_SENT
        self._n_fates += 1
        fate = self._faults.fate(self._n_fates, message)
        self.n_faults += fate != AS_SENT
        return fate

    # -------------------------------------------------------------------- lives

    def join(self, node: Node) -> None:
        """`node` can be reached by its engine id."""
        self._nodes[node.engine_id] = node

    def leave(self, node: Node) -> None:
        """`node` was killed: what it moves stops, what others move breaks, its peers notice."""
        del self._nodes[node.engine_id]
        for moving in list(self._moving.values()):
            if moving.asker is node:
                self._stop(moving)
            elif node in (moving.source, moving.target):
                self._break(moving, self._peer_latency_ns, "connection lost")
        for moving in list(self._landing):
            if moving.asker is node:
                del self._landing[moving]
        for engine_id in node.peers:
            peer = self._nodes.get(engine_id)
            if peer is not None:
                peer.peers.pop(node.engine_id, None)
                self._lost(peer, node.engine_id, self._peer_latency_ns, "connection lost")

    def sever(self, one: Node, other: Node) -> None:
        """The connection of two living workers breaks, and both see it at once."""
        if other.engine_id in one.peers:
            for node, peer in ((one, other.engine_id), (other, one.engine_id)):
                line = (node.engine_id, peer)
                self._severed[line] = self._severed.get(line, 0) + 1
                self._lost(node, peer, 0, "connection reset")

    def renew(self, node: Node, peer: str) -> None:
        """`node` has been told that its connection to `peer` was lost: the next is a new one."""
        self._known[node.engine_id, peer] = self._severed.get((node.engine_id, peer), 0)

    def _lost(self, node: Node, peer: str, after_ns: int, reason: str) -> None:
        message = PeerLost(peer, reason)
        self._events.after(after_ns, Kind.PEER, node.number, node.feed, node.engine_id, message)

    # --------------------------------------------------------------------- legs

    def up(self, leg: Leg, message: RouterMessage) -> None:
        """A worker answers on `leg`."""
        if leg.cut:
            return
        fate = self.fate(message)
        if not fate:
            self._cut(leg)
            return
        leg.up_ns = max(leg.up_ns, self._events.now_ns + self.leg_latency_ns + fate[0])
        self._events.at(leg.up_ns, Kind.LEG, leg.origin, self._arrive, leg, message)

    def _arrive(self, leg: Leg, message: RouterMessage) -> None:
        if not leg.cut:
            self.deliver(leg, message)

    def down(self, leg: Leg, effect: object, call: Callable[..., None], *args: Any) -> None:
        """The gateway sends something on `leg` whose loss breaks it."""
        fate = self.fate(effect)
        if not fate:
            self._cut(leg)
            return
        leg.down_ns = max(leg.down_ns, self._events.now_ns + self.leg_latency_ns + fate[0])
        self._events.at(leg.down_ns, Kind.LEG, 0, call, *args)

    def notice(self, leg: Leg, effect: object, call: Callable[..., None], *args: Any) -> None:
        """The gateway sends something about `leg` whose loss nobody notices."""
        for delay_ns in self.fate(effect)[:1]:
            at_ns = max(leg.down_ns, self._events.now_ns + self.leg_latency_ns + delay_ns)
            self._events.at(at_ns, Kind.LEG, 0, call, *args)

    def break_leg(self, leg: Leg, reason: str, *, lost: bool) -> None:
        """The gateway finds `leg` broken, one latency from now; nothing else comes on it."""
        if not leg.cut:
            leg.cut = True
            message = LegFailed(leg.request_id, leg.generation, leg.kind, 0, reason, lost)
            self._events.after(
                self.leg_latency_ns, Kind.LEG, leg.origin, self.deliver, leg, message
            )

    def _cut(self, leg: Leg) -> None:
        self.break_leg(leg, "connection reset", lost=False)
        node = self._nodes.get(leg.engine_id)
        if node is not None:
            self._events.after(
                self.leg_latency_ns, Kind.LEG, node.number, node.hang_up, leg.engine_id, leg
            )

    # ------------------------------------------------------------------ handoff

    def to_peer(self, sender: Node, effect: ToPeer) -> None:
        """Send a handoff message. To a life that is over: the sender is told so."""
        peer = self._nodes.get(effect.peer)
        if peer is None:
            self._lost(sender, effect.peer, 2 * self._peer_latency_ns, "connection refused")
            return
        sender.peers[peer.engine_id] = None
        peer.peers[sender.engine_id] = None
        message = FromPeer(sender.engine_id, effect.message)
        line = (sender.engine_id, peer.engine_id)
        severed = self._severed.get(line, 0)
        if self._known.get(line, 0) != severed:
            return  # sent on a connection that has broken, which the sender is yet to hear

        for delay_ns in self.fate(effect):
            self._events.after(
                self._peer_latency_ns + delay_ns,
                Kind.PEER,
                sender.number,
                self._hand_over,
                line,
                severed,
                peer,
                message,
            )

    def _hand_over(
        self, line: tuple[str, str], severed: int, peer: Node, message: FromPeer
    ) -> None:
        """What was sent before the connection's loss number `severed` + 1 arrives, if it can."""
        if self._severed.get(line, 0) == severed:
            peer.feed(line[1], message)

    def read(self, reader: Node, effect: Read, in_ns: int = 0) -> None:
        """Begin to copy blocks from a peer, in `in_ns`."""
        n_bytes = len(effect.pairs) * reader.block_bytes

        def answer(ok: bool, reason: str, checksums: tuple[int, ...]) -> WorkerMessage:
            return ReadDone(effect.request_id, ok, reason, n_bytes if ok else 0, checksums)

        source = self._nodes.get(effect.peer)
        if source is None:
            self._nobody(reader, answer(False, "connection refused", ()))
            return
        key = (reader.engine_id, effect.request_id, 0)
        moving = _Moving(key, reader, source, reader, effect.pairs, n_bytes, answer)
        self._move(moving, effect, in_ns)

    def write(self, writer: Node, effect: Write, n_layers: int, in_ns: int = 0) -> None:
        """Begin to copy blocks, or some layers of them, to a peer, in `in_ns`."""
        first, end = effect.layers
        n_bytes = len(effect.pairs) * writer.block_bytes * (end - first) // n_layers

        def answer(ok: bool, reason: str, checksums: tuple[int, ...]) -> WorkerMessage:
            return WriteDone(effect.request_id, effect.number, ok, reason, n_bytes if ok else 0)

        target = self._nodes.get(effect.peer)
        line = (writer.engine_id, effect.peer)
        if target is None or self._known.get(line, 0) != self._severed.get(line, 0):
            self._nobody(writer, answer(False, "connection refused", ()))
            return
        key = (writer.engine_id, effect.request_id, effect.number)
        moving = _Moving(key, writer, writer, target, effect.pairs, n_bytes, answer, effect.layers)
        self._move(moving, effect, in_ns)

    def _nobody(self, asker: Node, answer: WorkerMessage) -> None:
        self._events.after(
            2 * self._peer_latency_ns,
            Kind.RESULT,
            asker.number,
            asker.feed,
            asker.engine_id,
            answer,
        )

    def _move(self, moving: _Moving, effect: Read | Write, in_ns: int) -> None:
        self._moving[moving.key] = moving
        fate = self.fate(effect)
        moving.ruined = fate[1:]
        after, number = self._events.after, moving.asker.number
        begin_ns = in_ns + self._read_latency_ns
        if not fate:
            reason = "connection reset"
            after(begin_ns, Kind.RESULT, number, self._break, moving, 0, reason)
            return
        begin_ns += self.link.copies_ns(moving.n_bytes) + fate[0]
        after(begin_ns, Kind.RESULT, number, self._flow, moving)

    def cancel(self, asker: Node, effect: CancelRead | CancelWrite) -> None:
        """Stop copying; the asker is answered all the same, unless it was already."""
        found = [
            moving
            for (engine_id, request_id, _), moving in self._moving.items()
            if engine_id == asker.engine_id and request_id == effect.request_id
        ]
        for moving in found:
            for delay_ns in self.fate(effect)[:1]:
                self._break(moving, self._read_latency_ns + delay_ns, "cancelled")

    def fence(self, target: Node, effect: Fence) -> None:
        """Answer once nothing of a lost peer's can land: its writes have broken off by then.

        Whatever it writes before it knows that it was lost is turned away (see `write`).
        """
        peer = target.awaited_from(effect.request_id)
        for moving in list(self._moving.values()):
            if moving.target is target and moving.asker.engine_id == peer:
                self._break(moving, self._peer_latency_ns, "fenced")
        for moving in list(self._landing):
            if moving.target is target and moving.asker.engine_id == peer:
                self._landed(moving, "fenced")
        self._nobody(target, Fenced(effect.request_id))

    def _flow(self, moving: _Moving) -> None:
        if moving.over:
            return
        pair, origin = (moving.source.name, moving.target.name), moving.target.number
        n_bytes, copied = moving.n_bytes, lambda: self._copied(moving)
        if self._nics is not None:
            moving.lane = self._nics
            moving.number = self._nics.start(*pair, origin, n_bytes, copied)
            return
        lane = self._lanes.get(pair)
        if lane is None:
            # Reads and writes of one pair share a lane, so its events are the reader's.
            lane = self._lanes[pair] = Lane(self._events, self.link.wire_bytes_per_s, origin)
        moving.lane = lane
        moving.number = lane.start(n_bytes, copied)

    def _copied(self, moving: _Moving) -> None:
        if moving.over:  # broken off by another that ended in the same moment
            return
        moving.lane = None
        self._stop(moving)
        answer = moving.answer(True, "", moving.copy())
        moving.asker.feed(moving.asker.engine_id, answer)

    def _stop(self, moving: _Moving) -> None:
        moving.over = True
        del self._moving[moving.key]
        if moving.lane is not None:
            moving.lane.stop(moving.number)
            moving.lane = None

    def _break(self, moving: _Moving, after_ns: int, reason: str) -> None:
        if not moving.over:
            self._stop(moving)
            self._landing[moving] = None
            number, answer = moving.asker.number, self._landed
            self._events.after(after_ns, Kind.RESULT, number, answer, moving, reason)

    def _landed(self, moving: _Moving, reason: str) -> None:
        """What broke off has still written: blocks given away before now are ruined."""
        if moving not in self._landing:
            return  # its writer died, or it was fenced off, meanwhile
        del self._landing[moving]
        moving.copy()
        moving.asker.feed(moving.asker.engine_id, moving.answer(False, reason, ()))
