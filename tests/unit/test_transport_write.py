"""Writing into a peer's blocks: what every transport must hold, and what windows keep out."""

from __future__ import annotations

import random
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest

from tests.unit.transport_support import FOREIGN, WRITERS, Child, Side, two_sides, wait_until
from twofold.transport import foreign, shm, tcp_intake, tcp_writer, wire
from twofold.transport.base import Completion
from twofold.transport.runs import cut, part
from twofold.transport.segment import TcpSegment, parse_segment

N_LAYERS = 4
SIZE = 1000
WHOLE = (0, N_LAYERS)
Pairs = list[tuple[int, int]]


def write(
    own: Side, number: int, segment: str, pairs: Pairs, layers: tuple[int, int] = WHOLE
) -> Completion:
    own.transport.write(number, segment, pairs, layers, N_LAYERS)
    return own.completion(number)


def window(peer: Side, blocks: list[int]) -> str:
    return peer.transport.open_window(blocks)


class Gate:
    """Holds up every write after its first piece, on the side that puts the bytes in place."""

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
    owner: Any = shm if kind == "shm" else tcp_intake.Intake
    name = "_write_run" if kind == "shm" else "receive"
    monkeypatch.setattr(tcp_intake, "_VIEWS", 1)
    original = getattr(owner, name)

    def held(*args: Any) -> None:
        gate()
        original(*args)

    monkeypatch.setattr(owner, name, held)
    yield gate
    gate.open.set()


# ------------------------------------------------------------------------------- both


@pytest.mark.parametrize("kind", WRITERS)
def test_many_writes_at_once_land_where_they_belong(kind: str) -> None:
    rng = random.Random(7)
    with two_sides(kind, n_blocks=200, block_bytes=SIZE) as (peer, own):
        want = [peer.block(i) for i in range(200)]
        targets = rng.sample(range(200), 180)
        for number in range(20):
            theirs = targets[number * 9 : number * 9 + 9]
            if number % 2:
                theirs = sorted(theirs)
            first = rng.randrange(190)
            pairs = [(first + i, block) for i, block in enumerate(theirs)]
            begin = rng.randrange(N_LAYERS)
            layers = (begin, rng.randint(begin + 1, N_LAYERS))
            segment = window(peer, theirs)
            own.transport.write(number, segment, pairs, layers, N_LAYERS)
            a, b = part(layers, N_LAYERS, SIZE)
            for src, dst in pairs:
                want[dst] = want[dst][:a] + own.block(src)[a:b] + want[dst][b:]
        for number in range(20):
            done = own.completion(number)
            assert (done.ok, done.reason, done.checksums) == (True, "", ())
        assert [peer.block(i) for i in range(200)] == want


@pytest.mark.parametrize("kind", WRITERS)
def test_layers_of_a_block_make_up_the_whole(kind: str) -> None:
    with two_sides(kind, block_bytes=SIZE) as (peer, own):
        pairs = [(i, 40 + i) for i in range(8)]
        segment = window(peer, [dst for _, dst in pairs])
        moved = 0
        for number, layers in enumerate([(2, 3), (0, 2), (3, 4)]):
            done = write(own, number, segment, pairs, layers)
            assert done.ok
            moved += done.n_bytes
        assert moved == 8 * SIZE
        assert [peer.block(40 + i) for i in range(8)] == [own.block(i) for i in range(8)]


@pytest.mark.parametrize("kind", WRITERS)
def test_reads_and_writes_share_a_transport(kind: str) -> None:
    with two_sides(kind, block_bytes=SIZE) as (peer, own):
        own.transport.read(1, peer.segment, [(0, 10)])
        own.transport.write(-1, window(peer, [20]), [(30, 20)], WHOLE, N_LAYERS)
        assert own.completion(1).ok
        assert own.completion(-1).ok
        assert own.block(10) == peer.block(0)
        assert peer.block(20) == own.block(30)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([(64, 0)], "own block 64 is outside"),
        ([(0, 64)], "peer block 64 is outside"),
        ([(0, 1), (2, 1)], "a peer block is named twice"),
    ],
)
def test_blocks_that_are_not_there_are_refused(kind: str, pairs: Pairs, said: str) -> None:
    with two_sides(kind, block_bytes=SIZE) as (peer, own):
        before = bytes(peer.memory.buffer)
        done = write(own, 1, window(peer, [1]), pairs)
        assert not done.ok
        assert said in done.reason
        assert peer.memory.buffer == before
        assert write(own, 2, window(peer, []), []).ok


