"""One leg of one request, as a connection that both its ends know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from twofold.messages import Ended, LegFailed, Phases
from twofold.sim.times import TokenTimes
from twofold.types import KVHandle, RequestId

_NOTHING: Final = Phases()
_STATUS: Final[Mapping[str, int]] = {"queue_full": 429, "duplicate_handle": 409, "deadline": 504}


class Leg:
    """Gateway and worker each fill in what they know; the other reads what has reached it.

    `worker_id` is the worker's own id of the request, -1 until it has it. Messages of one leg
    stay in order: none arrives before `up_ns` or `down_ns`, when the last one did.
    """

    __slots__ = (
        "cut",
        "down_ns",
        "ended",
        "engine_id",
        "generation",
        "handle",
        "kind",
        "origin",
        "phases",
        "received_ns",
        "remote",
        "request_id",
        "sent_ns",
        "token_times",
        "up_ns",
        "worker",
        "worker_id",
        "worker_ns",
    )

    def __init__(
        self,
        request_id: RequestId,
        generation: int,
        kind: Literal["prefill", "decode"],
        worker: str,
        *,
        remote: bool,
        now_ns: int,
        origin: int,
    ) -> None:
        self.origin = origin  # the worker's number
        self.request_id = request_id
        self.generation = generation
        self.kind: Literal["prefill", "decode"] = kind
        self.worker = worker
        self.remote = remote
        self.sent_ns = now_ns
        self.up_ns = now_ns
        self.down_ns = now_ns
        self.cut = False
        # The worker's end.
        self.engine_id = ""
        self.worker_id = -1
        self.received_ns = -1
        self.worker_ns = 0  # from receiving to the first token
        self.phases = _NOTHING
        self.handle: KVHandle | None = None
        self.ended: Ended | None = None
        self.token_times = TokenTimes()  # when they reach the gateway

    @property
    def transfer(self) -> int:
        """Name of the KV that this prefill leg makes, where it is pushed: never used again."""
        return (self.request_id + 1) * 1024 + self.generation

    def held(self, engine_id: str, worker: str, n_tokens: int) -> KVHandle:
        """What names the KV of this prefill leg's `n_tokens`, in that life of `worker`."""
        return KVHandle(
            engine_id=engine_id,
            host=worker,
            port=0,
            request_id=self.worker_id,
            generation=self.generation,
            n_tokens=n_tokens,
        )

    def failed(self, ended: Ended) -> LegFailed:
        """What the gateway hears of a leg that `ended` otherwise than well."""
        status = _STATUS.get(ended.reason, 400 if ended.outcome == "refused" else 500)
        return LegFailed(self.request_id, self.generation, self.kind, status, ended.reason)

    def phases_ns(self) -> dict[str, int]:
        """What the worker says of its time, by the ledger's names."""
        said = self.phases
        if self.kind == "decode" and self.remote:
            return {
                "prefill_queue": said.peer_queue_ns,
                "prefill": said.peer_compute_ns,
                "handoff_wait": said.handoff_wait_ns,
                "transfer": said.transfer_ns,
                "decode_queue": said.queue_ns,
                "first_step": said.compute_ns,
                "total": self.worker_ns,
            }
        return {
            "prefill_queue": said.queue_ns,
            "prefill": said.compute_ns,
            "total": self.worker_ns,
        }
