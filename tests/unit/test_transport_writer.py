"""The sending side of a write over TCP, event by event."""

from __future__ import annotations

import os
import select
import socket
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


@pytest.mark.parametrize("turn_bytes", [1, TURN_BYTES])
def test_an_answer_may_come_right_after_the_last_byte(
    turn_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the last byte was the last of a turn, and no event has come since."""
    monkeypatch.setattr(tcp_writer, "TURN_BYTES", turn_bytes)
    memory = PoolMemory(4, SIZE, os.urandom(16))
    ends: list[str] = []
    task = tcp_writer.Outflow(WINDOW, b"e" * 16, [Piece(1, 2, 1, 0, SIZE)], False, ends.append)
    reactor: Any = StillReactor()
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = tcp_writer.Sender(
            reactor,
            memory,
            *server.getsockname(),
            timeout_s=5.0,
            idle_s=5.0,
            on_idle_end=lambda _: None,
        )
        sender.start(task)
        peer, _ = server.accept()
        with peer:
            peer.settimeout(5)
            sender.ready(WRITE)
            _take(peer, len(task.head()) + wire.PIECE_BYTES + SIZE)
            assert reactor.events == READ
            nothing = wire.Range(0, 0)
            peer.sendall(wire.pack_answer(wire.OK, task.epoch, WINDOW, nothing, SIZE, 0))
            select.select([sender.sock], [], [], 5)
            sender.ready(READ | WRITE)
            assert ends == [""]
            sender.close()
    memory.close()


def test_an_answer_before_the_last_byte_ends_the_write() -> None:
    memory = PoolMemory(4, SIZE, os.urandom(16))
    ends: list[str] = []
    task = tcp_writer.Outflow(WINDOW, b"e" * 16, [Piece(1, 2, 1, 0, SIZE)], False, ends.append)
    reactor: Any = StillReactor()
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = tcp_writer.Sender(
            reactor,
            memory,
            *server.getsockname(),
            timeout_s=5.0,
            idle_s=5.0,
            on_idle_end=lambda _: None,
        )
        sender.start(task)
        peer, _ = server.accept()
        with peer:
            nothing = wire.Range(0, 0)
            peer.sendall(wire.pack_answer(wire.OK, task.epoch, WINDOW, nothing, SIZE, 0))
            select.select([sender.sock], [], [], 5)
            sender.ready(READ | WRITE)
            assert ends == ["the peer says that all has landed before it was sent"]
    memory.close()


def test_what_the_kernel_does_not_take_goes_later() -> None:
    memory = PoolMemory(4, 8 * 1024 * 1024, os.urandom(16))
    piece = Piece(0, 0, 4, 0, memory.n_bytes)
    task = tcp_writer.Outflow(WINDOW, b"e" * 16, [piece], False, lambda _: None)
    reactor: Any = StillReactor()
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = tcp_writer.Sender(
            reactor,
            memory,
            *server.getsockname(),
            timeout_s=5.0,
            idle_s=5.0,
            on_idle_end=lambda _: None,
        )
        sender.start(task)
        peer, _ = server.accept()
        with peer:
            sender.ready(WRITE)
            assert reactor.events == READ | WRITE
            sender.close()
    memory.close()
