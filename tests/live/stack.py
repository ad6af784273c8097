"""A whole deployment in one event loop: real workers, gateway and sockets, tiny models."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from twofold.config import EngineSettings, Role, WorkerAddress, WorkerSettings
from twofold.device.weights import load_model
from twofold.live.gateway import Gateway
from twofold.live.gateway_admin import AdminApi
from twofold.live.gateway_public import PublicApi
from twofold.live.http import HttpServer
from twofold.live.tokeniser import Tokeniser
from twofold.live.worker import Worker

HOST = "127.0.0.1"
ROLES: dict[str, Role] = {"P": "prefill", "D": "decode", "M": "mixed"}


class Answer:
    """An HTTP answer, whole; `events` are a stream's data, [DONE] left out."""

    def __init__(self, raw: bytes) -> None:
        head, _, rest = raw.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        self.status = int(lines[0].split()[1]) if raw else 0
        self.headers = {
            k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])
        }
        chunked = self.headers.get("transfer-encoding") == "chunked"
        self.complete = not chunked or rest.endswith(b"0\r\n\r\n")
        self.body = _dechunk(rest) if chunked else rest
        self.done = self.body.endswith(b"data: [DONE]\n\n")

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        parts = self.body.split(b"\n\n")
        return [
            json.loads(p[6:])
            for p in parts
            if p.startswith(b"data: ") and not p.startswith(b"data: [DONE]")
        ]

    @property
    def error(self) -> Any:
        return self.json["error"]


def _dechunk(data: bytes) -> bytes:
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        n = int(size, 16) if size else 0
        if n == 0:
            break
        out, data = out + data[:n], data[n + 2 :]
    return out


def request_bytes(
    method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> bytes:
    fields = {"host": "test", "connection": "close", "content-length": str(len(body))}
    fields |= headers or {}
    head = "".join(f"{k}: {v}\r\n" for k, v in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


async def send(port: int, data: bytes, within_s: float = 60.0) -> Answer:
    """Send raw bytes, read until the server closes."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            return Answer(await asyncio.wait_for(reader.read(), within_s))
        return Answer(b"")
    finally:
        writer.close()


async def post(port: int, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await send(port, request_bytes("POST", path, data, headers))


async def get(port: int, path: str) -> Answer:
    return await send(port, request_bytes("GET", path))


async def until(condition: Callable[[], bool], within_s: float = 20.0, what: str = "") -> None:
    """Poll `condition`; fails after `within_s`."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.005)


class Stack:
    """Made by `running`."""

    def __init__(self, workers: list[Worker], gateway: Gateway) -> None:
        self.workers = workers
        self.gateway = gateway
        self.public = HttpServer(PublicApi(gateway).handle, header_timeout_s=1.0)
        self.admin = HttpServer(AdminApi(gateway).handle)

    @property
    def port(self) -> int:
        return self.public.port

    @property
    def model(self) -> str:
        return self.workers[0].model_name

    def worker(self, role: str) -> Worker:
        return next(w for w in self.workers if w.role == role)

    async def complete(self, **body: Any) -> Answer:
        return await post(self.port, "/v1/completions", {"model": self.model, **body})

    async def chat(self, **body: Any) -> Answer:
        return await post(self.port, "/v1/chat/completions", {"model": self.model, **body})

    def settled(self) -> bool:
        """No request anywhere, every block free or cached."""
        for worker in self.workers:
            assert worker.driver is not None
            core = worker.driver.core
            counts = core.pool.counts()
            if core.engine.requests or counts.active or counts.held or core.source.counts.in_hand:
                return False
        return not self.gateway.sessions and not self.gateway.router.requests

    async def at_baseline(self, within_s: float = 20.0) -> None:
        """Wait until `settled`, then check every worker's books."""
        await until(self.settled, within_s, f"{[self.state(w) for w in self.workers]}")
        for worker in self.workers:
            assert worker.driver is not None
            worker.driver.core.check()

    @staticmethod
    def state(worker: Worker) -> Any:
        return worker.driver.state() if worker.driver else None


def parse_pools(pools: str) -> list[Role]:
    """ "1P2D" -> prefill, decode, decode."""
    return [ROLES[pools[i + 1]] for i in range(0, len(pools), 2) for _ in range(int(pools[i]))]


@contextlib.asynccontextmanager
async def running(
    model: Path,
    pools: str,
    *,
    record: str = "",
    request_timeout_s: float = 60.0,
    max_inflight: int = 512,
    wait_ready: bool = True,
    failure_policy: str = "fail",
    **engine: Any,
) -> AsyncIterator[Stack]:
    """A ready stack: `pools` as in "1P1D", `engine` as in EngineSettings."""
    settings = EngineSettings(model=str(model), **({"kv_blocks": 256} | engine))
    loaded = load_model(model)
    tokeniser = Tokeniser(model)
    workers = []
    for i, role in enumerate(parse_pools(pools)):
        path = f"{record}/{role}-{i}.journal" if record else ""
        one = WorkerSettings(
            name=f"{role}-{i}",
            role=role,
            host=HOST,
            port=0,
            handoff_port=0,
            engine=settings,
            record=path,
        )
        workers.append(Worker(one, loaded, tokeniser))
        await workers[-1].start()
    gateway = Gateway(
        [WorkerAddress(w.name, w.role, HOST, w.http_port) for w in workers],
        request_timeout_s=request_timeout_s,
        max_inflight=max_inflight,
        handoff=settings.handoff,
        failure_policy=failure_policy,
    )
    stack = Stack(workers, gateway)
    await stack.public.start(HOST, 0)
    await stack.admin.start(HOST, 0)
    await gateway.start()
    try:
        if wait_ready:
            await until(lambda: gateway.unready() is None, what="gateway ready")
        yield stack
    finally:
        await stack.public.close(0.2)
        await stack.admin.close(0.2)
        await gateway.stop()
        for worker in workers:
            await worker.stop()
