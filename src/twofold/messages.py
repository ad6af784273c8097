"""Every message into a core and every effect out of one, as tagged, frozen structs.

A core is a function `handle(message, now_ns) -> list of effects`. Drivers (live or simulated)
deliver messages and carry out effects. All of this is plain data: it can be recorded,
replayed, hashed and sent as msgpack.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from twofold.types import BlockId, KVHandle, KVLayout, RequestId


class _Plain(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Base of messages whose fields hold no containers that could form a cycle."""


# --------------------------------------------------------------------------- worker: messages in


class Submit(_Plain, frozen=True, kw_only=True):
    """A request for this worker.

    `tokens` is the prompt; it is empty when `source` is set, because the ids then come from the
    prefill worker with its Grant, so that a prompt is tokenised once. `hold`: keep the KV when
    done, for a decode worker to take over. `time_left_ns` 0 means no deadline.
    """

    request_id: RequestId
    tokens: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    salt: str = ""
    hold: bool = False
    source: KVHandle | None = None
    generation: int = 0
    time_left_ns: int = 0


class Abort(_Plain, frozen=True):
    """End a request now, whatever it is doing. Unknown ids are ignored.

    `outcome` "finished" is for the driver's own ends: a stop string was found in the text.
    """

    request_id: RequestId
    outcome: Literal["cancelled", "failed", "finished"] = "cancelled"
    reason: str = "abort"


class StepDone(_Plain, frozen=True):
    """The device has run step `step`; `tokens` are the ids sampled, as (request, token)."""

    step: int
    tokens: tuple[tuple[RequestId, int], ...]


class StepFailed(_Plain, frozen=True):
    """The device could not run step `step`: every request in it fails, the worker lives on."""

    step: int
    reason: str


class Digested(_Plain, frozen=True):
    """Checksums of a held request's blocks, in the order of the `Digest` effect's blocks."""

    request_id: RequestId
    checksums: tuple[int, ...]


class ReadDone(_Plain, frozen=True):
    """A `Read` has ended and its destination blocks are no longer written to.

    `checksums` are of the bytes as they landed, in the order of `Read.pairs`.
    """

    request_id: RequestId
    ok: bool
    reason: str = ""
    n_bytes: int = 0
    checksums: tuple[int, ...] = ()


class FromPeer(_Plain, frozen=True):
    """A handoff message from the worker whose engine id is `peer`."""

    peer: str
    message: PeerMessage


class PeerLost(_Plain, frozen=True):
    """The control connection to `peer` broke, or could not be made."""

    peer: str
    reason: str = ""


class Release(_Plain, frozen=True):
    """The gateway gives up a held request that no decode worker will take over."""

    request_id: RequestId
    generation: int


class Wake(_Plain, frozen=True):
    """A timer asked for with `WakeAt` has run out."""


# ------------------------------------------------------------------- worker to worker (handoff)


class Claim(_Plain, frozen=True):
    """Decode to prefill: I take over your `request_id`; here is how my KV is laid out."""

    request_id: RequestId
    generation: int
    layout: KVLayout


class Grant(_Plain, frozen=True):
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


class Refusal(_Plain, frozen=True):
    """Prefill to decode: no, and why ("stale", "unknown", or the first differing layout field)."""

    request_id: RequestId
    generation: int
    reason: str


class Heartbeat(_Plain, frozen=True):
    """Decode to prefill: I still want these, as (request, generation)."""

    held: tuple[tuple[RequestId, int], ...]


class Done(_Plain, frozen=True):
    """Decode to prefill: I have read it all (`ok`) or want it no more. Repeated until answered."""

    request_id: RequestId
    generation: int
    ok: bool


class Closed(_Plain, frozen=True):
    """Prefill to decode: the answer to `Done`.

    `valid`: the blocks were still held for this generation when `Done` came, so what was read
    is what was granted. Only then may decode use it.
    """

    request_id: RequestId
    generation: int
    valid: bool


PeerMessage: TypeAlias = Claim | Grant | Refusal | Heartbeat | Done | Closed

WorkerMessage: TypeAlias = (
    Submit
    | Abort
    | StepDone
    | StepFailed
    | Digested
    | ReadDone
    | FromPeer
    | PeerLost
    | Release
    | Wake
)

# -------------------------------------------------------------------------- worker: effects out


class RunStep(_Plain, frozen=True):
    """Run one batch: for each (request, start, n) compute tokens start to start+n.

    A row whose end is the end of the request's known tokens samples one token. The driver asks
    the core for token ids and block tables (`Engine.row`), which stand still until `StepDone`.
    """

    step: int
    work: tuple[tuple[RequestId, int, int], ...]


class Phases(_Plain, frozen=True, kw_only=True):
    """Where a request's time went on this worker, in nanoseconds, up to its first token."""

    handoff_wait_ns: int = 0
    transfer_ns: int = 0
    queue_ns: int = 0
    compute_ns: int = 0
    n_bytes: int = 0


