"""Names shared by every layer: ids, integer time, sampling, KV layout.

Time is an integer count of nanoseconds everywhere. A point in time is only ever compared with
points from the same clock; what crosses a process is time remaining.
"""

from __future__ import annotations

from typing import Final

import msgspec

NS_PER_US: Final = 1_000
NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000

PROTOCOL_VERSION: Final = 1
"""Version of the handoff messages. Two workers with different versions are never paired."""

RequestId = int
"""Names a request inside one worker: a counter that the driver never reuses while it lives.

Clients' own ids (`X-Request-Id`) may repeat, be odd or be absent, so nothing is keyed by them.
"""

BlockId = int
"""Index of a KV block in one worker's pool, 0 <= id < number of blocks."""


def seconds_to_ns(seconds: float) -> int:
    """Nearest whole nanosecond to `seconds`."""
    return round(seconds * NS_PER_S)


def ns_to_ms(ns: int) -> float:
    """Milliseconds in `ns`."""
    return ns / NS_PER_MS


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below a / b, for b > 0."""
    return -(-a // b)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request's tokens are chosen. Defaults are OpenAI's.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch those filters off.
    `seed` makes the request reproducible whatever else is in the batch: the random number of
    token `i` depends on (seed, i) alone. `logprobs` is the number of alternatives to report per
    token (0: the chosen token's own only), or None for none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal on two workers before one may read the other's KV cache.

    Digests are hex SHA-256 prefixes over the weights' and the tokenizer's files. `transport` is
    how bytes can be read from the worker; shared memory names its host, since none other can.
    `handoff` is the mode: a worker that waits to be written to is no partner of one that waits
    to be read. `checksum` is how blocks are hashed; "off" compares with nothing else.
    """

    protocol: int
    engine: str
    model_digest: str
    tokenizer_digest: str
    dtype: str
    block_size: int
    layers: int
    kv_heads: int
    head_dim: int
    rope: str
    tensor_parallel: int = 1
    transport: str = ""
    handoff: str = ""
    checksum: str = ""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of all layers for `block_size` tokens."""
        return 2 * self.layers * self.block_size * self.kv_heads * self.head_dim * self.item_bytes

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of `dtype`."""
        return {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}[self.dtype]


class KVHandle(msgspec.Struct, frozen=True, kw_only=True):
    """What a decode worker needs to ask a prefill worker for one request's KV.

    `engine_id` names one life of the prefill worker (a restart is a new one), `request_id` is
    that worker's own, `generation` the attempt of the gateway. `n_tokens` is the length of the
    prompt, of which the KV of the first `n_tokens - 1` is what decode takes over: it computes
    the last prompt token itself, and so samples every token of the answer.
    """

    engine_id: str
    host: str
    port: int
    request_id: RequestId
    generation: int
    n_tokens: int