@pytest.mark.parametrize("kind", FOREIGN)
def test_engines_that_cannot_fence_refuse_to_write(kind: str) -> None:
    with two_sides(kind, block_bytes=SIZE) as (peer, own):
        before = bytes(peer.memory.buffer)
        segment = window(peer, [1])
        done = write(own, 1, segment, [(0, 1)])
        assert (done.ok, done.reason) == (False, foreign.NO_WRITES)
        assert peer.transport.close_window(segment)
        assert peer.memory.buffer == before


@pytest.mark.parametrize("kind", WRITERS + FOREIGN)
@pytest.mark.parametrize("layers", [(0, 0), (2, 1), (0, 5), (-1, 2)])
def test_layers_that_a_block_has_not_are_refused(kind: str, layers: tuple[int, int]) -> None:
    with (
        two_sides(kind, block_bytes=SIZE) as (peer, own),
        pytest.raises(ValueError, match="layers"),
    ):
        own.transport.write(1, window(peer, [1]), [(0, 1)], layers, N_LAYERS)


@pytest.mark.parametrize("kind", WRITERS)
def test_another_life_of_the_peer_is_not_written_to(kind: str) -> None:
    with closing(Side(kind, seed=2, block_bytes=SIZE)) as own:
        with closing(Side(kind, seed=1, block_bytes=SIZE)) as first:
            old = window(first, [3])
            assert write(own, 1, old, [(0, 3)]).ok
        with closing(Side(kind, seed=3, block_bytes=SIZE)) as second:
            before = bytes(second.memory.buffer)
            assert not write(own, 2, old, [(0, 3)]).ok
            if kind == "tcp":
                # The same port, as after a restart, and a window number that is open again.
                window(second, [3])
                port = parse_segment(second.segment, TcpSegment).port
                segment = parse_segment(old, TcpSegment)
                text = msgspec.json.encode(msgspec.structs.replace(segment, port=port)).decode()
                assert "stale segment" in write(own, 3, text, [(0, 3)]).reason
            assert second.memory.buffer == before


