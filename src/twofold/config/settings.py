"""Settings of the three kinds of process: each named, bounded and described once, here.

A flag (`--block-size`), an environment variable (`TWOFOLD_BLOCK_SIZE`) and a TOML key
(`[engine] block_size`) follow from each field. Bounds hold for what is read, not for what code
constructs.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

Role = Literal["prefill", "decode", "mixed"]
Handoff = Literal["pull", "push", "layerwise"]

POWER_OF_TWO: Final = "power_of_two"
"""Key in `Meta.extra` of a whole number that must be a power of two."""

CHOICES: Final = "choices"
"""Key in `Meta.extra` of text that must be one of a few words."""

_Port = Annotated[int, Meta(ge=0, le=65535)]
_Host = Annotated[str, Meta(min_length=1)]


class WorkerAddress(msgspec.Struct, frozen=True):
    """Where the gateway finds a worker."""

    name: Annotated[str, Meta(min_length=1)]
    role: Role
    host: _Host
    port: Annotated[int, Meta(ge=1, le=65535)]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every worker of a deployment shares."""

    model: Annotated[
        str, Meta(min_length=1, description="directory of a Hugging Face model, or builtin")
    ]
    served_model_name: Annotated[
        str, Meta(description="name that requests give as their model; empty: the model's own")
    ] = ""
    device: Annotated[
        str, Meta(min_length=1, description="torch device of each worker, such as cpu or cuda:0")
    ] = "cpu"
    dtype: Annotated[
        str,
        Meta(
            description="type of the weights and of the KV cache",
            extra={CHOICES: ("float32", "float16", "bfloat16")},
        ),
    ] = "float32"
    block_size: Annotated[
        int, Meta(ge=1, le=256, description="tokens in a KV block", extra={POWER_OF_TWO: True})
    ] = 16
    kv_blocks: Annotated[int, Meta(ge=1, description="KV blocks of each worker")] = 1024
    max_num_seqs: Annotated[int, Meta(ge=1, description="requests in one step, at most")] = 64
    max_num_batched_tokens: Annotated[
        int, Meta(ge=1, description="tokens computed in one step, at most")
    ] = 512
    chunk_policy: Annotated[
        str,
        Meta(
            description="how many prompt tokens go into a step beside sequences that decode: all"
            " that it has left (fixed), at most chunk_cap_tokens (capped), or what keeps it within"
            " chunk_tpot_s (tpot_goal)",
            extra={CHOICES: ("fixed", "capped", "tpot_goal")},
        ),
    ] = "fixed"
    chunk_cap_tokens: Annotated[
        int, Meta(ge=0, description="prompt tokens of a step, at most, with the capped policy")
    ] = 0
    chunk_tpot_s: Annotated[
        float, Meta(ge=0, description="seconds that a step may take with the tpot_goal policy")
    ] = 0.0
    max_model_len: Annotated[
        int, Meta(ge=0, description="tokens of prompt and answer, at most; 0: the model's limit")
    ] = 0
    max_waiting: Annotated[
        int, Meta(ge=1, description="requests that wait at a worker, at most; more are refused")
    ] = 256
    prefix_caching: Annotated[
        bool, Meta(description="keep the KV of finished prompts for prompts that begin alike")
    ] = True
    handoff: Annotated[
        Handoff,
        Meta(
            description="who moves the KV cache, and when: decode reads it once the prompt is read"
            " (pull), prefill writes it then (push), or while longer prompts are read (layerwise)"
        ),
    ] = "pull"
    layerwise_min_tokens: Annotated[
        int,
        Meta(ge=1, description="tokens of the shortest prompt that layerwise hands over in parts"),
    ] = 512
    transport: Annotated[
        Literal["shm", "tcp", "mooncake", "nixl"],
        Meta(
            description="how KV bytes travel: shared memory, TCP, or an engine of the field's own,"
            " which can pull only"
        ),
    ] = "shm"
    checksum: Annotated[
        Literal["xxh3", "off"],
        Meta(description="how handed over KV blocks are checked; off: only that all have come"),
    ] = "xxh3"
    lease_s: Annotated[
        float, Meta(gt=0, description="seconds that a prefill worker holds KV nobody asks for")
    ] = 10.0
    threads: Annotated[int, Meta(ge=1, description="CPU threads of each worker's device")] = 1


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process."""

    name: Annotated[str, Meta(min_length=1, description="name in logs, metrics and ledgers")]
    role: Annotated[Role, Meta(description="which requests it is sent")]
    host: Annotated[_Host, Meta(description="address to listen on")]
    port: Annotated[_Port, Meta(description="port of its HTTP API; 0: any free one")]
    handoff_port: Annotated[_Port, Meta(description="port for its peers; 0: any free one")]
    engine: EngineSettings
    advertise: Annotated[
        str, Meta(description="numeric address that peers are given; empty: the one of --host")
    ] = ""
    record: Annotated[
        str, Meta(description="file to record every message of the core in; empty: none")
    ] = ""


class GatewayLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway takes on at once, how long it waits, and how it places requests.

    The names of policies are those of the tables in `twofold.policy`.
    """

    max_inflight: Annotated[
        int, Meta(ge=1, description="requests in flight, at most; more are refused")
    ] = 512
    request_timeout_s: Annotated[
        float, Meta(gt=0, description="seconds until a request is given up")
    ] = 600.0
    header_timeout_s: Annotated[
        float, Meta(gt=0, description="seconds for a client to send the whole of a request")
    ] = 10.0
    max_body_bytes: Annotated[int, Meta(ge=1, description="bytes of a request's body, at most")] = (
        4 * 1024 * 1024
    )
    kept_ledgers: Annotated[
        int, Meta(ge=1, description="ended requests whose ledger can still be asked for")
    ] = 1024
    prefill_policy: Annotated[
        str,
        Meta(
            description="how the worker that reads a prompt is chosen",
            extra={
                CHOICES: (
                    "least_tokens",
                    "projected_ttft",
                    "prefix_aware",
                    "jsq",
                    "round_robin",
                    "power_of_two",
                )
            },
        ),
    ] = "least_tokens"
    decode_policy: Annotated[
        str,
        Meta(
            description="how the worker that writes an answer is chosen",
            extra={
                CHOICES: (
                    "least_requests",
                    "active_sequences",
                    "free_blocks",
                    "projected_tpot",
                    "length_buckets",
                )
            },
        ),
    ] = "least_requests"
    split_policy: Annotated[
        str,
        Meta(
            description="when a prompt is read apart from where its answer is written",
            extra={CHOICES: ("always", "never", "projected", "threshold", "mixed_pool")},
        ),
    ] = "always"
    admission: Annotated[
        str,
        Meta(
            description="what is refused at arrival because it could not be served in time",
            extra={CHOICES: ("none", "ttft", "joint", "joint_predicted")},
        ),
    ] = "none"
    slo_ttft_s: Annotated[
        float,
        Meta(ge=0, description="seconds to the first token that admission keeps to; 0: no goal"),
    ] = 0.0
    slo_tpot_s: Annotated[
        float,
        Meta(ge=0, description="seconds per token that joint admission keeps to; 0: no goal"),
    ] = 0.0
    failure_policy: Annotated[
        str,
        Meta(
            description="what becomes of a request whose leg fails before its answer has begun",
            extra={CHOICES: ("fail", "retry-pair", "recompute-on-decode", "mixed-pool")},
        ),
    ] = "fail"
    retries: Annotated[
        int, Meta(ge=1, le=8, description="with retry-pair: retries of one request, at most")
    ] = 1
    recompute_tokens_per_s: Annotated[
        int,
        Meta(
            ge=1,
            description="with recompute-on-decode: prompt tokens a second that all decode workers"
            " together recompute, at most",
        ),
    ] = 2000