class Token(_Plain, frozen=True):
    """The `index`-th token of the answer. `phases` comes with index 0 only."""

    request_id: RequestId
    index: int
    token: int
    phases: Phases | None = None


class Ended(_Plain, frozen=True, kw_only=True):
    """The one terminal event of a request on this worker.

    `reason` is "stop" or "length" when finished. `held`: the KV is kept for a peer.
    """

    request_id: RequestId
    outcome: Literal["finished", "refused", "failed", "cancelled"]
    reason: str
    n_prompt: int
    n_output: int
    n_cached: int
    n_preempted: int
    held: bool = False


class Digest(_Plain, frozen=True):
    """Compute the checksums of these blocks off the loop and answer with `Digested`."""

    request_id: RequestId
    blocks: tuple[BlockId, ...]


class Read(_Plain, frozen=True):
    """Copy blocks from a peer: `pairs` of (its block, ours). Answer with `ReadDone`."""

    request_id: RequestId
    peer: str
    segment: str
    pairs: tuple[tuple[BlockId, BlockId], ...]


class CancelRead(_Plain, frozen=True):
    """Stop a `Read` early. `ReadDone` still comes, once nothing is written any more."""

    request_id: RequestId


class ToPeer(_Plain, frozen=True):
    """Send a handoff message to a worker. `host` and `port` say where, if not yet connected."""

    peer: str
    message: PeerMessage
    host: str = ""
    port: int = 0


class WakeAt(_Plain, frozen=True):
    """Send `Wake` at `at_ns`. Only the latest one counts."""

    at_ns: int


WorkerEffect: TypeAlias = RunStep | Token | Ended | Digest | Read | CancelRead | ToPeer | WakeAt

# ----------------------------------------------------------------------------- router: messages


class WorkerSeen(_Plain, frozen=True, kw_only=True):
    """A worker answers: who it is in this life, what it does and how its KV is laid out."""

    worker: str
    role: Literal["prefill", "decode", "mixed"]
    engine_id: str
    layout: KVLayout | None = None


class WorkerGone(_Plain, frozen=True):
    """A worker does not answer, or is being drained: nothing new goes to it."""

    worker: str


class Arrive(_Plain, frozen=True, kw_only=True):
    """A client's request. `weight` estimates its prompt's tokens, for placement only."""

    request_id: RequestId
    weight: int
    time_left_ns: int = 0


class PrefillDone(_Plain, frozen=True):
    """The prefill leg answered with a handle (kept by the driver, verbatim)."""

    request_id: RequestId
    generation: int


class DecodeStarted(_Plain, frozen=True):
    """The decode (or only) leg answered 200; its bytes now flow to the client."""

    request_id: RequestId
    generation: int


class LegEnded(_Plain, frozen=True):
    """The decode (or only) leg's answer is complete."""

    request_id: RequestId
    generation: int


class LegFailed(_Plain, frozen=True):
    """A leg failed: `status` is the worker's HTTP status, 0 when the connection broke.

    `lost`: the worker itself seems gone, so it is not used until seen again.
    """

    request_id: RequestId
    generation: int
    leg: Literal["prefill", "decode"]
    status: int
    reason: str
    lost: bool = False


class ClientGone(_Plain, frozen=True):
    """The client closed its connection."""

    request_id: RequestId


RouterMessage: TypeAlias = (
    WorkerSeen
    | WorkerGone
    | Arrive
    | PrefillDone
    | DecodeStarted
    | LegEnded
    | LegFailed
    | ClientGone
    | Wake
)

# ------------------------------------------------------------------------------ router: effects


class SendPrefill(_Plain, frozen=True):
    """Send the prefill leg to `worker`."""

    request_id: RequestId
    generation: int
    worker: str


class SendDecode(_Plain, frozen=True):
    """Send the decode leg to `worker`; `remote` False means it is the only leg."""

    request_id: RequestId
    generation: int
    worker: str
    remote: bool


class CancelLeg(_Plain, frozen=True):
    """Stop a leg that is under way at `worker`."""

    request_id: RequestId
    generation: int
    leg: Literal["prefill", "decode"]
    worker: str


class ReleaseHeld(_Plain, frozen=True):
    """Tell prefill worker `worker` that nobody will fetch this request's KV."""

    request_id: RequestId
    generation: int
    worker: str


class Reply(_Plain, frozen=True):
    """Answer the client with an error, since none of the answer has gone out yet.

    `status` 0: the worker's own error answer is passed on as it is.
    """

    request_id: RequestId
    status: int
    code: str
    reason: str
    retry_after_s: int = 0


class Cut(_Plain, frozen=True):
    """End a stream that has begun, with an error event, since it cannot be completed."""

    request_id: RequestId
    reason: str


class Terminal(_Plain, frozen=True):
    """The one terminal event of a request at the gateway."""

    request_id: RequestId
    outcome: Literal["finished", "refused", "failed", "cancelled"]
    reason: str


RouterEffect: TypeAlias = (
    SendPrefill | SendDecode | CancelLeg | ReleaseHeld | Reply | Cut | Terminal | WakeAt
)
