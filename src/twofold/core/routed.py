"""One request as the router knows it, and the count of all of them."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, TypeAlias

import msgspec

from twofold.policy.choice import Choice
from twofold.types import RequestId

Outcome: TypeAlias = Literal["finished", "refused", "failed", "cancelled"]


class Leg(IntEnum):
    """Where a request stands; the table is in `twofold.core.router`."""

    PREFILLING = 1
    HANDOFF = 2
    ONLY = 3
    STREAMING = 4
    BOTH = 5


class Routed(msgspec.Struct, kw_only=True):
    """A request in flight: what it asks for, where it is, and why it is there.

    `generation` counts its attempts from 0; all from `prefill` on, but for what it asks for, is
    of the one under way. `sent_ns` and `started_ns` are of the leg under way: when it left, when
    its answer began. `deadline_ns` 0: none. `avoid` are workers that have failed it.
    """

    id: RequestId
    weight: int
    state: Leg
    generation: int = 0
    prefill: str = ""
    decode: str = ""
    number: int = 0
    uncached: int = 0
    need_blocks: int = 0
    output_tokens: int = 0
    predicted_tokens: int = 0
    block_keys: tuple[int, ...] = ()
    block_tokens: int = 0
    model: str = ""
    sent_ns: int = 0
    started_ns: int = 0
    deadline_ns: int = 0
    prefilling: bool = False
    avoid: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()


class RouterCounts(msgspec.Struct):
    """Requests by end. `received` is the sum of the first four others and of those in flight.

    `remote` and `local` are where requests went at first. From `retried` on: what the failure
    policy made of legs that failed, by `twofold.messages.Recovery.result`.
    """

    received: int = 0
    finished: int = 0
    refused: int = 0
    failed: int = 0
    cancelled: int = 0
    remote: int = 0  # sent over two legs
    local: int = 0  # sent to a mixed worker
    fallback: int = 0  # sent to one, retries included: a pair was configured, none could be used
    retried: int = 0
    recomputed: int = 0
    moved: int = 0
    exhausted: int = 0
    over_budget: int = 0
    no_place: int = 0
