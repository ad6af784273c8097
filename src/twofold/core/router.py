"""The router: one request over two legs, as one state table.

    state       Arrive  PrefillDone    DecodeStarted  LegEnded  LegFailed    ClientGone, deadline
    (none)      1       -              -              -         -            -
    PREFILLING  -       HANDOFF  2     -              -         5         3  cancel prefill
    HANDOFF     -       -              STREAMING      -         5, release   cancel decode, release
    ONLY        -       -              STREAMING      -         5         3  cancel decode
    STREAMING   -       -              -              finished  cut          cancel decode
    BOTH        -       HANDOFF        STREAMING      -         5         4  cancel both

    1  PREFILLING or ONLY as the split policy says (unless told otherwise: PREFILLING when a
       prefill and a decode worker of equal layout are up, else ONLY when a mixed worker is up),
       else refused: 503, or 429 when there is too much in flight or admission says no.
    2  The decode worker is chosen now, by its load now: pulling does not need it earlier.
       None left: the prefill worker is told to free the KV, and 5.
    3  A worker's own 4xx passes as it is, and so does 504; in HANDOFF the KV is released.
    4  Where KV is pushed both legs leave at once: BOTH instead of PREFILLING. When one fails the
       other is cancelled; a prefill leg that fails once the answer streams is of no consequence.
    5  What the worker is to blame for goes by the failure policy, once the old attempt's other
       leg is cancelled, its KV released and its workers are not charged with it any more:

       fail                  answered 502
       retry-pair            a new generation, as 1
       recompute-on-decode   a new generation, ONLY at a decode or mixed worker, within a budget
       mixed-pool            a new generation, ONLY at a mixed worker

       Where that has been done often enough, or cannot be: answered 502. Either way a `Recovery`
       says so. The deadline stays that of the arrival. See `twofold.core.recovery`.

Every state but (none) holds a deadline. Each message carries the generation of its leg; one that
does not match is late, and is dropped. Exactly one `Terminal` per request.
"""

from __future__ import annotations

from typing import Final, Literal

from twofold.core.fleet import RouterWorker
from twofold.core.handoff import MODES
from twofold.core.placement import Placement, Placer, Refusal
from twofold.core.recovery import FAIL, Rescuer, Unplaced, may_recover
from twofold.core.routed import Leg, Outcome, Routed, RouterCounts
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
    Recovery,
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
from twofold.policy.choice import Choice, describe
from twofold.policy.lengths import reserve_tokens
from twofold.types import RequestId

Effects = list[RouterEffect]
LegName = Literal["prefill", "decode"]
_STARTING: Final = (Leg.HANDOFF, Leg.ONLY, Leg.BOTH)


