"""One request's answer on a worker: tokens in, OpenAI's bytes out."""

from __future__ import annotations

import time
from typing import Any, Protocol

from twofold.device.sampling import Sampled
from twofold.live.detokeniser import Detokeniser
from twofold.live.exchange import EVENT_STREAM, Exchange, Header
from twofold.live.openai import (
    DONE,
    AnswerBuilder,
    ApiError,
    GenerateRequest,
    TokenLogprob,
    Usage,
    chat_logprobs,
    completion_logprobs,
    error_event,
)
from twofold.live.tokeniser import Tokeniser
from twofold.messages import Ended, Phases
from twofold.metrics.ledger import format_server_timing
from twofold.types import RequestId


class Times(Protocol):
    """What a generation needs of a clock."""

    def now_ns(self) -> int: ...  # noqa: D102


_REFUSALS: dict[str, tuple[int, str, int]] = {
    # code: status, message, seconds after which to try again
    "no_tokens": (400, "max_tokens must be at least 1", 0),
    "empty_prompt": (400, "the prompt has no tokens", 0),
    "too_long": (
        413,
        "the prompt and max_tokens together are longer than max_model_len allows",
        0,
    ),
    "never_fits": (413, "the request needs more KV blocks than this worker has", 0),
    "queue_full": (429, "too many requests are waiting at this worker", 1),
    "duplicate_handle": (409, "this KV handle is being read already", 0),
    "draining": (503, "this worker is shutting down", 1),
}


def refusal(code: str, n_prompt: int = 0, limit: int = 0) -> ApiError:
    """The error that says why the core refused a request."""
    status, message, retry_after_s = _REFUSALS.get(code, (500, code, 0))
    if code == "too_long" and limit:
        message += f" ({n_prompt} prompt tokens, max_model_len {limit})"
    return ApiError(status, code, message, retry_after_s=retry_after_s)


class Generation:
    """Collects or streams the answer of one request to its `exchange`.

    The head is held back until the first token, so that what fails before has a status of its
    own. `kv_params` go into the answer of a request whose KV is held for a peer. `tokenise_ns` 0:
    it was not tokenised here. `transfer` is the push that it belongs to, if any.
    """

    def __init__(
        self,
        *,
        request_id: RequestId,
        asked: GenerateRequest,
        exchange: Exchange,
        tokeniser: Tokeniser,
        clock: Times,
        received_ns: int,
        tokenise_ns: int,
        remote: bool,
        transfer: int = 0,
        echo: str = "",
    ) -> None:
        self.request_id = request_id
        self.asked = asked
        self.exchange = exchange
        self.remote = remote
        self.transfer = transfer
        self.kv_params: dict[str, Any] | None = None
        self.n_output = 0
        self.first_ns = 0
        self._tokeniser = tokeniser
        self._clock = clock
        self.received_ns = received_ns
        self._tokenise_ns = tokenise_ns
        self._detokeniser = Detokeniser(tokeniser.decode, asked.stop, asked.min_tokens)
        self._answer = AnswerBuilder(
            asked.kind,
            exchange.request_id,
            asked.model,
            int(time.time()),
            include_usage=asked.include_usage,
        )
        self._texts: list[str] = []
        self._offset = 0
        self._unsent = echo
        self._logprobs: list[TokenLogprob] = []
        self._phases = Phases()

    # ------------------------------------------------------------------ tokens

    def token(self, sampled: Sampled, phases: Phases | None) -> bool:
        """Take a token. True when its text completed a stop string, so that no more is wanted."""
        if phases is not None:
            self._phases = phases
            self.first_ns = self._clock.now_ns()
        self.n_output += 1
        if self.asked.sampling.logprobs is not None:
            self._logprobs.append(self._logprob(sampled))
        self._unsent += self._detokeniser.feed(sampled.token)
        if self.asked.stream and not self._detokeniser.stopped:
            self.exchange.write(self._events(None))
        return self._detokeniser.stopped

    def _logprob(self, sampled: Sampled) -> TokenLogprob:
        def shown(token: int, logprob: float | None) -> TokenLogprob:
            text = self._tokeniser.token_text(token)
            return TokenLogprob(text, text.encode(), logprob if logprob is not None else 0.0)

        chosen = shown(sampled.token, sampled.logprob)
        top = tuple(shown(token, logprob) for token, logprob in sampled.top)
        return TokenLogprob(chosen.text, chosen.raw, chosen.logprob, top)

    def _events(self, finish_reason: str | None) -> bytes:
        """Events for what has not been sent yet; the head goes out before the first of them."""
        data = b""
        if not self.exchange.started:
            self.exchange.start(200, EVENT_STREAM, self._headers())
            data = self._answer.role_event()
        if self._unsent or self._logprobs or finish_reason is not None:
            data += self._answer.event(self._unsent, finish_reason, self._take_logprobs())
            self._offset += len(self._unsent)
            self._unsent = ""
        return data

    def _take_logprobs(self) -> dict[str, Any] | None:
        taken, self._logprobs = self._logprobs, []
        if self.asked.sampling.logprobs is None:
            return None
        if self.asked.kind == "chat":
            return chat_logprobs(taken)
        return completion_logprobs(taken, self._offset)

    # --------------------------------------------------------------------- end

    def end(self, ended: Ended, error: ApiError | None) -> None:
        """The request has ended: `error` says what to answer if it did not finish."""
        if error is not None:
            self._fail(error)
            return
        self._unsent += self._detokeniser.flush()
        finish = "stop" if self._detokeniser.stopped else ended.reason
        usage = Usage(
            prompt_tokens=ended.n_prompt,
            completion_tokens=ended.n_output,
            cached_tokens=ended.n_cached,
        )
        if not self.asked.stream:
            body = self._answer.whole(
                self._unsent, finish, usage, self._take_logprobs(), self.kv_params
            )
            self.exchange.respond(200, body, headers=self._headers())
            return
        last = self._events(finish)
        if self.asked.include_usage:
            last += self._answer.usage_event(usage)
        self.exchange.end(last + DONE)

    def _fail(self, error: ApiError) -> None:
        if self.exchange.started:
            self.exchange.close_after()
            self.exchange.end(error_event(error.status, error.code, error.message))
            return
        headers = [("retry-after", str(error.retry_after_s))] if error.retry_after_s else []
        self.exchange.respond(error.status, error.body(), headers=headers)

    def _headers(self) -> list[Header]:
        """The worker's part of the ledger: phases to the first token, and all the time so far."""
        phases = self._phases
        if self.remote:
            named = self._before_the_handoff() if self._tokenise_ns else {}
            named |= {
                "handoff_wait": phases.handoff_wait_ns,
                "transfer": phases.transfer_ns,
                "decode_queue": phases.queue_ns,
                "first_step": phases.compute_ns,
            }
        else:
            named = {
                "tokenise": self._tokenise_ns,
                "prefill_queue": phases.queue_ns,
                "prefill": phases.compute_ns,
            }
        now_ns = self._clock.now_ns()
        if not self.asked.stream and self.kv_params is None:
            named["decode"] = now_ns - self.first_ns
        named["total"] = now_ns - self.received_ns
        headers = [("server-timing", format_server_timing(named))]
        if self.remote:
            headers.append(("x-twofold-transferred", str(phases.n_bytes)))
        return headers

    def _before_the_handoff(self) -> dict[str, int]:
        """Where KV is pushed this leg began with the other: what that did is part of its time."""
        return {
            "tokenise": self._tokenise_ns,
            "prefill_queue": self._phases.peer_queue_ns,
            "prefill": self._phases.peer_compute_ns,
        }
