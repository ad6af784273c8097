"""A small deployment to simulate, with figures that are easy to compute with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from twofold.cost.step import LinearStep, StepTime
from twofold.metrics.record import RequestRecord
from twofold.sim import Audit, Cluster, plan_pools
from twofold.sim.pools import Role
from twofold.trace import TraceRequest
from twofold.trace.hashing import hash64
from twofold.types import PROTOCOL_VERSION, KVLayout

MS: Final = 1_000_000
LEG: Final = 100_000
PEER: Final = 50_000
READ: Final = 30_000
BYTES_PER_S: Final = 1_000_000_000
BLOCK: Final = 16

LAYOUT: Final = KVLayout(
    protocol=PROTOCOL_VERSION,
    engine="twofold",
    model_digest="00",
    tokenizer_digest="00",
    dtype="float16",
    block_size=BLOCK,
    layers=2,
    kv_heads=2,
    head_dim=8,
    rope="",
)

SETTINGS: Final[Mapping[str, Any]] = {
    "layout": LAYOUT,
    "n_blocks": 400,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "max_model_len": 4096,
    "max_waiting": 256,
}

STEP: Final = LinearStep(2 * MS, 10_000.0, 50_000.0, 10.0)


def cluster(
    pools: str,
    *,
    step: StepTime = STEP,
    by_role: Mapping[Role, Mapping[str, Any]] | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Cluster:
    """A cluster of `pools`; `settings` override those of all workers."""
    network = {
        "leg_latency_ns": LEG,
        "peer_latency_ns": PEER,
        "read_latency_ns": READ,
        "link_bytes_per_s": BYTES_PER_S,
    }
    plans = plan_pools(pools, {**SETTINGS, **(settings or {})}, step, by_role)
    return Cluster(plans, **{**network, **options})


def audited(
    pools: str, requests: Iterable[TraceRequest], **options: Any
) -> tuple[list[RequestRecord], Cluster]:
    """Run with every invariant checked after every event, and all come to rest at the end."""
    audit = Audit()
    made = cluster(pools, observers=[audit], track_contents=True, **options)
    records = made.run(requests, most_events=1_000_000)
    audit.finish()
    assert audit.n_handled > len(records), "the audit saw nothing"
    return records, made


def one(input_tokens: int, output_tokens: int = 3, at_ns: int = 0) -> TraceRequest:
    """A request that shares nothing."""
    return TraceRequest(at_ns, input_tokens, output_tokens)


def mixture(n: int, seed: int, gap_ns: int = 3 * MS, longest: int = 90) -> list[TraceRequest]:
    """`n` requests of many lengths, block boundaries among them, half with a shared prefix."""
    found: list[TraceRequest] = []
    for index in range(n):
        draw = [hash64(seed, index, d) for d in range(5)]
        n_in = 1 + draw[0] % longest
        if draw[1] % 4 == 0:
            n_in = max(1, BLOCK * (1 + draw[0] % 4) + draw[2] % 3 - 1)
        hashes = None
        if draw[3] % 2:
            hashes = tuple(
                block if block < 2 else 1000 + index * 100 + block
                for block in range(-(-n_in // BLOCK))
            )
        at_ns = found[-1].arrival_ns + draw[4] % (2 * gap_ns) if found else 0
        found.append(TraceRequest(at_ns, n_in, 1 + draw[2] % 12, hashes, BLOCK if hashes else 0))
    return found
