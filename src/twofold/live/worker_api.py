"""A worker's HTTP API: vLLM's split-serving contract, and what its gateway and operators ask."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from twofold.device.sampling import Sampled
from twofold.live.exchange import Exchange, Request
from twofold.live.generation import Generation, Times, refusal
from twofold.live.kv_params import held_params, source_of, transfer_of, whole
from twofold.live.openai import (
    ApiError,
    GenerateRequest,
    Kind,
    decode_object,
    models_body,
    parse_request,
)
from twofold.live.tokeniser import Tokeniser
from twofold.live.worker_driver import WorkerDriver
from twofold.messages import Abort, Ended, Release, Submit, Token
from twofold.types import NS_PER_MS, KVHandle, RequestId

_INLINE_CHARS: Final = 4096
"""Prompts up to here are tokenised in the event loop; longer ones would hold it up."""


class WorkerApi:
    """Turns HTTP requests into messages and a core's answers into HTTP.

    `identity` is what `/layout` says; handles of held KV are made from it.
    """

    def __init__(
        self,
        *,
        driver: WorkerDriver,
        model: str,
        max_model_len: int,
        vocab_size: int,
        tokeniser: Tokeniser,
        eos_token_ids: tuple[int, ...],
        clock: Times,
        identity: dict[str, Any],
        metrics: Callable[[], bytes],
        call_soon_threadsafe: Callable[[Callable[[], None]], object],
    ) -> None:
        self.driver = driver
        self.draining = False
        self._model = model
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._tokeniser = tokeniser
        self._eos = eos_token_ids
        self._clock = clock
        self._identity = identity
        self._handoff: str = identity["layout"]["handoff"]
        self._metrics = metrics
        self._soon = call_soon_threadsafe
        self._ids = itertools.count(1)
        self._generations: dict[RequestId, Generation] = {}
        self._tokenisers = ThreadPoolExecutor(1, "tokenise")

    @property
    def n_open(self) -> int:
        """Requests whose answer is not complete."""
        return len(self._generations)

    def close(self) -> None:
        """Stop the tokenising thread."""
        self._tokenisers.shutdown(wait=True)

    # ------------------------------------------------------------------ routes

    def handle(self, request: Request, exchange: Exchange) -> None:
        """Answer one HTTP request."""
        try:
            self._route(request, exchange)
        except ApiError as error:
            self._refuse(exchange, error)

    def _route(self, request: Request, exchange: Exchange) -> None:
        method, path = request.method, request.path
        if method == "POST" and path == "/v1/chat/completions":
            self._generate(request, exchange, "chat")
        elif method == "POST" and path == "/v1/completions":
            self._generate(request, exchange, "completion")
        elif method == "POST" and path == "/v1/tokenize":
            self._tokenize(request, exchange)
        elif method == "POST" and path == "/handoff/release":
            self._release(request, exchange)
        elif method in ("GET", "HEAD"):
            self._get(path, exchange)
        else:
            raise ApiError(404, "not_found", f"{method} {path} is not served here")

    def _get(self, path: str, exchange: Exchange) -> None:
        if path == "/health":
            exchange.respond(200, b"{}")
        elif path == "/ready":
            if self.draining:
                raise refusal("draining")
            exchange.respond(200, b"{}")
        elif path == "/layout":
            exchange.respond(200, msgspec.json.encode(self._identity))
        elif path == "/conservation":
            exchange.respond(200, msgspec.json.encode(self.driver.state()))
        elif path == "/metrics":
            exchange.respond(200, self._metrics(), "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/v1/models":
            exchange.respond(200, models_body([(self._model, self._max_model_len)], 0))
        else:
            raise ApiError(404, "not_found", f"{path} is not served here")

    @staticmethod
    def _refuse(exchange: Exchange, error: ApiError) -> None:
        headers = [("retry-after", str(error.retry_after_s))] if error.retry_after_s else []
        exchange.respond(error.status, error.body(), headers=headers)

    def _tokenize(self, request: Request, exchange: Exchange) -> None:
        data = decode_object(request.body)
        if "prompt" in data:
            if not isinstance(data["prompt"], str):
                raise ApiError(400, "invalid_value", "prompt: must be a string", "prompt")
            ids = tuple(self._tokeniser.encode(data["prompt"]))
        else:
            data = {"model": self._model} | data
            ids = self._tokeniser.prompt_ids(parse_request(msgspec.json.encode(data), "chat"))
        answer = {"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids}
        exchange.respond(200, msgspec.json.encode(answer))

    def _release(self, request: Request, exchange: Exchange) -> None:
        data = decode_object(request.body)
        request_id = whole(data.get("request_id"))
        generation = whole(data.get("generation", 0))
        if request_id is None or generation is None:
            raise ApiError(400, "invalid_value", "request_id and generation: must be whole numbers")
        self.driver.deliver(Release(request_id, generation))
        exchange.respond(200, b"{}")

    # -------------------------------------------------------------- generation

    def _generate(self, request: Request, exchange: Exchange, kind: Kind) -> None:
        asked = parse_request(request.body, kind)
        if asked.model != self._model:
            raise ApiError(
                404, "model_not_found", f"model {asked.model!r} is not served here", "model"
            )
        if self.draining:
            raise refusal("draining")
        if asked.echo:
            raise ApiError(400, "unsupported", "echo: is not supported here", "echo")
        generation = whole(request.headers.get("x-twofold-generation", "0")) or 0
        source = source_of(asked.kv_transfer_params or {}, self._handoff, generation)
        began_ns = self._clock.now_ns()
        if source is not None and self._handoff == "pull":
            self._submit(request, exchange, asked, (), source, 0)
            return

        def tokenised(ids: tuple[int, ...]) -> None:
            if exchange.gone:
                return
            took_ns = self._clock.now_ns() - began_ns
            told = source and msgspec.structs.replace(source, n_tokens=len(ids))
            try:
                self._submit(request, exchange, asked, ids, told, took_ns)
            except ApiError as error:
                self._refuse(exchange, error)

        if len(request.body) <= _INLINE_CHARS:
            tokenised(self._tokeniser.prompt_ids(asked))
        else:
            self._tokenise_aside(asked, exchange, tokenised)

    def _tokenise_aside(
        self,
        asked: GenerateRequest,
        exchange: Exchange,
        then: Callable[[tuple[int, ...]], None],
    ) -> None:
        def job() -> None:
            try:
                ids = self._tokeniser.prompt_ids(asked)
            except ApiError as error:
                refused = error
                self._soon(lambda: self._refuse(exchange, refused))
                return
            self._soon(lambda: then(ids))

        self._tokenisers.submit(job)

    def _submit(
        self,
        request: Request,
        exchange: Exchange,
        asked: GenerateRequest,
        ids: tuple[int, ...],
        source: KVHandle | None,
        tokenise_ns: int,
    ) -> None:
        # On the device one bad index would fail every request of the step.
        self._check_ids(ids, "prompt")
        self._check_ids(asked.stop_token_ids, "stop_token_ids")
        n_prompt = source.n_tokens if source else len(ids)
        params = asked.kv_transfer_params or {}
        hold = bool(params.get("do_remote_decode"))
        pushed = hold and self._handoff != "pull"
        transfer = transfer_of(params) if pushed else 0
        max_tokens = asked.max_tokens or self._max_model_len - n_prompt
        if max_tokens < 1 or n_prompt + max_tokens > self._max_model_len:
            raise refusal("too_long", n_prompt, self._max_model_len)
        request_id = next(self._ids)
        if pushed:
            transfer = transfer or request_id
        generation = Generation(
            request_id=request_id,
            asked=asked,
            exchange=exchange,
            tokeniser=self._tokeniser,
            clock=self._clock,
            received_ns=request.received_ns,
            tokenise_ns=tokenise_ns,
            remote=source is not None,
            transfer=transfer,
        )
        self._generations[request_id] = generation
        exchange.on_gone = lambda: self._gone(request_id)
        seed = asked.sampling.seed if asked.seeded else int.from_bytes(os.urandom(8), "big") >> 1
        self.driver.sample_by(request_id, msgspec.structs.replace(asked.sampling, seed=seed))
        self.driver.deliver(
            Submit(
                request_id=request_id,
                tokens=ids,
                max_tokens=max_tokens,
                min_tokens=min(asked.min_tokens, max_tokens),
                stop_token_ids=asked.stop_token_ids + (() if asked.ignore_eos else self._eos),
                salt=asked.cache_salt,
                hold=hold,
                source=source,
                generation=whole(request.headers.get("x-twofold-generation", "0")) or 0,
                time_left_ns=(whole(request.headers.get("x-twofold-time-left-ms", "0")) or 0)
                * NS_PER_MS,
                transfer=transfer,
            )
        )

    def _check_ids(self, ids: tuple[int, ...], name: str) -> None:
        if ids and max(ids) >= self._vocab_size:
            raise ApiError(
                400,
                "invalid_value",
                f"{name}: token ids must be from 0 to {self._vocab_size - 1}, not {max(ids)}",
                name,
            )

    def _gone(self, request_id: RequestId) -> None:
        if self._generations.pop(request_id, None) is not None:
            self.driver.deliver(Abort(request_id, "cancelled", "client gone"))

    # ----------------------------------------------------------------- answers

    def token(self, effect: Token, sampled: Sampled) -> None:
        """The core's tokens; a stop string in the text ends the request early."""
        generation = self._generations.get(effect.request_id)
        if generation is not None and generation.token(sampled, effect.phases):
            self.driver.deliver(Abort(effect.request_id, "finished", "stop"))

    def ended(self, effect: Ended) -> int | None:
        """The core's terminal events; how long the request took, if its client is still there."""
        generation = self._generations.pop(effect.request_id, None)
        if generation is None:
            return None
        if effect.held:
            hold = self.driver.core.pool.holds.get(effect.request_id)
            generation.kv_params = held_params(effect, hold, self._identity, generation.transfer)
        generation.end(effect, self._error(effect))
        return self._clock.now_ns() - generation.received_ns

    def _error(self, effect: Ended) -> ApiError | None:
        if effect.outcome == "finished":
            return None
        if effect.outcome == "refused":
            return refusal(effect.reason, effect.n_prompt, self._max_model_len)
        if effect.reason == "deadline":
            return ApiError(504, "deadline_exceeded", "the deadline passed")
        if effect.outcome == "cancelled":
            return ApiError(499, "cancelled", effect.reason)
        return ApiError(500, "generation_failed", effect.reason)
