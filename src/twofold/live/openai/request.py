"""The request schema of /v1/completions and /v1/chat/completions, checked field by field."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec

from twofold.live.openai import fields as field
from twofold.live.openai.errors import ApiError
from twofold.live.openai.fields import Fields, invalid, shown, unsupported
from twofold.types import SamplingParams

log = logging.getLogger("twofold.openai")

Kind = Literal["chat", "completion"]

MAX_STOPS: Final = 16
MAX_LOGPROBS: Final = 20
_ROLES: Final = ("system", "developer", "user", "assistant")
_DEFAULT_COMPLETION_TOKENS: Final = 16
HOP_FIELDS: Final = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")
"""Fields that only the gateway may send to a worker; it drops them from what clients send."""


class Message(msgspec.Struct, frozen=True):
    """One turn of a chat; text parts are joined by newlines."""

    role: str
    content: str


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request.

    `prompt` is a string or token ids for a completion; `messages` are a chat's turns.
    `max_tokens` None means up to the model's limit. `sampling.seed` counts only where `seeded`;
    otherwise the caller draws one. `extra` holds fields that are unknown and were ignored.
    """

    kind: Kind
    model: str
    prompt: str | tuple[int, ...] = ""
    messages: tuple[Message, ...] = ()
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling: SamplingParams
    seeded: bool = False
    echo: bool = False
    cache_salt: str = ""
    kv_transfer_params: dict[str, Any] | None = None
    extra: dict[str, Any] = {}


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises ApiError 400."""
    if not body.strip():
        raise ApiError(400, "invalid_json", "the body is empty; it must be a JSON object")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, "invalid_json", f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise ApiError(400, "invalid_json", "the body is nested too deeply") from None
    if not isinstance(value, dict):
        raise ApiError(400, "invalid_json", f"the body must be a JSON object, not {shown(value)}")
    return value


def parse_request(body: bytes, kind: Kind) -> GenerateRequest:
    """Check a request's body. Raises ApiError 400, which names the field and what is right."""
    return check_request(decode_object(body), kind)


def check_request(data: Fields, kind: Kind) -> GenerateRequest:
    """Check a decoded body, as `parse_request` does."""
    chat = kind == "chat"
    model = field.string(data, "model")
    if not model:
        raise invalid("model", "is required")
    _refuse_what_is_not_done(data, chat)
    max_tokens = _max_tokens(data, chat)
    min_tokens = field.integer(data, "min_tokens", 0) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid("min_tokens", f"must be at most max_tokens, which is {max_tokens}")
    stream = field.boolean(data, "stream", False)
    seed = field.integer(data, "seed")
    stop_token_ids = data.get("stop_token_ids")
    return GenerateRequest(
        kind=kind,
        model=model,
        prompt="" if chat else _prompt(data),
        messages=_messages(data) if chat else (),
        stream=stream,
        include_usage=_include_usage(data, stream),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=_stop(data),
        stop_token_ids=()
        if stop_token_ids is None
        else field.token_ids(stop_token_ids, "stop_token_ids"),
        ignore_eos=field.boolean(data, "ignore_eos", False),
        sampling=_sampling(data, chat, seed or 0),
        seeded=seed is not None,
        echo=False if chat else field.boolean(data, "echo", False),
        cache_salt=field.string(data, "cache_salt"),
        kv_transfer_params=_kv_transfer_params(data),
        extra=_extra(data, chat),
    )


def _max_tokens(data: Fields, chat: bool) -> int | None:
    old = field.integer(data, "max_tokens", 1)
    new = field.integer(data, "max_completion_tokens", 1)
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens", "differs from max_completion_tokens; give one of them")
    if old is None and new is None:
        return None if chat else _DEFAULT_COMPLETION_TOKENS
    return old if new is None else new


def _include_usage(data: Fields, stream: bool) -> bool:
    options = data.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise invalid("stream_options", f"must be an object, not {shown(options)}")
    if not stream:
        raise invalid("stream_options", "may only be given with stream: true")
    if options.get("continuous_usage_stats"):
        raise unsupported("stream_options", "continuous_usage_stats is not supported")
    return field.boolean(options, "include_usage", False)


def _prompt(data: Fields) -> str | tuple[int, ...]:
    prompt = data.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        if not prompt:
            raise invalid("prompt", "must not be empty")
        return prompt
    if isinstance(prompt, list):
        if not prompt:
            raise invalid("prompt", "must not be empty")
        if isinstance(prompt[0], str | list):
            raise unsupported("prompt", "several prompts in one request are not supported")
        return field.token_ids(prompt, "prompt")
    if prompt is None:
        raise invalid("prompt", "is required")
    raise invalid("prompt", f"must be a string or a list of token ids, not {shown(prompt)}")


def _messages(data: Fields) -> tuple[Message, ...]:
    messages = data.get("messages")
    if messages is None:
        raise invalid("messages", "is required")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", f"must be a list of at least one message, not {shown(messages)}")
    return tuple([_message(item, f"messages[{i}]") for i, item in enumerate(messages)])


def _message(item: object, name: str) -> Message:
    if not isinstance(item, dict):
        raise invalid(name, f"must be an object, not {shown(item)}")
    role = item.get("role")
    if role in ("tool", "function"):
        raise unsupported(f"{name}.role", f"{role!r} is not supported")
    if role not in _ROLES:
        raise invalid(f"{name}.role", f"must be one of {', '.join(_ROLES)}")
    if item.get("tool_calls") or item.get("function_call"):
        raise unsupported(f"{name}.tool_calls", "tools are not supported")
    return Message(str(role), _content(item.get("content"), f"{name}.content"))


