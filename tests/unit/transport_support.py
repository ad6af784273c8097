"""What the transport tests share: two pools with a transport each, and a peer in a process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twofold.transport.base import Completion, Transport
from twofold.transport.foreign import ForeignTransport
from twofold.transport.foreign_link import Engine, EngineError
from twofold.transport.memory import HEADER_BYTES, PoolMemory
from twofold.transport.mooncake import MooncakeEngine
from twofold.transport.nixl import NixlEngine
from twofold.transport.shm import ShmTransport
from twofold.transport.tcp import TcpTransport

WRITERS = ["shm", "tcp"]
FOREIGN = ["mooncake", "nixl"]
KINDS = [*WRITERS, *FOREIGN]


def make_transport(
    kind: str, notify: Callable[[], None] = lambda: None, **limits: Any
) -> Transport:
    if kind == "shm":
        return ShmTransport(notify, **limits)
    if kind == "tcp":
        # A stream for every block, so that small transfers have several too.
        return TcpTransport(notify, **({"stream_bytes": 1} | limits))
    return ForeignTransport(notify, foreign_engine(kind), **limits)


def foreign_engine(kind: str) -> Engine:
    """An engine of the field's own; skips the test where its package is not there."""
    try:
        return MooncakeEngine("127.0.0.1") if kind == "mooncake" else NixlEngine()
    except EngineError as error:
        pytest.skip(str(error))


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} in {timeout_s} s"
        time.sleep(0.001)


def mapped_bytes(memory: PoolMemory) -> int:
    """How much of a pool's blocks has pages in this process."""
    address = int(np.frombuffer(memory.buffer, np.uint8).ctypes.data) - HEADER_BYTES
    smaps = Path("/proc/self/smaps").read_text()
    mapping = smaps[smaps.index(f"{address:x}-") :]
    return int(mapping.partition("\nRss:")[2].split()[0]) * 1024 - HEADER_BYTES


class Side:
    """One worker's pool and transport."""

    def __init__(
        self,
        kind: str,
        *,
        n_blocks: int = 64,
        block_bytes: int = 1000,
        seed: int = 0,
        **limits: Any,
    ) -> None:
        self._notified = threading.Semaphore(0)
        # First, since it may skip the test: no pool should be left behind then.
        self.transport = make_transport(kind, self._notified.release, **limits)
        self.memory = PoolMemory(n_blocks, block_bytes, os.urandom(16))
        # A tile of prime length, so that no two blocks are equal, yet quick for large pools.
        tile = random.Random(seed).randbytes(65_521)
        n_bytes = self.memory.n_bytes
        self.memory.buffer[:] = (tile * (n_bytes // len(tile) + 1))[:n_bytes]
        self.segment = self.transport.register(self.memory)
        self._got: dict[int, Completion] = {}

    def block(self, number: int) -> bytes:
        size = self.memory.block_bytes
        return bytes(self.memory.buffer[number * size : (number + 1) * size])

    def completion(self, transfer_id: int, timeout_s: float = 10.0) -> Completion:
        """The completion of one read, found as a driver does: poll after each notify."""
        deadline = time.monotonic() + timeout_s
        while transfer_id not in self._got:
            assert self._notified.acquire(timeout=max(0.0, deadline - time.monotonic())), (
                f"read {transfer_id} did not complete in {timeout_s} s"
            )
            for completion in self.transport.poll():
                assert completion.transfer_id not in self._got, "completed twice"
                self._got[completion.transfer_id] = completion
        return self._got.pop(transfer_id)

    def read(
        self,
        transfer_id: int,
        segment: str,
        pairs: list[tuple[int, int]],
        timeout_s: float = 10.0,
    ) -> Completion:
        self.transport.read(transfer_id, segment, pairs)
        return self.completion(transfer_id, timeout_s)

    def left_over(self) -> dict[int, Completion]:
        """Completions that nobody has asked for."""
        return self._got | {each.transfer_id: each for each in self.transport.poll()}

    def close(self) -> None:
        self.transport.close()
        self.memory.close()


@contextmanager
def two_sides(kind: str, **sizes: Any) -> Iterator[tuple[Side, Side]]:
    """A peer and ourselves, with different bytes."""
    peer, own = Side(kind, seed=1, **sizes), Side(kind, seed=2, **sizes)
    try:
        yield peer, own
    finally:
        own.close()
        peer.close()


class Child:
    """A peer in a process of its own, to be killed."""

    def __init__(self, kind: str, n_blocks: int, block_bytes: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, kind, str(n_blocks), str(block_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.segment = self.process.stdout.readline().strip()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


def _serve(kind: str, n_blocks: int, block_bytes: int) -> None:
    side = Side(kind, n_blocks=n_blocks, block_bytes=block_bytes, seed=1)
    print(side.segment, flush=True)
    sys.stdin.read()
    side.close()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
