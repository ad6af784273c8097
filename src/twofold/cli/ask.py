"""A blocking client that asks one question of a gateway and times the answer."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from twofold.cli.ledger_view import Ledger, ledger_of_answer
from twofold.types import ns_to_ms

DEFAULT_QUESTION: Final = "What is the capital of France, and what is it known for?"
_MAX_TOKENS: Final = 128
_SILENCE_S: Final = 300.0


class AskError(Exception):
    """The question was not answered to its end; the message says why, in one line."""


class Answer(msgspec.Struct, frozen=True):
    """The whole text, and where its time went."""

    question: str
    model: str
    text: str
    ledger: Ledger


def ask(host: str, port: int, question: str, on_text: Callable[[str], None]) -> Answer:
    """Stream the answer to `question`, handing each piece of text to `on_text`.

    Raises AskError when the answer does not come, or breaks off.
    """
    connection = http.client.HTTPConnection(host, port, timeout=_SILENCE_S)
    try:
        return _ask(connection, question, on_text)
    except (OSError, http.client.HTTPException) as error:
        raise AskError(f"the connection failed: {error or type(error).__name__}") from None
    finally:
        connection.close()


def served_model(connection: http.client.HTTPConnection) -> str:
    """The first model that the gateway offers. Raises AskError when it offers none."""
    connection.request("GET", "/v1/models")
    answer = connection.getresponse()
    try:
        return str(json.loads(answer.read())["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise AskError(f"/v1/models names no model (status {answer.status})") from None


def chat_body(model: str, question: str) -> dict[str, Any]:
    """The request that asks `question`, which a person can send again with curl."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
        "stream": True,
    }


def _ask(
    connection: http.client.HTTPConnection, question: str, on_text: Callable[[str], None]
) -> Answer:
    model = served_model(connection)
    body = json.dumps(chat_body(model, question)).encode()
    start_ns = time.monotonic_ns()
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise AskError(f"status {answer.status}: {error_text(answer.read())}")
    first_ns: int | None = None
    pieces: list[str] = []
    for piece in _pieces(answer):
        if first_ns is None:
            first_ns = time.monotonic_ns()
        pieces.append(piece)
        on_text(piece)
    end_ns = time.monotonic_ns()
    if first_ns is None:
        raise AskError("the answer is empty")
    headers = {name.lower(): value for name, value in answer.getheaders()}
    ttft_ms, e2e_ms = ns_to_ms(first_ns - start_ns), ns_to_ms(end_ns - start_ns)
    return Answer(question, model, "".join(pieces), ledger_of_answer(headers, ttft_ms, e2e_ms))


def _pieces(answer: http.client.HTTPResponse) -> Iterator[str]:
    """Texts of a stream of server-sent events, empty ones left out. Raises AskError."""
    while line := answer.readline():
        field, _, value = line.decode(errors="replace").strip().partition(":")
        if field != "data":
            continue
        if value.strip() == "[DONE]":
            return
        try:
            event = json.loads(value)
            if "error" in event:
                raise AskError(error_text(value.encode()))
            text = event["choices"][0]["delta"].get("content") if event["choices"] else None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise AskError(f"an event that is no chat completion: {value.strip()[:80]}") from None
        if text:
            yield text
    raise AskError("the answer broke off")


def error_text(body: bytes, otherwise: str = "no reason given") -> str:
    """The message in an error of OpenAI's shape, else the body's beginning, else `otherwise`."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200].decode(errors="replace").strip() or otherwise
