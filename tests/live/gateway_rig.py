"""A gateway over fake workers, for its tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from tests.live.fakes import (
    Answer,
    FakeWorker,
    ask,
    get,
    post,
    run,
    until,
)
from twofold.live.gateway import Gateway
from twofold.live.gateway_admin import AdminApi
from twofold.live.gateway_public import PublicApi
from twofold.live.http import HttpServer

BODY = {"model": "tiny", "prompt": "hello there", "max_tokens": 3}
STREAM = BODY | {"stream": True}
PATH = "/v1/completions"


class Rig:
    """A gateway, its two ports and its workers."""

    def __init__(self, gateway: Gateway, workers: list[FakeWorker]) -> None:
        self.gateway = gateway
        self.workers = workers
        self.public = HttpServer(PublicApi(gateway).handle)
        self.admin = HttpServer(AdminApi(gateway).handle)

    @property
    def port(self) -> int:
        return self.public.port

    async def post(self, body: object = BODY, headers: str = "", path: str = PATH) -> Answer:
        return await ask(self.port, post(path, body, headers))

    async def get_json(self, path: str) -> Any:
        return (await get(self.admin.port, path)).json

    async def ledger(self, request_id: str) -> Any:
        await until(lambda: request_id in self.gateway.ended)
        return await self.get_json(f"/admin/requests/{request_id}")

    async def settled(self) -> None:
        """Nothing is under way, and the count of requests holds."""
        await until(lambda: not self.gateway.sessions)
        found = await self.get_json("/admin/conservation")
        assert found["holds"]
        assert found["requests"]["in_flight"] == 0
        assert not any(w.requests for w in self.gateway.router.workers.values())

    async def canary(self) -> None:
        """The next request is served as if nothing had happened."""
        for worker in self.workers:
            worker.behaviour = None
        await until(lambda: self.gateway.unready() is None)
        reply = await self.post(STREAM)
        assert (reply.status, reply.whole) == (200, True)
        assert reply.body.endswith(b"data: [DONE]\n\n")
        await self.settled()


@asynccontextmanager
async def rig(*roles: Any, **options: Any) -> AsyncIterator[Rig]:
    names: dict[str, int] = {}
    workers = []
    for role in roles:
        names[role] = names.get(role, -1) + 1
        workers.append(FakeWorker(role, f"{role}-{names[role]}"))
    gateway = Gateway([await w.start() for w in workers], **options)
    made = Rig(gateway, workers)
    await made.public.start("127.0.0.1", 0)
    await made.admin.start("127.0.0.1", 0)
    await gateway.start()
    try:
        await until(lambda: all(w.identity is not None for w in gateway.workers.values()))
        yield made
    finally:
        await gateway.stop()
        await made.public.close(0)
        await made.admin.close(0)
        for worker in workers:
            worker.stop()


def with_rig(test: Callable[[Rig], Coroutine[Any, Any, None]], *roles: str, **options: Any) -> None:
    async def main() -> None:
        async with rig(*(roles or ("prefill", "decode")), **options) as made:
            await test(made)

    run(main())


def p_of(made: Rig) -> FakeWorker:
    return made.workers[0]


def d_of(made: Rig) -> FakeWorker:
    return made.workers[-1]
