"""TCP: reads and writes a peer's blocks over several connections, and serves ours on a data port.

Both sides run on one background thread. The frames are in `wire`.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from twofold.transport.base import PIECE_BYTES, Completion, Ledger
from twofold.transport.memory import PoolMemory
from twofold.transport.reactor import Reactor
from twofold.transport.runs import cut, fault_in, merge, part, share_out
from twofold.transport.segment import SegmentError, TcpSegment, format_segment, parse_segment
from twofold.transport.tcp_client import Share, Stream
from twofold.transport.tcp_connection import Connection
from twofold.transport.tcp_server import Listener
from twofold.transport.tcp_writer import Outflow, Sender
from twofold.transport.windows import Windows
from twofold.transport.wire import MAX_RANGES
from twofold.types import ceil_div

_STREAM_BYTES: Final = 2 * 1024 * 1024
"""What is worth a stream of its own: each takes turns of both sides' threads."""
_ACTIVE_PER_PEER: Final = 4
"""Transfers from one peer, or to it, at a time. The rest wait: a dead peer delays only its own."""

_IDLE_S: Final = 20.0
"""How long an unused connection is kept by whoever made it; the server keeps it three times longer,
so that it is never closed just as a request is sent on it."""


class _Peer(NamedTuple):
    """One life of a peer, and which way bytes go."""

    host: str
    port: int
    epoch: str
    writes: bool


class _Transfer:
    """One read, or a write of bytes `span` of each block; waiting or under way."""

    def __init__(
        self,
        transfer_id: int,
        segment: TcpSegment,
        pairs: Sequence[tuple[int, int]],
        span: tuple[int, int] | None,
    ) -> None:
        self.transfer_id = transfer_id
        self.segment = segment
        self.epoch = bytes.fromhex(segment.epoch)
        self.peer = _Peer(segment.host, segment.port, segment.epoch, span is not None)
        self.pairs = pairs
        self.span = span
        self.streams: list[Connection[Any]] = []


