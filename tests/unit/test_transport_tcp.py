"""The TCP transport against peers that send rubbish, half of it, or nothing."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.transport_support import Side, two_sides, wait_until
from twofold.transport import wire
from twofold.transport.checksum import checksums, combined
from twofold.transport.segment import TcpSegment, format_segment, parse_segment
from twofold.transport.tcp import TcpTransport
from twofold.transport.wire import Range

EPOCH = bytes(range(1, 17))
BLOCK = 1000


# ------------------------------------------------------------------------ rubbish to the data port


def request(epoch: bytes, ranges: list[Range]) -> bytes:
    return wire.pack_request(epoch, 1, ranges, checksum=True)


def head(n_ranges: int, *, magic: bytes = b"2FRQ", version: int = 1, flags: int = 0) -> bytes:
    return struct.pack("<4sHHI16sQ", magic, version, flags, n_ranges, EPOCH, 1)


def connect(side: Side) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(side)), timeout=10)


def port_of(side: Side) -> int:
    return parse_segment(side.segment, TcpSegment).port


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nhost: a\r\n\r\n" + bytes(40),
        bytes(wire.REQUEST_BYTES),
        head(1, magic=b"2FRX"),
        head(1, version=9),
        head(1, flags=0x8000),
        head(0),
        head(2**32 - 1),
        head(wire.MAX_RANGES + 1),
    ],
)
def test_what_is_no_request_closes_that_connection_only(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        two_sides("tcp", timeout_s=60.0) as (peer, own),
        connect(peer) as good,
        connect(peer) as bad,
    ):
        bad.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            assert bad.recv(1) == b""
        good.sendall(request(peer.memory.epoch, [Range(2, 1)]))
        answer = receive(good, wire.ANSWER_BYTES + BLOCK)
        assert answer[wire.ANSWER_BYTES :] == peer.block(2)
        assert own.read(1, peer.segment, [(0, 0)]).ok
    assert "data connection closed" in caplog.text


@pytest.mark.parametrize(
    ("epoch", "ranges", "said"),
    [
        (EPOCH, [Range(0, 1)], "stale segment"),
        (b"", [Range(64, 1)], "outside its pool"),
        (b"", [Range(0, 65)], "outside its pool"),
        (b"", [Range(0, 0)], "outside its pool"),
        (b"", [Range(0, 1), Range(2**32 - 1, 2**32 - 1)], "outside its pool"),
    ],
)
def test_requests_for_what_is_not_there_are_refused(
    epoch: bytes, ranges: list[Range], said: str
) -> None:
    with closing(Side("tcp")) as peer, connect(peer) as sock:
        for _ in range(2):
            sock.sendall(request(epoch or peer.memory.epoch, ranges))
            answer = bytearray(receive(sock, wire.ANSWER_BYTES))
            with pytest.raises(wire.FrameError, match=said):
                wire.check_answer(answer, peer.memory.epoch, 1, ranges[0], BLOCK)


def test_a_range_too_long_for_one_frame_is_refused_but_a_long_block_is_not() -> None:
    n = wire.MAX_RANGE_BYTES // BLOCK
    assert wire.inside([Range(0, n)], 2**31, BLOCK)
    assert not wire.inside([Range(0, n + 1)], 2**31, BLOCK)
    assert wire.inside([Range(0, 1)], 2, wire.MAX_RANGE_BYTES * 4)


def test_half_a_request_is_given_up_after_the_timeout() -> None:
    with closing(Side("tcp", timeout_s=0.2)) as peer, connect(peer) as sock:
        sock.sendall(request(peer.memory.epoch, [Range(0, 1)])[:-3])
        begin = time.monotonic()
        assert sock.recv(1) == b""
        assert 0.1 < time.monotonic() - begin < 5


def test_a_peer_that_takes_nothing_in_is_given_up_after_the_timeout() -> None:
    with (
        closing(Side("tcp", timeout_s=0.2, n_blocks=24, block_bytes=1024 * 1024)) as peer,
        connect(peer) as sock,
    ):
        sock.sendall(request(peer.memory.epoch, [Range(i, 1) for i in range(24)]))
        listener = peer.transport.__dict__["_listener"]
        wait_until(lambda: len(listener._connections) == 1, "connection")
        wait_until(lambda: not listener._connections, "end of it", 5)


def test_connections_beyond_the_limit_are_closed_and_earlier_ones_work() -> None:
    with closing(Side("tcp", max_connections=1)) as peer, connect(peer) as first:
        first.sendall(request(peer.memory.epoch, [Range(0, 1)]))
        receive(first, wire.ANSWER_BYTES + BLOCK)
        with connect(peer) as second:
            assert second.recv(1) == b""
        first.sendall(request(peer.memory.epoch, [Range(1, 1)]))
        assert receive(first, wire.ANSWER_BYTES + BLOCK)[wire.ANSWER_BYTES :] == peer.block(1)


def receive(sock: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        part = sock.recv(n - len(data))
        assert part, f"closed after {len(data)} bytes of {n}"
        data += part
    return data


# ------------------------------------------------------------------------ rubbish from the peer


@contextlib.contextmanager
def fake_peer(answer: Callable[[socket.socket, int], None]) -> Iterator[str]:
    """A data port that takes requests for one block and calls `answer(connection, tag)`."""
    listener = socket.create_server(("127.0.0.1", 0))
    release = threading.Event()
    handlers = []

    def handle(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, AssertionError):
            data = bytearray(receive(sock, wire.REQUEST_BYTES + wire.RANGE_BYTES))
            tag = wire.unpack_request(data[: wire.REQUEST_BYTES]).tag
            answer(sock, tag)
            release.wait(10)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                handlers.append(threading.Thread(target=handle, args=(sock,)))
                handlers[-1].start()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    port = listener.getsockname()[1]
    try:
        yield format_segment(
            TcpSegment(
                host="127.0.0.1", port=port, epoch=EPOCH.hex(), n_blocks=64, block_bytes=BLOCK
            )
        )
    finally:
        release.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join(10)
        for each in handlers:
            each.join(10)


DATA = bytes(i % 251 for i in range(BLOCK))
SUM = combined(checksums(memoryview(DATA), [0], BLOCK))


def answered(tag: int, **other: int) -> bytes:
    """A right header for block 3, or one that differs in one field."""
    field = {"status": 0, "tag": tag, "first": 3, "n": 1, "n_bytes": BLOCK, "checksum": SUM}
    field.update(other)
    blocks = Range(field["first"], field["n"])
    return wire.pack_answer(
        field["status"], EPOCH, field["tag"], blocks, field["n_bytes"], field["checksum"]
    )


ANSWERS: dict[str, tuple[Callable[[int], bytes], str]] = {
    "not ours": (lambda tag: b"HTTP/1.1 200 OK\r\n\r\n" + bytes(100), "malformed answer"),
    "other tag": (lambda tag: answered(tag + 1) + DATA, "other blocks"),
    "other block": (lambda tag: answered(tag, first=4) + DATA, "other blocks"),
    "more blocks": (lambda tag: answered(tag, n=2) + DATA, "other blocks"),
    "longer": (lambda tag: answered(tag, n_bytes=2**63) + DATA, "other blocks"),
    "shorter": (lambda tag: answered(tag, n_bytes=0), "other blocks"),
    "unknown status": (lambda tag: answered(tag, status=77), "unknown status 77"),
    "other epoch": (
        lambda tag: answered(tag).replace(EPOCH, EPOCH[::-1]) + DATA,
        "stale segment",
    ),
    "changed bytes": (lambda tag: answered(tag) + DATA[:-1] + b"\0", "checksum differs"),
    "half a header": (lambda tag: answered(tag)[:20], "timed out"),
    "half a block": (lambda tag: answered(tag) + DATA[:-1], "timed out"),
    "nothing": (lambda tag: b"", "timed out"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_wrong_answer_fails_that_read_only(name: str) -> None:
    answer, said = ANSWERS[name]
    with (
        fake_peer(lambda sock, tag: sock.sendall(answer(tag))) as segment,
        closing(Side("tcp", seed=1)) as peer,
        closing(Side("tcp", seed=2, timeout_s=0.2)) as own,
    ):
        before = bytes(own.memory.buffer)
        own.transport.read(1, segment, [(3, 7)])
        assert own.read(2, peer.segment, [(0, 0)]).ok
        done = own.completion(1)
        assert not done.ok
        assert said in done.reason
        # Only the read's own block may have been written to.
        after = bytes(own.memory.buffer)
        assert after[BLOCK : 7 * BLOCK] == before[BLOCK : 7 * BLOCK]
        assert after[8 * BLOCK :] == before[8 * BLOCK :]


def test_the_right_answer_in_single_bytes_is_taken() -> None:
    def drip(sock: socket.socket, tag: int) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in answered(tag) + DATA:
            sock.sendall(bytes([byte]))

    with fake_peer(drip) as segment, closing(Side("tcp")) as own:
        done = own.read(1, segment, [(3, 7)])
        assert (done.ok, done.checksums) == (True, checksums(memoryview(DATA), [0], BLOCK))
        assert own.block(7) == DATA


def test_a_peer_that_closes_amid_its_answer_fails_the_read_at_once() -> None:
    def leave(sock: socket.socket, tag: int) -> None:
        sock.sendall(answered(tag) + DATA[:100])
        sock.shutdown(socket.SHUT_RDWR)

    with fake_peer(leave) as segment, closing(Side("tcp", timeout_s=30.0)) as own:
        done = own.read(1, segment, [(3, 7)])
        assert (done.ok, done.reason) == (False, "the peer closed the connection")


def test_a_silent_peer_delays_nobody_else() -> None:
    with (
        fake_peer(lambda sock, tag: None) as segment,
        closing(Side("tcp", seed=1)) as peer,
        closing(Side("tcp", seed=2, timeout_s=30.0)) as own,
    ):
        for number in range(20):
            own.transport.read(number, segment, [(3, number)])
        for number in range(20, 40):
            assert own.read(number, peer.segment, [(number, number)]).ok
        for number in range(20):
            own.transport.cancel(number)
        assert {own.completion(number).reason for number in range(20)} == {"cancelled"}


def test_a_port_without_a_listener_and_a_host_that_is_a_name() -> None:
    with closing(Side("tcp")) as own:
        free = socket.create_server(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        segment = format_segment(
            TcpSegment(
                host="127.0.0.1", port=port, epoch=EPOCH.hex(), n_blocks=64, block_bytes=BLOCK
            )
        )
        named = segment.replace("127.0.0.1", "localhost")
        assert "refused" in own.read(1, segment, [(0, 0)]).reason
        assert "not a numeric address" in own.read(2, named, [(0, 0)]).reason


def test_connections_are_used_again() -> None:
    with two_sides("tcp") as (peer, own):
        listener = peer.transport.__dict__["_listener"]
        for number in range(5):
            assert own.read(number, peer.segment, [(i, i) for i in range(8)]).ok
        assert len(listener._connections) == 2


@pytest.mark.parametrize(("n_blocks", "streams"), [(1, 1), (3, 1), (4, 2), (16, 4)])
def test_what_is_small_has_a_stream_for_itself(n_blocks: int, streams: int) -> None:
    with two_sides("tcp", streams=4, stream_bytes=3 * BLOCK) as (peer, own):
        listener = peer.transport.__dict__["_listener"]
        assert own.read(1, peer.segment, [(2 * i, i) for i in range(n_blocks)]).ok
        assert len(listener._connections) == streams


def test_over_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 loopback here")
    with closing(Side("tcp", host="::1", seed=1)) as peer, closing(Side("tcp")) as own:
        assert own.read(1, peer.segment, [(0, 0)]).ok


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="streams must be at least 1"):
        TcpTransport(lambda: None, streams=0)
    with pytest.raises(ValueError, match="advertise"):
        TcpTransport(lambda: None, host="0.0.0.0")


def test_peers_are_told_the_advertised_address() -> None:
    with (
        closing(Side("tcp", host="0.0.0.0", advertise="127.0.0.1", seed=1)) as peer,
        closing(Side("tcp")) as own,
    ):
        assert parse_segment(peer.segment, TcpSegment).host == "127.0.0.1"
        assert own.read(1, peer.segment, [(0, 0)]).ok


@given(st.binary(min_size=wire.REQUEST_BYTES, max_size=wire.REQUEST_BYTES))
def test_no_bytes_do_worse_than_a_frame_error(data: bytes) -> None:
    with pytest.raises(wire.FrameError):
        wire.unpack_request(bytearray(data))


@given(st.binary(min_size=wire.ANSWER_BYTES, max_size=wire.ANSWER_BYTES))
def test_no_answer_does_worse_than_a_frame_error(data: bytes) -> None:
    with pytest.raises(wire.FrameError):
        wire.check_answer(bytearray(data), EPOCH, 1, Range(0, 1), BLOCK)