class GatewaySettings(GatewayLimits, frozen=True, kw_only=True):
    """The gateway process."""

    host: Annotated[_Host, Meta(description="address of the public API")]
    port: Annotated[_Port, Meta(description="port of the public API; 0: any free one")]
    admin_host: Annotated[_Host, Meta(description="address of the admin API")]
    admin_port: Annotated[_Port, Meta(description="port of the admin API; 0: any free one")]
    handoff: Annotated[
        Handoff, Meta(description="the handoff of its workers; both legs leave at once unless pull")
    ] = "pull"
    workers: Annotated[
        tuple[WorkerAddress, ...],
        Meta(min_length=1, description="a worker, as NAME=ROLE@HOST:PORT; once for each worker"),
    ]


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A whole deployment on one machine."""

    engine: EngineSettings
    limits: GatewayLimits = GatewayLimits()
    prefill: Annotated[int, Meta(ge=0, le=64, description="workers that only read prompts")] = 1
    decode: Annotated[int, Meta(ge=0, le=64, description="workers that only write answers")] = 1
    mixed: Annotated[int, Meta(ge=0, le=64, description="workers that do both")] = 0
    host: Annotated[_Host, Meta(description="address of the public API")] = "127.0.0.1"
    port: Annotated[
        _Port, Meta(description="port of the public API; unless given, another if it is taken")
    ] = 8000
    admin_port: Annotated[
        _Port, Meta(description="port of the admin API, on loopback; 0: any free one")
    ] = 0
