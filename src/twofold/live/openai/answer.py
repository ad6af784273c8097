"""Answers in OpenAI's forms: whole JSON bodies and server-sent events, as bytes.

A stream's fixed parts are built once, so that an event costs one small concatenation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from twofold.live.openai.request import Kind

DONE: Final = b"data: [DONE]\n\n"
_LOWEST_LOGPROB: Final = -9999.0
_encode = msgspec.json.Encoder().encode


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token, its text, its bytes, its log probability, and its best alternatives."""

    text: str
    raw: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one request; `cached_tokens` of the prompt were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` object of a chat's choice."""
    return {"content": [_chat_token(t) | _chat_top(t) for t in tokens]}


def completion_logprobs(tokens: Sequence[TokenLogprob], offset: int = 0) -> dict[str, Any]:
    """The `logprobs` object of a completion's choice; `offset` is in characters of the text."""
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [t.text for t in tokens],
        "token_logprobs": [_finite(t.logprob) for t in tokens],
        "top_logprobs": [{a.text: _finite(a.logprob) for a in t.top} for t in tokens],
        "text_offset": offsets,
    }


class AnswerBuilder:
    """Builds one request's answer: `event`s and `usage_event` for a stream, or one `whole`."""

    __slots__ = ("_chat", "_head", "_id", "_model", "_null_usage", "_object", "created")

    def __init__(
        self, kind: Kind, request_id: str, model: str, created_s: int, include_usage: bool = False
    ) -> None:
        self._chat = kind == "chat"
        self._id = ("chatcmpl-" if self._chat else "cmpl-") + request_id
        self._model = model
        self.created = created_s
        self._object = "chat.completion" if self._chat else "text_completion"
        name = "chat.completion.chunk" if self._chat else self._object
        head = _encode({"id": self._id, "object": name, "created": created_s, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._null_usage = b',"usage":null' if include_usage else b""

    def role_event(self) -> bytes:
        """A chat's first event; belongs in the same write as the first token's. Empty otherwise."""
        if not self._chat:
            return b""
        delta = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
        return b"%s%s%s]%s}\n\n" % (self._head, delta, b'"finish_reason":null}', self._null_usage)

    def event(
        self, text: str, finish_reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        """One piece of the answer's text, with the finish reason on the last."""
        return b'%s{"index":0,%s%s%s,"logprobs":%s,"finish_reason":%s}]%s}\n\n' % (
            self._head,
            b'"delta":{"content":' if self._chat else b'"text":',
            _encode(text),
            b"}" if self._chat else b"",
            b"null" if logprobs is None else _encode(logprobs),
            b"null" if finish_reason is None else _encode(finish_reason),
            self._null_usage,
        )

    def usage_event(self, usage: Usage) -> bytes:
        """The event before the end of a stream whose client asked for usage."""
        return b'%s],"usage":%s}\n\n' % (self._head, _encode(usage.as_dict()))

    def whole(
        self,
        text: str,
        finish_reason: str,
        usage: Usage,
        logprobs: dict[str, Any] | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> bytes:
        """The JSON body of an answer that is not streamed."""
        choice: dict[str, Any] = {"index": 0}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        choice["logprobs"] = logprobs
        choice["finish_reason"] = finish_reason
        body: dict[str, Any] = {
            "id": self._id,
            "object": self._object,
            "created": self.created,
            "model": self._model,
            "choices": [choice],
            "usage": usage.as_dict(),
        }
        if kv_transfer_params is not None:
            body["kv_transfer_params"] = kv_transfer_params
        return _encode(body)


def models_body(models: Sequence[tuple[str, int]], created_s: int) -> bytes:
    """The body of /v1/models for (name, max_model_len) pairs."""
    data = [
        {
            "id": name,
            "object": "model",
            "created": created_s,
            "owned_by": "twofold",
            "max_model_len": max_model_len,
        }
        for name, max_model_len in models
    ]
    return _encode({"object": "list", "data": data})


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST_LOGPROB


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.raw)}


def _chat_top(token: TokenLogprob) -> dict[str, Any]:
    return {"top_logprobs": [_chat_token(t) for t in token.top]}
