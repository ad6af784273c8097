"""The gateway's admin API: metrics, pools, ledgers, conservation. Never on an untrusted network."""

from __future__ import annotations

import asyncio
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from twofold.live.exchange import Exchange, Request
from twofold.live.gateway import Gateway
from twofold.live.gateway_watch import Worker
from twofold.live.openai import ApiError
from twofold.live.routes import Routes
from twofold.metrics.prometheus import CONTENT_TYPE

_SCRAPE_TIMEOUT_S: Final = 2.0
_LEDGERS: Final = "/admin/requests/"


class AdminApi:
    """Handlers of the admin port."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._tasks: set[asyncio.Task[None]] = set()
        self.handle = Routes(
            {
                ("GET", "/metrics"): self._metrics,
                ("GET", "/health"): lambda request, exchange: exchange.respond(200, b""),
                ("GET", "/admin/pools"): self._pools,
                ("GET", "/admin/requests/*"): self._ledger,
                ("GET", "/admin/conservation"): self._conservation,
            }
        )

    def _metrics(self, request: Request, exchange: Exchange) -> None:
        exchange.respond(200, self._gateway.metrics.render(), CONTENT_TYPE)

    def _pools(self, request: Request, exchange: Exchange) -> None:
        gateway = self._gateway
        workers = [self._worker(worker) for worker in gateway.workers.values()]
        body = {
            "ready": gateway.unready() is None,
            "why": gateway.unready() or "",
            "pair_fault": gateway.router.pair_fault() or "",
            "workers": workers,
        }
        exchange.respond(200, msgspec.json.encode(body))

    def _worker(self, worker: Worker) -> dict[str, Any]:
        identity = worker.identity
        routed = self._gateway.router.workers.get(worker.name)
        return {
            "name": worker.name,
            "role": identity.role if identity else worker.address.role,
            "address": f"{worker.address.host}:{worker.address.port}",
            "up": identity is not None,
            "why": worker.why,
            "engine_id": identity.engine_id if identity else "",
            "model": identity.model if identity else "",
            "max_model_len": identity.max_model_len if identity else 0,
            "layout": identity.layout if identity else None,
            "requests": routed.requests if routed else 0,
            "tokens": routed.tokens if routed else 0,
        }

    def _ledger(self, request: Request, exchange: Exchange) -> None:
        request_id = unquote(request.path.removeprefix(_LEDGERS))
        ended = self._gateway.ended.get(request_id)
        if ended is None:
            for session in self._gateway.sessions.values():
                if session.request.request_id == request_id:
                    raise ApiError(404, "in_flight", "the request has not ended yet")
            text = "no such request is kept: it is unknown, or too long ago"
            raise ApiError(404, "request_not_found", text)
        exchange.respond(200, msgspec.json.encode(ended))

    def _conservation(self, request: Request, exchange: Exchange) -> None:
        task = asyncio.get_running_loop().create_task(self._scrape(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _scrape(self, exchange: Exchange) -> None:
        workers = list(self._gateway.workers.values())
        answers = await asyncio.gather(*[_ask(worker) for worker in workers])
        requests = self._gateway.conservation()
        ends = sum([n for name, n in requests.items() if name != "received"])
        body = {
            "holds": requests["received"] == ends,
            "requests": requests,
            "workers": {
                worker.name: answer for worker, answer in zip(workers, answers, strict=True)
            },
        }
        exchange.respond(200, msgspec.json.encode(body))


async def _ask(worker: Worker) -> Any:
    """A worker's own account of its blocks, or why there is none."""
    try:
        head, body = await worker.upstream.fetch(
            "GET", "/conservation", timeout_s=_SCRAPE_TIMEOUT_S
        )
        if head.status != 200:
            return {"error": f"status {head.status}"}
        return msgspec.json.decode(body)
    except (ConnectionError, msgspec.DecodeError, UnicodeDecodeError) as error:
        return {"error": str(error)}
