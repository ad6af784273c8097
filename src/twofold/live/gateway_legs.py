"""What the gateway sends on each leg of a request, in the form that vLLM's split workers take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from twofold.live.gateway_watch import Identity
from twofold.live.openai import HOP_FIELDS
from twofold.types import NS_PER_MS

_PASSED_ON: Final = ("authorization", "traceparent", "tracestate")
_ASK_FOR_KV: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
LegName = Literal["prefill", "decode"]
_encode = msgspec.json.Encoder().encode


class Handle(msgspec.Struct, frozen=True):
    """What a prefill leg answered: `raw` goes to the decode leg byte for byte."""

    raw: bytes
    remote_request_id: str | int | None


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class _Params(msgspec.Struct):
    do_remote_prefill: bool = False
    remote_request_id: str | int | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_params = msgspec.json.Decoder(_Params).decode


def client_body(body: bytes, data: Mapping[str, Any]) -> bytes:
    """The client's body without what only the gateway may say; `data` is it, decoded."""
    if not any(name in data for name in HOP_FIELDS):
        return body.strip()
    return _encode({k: v for k, v in data.items() if k not in HOP_FIELDS})


def prefill_body(data: Mapping[str, Any], transfer: int) -> bytes:
    """The body of the prefill leg: one token, no stream, and the KV kept for a decode worker.

    `transfer` names the push that it belongs to; 0: the KV is kept until it is read.
    """
    drop = (*HOP_FIELDS, "stream_options", "min_tokens")
    leg = {k: v for k, v in data.items() if k not in drop}
    leg["stream"] = False
    leg["max_tokens"] = 1
    leg["max_completion_tokens"] = 1
    leg["kv_transfer_params"] = _ASK_FOR_KV | ({"transfer_id": transfer} if transfer else {})
    return _encode(leg)


def decode_body(client: bytes, handle: bytes) -> bytes:
    """The body of the decode leg: the client's own with the handle put in, nothing re-encoded."""
    return client[:-1] + b',"kv_transfer_params":' + handle + b"}"


def push_handle(prefill: Identity | None, transfer: int) -> bytes:
    """What a decode leg is told that leaves together with its prefill leg.

    None: that worker was lost since it was chosen, and what is asked of it will be cancelled.
    """
    return _encode(
        {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": prefill.engine_id if prefill else "",
            "remote_host": prefill.handoff_host if prefill else "",
            "remote_port": prefill.handoff_port if prefill else 0,
            "tp_size": 1,
            "transfer_id": transfer,
        }
    )


def read_handle(answer: bytes) -> Handle:
    """The handle in a prefill leg's answer. Raises ValueError with the reason if there is none."""
    try:
        raw = _decode_answer(answer).kv_transfer_params
        if bytes(raw) == b"null":
            raise ValueError("the prefill worker kept no KV: its answer has no kv_transfer_params")
        params = _decode_params(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the prefill worker's answer cannot be read: {error}") from None
    if not params.do_remote_prefill:
        raise ValueError("the prefill worker kept no KV: do_remote_prefill is not true")
    return Handle(bytes(raw), params.remote_request_id)


def leg_headers(
    client: Mapping[str, str], request_id: str, generation: int, time_left_ns: int
) -> str:
    """Header lines of a leg. Deadlines cross processes as time left, never as a point in time."""
    lines = f"x-request-id: {request_id}\r\nx-twofold-generation: {generation}\r\n"
    if time_left_ns > 0:
        lines += f"x-twofold-time-left-ms: {max(1, time_left_ns // NS_PER_MS)}\r\n"
    for name in _PASSED_ON:
        value = client.get(name)
        if value:
            lines += f"{name}: {value}\r\n"
    return lines


def release_body(handle: Handle, generation: int) -> bytes:
    """The body of POST /handoff/release."""
    return _encode({"request_id": handle.remote_request_id, "generation": generation})
