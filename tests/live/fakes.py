"""Workers with scripted faults, and a plain HTTP client, over real sockets on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import httptools
import uvloop

from twofold.config import Role, WorkerAddress

T = TypeVar("T")

LAYOUT = {
    "protocol": 1,
    "engine": "twofold",
    "model_digest": "aa",
    "tokenizer_digest": "bb",
    "dtype": "float32",
    "block_size": 16,
    "layers": 2,
    "kv_heads": 2,
    "head_dim": 8,
    "rope": "theta=10000",
}
KV_PARAMS = (
    b'{"do_remote_prefill":true, "do_remote_decode":false,"remote_request_id":7,'
    b'"remote_engine_id":"life-1","remote_block_ids":[1,2],"remote_host":"127.0.0.1",'
    b'"remote_port":5,"odd":1.50}'
)
# Less than any leg takes over loopback: a claim of more is cut to what the leg took.
PREFILL_TIMING = "tokenise;dur=0.001, prefill_queue;dur=0.002, prefill;dur=0.003, total;dur=0.008"
DECODE_TIMING = (
    "handoff_wait;dur=0.001, transfer;dur=0.002, decode_queue;dur=0.001, "
    "first_step;dur=0.001, total;dur=0.006"
)


def run(main: Coroutine[Any, Any, T], seconds: float = 20.0) -> T:
    """Run a test's coroutine on the loop that the gateway uses, never for ever."""

    async def limited() -> T:
        async with asyncio.timeout(seconds):
            return await main

    return uvloop.run(limited())


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for a condition, with a deadline."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not condition():
        assert loop.time() < end, "the condition did not come true in time"
        await asyncio.sleep(0.002)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def answer(status: int, body: bytes, headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{headers}"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


STREAM_HEAD = (
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    f"server-timing: {DECODE_TIMING}\r\nx-twofold-transferred: 4096\r\n\r\n"
).encode()


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


@dataclass
class Asked:
    """A request as a fake worker got it."""

    method: str
    path: str
    headers: dict[str, str]
    raw: bytes
    connection: FakeConnection

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    def write(self, data: bytes) -> None:
        self.connection.transport.write(data)

    def cut(self) -> None:
        self.connection.transport.close()


Behaviour = Callable[[Asked], Awaitable[None] | None]


class FakeConnection(asyncio.Protocol):
    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.parser = httptools.HttpRequestParser(self)
        self.worker.connections.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers: dict[str, str] = {}
        self.body = b""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        method = self.parser.get_method().decode()
        self.worker.answer(Asked(method, self.url.decode(), self.headers, self.body, self))


@dataclass
class FakeWorker:
    """One worker. `behaviour` answers generation requests; None is what its role does."""

    role: Role
    name: str = ""
    model: str = "tiny"
    engine_id: str = "life-1"
    n_tokens: int = 3
    layout: dict[str, Any] = field(default_factory=lambda: dict(LAYOUT))
    behaviour: Behaviour | None = None
    asked: list[Asked] = field(default_factory=list)
    releases: list[Any] = field(default_factory=list)
    connections: list[FakeConnection] = field(default_factory=list)
    server: asyncio.Server | None = None
    port: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self, port: int = 0) -> WorkerAddress:
        loop = asyncio.get_running_loop()
        self.server = await loop.create_server(lambda: FakeConnection(self), "127.0.0.1", port)
        self.port = self.server.sockets[0].getsockname()[1]
        self.name = self.name or f"{self.role}-0"
        return WorkerAddress(self.name, self.role, "127.0.0.1", self.port)

    def stop(self) -> None:
        """As if killed."""
        if self.server is not None:
            self.server.close()
        for connection in self.connections:
            connection.transport.abort()
        for task in self.tasks:
            task.cancel()

    def answer(self, asked: Asked) -> None:
        if asked.path == "/layout":
            body = {
                "role": self.role,
                "engine_id": self.engine_id,
                "model": self.model,
                "max_model_len": 512,
                "layout": self.layout,
            }
            asked.write(answer(200, json.dumps(body).encode()))
        elif asked.path == "/conservation":
            asked.write(answer(200, b'{"free":8,"blocks":8}'))
        elif asked.path == "/handoff/release":
            self.releases.append(asked.json)
            asked.write(answer(200, b"{}"))
        elif asked.path == "/v1/tokenize":
            asked.write(answer(200, b'{"tokens":[1,2,3],"count":3}'))
        else:
            self.asked.append(asked)
            behaviour = self.behaviour or (prefill if self.role == "prefill" else decode)
            result = behaviour(asked)
            if result is not None:
                task = asyncio.ensure_future(cast(Coroutine[Any, Any, None], result))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)


