"""The simulated gateway: a `Router`, its end of the legs, and the record of every request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from twofold.core.abridged import Ids
from twofold.core.handoff import MODES
from twofold.core.recovery import FAIL
from twofold.core.router import Router
from twofold.messages import (
    Arrive,
    CancelLeg,
    ClientGone,
    DecodeStarted,
    LegFailed,
    Recovery,
    ReleaseHeld,
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
from twofold.metrics import ledger
from twofold.metrics.record import RequestRecord
from twofold.sim.events import Events, Kind
from twofold.sim.faults import Again
from twofold.sim.leg import Leg
from twofold.sim.network import Network
from twofold.sim.observer import Observer
from twofold.sim.worker import SimWorker
from twofold.trace import TraceRequest
from twofold.types import KVHandle, RequestId


class _Flight:
    """A request between its arrival and its end. Its prompt is let go once it is sent."""

    __slots__ = (
        "deadline_ns",
        "decode",
        "first_ns",
        "phases_ns",
        "prefill",
        "prompt",
        "recoveries",
        "request",
    )

    def __init__(self, request: TraceRequest, prompt: Ids, deadline_ns: int) -> None:
        self.request = request
        self.prompt = prompt
        self.deadline_ns = deadline_ns
        self.prefill: Leg | None = None
        self.decode: Leg | None = None
        self.phases_ns: dict[str, int] = {}
        self.first_ns = -1  # when the first leg of the first attempt left
        self.recoveries: tuple[str, ...] = ()


class SimGateway:
    """One gateway. A worker found dead is asked again `probe_ns` later."""

    def __init__(
        self,
        workers: Mapping[str, SimWorker],
        *,
        router: Mapping[str, Any],
        time_left_ns: int,
        probe_ns: int,
        events: Events,
        network: Network,
        observers: Sequence[Observer],
        on_record: Callable[[RequestRecord], None],
        keep_prompts: bool = False,
    ) -> None:
        self._workers = workers
        self._time_left_ns = time_left_ns
        self._probe_ns = probe_ns
        self._events = events
        self._network = network
        self._observers = observers
        self._on_record = on_record
        # A request that may be sent again needs its prompt until its answer begins.
        self._keep_prompts = keep_prompts or router.get("failure_policy", FAIL) != FAIL
        self._flights: dict[RequestId, _Flight] = {}
        self._wakes = 0
        self.router = Router(**router)
        self._at_once = MODES[router.get("handoff", "pull")].at_once
        network.deliver = self._deliver
        for observer in observers:
            observer.born("router", self.router, router)

    # ------------------------------------------------------------------ workers

    def see(self, name: str) -> None:
        """`name` answers a probe, if it lives."""
        worker = self._workers[name]
        if worker.core is not None:
            seen = WorkerSeen(
                worker=name,
                role=worker.role,
                engine_id=worker.engine_id,
                layout=worker.layout,
                kv_blocks=worker.core.pool.n_blocks,
                max_num_seqs=worker.core.engine.max_num_seqs,
            )
            self._feed(seen)

    def miss(self, name: str) -> None:
        """`name` is known to have died."""
        self._feed(WorkerGone(name))

    # ----------------------------------------------------------------- requests

    def arrive(self, request_id: RequestId, request: TraceRequest, prompt: Ids) -> None:
        """A client sends `request`."""
        deadline_ns = self._events.now_ns + self._time_left_ns if self._time_left_ns else 0
        self._flights[request_id] = _Flight(request, prompt, deadline_ns)
        self._feed(
            Arrive(
                request_id=request_id,
                weight=request.input_tokens,
                time_left_ns=self._time_left_ns,
                max_tokens=request.output_tokens,
                block_keys=request.hash_ids or (),
                block_tokens=request.block_tokens,
            )
        )

    def client_gone(self, request_id: RequestId) -> None:
        """The client of `request_id` closes its connection, if it is still open."""
        if request_id in self._flights:
            self._feed(ClientGone(request_id))

    def _deliver(self, leg: Leg, message: RouterMessage) -> None:
        flight = self._flights.get(leg.request_id)
        # What an attempt says that was given up is late: the router drops it.
        if flight is not None and leg is flight.decode and isinstance(message, DecodeStarted):
            # Where both legs run at once, decode's time contains what it waits for.
            sent = (flight.decode,) if self._at_once else (flight.prefill, flight.decode)
            legs = [leg for leg in sent if leg is not None]
            flight.phases_ns = self._phases(flight, legs)
        self._feed(message)
        if isinstance(message, LegFailed) and message.lost:
            self._events.after(self._probe_ns, Kind.LEG, 0, self.see, leg.worker)

    def _phases(self, flight: _Flight, legs: Sequence[Leg]) -> dict[str, int]:
        now_ns = self._events.now_ns
        ends = [leg.sent_ns for leg in legs[1:]] + [now_ns]
        balanced = ledger.balance(
            now_ns - flight.request.arrival_ns,
            flight.first_ns - flight.request.arrival_ns,
            [
                ledger.Leg(elapsed_ns=end_ns - leg.sent_ns, phases_ns=leg.phases_ns())
                for leg, end_ns in zip(legs, ends, strict=True)
            ],
            legs[0].sent_ns - flight.first_ns,
        )
        return balanced.as_ns()

    # ------------------------------------------------------------------- router

    def _feed(self, message: RouterMessage) -> None:
        now_ns = self._events.now_ns
        effects = self.router.handle(message, now_ns)
        for observer in self._observers:
            observer.handled("router", self.router, now_ns, message, effects)
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: RouterEffect) -> None:
        if isinstance(effect, SendPrefill):
            self._send(effect, self._leg(effect, remote=False))
        elif isinstance(effect, SendDecode):
            self._send(effect, self._leg(effect, remote=effect.remote))
        elif isinstance(effect, Recovery):
            flight = self._flights[effect.request_id]
            flight.recoveries += (effect.result,)
            if effect.sent_again:
                flight.prefill = flight.decode = None
        elif isinstance(effect, Terminal):
            self._terminal(effect)
        elif isinstance(effect, WakeAt):
            self._wakes += 1
            at_ns = max(effect.at_ns, self._events.now_ns)
            self._events.at(at_ns, Kind.WAKE, 0, self._wake, self._wakes)
        elif isinstance(effect, (CancelLeg, ReleaseHeld)):
            self._cancel(effect)

    def _wake(self, number: int) -> None:
        if number == self._wakes:
            self._feed(Wake())

    def _leg(self, effect: SendPrefill | SendDecode, *, remote: bool) -> Leg:
        return Leg(
            effect.request_id,
            effect.generation,
            "prefill" if isinstance(effect, SendPrefill) else "decode",
            effect.worker,
            remote=remote,
            now_ns=self._events.now_ns,
            origin=self._workers[effect.worker].number,
        )

    def _send(self, effect: SendPrefill | SendDecode, leg: Leg) -> None:
        flight = self._flights[effect.request_id]
        prompt = flight.prompt
        if flight.first_ns < 0:
            flight.first_ns = leg.sent_ns
        if leg.kind == "prefill":
            flight.prefill = leg
        else:
            flight.decode = leg
        if leg.remote:
            assert flight.prefill is not None, "a decode leg without a prefill leg"
            if self._at_once:
                leg.handle = self._handle(flight)
            else:
                leg.handle, prompt = flight.prefill.handle, ()
            if not self._keep_prompts:
                flight.prompt = ()
        worker = self._workers[leg.worker]
        most = flight.request.output_tokens
        self._network.down(leg, effect, worker.submit, leg, prompt, most, flight.deadline_ns)

    def send_again(self, again: Again) -> None:
        """A remote decode leg reaches a worker a second time, unknown to the router."""
        legs = [f.decode for f in self._flights.values() if f.decode and f.decode.remote]
        if not legs:
            return
        old = legs[again.pick % len(legs)]
        flight, worker = self._flights[old.request_id], self._workers[again.worker]
        leg = Leg(
            old.request_id,
            old.generation - again.stale,
            "decode",
            again.worker,
            remote=True,
            now_ns=self._events.now_ns,
            origin=worker.number,
        )
        assert old.handle is not None
        leg.handle = msgspec.structs.replace(old.handle, generation=leg.generation)
        prompt = flight.prompt if self._at_once else ()
        worker.again(leg, prompt, flight.request.output_tokens, flight.deadline_ns)

    def _handle(self, flight: _Flight) -> KVHandle:
        """Where the KV will come from that a prefill leg just sent is to make."""
        prefill = flight.prefill
        assert prefill is not None
        return KVHandle(
            engine_id=self._workers[prefill.worker].engine_id or "nobody",
            host=prefill.worker,
            port=0,
            request_id=prefill.transfer,
            generation=prefill.generation,
            n_tokens=len(flight.prompt),
        )

    def _cancel(self, effect: CancelLeg | ReleaseHeld) -> None:
        flight = self._flights[effect.request_id]
        of_prefill = isinstance(effect, ReleaseHeld) or effect.leg == "prefill"
        leg = flight.prefill if of_prefill else flight.decode
        assert leg is not None, f"{effect} names a leg that was never sent"
        self._network.notice(leg, effect, self._workers[leg.worker].cancel, leg)

    def _terminal(self, effect: Terminal) -> None:
        flight = self._flights.pop(effect.request_id)
        request, decode = flight.request, flight.decode
        times: Sequence[int] = ()
        if decode is not None and flight.phases_ns:
            if effect.outcome != "finished":
                self._workers[decode.worker].note_tokens(decode)
            # Tokens are noted as they are sent: those still under way did not reach the client.
            times = decode.token_times.until(self._events.now_ns)
        ended = decode.ended if decode is not None else None
        self._on_record(
            RequestRecord(
                request_id=effect.request_id,
                klass=request.klass,
                arrival_ns=request.arrival_ns,
                end_ns=self._events.now_ns,
                input_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
                outcome=effect.outcome,
                reason=effect.reason,
                token_times_ns=times,
                phases_ns=flight.phases_ns,
                prefill=flight.prefill.worker if flight.prefill is not None else "",
                decode=decode.worker if decode is not None else "",
                n_cached=ended.n_cached if ended is not None else 0,
                n_preempted=ended.n_preempted if ended is not None else 0,
                n_bytes=decode.phases.n_bytes if decode is not None else 0,
                recoveries=flight.recoveries,
            )
        )
