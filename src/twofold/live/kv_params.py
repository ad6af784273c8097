"""`kv_transfer_params`: how a leg says where KV comes from or goes, in vLLM's fields.

pull, decode leg     remote_engine_id, _host, _port, _request_id, _generation, _num_tokens
push, prefill leg    do_remote_decode, transfer_id
push, decode leg     remote_engine_id, _host, _port, transfer_id; no remote_block_ids
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from twofold.core.blocks import Hold
from twofold.live.openai import ApiError
from twofold.messages import Ended
from twofold.types import KVHandle

_MOST = 1 << 62


def whole(value: object) -> int | None:
    """A whole number from 0 to 2^62 in a JSON value or a header, else None."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        return None
    return value


def transfer_of(params: Mapping[str, Any]) -> int:
    """The transfer that a leg belongs to, 0 if it names none.

    Other gateways name transfers by text: each end makes the same number of it. Raises ApiError
    400 for an id that is neither.
    """
    value = params.get("transfer_id")
    number = whole(value)
    if number is not None or value is None:
        return number or 0
    if not isinstance(value, str) or not 0 < len(value) <= 256:
        raise _bad("transfer_id")
    digest = hashlib.sha256(value.encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8], "big") >> 2


def source_of(params: Mapping[str, Any], handoff: str, generation: int) -> KVHandle | None:
    """Where a decode leg's KV is, or will come from where KV is pushed: its `n_tokens` is 0 then.

    `generation` is the leg's own. Raises ApiError 400 for parameters that do not say, or that
    are of another handoff than this worker's.
    """
    if not params.get("do_remote_prefill"):
        return None
    pulled = handoff == "pull"
    names = ["remote_request_id", "remote_generation", "remote_num_tokens"] if pulled else []
    numbers = {name: whole(params.get(name)) for name in (*names, "remote_port")}
    engine_id, host = params.get("remote_engine_id"), params.get("remote_host")
    bad = [name for name, number in numbers.items() if number is None]
    if not isinstance(engine_id, str) or not engine_id:
        bad.append("remote_engine_id")
    if not isinstance(host, str) or not host:
        bad.append("remote_host")
    transfer = 0 if pulled else transfer_of(params)
    if not pulled and not transfer:
        bad.insert(0, "transfer_id")
    if bad:
        raise _bad(bad[0], f" for {handoff}")
    return KVHandle(
        engine_id=str(engine_id),
        host=str(host),
        port=numbers["remote_port"] or 0,
        request_id=(numbers["remote_request_id"] or 0) if pulled else transfer,
        generation=(numbers["remote_generation"] or 0) if pulled else generation,
        n_tokens=(numbers["remote_num_tokens"] or 0) if pulled else 0,
    )


def held_params(
    ended: Ended, hold: Hold | None, identity: Mapping[str, Any], transfer: int
) -> dict[str, Any]:
    """What a prefill leg answers: what the decode leg needs, where it is sent after that.

    `remote_num_tokens` and `remote_generation` are ours. `hold` is None once a peer has it all.
    """
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": identity["engine_id"],
        "remote_request_id": str(ended.request_id),
        "remote_host": identity["handoff_host"],
        "remote_port": identity["handoff_port"],
        "remote_block_ids": list(hold.blocks) if hold else [],
        "remote_num_tokens": ended.n_prompt,
        "remote_generation": hold.generation if hold else 0,
        "tp_size": 1,
    }
    return params | {"transfer_id": transfer} if transfer else params


def _bad(name: str, what: str = "") -> ApiError:
    name = f"kv_transfer_params.{name}"
    return ApiError(400, "invalid_value", f"{name}: is missing or not usable{what}", name)
