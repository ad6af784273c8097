"""The control channel between workers: handoff messages over TCP.

The decode side connects, on demand, and sends `Claim`, `Heartbeat` and `Done`; the answers come
back on that same connection. Two workers that claim from each other so have two connections, one
for each direction, and never ask which of them a message belongs to. They stand and fall
together: when either breaks, both are closed and the peer is lost, once, on both sides.

Messages are msgpack in the frames of `live.peer_frame`. Both sides begin with a `Hello`; nothing
else is looked at before it has matched.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Final, cast

import msgspec

from twofold.live.peer_frame import FrameError, pack_frame, take_frame
from twofold.live.peer_hello import HELLO_BYTES, Hello, decode_hello, hello_bytes, stranger
from twofold.messages import (
    Claim,
    Closed,
    Done,
    FromPeer,
    Grant,
    Heartbeat,
    PeerLost,
    PeerMessage,
    Refusal,
    ToPeer,
    Written,
)

_log = logging.getLogger("twofold.peer")

_TO_PREFILL: Final = msgspec.msgpack.Decoder(Claim | Heartbeat | Done)
_TO_DECODE: Final = msgspec.msgpack.Decoder(Grant | Written | Refusal | Closed)


class PeerLinks:
    """All control connections of one worker. Every call is made on one event loop.

    `deliver` gets each message as `FromPeer` and each loss as one `PeerLost`, never from within
    `send`. `connect_timeout_s` bounds connecting and the Hello together. `dead_after_s`: a peer
    whose host is silent for so long is lost. What a peer does not take in is kept up to
    `max_queue_bytes`; then it is lost too. `max_connections` bounds those made by peers.
    `on_met(peer, pid)` is called before the first message to a prefill worker leaves.
    """

    def __init__(
        self,
        engine_id: str,
        deliver: Callable[[FromPeer | PeerLost], None],
        *,
        connect_timeout_s: float = 0.5,
        dead_after_s: float = 5.0,
        max_frame_bytes: int = 64 * 1024 * 1024,
        max_queue_bytes: int = 64 * 1024 * 1024,
        max_connections: int = 256,
        on_met: Callable[[str, int], None] = lambda peer, pid: None,
    ) -> None:
        self.engine_id = engine_id
        self.connect_timeout_s = connect_timeout_s
        self.dead_after_s = dead_after_s
        self.max_frame_bytes = max_frame_bytes
        self.max_queue_bytes = max_queue_bytes
        self._deliver = deliver
        self._max_connections = max_connections
        self._on_met = on_met
        self._out: dict[str, _Link] = {}
        self._in: dict[str, _Link] = {}
        self._open: dict[int, _Link] = {}
        self._dialling: dict[asyncio.Task[None], None] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._server: asyncio.Server | None = None
        self._closed = False

    async def listen(self, host: str, port: int) -> int:
        """Accept peers at `host`:`port`; gives the bound port. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, host, port, backlog=128)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def send(self, effect: ToPeer) -> None:
        """Send a message, connecting first where needed. Never blocks, and never fails but by
        a `PeerLost` that is delivered soon after."""
        if self._closed:
            return
        peer = effect.peer
        # Losses come after the effects at hand have been carried out, not amid them.
        soon = asyncio.get_running_loop().call_soon
        if isinstance(effect.message, Grant | Written | Refusal | Closed):
            link = self._in.get(peer)
            if link is None:
                # Its decode side is gone, or has yet to come back: either way it cannot be told.
                soon(self._tell_lost, peer, "not connected")
                return
        else:
            link = self._out.get(peer)
            if link is None and not effect.host:
                soon(self._tell_lost, peer, "not connected, and no address given")
                return
            if link is None:
                link = self._connect(peer, effect.host, effect.port)
        try:
            link.write(self._encoder.encode(effect.message))
        except (OverflowError, BufferError) as error:
            soon(self.lose, link, str(error))

    async def close(self) -> None:
        """Close everything; nothing is delivered any more."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        dialling = list(self._dialling)
        for task in dialling:
            task.cancel()
        gone = [link.gone for link in self._open.values()]
        for link in list(self._open.values()):
            link.shut()
        await asyncio.gather(*dialling, return_exceptions=True)
        if gone:
            # What is written last goes out, if the peer takes it.
            _, stuck = await asyncio.wait(gone, timeout=0.2)
            for link in list(self._open.values()):
                link.cut()
            if stuck:
                await asyncio.wait(stuck, timeout=1.0)
        if self._server is not None:
            await self._server.wait_closed()

    # ------------------------------------------------------------------ called by the links

    def opened(self, link: _Link) -> bool:
        """Take note of a connection; False when there are too many."""
        if not link.outbound and len(self._open) >= self._max_connections:
            _log.warning("control port refused a connection: %d are open", len(self._open))
            return False
        if self._closed:
            return False
        self._open[id(link)] = link
        return True

    def ended(self, link: _Link) -> None:
        """A connection is closed, on whichever side's wish."""
        self._open.pop(id(link), None)

    def greeted(self, link: _Link, hello: Hello) -> str:
        """Check a peer's Hello; gives the reason if the connection cannot be used."""
        if reason := stranger(hello):
            return reason
        if link.outbound:
            if hello.engine_id != link.peer:
                return f"stale: restarted as {hello.engine_id}"
            self._on_met(hello.engine_id, hello.pid)
            return ""
        if hello.expect != self.engine_id:
            # Meant for another life of this worker. What we have with that peer is not touched.
            return f"{hello.engine_id} looks for {hello.expect}, which is gone"
        link.peer = hello.engine_id
        again = link.peer in self._in
        if again:
            self._detach(link.peer)
        self._in[link.peer] = link
        if again:
            # It has lost us without our seeing it: what was under way between us is void.
            self._tell_lost(link.peer, "reconnected")
        return ""

    def received(self, link: _Link, message: PeerMessage) -> None:
        """Pass a message on."""
        if not self._closed:
            self._deliver(FromPeer(link.peer, message))

    def lose(self, link: _Link, reason: str) -> None:
        """`link` cannot be used any more: its peer is lost, unless that was said before."""
        link.cut()
        peer = link.peer
        if self._out.get(peer) is link or self._in.get(peer) is link:
            self._detach(peer)
            self._tell_lost(peer, reason)

    # ------------------------------------------------------------------ own

    def _accept(self) -> _Link:
        return _Link(self, peer="", outbound=False)

    def _connect(self, peer: str, host: str, port: int) -> _Link:
        link = self._out[peer] = _Link(self, peer=peer, outbound=True)
        task = asyncio.get_running_loop().create_task(self._dial(link, host, port))
        self._dialling[task] = None
        task.add_done_callback(lambda done: self._dialling.pop(done, None))
        return link

    async def _dial(self, link: _Link, host: str, port: int) -> None:
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                await asyncio.get_running_loop().create_connection(lambda: link, host, port)
                await link.ready
        except TimeoutError:
            self.lose(link, f"no answer from {host}:{port} in {self.connect_timeout_s:g} s")
        except (OSError, OverflowError, UnicodeError) as error:
            self.lose(link, f"cannot connect to {host}:{port}: {error}")

    def _detach(self, peer: str) -> None:
        """Close both directions to `peer`."""
        for link in (self._out.pop(peer, None), self._in.pop(peer, None)):
            if link is not None:
                link.cut()

    def _tell_lost(self, peer: str, reason: str) -> None:
        if not self._closed:
            _log.info("peer %s lost: %s", peer, reason)
            self._deliver(PeerLost(peer, reason))


