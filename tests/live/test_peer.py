"""Control connections between workers: on demand, both ways, and every way they break."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from itertools import product
from typing import Any

import msgspec
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.live.peer import PeerLinks
from twofold.live.peer_frame import HEAD_BYTES, FrameError, pack_frame, take_frame
from twofold.live.peer_hello import Hello
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
)
from twofold.types import PROTOCOL_VERSION, KVLayout

HOST = "127.0.0.1"
LAYOUT = KVLayout(
    protocol=1,
    engine="native",
    model_digest="a",
    tokenizer_digest="b",
    dtype="float32",
    block_size=16,
    layers=2,
    kv_heads=1,
    head_dim=8,
    rope="",
)
CLAIM = Claim(1, 0, LAYOUT)


def grant(n_tokens: int) -> Grant:
    return Grant(
        request_id=1,
        generation=0,
        tokens=(70_000,) * n_tokens,
        blocks=(0,),
        checksums=(2**64 - 1,),
        segment="segment",
        n_cached=0,
        lease_left_ns=10**10,
    )


GRANT = grant(2)


class Worker:
    """One worker's links and what they have delivered."""

    def __init__(self, engine_id: str, **limits: Any) -> None:
        self.name = engine_id
        self.got: list[FromPeer | PeerLost] = []
        self.react: Callable[[FromPeer | PeerLost], None] = lambda event: None
        self.links = PeerLinks(engine_id, self._deliver, **limits)
        self.port = 0

    def _deliver(self, event: FromPeer | PeerLost) -> None:
        self.got.append(event)
        self.react(event)

    async def start(self, port: int = 0) -> Worker:
        self.port = await self.links.listen(HOST, port)
        return self

    def send(self, to: str, message: PeerMessage, port: int = 0) -> None:
        self.links.send(ToPeer(to, message, HOST if port else "", port))

    async def has(self, n: int, timeout_s: float = 5.0) -> list[FromPeer | PeerLost]:
        """All that was delivered, once it is `n` events."""
        deadline = time.monotonic() + timeout_s
        while len(self.got) < n:
            assert time.monotonic() < deadline, f"{self.name} got only {self.got}"
            await asyncio.sleep(0.001)
        return self.got


Test = Callable[[], Coroutine[Any, Any, None]]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Test], None]:
    def on(test: Test) -> None:
        factory = uvloop.new_event_loop if request.param == "uvloop" else None
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(test(), 30))

    return on


async def pair(**limits: Any) -> tuple[Worker, Worker]:
    return await Worker("P", **limits).start(), await Worker("D", **limits).start()


async def stop(*workers: Worker) -> None:
    await asyncio.gather(*(worker.links.close() for worker in workers))


