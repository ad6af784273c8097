"""What every transport must hold, the same test for each."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.unit.transport_support import (
    KINDS,
    Child,
    Side,
    make_transport,
    two_sides,
    wait_until,
)
from twofold.transport import foreign_peer, shm, tcp_server
from twofold.transport.checksum import checksums
from twofold.transport.memory import PoolMemory

pytestmark = pytest.mark.parametrize("kind", KINDS)


class Gate:
    """Holds up every transfer after its first piece, on whichever side moves the bytes."""

    def __init__(self) -> None:
        self.pieces = 0
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> None:
        self.pieces += 1
        if self.pieces == 2:
            self.reached.set()
            assert self.open.wait(10)


@pytest.fixture
def gate(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    owner: Any = {"shm": shm, "tcp": tcp_server._Serving}.get(kind, foreign_peer)
    name = {"shm": "_copy_run", "tcp": "_prepare"}.get(kind, "_start")
    original = getattr(owner, name)

    def held(*args: Any) -> Any:
        gate()
        return original(*args)

    monkeypatch.setattr(owner, name, held)
    yield gate
    gate.open.set()


LARGE = {"n_blocks": 24, "block_bytes": 1024 * 1024}
"""Large enough that no transfer fits into the kernel's buffers."""


def test_many_transfers_at_once_land_where_they_belong(kind: str) -> None:
    rng = random.Random(5)
    with two_sides(kind, n_blocks=300, block_bytes=777) as (peer, own):
        want = [own.block(i) for i in range(300)]
        targets = rng.sample(range(300), 280)
        reads = []
        for number in range(40):
            part = targets[number * 7 : number * 7 + 7]
            first = rng.randrange(280)
            near = rng.random() < 0.5
            sources = [first + i if near else rng.randrange(300) for i in range(7)]
            pairs = list(zip(sources, sorted(part) if near else part, strict=True))
            reads.append((number, pairs))
            own.transport.read(number, peer.segment, pairs)
            for src, dst in pairs:
                want[dst] = peer.block(src)
        for number, pairs in reads:
            done = own.completion(number)
            assert (done.ok, done.reason, done.n_bytes) == (True, "", 7 * 777)
            sources = [src for src, _ in pairs]
            assert done.checksums == checksums(peer.memory.buffer, sources, 777)
        assert [own.block(i) for i in range(300)] == want


def test_both_directions_at_once(kind: str) -> None:
    with two_sides(kind, n_blocks=64) as (a, b):
        a.transport.read(1, b.segment, [(i, 32 + i) for i in range(32)])
        b.transport.read(1, a.segment, [(i, 32 + i) for i in range(32)])
        assert a.completion(1).ok
        assert b.completion(1).ok
        assert [a.block(32 + i) for i in range(32)] == [b.block(i) for i in range(32)]
        assert [b.block(32 + i) for i in range(32)] == [a.block(i) for i in range(32)]


def test_a_later_read_sees_what_the_peer_wrote_since(kind: str) -> None:
    with two_sides(kind) as (peer, own):
        assert own.read(1, peer.segment, [(0, 0)]).ok
        peer.memory.buffer[:5] = b"fresh"
        assert own.read(1, peer.segment, [(0, 0)]).ok
        assert own.block(0)[:5] == b"fresh"


def test_nothing_to_move_still_completes(kind: str) -> None:
    with two_sides(kind) as (peer, own):
        done = own.read(1, peer.segment, [])
        assert (done.ok, done.n_bytes, done.checksums) == (True, 0, ())


def test_without_checksums_the_bytes_are_the_same(kind: str) -> None:
    with closing(Side(kind, seed=1)) as peer, closing(Side(kind, checksums=False)) as own:
        done = own.read(1, peer.segment, [(3, 4), (4, 5)])
        assert (done.ok, done.checksums) == (True, ())
        assert own.block(4) + own.block(5) == peer.block(3) + peer.block(4)


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([(64, 0)], "peer block 64 is outside"),
        ([(0, 64)], "own block 64 is outside"),
        ([(-1, 0)], "peer block -1 is outside"),
        ([(0, 3), (1, 3)], "named twice"),
    ],
)
def test_pairs_that_make_no_sense_move_nothing(
    kind: str, pairs: list[tuple[int, int]], said: str
) -> None:
    with two_sides(kind) as (peer, own):
        before = bytes(own.memory.buffer)
        done = own.read(1, peer.segment, pairs)
        assert not done.ok
        assert said in done.reason
        assert own.memory.buffer == before