def _content(content: object, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise invalid(name, f"must be a string or a list of text parts, not {shown(content)}")
    texts: list[str] = []
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise invalid(name, 'each part must be an object with a "type"')
        if part["type"] != "text":
            raise unsupported(name, f"parts of type {part['type'][:40]!r} are not supported")
        if not isinstance(part.get("text"), str):
            raise invalid(name, 'each part must have a "text" that is a string')
        texts.append(part["text"])
    return "\n".join(texts)


def _stop(data: Fields) -> tuple[str, ...]:
    stop = data.get("stop")
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise invalid("stop", f"must be a string or a list of at most {MAX_STOPS} strings")
    for item in stops:
        if not isinstance(item, str) or not item:
            raise invalid("stop", "must hold strings that are not empty")
    return tuple(stops)


def _sampling(data: Fields, chat: bool, seed: int) -> SamplingParams:
    top_k = field.integer(data, "top_k", -1, 2**31 - 1) or 0
    return SamplingParams(
        temperature=field.number(data, "temperature", 1.0, 0.0, 2.0),
        top_p=field.above(data, "top_p", 1.0, 0.0, 1.0),
        top_k=max(0, top_k),
        min_p=field.number(data, "min_p", 0.0, 0.0, 1.0),
        seed=seed,
        repetition_penalty=field.above(data, "repetition_penalty", 1.0, 0.0, float("inf")),
        presence_penalty=field.number(data, "presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=field.number(data, "frequency_penalty", 0.0, -2.0, 2.0),
        logprobs=_logprobs(data, chat),
    )


def _logprobs(data: Fields, chat: bool) -> int | None:
    if not chat:
        return field.integer(data, "logprobs", 0, MAX_LOGPROBS)
    wanted = field.boolean(data, "logprobs", False)
    top = field.integer(data, "top_logprobs", 0, MAX_LOGPROBS)
    if top and not wanted:
        raise invalid("top_logprobs", "may only be given with logprobs: true")
    return (top or 0) if wanted else None


def _kv_transfer_params(data: Fields) -> dict[str, Any] | None:
    params = data.get("kv_transfer_params")
    if params is not None and not isinstance(params, dict):
        raise invalid("kv_transfer_params", f"must be an object, not {shown(params)}")
    return params


_Accepts = Callable[[Any], bool]


def _nothing(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _one(value: Any) -> bool:
    return value is None or (value == 1 and not isinstance(value, bool))


# Fields that other servers act on and this one does not, with the values that ask for nothing.
_NOT_DONE: Final[dict[str, _Accepts]] = {
    "n": _one,
    "best_of": _one,
    "length_penalty": _one,
    "response_format": lambda v: v is None or v == {"type": "text"},
    "tool_choice": lambda v: v in (None, "none", "auto"),
    "function_call": lambda v: v in (None, "none", "auto"),
    "modalities": lambda v: v is None or v == ["text"],
    "add_generation_prompt": lambda v: v is None or v is True,
    "skip_special_tokens": lambda v: v is None or v is True,
    "priority": lambda v: v in (None, 0) and v is not False,
    **dict.fromkeys(
        (
            *("suffix", "logit_bias", "tools", "functions", "audio", "prediction"),
            *("web_search_options", "reasoning_effort", "verbosity", "structured_outputs"),
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema"),
            *("regex", "ebnf", "grammar", "prompt_logprobs", "use_beam_search", "bad_words"),
            *("allowed_token_ids", "truncate_prompt_tokens", "continue_final_message"),
            *("chat_template", "chat_template_kwargs", "documents", "mm_processor_kwargs"),
            *("include_stop_str_in_output", "return_tokens_as_token_ids", "lora_path"),
            *("return_token_ids", "logits_processors", "prompt_embeds", "input_ids"),
        ),
        _nothing,
    ),
}

_KNOWN: Final = frozenset(
    (
        *("model", "prompt", "messages", "stream", "stream_options", "max_tokens"),
        *("max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
        *("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty", "logprobs", "top_logprobs", "echo"),
        *("cache_salt", "user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "parallel_tool_calls", "request_id", *HOP_FIELDS),
    )
)


def _refuse_what_is_not_done(data: Fields, chat: bool) -> None:
    for name, accepts in _NOT_DONE.items():
        if name in data and not accepts(data[name]):
            if name in ("n", "best_of") and type(data[name]) is not int:
                raise invalid(name, f"must be the whole number 1, not {shown(data[name])}")
            what = "only 1 is supported" if name in ("n", "best_of") else "is not supported here"
            raise unsupported(name, what)
    if chat and data.get("echo"):
        raise unsupported("echo", "is not supported for chats")
    if not chat and data.get("top_logprobs") is not None:
        raise unsupported("top_logprobs", "is for chats; give logprobs the number instead")


def _extra(data: Fields, chat: bool) -> dict[str, Any]:
    extra = {k: v for k, v in data.items() if k not in _KNOWN and k not in _NOT_DONE}
    if extra:
        log.debug("ignored unknown fields: %s", ", ".join(sorted(k[:40] for k in extra)))
    return extra