@pytest.mark.parametrize("kind", WRITERS)
def test_a_killed_peer_fails_its_writes_and_no_other(kind: str) -> None:
    sizes = {"n_blocks": 8, "block_bytes": 1 << 20}
    with closing(Side(kind, seed=3, **sizes)) as peer, closing(Side(kind, **sizes)) as own:
        with Child(kind, **sizes) as child:
            child.kill()
            done = write(own, 1, child.segment, [(i, i) for i in range(8)])
        assert not done.ok
        assert done.reason
        assert write(own, 2, window(peer, [5]), [(0, 5)]).ok
        assert peer.block(5) == own.block(0)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_cancelled_write_completes_and_lands_no_more_once_its_window_is_closed(
    kind: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Word of the cancel may be heard after one more turn of each stream, but not after many.
    monkeypatch.setattr(tcp_writer, "TURN_BYTES", 1 << 20)
    n = 24
    with two_sides(kind, n_blocks=2 * n, block_bytes=1 << 20) as (peer, own):
        before = [peer.block(i) for i in range(2 * n)]
        segment = window(peer, list(range(n)))
        own.transport.write(1, segment, [(i, i) for i in range(n)], WHOLE, N_LAYERS)
        assert gate.reached.wait(10)
        own.transport.cancel(1)
        gate.open.set()
        done = own.completion(1)
        assert (done.ok, done.reason) == (False, "cancelled")
        certain = peer.transport.close_window(segment)
        assert certain == (kind == "tcp")
        landed = [peer.block(i) for i in range(2 * n)]
        # Not compared in the assertions: pytest would look for hours at how a MiB differs.
        beyond, last = landed[n:] == before[n:], landed[n - 1] == before[n - 1]
        assert beyond
        assert last, "nothing was cancelled"
        assert write(own, 2, window(peer, [n]), [(0, n)]).ok
        later = [peer.block(i) for i in range(n)] == landed[:n]
        assert later


@pytest.mark.parametrize("kind", WRITERS)
def test_closing_fails_what_is_in_flight(kind: str, gate: Gate) -> None:
    with two_sides(kind, n_blocks=24, block_bytes=1 << 20) as (peer, own):
        segment = window(peer, list(range(24)))
        own.transport.write(1, segment, [(i, i) for i in range(24)], WHOLE, N_LAYERS)
        assert gate.reached.wait(10)
        closer = threading.Thread(target=own.transport.close)
        closer.start()
        gate.open.set()
        closer.join(10)
        done = own.completion(1)
        assert not done.ok
        own.transport.write(2, segment, [(0, 0)], WHOLE, N_LAYERS)
        assert own.completion(2).reason == "transport closed"


def test_adjacent_whole_blocks_are_one_piece_and_parts_are_not() -> None:
    pairs = [(1, 5), (2, 6), (3, 7), (9, 8)]
    assert [(p.src, p.dst, p.n, p.n_bytes) for p in cut(pairs, (0, 10), 10, 99)] == [
        (1, 5, 3, 30),
        (9, 8, 1, 10),
    ]
    assert [(p.n, p.offset, p.n_bytes) for p in cut(pairs, (4, 10), 10, 99)] == [(1, 4, 6)] * 4


def test_an_answer_may_come_before_the_sender_has_seen_that_all_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send = tcp_writer.Sender._send

    def slow(self: Any, task: Any) -> None:
        send(self, task)
        if not self._out and not task.pieces:
            select.select([self.sock], [], [], 10)

    monkeypatch.setattr(tcp_writer, "TURN_BYTES", 1)
    monkeypatch.setattr(tcp_writer.Sender, "_send", slow)
    with two_sides("tcp", block_bytes=SIZE) as (peer, own):
        assert write(own, 1, window(peer, [1, 2]), [(0, 1), (3, 2)]).ok
        assert [peer.block(1), peer.block(2)] == [own.block(0), own.block(3)]


# ------------------------------------------------------------------------------- windows


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    with two_sides("tcp", block_bytes=SIZE) as (peer, own):
        yield peer, own


def test_nothing_lands_without_a_window(sides: tuple[Side, Side]) -> None:
    peer, own = sides
    before = bytes(peer.memory.buffer)
    open_one = window(peer, [5, 6])
    for number, (segment, pairs) in enumerate(
        [(peer.segment, [(0, 5)]), (open_one, [(0, 7)]), (open_one, [(0, 6), (1, 7)])]
    ):
        done = write(own, number, segment, pairs)
        assert "does not let these blocks be written" in done.reason
    assert peer.block(7) == before[7 * SIZE : 8 * SIZE]
    assert write(own, 9, open_one, [(0, 5)]).ok
    peer.transport.close_window(open_one)
    after = bytes(peer.memory.buffer)
    assert "not any more" in write(own, 10, open_one, [(1, 5)]).reason
    assert peer.memory.buffer == after
    peer.transport.close_window(open_one)  # harmless


def test_a_range_is_in_the_window_with_all_of_its_blocks(sides: tuple[Side, Side]) -> None:
    peer, _ = sides
    before = bytes(peer.memory.buffer)
    segment = parse_segment(window(peer, [5]), TcpSegment)
    epoch = bytes.fromhex(segment.epoch)
    with socket.create_connection((segment.host, segment.port)) as raw:
        raw.settimeout(10)
        raw.sendall(wire.pack_write(epoch, segment.window, [wire.Range(5, 2)], (0, SIZE)))
        answer = bytearray(raw.recv(wire.ANSWER_BYTES))
        with pytest.raises(wire.FrameError, match="does not let these blocks be written"):
            wire.check_answer(answer, epoch, segment.window, wire.Range(0, 0), 2 * SIZE)
    assert peer.memory.buffer == before


@pytest.mark.parametrize("layers", [WHOLE, (0, 1)])
def test_one_stream_takes_neighbours_and_small_parts(layers: tuple[int, int]) -> None:
    """The bytes that are written count, not those of the blocks."""
    part = SIZE * (layers[1] - layers[0]) // N_LAYERS
    with two_sides("tcp", block_bytes=SIZE, streams=4, stream_bytes=4 * part) as (peer, own):
        pairs = [(1, 5), (2, 6), (3, 7), (9, 1)]
        assert write(own, 1, window(peer, [1, 5, 6, 7]), pairs, layers).ok
        first, end = (SIZE * layer // N_LAYERS for layer in layers)
        for src, dst in pairs:
            assert peer.block(dst)[first:end] == own.block(src)[first:end]
        transport: Any = peer.transport
        assert len(transport._listener._connections) == 1


def test_a_late_frame_never_lands_in_blocks_of_the_next_window(
    sides: tuple[Side, Side],
) -> None:
    """A writer that stands still amid a block, until the block belongs to somebody else."""
    peer, own = sides
    segment = parse_segment(window(peer, [5]), TcpSegment)
    epoch = bytes.fromhex(segment.epoch)
    head = wire.pack_write(epoch, segment.window, [wire.Range(5, 1)], (0, SIZE))
    with socket.create_connection((segment.host, segment.port)) as slow:
        slow.sendall(head + b"a" * 100)
        wait_until(lambda: peer.block(5)[:100] == b"a" * 100, "first part")
        peer.transport.close_window(msgspec.json.encode(segment).decode())
        assert write(own, 1, window(peer, [5]), [(0, 5)]).ok
        slow.sendall(b"a" * 900)
        slow.settimeout(10)
        answer = bytearray(slow.recv(wire.ANSWER_BYTES))
        with pytest.raises(wire.FrameError, match="not any more"):
            wire.check_answer(
                answer, bytes.fromhex(segment.epoch), segment.window, wire.Range(0, 0), SIZE
            )
    assert peer.block(5) == own.block(0)


@pytest.mark.parametrize(
    ("ranges", "span"),
    [
        ([(64, 1)], (0, SIZE)),
        ([(1, 1), (64, 1)], (0, SIZE)),
        ([(0, 0)], (0, SIZE)),
        ([(0, 1)], (1, SIZE + 1)),
        ([(0, 1)], (3, 3)),
        ([(0, 1)], (4, 3)),
        ([(0, 1)], (0, 2 * SIZE)),
        ([(1, 1), (0, 2)], (0, SIZE - 1)),
        ([(63, 2)], (0, SIZE)),
        ([(2**32 - 1, 2**32 - 1)], (2**32 - 2, 2**32 - 1)),
    ],
)
def test_a_write_outside_the_pool_is_refused(
    sides: tuple[Side, Side], ranges: Pairs, span: tuple[int, int]
) -> None:
    peer, own = sides
    before = bytes(peer.memory.buffer)
    segment = parse_segment(window(peer, list(range(64))), TcpSegment)
    epoch = bytes.fromhex(segment.epoch)
    with socket.create_connection((segment.host, segment.port)) as raw:
        raw.settimeout(10)
        named = [wire.Range(*each) for each in ranges]
        raw.sendall(wire.pack_write(epoch, segment.window, named, span))
        answer = bytearray(raw.recv(wire.ANSWER_BYTES))
        with pytest.raises(wire.FrameError, match="outside its pool"):
            wire.check_answer(answer, epoch, segment.window, wire.Range(0, 0), SIZE)
        assert raw.recv(1) == b""
    assert peer.memory.buffer == before
    assert write(own, 1, window(peer, [1]), [(0, 1)]).ok


def test_a_write_lands_byte_by_byte(sides: tuple[Side, Side]) -> None:
    """However little comes at once, and whatever comes after it."""
    peer, _ = sides
    segment = parse_segment(window(peer, [3, 4, 6]), TcpSegment)
    epoch = bytes.fromhex(segment.epoch)
    named = [wire.Range(3, 1), wire.Range(6, 1), wire.Range(4, 1)]
    sent = wire.pack_write(epoch, segment.window, named, (10, 13)) + b"abcdefghi"
    with socket.create_connection((segment.host, segment.port)) as raw:
        raw.settimeout(10)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2):
            for byte in sent:
                raw.sendall(bytes([byte]))
            answer = bytearray(raw.recv(wire.ANSWER_BYTES))
            wire.check_answer(answer, epoch, segment.window, wire.Range(0, 0), 9)
    found = [peer.block(block)[10:13] for block in (3, 6, 4)]
    assert found == [b"abc", b"def", b"ghi"]


def test_a_write_of_several_requests_reuses_its_connections(sides: tuple[Side, Side]) -> None:
    peer, own = sides
    opened: list[int] = []
    transport: Any = peer.transport
    listener = transport._listener
    original = listener.ready

    def counted(events: int) -> None:
        opened.append(events)
        original(events)

    listener.ready = counted
    for number in range(20):
        assert write(own, number, window(peer, [5, 9]), [(0, 5), (1, 9)]).ok
    assert len(opened) <= 2