class Router:
    """Places requests on workers and sees each to its one end.

    `max_inflight` bounds the requests between arrival and end. Policies are named as in the
    tables of `twofold.policy`; ValueError for an unknown name. `seed` stands in for chance.
    `ttft_goal_ns` and `tpot_goal_ns` are what admission holds requests to, 0 for none (a
    request's own deadline counts all the same). `prefill_budget_tokens` bounds each prefill
    queue, 0 for no bound. `local_below_tokens` and `mixed_above_tokens` are the limits of the
    split policies that have one. `prefix_keys` bounds what is remembered of each worker's cache.
    `failure_policy` is one of `twofold.core.recovery`, with at most `retries` retries of a
    request, or `recompute_tokens_per_s` prompt tokens recomputed per second over all requests.
    """

    def __init__(
        self,
        *,
        max_inflight: int,
        handoff: str = "pull",
        prefill_policy: str = "least_tokens",
        decode_policy: str = "least_requests",
        split_policy: str = "always",
        admission: str = "none",
        seed: int = 0,
        ttft_goal_ns: int = 0,
        tpot_goal_ns: int = 0,
        prefill_budget_tokens: int = 0,
        local_below_tokens: int = 512,
        mixed_above_tokens: int = 8192,
        prefix_keys: int = 65_536,
        failure_policy: str = "fail",
        retries: int = 1,
        recompute_tokens_per_s: int = 2_000,
    ) -> None:
        self._placer = Placer(
            prefill_policy=prefill_policy,
            decode_policy=decode_policy,
            split_policy=split_policy,
            admission=admission,
            seed=seed,
            ttft_goal_ns=ttft_goal_ns,
            tpot_goal_ns=tpot_goal_ns,
            prefill_budget_tokens=prefill_budget_tokens,
            local_below_tokens=local_below_tokens,
            mixed_above_tokens=mixed_above_tokens,
            prefix_keys=prefix_keys,
        )
        self._rescuer = Rescuer(
            self._placer,
            policy=failure_policy,
            retries=retries,
            recompute_tokens_per_s=recompute_tokens_per_s,
        )
        self._fleet = self._placer.fleet
        self.requests: dict[RequestId, Routed] = {}
        self.counts = RouterCounts()
        self._max_inflight = max_inflight
        self._at_once = MODES[handoff].at_once
        self._timers = Timers()

    @property
    def workers(self) -> dict[str, RouterWorker]:
        """The workers by name."""
        return self._fleet.workers

    def why(self, request_id: RequestId) -> tuple[str, ...]:
        """Why a request in flight is where it is: a line for each choice made, in order."""
        return tuple([describe(choice) for choice in self.requests[request_id].choices])

    def pair_fault(self) -> str | None:
        """Why no prefill and decode worker can be paired now, or None when some can."""
        return self._fleet.pair_fault()

    def unready(self) -> str | None:
        """Why no request could be served now, or None."""
        return self._placer.unready()

    def handle(self, message: RouterMessage, now_ns: int) -> Effects:
        """Effects of `message`, in the order in which they are to be carried out."""
        out: Effects = []
        if isinstance(message, Arrive):
            self._arrive(message, now_ns, out)
        elif isinstance(message, WorkerSeen):
            self._fleet.seen(message)
        elif isinstance(message, WorkerGone):
            self._fleet.gone(message.worker)
        elif isinstance(message, Wake):
            for _, request_id in self._timers.due(now_ns):
                self._deadline(self.requests[request_id], now_ns, out)
        elif isinstance(message, ClientGone):
            request = self.requests.get(message.request_id)
            if request is not None:
                self._cancel_legs(request, out)
                self._end(request, "cancelled", "the client went away", now_ns, out)
        else:
            self._leg(message, now_ns, out)
        at_ns = self._timers.arm()
        if at_ns is not None:
            out.append(WakeAt(at_ns))
        return out

    # ----------------------------------------------------------------- arrival

    def _arrive(self, message: Arrive, now_ns: int, out: Effects) -> None:
        assert message.request_id not in self.requests, "a driver reused a request id"
        self.counts.received += 1
        if len(self.requests) >= self._max_inflight:
            full = Refusal(429, "queue_full", "too many requests in flight", 1)
            self._refuse(message.request_id, full, "queue_full", out)
            return
        output_tokens = reserve_tokens(message.predicted_tokens, message.max_tokens)
        request = Routed(
            id=message.request_id,
            weight=message.weight,
            state=Leg.PREFILLING,
            number=self.counts.received,
            uncached=message.weight,
            need_blocks=self._fleet.need_blocks(message.weight, output_tokens),
            output_tokens=output_tokens,
            predicted_tokens=message.predicted_tokens,
            block_keys=message.block_keys,
            block_tokens=message.block_tokens,
            deadline_ns=now_ns + message.time_left_ns if message.time_left_ns else 0,
            model=message.model,
        )
        placed = self._placer.place(request, message.time_left_ns)
        if isinstance(placed, Refusal):
            self._refuse(request.id, placed, placed.reason, out)
            return
        self.requests[request.id] = request
        if request.deadline_ns:
            self._timers.set(("deadline", request.id), request.deadline_ns)
        self.counts.local += placed.whole
        self.counts.remote += not placed.whole
        self._send_first(request, placed, now_ns, out)

    def _refuse(self, request_id: RequestId, refusal: Refusal, reason: str, out: Effects) -> None:
        status, code, text, retry_after_s = refusal
        out.append(Reply(request_id, status, code, text, retry_after_s))
        self._count_end(request_id, "refused", reason, out)

    def _send_first(self, request: Routed, placed: Placement, now_ns: int, out: Effects) -> None:
        worker = placed.worker
        request.choices += placed.choices
        request.sent_ns = now_ns
        request.uncached = self._fleet.uncached(worker, request)
        self._fleet.leg(worker, request, +1)
        self._fleet.prompt(worker, request, +1, now_ns)
        if placed.whole:
            request.state = Leg.ONLY
            request.decode = worker
            self._fleet.answer(worker, request, +1)
            self.counts.fallback += placed.fallback
            out.append(SendDecode(request.id, request.generation, worker, remote=False))
        else:
            request.state = Leg.PREFILLING
            request.prefill = worker
            request.prefilling = True
            self._fleet.come(request, +1)
            out.append(SendPrefill(request.id, request.generation, worker))
            if self._at_once:
                request.state = Leg.BOTH
                self._send_decode(request, now_ns, out)

    # -------------------------------------------------------------------- legs

    def _leg(
        self,
        message: PrefillDone | DecodeStarted | LegEnded | LegFailed,
        now_ns: int,
        out: Effects,
    ) -> None:
        request = self.requests.get(message.request_id)
        if request is None or request.generation != message.generation:
            return
        if isinstance(message, LegFailed) and message.lost:
            self._fleet.gone(request.prefill if message.leg == "prefill" else request.decode)
        if isinstance(message, PrefillDone) and request.prefilling:
            self._fleet.was_read(request.prefill, request.uncached, request.sent_ns, now_ns)
            self._prefill_over(request, now_ns)
            if request.state is Leg.PREFILLING:
                self._send_decode(request, now_ns, out)
            elif request.state is Leg.BOTH:
                request.state = Leg.HANDOFF
        elif isinstance(message, DecodeStarted) and request.state in _STARTING:
            self._started(request, now_ns)
        elif isinstance(message, LegEnded) and request.state is Leg.STREAMING:
            took_ns = now_ns - request.started_ns
            self._fleet.was_written(request.decode, message.n_tokens, took_ns)
            self._end(request, "finished", "", now_ns, out)
        elif isinstance(message, LegFailed):
            self._failed(request, message, now_ns, out)

    def _send_decode(self, request: Routed, now_ns: int, out: Effects) -> None:
        if request.state is Leg.PREFILLING:
            request.state = Leg.HANDOFF
            request.sent_ns = now_ns
        chosen = self._placer.place_answer(request, request.prefill, request.avoid)
        if not chosen.worker:
            self._let_go("decode", request, out)
            reason = self.pair_fault() or chosen.reason
            self._again_or_fail(request, "decode_unavailable", reason, now_ns, out)
            return
        request.decode = chosen.worker
        request.choices += (chosen,)
        self._fleet.leg(request.decode, request, +1)
        self._fleet.answer(request.decode, request, +1)
        out.append(SendDecode(request.id, request.generation, request.decode, remote=True))

    def _started(self, request: Routed, now_ns: int) -> None:
        if request.state is Leg.ONLY:
            self._fleet.was_read(request.decode, request.uncached, request.sent_ns, now_ns)
            self._fleet.prompt(request.decode, request, -1, now_ns)
        else:
            took_ns = now_ns - request.sent_ns
            self._fleet.was_handed(request.prefill, request.weight, took_ns)
        request.state = Leg.STREAMING
        request.started_ns = now_ns

    def _failed(self, request: Routed, message: LegFailed, now_ns: int, out: Effects) -> None:
        of_prefill = message.leg == "prefill"
        under_way = request.prefilling if of_prefill else request.state is not Leg.PREFILLING
        if not under_way:
            return  # a leg that is over, or has not begun, cannot fail
        if of_prefill and request.state is Leg.STREAMING:
            self._prefill_over(request, now_ns)  # decode has all that it needs
            return
        if request.state is Leg.STREAMING:
            out.append(Cut(request.id, message.reason))
            self._end(request, "failed", message.reason, now_ns, out)
            return
        self._let_go(message.leg, request, out)
        if may_recover(request, message.status, now_ns):
            # KV that does not arrive may be the fault of either end.
            failed = (request.prefill,) if of_prefill else (request.prefill, request.decode)
            request.avoid += tuple([w for w in failed if w and w not in request.avoid])
            self._again_or_fail(request, f"{message.leg}_failed", message.reason, now_ns, out)
            return
        own_fault = 400 <= message.status < 500
        if own_fault or message.status == 504:
            out.append(Reply(request.id, 0, "", message.reason))
        else:
            out.append(Reply(request.id, 502, f"{message.leg}_failed", message.reason))
        outcome: Outcome = "refused" if own_fault else "failed"
        self._end(request, outcome, message.reason, now_ns, out)

    def _let_go(self, failed: LegName, request: Routed, out: Effects) -> None:
        """Nothing is left of an attempt at the worker of the leg that has not failed."""
        if request.state is Leg.HANDOFF:
            out.append(ReleaseHeld(request.id, request.generation, request.prefill))
        elif request.state is Leg.BOTH and failed == "prefill":
            out.append(CancelLeg(request.id, request.generation, "decode", request.decode))
        elif request.state is Leg.BOTH:
            out.append(CancelLeg(request.id, request.generation, "prefill", request.prefill))

    def _again_or_fail(
        self, request: Routed, code: str, reason: str, now_ns: int, out: Effects
    ) -> None:
        """An attempt is over, with nothing of it left anywhere: what the failure policy says."""
        self._discharge(request, now_ns)
        if self._rescuer.policy != FAIL:
            rescue = self._rescuer.rescue(request, now_ns)
            result = rescue.result if isinstance(rescue, Unplaced) else self._rescuer.result()
            setattr(self.counts, result, getattr(self.counts, result) + 1)
            out.append(Recovery(request.id, request.generation, result, reason))
            if not isinstance(rescue, Unplaced):
                request.generation += 1
                request.choices += (Choice("", f"{result} since {reason}"),)
                self._send_first(request, rescue, now_ns, out)
                return
            reason = f"{reason}; {self._rescuer.policy}: {rescue.reason}"
        out.append(Reply(request.id, 502, code, reason))
        self._end(request, "failed", reason, now_ns, out)

    def _deadline(self, request: Routed, now_ns: int, out: Effects) -> None:
        self._cancel_legs(request, out)
        reason = "the deadline passed"
        if request.state is Leg.STREAMING:
            out.append(Cut(request.id, reason))
        else:
            out.append(Reply(request.id, 504, "deadline_exceeded", reason))
        self._end(request, "failed", reason, now_ns, out)

    def _cancel_legs(self, request: Routed, out: Effects) -> None:
        if request.state in (Leg.PREFILLING, Leg.BOTH):
            out.append(CancelLeg(request.id, request.generation, "prefill", request.prefill))
        if request.state is Leg.PREFILLING:
            return
        out.append(CancelLeg(request.id, request.generation, "decode", request.decode))
        if request.state is Leg.HANDOFF:
            out.append(ReleaseHeld(request.id, request.generation, request.prefill))

    # --------------------------------------------------------------------- end

    def _end(
        self, request: Routed, outcome: Outcome, reason: str, now_ns: int, out: Effects
    ) -> None:
        del self.requests[request.id]
        self._timers.cancel(("deadline", request.id))
        self._discharge(request, now_ns)
        self._count_end(request.id, outcome, reason, out)

    def _discharge(self, request: Routed, now_ns: int) -> None:
        """No worker is charged with the request any more."""
        if request.prefilling:
            self._prefill_over(request, now_ns)
        if request.decode:
            self._fleet.leg(request.decode, request, -1)
            self._fleet.answer(request.decode, request, -1)
            if request.state is Leg.ONLY:
                self._fleet.prompt(request.decode, request, -1, now_ns)
        request.prefill = request.decode = ""

    def _prefill_over(self, request: Routed, now_ns: int) -> None:
        request.prefilling = False
        self._fleet.leg(request.prefill, request, -1)
        self._fleet.prompt(request.prefill, request, -1, now_ns)
        self._fleet.come(request, -1)

    def _count_end(
        self, request_id: RequestId, outcome: Outcome, reason: str, out: Effects
    ) -> None:
        setattr(self.counts, outcome, getattr(self.counts, outcome) + 1)
        out.append(Terminal(request_id, outcome, reason))