def test_pools_with_other_block_sizes_are_told_apart(kind: str) -> None:
    with closing(Side(kind, block_bytes=999)) as peer, closing(Side(kind)) as own:
        done = own.read(1, peer.segment, [(0, 0)])
        assert (done.ok, done.reason) == (False, "block size differs: 999 there, 1000 here")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "null",
        '{"type":"other"}',
        "x" * 4000,
        "\ud800",
        '{"type":"shm","pid":1}',
        '{"type":"tcp","host":"","port":0}',
        '{"type":"nixl","endpoint":"","base":0}',
    ],
)
def test_a_malformed_segment_fails_that_read_only(kind: str, text: str) -> None:
    with two_sides(kind) as (peer, own):
        done = own.read(1, text, [(0, 0)])
        assert not done.ok
        assert "malformed segment" in done.reason
        assert own.read(2, peer.segment, [(0, 0)]).ok


def test_the_other_transports_segment_is_malformed_here(kind: str) -> None:
    other = "shm" if kind == "tcp" else "tcp"
    with closing(Side(other)) as peer, closing(Side(kind)) as own:
        assert "malformed segment" in own.read(1, peer.segment, [(0, 0)]).reason


def test_another_epoch_is_stale_and_moves_nothing(kind: str) -> None:
    with two_sides(kind) as (peer, own):
        before = bytes(own.memory.buffer)
        assert own.read(1, peer.segment, []).ok
        stale = peer.segment.replace(peer.memory.epoch.hex(), "ab" * 16)
        done = own.read(2, stale, [(0, 0)])
        assert not done.ok
        assert "stale segment" in done.reason
        assert own.memory.buffer == before
        assert own.read(3, peer.segment, [(0, 0)]).ok


def test_a_peer_that_has_closed_fails_the_read(kind: str) -> None:
    with closing(Side(kind)) as own:
        peer = Side(kind)
        assert own.read(1, peer.segment, [(0, 0)]).ok
        peer.close()
        before = bytes(own.memory.buffer)
        done = own.read(2, peer.segment, [(1, 1)])
        assert not done.ok
        assert done.reason
        assert own.memory.buffer == before


