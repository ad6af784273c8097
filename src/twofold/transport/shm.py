"""Shared memory: one copy between the peer's pool and ours, by a background thread.

That the peer still lives, and is still the same life, is checked before and after every copy:
a mapping outlives its process, and process ids and descriptors are used again.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import queue
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from twofold.transport.base import PIECE_BYTES, Completion, Ledger
from twofold.transport.checksum import checksums
from twofold.transport.memory import HEADER, HEADER_BYTES, MAGIC, VERSION, PoolMemory
from twofold.transport.pages import Pages
from twofold.transport.runs import Run, fault_in, merge, part
from twofold.transport.segment import SegmentError, ShmSegment, parse_segment

_Bytes = npt.NDArray[np.uint8]

_SWEEP_S: Final = 1.0
"""How often mappings of dead peers are looked for: each pins the memory of a whole pool."""

_HASHED_BYTES: Final = 256 * 1024
"""Most bytes of a piece that is hashed as well: with where it came from, it is still in the inner
caches then. 1 MiB is a tenth slower."""

_PAUSE_S: Final = 0.001
"""Between two slices of a pool that is being mapped: most of a core is left to others, among them
whoever waits for the copy that has just ended."""


class _Mapping:
    """A peer's pool, mapped for reading, or for writing too. Raises SegmentError when it is not
    what was granted."""

    def __init__(self, segment: ShmSegment, writable: bool) -> None:
        self.segment = segment
        self._path = f"/proc/{segment.pid}/fd/{segment.fd}"
        size = HEADER_BYTES + segment.n_blocks * segment.block_bytes
        # Looked at before it is opened: a descriptor used again may be a device or a pipe.
        found = self._stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            raise SegmentError("stale segment: the descriptor is now another file")
        try:
            mode = os.O_RDWR if writable else os.O_RDONLY
            fd = os.open(self._path, mode | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise SegmentError(f"cannot open the peer's memory: {error.strerror}") from error
        try:
            found = os.fstat(fd)
            if found.st_size != size or not _sealed(fd):
                raise SegmentError("stale segment: the descriptor is now another file")
            self._identity = (found.st_dev, found.st_ino)
            prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=prot)
        except OSError as error:
            raise SegmentError(f"cannot map the peer's memory: {error.strerror}") from error
        finally:
            os.close(fd)
        self.blocks: _Bytes = np.frombuffer(self._map, np.uint8, offset=HEADER_BYTES)
        self.pages = Pages(int(self.blocks.ctypes.data) - HEADER_BYTES, size, writable=writable)
        self.check()

    def check(self) -> None:
        """Raise SegmentError unless the peer lives and its pool is the one that was granted."""
        found = self._stat()
        if (found.st_dev, found.st_ino) != self._identity:
            raise SegmentError("stale segment: the descriptor is now another file")
        magic, version, _, epoch, n_blocks, block_bytes = HEADER.unpack_from(self._map)
        if (magic, version) != (MAGIC, VERSION) or epoch.hex() != self.segment.epoch:
            raise SegmentError("stale segment: the peer's pool has another epoch")
        if (n_blocks, block_bytes) != (self.segment.n_blocks, self.segment.block_bytes):
            raise SegmentError("stale segment: the peer's pool has another size")

    def need(self, first: int, n: int) -> None:
        """Blocks `first` on are about to be copied: one call for their pages instead of faults."""
        size = self.segment.block_bytes
        self.pages.need(HEADER_BYTES + first * size, HEADER_BYTES + (first + n) * size)

    def close(self) -> None:
        del self.blocks
        self._map.close()

    def _stat(self) -> os.stat_result:
        try:
            return os.stat(self._path)
        except FileNotFoundError:
            raise SegmentError("stale segment: the peer is gone or has closed its pool") from None
        except OSError as error:
            raise SegmentError(f"cannot open the peer's memory: {error.strerror}") from error


def _sealed(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


class _Mappings:
    """The most recently used mappings, by segment text."""

    def __init__(self, limit: int, writable: bool) -> None:
        self._limit = limit
        self._writable = writable
        self._kept: OrderedDict[str, _Mapping] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, text: str) -> _Mapping:
        """The checked mapping of segment `text`; raises SegmentError."""
        mapping = self._kept.get(text)
        if mapping is None:
            mapping = self._kept[text] = _Mapping(parse_segment(text, ShmSegment), self._writable)
            while len(self._kept) > self._limit:
                self._kept.popitem(last=False)[1].close()
        else:
            mapping.check()
        self._kept.move_to_end(text)
        return mapping

    def drop(self, text: str) -> None:
        mapping = self._kept.pop(text, None)
        if mapping is not None:
            mapping.close()

    def sweep(self) -> None:
        """Let go of pools whose process is gone."""
        for text, mapping in list(self._kept.items()):
            try:
                mapping.check()
            except SegmentError:
                self.drop(text)

    def unmapped(self) -> Pages | None:
        """Pages of a peer's pool that are not all mapped yet."""
        return next((m.pages for m in self._kept.values() if not m.pages.whole), None)

    def clear(self) -> None:
        while self._kept:
            self._kept.popitem()[1].close()


