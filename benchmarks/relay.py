"""What the gateway costs: CPU per request and per million streamed chunks, against a bare relay.

Three things relay the same traffic from one mock worker, each in a process of its own: the
gateway (public port, mixed worker, and two legs), a splice that copies bytes between two sockets
and knows no HTTP (the floor for Python), and HAProxy with one thread if it is installed (the
floor for C). Rounds are interleaved and medians reported, since the machine may be busy.

    python benchmarks/relay.py [--rounds N] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, cast

import httptools
import uvloop

from twofold.config import GatewaySettings, WorkerAddress
from twofold.live.gateway_process import run_gateway
from twofold.live.ports import free_ports

HOST: Final = "127.0.0.1"
STEP_S: Final = 0.01
EVENT: Final = (
    b'data: {"id":"cmpl-8f3a2b1c9d7e4f60a1b2c3d4e5f60718","object":"text_completion",'
    b'"created":1764441600,"model":"mock","choices":[{"index":0,"text":" token",'
    b'"logprobs":null,"finish_reason":null}]}\n\n'
)
LAYOUT: Final = {
    "protocol": 1,
    "engine": "mock",
    "model_digest": "a",
    "tokenizer_digest": "a",
    "dtype": "float32",
    "block_size": 16,
    "layers": 1,
    "kv_heads": 1,
    "head_dim": 8,
    "rope": "none",
}
PROMPT: Final = ("The quick brown fox jumps over the lazy dog. " * 23)[:1000]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


CHUNK: Final = chunk(EVENT)
LAST: Final = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    b"server-timing: prefill;dur=0.100, total;dur=0.200\r\n\r\n"
)


def whole(body: object) -> bytes:
    data = json.dumps(body).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(data) + data


ANSWER: Final = whole(
    {
        "id": "cmpl-1",
        "choices": [{"index": 0, "text": "hello", "finish_reason": "stop"}],
        "usage": {"completion_tokens": 1},
    }
)
KV_ANSWER: Final = whole(
    {
        "choices": [],
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "remote_block_ids": list(range(64)),
            "remote_request_id": 1,
        },
    }
)


# ------------------------------------------------------------------------------ mock worker


class Mock(asyncio.Protocol):
    """Answers at once, or writes one chunk to every running stream per step, as an engine does."""

    def __init__(self, role: str, streams: dict[asyncio.Transport, int]) -> None:
        self.layout = whole({"role": role, "engine_id": role, "model": "mock", "layout": LAYOUT})
        self.streams = streams

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.parser = httptools.HttpRequestParser(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.streams.pop(self.transport, None)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.body = b""

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        if not self.body:
            self.transport.write(self.layout)
            return
        asked = json.loads(self.body)
        if (asked.get("kv_transfer_params") or {}).get("do_remote_decode"):
            self.transport.write(KV_ANSWER)
        elif asked.get("stream"):
            self.transport.write(STREAM_HEAD)
            self.streams[self.transport] = asked["max_tokens"]
        else:
            self.transport.write(ANSWER)


async def run_mock(roles: list[str], ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    streams: dict[asyncio.Transport, int] = {}
    for role, port in zip(roles, ports, strict=True):
        await loop.create_server(lambda r=role: Mock(r, streams), HOST, port, backlog=4096)  # type: ignore[misc]
    while True:
        await asyncio.sleep(STEP_S)
        for transport, left in list(streams.items()):
            if left == 1:
                transport.write(CHUNK + LAST)
                del streams[transport]
            else:
                transport.write(CHUNK)
                streams[transport] = left - 1


# ----------------------------------------------------------------------------------- splice


class Splice(asyncio.Protocol):
    """Copies bytes to the other side."""

    other: asyncio.Transport | None = None

    def __init__(self, to: int | None) -> None:
        self.to = to
        self.early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self.to is not None:
            self.task = asyncio.get_running_loop().create_task(self.dial(self.to))

    async def dial(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        _, peer = await loop.create_connection(lambda: Splice(None), HOST, port)
        peer.other, self.other = self.transport, peer.transport
        self.other.write(self.early)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self.early += data
        else:
            self.other.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.close()


async def run_splice(port: int, to: int) -> None:
    await asyncio.get_running_loop().create_server(lambda: Splice(to), HOST, port, backlog=4096)
    await asyncio.Event().wait()


# ------------------------------------------------------------------------------------- load


class Load(asyncio.Protocol):
    """Sends `count` requests one after the other and waits for the end of each answer."""

    def __init__(self, request: bytes, count: int, done: asyncio.Future[None]) -> None:
        self.request = request
        self.left = count
        self.done = done
        self.complete = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.next()

    def next(self) -> None:
        self.left -= 1
        self.parser = httptools.HttpResponseParser(self)
        self.transport.write(self.request)

    def on_message_complete(self) -> None:
        self.complete = True

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)
        if not self.complete:
            return
        self.complete = False
        if self.parser.get_status_code() != 200:
            self.done.set_exception(RuntimeError(f"status {self.parser.get_status_code()}"))
        elif self.left:
            self.next()
        else:
            self.done.set_result(None)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError("the connection was closed"))


async def load(port: int, *, clients: int, count: int, tokens: int) -> None:
    body: dict[str, Any] = {"model": "mock", "prompt": PROMPT, "max_tokens": max(1, tokens)}
    data = json.dumps(body | {"stream": tokens > 0}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
    loop = asyncio.get_running_loop()
    done: list[asyncio.Future[None]] = [loop.create_future() for _ in range(clients)]
    for future in done:
        await loop.create_connection(
            lambda f=future: Load(request, count, f),  # type: ignore[misc]
            HOST,
            port,
        )
    await asyncio.gather(*done)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, from its own clock."""
    return time.clock_gettime_ns((~pid << 3) | 2) / 1e9


