"""What may be asked in OpenAI's form, how wrong requests are refused, how answers look."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.live.openai import (
    DONE,
    AnswerBuilder,
    ApiError,
    GenerateRequest,
    Kind,
    Message,
    TokenLogprob,
    Usage,
    chat_logprobs,
    completion_logprobs,
    error_body,
    error_event,
    models_body,
    parse_request,
)

USER = [{"role": "user", "content": "hello"}]


def chat(**more: Any) -> GenerateRequest:
    return parse_request(json.dumps({"model": "m", "messages": USER} | more).encode(), "chat")


def completion(**more: Any) -> GenerateRequest:
    return parse_request(json.dumps({"model": "m", "prompt": "hi"} | more).encode(), "completion")


def test_defaults_are_openais() -> None:
    request = chat()
    assert (request.model, request.messages) == ("m", (Message("user", "hello"),))
    assert request.max_tokens is None
    assert not request.seeded
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert sampling.logprobs is None
    assert completion().max_tokens == 16
    assert chat(temperature=None, max_tokens=None, stop=None, stream=None) == request


def test_every_field_arrives() -> None:
    request = completion(
        prompt=[1, 2, 3],
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=7,
        min_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[5],
        ignore_eos=True,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        seed=-3,
        repetition_penalty=1.5,
        presence_penalty=-2,
        frequency_penalty=2,
        logprobs=0,
        echo=True,
        cache_salt="s",
        kv_transfer_params={"a": 1},
        user="someone",
        strange=1,
    )
    assert request.prompt == (1, 2, 3)
    assert request.stream
    assert request.include_usage
    assert (request.max_tokens, request.min_tokens) == (7, 2)
    assert (request.stop, request.stop_token_ids) == (("a", "b"), (5,))
    assert request.ignore_eos
    assert request.echo
    assert request.seeded
    assert request.cache_salt == "s"
    assert request.kv_transfer_params == {"a": 1}
    assert request.extra == {"strange": 1}
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0,
        0.5,
        0,
        0.1,
    )
    assert (sampling.seed, sampling.repetition_penalty, sampling.logprobs) == (-3, 1.5, 0)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-2, 2)
    request = chat(logprobs=True, top_logprobs=4, max_completion_tokens=9, stop="x")
    assert (request.sampling.logprobs, request.max_tokens, request.stop) == (4, 9, ("x",))
    assert chat(logprobs=True).sampling.logprobs == 0


@pytest.mark.parametrize(
    "more",
    [
        {"n": 1},
        {"n": None},
        {"best_of": 1},
        {"response_format": {"type": "text"}},
        {"tools": []},
        {"tool_choice": "auto"},
        {"logit_bias": {}},
        {"max_tokens": 3, "max_completion_tokens": 3},
        {"max_tokens": 3.0},
        {"metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"messages": [{"role": "system", "content": [{"type": "text", "text": "x"}]}, *USER]},
    ],
)
def test_what_asks_for_nothing_special_is_taken(more: dict[str, Any]) -> None:
    assert chat(**more).model == "m"


def test_text_parts_are_joined_and_single_prompts_unwrapped() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "a\nb"
    assert completion(prompt=["only"]).prompt == "only"
    assert completion(prompt=[[1, 2]]).prompt == (1, 2)


WRONG: list[tuple[Kind, dict[str, Any], str]] = [
    ("chat", {"model": None}, "model"),
    ("chat", {"model": 3}, "model"),
    ("chat", {"messages": None}, "messages"),
    ("chat", {"messages": []}, "messages"),
    ("chat", {"messages": "hi"}, "messages"),
    ("chat", {"messages": ["hi"]}, "messages[0]"),
    ("chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ("chat", {"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ("chat", {"messages": [*USER, {"role": "user"}]}, "messages[1].content"),
    ("chat", {"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content",
    ),
    ("chat", {"logprobs": 3}, "logprobs"),
    ("chat", {"top_logprobs": 3}, "top_logprobs"),
    ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("chat", {"echo": True}, "echo"),
    ("chat", {"tools": [{"type": "function"}]}, "tools"),
    ("chat", {"response_format": {"type": "json_object"}}, "response_format"),
    ("chat", {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ("chat", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("chat", {"stream": True, "stream_options": 3}, "stream_options"),
    ("completion", {"prompt": None}, "prompt"),
    ("completion", {"prompt": ""}, "prompt"),
    ("completion", {"prompt": []}, "prompt"),
    ("completion", {"prompt": 5}, "prompt"),
    ("completion", {"prompt": ["a", "b"]}, "prompt"),
    ("completion", {"prompt": [[1], [2]]}, "prompt"),
    ("completion", {"prompt": [1, "a"]}, "prompt"),
    ("completion", {"prompt": [1, -1]}, "prompt"),
    ("completion", {"prompt": [1, True]}, "prompt"),
    ("completion", {"max_tokens": 0}, "max_tokens"),
    ("completion", {"max_tokens": -5}, "max_tokens"),
    ("completion", {"max_tokens": True}, "max_tokens"),
    ("completion", {"max_tokens": "5"}, "max_tokens"),
    ("completion", {"max_tokens": 1.5}, "max_tokens"),
    ("completion", {"max_tokens": 2**70}, "max_tokens"),
    ("completion", {"min_tokens": 17}, "min_tokens"),
    ("completion", {"min_tokens": -1}, "min_tokens"),
    ("completion", {"stream": 1}, "stream"),
    ("completion", {"stream": "yes"}, "stream"),
    ("completion", {"temperature": 2.1}, "temperature"),
    ("completion", {"temperature": -0.1}, "temperature"),
    ("completion", {"temperature": "hot"}, "temperature"),
    ("completion", {"temperature": True}, "temperature"),
    ("completion", {"top_p": 0}, "top_p"),
    ("completion", {"top_p": 1.01}, "top_p"),
    ("completion", {"top_k": -2}, "top_k"),
    ("completion", {"top_k": 1.5}, "top_k"),
    ("completion", {"min_p": 2}, "min_p"),
    ("completion", {"repetition_penalty": 0}, "repetition_penalty"),
    ("completion", {"presence_penalty": 2.5}, "presence_penalty"),
    ("completion", {"frequency_penalty": -2.5}, "frequency_penalty"),
    ("completion", {"seed": 1.5}, "seed"),
    ("completion", {"seed": 2**64}, "seed"),
    ("completion", {"stop": ""}, "stop"),
    ("completion", {"stop": ["a", ""]}, "stop"),
    ("completion", {"stop": ["a"] * 17}, "stop"),
    ("completion", {"stop": 4}, "stop"),
    ("completion", {"stop_token_ids": [1.0]}, "stop_token_ids"),
    ("completion", {"logprobs": 21}, "logprobs"),
    ("completion", {"logprobs": True}, "logprobs"),
    ("completion", {"n": 2}, "n"),
    ("completion", {"n": 0}, "n"),
    ("completion", {"n": "1"}, "n"),
    ("completion", {"n": True}, "n"),
    ("completion", {"best_of": 3}, "best_of"),
    ("completion", {"suffix": "x"}, "suffix"),
    ("completion", {"logit_bias": {"5": 1}}, "logit_bias"),
    ("completion", {"kv_transfer_params": "x"}, "kv_transfer_params"),
    ("completion", {"cache_salt": 5}, "cache_salt"),
]


@pytest.mark.parametrize(("kind", "more", "param"), WRONG)
def test_wrong_fields_are_named(kind: Kind, more: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        (chat if kind == "chat" else completion)(**more)
    error = caught.value
    assert (error.status, error.param) == (400, param)
    assert error.message.startswith(f"{param}: ")
    assert error.code in ("invalid_value", "unsupported")


def test_messages_say_what_is_right() -> None:
    for more, text in (
        ({"temperature": 9}, "temperature: must be a number from 0 to 2, not 9"),
        ({"top_p": 0}, "top_p: must be a number above 0 and at most 1, not 0"),
        ({"max_tokens": 0}, "max_tokens: must be a whole number of at least 1, not 0"),
        ({"top_k": True}, "top_k: must be a whole number from -1 to 2147483647, not true"),
        ({"n": 3}, "n: only 1 is supported"),
    ):
        with pytest.raises(ApiError) as caught:
            completion(**more)
        assert caught.value.message == text


@pytest.mark.parametrize(
    "body",
    [b"", b" ", b"{", b"nope", b"[]", b'"x"', b"null", b"\xff\xfe", b'{"a":NaN}', b"[" * 9999],
)
def test_bodies_that_are_no_json_object(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(body, "chat")
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
_names = st.sampled_from(
    (
        *("model", "prompt", "messages", "stream", "stream_options", "max_tokens", "min_tokens"),
        *("stop", "stop_token_ids", "n", "seed", "temperature", "top_p", "top_k", "logprobs"),
        *("top_logprobs", "response_format", "tools", "priority", "user", "x"),
    )
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(_names, _json, max_size=4), st.sampled_from(["chat", "completion"]))
def test_any_json_is_taken_or_refused_in_words(more: dict[str, Any], kind: Kind) -> None:
    body = json.dumps({"model": "m", "messages": USER, "prompt": "x"} | more).encode()
    refused: ApiError | None = None
    try:
        request = parse_request(body, kind)
    except ApiError as error:
        refused = error
    if refused is not None:
        assert refused.status == 400
    else:
        assert request.max_tokens is None or request.max_tokens >= 1
        assert 0 <= request.sampling.temperature <= 2


def test_errors_have_openais_shape() -> None:
    assert json.loads(error_body(429, "full", "wait", None)) == {
        "error": {"message": "wait", "type": "rate_limit_error", "param": None, "code": "full"}
    }
    assert json.loads(error_body(502, "x", "y"))["error"]["type"] == "server_error"
    assert json.loads(error_body(400, "x", "y"))["error"]["type"] == "invalid_request_error"
    event = error_event(502, "x", "y")
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")


def events(raw: bytes) -> list[dict[str, Any]]:
    assert raw.endswith(b"\n\n")
    return [json.loads(line.removeprefix(b"data: ")) for line in raw.strip().split(b"\n\n")]


def test_chat_stream() -> None:
    answer = AnswerBuilder("chat", "r1", "m", 5, include_usage=True)
    tricky = 'a"\n\\é🙂'
    token = TokenLogprob("a", b"a", -0.5, (TokenLogprob("b", b"b", -math.inf),))
    raw = answer.role_event() + answer.event(tricky, logprobs=chat_logprobs([token]))
    raw += answer.event("", "stop") + answer.usage_event(
        Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
    )
    role, first, last, usage = events(raw)
    head = {"id": "chatcmpl-r1", "object": "chat.completion.chunk", "created": 5, "model": "m"}
    for item in (role, first, last, usage):
        assert {k: item[k] for k in head} == head
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert role["usage"] is None
    assert first["choices"][0]["delta"] == {"content": tricky}
    assert first["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [{"token": "b", "logprob": -9999.0, "bytes": [98]}],
            }
        ]
    }
    assert first["choices"][0]["finish_reason"] is None
    assert last["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert DONE == b"data: [DONE]\n\n"


def test_completion_stream_and_whole() -> None:
    answer = AnswerBuilder("completion", "r2", "m", 5)
    assert answer.role_event() == b""
    (event,) = events(answer.event("x", "length"))
    assert event["object"] == "text_completion"
    assert event["choices"] == [
        {"index": 0, "text": "x", "logprobs": None, "finish_reason": "length"}
    ]
    assert "usage" not in event
    tokens = [TokenLogprob("ab", b"ab", -1.0), TokenLogprob("c", b"c", -2.0)]
    logprobs = completion_logprobs(tokens, offset=10)
    usage = Usage(prompt_tokens=1, completion_tokens=2)
    whole = json.loads(answer.whole("abc", "stop", usage, logprobs, {"remote_port": 1}))
    assert whole["id"] == "cmpl-r2"
    assert whole["choices"][0]["text"] == "abc"
    assert whole["choices"][0]["logprobs"]["text_offset"] == [10, 12]
    assert whole["choices"][0]["logprobs"]["token_logprobs"] == [-1.0, -2.0]
    assert whole["kv_transfer_params"] == {"remote_port": 1}
    assert whole["usage"]["total_tokens"] == 3
    whole = json.loads(AnswerBuilder("chat", "r", "m", 5).whole("abc", "stop", usage))
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "abc"}
    assert "kv_transfer_params" not in whole


def test_models() -> None:
    (model,) = json.loads(models_body([("m", 512)], 5))["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("m", "model", 512)
