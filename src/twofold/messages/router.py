"""Messages into the router's core and effects out of it."""

from __future__ import annotations

from typing import Literal, TypeAlias

from twofold.messages.base import Plain, Wake, WakeAt
from twofold.types import KVLayout, RequestId


class WorkerSeen(Plain, frozen=True, kw_only=True):
    """A worker answers: who it is in this life, what it does and how its KV is laid out.

    `kv_blocks` is its pool and `max_num_seqs` its sequences in a step; 0: not known. `model` is
    the name that its model is asked for by; "": any.
    """

    worker: str
    role: Literal["prefill", "decode", "mixed"]
    engine_id: str
    layout: KVLayout | None = None
    kv_blocks: int = 0
    max_num_seqs: int = 0
    model: str = ""


class WorkerGone(Plain, frozen=True):
    """A worker does not answer, or is being drained: nothing new goes to it."""

    worker: str


class Arrive(Plain, frozen=True, kw_only=True):
    """A client's request. All but deadline and model is for placement, and may be an estimate.

    `weight` is its prompt's tokens, `max_tokens` bounds its answer's, `predicted_tokens` is what
    those are expected to be; 0: not known. `block_keys` name its blocks of `block_tokens` prompt
    tokens in order: equal keys mean that prompts are equal up to there. It goes to workers of
    `model`; "": to any.
    """

    request_id: RequestId
    weight: int
    time_left_ns: int = 0
    max_tokens: int = 0
    predicted_tokens: int = 0
    block_keys: tuple[int, ...] = ()
    block_tokens: int = 0
    model: str = ""


class PrefillDone(Plain, frozen=True):
    """The prefill leg answered with a handle (kept by the driver, verbatim)."""

    request_id: RequestId
    generation: int


class DecodeStarted(Plain, frozen=True):
    """The decode (or only) leg answered 200; its bytes now flow to the client."""

    request_id: RequestId
    generation: int


class LegEnded(Plain, frozen=True):
    """The decode (or only) leg's answer is complete, of `n_tokens` tokens; 0: not known."""

    request_id: RequestId
    generation: int
    n_tokens: int = 0


class LegFailed(Plain, frozen=True):
    """A leg failed: `status` is the worker's HTTP status, 0 when the connection broke.

    `lost`: the worker itself seems gone, so it is not used until seen again.
    """

    request_id: RequestId
    generation: int
    leg: Literal["prefill", "decode"]
    status: int
    reason: str
    lost: bool = False


class ClientGone(Plain, frozen=True):
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


class SendPrefill(Plain, frozen=True):
    """Send the prefill leg to `worker`."""

    request_id: RequestId
    generation: int
    worker: str


class SendDecode(Plain, frozen=True):
    """Send the decode leg to `worker`; `remote` False means it is the only leg."""

    request_id: RequestId
    generation: int
    worker: str
    remote: bool


class CancelLeg(Plain, frozen=True):
    """Stop a leg that is under way at `worker`."""

    request_id: RequestId
    generation: int
    leg: Literal["prefill", "decode"]
    worker: str


class ReleaseHeld(Plain, frozen=True):
    """Tell prefill worker `worker` that nobody will fetch this request's KV."""

    request_id: RequestId
    generation: int
    worker: str


RecoveryResult: TypeAlias = Literal[
    "retried", "recomputed", "moved", "exhausted", "over_budget", "no_place"
]


class Recovery(Plain, frozen=True):
    """A leg of attempt `generation` failed for `reason`; what the failure policy makes of it.

    `retried`, `recomputed` and `moved`: the request is sent again, by the effects that follow.
    `exhausted`, `over_budget` and `no_place`: it cannot be, and fails.
    """

    request_id: RequestId
    generation: int
    result: RecoveryResult
    reason: str

    @property
    def sent_again(self) -> bool:
        """Whether another attempt follows."""
        return self.result in ("retried", "recomputed", "moved")


class Reply(Plain, frozen=True):
    """Answer the client with an error, since none of the answer has gone out yet.

    `status` 0: the worker's own error answer is passed on as it is.
    """

    request_id: RequestId
    status: int
    code: str
    reason: str
    retry_after_s: int = 0


class Cut(Plain, frozen=True):
    """End a stream that has begun, with an error event, since it cannot be completed."""

    request_id: RequestId
    reason: str


class Terminal(Plain, frozen=True):
    """The one terminal event of a request at the gateway."""

    request_id: RequestId
    outcome: Literal["finished", "refused", "failed", "cancelled"]
    reason: str


RouterEffect: TypeAlias = (
    SendPrefill | SendDecode | CancelLeg | ReleaseHeld | Recovery | Reply | Cut | Terminal | WakeAt
)
