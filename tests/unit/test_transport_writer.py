"""The sending side of a write over TCP, event by event."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from twofold.transport import tcp_writer, wire
from twofold.transport.memory import PoolMemory
from twofold.transport.reactor import READ, WRITE
from twofold.transport.runs import Piece
from twofold.transport.tcp_connection import TURN_BYTES

SIZE = 1000
WINDOW = 5


class StillReactor:
    """Notes what is watched, and runs nothing by itself."""

    def __init__(self) -> None:
        self.events = 0

    def watch(self, owner: object, events: int) -> None:
        self.events = events

    def forget(self, owner: object) -> None:
        self.events = 0


def _take(sock: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        piece = sock.recv(n - len(data))
        assert piece, "closed"
        data += piece
    return data


class Writing:
    """One write under way from a sender to a peer that this test plays."""

    def __init__(self, sender: tcp_writer.Sender, peer: socket.socket, task: Any) -> None:
        self.sender = sender
        self.peer = peer
        self.task = task
        self.ends: list[str] = []

    def answer(self) -> None:
        """The peer says that all has landed, and the sender hears it."""
        nothing = wire.Range(0, 0)
        self.peer.sendall(wire.pack_answer(wire.OK, self.task.epoch, WINDOW, nothing, SIZE, 0))
        assert select.select([self.sender.sock], [], [], 5)[0], "the answer has not come"
        self.sender.ready(READ | WRITE)


@contextmanager
def writing(reactor: StillReactor, piece: Piece, block_bytes: int = SIZE) -> Iterator[Writing]:
    ends: list[str] = []
    still: Any = reactor
    task = tcp_writer.Outflow(WINDOW, b"e" * 16, [piece], ends.append)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        closing(PoolMemory(4, block_bytes, os.urandom(16))) as memory,
    ):
        host, port = server.getsockname()
        sender = tcp_writer.Sender(
            still, memory, host, port, timeout_s=5.0, idle_s=5.0, on_idle_end=lambda _: None
        )
        sender.start(task)
        peer, _ = server.accept()
        peer.settimeout(5)
        with closing(sender), closing(peer):
            made = Writing(sender, peer, task)
            made.ends = ends
            yield made


@pytest.mark.parametrize("turn_bytes", [1, TURN_BYTES])
def test_an_answer_may_come_right_after_the_last_byte(
    turn_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the last byte was the last of a turn, and no event has come since."""
    monkeypatch.setattr(tcp_writer, "TURN_BYTES", turn_bytes)
    reactor = StillReactor()
    with writing(reactor, Piece(1, 2, 1, 0, SIZE)) as made:
        made.sender.ready(WRITE)
        _take(made.peer, wire.REQUEST_BYTES + 2 * wire.RANGE_BYTES + SIZE)
        assert reactor.events == READ
        made.answer()
        assert made.ends == [""]


def test_an_answer_before_the_last_byte_ends_the_write() -> None:
    with writing(StillReactor(), Piece(1, 2, 1, 0, SIZE)) as made:
        made.answer()
        assert made.ends == ["the peer says that all has landed before it was sent"]


def test_what_the_kernel_does_not_take_goes_later() -> None:
    reactor = StillReactor()
    size = 8 * 1024 * 1024
    with writing(reactor, Piece(0, 0, 4, 0, 4 * size), size) as made:
        made.sender.ready(WRITE)
        assert reactor.events == READ | WRITE