# ------------------------------------------------------------------------------ behaviours


def prefill(asked: Asked) -> None:
    body = b'{"choices":[],"kv_transfer_params":' + KV_PARAMS + b"}"
    asked.write(answer(200, body, f"server-timing: {PREFILL_TIMING}\r\n"))


def decode(asked: Asked) -> None:
    n = asked.connection.worker.n_tokens
    if not asked.json.get("stream"):
        usage = {"prompt_tokens": 4, "completion_tokens": n, "total_tokens": 4 + n}
        body = {"choices": [{"index": 0, "text": "t" * n, "finish_reason": "stop"}], "usage": usage}
        timing = f"server-timing: {DECODE_TIMING}\r\nx-twofold-transferred: 4096\r\n"
        asked.write(answer(200, json.dumps(body).encode(), timing))
        return
    asked.write(STREAM_HEAD)
    for i in range(n):
        asked.write(chunk(event(f"t{i}")))
    asked.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def status(code: int, body: bytes = b'{"error":{"message":"no"}}', headers: str = "") -> Behaviour:
    return lambda asked: asked.write(answer(code, body, headers))


def hang(asked: Asked) -> None:
    pass


def cut(asked: Asked) -> None:
    asked.cut()


def garbage(asked: Asked) -> None:
    asked.write(b"SSH-2.0-wrong\r\n\r\n")


def no_params(asked: Asked) -> None:
    asked.write(answer(200, b'{"choices":[]}'))


def head_only(asked: Asked) -> None:
    asked.write(STREAM_HEAD)


def stream_then(n: int, last: Callable[[Asked], None]) -> Behaviour:
    """`n` events, then `last`, after what was written has been seen by the client."""

    async def behave(asked: Asked) -> None:
        asked.write(STREAM_HEAD + chunk(event("t0")))
        for i in range(1, n):
            asked.write(chunk(event(f"t{i}")))
        await asyncio.sleep(0.02)
        last(asked)

    return behave


def half_a_chunk(asked: Asked) -> None:
    asked.write(chunk(event("never whole"))[:20])
    asked.cut()


# ---------------------------------------------------------------------------------- client


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return cast(dict[str, Any], error)


class Client:
    """One connection, written to and read from by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.left = b""

    @classmethod
    async def open(cls, port: int) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            return

    async def read(self) -> Answer:
        """One answer; `whole` is false if the connection ended before it did."""
        found = _Found()
        parser = httptools.HttpResponseParser(found)
        data = self.left
        self.left = b""
        while True:
            end = _first_answer(data) if data else 0
            parser.feed_data(data[:end] if end else data)
            if found.complete:
                self.left = data[end:] if end else b""
                break
            try:
                data = await self.reader.read(65536)
            except ConnectionError:
                data = b""
            if not data:
                break
        code = parser.get_status_code() if found.headers else 0
        return Answer(code, found.headers, found.body, found.complete)

    async def at_end(self) -> bool:
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True


def _first_answer(data: bytes) -> int:
    """Where a first answer with a length ends, if more may follow it."""
    head, mark, rest = data.partition(b"\r\n\r\n")
    lower = head.lower()
    if not mark or b"content-length: " not in lower:
        return 0
    length = int(lower.split(b"content-length: ")[1].split(b"\r\n")[0])
    return len(head) + 4 + length if len(rest) > length else 0


class _Found:
    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.body = b""
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


def post(path: str, body: object, headers: str = "", version: str = "1.1") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nhost: x\r\n{headers}content-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def ask(port: int, request: bytes) -> Answer:
    client = await Client.open(port)
    client.send(request)
    try:
        return await client.read()
    finally:
        await client.close()


async def get(port: int, path: str) -> Answer:
    return await ask(port, f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