class _Link(asyncio.Protocol):
    """One connection. `outbound`: we made it, so we are the decode side on it."""

    def __init__(self, links: PeerLinks, *, peer: str, outbound: bool) -> None:
        self.peer = peer
        self.outbound = outbound
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        """Done when the connection can be used, or never will be."""
        self.gone: asyncio.Future[None] = loop.create_future()
        self._links = links
        self._transport: asyncio.Transport | None = None
        self._decoder = _TO_DECODE if outbound else _TO_PREFILL
        self._buffer = bytearray()
        self._early: list[bytes] = []
        self._early_bytes = 0
        self._greeted = False
        self._cut = False
        self._hello_timer: asyncio.TimerHandle | None = None

    def write(self, message: bytes) -> None:
        """Send one encoded message, or keep it until greeted.

        Raises OverflowError when it is too long for a frame and BufferError when too much waits.
        """
        if len(message) > self._links.max_frame_bytes:
            raise OverflowError(f"a message of {len(message)} bytes is too long for a frame")
        waiting = self._early_bytes
        if self._greeted and self._transport is not None:
            waiting = self._transport.get_write_buffer_size()
        if waiting + len(message) > self._links.max_queue_bytes:
            raise BufferError(f"send queue full: {waiting} bytes wait")
        if self._greeted:
            self._write_frame(message)
        else:
            self._early.append(message)
            self._early_bytes += len(message)

    def shut(self) -> None:
        """Close when what is written has gone out."""
        self._leave()
        if self._transport is not None:
            self._transport.close()

    def cut(self) -> None:
        """Close at once. May be called again."""
        self._leave()
        if self._transport is not None:
            self._transport.abort()

    def _leave(self) -> None:
        """Take in nothing more."""
        self._cut = True
        self._early.clear()
        self._buffer.clear()
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        if not self.ready.done():
            self.ready.set_result(None)

    # ------------------------------------------------------------------ called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not checked: uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        if self._cut or not self._links.opened(self):
            self.cut()
            return
        self._watch_over(transport.get_extra_info("socket"))
        if self.outbound:
            self._write_hello()
        else:
            later = asyncio.get_running_loop().call_later
            self._hello_timer = later(self._links.connect_timeout_s, self._refuse, "no hello came")

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while not self._cut:
            limit = self._links.max_frame_bytes if self._greeted else HELLO_BYTES
            try:
                message = take_frame(self._buffer, limit)
            except FrameError as error:
                self._refuse(str(error))
                return
            if message is None:
                return
            self._take(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._links.ended(self)
        self._links.lose(self, "connection closed" if exc is None else f"connection broke: {exc}")
        if not self.gone.done():
            self.gone.set_result(None)

    # ------------------------------------------------------------------ own

    def _take(self, frame: bytes) -> None:
        try:
            if self._greeted:
                message = self._decoder.decode(frame)
            else:
                hello = decode_hello(frame)
        except (msgspec.DecodeError, UnicodeError) as error:
            self._refuse(f"malformed message: {error}")
            return
        if self._greeted:
            self._links.received(self, message)
        else:
            self._greet(hello)

    def _greet(self, hello: Hello) -> None:
        reason = self._links.greeted(self, hello)
        if not self.outbound:
            # Also when we refuse, so that the peer learns who is here.
            self._write_hello()
        if reason and self.outbound:
            self._refuse(reason)
            return
        if reason:
            _log.warning("control connection refused: %s", reason)
            self.shut()
            return
        self._greeted = True
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        early, self._early = self._early, []
        for message in early:
            self._write_frame(message)
        if not self.ready.done():
            self.ready.set_result(None)

    def _refuse(self, reason: str) -> None:
        """Close for the peer's fault."""
        _log.warning("control connection with %s closed: %s", self.peer or "a stranger", reason)
        self._links.lose(self, reason)

    def _write_hello(self) -> None:
        expect = self.peer if self.outbound else ""
        self._write_frame(hello_bytes(self._links.engine_id, expect))

    def _write_frame(self, message: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack_frame(message))

    def _watch_over(self, sock: socket.socket) -> None:
        """Let the kernel find peers whose host went silent, sending or not."""
        seconds = max(1, round(self._links.dead_after_s))
        for level, option, value in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, seconds // 2)),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, seconds // 2)),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._links.dead_after_s * 1000)),
        ):
            with contextlib.suppress(OSError):
                sock.setsockopt(level, option, value)
