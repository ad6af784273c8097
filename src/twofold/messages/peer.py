"""Handoff messages between workers: decode asks, prefill answers."""

from __future__ import annotations

from typing import TypeAlias

from twofold.messages.base import Plain
from twofold.types import BlockId, KVLayout, RequestId


class Claim(Plain, frozen=True):
    """Decode to prefill: I take over your `request_id`; here is how my KV is laid out.

    Where KV is pushed it also says where to: block number `first + i` of the prompt goes to
    `blocks[i]` of `segment`.
    """

    request_id: RequestId
    generation: int
    layout: KVLayout
    segment: str = ""
    first: int = 0
    blocks: tuple[BlockId, ...] = ()


class Grant(Plain, frozen=True):
    """Prefill to decode: the blocks are yours to read until the lease ends.

    `blocks[i]` holds tokens i*B to (i+1)*B of `tokens`; `checksums` go with `blocks`.
    `n_cached` of the tokens came from the prefill worker's own prefix cache.
    """

    request_id: RequestId
    generation: int
    tokens: tuple[int, ...]
    blocks: tuple[BlockId, ...]
    checksums: tuple[int, ...]
    segment: str
    n_cached: int
    lease_left_ns: int


class Written(Plain, frozen=True):
    """Prefill to decode: all blocks that you asked for have been written, and none will be again.

    `checksums` go with `Claim.blocks`. `queue_ns` and `compute_ns` are what the prefill took,
    `write_ns` what followed until the last byte; `n_cached` is as in `Grant`.
    """

    request_id: RequestId
    generation: int
    checksums: tuple[int, ...]
    n_bytes: int
    n_cached: int
    queue_ns: int
    compute_ns: int
    write_ns: int


class Refusal(Plain, frozen=True):
    """Prefill to decode: no, and why ("stale", "unknown", or the first differing layout field)."""

    request_id: RequestId
    generation: int
    reason: str


class Heartbeat(Plain, frozen=True):
    """Decode to prefill: I still want these, as (request, generation)."""

    held: tuple[tuple[RequestId, int], ...]


class Done(Plain, frozen=True):
    """Decode to prefill: I have read it all (`ok`) or want it no more. Repeated until answered."""

    request_id: RequestId
    generation: int
    ok: bool


class Closed(Plain, frozen=True):
    """Prefill to decode: the answer to `Done`.

    `valid`: the blocks were still held for this generation when `Done` came, so what was read
    is what was granted. Only then may decode use it.
    """

    request_id: RequestId
    generation: int
    valid: bool


PeerMessage: TypeAlias = Claim | Grant | Written | Refusal | Heartbeat | Done | Closed
