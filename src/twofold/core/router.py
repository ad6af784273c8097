"""The router: one request over two legs, as one state table.

    state       Arrive  PrefillDone    DecodeStarted  LegEnded  LegFailed    ClientGone, deadline
    (none)      1       -              -              -         -            -
    PREFILLING  -       HANDOFF  2     -              -         answered  3  cancel prefill
    HANDOFF     -       -              STREAMING      -         answered  3  cancel decode, release
    ONLY        -       -              STREAMING      -         answered  3  cancel decode
    STREAMING   -       -              -              finished  cut          cancel decode

    1  PREFILLING when a prefill and a decode worker of equal layout are up, else ONLY when a
       mixed worker is up, else refused (503, or 429 when too many requests are in flight).
    2  The decode worker is chosen now, by its load now: pulling does not need it earlier.
       None left: answered 502, and the prefill worker is told to free the KV.
    3  A worker's own 4xx passes as it is; anything else is 502. In HANDOFF the KV is released.

Every state but (none) holds a deadline. Each message carries the generation of its leg; one that
does not match is late, and is dropped. Exactly one `Terminal` per request.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

import msgspec

from twofold.core.handoff.layout import incompatibility
from twofold.core.timers import Timers
from twofold.messages import (
    Arrive,
    CancelLeg,
    ClientGone,
    Cut,
    DecodeStarted,
    LegEnded,
    LegFailed,
    PrefillDone,
    ReleaseHeld,
    Reply,
    RouterEffect,
    RouterMessage,
    SendDecode,
    SendPrefill,
    Terminal,
    Wake,
    WakeAt,
    WorkerGone,
    WorkerSeen,
)
from twofold.policy.route import Load, least_requests, least_tokens
from twofold.types import RequestId

Effects = list[RouterEffect]
Outcome = Literal["finished", "refused", "failed", "cancelled"]


class Leg(IntEnum):
    """Where a request stands; see the table above."""

    PREFILLING = 1
    HANDOFF = 2
    ONLY = 3
    STREAMING = 4


class RouterWorker(msgspec.Struct):
    """A worker as the router sees it, with what it has been sent and not answered."""

    seen: WorkerSeen
    up: bool = True
    tokens: int = 0
    requests: int = 0


class Routed(msgspec.Struct, kw_only=True):
    """A request in flight."""

    id: RequestId
    weight: int
    state: Leg
    generation: int = 0
    prefill: str = ""
    decode: str = ""


class RouterCounts(msgspec.Struct):
    """Requests by end. `received` is the sum of the others and of those in flight."""

    received: int = 0
    finished: int = 0
    refused: int = 0
    failed: int = 0
    cancelled: int = 0
    remote: int = 0  # sent over two legs
    local: int = 0  # sent to a mixed worker
    fallback: int = 0  # of the local ones: a pair was configured, but none could be used


class Router:
    """Places requests on workers and sees each to its one end.

    `max_inflight` bounds the requests between arrival and end.
    """

    def __init__(self, *, max_inflight: int) -> None:
        self.workers: dict[str, RouterWorker] = {}
        self.requests: dict[RequestId, Routed] = {}
        self.counts = RouterCounts()
        self._max_inflight = max_inflight
        self._timers = Timers()

    def handle(self, message: RouterMessage, now_ns: int) -> Effects:
        """Effects of `message`, in the order in which they are to be carried out."""
        out: Effects = []
        if isinstance(message, Arrive):
            self._arrive(message, now_ns, out)
        elif isinstance(message, WorkerSeen):
            self._seen(message)
        elif isinstance(message, WorkerGone):
            self._gone(message.worker)
        elif isinstance(message, Wake):
            for _, request_id in self._timers.due(now_ns):
                self._deadline(self.requests[request_id], out)
        elif isinstance(message, ClientGone):
            request = self.requests.get(message.request_id)
            if request is not None:
                self._cancel_legs(request, out)
                self._end(request, "cancelled", "the client went away", out)
        else:
            self._leg(message, out)
        at_ns = self._timers.arm()
        if at_ns is not None:
            out.append(WakeAt(at_ns))
        return out

    # ----------------------------------------------------------------- workers

    def _seen(self, message: WorkerSeen) -> None:
        known = self.workers.get(message.worker)
        if known is None:
            self.workers[message.worker] = RouterWorker(message)
        else:
            known.seen, known.up = message, True

    def _gone(self, worker: str) -> None:
        known = self.workers.get(worker)
        if known is not None:
            known.up = False

    def _loads(self, role: str) -> list[Load]:
        return [
            Load(name, worker.tokens, worker.requests)
            for name, worker in self.workers.items()
            if worker.up and worker.seen.role == role
        ]

    def _partners(self, prefill: str) -> list[Load]:
        """Decode workers that can read what `prefill` writes."""
        ours = self.workers[prefill].seen.layout
        return [
            load
            for load in self._loads("decode")
            if (theirs := self.workers[load.worker].seen.layout) is not None
            and ours is not None
            and incompatibility(ours, theirs) is None
        ]

    def pair_fault(self) -> str | None:
        """Why no prefill and decode worker can be paired now, or None when some can."""
        fault: str | None = None
        for prefill in self._loads("prefill"):
            if self._partners(prefill.worker):
                return None
            for decode in self._loads("decode"):
                a = self.workers[prefill.worker].seen.layout
                b = self.workers[decode.worker].seen.layout
                differs = incompatibility(a, b) if a and b else "a layout is not known"
                fault = fault or f"{prefill.worker} and {decode.worker}: {differs}"
        for role in ("prefill", "decode"):
            if not self._loads(role):
                return f"no {role} worker is up"
        return fault

    def unready(self) -> str | None:
        """Why no request could be served now, or None."""
        return None if self._loads("mixed") else self.pair_fault()

    # ----------------------------------------------------------------- arrival

    def _arrive(self, message: Arrive, now_ns: int, out: Effects) -> None:
        assert message.request_id not in self.requests, "a driver reused a request id"
        self.counts.received += 1
        if len(self.requests) >= self._max_inflight:
            out.append(
                Reply(message.request_id, 429, "queue_full", "too many requests in flight", 1)
            )
            self._count_end(message.request_id, "refused", "queue_full", out)
            return
        request = Routed(id=message.request_id, weight=message.weight, state=Leg.PREFILLING)
        able = [load for load in self._loads("prefill") if self._partners(load.worker)]
        prefill = least_tokens(able)
        mixed = least_tokens(self._loads("mixed"))
        if prefill is not None:
            request.prefill = prefill
            self._add_load(prefill, request, +1)
            self.counts.remote += 1
            out.append(SendPrefill(request.id, request.generation, prefill))
        elif mixed is not None:
            request.state = Leg.ONLY
            request.decode = mixed
            self._add_load(mixed, request, +1)
            self.counts.local += 1
            self.counts.fallback += any(w.seen.role != "mixed" for w in self.workers.values())
            out.append(SendDecode(request.id, request.generation, mixed, remote=False))
        else:
            reason = self.unready() or "no worker is up"
            out.append(Reply(request.id, 503, "not_ready", reason, 1))
            self._count_end(request.id, "refused", reason, out)
            return
        self.requests[request.id] = request
        if message.time_left_ns:
            self._timers.set(("deadline", request.id), now_ns + message.time_left_ns)

    def _add_load(self, worker: str, request: Routed, sign: int) -> None:
        self.workers[worker].tokens += sign * request.weight
        self.workers[worker].requests += sign

    # -------------------------------------------------------------------- legs

    def _leg(
        self, message: PrefillDone | DecodeStarted | LegEnded | LegFailed, out: Effects
    ) -> None:
        request = self.requests.get(message.request_id)
        if request is None or request.generation != message.generation:
            return
        if isinstance(message, LegFailed) and message.lost:
            self._gone(request.prefill if message.leg == "prefill" else request.decode)
        if isinstance(message, PrefillDone) and request.state is Leg.PREFILLING:
            self._hand_over(request, out)
        elif isinstance(message, DecodeStarted) and request.state in (Leg.HANDOFF, Leg.ONLY):
            request.state = Leg.STREAMING
        elif isinstance(message, LegEnded) and request.state is Leg.STREAMING:
            self._end(request, "finished", "", out)
        elif isinstance(message, LegFailed):
            self._failed(request, message, out)

    def _hand_over(self, request: Routed, out: Effects) -> None:
        self._add_load(request.prefill, request, -1)
        decode = least_requests(self._partners(request.prefill))
        if decode is None:
            reason = self.pair_fault() or "no decode worker is up"
            out.append(ReleaseHeld(request.id, request.generation, request.prefill))
            out.append(Reply(request.id, 502, "decode_unavailable", reason))
            request.state = Leg.HANDOFF
            self._end(request, "failed", reason, out)
            return
        request.state = Leg.HANDOFF
        request.decode = decode
        self._add_load(decode, request, +1)
        out.append(SendDecode(request.id, request.generation, decode, remote=True))

    def _failed(self, request: Routed, message: LegFailed, out: Effects) -> None:
        prefilling = request.state is Leg.PREFILLING
        if prefilling != (message.leg == "prefill"):
            return  # a leg that is over cannot fail any more
        if request.state is Leg.STREAMING:
            out.append(Cut(request.id, message.reason))
            self._end(request, "failed", message.reason, out)
            return
        if request.state is Leg.HANDOFF:
            out.append(ReleaseHeld(request.id, request.generation, request.prefill))
        own_fault = 400 <= message.status < 500
        if own_fault or message.status == 504:
            out.append(Reply(request.id, 0, "", message.reason))
        else:
            out.append(Reply(request.id, 502, f"{message.leg}_failed", message.reason))
        self._end(request, "refused" if own_fault else "failed", message.reason, out)

    def _deadline(self, request: Routed, out: Effects) -> None:
        self._cancel_legs(request, out)
        reason = "the deadline passed"
        if request.state is Leg.STREAMING:
            out.append(Cut(request.id, reason))
        else:
            out.append(Reply(request.id, 504, "deadline_exceeded", reason))
        self._end(request, "failed", reason, out)

    def _cancel_legs(self, request: Routed, out: Effects) -> None:
        if request.state is Leg.PREFILLING:
            out.append(CancelLeg(request.id, request.generation, "prefill", request.prefill))
            return
        out.append(CancelLeg(request.id, request.generation, "decode", request.decode))
        if request.state is Leg.HANDOFF:
            out.append(ReleaseHeld(request.id, request.generation, request.prefill))

    # --------------------------------------------------------------------- end

    def _end(self, request: Routed, outcome: Outcome, reason: str, out: Effects) -> None:
        del self.requests[request.id]
        self._timers.cancel(("deadline", request.id))
        if request.state is Leg.PREFILLING:
            self._add_load(request.prefill, request, -1)
        elif request.decode:
            self._add_load(request.decode, request, -1)
        self._count_end(request.id, outcome, reason, out)

    def _count_end(
        self, request_id: RequestId, outcome: Outcome, reason: str, out: Effects
    ) -> None:
        setattr(self.counts, outcome, getattr(self.counts, outcome) + 1)
        out.append(Terminal(request_id, outcome, reason))
