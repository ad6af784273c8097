"""How fast KV blocks move: each transport against one memcpy and one raw loopback socket.

Two processes: this one reads and writes, a child serves. Every case runs once a round, so that a
slow spell of the machine falls on all alike; the figures are medians. Pools are touched before, so
that no page is faulted in for the first time while the clock runs; copies go past the caches, as
those of workers that `twofold serve` starts. Mooncake and NIXL are measured, reading only, where
their packages are installed. `xxh3` is the hashing of all blocks alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from twofold.live.deployment import SHM_VARIABLES
from twofold.transport.base import Transport
from twofold.transport.checksum import checksums as hashed
from twofold.transport.choose import FOREIGN, make_transport, unusable
from twofold.transport.memory import PoolMemory
from twofold.transport.shm import ShmTransport
from twofold.transport.tcp import TcpTransport

MIB = 1024 * 1024
BLOCK_BYTES = 360 * 1024


def run_as_workers() -> None:
    """Start this program anew unless it has the variables, which are read at its start."""
    if not all(name in os.environ for name, _ in SHM_VARIABLES):
        os.execve(sys.executable, sys.orig_argv, dict(SHM_VARIABLES) | os.environ)


def fill(memory: PoolMemory, seed: int) -> None:
    data = np.frombuffer(memory.buffer, np.uint8)
    data[:] = np.random.default_rng(seed).integers(0, 256, data.size, dtype=np.uint8)


def installed() -> list[str]:
    return [name for name in FOREIGN if not unusable(name, "pull")]


def foreign(name: str, notify: Callable[[], None], *, checksums: bool) -> Transport:
    return make_transport(name, notify, host="127.0.0.1", checksums=checksums)


def serve(n_blocks: int) -> None:
    """The child: offers one pool over both transports, and raw bytes of it on a plain socket."""
    memory = PoolMemory(n_blocks, BLOCK_BYTES, os.urandom(16))
    fill(memory, 1)
    tcp = TcpTransport(lambda: None)
    shm = ShmTransport(lambda: None)
    engines = {name: foreign(name, lambda: None, checksums=False) for name in installed()}
    raw = socket.create_server(("127.0.0.1", 0))
    print(
        json.dumps(
            {
                "shm": shm.register(memory),
                "tcp": tcp.register(memory),
                "shm window": shm.open_window(range(n_blocks)),
                "tcp window": tcp.open_window(range(n_blocks)),
                "raw": raw.getsockname()[1],
            }
            | {name: engine.register(memory) for name, engine in engines.items()}
        ),
        flush=True,
    )
    sock, _ = raw.accept()
    while order := sock.recv(8):
        sock.sendall(memory.buffer[: int.from_bytes(order, "big")])
    for engine in engines.values():
        engine.close()


class Reading:
    """This process's side: one pool, both transports with and without checksums."""

    def __init__(self, n_blocks: int, segments: dict[str, Any], streams: int) -> None:
        self.memory = PoolMemory(n_blocks, BLOCK_BYTES, os.urandom(16))
        fill(self.memory, 2)
        self.segments = segments
        self.done = threading.Event()
        self.transports: dict[str, Transport] = {}
        for checksums in (False, True):
            suffix = "+xxh3" if checksums else ""
            self.transports["shm" + suffix] = ShmTransport(self.done.set, checksums=checksums)
            self.transports["tcp" + suffix] = TcpTransport(
                self.done.set, checksums=checksums, streams=streams
            )
            for name in installed():
                self.transports[name + suffix] = foreign(name, self.done.set, checksums=checksums)
        for transport in self.transports.values():
            transport.register(self.memory)
        self.raw = socket.create_connection(("127.0.0.1", segments["raw"]))
        self.source = np.ones(self.memory.n_bytes, np.uint8)

    def transfer(self, name: str, pairs: list[tuple[int, int]], *, write: bool) -> float:
        base = name.partition("+")[0]
        self.done.clear()
        begin = time.perf_counter()
        if write:
            window = self.segments[f"{base} window"]
            self.transports[name].write(1, window, pairs, (0, 1), 1)
        else:
            self.transports[name].read(1, self.segments[base], pairs)
        self.done.wait(60)
        seconds = time.perf_counter() - begin
        (completion,) = self.transports[name].poll()
        if not completion.ok:
            raise RuntimeError(f"{name}: {completion.reason}")
        return seconds

    def memcpy(self) -> float:
        target = np.frombuffer(self.memory.buffer, np.uint8)
        begin = time.perf_counter()
        np.copyto(target, self.source)
        return time.perf_counter() - begin

    def xxh3(self) -> float:
        begin = time.perf_counter()
        hashed(self.memory.buffer, range(self.memory.n_blocks), BLOCK_BYTES)
        return time.perf_counter() - begin

    def raw_socket(self) -> float:
        view = self.memory.buffer
        begin = time.perf_counter()
        self.raw.sendall(len(view).to_bytes(8, "big"))
        got = 0
        while got < len(view):
            got += self.raw.recv_into(view[got:])
        return time.perf_counter() - begin

    def close(self) -> None:
        self.raw.close()
        for transport in self.transports.values():
            transport.close()
        self.memory.close()


def measure(n_bytes: int, rounds: int, streams: int) -> dict[str, Any]:
    n_blocks = n_bytes // BLOCK_BYTES
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.transport", "--serve", str(n_blocks)],
        stdout=subprocess.PIPE,
        text=True,
    )
    out = child.stdout
    assert out is not None
    reading = Reading(n_blocks, json.loads(out.readline()), streams)
    order = list(range(n_blocks))
    random.Random(1).shuffle(order)
    adjacent = [(i, i) for i in range(n_blocks)]
    scattered = list(zip(order, reversed(order), strict=True))
    cases: dict[str, Callable[[], float]] = {
        "memcpy": reading.memcpy,
        "raw socket": reading.raw_socket,
        "xxh3": reading.xxh3,
    }
    for name in reading.transports:
        for write in (False, True) if name[:3] in ("shm", "tcp") else (False,):
            for where, pairs in (("adjacent", adjacent), ("scattered", scattered)):
                case = functools.partial(reading.transfer, name, pairs, write=write)
                cases[f"{name}{' write' if write else ''}, {where}"] = case
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, run in cases.items():
            took = run()
            if number:
                seconds[name].append(took)
    reading.close()
    child.wait(10)
    out.close()
    moved = n_blocks * BLOCK_BYTES
    speed = {name: moved / statistics.median(each) / 1e9 for name, each in seconds.items()}
    return {
        "bytes": moved,
        "block_bytes": BLOCK_BYTES,
        "gbytes_per_s": {name: round(each, 3) for name, each in speed.items()},
        "of_memcpy": {
            name: round(each / speed["memcpy"], 3)
            for name, each in speed.items()
            if name.startswith("shm")
        },
        "of_raw_socket": {
            name: round(each / speed["raw socket"], 3)
            for name, each in speed.items()
            if name.startswith(("tcp", *FOREIGN))
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 512])
    parser.add_argument(
        "--json", type=Path, default=Path(__file__).parent / "results" / "transport.json"
    )
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    result = {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "rounds": args.rounds,
        "streams": args.streams,
        "sizes": [measure(mib * MIB, args.rounds, args.streams) for mib in args.mib],
    }
    args.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    run_as_workers()
    main()
