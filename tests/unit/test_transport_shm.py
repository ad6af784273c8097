"""Shared memory: what a segment's descriptor may have become, and how long pools stay mapped."""

from __future__ import annotations

import os
import resource
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from tests.unit.transport_support import Child, Side, two_sides, wait_until
from twofold.transport import pages, shm
from twofold.transport.memory import HEADER, HEADER_BYTES, MAGIC, VERSION, PoolMemory
from twofold.transport.segment import ShmSegment, format_segment, parse_segment

EPOCH = bytes(range(16))


def mapped_pools() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:twofold-kv" in line for line in maps)


def resident_kib() -> int:
    """KiB of all pools, ours and peers', that have pages in this process."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = "memfd:twofold-kv" in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def copy(own: Side, peer: Side, number: int, pairs: list[tuple[int, int]], writing: bool) -> None:
    if writing:
        own.transport.write(number, peer.segment, pairs, (0, 1), 1)
        assert own.completion(number).ok
    else:
        assert own.read(number, peer.segment, pairs).ok
    for source, target in pairs:
        a, b = (own, peer) if writing else (peer, own)
        assert a.block(source) == b.block(target)


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


def test_a_dead_peers_pool_is_let_go_of_amid_reads_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shm, "_SWEEP_S", 0.1)
    before = mapped_pools()
    with two_sides("shm") as (peer, own), Child("shm", 64, 1000) as child:
        assert own.read(1, child.segment, [(0, 0)]).ok
        child.kill()

        def let_go() -> bool:
            assert own.read(2, peer.segment, [(0, 0)]).ok
            return mapped_pools() == before + 3

        wait_until(let_go, "end of the dead peer's mapping")


def test_a_dead_peers_pool_is_let_go_of_before_all_of_it_is_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shm, "_SWEEP_S", 0.01)
    monkeypatch.setattr(pages, "SLICE_BYTES", 4096)
    before = mapped_pools()
    with closing(Side("shm", block_bytes=65536)) as own, Child("shm", 1024, 65536) as child:
        assert own.read(1, child.segment, [(0, 0)]).ok
        child.kill()
        # Mapping all of it would take 16,385 slices, a millisecond apart.
        wait_until(lambda: mapped_pools() == before + 1, "end of the mapping", 8.0)


LARGE = {"block_bytes": 64 * 1024, "n_blocks": 1024}  # several slices


@pytest.mark.parametrize("writing", [False, True])
def test_a_peers_pool_is_mapped_whole_soon_after_the_first_copy(writing: bool) -> None:
    with two_sides("shm", **LARGE) as (peer, own):
        before = resident_kib()
        copy(own, peer, 1, [(5, 7), (900, 8)], writing)
        size_kib = (HEADER_BYTES + peer.memory.n_bytes) // 1024
        wait_until(lambda: resident_kib() >= before + size_kib, "whole mapping", 30)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        copy(own, peer, 2, [(n, n) for n in range(800)], writing)
        # Of 12,800 pages.
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 400


@pytest.mark.parametrize("writing", [False, True])
def test_before_that_each_run_is_mapped_in_one_call_and_no_run_twice(
    monkeypatch: pytest.MonkeyPatch, writing: bool
) -> None:
    calls: list[tuple[int, int, int]] = []

    def noted(address: int, n_bytes: int, advice: int) -> int:
        calls.append((address, n_bytes, advice))
        return 0

    monkeypatch.setattr(pages, "_madvise", noted)
    monkeypatch.setattr(shm, "_PAUSE_S", 60.0)
    advice = 23 if writing else 22
    with two_sides("shm", **LARGE) as (peer, own):
        pairs = [(5, 105), (6, 106), (900, 300)]  # of the peer's and ours
        copy(own, peer, 1, [pair[::-1] for pair in pairs] if writing else pairs, writing)
        begin = calls[0][0]
        assert calls == [(begin, 2 * 65536, advice), (begin + 895 * 65536, 65536, advice)]
    calls.clear()
    monkeypatch.setattr(shm, "_PAUSE_S", 0.0)
    with two_sides("shm", **LARGE) as (peer, own):
        copy(own, peer, 1, [(5, 5)], writing)
        size = HEADER_BYTES + peer.memory.n_bytes
        wait_until(lambda: sum(n for _, n, _ in calls[1:]) == size, "whole mapping")
        copy(own, peer, 2, [(5, 5), (900, 900)], writing)
        assert sum(n for _, n, _ in calls[1:]) == size


def test_where_the_kernel_cannot_map_ahead_copies_are_as_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def refuse(_address: int, _n_bytes: int, advice: int) -> int:
        asked.append(advice)
        return -1

    monkeypatch.setattr(pages, "_madvise", refuse)
    with two_sides("shm") as (peer, own):
        for number, writing in enumerate((False, True, False, True)):
            copy(own, peer, number, [(3, 9)], writing)
    assert asked == [22, 23]  # once for each mapping, and never again


def test_mapping_ahead_lets_other_threads_run() -> None:
    memory = PoolMemory(256, 1024 * 1024, EPOCH)
    ready, stop = threading.Event(), threading.Event()
    turns = 0

    def count() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1
            ready.set()
            time.sleep(0)

    counter = threading.Thread(target=count)
    counter.start()
    ready.wait(10)
    before = turns
    cells = np.frombuffer(memory.buffer, np.uint8)
    assert pages.populate(int(cells.ctypes.data), cells.size, writable=True)
    during = turns - before
    stop.set()
    counter.join()
    del cells
    memory.close()
    assert during > 50
