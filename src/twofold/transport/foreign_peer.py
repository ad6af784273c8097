"""One peer of a foreign transport: its link, and the thread that reads from it."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from twofold.transport.base import Completion
from twofold.transport.checksum import checksums
from twofold.transport.foreign_link import Engine, EngineError, Link
from twofold.transport.memory import HEADER, HEADER_BYTES, MAGIC, VERSION, PoolMemory
from twofold.transport.runs import Run, fault_in, merge
from twofold.transport.segment import EngineSegment, SegmentError

_PIECE_BYTES: Final = 4 * 1024 * 1024
"""Most bytes of one copy (or one block, if that is larger)."""

_PIECES: Final = 8
"""Copies from one peer under way at a time: as much as a cancel has to wait for."""

_POLL_S: Final = 50e-6


class Job(NamedTuple):
    """One read: pairs of (the peer's block, ours)."""

    transfer_id: int
    pairs: tuple[tuple[int, int], ...]


def _start(link: Link, own: int, peer: int, n_bytes: int) -> Any:
    return link.start(own, peer, n_bytes)


class Owner(Protocol):
    """The transport that a peer's thread works for."""

    engine: Engine
    timeout_s: float
    checksums: bool

    def stopped(self, transfer_id: int) -> str:
        """Why a read should go no further; empty when it should."""

    def end(self, peer: Peer, completion: Completion) -> None:
        """A read has ended."""


class Peer:
    """One life of a peer: a link, and a thread that carries out its reads one by one.

    A thread each, because engines have calls that wait for the peer.
    """

    def __init__(self, owner: Owner, segment: EngineSegment, memory: PoolMemory) -> None:
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.n_jobs = 0
        self._owner = owner
        self._segment = segment
        self._memory = memory
        self._base = address_of(memory)
        # The header lands here, never among the blocks.
        self._scratch = np.zeros(HEADER.size, np.uint8)
        self._link: Link | None = None
        self._under_way: deque[tuple[Run, Any]] = deque()
        self.thread = threading.Thread(target=self._work, name="kv-link", daemon=True)

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            self._owner.end(self, self._read(job))
        self._drop()

    def _read(self, job: Job) -> Completion:
        size, segment = self._memory.block_bytes, self._segment
        reason = fault_in(job.pairs, segment.n_blocks, self._memory.n_blocks)
        if segment.block_bytes != size:
            reason = f"block size differs: {segment.block_bytes} there, {size} here"
        reason = reason or self._owner.stopped(job.transfer_id)
        if reason:
            return Completion(job.transfer_id, ok=False, reason=reason)
        sums = [0] * len(job.pairs)
        try:
            self._check()
            reason = self._copy(job, sums)
            if not reason:
                self._check()
        except (EngineError, SegmentError) as error:
            reason = str(error)
        except Exception as error:
            reason = f"copy failed: {error!r}"
        # Only here, where no error and its frames hold on to a link any more.
        if reason and reason not in ("cancelled", "transport closed") and not self._is_at_rest():
            self._drop()
        if reason:
            return Completion(job.transfer_id, ok=False, reason=reason)
        found = tuple(sums) if self._owner.checksums else ()
        n_bytes = len(job.pairs) * size
        return Completion(job.transfer_id, ok=True, n_bytes=n_bytes, checksums=found)

    def _copy(self, job: Job, sums: list[int]) -> str:
        """Copy all blocks; why not all of them are copied, if so. Nothing is under way then."""
        size = self._memory.block_bytes
        for run in merge(job.pairs, max(1, _PIECE_BYTES // size)):
            self._settle(_PIECES - 1, sums)
            if stop := self._owner.stopped(job.transfer_id):
                # What has begun is let end: some engines do not bear its loss at the other side.
                self._settle(0, sums)
                return stop
            own = self._base + HEADER_BYTES + run.dst * size
            peer = self._segment.base + HEADER_BYTES + run.src * size
            self._under_way.append((run, _start(self._linked(), own, peer, run.n * size)))
        self._settle(0, sums)
        return ""

    def _settle(self, n: int, sums: list[int]) -> None:
        """Wait until at most `n` copies are under way, and hash those that have ended.

        When one has failed, all are waited for; raises EngineError then.
        """
        failed = ""
        until_s = time.monotonic() + self._owner.timeout_s
        while len(self._under_way) > (0 if failed else n):
            before = len(self._under_way)
            for _ in range(before):
                run, copy = self._under_way.popleft()
                try:
                    is_done = self._linked().is_done(copy)
                except EngineError as error:
                    failed = str(error)
                    continue
                if not is_done:
                    self._under_way.append((run, copy))
                elif self._owner.checksums:
                    numbers = range(run.dst, run.dst + run.n)
                    found = checksums(self._memory.buffer, numbers, self._memory.block_bytes)
                    sums[run.at : run.at + run.n] = found
            if len(self._under_way) < before:
                until_s = time.monotonic() + self._owner.timeout_s
            else:
                self._go_on(until_s)
        if failed:
            raise EngineError(failed)

    def _go_on(self, until_s: float) -> None:
        """Let a moment pass; raises EngineError when there is no point in waiting longer."""
        if time.monotonic() > until_s:
            raise EngineError(f"the peer has sent nothing for {self._owner.timeout_s:g} s")
        time.sleep(_POLL_S)

    # ------------------------------------------------------------------ the peer's life

    def _check(self) -> None:
        """Raise SegmentError unless the peer's pool is the one that was granted."""
        until_s = time.monotonic() + self._owner.timeout_s
        if self._link is None:
            self._link = self._open(until_s)
        else:
            copy = self._link.start(self._scratch.ctypes.data, self._segment.base, HEADER.size)
            while not self._link.is_done(copy):
                self._go_on(until_s)
        segment = self._segment
        magic, version, _, epoch, n_blocks, block_bytes = HEADER.unpack(self._scratch.tobytes())
        if (magic, version) != (MAGIC, VERSION) or epoch.hex() != segment.epoch:
            raise SegmentError("stale segment: the peer's pool is gone or has another epoch")
        if (n_blocks, block_bytes) != (segment.n_blocks, segment.block_bytes):
            raise SegmentError("stale segment: the peer's pool has another size")

    def _open(self, until_s: float) -> Link:
        """A link over which the header has been read.

        On a thread of its own: an engine may wait a minute for a peer that does not answer. If
        that is given up, the link closes itself as soon as it can. It has only read the header.
        """
        opened: queue.SimpleQueue[Link | str] = queue.SimpleQueue()
        lock = threading.Lock()
        given_up = [False]
        scratch, segment = self._scratch, self._segment
        n_bytes = HEADER_BYTES + self._memory.n_bytes

        def give(what: Link | str) -> None:
            with lock:
                if not given_up[0]:
                    opened.put(what)
                    return
            if not isinstance(what, str):
                what.close()

        def open_it() -> None:
            link: Link | None = None
            try:
                into = [(self._base, n_bytes), (scratch.ctypes.data, HEADER.size)]
                link = self._owner.engine.link(segment.endpoint, into)
                copy = link.start(scratch.ctypes.data, segment.base, HEADER.size)
                while not link.is_done(copy) and not given_up[0]:
                    time.sleep(_POLL_S)
                give(link)
            except Exception as error:
                if link is not None:
                    link.close()
                # In words: the error's frames would keep a half-made link alive.
                give(str(error) if isinstance(error, EngineError) else repr(error))

        threading.Thread(target=open_it, name="kv-open", daemon=True).start()
        while True:
            with contextlib.suppress(queue.Empty):
                found = opened.get(timeout=0.02)
                if isinstance(found, str):
                    raise EngineError(found)
                return found
            try:
                self._go_on(until_s)
            except EngineError:
                with lock:
                    given_up[0] = opened.empty()
                if not given_up[0]:
                    continue
                self._scratch = np.zeros(HEADER.size, np.uint8)
                raise

    def _linked(self) -> Link:
        assert self._link is not None
        return self._link

    def _is_at_rest(self) -> bool:
        """Whether nothing is under way, and the link is worth keeping."""
        return self._link is not None and self._link.reconnects and not self._under_way

    def _drop(self) -> None:
        """Close the link: whatever is under way lands no more."""
        self._under_way.clear()
        link, self._link = self._link, None
        if link is not None:
            link.close()


def address_of(memory: PoolMemory) -> int:
    """Where the header of a pool is in this process's memory; its blocks follow."""
    return int(np.frombuffer(memory.buffer, np.uint8).ctypes.data) - HEADER_BYTES
