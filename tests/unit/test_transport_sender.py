"""The writing side's connection by itself: its turns, and when an answer is too early."""

from __future__ import annotations

import os
import select
import socket
from contextlib import closing
from typing import Any

import pytest

from twofold.transport import tcp_writer, wire
from twofold.transport.memory import PoolMemory
from twofold.transport.reactor import READ, WRITE
from twofold.transport.runs import Piece
from twofold.transport.tcp_writer import Outflow, Sender

SIZE = 1000
EPOCH = b"e" * 16


class NoReactor:
    """Remembers what a connection wants to hear of."""

    wants = 0

    def watch(self, connection: object, events: int) -> None:
        self.wants = events

    def forget(self, connection: object) -> None:
        self.wants = 0


@pytest.mark.parametrize("n_turns", [1, 2])
def test_an_answer_is_early_only_before_the_last_byte(
    monkeypatch: pytest.MonkeyPatch, n_turns: int
) -> None:
    """A turn that ends with the last byte of all is followed by no other: nothing is left."""
    head = len(wire.pack_write(EPOCH, 1, 2, False)) + 2 * wire.PIECE_BYTES
    monkeypatch.setattr(tcp_writer, "TURN_BYTES", head + 2 * SIZE if n_turns == 1 else 1)
    monkeypatch.setattr(tcp_writer, "_AHEAD_VIEWS", 64 if n_turns == 1 else 3)
    ends: list[str] = []
    answer = wire.pack_answer(wire.OK, EPOCH, 1, wire.Range(0, 0), 2 * SIZE, 0)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        closing(PoolMemory(4, SIZE, os.urandom(16))) as memory,
    ):
        reactor: Any = NoReactor()
        host, port = server.getsockname()
        sender = Sender(
            reactor, memory, host, port, timeout_s=5, idle_s=5, on_idle_end=lambda _: None
        )
        peer, _ = server.accept()
        with closing(sender), closing(peer):
            pieces = [Piece(i, i, 1, 0, SIZE) for i in (0, 2)]
            sender.start(Outflow(1, EPOCH, pieces, False, ends.append))
            sender.ready(WRITE)
            got = b""
            sent = head + 2 * SIZE if n_turns == 1 else head - wire.PIECE_BYTES + SIZE
            while len(got) < sent:
                got += peer.recv(1 << 16)
            peer.sendall(answer)
            assert select.select([sender.sock], [], [], 10)[0], "the answer has not come"
            sender.ready(READ | WRITE)
    early = "the peer says that all has landed before it was sent"
    assert ends == ["" if n_turns == 1 else early]
