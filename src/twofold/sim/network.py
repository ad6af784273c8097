"""The simulated network: legs, handoff messages and reads, with their latencies and faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from twofold.messages import (
    CancelRead,
    FromPeer,
    LegFailed,
    PeerLost,
    Read,
    ReadDone,
    RouterMessage,
    ToPeer,
    WorkerMessage,
)
from twofold.sim.contents import Contents
from twofold.sim.events import Events, Kind
from twofold.sim.faults import AS_SENT, Fate, Faults
from twofold.sim.leg import Leg
from twofold.sim.link import Lane
from twofold.types import RequestId


class Node(Protocol):
    """A worker, as far as the network knows it. `engine_id` changes with each life."""

    name: str
    number: int
    engine_id: str
    contents: Contents | None
    peers: dict[str, None]

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block."""

    def feed(self, engine_id: str, message: WorkerMessage) -> None:
        """Handle `message`, unless the life it was meant for is over."""

    def hang_up(self, engine_id: str, leg: Leg) -> None:
        """The gateway's end of `leg` has gone."""


class _Reading:
    """A read under way; on a lane as transfer `number` once it is set up."""

    __slots__ = (
        "effect",
        "lane",
        "n_bytes",
        "number",
        "ours",
        "over",
        "reader",
        "source",
        "theirs",
    )

    def __init__(self, reader: Node, source: Node, effect: Read) -> None:
        self.reader = reader
        self.source = source
        self.effect = effect
        self.n_bytes = len(effect.pairs) * reader.block_bytes
        self.lane: Lane | None = None
        self.number = 0
        self.over = False
        self.ours = reader.contents
        self.theirs = source.contents  # of this life of the source, should it get another

    def copy(self) -> tuple[int, ...]:
        """Write the blocks as they are at the source now; returns their checksums."""
        if self.ours is None or self.theirs is None:
            return (0,) * len(self.effect.pairs)
        return self.ours.copy(self.theirs, self.effect.pairs)


class Network:
    """Carries what workers and gateway send each other. Latencies are one way, in ns.

    Reads of one pair of workers share `bytes_per_s` in their direction; each first takes
    `read_latency_ns`.
    """

    def __init__(
        self,
        events: Events,
        *,
        leg_latency_ns: int,
        peer_latency_ns: int,
        read_latency_ns: int,
        bytes_per_s: int,
        faults: Faults | None,
    ) -> None:
        self._events = events
        self.leg_latency_ns = leg_latency_ns
        self._peer_latency_ns = peer_latency_ns
        self._read_latency_ns = read_latency_ns
        self._bytes_per_s = bytes_per_s
        self._faults = faults
        self._n_fates = 0
        self._nodes: dict[str, Node] = {}
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._reads: dict[tuple[str, RequestId], _Reading] = {}
        self.deliver: Callable[[Leg, RouterMessage], None] = lambda leg, message: None

    def fate(self, message: object) -> Fate:
        """What becomes of `message`."""
        if self._faults is None:
            return AS_SENT
        self._n_fates += 1
        return self._faults.fate(self._n_fates, message)

    # -------------------------------------------------------------------- lives

    def join(self, node: Node) -> None:
        """`node` can be reached by its engine id."""
        self._nodes[node.engine_id] = node

    def leave(self, node: Node) -> None:
        """`node` was killed: its reads stop, those from it break, its peers notice."""
        del self._nodes[node.engine_id]
        for reading in list(self._reads.values()):
            if reading.reader is node:
                self._stop(reading)
            elif reading.source is node:
                self._break(reading, self._peer_latency_ns, "connection lost")
        for engine_id in node.peers:
            peer = self._nodes.get(engine_id)
            if peer is not None:
                peer.peers.pop(node.engine_id, None)
                self._lost(peer, node.engine_id, self._peer_latency_ns, "connection lost")

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
        for delay_ns in self.fate(effect):
            self._events.after(
                self._peer_latency_ns + delay_ns,
                Kind.PEER,
                sender.number,
                peer.feed,
                peer.engine_id,
                message,
            )

    def read(self, reader: Node, effect: Read) -> None:
        """Begin to copy blocks."""
        source = self._nodes.get(effect.peer)
        if source is None:
            answer = ReadDone(effect.request_id, False, "connection refused")
            self._events.after(
                2 * self._peer_latency_ns,
                Kind.RESULT,
                reader.number,
                reader.feed,
                reader.engine_id,
                answer,
            )
            return
        reading = _Reading(reader, source, effect)
        self._reads[reader.engine_id, effect.request_id] = reading
        fate = self.fate(effect)
        if not fate:
            reason = "connection reset"
            self._events.after(
                self._read_latency_ns, Kind.RESULT, reader.number, self._break, reading, 0, reason
            )
            return
        self._events.after(
            self._read_latency_ns + fate[0], Kind.RESULT, reader.number, self._flow, reading
        )

    def cancel_read(self, reader: Node, effect: CancelRead) -> None:
        """Stop copying; the reader is answered all the same, unless it was already."""
        reading = self._reads.get((reader.engine_id, effect.request_id))
        if reading is not None:
            for delay_ns in self.fate(effect)[:1]:
                self._break(reading, self._read_latency_ns + delay_ns, "cancelled")

    def _flow(self, reading: _Reading) -> None:
        if reading.over:
            return
        pair = (reading.source.name, reading.reader.name)
        lane = self._lanes.get(pair)
        if lane is None:
            lane = self._lanes[pair] = Lane(self._events, self._bytes_per_s, reading.reader.number)
        reading.lane = lane
        reading.number = lane.start(reading.n_bytes, lambda: self._copied(reading))

    def _copied(self, reading: _Reading) -> None:
        if reading.over:  # broken off by another that ended in the same moment
            return
        reading.lane = None
        self._stop(reading)
        answer = ReadDone(reading.effect.request_id, True, "", reading.n_bytes, reading.copy())
        reading.reader.feed(reading.reader.engine_id, answer)

    def _stop(self, reading: _Reading) -> None:
        reading.over = True
        del self._reads[reading.reader.engine_id, reading.effect.request_id]
        if reading.lane is not None:
            reading.lane.stop(reading.number)
            reading.lane = None

    def _break(self, reading: _Reading, after_ns: int, reason: str) -> None:
        if not reading.over:
            self._stop(reading)
            self._events.after(
                after_ns, Kind.RESULT, reading.reader.number, self._landed, reading, reason
            )

    def _landed(self, reading: _Reading, reason: str) -> None:
        """A read that broke off has still written: blocks given away before now are ruined."""
        reading.copy()
        answer = ReadDone(reading.effect.request_id, False, reason)
        reading.reader.feed(reading.reader.engine_id, answer)