async def settled(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def test_a_claim_connects_and_its_answer_comes_back_on_the_same_connection(run: Any) -> None:
    async def test() -> None:
        p, d = await pair()
        d.send("P", CLAIM, p.port)
        d.send("P", Heartbeat(((1, 0),)))
        assert await p.has(2) == [FromPeer("D", CLAIM), FromPeer("D", Heartbeat(((1, 0),)))]
        want: list[PeerMessage] = [GRANT, Refusal(2, 1, "stale"), Closed(1, 0, True)]
        for reply in want:
            p.send("D", reply)
        assert await d.has(3) == [FromPeer("P", each) for each in want]
        assert (len(p.links._open), len(d.links._open)) == (1, 1)
        await stop(p, d)
        assert (len(p.got), len(d.got)) == (2, 3)

    run(test)


def test_both_may_claim_from_each_other_at_the_same_time(run: Any) -> None:
    async def test() -> None:
        a, b = await pair()
        for number in range(50):
            a.send("D", Claim(number, 0, LAYOUT), b.port)
            b.send("P", Claim(number, 0, LAYOUT), a.port)
        await a.has(50)
        await b.has(50)
        for number in range(50):
            a.send("D", Closed(number, 0, True))
            b.send("P", Closed(number, 0, False))
        assert await a.has(100) == [
            *(FromPeer("D", Claim(number, 0, LAYOUT)) for number in range(50)),
            *(FromPeer("D", Closed(number, 0, False)) for number in range(50)),
        ]
        assert (await b.has(100))[-1] == FromPeer("P", Closed(49, 0, True))
        # When one of the two breaks, both do, and each side hears of it once.
        next(iter(a.links._out.values())).cut()
        for worker in (a, b):
            assert isinstance((await worker.has(101))[100], PeerLost)
            await settled(lambda worker=worker: not worker.links._open)  # type: ignore[misc]
        # Afterwards they find each other again.
        a.send("D", CLAIM, b.port)
        assert (await b.has(102))[101] == FromPeer("P", CLAIM)
        assert (len(a.got), len(b.got)) == (101, 102)
        await stop(a, b)

    run(test)


def test_a_restarted_peer_is_told_apart_and_its_other_links_are_left_alone(run: Any) -> None:
    async def test() -> None:
        p, d = await pair()
        d.send("P", CLAIM, p.port)
        await p.has(1)
        d.send("P-before", CLAIM, p.port)
        assert await d.has(1) == [PeerLost("P-before", "stale: restarted as P")]
        p.send("D", GRANT)
        assert (await d.has(2))[1] == FromPeer("P", GRANT)
        assert p.got == [FromPeer("D", CLAIM)]
        await stop(p, d)

    run(test)


def test_a_peer_that_restarts_on_its_port_is_lost_first(run: Any) -> None:
    async def test() -> None:
        p, d = await pair()
        d.send("P", CLAIM, p.port)
        await p.has(1)
        await p.links.close()
        assert isinstance((await d.has(1))[0], PeerLost)
        again = await Worker("P2").start(p.port)
        d.send("P", CLAIM, p.port)
        assert (await d.has(2))[1] == PeerLost("P", "stale: restarted as P2")
        d.send("P2", CLAIM, p.port)
        assert await again.has(1) == [FromPeer("D", CLAIM)]
        await stop(again, d)

    run(test)


def test_who_cannot_be_reached_is_lost_at_once_and_not_within_send(run: Any) -> None:
    async def test() -> None:
        free = socket.create_server((HOST, 0))
        port = free.getsockname()[1]
        free.close()
        d = Worker("D", connect_timeout_s=10.0)
        begin = time.monotonic()
        d.send("P", CLAIM, port)
        d.send("Q", CLAIM)
        d.send("R", GRANT)
        d.links.send(ToPeer("S", CLAIM, HOST, 2**40))
        assert d.got == []
        lost = {event.peer: event for event in await d.has(4) if isinstance(event, PeerLost)}
        assert time.monotonic() - begin < 2
        assert "cannot connect" in lost["P"].reason
        assert "no address given" in lost["Q"].reason
        assert "not connected" in lost["R"].reason
        assert sorted(lost) == ["P", "Q", "R", "S"]
        await stop(d)

    run(test)


def test_a_port_that_never_says_hello_is_given_up(run: Any) -> None:
    async def test() -> None:
        silent = socket.create_server((HOST, 0))
        d = Worker("D", connect_timeout_s=0.1)
        begin = time.monotonic()
        d.send("P", CLAIM, silent.getsockname()[1])
        (lost,) = await d.has(1)
        assert isinstance(lost, PeerLost)
        assert "no answer from" in lost.reason
        assert 0.09 < time.monotonic() - begin < 2
        silent.close()
        await stop(d)

    run(test)


def hello(**other: Any) -> bytes:
    fields = {"magic": "twofold-peer", "protocol": PROTOCOL_VERSION, "engine_id": "D"}
    return pack_frame(msgspec.msgpack.encode(Hello(**{"expect": "P", **fields, **other})))


async def sent(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(data)
    return reader, writer


async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 5)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


BAD_OPENINGS = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "huge": pack_frame(bytes(1 << 20))[:16],
    "rubbish": b"\xff" * 16,
    "no msgpack": pack_frame(b"\xc1"),
    "empty": pack_frame(b""),
    "no hello": pack_frame(msgspec.msgpack.encode(CLAIM)),
    "other magic": hello(magic="other"),
    "other protocol": hello(protocol=PROTOCOL_VERSION + 1),
    "no name": hello(engine_id=""),
    "long name": hello(engine_id="x" * 300),
    "nothing": b"",
    "half": hello()[:-1],
}