class TcpTransport:
    """Transport between hosts. See `Transport` for the calls.

    `host` is the numeric address that the data port is bound to and, unless `advertise` names
    another, that peers are told; `port` 0 takes a free one. Up to `streams` connections share one
    transfer, one for every `stream_bytes`. A peer that is silent for `timeout_s` fails it.
    `max_transfers` bounds the transfers in flight, `max_connections` the peers' connections to the
    data port; `checksums` False leaves out the checksums of what is read, in frames and
    completions. Raises ValueError for no streams, and for a `host` that stands for every address
    when there is none to advertise.
    """

    def __init__(
        self,
        notify: Callable[[], None],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str = "",
        streams: int = 2,
        stream_bytes: int = _STREAM_BYTES,
        timeout_s: float = 5.0,
        max_transfers: int = 256,
        max_connections: int = 256,
        checksums: bool = True,
    ) -> None:
        if streams < 1:
            raise ValueError(f"streams must be at least 1, not {streams}")
        if host in ("", "0.0.0.0", "::") and not advertise:
            raise ValueError("a data port on every address needs one to advertise to peers")
        self._ledger = Ledger(notify, max_transfers)
        self._host = host
        self._port = port
        self._advertise = advertise
        self._n_streams = streams
        self._stream_bytes = stream_bytes
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._checksums = checksums
        self._reactor = Reactor("kv-tcp", tick_s=min(0.1, timeout_s / 4))
        self._closed = False
        self._memory: PoolMemory | None = None
        self._listener: Listener | None = None
        self._tags = itertools.count(1)
        self._active: dict[int, _Transfer] = {}
        self._waiting: dict[_Peer, deque[_Transfer]] = {}
        self._idle: dict[_Peer, list[Connection[Any]]] = {}
        self._windows = Windows()
        self._segment: TcpSegment | None = None

    def register(self, memory: PoolMemory) -> str:
        """See `Transport.register`. Binds the data port: raises OSError when that fails."""
        if self._memory is not None or self._closed:
            raise RuntimeError("memory is registered once, before close")
        listener = Listener(
            self._reactor,
            memory,
            self._windows,
            self._host,
            self._port,
            timeout_s=self._timeout_s,
            idle_s=3 * _IDLE_S,
            max_connections=self._max_connections,
        )
        self._memory = memory
        self._listener = listener
        self._reactor.start()
        self._reactor.call(listener.open)
        self._segment = TcpSegment(
            host=self._advertise or listener.address,
            port=listener.port,
            epoch=memory.epoch.hex(),
            n_blocks=memory.n_blocks,
            block_bytes=memory.block_bytes,
        )
        return format_segment(self._segment)

    def read(self, transfer_id: int, segment: str, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Transport.read`."""
        self._take(transfer_id, segment, tuple(pairs), None)

    def write(
        self,
        transfer_id: int,
        segment: str,
        pairs: Sequence[tuple[int, int]],
        layers: tuple[int, int],
        n_layers: int,
    ) -> None:
        """See `Transport.write`. Raises ValueError for layers that a block has not."""
        size = self._memory.block_bytes if self._memory is not None else n_layers
        self._take(transfer_id, segment, tuple(pairs), part(layers, n_layers, size))

    def _take(
        self,
        transfer_id: int,
        segment: str,
        pairs: tuple[tuple[int, int], ...],
        span: tuple[int, int] | None,
    ) -> None:
        reason = self._ledger.admit(transfer_id)
        if not reason and self._memory is None:
            reason = "no memory is registered"
        if reason:
            self._ledger.fail(transfer_id, reason)
        else:
            self._reactor.call(lambda: self._admit(transfer_id, segment, pairs, span))

    def open_window(self, blocks: Sequence[int]) -> str:
        """See `Transport.open_window`. Raises RuntimeError before `register`."""
        if self._segment is None:
            raise RuntimeError("no memory is registered")
        window = self._windows.open(blocks)
        return format_segment(msgspec.structs.replace(self._segment, window=window))

    def close_window(self, segment: str) -> bool:
        """See `Transport.close_window`: always certain. Raises SegmentError for other text."""
        self._windows.close(parse_segment(segment, TcpSegment).window)
        return True

    def poll(self) -> list[Completion]:
        """See `Transport.poll`."""
        return self._ledger.drain()

    def cancel(self, transfer_id: int) -> None:
        """See `Transport.cancel`."""
        if self._ledger.cancel(transfer_id):
            self._reactor.call(lambda: self._cancel(transfer_id))

    def close(self) -> None:
        """See `Transport.close`."""
        if not self._closed:
            self._closed = True
            self._ledger.close()
            self._reactor.stop(self._end_all)

    # ------------------------------------------------------------------ background thread

    def _admit(
        self,
        transfer_id: int,
        text: str,
        pairs: tuple[tuple[int, int], ...],
        span: tuple[int, int] | None,
    ) -> None:
        memory = self._memory
        assert memory is not None
        if self._ledger.cancelled(transfer_id):
            self._ledger.fail(transfer_id, "cancelled")
            return
        try:
            segment = parse_segment(text, TcpSegment)
        except SegmentError as error:
            self._ledger.fail(transfer_id, str(error))
            return
        size = memory.block_bytes
        reason = fault_in(pairs, segment.n_blocks, memory.n_blocks, writing=span is not None)
        if segment.block_bytes != size:
            reason = f"block size differs: {segment.block_bytes} there, {size} here"
        if reason:
            self._ledger.fail(transfer_id, reason)
            return
        transfer = _Transfer(transfer_id, segment, pairs, span)
        self._waiting.setdefault(transfer.peer, deque()).append(transfer)
        self._start_waiting(transfer.peer)

    def _start_waiting(self, peer: _Peer) -> None:
        """Start what waits for `peer`, as far as its share of connections allows."""
        waiting = self._waiting.get(peer)
        while waiting:
            if sum(each.peer == peer for each in self._active.values()) >= _ACTIVE_PER_PEER:
                return
            transfer = waiting.popleft()
            self._active[transfer.transfer_id] = transfer
            self._start(transfer)
        self._waiting.pop(peer, None)

    def _start(self, transfer: _Transfer) -> None:
        sums = [0] * len(transfer.pairs) if self._checksums and not transfer.span else None
        shares = self._shares(transfer)
        if any(len(share) > MAX_RANGES for share in shares):
            self._end(transfer, f"more than {MAX_RANGES} separate ranges of blocks per stream")
            return
        unfinished = len(shares)

        def ended(stream: Connection[Any], reason: str) -> None:
            nonlocal unfinished
            if reason:
                self._end(transfer, reason)
                return
            transfer.streams.remove(stream)
            self._keep(transfer.peer, stream)
            unfinished -= 1
            if not unfinished:
                self._end(transfer, "", tuple(sums or ()))

        if not shares:
            self._end(transfer, "")
        for share in shares:
            try:
                stream = self._stream(transfer.peer)
            except OSError as error:
                self._end(transfer, error.strerror or str(error))
                return
            transfer.streams.append(stream)
            on_end = functools.partial(ended, stream)
            if transfer.span:
                window = transfer.segment.window
                stream.start(Outflow(window, transfer.epoch, share, on_end))
            else:
                stream.start(Share(next(self._tags), transfer.epoch, share, sums, on_end))

    def _shares(self, transfer: _Transfer) -> list[list[Any]]:
        """What goes over each stream: runs of a read, pieces of a write."""
        memory, pairs = self._memory, transfer.pairs
        if not pairs:
            return []
        assert memory is not None
        first, end = transfer.span or (0, memory.block_bytes)
        streams = min(self._n_streams, ceil_div(len(pairs) * (end - first), self._stream_bytes))
        # Pieces small enough that the streams end at about the same time.
        fair = ceil_div(len(pairs), streams)
        most = max(1, min(fair, PIECE_BYTES // memory.block_bytes))
        if transfer.span:
            return share_out(cut(pairs, transfer.span, memory.block_bytes, most), streams)
        return share_out(merge(pairs, most), streams)

    def _end(self, transfer: _Transfer, reason: str, sums: tuple[int, ...] = ()) -> None:
        """Close what is still open for `transfer` and complete it."""
        for stream in transfer.streams:
            stream.close()
        transfer.streams.clear()
        self._active.pop(transfer.transfer_id, None)
        if reason:
            self._ledger.fail(transfer.transfer_id, reason)
        else:
            assert self._memory is not None
            first, end = transfer.span or (0, self._memory.block_bytes)
            n_bytes = len(transfer.pairs) * (end - first)
            self._ledger.finish(
                Completion(transfer.transfer_id, ok=True, n_bytes=n_bytes, checksums=sums)
            )
        # Not from here: a queue of reads that fail at once would nest as deep as it is long.
        self._reactor.call(lambda: self._start_waiting(transfer.peer))

    def _cancel(self, transfer_id: int) -> None:
        if transfer_id in self._active:
            self._end(self._active[transfer_id], "cancelled")
            return
        for waiting in self._waiting.values():
            for transfer in waiting:
                if transfer.transfer_id == transfer_id:
                    waiting.remove(transfer)
                    self._ledger.fail(transfer_id, "cancelled")
                    return

    def _stream(self, peer: _Peer) -> Connection[Any]:
        """A connection to `peer`, kept or new. Raises OSError."""
        idle = self._idle.get(peer)
        if idle:
            stream = idle.pop()
            if not idle:
                del self._idle[peer]
            return stream
        assert self._memory is not None
        kind: type[Connection[Any]] = Sender if peer.writes else Stream
        return kind(
            self._reactor,
            self._memory,
            peer.host,
            peer.port,
            timeout_s=self._timeout_s,
            idle_s=_IDLE_S,
            on_idle_end=lambda stream: self._drop_idle(peer, stream),
        )

    def _keep(self, peer: _Peer, stream: Connection[Any]) -> None:
        self._idle.setdefault(peer, []).append(stream)

    def _drop_idle(self, peer: _Peer, stream: Connection[Any]) -> None:
        idle = self._idle.get(peer, [])
        if stream in idle:
            idle.remove(stream)
        if not idle:
            self._idle.pop(peer, None)

    def _end_all(self) -> None:
        for transfer in list(self._active.values()):
            self._end(transfer, "transport closed")
        for waiting in self._waiting.values():
            for transfer in waiting:
                self._ledger.fail(transfer.transfer_id, "transport closed")
        self._waiting.clear()
        for idle in self._idle.values():
            for stream in idle:
                stream.close()
        self._idle.clear()
        if self._listener is not None:
            self._listener.close()
