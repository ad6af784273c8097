"""Messages into a worker's core and effects out of it."""

from __future__ import annotations

from typing import Literal, TypeAlias

from twofold.messages.base import Plain, Wake, WakeAt
from twofold.messages.peer import PeerMessage
from twofold.types import BlockId, KVHandle, RequestId


class Submit(Plain, frozen=True, kw_only=True):
    """A request for this worker.

    `tokens` is the prompt; it is empty when `source` is set, because the ids then come from the
    prefill worker with its Grant, so that a prompt is tokenised once. `hold`: keep the KV when
    done, for a decode worker to take over. `transfer` is the name by which peers will ask for
    that KV; 0: the request's own id. Where KV is pushed, a request has both `tokens` and
    `source`, and `transfer` is chosen by the gateway. `time_left_ns` 0 means no deadline.
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
    transfer: int = 0


class Abort(Plain, frozen=True):
    """End a request now, whatever it is doing. Unknown ids are ignored.

    `outcome` "finished" is for the driver's own ends: a stop string was found in the text.
    """

    request_id: RequestId
    outcome: Literal["cancelled", "failed", "finished"] = "cancelled"
    reason: str = "abort"


class StepDone(Plain, frozen=True):
    """The device has run step `step`; `tokens` are the ids sampled, as (request, token)."""

    step: int
    tokens: tuple[tuple[RequestId, int], ...]


class StepFailed(Plain, frozen=True):
    """The device could not run step `step`: every request in it fails, the worker lives on."""

    step: int
    reason: str


class Digested(Plain, frozen=True):
    """Checksums of a held request's blocks, in the order of the `Digest` effect's blocks."""

    request_id: RequestId
    checksums: tuple[int, ...]


class ReadDone(Plain, frozen=True):
    """A `Read` has ended and its destination blocks are no longer written to.

    `checksums` are of the bytes as they landed, in the order of `Read.pairs`.
    """

    request_id: RequestId
    ok: bool
    reason: str = ""
    n_bytes: int = 0
    checksums: tuple[int, ...] = ()


class WriteDone(Plain, frozen=True):
    """Write number `number` of a request has ended: nothing more of it will land."""

    request_id: RequestId
    number: int
    ok: bool
    reason: str = ""
    n_bytes: int = 0


class Fenced(Plain, frozen=True):
    """No peer's write can reach the blocks of this request any more."""

    request_id: RequestId


class LayersDone(Plain, frozen=True):
    """The first `layers` layers of step `step` have been computed, and their KV is final."""

    step: int
    layers: int


class FromPeer(Plain, frozen=True):
    """A handoff message from the worker whose engine id is `peer`."""

    peer: str
    message: PeerMessage


class PeerLost(Plain, frozen=True):
    """The control connection to `peer` broke, or could not be made."""

    peer: str
    reason: str = ""


class Release(Plain, frozen=True):
    """The gateway gives up a held request that no decode worker will take over."""

    request_id: RequestId
    generation: int


WorkerMessage: TypeAlias = (
    Submit
    | Abort
    | StepDone
    | StepFailed
    | Digested
    | ReadDone
    | WriteDone
    | Fenced
    | LayersDone
    | FromPeer
    | PeerLost
    | Release
    | Wake
)


class RunStep(Plain, frozen=True):
    """Run one batch: for each (request, start, n) compute tokens start to start+n.

    A row whose end is the end of the request's known tokens samples one token. The driver asks
    the core for token ids and block tables (`Engine.row`), which stand still until `StepDone`.
    """

    step: int
    work: tuple[tuple[RequestId, int, int], ...]


class Phases(Plain, frozen=True, kw_only=True):
    """Where a request's time went on this worker, in nanoseconds, up to its first token.

    `peer_*` are the prefill worker's own queue and computing, where KV is pushed: decode waits
    meanwhile, so they are part of its time.
    """

    peer_queue_ns: int = 0
    peer_compute_ns: int = 0
    handoff_wait_ns: int = 0
    transfer_ns: int = 0
    queue_ns: int = 0
    compute_ns: int = 0
    n_bytes: int = 0


class Token(Plain, frozen=True):
    """The `index`-th token of the answer. `phases` comes with index 0 only."""

    request_id: RequestId
    index: int
    token: int
    phases: Phases | None = None


class Ended(Plain, frozen=True, kw_only=True):
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


class Digest(Plain, frozen=True):
    """Compute the checksums of these blocks off the loop and answer with `Digested`."""

    request_id: RequestId
    blocks: tuple[BlockId, ...]


class Read(Plain, frozen=True):
    """Copy blocks from a peer: `pairs` of (its block, ours). Answer with `ReadDone`."""

    request_id: RequestId
    peer: str
    segment: str
    pairs: tuple[tuple[BlockId, BlockId], ...]


class CancelRead(Plain, frozen=True):
    """Stop a `Read` early. `ReadDone` still comes, once nothing is written any more."""

    request_id: RequestId


class Write(Plain, frozen=True):
    """Copy blocks to a peer: `pairs` of (our block, its block), of layers `layers[0]` to
    `layers[1]` only. Answer with `WriteDone`.
    """

    request_id: RequestId
    number: int
    peer: str
    segment: str
    pairs: tuple[tuple[BlockId, BlockId], ...]
    layers: tuple[int, int]


class CancelWrite(Plain, frozen=True):
    """Stop all writes of a request early. Each `WriteDone` still comes."""

    request_id: RequestId


class Fence(Plain, frozen=True):
    """Make sure that no write of a peer reaches this request's blocks; answer with `Fenced`."""

    request_id: RequestId


class ToPeer(Plain, frozen=True):
    """Send a handoff message to a worker. `host` and `port` say where, if not yet connected."""

    peer: str
    message: PeerMessage
    host: str = ""
    port: int = 0


WorkerEffect: TypeAlias = (
    RunStep
    | Token
    | Ended
    | Digest
    | Read
    | CancelRead
    | Write
    | CancelWrite
    | Fence
    | ToPeer
    | WakeAt
)
