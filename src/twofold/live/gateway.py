"""The gateway: carries out what the router decides, over real sockets.

Everything that happens becomes a message to the router, one at a time; its effects are carried
out in order. What an effect causes at once is a further message, handled after it.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from twofold.config import WorkerAddress
from twofold.core.handoff import MODES
from twofold.core.router import Router
from twofold.live.clock import Clock, LoopClock, Timer
from twofold.live.exchange import Exchange, Request
from twofold.live.gateway_legs import (
    LegName,
    client_body,
    decode_body,
    leg_headers,
    prefill_body,
    push_handle,
    read_handle,
    release_body,
)
from twofold.live.gateway_session import Ended, Session
from twofold.live.gateway_watch import Watcher, Worker, as_paired
from twofold.live.leg import Head, Leg
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
from twofold.metrics.prometheus import GatewayMetrics
from twofold.types import seconds_to_ns

log = logging.getLogger("twofold.gateway")

_RELEASE_TIMEOUT_S: Final = 5.0


class Gateway:
    """Drives one router. `start` and `stop` run the watching; servers call `take`.

    Workers whose `handoff` is another than the gateway's are not used.
    """

    def __init__(
        self,
        workers: Sequence[WorkerAddress],
        *,
        handoff: str = "pull",
        max_inflight: int = 512,
        request_timeout_s: float = 600.0,
        kept_ledgers: int = 1024,
        prefill_policy: str = "least_tokens",
        decode_policy: str = "least_requests",
        split_policy: str = "always",
        admission: str = "none",
        slo_ttft_s: float = 0.0,
        slo_tpot_s: float = 0.0,
        failure_policy: str = "fail",
        retries: int = 1,
        recompute_tokens_per_s: int = 2_000,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or LoopClock()
        self.router = Router(
            max_inflight=max_inflight,
            handoff=handoff,
            prefill_policy=prefill_policy,
            decode_policy=decode_policy,
            split_policy=split_policy,
            admission=admission,
            ttft_goal_ns=seconds_to_ns(slo_ttft_s),
            tpot_goal_ns=seconds_to_ns(slo_tpot_s),
            failure_policy=failure_policy,
            retries=retries,
            recompute_tokens_per_s=recompute_tokens_per_s,
        )
        self.workers = {address.name: Worker(address, self.clock) for address in workers}
        self.metrics = GatewayMetrics([(a.name, a.role) for a in workers])
        self.ended: OrderedDict[str, Ended] = OrderedDict()
        self.sessions: dict[int, Session] = {}
        self._watcher = Watcher(list(self.workers.values()), self._worker_changed, self.clock)
        self._timeout_ns = seconds_to_ns(request_timeout_s)
        self._kept = kept_ledgers
        self._inbox: deque[RouterMessage] = deque()
        self._busy = False
        self._timer: Timer | None = None
        self._last_number = 0
        self._handoff = handoff
        self._at_once = MODES[handoff].at_once
        # Transfers of another life of the gateway, or of another gateway, have other names.
        self._transfers = secrets.randbits(25) + 1 << 36

    async def start(self) -> None:
        """Begin to watch the workers."""
        self._watcher.start()

    async def stop(self) -> None:
        """Stop watching and cut what is left."""
        await self._watcher.stop()
        for session in list(self.sessions.values()):
            session.exchange.abort()
            self._tell_router(ClientGone(session.number))
        if self._timer is not None:
            self._timer.cancel()
        for worker in self.workers.values():
            worker.upstream.close()

    def unready(self) -> str | None:
        """Why no request could be served now, or None."""
        return self.router.unready()

    def take(
        self,
        request: Request,
        exchange: Exchange,
        data: Mapping[str, Any],
        *,
        stream: bool,
        weight: int,
        max_tokens: int = 0,
        model: str = "",
    ) -> None:
        """Serve a request that has been checked; `data` is its decoded body.

        `weight` is about how many tokens its prompt has, `max_tokens` 0 if it does not say.
        """
        self._last_number += 1
        session = Session(self._last_number, request, exchange, data, request.path)
        session.body = client_body(request.body, data)
        session.stream = stream
        session.at_once = self._at_once
        self.sessions[session.number] = session
        exchange.on_gone = lambda: self._client_gone(session)
        exchange.on_drain = session.resume
        self.metrics.received()
        left_ns = self._time_left_ns(session)
        self._tell_router(
            Arrive(
                request_id=session.number,
                weight=weight,
                time_left_ns=max(1, left_ns),
                max_tokens=max_tokens,
                model=model,
            )
        )

    def _client_gone(self, session: Session) -> None:
        """The client closed; one that had the whole answer just did not wait for the framing."""
        if session.is_complete():
            session.cancel("prefill", "decode")
            self._tell_router(LegEnded(session.number, session.generation))
        else:
            self._tell_router(ClientGone(session.number))

    def conservation(self) -> dict[str, int]:
        """Requests taken in and their ends: received is the sum of the rest."""
        counts = self.router.counts
        return {
            "received": counts.received,
            "finished": counts.finished,
            "failed": counts.failed,
            "refused": counts.refused,
            "cancelled": counts.cancelled,
            "in_flight": len(self.router.requests),
        }

    # -------------------------------------------------------------------- router in and out

    def _worker_changed(self, message: WorkerSeen | WorkerGone) -> None:
        self.metrics.worker_up(message.worker, isinstance(message, WorkerSeen))
        self._tell_router(as_paired(message, self._handoff))

    def _tell_router(self, message: RouterMessage) -> None:
        self._inbox.append(message)
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox:
                effects = self.router.handle(self._inbox.popleft(), self.clock.now_ns())
                for effect in effects:
                    self._safely(effect)
        finally:
            self._busy = False

    def _safely(self, effect: RouterEffect) -> None:
        """Carry out one effect; an error inside it must not lose those that come after it."""
        try:
            self._carry_out(effect)
        except Exception:
            log.exception("error while carrying out %s", type(effect).__name__)
            if not isinstance(effect, WakeAt) and effect.request_id in self.sessions:
                self.sessions[effect.request_id].exchange.abort()

    def _carry_out(self, effect: RouterEffect) -> None:
        if isinstance(effect, WakeAt):
            self._wake_at(effect.at_ns)
            return
        session = self.sessions[effect.request_id]
        match effect:
            case SendPrefill():
                self._send_prefill(session, effect)
            case SendDecode():
                self._send_decode(session, effect)
            case CancelLeg():
                session.cancel(effect.leg)
            case ReleaseHeld():
                self._release(session, effect)
            case Recovery():
                self._recover(session, effect)
            case Reply():
                session.send_error(effect.status, effect.code, effect.reason, effect.retry_after_s)
            case Cut():
                timed_out = self._time_left_ns(session) <= 0
                session.cut(effect.reason, timed_out)
            case Terminal():
                self._end(session, effect)

    def _wake_at(self, at_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.clock.call_at(at_ns, lambda: self._tell_router(Wake()))

    def _time_left_ns(self, session: Session) -> int:
        return session.request.received_ns + self._timeout_ns - self.clock.now_ns()

    def _end(self, session: Session, terminal: Terminal) -> None:
        del self.sessions[session.number]
        ended = session.ended(terminal.outcome, terminal.reason, self.clock.now_ns())
        self.ended.pop(ended.request_id, None)
        self.ended[ended.request_id] = ended
        if len(self.ended) > self._kept:
            self.ended.popitem(last=False)
        self.metrics.ended(terminal.outcome, round(ended.e2e_ms * 1e6))
        session.legs.clear()
        log.info("%s", ended.line())

    # --------------------------------------------------------------------------------- legs

    def _send(
        self, session: Session, worker: str, generation: int, leg: Leg, kind: LegName, body: bytes
    ) -> None:
        session.legs[kind] = leg
        session.generation = generation
        session.routed = self.router.why(session.number)
        session.leg_sent(kind, self.clock.now_ns())
        self.metrics.leg_sent(worker, kind)
        request = session.request
        headers = leg_headers(
            request.headers, request.request_id, generation, self._time_left_ns(session)
        )
        self.workers[worker].upstream.send(leg, "POST", session.path, body, headers)

    def _send_prefill(self, session: Session, effect: SendPrefill) -> None:
        worker, generation = effect.worker, effect.generation
        session.prefill_worker = worker

        def whole(head: Head, body: bytes) -> None:
            session.leg_answered("prefill", head, self.clock.now_ns())
            if head.status != 200:
                self._leg_refused(session, generation, "prefill", head, body)
                return
            try:
                session.handle = read_handle(body)
            except ValueError as error:
                self._tell_router(LegFailed(session.number, generation, "prefill", 0, str(error)))
                return
            self._tell_router(PrefillDone(session.number, generation))

        def broken(reason: str, reached: bool) -> None:
            self._leg_lost(session, generation, "prefill", worker, reason)

        leg = Leg(on_whole=whole, on_broken=broken)
        transfer = self._transfer(session, generation) if self._at_once else 0
        body = prefill_body(session.data, transfer)
        self._send(session, worker, generation, leg, "prefill", body)

    def _transfer(self, session: Session, generation: int) -> int:
        """The name of one attempt's push, below 2^62."""
        return self._transfers + (session.number << 4) + (generation & 15)

    def _send_decode(self, session: Session, effect: SendDecode) -> None:
        worker, generation = effect.worker, effect.generation
        session.decode_worker = worker
        body = session.body
        if effect.remote:
            identity = self.workers[session.prefill_worker].identity
            pushed = push_handle(identity, self._transfer(session, generation))
            body = decode_body(body, session.handle.raw if session.handle else pushed)
        number = session.number

        def whole(head: Head, answer: bytes) -> None:
            session.leg_answered("decode", head, self.clock.now_ns())
            if head.status != 200:
                self._leg_refused(session, generation, "decode", head, answer)
            elif not answer:
                self._tell_router(
                    LegFailed(number, generation, "decode", 0, "the worker's answer is empty")
                )
            else:
                self._tell_router(DecodeStarted(number, generation))
                session.send_whole(head, answer, self.clock.now_ns())
                self._first_byte(session)
                self._tell_router(LegEnded(number, generation))

        def stream(head: Head) -> None:
            now_ns = self.clock.now_ns()
            session.leg_answered("decode", head, now_ns)
            self._tell_router(DecodeStarted(number, generation))
            session.begin_stream(head, now_ns)
            self._first_byte(session)

        def end() -> None:
            if session.end_stream():
                n_tokens = max(0, session.n_events - 2)  # its role and [DONE] are events too
                self._tell_router(LegEnded(number, generation, n_tokens))
            else:
                reason = f"{worker}: the stream ended without [DONE]"
                self._tell_router(LegFailed(number, generation, "decode", 0, reason))

        def broken(reason: str, reached: bool) -> None:
            self._leg_lost(session, generation, "decode", worker, reason)

        leg = Leg(on_whole=whole, on_broken=broken)
        if session.stream:
            unframed = not session.exchange.chunked
            leg = Leg(
                on_whole=whole,
                on_broken=broken,
                on_stream=stream,
                on_raw=session.pass_on,
                on_end=end,
                unframed=unframed,
            )
        self._send(session, worker, generation, leg, "decode", body)

    def _first_byte(self, session: Session) -> None:
        if session.ledger is not None:
            self.metrics.first_byte(session.ledger, session.transferred_bytes)

    def _leg_refused(
        self, session: Session, generation: int, leg: LegName, head: Head, body: bytes
    ) -> None:
        """A worker answered with something other than 200."""
        session.error_answer = (head, body)
        reason = f"{leg} worker answered {head.status}"
        self._tell_router(LegFailed(session.number, generation, leg, head.status, reason))

    def _leg_lost(
        self, session: Session, generation: int, leg: LegName, worker: str, reason: str
    ) -> None:
        """A connection broke, or none could be made."""
        failed = LegFailed(session.number, generation, leg, 0, f"{worker}: {reason}", lost=True)
        self._tell_router(failed)
        self._watcher.lost(self.workers[worker])

    def _recover(self, session: Session, effect: Recovery) -> None:
        self.metrics.recovered(effect.result)
        session.recover(effect)
        log.warning("%s %s", session.request.request_id, session.recoveries[-1])

    def _release(self, session: Session, effect: ReleaseHeld) -> None:
        """Tell the prefill worker that nobody comes for the KV. Its lease bounds a lost message."""
        if session.handle is None:
            session.cancel("prefill")  # both legs left at once, and this one is under way still
            return
        if session.handle.remote_request_id is None:
            return
        leg = Leg(on_whole=lambda head, body: None, on_broken=lambda reason, reached: None)
        body = release_body(session.handle, effect.generation)
        self.workers[effect.worker].upstream.send(
            leg, "POST", "/handoff/release", body, timeout_s=_RELEASE_TIMEOUT_S
        )