class _Job(NamedTuple):
    """One read, or a write of bytes `span` of each block."""

    transfer_id: int
    text: str
    pairs: tuple[tuple[int, int], ...]
    span: tuple[int, int] | None


class ShmTransport:
    """Transport between workers of one user on one host. See `Transport` for the calls.

    `max_transfers` bounds the transfers in flight, `max_mappings` the peers' pools kept mapped,
    for reading and for writing each; `checksums` False leaves out the checksums of completions.
    """

    def __init__(
        self,
        notify: Callable[[], None],
        *,
        max_transfers: int = 256,
        max_mappings: int = 16,
        checksums: bool = True,
    ) -> None:
        self._ledger = Ledger(notify, max_transfers)
        self._read_from = _Mappings(max_mappings, writable=False)
        self._write_to = _Mappings(max_mappings, writable=True)
        self._checksums = checksums
        self._memory: PoolMemory | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closing = False
        self._sweep_at_s = 0.0
        self._thread = threading.Thread(target=self._work, name="kv-shm", daemon=True)

    def register(self, memory: PoolMemory) -> str:
        """See `Transport.register`. Raises RuntimeError the second time."""
        if self._memory is not None or self._closing:
            raise RuntimeError("memory is registered once, before close")
        self._memory = memory
        self._thread.start()
        return memory.segment

    def read(self, transfer_id: int, segment: str, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Transport.read`."""
        self._take(_Job(transfer_id, segment, tuple(pairs), None))

    def write(
        self,
        transfer_id: int,
        segment: str,
        pairs: Sequence[tuple[int, int]],
        layers: tuple[int, int],
        n_layers: int,
    ) -> None:
        """See `Transport.write`. Raises ValueError for layers that a block has not."""
        size = self._memory.block_bytes if self._memory is not None else n_layers
        self._take(_Job(transfer_id, segment, tuple(pairs), part(layers, n_layers, size)))

    def _take(self, job: _Job) -> None:
        reason = self._ledger.admit(job.transfer_id)
        if not reason and self._memory is None:
            reason = "no memory is registered"
        if reason:
            self._ledger.fail(job.transfer_id, reason)
        else:
            self._jobs.put(job)

    def open_window(self, blocks: Sequence[int]) -> str:
        """See `Transport.open_window`. A peer here has the whole pool in reach anyway."""
        if self._memory is None:
            raise RuntimeError("no memory is registered")
        return self._memory.segment

    def close_window(self, segment: str) -> bool:
        """See `Transport.close_window`: never certain."""
        return False

    def poll(self) -> list[Completion]:
        """See `Transport.poll`."""
        return self._ledger.drain()

    def cancel(self, transfer_id: int) -> None:
        """See `Transport.cancel`."""
        self._ledger.cancel(transfer_id)

    def close(self) -> None:
        """See `Transport.close`."""
        self._closing = True
        self._ledger.close()
        if self._thread.ident is not None:
            self._jobs.put(None)
            self._thread.join()

    # ------------------------------------------------------------------ background thread

    def _work(self) -> None:
        memory = self._memory
        assert memory is not None
        own: _Bytes = np.frombuffer(memory.buffer, np.uint8)
        while True:
            job = self._next_job()
            if job is None:
                self._read_from.clear()
                self._write_to.clear()
                return
            mappings = self._read_from if job.span is None else self._write_to
            try:
                self._ledger.finish(self._copy(job, mappings, memory, own))
            except SegmentError as error:
                mappings.drop(job.text)
                self._ledger.fail(job.transfer_id, str(error))
            except Exception as error:
                self._ledger.fail(job.transfer_id, f"copy failed: {error!r}")

    def _next_job(self) -> _Job | None:
        """Wait for a job, or for None, the end. What is left to map is mapped meanwhile."""
        while True:
            now_s = time.monotonic()
            if now_s >= self._sweep_at_s:
                self._sweep_at_s = now_s + _SWEEP_S
                self._read_from.sweep()
                self._write_to.sweep()
            left = self._read_from.unmapped() or self._write_to.unmapped()
            kept = len(self._read_from) + len(self._write_to)
            try:
                return self._jobs.get(timeout=_PAUSE_S if left else _SWEEP_S if kept else None)
            except queue.Empty:
                if left:
                    left.more()

    def _copy(self, job: _Job, mappings: _Mappings, memory: PoolMemory, own: _Bytes) -> Completion:
        size = memory.block_bytes
        transfer_id, text, pairs, span = job
        mapping = mappings.get(text)
        peer = mapping.segment
        reason = fault_in(pairs, peer.n_blocks, memory.n_blocks, writing=span is not None)
        if peer.block_bytes != size:
            reason = f"block size differs: {peer.block_bytes} there, {size} here"
        if reason:
            return Completion(transfer_id, ok=False, reason=reason)
        sums: list[int] = []
        hashing = self._checksums and span is None
        for run in merge(pairs, max(1, (_HASHED_BYTES if hashing else PIECE_BYTES) // size)):
            if self._closing or self._ledger.cancelled(transfer_id):
                reason = "transport closed" if self._closing else "cancelled"
                return Completion(transfer_id, ok=False, reason=reason)
            mapping.need(run.src if span is None else run.dst, run.n)
            if span is not None:
                _write_run(mapping.blocks, own, run, size, span)
                continue
            _copy_run(own, mapping.blocks, run, size)
            if hashing:
                sums += checksums(memory.buffer, range(run.dst, run.dst + run.n), size)
        mapping.check()
        first, end = span or (0, size)
        n_bytes = len(pairs) * (end - first)
        return Completion(transfer_id, ok=True, n_bytes=n_bytes, checksums=tuple(sums))


def _copy_run(own: _Bytes, peer: _Bytes, run: Run, size: int) -> None:
    """Copy one run. numpy lets go of the interpreter lock meanwhile; a memoryview would not."""
    target: np.ndarray[Any, np.dtype[np.uint8]] = own[run.dst * size : (run.dst + run.n) * size]
    np.copyto(target, peer[run.src * size : (run.src + run.n) * size])


def _write_run(peer: _Bytes, own: _Bytes, run: Run, size: int, span: tuple[int, int]) -> None:
    """Copy bytes `span` of each block of a run to the peer."""
    first, end = span
    source = own[run.src * size : (run.src + run.n) * size].reshape(run.n, size)
    target = peer[run.dst * size : (run.dst + run.n) * size].reshape(run.n, size)
    np.copyto(target[:, first:end], source[:, first:end])
