"""The pool's memory, segment texts and checksums."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.transport_support import mapped_bytes
from twofold.transport import pages
from twofold.transport.checksum import checksums, combined
from twofold.transport.memory import HEADER_BYTES, PoolMemory
from twofold.transport.segment import (
    SegmentError,
    ShmSegment,
    TcpSegment,
    format_segment,
    parse_segment,
)

EPOCH = bytes(range(16))


def test_blocks_begin_after_the_header_and_can_be_written_through_arrays() -> None:
    memory = PoolMemory(3, 100, EPOCH)
    array = np.frombuffer(memory.buffer, np.uint8)
    array[:] = 7
    segment = parse_segment(memory.segment, ShmSegment)
    with open(f"/proc/{segment.pid}/fd/{segment.fd}", "rb") as file:
        file.seek(HEADER_BYTES)
        assert file.read() == b"\x07" * 300
    assert (segment.n_blocks, segment.block_bytes, segment.epoch) == (3, 100, EPOCH.hex())
    del array
    memory.close()


def test_close_leaves_arrays_usable_and_no_descriptor_once_they_are_gone() -> None:
    before = len(os.listdir("/proc/self/fd"))
    memory = PoolMemory(2, 100, EPOCH)
    array = np.frombuffer(memory.buffer, np.uint8)
    array[5] = 9
    path = "/proc/self/fd/" + str(parse_segment(memory.segment, ShmSegment).fd)
    memory.close()
    memory.close()
    assert not os.path.exists(path)
    assert len(memory.buffer) == 0
    assert array[5] == 9
    del array
    assert len(os.listdir("/proc/self/fd")) == before


def test_close_takes_the_epoch_from_those_who_have_it_mapped() -> None:
    memory = PoolMemory(2, 100, EPOCH)
    segment = parse_segment(memory.segment, ShmSegment)
    with (
        open(f"/proc/{segment.pid}/fd/{segment.fd}", "rb") as file,
        mmap.mmap(file.fileno(), HEADER_BYTES, prot=mmap.PROT_READ) as mapped,
    ):
        assert EPOCH in mapped[:64]
        memory.close()
        assert mapped[:64] == bytes(64)


def test_populate_gives_zeroed_memory_with_every_page_mapped_for_writing() -> None:
    memory = PoolMemory(64, 64 * 1024, EPOCH, populate=True)
    cells = np.frombuffer(memory.buffer, np.uint8)
    assert not cells.any()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    cells[:] = 1
    # Of 1,024 pages; numpy itself may need a few.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 100
    assert mapped_bytes(memory) == memory.n_bytes
    del cells
    memory.close()


def test_where_the_kernel_cannot_populate_pages_are_written_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages, "_madvise", lambda *_: -1)
    memory = PoolMemory(64, 64 * 1024, EPOCH, populate=True)
    cells = np.frombuffer(memory.buffer, np.uint8)
    assert mapped_bytes(memory) == memory.n_bytes
    del cells
    memory.close()


def test_too_little_memory_is_told_with_the_bytes_and_nothing_is_kept() -> None:
    before = os.listdir("/proc/self/fd")
    n_blocks, block_bytes = 2**20, 2**30
    need = HEADER_BYTES + n_blocks * block_bytes
    with pytest.raises(OSError, match=rf"needs {need} bytes of memory, and \d+ can be had"):
        PoolMemory(n_blocks, block_bytes, EPOCH, populate=True)
    assert os.listdir("/proc/self/fd") == before


def test_nothing_is_taken_where_all_cannot_be() -> None:
    fd = os.memfd_create("pool")
    with pytest.raises(OSError, match=f"needs {150 << 20} bytes of memory, and {149 << 20} can"):
        pages.take(fd, 150 << 20, lambda: 149 << 20)
    assert os.fstat(fd).st_size == 0
    os.close(fd)


def test_memory_that_others_take_meanwhile_is_missed_before_the_kernel_ends_someone() -> None:
    fd = os.memfd_create("pool")
    left = [200 << 20, 100 << 20, 10 << 20]
    with pytest.raises(OSError, match=f"needs {150 << 20} bytes of memory, and {138 << 20} can"):
        pages.take(fd, 150 << 20, lambda: left.pop(0))
    os.close(fd)


def test_a_refusal_by_the_kernel_is_told_with_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _first: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=f"needs {HEADER_BYTES + 400} bytes of memory, and 0 can"):
        PoolMemory(4, 100, EPOCH, populate=True)


def test_what_is_available_is_within_the_machines_memory() -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < pages.available_bytes() <= physical


@pytest.mark.parametrize(
    ("limit", "used", "inactive"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_a_containers_limit_counts(tmp_path: Path, limit: str, used: str, inactive: str) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text("1000000\n")
    (tmp_path / used).write_text("700000\n")
    (tmp_path / limit).with_name("memory.stat").write_text(f"anon 1\n{inactive} 100000\n")
    assert pages.available_bytes(tmp_path) == 400_000
    (tmp_path / limit).write_text("max\n")
    assert pages.available_bytes(tmp_path) > 1_000_000


@pytest.mark.parametrize(
    ("n_blocks", "block_bytes", "epoch", "named"),
    [
        (0, 10, EPOCH, "n_blocks"),
        (2**32, 10, EPOCH, "n_blocks"),
        (1, 0, EPOCH, "block_bytes"),
        (1, 10, b"short", "epoch"),
        (1, 10, bytes(16), "epoch"),
    ],
)
def test_bad_sizes_and_tokens_are_refused_by_name(
    n_blocks: int, block_bytes: int, epoch: bytes, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        PoolMemory(n_blocks, block_bytes, epoch)


def test_segments_come_back_as_they_went() -> None:
    tcp = TcpSegment(host="::1", port=9, epoch=EPOCH.hex(), n_blocks=1, block_bytes=2)
    assert parse_segment(format_segment(tcp), TcpSegment) == tcp


@given(st.one_of(st.text(max_size=600), st.binary(max_size=80).map(lambda b: b.decode("latin-1"))))
def test_no_text_does_worse_than_a_segment_error(text: str) -> None:
    with pytest.raises(SegmentError, match="malformed segment"):
        parse_segment(text, ShmSegment)


def test_checksums_are_xxh3_of_each_block_in_the_order_asked_for() -> None:
    data = os.urandom(400)
    parts = [data[i * 100 : (i + 1) * 100] for i in range(4)]
    want = tuple(xxhash.xxh3_64_intdigest(parts[i]) for i in (3, 0, 0))
    assert checksums(memoryview(data), [3, 0, 0], 100) == want
    assert combined(want) != combined(want[::-1])
    for outside in (4, -1):
        with pytest.raises(IndexError, match="outside"):
            checksums(memoryview(data), [outside], 100)


def test_hashing_lets_other_threads_run() -> None:
    # One digest long enough to outlast many turns of a thread that needs the interpreter.
    data = memoryview(bytes(256 * 1024 * 1024))
    turns = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1
            time.sleep(0)

    counter = threading.Thread(target=count)
    counter.start()
    while not turns:
        time.sleep(0.001)
    before = turns
    checksums(data, [0], len(data))
    during = turns - before
    stop.set()
    counter.join()
    assert during > 50
