"""Shared memory: what a segment's descriptor may have become, and how long pools stay mapped."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing

import pytest

from tests.unit.transport_support import Child, Side, two_sides, wait_until
from twofold.transport import shm
from twofold.transport.memory import HEADER, HEADER_BYTES, MAGIC, VERSION
from twofold.transport.segment import ShmSegment, format_segment, parse_segment

EPOCH = bytes(range(16))


def mapped_pools() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:twofold-kv" in line for line in maps)


def segment_of(fd: int) -> str:
    return format_segment(
        ShmSegment(pid=os.getpid(), fd=fd, epoch=EPOCH.hex(), n_blocks=4, block_bytes=1000)
    )


def test_a_descriptor_that_is_now_something_else_is_stale(tmp_path: os.PathLike[str]) -> None:
    fifo, _ = ends = os.pipe()
    device = os.open("/dev/zero", os.O_RDONLY)
    # The right size and header, but it could shrink while it is read.
    unsealed = os.memfd_create("other")
    os.write(unsealed, HEADER.pack(MAGIC, VERSION, 0, EPOCH, 4, 1000))
    os.ftruncate(unsealed, HEADER_BYTES + 4000)
    short = os.open(os.path.join(tmp_path, "file"), os.O_RDWR | os.O_CREAT)
    with closing(Side("shm")) as own:
        before = bytes(own.memory.buffer)
        for number, fd in enumerate((fifo, device, unsealed, short, 2**31 - 1)):
            done = own.read(number, segment_of(fd), [(0, 0)])
            assert not done.ok
            assert "stale segment" in done.reason
        assert own.memory.buffer == before
    for fd in (*ends, device, unsealed, short):
        os.close(fd)


def test_a_descriptor_taken_by_the_next_pool_is_stale() -> None:
    with closing(Side("shm")) as own:
        first = Side("shm")
        assert own.read(1, first.segment, [(0, 0)]).ok
        first.close()
        with closing(Side("shm")) as second:
            old, new = (parse_segment(side.segment, ShmSegment) for side in (first, second))
            assert (old.pid, old.fd) == (new.pid, new.fd)
            before = bytes(own.memory.buffer)
            assert "stale segment" in own.read(2, first.segment, [(0, 1)]).reason
            assert own.memory.buffer == before
            assert own.read(3, second.segment, [(0, 1)]).ok


def test_a_descriptor_that_changes_without_a_close_is_stale() -> None:
    # As when a process is killed and another gets its number: the old pool was never withdrawn.
    with ExitStack() as stack:
        own, first, second = (stack.enter_context(closing(Side("shm"))) for _ in range(3))
        assert own.read(1, first.segment, [(0, 0)]).ok
        number, other = (parse_segment(side.segment, ShmSegment).fd for side in (first, second))
        os.dup2(other, number, inheritable=False)
        assert "stale segment" in own.read(2, first.segment, [(0, 1)]).reason


def test_a_process_that_is_gone_is_stale() -> None:
    with closing(Side("shm")) as own, Child("shm", 64, 1000) as child:
        child.kill()
        done = own.read(1, child.segment, [(0, 0)])
        assert (done.ok, done.reason) == (
            False,
            "stale segment: the peer is gone or has closed its pool",
        )


def test_only_the_latest_pools_stay_mapped_and_none_after_close() -> None:
    before = mapped_pools()
    with ExitStack() as stack:
        own = stack.enter_context(closing(Side("shm", max_mappings=2)))
        peers = [stack.enter_context(closing(Side("shm", seed=i))) for i in range(4)]
        for number, peer in enumerate([*peers, *peers]):
            assert own.read(number, peer.segment, [(0, number)]).ok
            assert own.block(number) == peer.block(0)
        assert mapped_pools() == before + 5 + 2
        own.transport.close()
        assert mapped_pools() == before + 5


def test_a_dead_peers_pool_is_let_go_of_without_another_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shm, "_SWEEP_S", 0.01)
    before = mapped_pools()
    with two_sides("shm") as (peer, own), Child("shm", 64, 1000) as child:
        assert own.read(1, child.segment, [(0, 0)]).ok
        assert own.read(2, peer.segment, [(0, 0)]).ok
        assert mapped_pools() == before + 4
        child.kill()
        wait_until(lambda: mapped_pools() == before + 3, "end of the dead peer's mapping")
        assert own.read(3, peer.segment, [(0, 0)]).ok
