"""The gateway's public API: OpenAI's routes, and whether it is alive and ready."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec

from twofold.live.exchange import Exchange, Request
from twofold.live.gateway import Gateway
from twofold.live.gateway_watch import Worker, models_of
from twofold.live.leg import Head, Leg
from twofold.live.openai import (
    ApiError,
    GenerateRequest,
    Kind,
    check_request,
    decode_object,
    error_body,
    models_body,
)
from twofold.live.routes import Routes

_CHARACTERS_PER_TOKEN: Final = 4
_FORWARD_TIMEOUT_S: Final = 10.0


class PublicApi:
    """Handlers of the public port."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._started_s = int(time.time())
        self.handle = Routes(
            {
                ("POST", "/v1/chat/completions"): self._generate("chat"),
                ("POST", "/v1/completions"): self._generate("completion"),
                ("POST", "/v1/tokenize"): self._tokenize,
                ("GET", "/v1/models"): self._models,
                ("GET", "/v1/models/*"): self._models,
                ("GET", "/health"): self._health,
                ("GET", "/ready"): self._ready,
            }
        )

    def _generate(self, kind: Kind) -> Callable[[Request, Exchange], None]:
        def handle(request: Request, exchange: Exchange) -> None:
            try:
                data = decode_object(request.body)
                checked = check_request(data, kind)
                self._check_model(checked.model)
            except ApiError as error:
                if error.status < 500:
                    self._gateway.metrics.invalid()
                raise
            self._gateway.take(
                request,
                exchange,
                data,
                stream=checked.stream,
                weight=_weight(checked),
                max_tokens=checked.max_tokens or 0,
                model=checked.model,
            )

        return handle

    def _check_model(self, model: str) -> None:
        models = models_of(self._gateway.workers.values())
        if not models:
            reason = self._gateway.unready() or "no worker answers yet"
            raise ApiError(503, "not_ready", reason, retry_after_s=1)
        if model not in models:
            names = ", ".join(sorted(models))
            text = f"model: there is no model {model[:200]!r} here; there is {names}"
            raise ApiError(404, "model_not_found", text, "model")

    def _models(self, request: Request, exchange: Exchange) -> None:
        models = models_of(self._gateway.workers.values())
        wanted = request.path.removeprefix("/v1/models").lstrip("/")
        if not wanted:
            exchange.respond(200, models_body(sorted(models.items()), self._started_s))
            return
        self._check_model(wanted)
        body = models_body([(wanted, models[wanted])], self._started_s)
        exchange.respond(200, msgspec.json.encode(msgspec.json.decode(body)["data"][0]))

    def _health(self, request: Request, exchange: Exchange) -> None:
        exchange.respond(200, b"")

    def _ready(self, request: Request, exchange: Exchange) -> None:
        reason = self._gateway.unready()
        if reason is not None:
            raise ApiError(503, "not_ready", reason, retry_after_s=1)
        exchange.respond(200, b'{"ready":true}')

    def _tokenize(self, request: Request, exchange: Exchange) -> None:
        data = decode_object(request.body)
        model = data.get("model")
        if model is not None:
            if not isinstance(model, str):
                raise ApiError(400, "invalid_value", "model: must be a string", "model")
            self._check_model(model)
        worker = self._worker_for(model)
        if worker is None:
            raise ApiError(503, "not_ready", "no worker answers yet", retry_after_s=1)

        def whole(head: Head, body: bytes) -> None:
            exchange.respond(head.status, body, head.get("content-type") or "application/json")

        def broken(reason: str, reached: bool) -> None:
            exchange.respond(502, error_body(502, "worker_failed", reason))

        leg = Leg(on_whole=whole, on_broken=broken)
        exchange.on_gone = leg.cancel
        headers = f"x-request-id: {request.request_id}\r\n"
        worker.upstream.send(
            leg, "POST", "/v1/tokenize", request.body, headers, timeout_s=_FORWARD_TIMEOUT_S
        )

    def _worker_for(self, model: str | None) -> Worker | None:
        for worker in self._gateway.workers.values():
            if worker.identity is not None and model in (None, worker.identity.model):
                return worker
        return None


def _weight(request: GenerateRequest) -> int:
    """About how many tokens the prompt has; only for placement, so a guess will do."""
    if isinstance(request.prompt, tuple) and request.prompt:
        return len(request.prompt)
    characters = len(request.prompt) + sum([len(m.content) for m in request.messages])
    return characters // _CHARACTERS_PER_TOKEN + 1