def test_a_peer_that_closes_amid_a_copy_fails_the_read(
    kind: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else the peer may have sent all in the turns that it had begun when it was told to close.
    monkeypatch.setattr(tcp_server, "_TURN_BYTES", 1)
    with closing(Side(kind, **LARGE)) as own:
        peer = Side(kind, **LARGE)
        own.transport.read(1, peer.segment, [(i, i) for i in range(24)])
        assert gate.reached.wait(10)
        # As a process does when it ends in good order: its pool is withdrawn, whatever is read.
        closer = threading.Thread(target=peer.close)
        closer.start()
        if kind != "tcp":
            closer.join(10)
        else:
            reactor: Any = peer.transport.__dict__["_reactor"]
            wait_until(lambda: len(reactor._calls) > 0, "order to stop")
        gate.open.set()
        done = own.completion(1)
        closer.join(10)
        assert not done.ok
        assert done.reason


def test_cancel_amid_a_copy_completes_and_then_nothing_is_written(kind: str, gate: Gate) -> None:
    with two_sides(kind, **LARGE) as (peer, own):
        own.transport.read(1, peer.segment, [(i, i) for i in range(24)])
        assert gate.reached.wait(10)
        own.transport.cancel(1)
        own.transport.cancel(1)
        if kind != "tcp":
            gate.open.set()
        done = own.completion(1)
        assert (done.ok, done.reason, done.checksums) == (False, "cancelled", ())
        after = bytes(own.memory.buffer)
        assert after[-1024 * 1024 :] != peer.block(23)
        gate.open.set()
        assert own.read(2, peer.segment, [(0, 0)]).ok
        assert own.memory.buffer[1024 * 1024 :] == after[1024 * 1024 :]


def test_cancel_of_what_waits_or_is_unknown(kind: str, gate: Gate) -> None:
    with two_sides(kind, **LARGE) as (peer, own):
        for number in range(6):
            own.transport.read(number, peer.segment, [(i, i) for i in range(4 * number, 24)][:4])
        assert gate.reached.wait(10)
        own.transport.cancel(5)
        own.transport.cancel(77)
        gate.open.set()
        assert own.completion(5).reason == "cancelled"
        assert all(own.completion(number).ok for number in range(5))
        own.transport.cancel(3)
        assert own.read(3, peer.segment, [(0, 0)]).ok
        assert own.left_over() == {}


def test_a_full_queue_refuses_and_says_so(kind: str, gate: Gate) -> None:
    with (
        closing(Side(kind, seed=1, **LARGE)) as peer,
        closing(Side(kind, max_transfers=2, **LARGE)) as own,
    ):
        pairs = [(i, i) for i in range(24)]
        own.transport.read(1, peer.segment, pairs)
        assert gate.reached.wait(10)
        own.transport.read(2, peer.segment, [])
        if kind == "tcp":
            assert own.completion(2).ok
            own.transport.read(2, peer.segment, pairs)
        own.transport.read(3, peer.segment, [(0, 0)])
        done = own.completion(3)
        assert (done.ok, done.reason) == (False, "transfer queue full (2)")
        with pytest.raises(ValueError, match="still in flight"):
            own.transport.read(1, peer.segment, [])
        gate.open.set()
        assert own.completion(1).ok
        assert own.completion(2).ok


def test_close_with_transfers_in_flight_completes_them_all(kind: str, gate: Gate) -> None:
    with two_sides(kind, **LARGE) as (peer, own):
        for number in range(9):
            own.transport.read(number, peer.segment, [(number, 2 * number), (9, 2 * number + 1)])
        assert gate.reached.wait(10)
        if kind != "tcp":
            threading.Timer(0.05, gate.open.set).start()
        own.transport.close()
        own.transport.close()
        own.transport.read(99, peer.segment, [(0, 0)])
        done = {each.transfer_id: each for each in own.transport.poll()}
        assert sorted(done) == [*range(9), 99]
        assert done[8].reason == done[99].reason == "transport closed"
        assert all(each.ok or each.reason == "transport closed" for each in done.values())
        gate.open.set()


def test_reading_before_memory_is_registered(kind: str) -> None:
    transport = make_transport(kind)
    transport.read(1, "{}", [])
    (done,) = transport.poll()
    assert (done.ok, done.reason) == (False, "no memory is registered")
    transport.close()
    with (
        closing(PoolMemory(1, 1, bytes(15) + b"\1")) as memory,
        pytest.raises(RuntimeError, match="before close"),
    ):
        transport.register(memory)


def test_memory_is_registered_once(kind: str) -> None:
    with closing(Side(kind)) as own, pytest.raises(RuntimeError, match="registered once"):
        own.transport.register(own.memory)


def test_a_driver_that_cannot_be_notified_does_not_stop_the_transport(kind: str) -> None:
    calls = []

    def broken() -> None:
        calls.append(1)
        raise RuntimeError("Event loop is closed")

    own = PoolMemory(4, 100, os.urandom(16))
    with closing(Side(kind, block_bytes=100)) as peer, closing(own):
        transport = make_transport(kind, broken)
        transport.register(own)
        for number in range(3):
            transport.read(number, peer.segment, [(number, number)])
        wait_until(lambda: len(calls) == 3, "third completion")
        assert [each.ok for each in transport.poll()] == [True] * 3
        transport.close()


def begin_and_kill(own: Side, child: Child, gate: Gate | None) -> bool:
    """Kill `child` amid read 2 from it; False if the read was too fast for that."""
    own.memory.buffer[:] = bytes(own.memory.n_bytes)
    own.transport.read(2, child.segment, [(i, i) for i in range(own.memory.n_blocks)])
    if gate is not None:
        assert gate.reached.wait(10)
        child.kill()
        gate.open.set()
        return True
    while not any(own.memory.buffer[:64]):
        pass
    # Stopped first: what has landed by then tells whether the read was under way.
    child.process.send_signal(signal.SIGSTOP)
    amid = not any(own.memory.buffer[-64:])
    child.kill()
    return amid


def test_a_killed_peer_fails_its_reads_and_no_other(kind: str, gate: Gate) -> None:
    # The gate holds this process only, which over TCP is not the side that sends.
    if kind == "tcp":
        gate.open.set()
    large = {"n_blocks": 64 if kind == "tcp" else 8, "block_bytes": 1024 * 1024}
    with closing(Side(kind, seed=3, **large)) as peer, closing(Side(kind, **large)) as own:
        for _ in range(5):
            with Child(kind, **large) as child:
                amid = begin_and_kill(own, child, gate if kind != "tcp" else None)
                done = own.completion(2)
            if amid:
                break
        assert amid
        assert not done.ok
        assert done.reason
        assert own.read(3, peer.segment, [(0, 5)]).ok
        assert own.block(5) == peer.block(0)
        assert not own.read(4, child.segment, [(0, 0)]).ok


def test_nothing_is_left_behind(kind: str) -> None:
    def use() -> None:
        with two_sides(kind) as (peer, own):
            assert own.read(1, peer.segment, [(i, i) for i in range(64)]).ok
            assert not own.read(2, "{}", [(0, 0)]).ok
            assert not own.read(3, peer.segment.replace('id":', 'id":9'), [(0, 99)]).ok
            own.transport.read(4, peer.segment, [(i, i) for i in range(64)])

    use()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    named = sorted(os.listdir("/dev/shm"))
    for _ in range(10):
        use()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads
    assert sorted(os.listdir("/dev/shm")) == named
