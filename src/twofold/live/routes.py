"""Which handler answers which path: OPTIONS, HEAD, unknown paths and wrong methods included."""

from __future__ import annotations

from collections.abc import Mapping

from twofold.live.exchange import Exchange, Header, Request
from twofold.live.http import Handler
from twofold.live.openai import ApiError, error_body


class Routes:
    """A handler made of handlers by (method, path).

    A path that ends in `/*` stands for everything below it. A handler may raise ApiError before
    it has answered.
    """

    def __init__(self, table: Mapping[tuple[str, str], Handler]) -> None:
        self._exact: dict[str, dict[str, Handler]] = {}
        self._below: dict[str, dict[str, Handler]] = {}
        for (method, path), handler in table.items():
            kind, key = (self._below, path[:-1]) if path.endswith("/*") else (self._exact, path)
            methods = kind.setdefault(key, {})
            methods[method] = handler
            if method == "GET":
                methods["HEAD"] = handler

    def __call__(self, request: Request, exchange: Exchange) -> None:
        """Answer a request."""
        methods = self._exact.get(request.path) or self._find_below(request.path)
        handler = methods.get(request.method)
        if handler is None:
            self._no_handler(request, exchange, methods)
            return
        try:
            handler(request, exchange)
        except ApiError as error:
            answer_error(exchange, error)

    def _find_below(self, path: str) -> dict[str, Handler]:
        for prefix, methods in self._below.items():
            if path.startswith(prefix) and len(path) > len(prefix):
                return methods
        return {}

    def _no_handler(
        self, request: Request, exchange: Exchange, methods: Mapping[str, Handler]
    ) -> None:
        if not methods:
            body = error_body(404, "not_found", f"there is nothing at {request.path[:200]}")
            exchange.respond(404, body)
            return
        allow: list[Header] = [("allow", ", ".join([*methods, "OPTIONS"]))]
        if request.method == "OPTIONS":
            exchange.respond(204, b"", "", allow)
            return
        text = f"{request.method} is not possible here; use {' or '.join(methods)}"
        exchange.respond(405, error_body(405, "method_not_allowed", text), headers=allow)


def answer_error(exchange: Exchange, error: ApiError) -> None:
    """Answer with `error`, unless an answer has begun."""
    headers = [("retry-after", str(error.retry_after_s))] if error.retry_after_s else []
    exchange.respond(error.status, error.body(), headers=headers)