# ------------------------------------------------------------------------------------- main

HAPROXY: Final = """
global
  nbthread 1
  maxconn 2048
defaults
  mode http
  timeout connect 1s
  timeout client 60s
  timeout server 60s
frontend f
  bind {host}:{port}
  default_backend b
backend b
  server s {host}:{to}
"""


class Relays:
    """The processes under measurement, by name, and the port of each."""

    def __init__(self, folder: Path) -> None:
        ports = free_ports(9)
        self.mock = ports[:3]
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pids: dict[str, int] = {}
        self.ports: dict[str, int] = {}
        self.start("mock", 0, "mock", *map(str, self.mock))
        mixed = f"m=mixed:{self.mock[0]}"
        pair = (f"p=prefill:{self.mock[1]}", f"d=decode:{self.mock[2]}")
        self.start("gateway, one leg", ports[3], "gateway", str(ports[3]), str(ports[4]), mixed)
        self.start("gateway, two legs", ports[5], "gateway", str(ports[5]), str(ports[6]), *pair)
        self.start("splice", ports[7], "splice", str(ports[7]), str(self.mock[0]))
        haproxy = shutil.which("haproxy")
        if haproxy:
            config = folder / "haproxy.cfg"
            config.write_text(HAPROXY.format(host=HOST, port=ports[8], to=self.mock[0]))
            self.run("haproxy", ports[8], [haproxy, "-db", "-f", str(config)])
        else:
            print("haproxy is not installed: left out", file=sys.stderr)

    def start(self, name: str, port: int, *flags: str) -> None:
        self.run(name, port, [sys.executable, __file__, "--as", *flags])

    def run(self, name: str, port: int, command: list[str]) -> None:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.processes.append(process)
        if port:
            self.pids[name] = process.pid
            self.ports[name] = port

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


async def warm(port: int) -> None:
    """Wait until a relay serves."""
    for _ in range(200):
        try:
            await load(port, clients=2, count=20, tokens=0)
        except (OSError, RuntimeError):
            await asyncio.sleep(0.05)
        else:
            return
    raise SystemExit(f"the relay at port {port} did not come up")


async def measure(relays: Relays, rounds: int) -> dict[str, dict[str, list[float]]]:
    for port in relays.ports.values():
        await warm(port)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in relays.ports}

    async def timed(name: str, figure: str, scale: float, **what: int) -> None:
        before = cpu_s(relays.pids[name])
        await load(relays.ports[name], **what)
        found[name].setdefault(figure, []).append((cpu_s(relays.pids[name]) - before) * scale)

    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        for name in relays.ports:
            await timed(name, "cpu_us_per_request", 1e6 / 2000, clients=4, count=500, tokens=0)
        for name in relays.ports:
            await timed(name, "cpu_s_per_1M_chunks", 1e6 / 6400, clients=64, count=1, tokens=100)
    return found


def summary(found: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    medians = {
        name: {figure: round(statistics.median(v), 2) for figure, v in figures.items()}
        for name, figures in found.items()
    }
    floor = dict(medians["splice"])
    for figures in medians.values():
        for figure in list(figures):
            figures[f"{figure}_over_splice"] = round(figures[figure] / floor[figure], 2)
    return medians


def serve_as(kind: str, flags: list[str]) -> int:
    """One of the processes under measurement."""
    if kind == "mock":
        uvloop.run(run_mock(["mixed", "prefill", "decode"], [int(f) for f in flags]))
    elif kind == "splice":
        uvloop.run(run_splice(int(flags[0]), int(flags[1])))
    elif kind == "gateway":
        logging.basicConfig(level=logging.INFO)
        workers = []
        for flag in flags[2:]:
            name, _, rest = flag.partition("=")
            role, _, port = rest.partition(":")
            workers.append(WorkerAddress(name, cast(Any, role), HOST, int(port)))
        return run_gateway(
            GatewaySettings(
                host=HOST,
                port=int(flags[0]),
                admin_host=HOST,
                admin_port=int(flags[1]),
                workers=tuple(workers),
            )
        )
    return 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/relay.json")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        relays = Relays(Path(folder))
        try:
            found = uvloop.run(measure(relays, args.rounds))
        finally:
            relays.stop()
    medians = summary(found)
    result = {"rounds": args.rounds, "medians": medians, "all": found}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, figures in medians.items():
        print(f"{name:<18}", "  ".join(f"{k} {v}" for k, v in figures.items()))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as"]:
        sys.exit(serve_as(sys.argv[2], sys.argv[3:]))
    sys.exit(main(sys.argv[1:]))