@pytest.mark.parametrize("name", BAD_OPENINGS)
def test_a_stranger_is_closed_and_harms_nobody(
    run: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        p, d = await pair(connect_timeout_s=0.2)
        d.send("P", CLAIM, p.port)
        await p.has(1)
        await closes(*await sent(p.port, BAD_OPENINGS[name]))
        p.send("D", GRANT)
        assert await d.has(1) == [FromPeer("P", GRANT)]
        assert p.got == [FromPeer("D", CLAIM)]
        await stop(p, d)

    run(test)
    assert "control connection" in caplog.text


BAD_MESSAGES = {
    "not msgpack": pack_frame(b"\xc1\xc1"),
    "truncated": pack_frame(msgspec.msgpack.encode(CLAIM)[:-2]),
    "other type": pack_frame(msgspec.msgpack.encode({"type": "Reboot"})),
    "wrong field": pack_frame(msgspec.msgpack.encode({"type": "Done", "request_id": "x"})),
    "wrong direction": pack_frame(msgspec.msgpack.encode(GRANT)),
    "second hello": hello(),
    "too long": pack_frame(bytes(64 * 1024 * 1024 + 1))[:16],
    "bad text": pack_frame(b"\x82\xa4type\xa4Done\xa1\xff\x00"),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_a_peer_that_sends_rubbish_is_lost_once(
    run: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        p = await Worker("P").start()
        good = pack_frame(msgspec.msgpack.encode(CLAIM))
        await closes(*await sent(p.port, hello() + good + BAD_MESSAGES[name] + good))
        first, lost = await p.has(2)
        assert first == FromPeer("D", CLAIM)
        assert isinstance(lost, PeerLost)
        assert lost.peer == "D"
        await settled(lambda: not p.links._open)
        assert len(p.got) == 2
        await stop(p)

    run(test)
    assert "control connection with D closed" in caplog.text


def test_no_bit_of_a_message_may_flip_on_the_way(run: Any) -> None:
    """A token of a Grant is part of the prompt: a damaged one is not to be believed."""

    async def test() -> None:
        good = pack_frame(msgspec.msgpack.encode(Done(300, 70_000, ok=True)))
        for place, bit in product(range(len(good)), (0, 7)):
            p = await Worker("P").start()
            bad = bytearray(good)
            bad[place] ^= 1 << bit
            # What follows fills a frame that claims to be longer than it is.
            reader, writer = await sent(p.port, hello() + bad + good * 8)
            writer.write_eof()
            await closes(reader, writer)
            events = await p.has(1)
            await settled(lambda at=p: not at.links._open)  # type: ignore[misc]
            assert all(isinstance(event, PeerLost) for event in events), (place, bit, events)
            await stop(p)

    run(test)


def test_frames_in_single_bytes_are_understood(run: Any) -> None:
    async def test() -> None:
        p = await Worker("P").start()
        reader, writer = await asyncio.open_connection(HOST, p.port)
        for byte in hello() + pack_frame(msgspec.msgpack.encode(CLAIM)):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        assert await p.has(1) == [FromPeer("D", CLAIM)]
        writer.close()
        await closes(reader, writer)
        await stop(p)

    run(test)


def test_a_peer_that_connects_again_is_lost_before_it_is_heard_anew(run: Any) -> None:
    async def test() -> None:
        p = await Worker("P").start()
        good = pack_frame(msgspec.msgpack.encode(CLAIM))
        old = await sent(p.port, hello() + good)
        await p.has(1)
        p.react = lambda event: p.send("D", GRANT) if isinstance(event, PeerLost) else None
        new = await sent(p.port, hello() + good)
        assert (await p.has(3))[1:] == [PeerLost("D", "reconnected"), FromPeer("D", CLAIM)]
        await closes(*old)
        p.send("D", GRANT)
        size = int.from_bytes((await new[0].readexactly(HEAD_BYTES))[:4], "big")
        assert b"Hello" in await new[0].readexactly(size)
        for _ in range(2):
            size = int.from_bytes((await new[0].readexactly(HEAD_BYTES))[:4], "big")
            assert msgspec.msgpack.decode(await new[0].readexactly(size), type=Grant) == GRANT
        assert len(p.got) == 3
        await stop(p)
        await closes(*new)

    run(test)


def test_a_peer_that_takes_nothing_in_is_lost_when_the_queue_is_full(run: Any) -> None:
    async def test() -> None:
        p = await Worker("P", max_queue_bytes=100_000).start()
        _, writer = await sent(p.port, hello() + pack_frame(msgspec.msgpack.encode(CLAIM)))
        await p.has(1)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        large = grant(10_000)
        for _ in range(2000):
            p.send("D", large)
        lost = (await p.has(2))[1]
        assert isinstance(lost, PeerLost)
        assert "send queue full" in lost.reason
        assert len(p.got) == 2
        writer.transport.abort()
        await stop(p)

    run(test)


def test_what_waits_for_a_connection_is_bounded_too(run: Any) -> None:
    async def test() -> None:
        silent = socket.create_server((HOST, 0))
        d = Worker("D", max_queue_bytes=1000, connect_timeout_s=5.0)
        for _ in range(50):
            d.send("P", CLAIM, silent.getsockname()[1])
        (lost,) = await d.has(1)
        assert isinstance(lost, PeerLost)
        assert "send queue full" in lost.reason
        await stop(d)
        assert len(d.got) == 1
        silent.close()

    run(test)


def test_a_message_too_long_for_a_frame_loses_the_peer_that_cannot_get_it(run: Any) -> None:
    async def test() -> None:
        p, d = await pair(max_frame_bytes=1000)
        d.send("P", CLAIM, p.port)
        await p.has(1)
        p.send("D", grant(1000))
        assert "too long for a frame" in str((await p.has(2))[1])
        assert isinstance((await d.has(1))[0], PeerLost)
        await stop(p, d)

    run(test)


def test_connections_beyond_the_limit_are_closed(run: Any) -> None:
    async def test() -> None:
        p = await Worker("P", max_connections=1).start()
        first = await sent(p.port, hello() + pack_frame(msgspec.msgpack.encode(CLAIM)))
        await p.has(1)
        await closes(*await sent(p.port, hello(engine_id="E")))
        assert p.got == [FromPeer("D", CLAIM)]
        await stop(p)
        await closes(*first)

    run(test)


CHILD = """
import asyncio, sys
from tests.live.test_peer import CLAIM, HOST, Worker

async def main():
    worker = await Worker("child").start()
    print(worker.port, flush=True)
    worker.send("own", CLAIM, int(sys.argv[1]))
    await asyncio.sleep(60)

asyncio.run(main())
"""


def start_child(port: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(port)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_killed_worker_is_lost_within_milliseconds(run: Any, role: str) -> None:
    async def test() -> None:
        own = await Worker("own").start()
        child = start_child(own.port)
        assert child.stdout is not None
        port = int(child.stdout.readline())
        await own.has(1, 10)
        if role == "prefill":
            own.send("child", CLAIM, port)
            await settled(lambda: all(link._greeted for link in own.links._out.values()))
        child.kill()
        child.wait(10)
        begin = time.monotonic()
        lost = (await own.has(2))[1]
        assert time.monotonic() - begin < 0.5
        assert isinstance(lost, PeerLost)
        child.stdout.close()
        await settled(lambda: not own.links._open)
        assert len(own.got) == 2
        await stop(own)

    run(test)


def test_close_sends_what_was_written_last_and_leaves_nothing(run: Any) -> None:
    async def use() -> None:
        p, d = await pair()
        d.send("P", CLAIM, p.port)
        await p.has(1)
        d.send("P", Done(1, 0, True))
        await d.links.close()
        assert (await p.has(2))[1] == FromPeer("D", Done(1, 0, True))
        d.send("P", CLAIM, p.port)
        await p.has(3)
        p.send("nobody", CLAIM, d.port)
        await stop(p)
        assert d.got == []

    async def test() -> None:
        await use()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(10):
            await use()
        await asyncio.sleep(0)
        assert len(os.listdir("/proc/self/fd")) == before
        assert len(asyncio.all_tasks()) <= 2

    run(test)


def test_a_silent_host_is_watched_for_by_the_kernel(run: Any) -> None:
    async def test() -> None:
        p, d = await pair(dead_after_s=4.0)
        d.send("P", CLAIM, p.port)
        await p.has(1)
        for worker in (p, d):
            (link,) = worker.links._open.values()
            assert link._transport is not None
            sock = link._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 4000
            idle = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            each = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
            probes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
            assert idle + each * probes == 4
        await stop(p, d)

    run(test)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=4), st.booleans())
def test_no_bytes_do_worse_than_losing_their_sender(parts: list[bytes], greet: bool) -> None:
    async def test() -> None:
        p = await Worker("P", connect_timeout_s=0.05).start()
        data = (hello() if greet else b"") + b"".join(map(pack_frame, parts))
        reader, writer = await sent(p.port, data)
        writer.write_eof()
        await closes(reader, writer)
        await settled(lambda: not p.links._open)
        allowed: tuple[type, ...] = (FromPeer, PeerLost)
        assert all(isinstance(event, allowed) for event in p.got)
        assert [isinstance(event, PeerLost) for event in p.got].count(True) == int(greet)
        await stop(p)

    with_timeout: Awaitable[None] = asyncio.wait_for(test(), 20)
    asyncio.run(_awaited(with_timeout))


async def _awaited(inner: Awaitable[None]) -> None:
    await inner


def test_frames_come_out_as_they_went_in() -> None:
    buffer = bytearray()
    for byte in pack_frame(b"one") + pack_frame(b"") + pack_frame(b"three")[:-1]:
        buffer.append(byte)
    assert [take_frame(buffer, 5) for _ in range(3)] == [b"one", b"", None]
    buffer += b"e"
    assert take_frame(buffer, 5) == b"three"
    assert not buffer


@pytest.mark.parametrize("bit", range(8 * (HEAD_BYTES + 3)))
def test_a_flipped_bit_anywhere_in_a_frame_is_seen_at_once(bit: int) -> None:
    """Also one that makes it longer: what comes next is not waited for."""
    data = bytearray(pack_frame(b"abc"))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError):
        take_frame(data, 64 * 1024 * 1024)
