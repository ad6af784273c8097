"""One simulated worker: a `WorkerCore`, its device and its end of the legs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from twofold.core.handoff import MODES
from twofold.core.stretch import advance, steps_ahead
from twofold.core.worker import WorkerCore
from twofold.cost.step import PrefillPart, StepTime
from twofold.messages import (
    Abort,
    CancelRead,
    CancelWrite,
    DecodeStarted,
    Digest,
    Digested,
    Ended,
    Fence,
    LayersDone,
    LegEnded,
    PeerLost,
    PrefillDone,
    Read,
    Release,
    RunStep,
    StepDone,
    StepFailed,
    Submit,
    Token,
    ToPeer,
    Wake,
    WakeAt,
    WorkerEffect,
    WorkerMessage,
    Write,
)
from twofold.sim.clock import WorkerClock
from twofold.sim.contents import Contents
from twofold.sim.events import Events, Kind
from twofold.sim.leg import Leg
from twofold.sim.network import Network
from twofold.sim.observer import Observer
from twofold.sim.prompts import sampled_token
from twofold.sim.run import FOREVER_NS, Run, looks_at_the_batch
from twofold.sim.times import Stretch
from twofold.types import KVHandle, KVLayout, RequestId


class SimWorker:
    """A worker that can die and come back. Steps take what `step` says, digests `digest_ns`.

    With `track_contents` every block's content is simulated too and a step that would read wrong
    KV raises AssertionError.
    """

    def __init__(
        self,
        name: str,
        number: int,
        role: Literal["prefill", "decode", "mixed"],
        *,
        settings: Mapping[str, Any],
        step: StepTime,
        digest_ns: int,
        events: Events,
        network: Network,
        observers: Sequence[Observer],
        track_contents: bool,
        fast: bool,
        layer_groups: int,
    ) -> None:
        self.name = name
        self.number = number
        self.role = role
        self.layout: KVLayout = settings["layout"]
        self.engine_id = ""
        self.contents: Contents | None = None
        self.peers: dict[str, None] = {}
        self.block_bytes = self.layout.block_bytes
        self._settings = settings
        self._step = step
        self._digest_ns = digest_ns
        self._events = events
        self._network = network
        self._observers = observers
        self._track_contents = track_contents
        self._mode = MODES[settings.get("handoff", "pull")]
        self._layer_groups = layer_groups
        self._fast = fast
        self._run: Run | None = None
        self._lives = 0
        self._legs: dict[RequestId, Leg] = {}
        self._next_id = 0
        self.clock = WorkerClock(events, number, self._wake)
        self._paused = False
        self._kept: list[WorkerMessage] = []
        self.core: WorkerCore | None = None

    # -------------------------------------------------------------------- lives

    def start(self) -> None:
        """Begin a new life, with an engine id of its own and nothing in memory."""
        assert self.core is None, f"{self.name} is alive"
        self.core = WorkerCore(**self._settings)
        self.engine_id = f"{self.name}.{self._lives}"
        self._lives += 1
        self._next_id = 0
        if self._track_contents:
            self.contents = Contents(self.core.pool, self.layout.layers)
        self._network.join(self)
        for observer in self._observers:
            observer.born(self.engine_id, self.core, self._settings)

    def kill(self) -> None:
        """End this life at once: whatever was under way never answers."""
        assert self.core is not None, f"{self.name} is dead"
        self._network.leave(self)
        for leg in self._legs.values():
            self._network.break_leg(leg, "the worker died", lost=True)
        for observer in self._observers:
            observer.died(self.engine_id)
        self._catch_up(self._events.now_ns - 1)  # a step that ends now is lost
        self.core = None
        self.engine_id = ""
        self.peers = {}
        self._legs = {}
        self._run = None
        self._paused, self._kept = False, []

    def pause(self) -> None:
        """Keep what comes from now on, unhandled, as a stopped process does."""
        self._paused = self.core is not None

    def resume(self, engine_id: str) -> None:
        """Handle what has been kept in this life."""
        if engine_id != self.engine_id or not self._paused:
            return
        self._paused = False
        kept, self._kept = self._kept, []
        for message in kept:
            self.feed(engine_id, message)

    # --------------------------------------------------------------------- legs

    def submit(self, leg: Leg, tokens: tuple[int, ...], max_tokens: int, deadline_ns: int) -> None:
        """The gateway's request has arrived; `deadline_ns` 0 is none."""
        if not leg.cut:
            self._submit(leg, tokens, max_tokens, deadline_ns)

    def again(self, leg: Leg, tokens: tuple[int, ...], max_tokens: int, deadline_ns: int) -> None:
        """A leg that nobody at the gateway knows of any more has arrived."""
        if self.core is not None:
            leg.cut = True
            self._submit(leg, tokens, max_tokens, deadline_ns)

    def _submit(self, leg: Leg, tokens: tuple[int, ...], most: int, deadline_ns: int) -> None:
        if self.core is None:
            self._network.break_leg(leg, "connection refused", lost=True)
            return
        leg.engine_id = self.engine_id
        leg.worker_id = self._next_id
        leg.received_ns = self._events.now_ns
        self._next_id += 1
        self._legs[leg.worker_id] = leg
        hold = leg.kind == "prefill"
        submit = Submit(
            request_id=leg.worker_id,
            tokens=tokens,
            max_tokens=1 if hold else most,
            hold=hold,
            source=leg.handle if leg.remote else None,
            generation=leg.generation,
            transfer=leg.transfer if hold and self._mode.at_once else 0,
            time_left_ns=max(1, deadline_ns - self._events.now_ns) if deadline_ns else 0,
        )
        self.feed(self.engine_id, submit)

    def awaited_from(self, request_id: RequestId) -> str:
        """The engine id of the peer that fills the blocks of this request."""
        assert self.core is not None
        return self.core.pool.holds[request_id].peer

    def hang_up(self, engine_id: str, leg: Leg) -> None:
        """The gateway closed `leg`, or what it led to is not wanted any more."""
        if engine_id != self.engine_id or not engine_id or leg.worker_id < 0:
            return
        release, abort = Release(leg.worker_id, leg.generation), Abort(leg.worker_id)
        self.feed(engine_id, release if leg.kind == "prefill" else abort)

    def cancel(self, leg: Leg) -> None:
        """The gateway's wish to end `leg` has arrived."""
        self.hang_up(leg.engine_id, leg)

    # --------------------------------------------------------------------- core

    def feed(self, engine_id: str, message: WorkerMessage) -> None:
        """Handle `message`, unless the life it was meant for is over."""
        core = self.core
        if core is None or engine_id != self.engine_id:
            return
        if self._paused:
            self._kept.append(message)
            return
        if isinstance(message, PeerLost):
            self._network.renew(self, message.peer)
        running = self._run if looks_at_the_batch(message) else None
        if running is not None:
            self._catch_up(self._events.now_ns)
        effects = core.handle(message, self.clock.now_ns)
        for observer in self._observers:
            observer.handled(engine_id, core, self._events.now_ns, message, effects)
        for effect in effects:
            self._carry_out(core, effect)
        if running is not None and running is self._run:
            self._plan(core, running)

    def _carry_out(self, core: WorkerCore, effect: WorkerEffect) -> None:
        if isinstance(effect, Token):
            self._token(effect)
        elif isinstance(effect, RunStep):
            self._run_step(core, effect)
        elif isinstance(effect, Ended):
            self._ended(effect)
        elif isinstance(effect, ToPeer):
            self._network.to_peer(self, effect)
        elif isinstance(effect, Read):
            self._network.read(self, effect)
        elif isinstance(effect, Write):
            self._network.write(self, effect, self.layout.layers)
        elif isinstance(effect, CancelRead | CancelWrite):
            self._network.cancel(self, effect)
        elif isinstance(effect, Fence):
            self._network.fence(self, effect)
        elif isinstance(effect, Digest):
            self._events.after(
                self._digest_ns, Kind.RESULT, self.number, self._digested, self.engine_id, effect
            )
        elif isinstance(effect, WakeAt):
            self.clock.set(self.engine_id, effect.at_ns)

    def _wake(self, engine_id: str) -> None:
        self.feed(engine_id, Wake())

    # ------------------------------------------------------------------- device

    def _run_step(self, core: WorkerCore, step: RunStep) -> None:
        prefill: list[PrefillPart] = []
        batch = context = 0
        for _, start, n in step.work:
            if n == 1:
                batch += 1
                context += start + 1
            else:
                prefill.append((n, start))
        if self.contents is not None:
            self.contents.verify(core.engine, step)
        ok = bool(self._network.fate(step))
        if self._fast and not prefill and steps_ahead(core.engine) > 1:
            self._run = Run(self._events.now_ns, batch, context)
            self._plan(core, self._run)
            return
        took_ns = self._step.step_ns(prefill, batch, context)
        if self._mode.by_layer and prefill:
            self._layers(core, step, took_ns)
        done = self._step_done
        self._events.after(took_ns, Kind.STEP, self.number, done, self.engine_id, step, ok)

    def _layers(self, core: WorkerCore, step: RunStep, took_ns: int) -> None:
        """Say when each of some groups of layers has been computed, the last one excepted."""
        layers, groups = self.layout.layers, self._layer_groups
        for i in range(1, groups):
            n, after_ns = layers * i // groups, took_ns * i // groups
            if self.contents is not None:
                write = self.contents.write_layers
                self._events.after(after_ns, Kind.RESULT, self.number, write, core.engine, step, n)
            done = LayersDone(step.step, n)
            self._events.after(after_ns, Kind.RESULT, self.number, self.feed, self.engine_id, done)

    def _step_done(self, engine_id: str, step: RunStep, ok: bool) -> None:
        if self.core is None or engine_id != self.engine_id:
            return
        if not ok:
            self.feed(engine_id, StepFailed(step.step, "simulated"))
            return
        engine = self.core.engine
        if self.contents is not None:
            self.contents.write(engine, step)
        tokens: list[tuple[RequestId, int]] = []
        for request_id, start, n in step.work:
            request = engine.row(request_id)
            if request.n_known == start + n:
                leg = self._legs.get(request_id)
                key = -1 if leg is None else leg.request_id  # ended in the middle of the step
                tokens.append((request_id, sampled_token(key, start + n - request.n_prompt)))
        self.feed(engine_id, StepDone(step.step, tuple(tokens)))

    # ------------------------------------------------------- many steps at once

    def _plan(self, core: WorkerCore, run: Run) -> None:
        """Set the event at which the run ends: the last step that can be foreseen."""
        most = steps_ahead(core.engine)
        if most == run.most:
            return
        run.most = most
        k, took_ns = self._step.decode_steps_within(run.batch, run.context, FOREVER_NS, most)
        if k == 0:  # let the step itself say what is wrong
            k, took_ns = 1, self._step.step_ns((), run.batch, run.context)
        run.k = k
        run.version += 1
        self._events.at(
            run.start_ns + took_ns,
            Kind.STEP,
            self.number,
            self._run_done,
            self.engine_id,
            run,
            run.version,
        )

    def _catch_up(self, now_ns: int) -> None:
        """Bring core and legs to where the run's steps have got by `now_ns`, the last excluded."""
        run, core = self._run, self.core
        if run is None or core is None:
            return
        k, took_ns = self._step.decode_steps_within(
            run.batch, run.context, now_ns - run.start_ns, run.k - 1
        )
        if k == 0:
            return
        latency_ns = self._network.leg_latency_ns
        stretch = Stretch(self._step, run.start_ns, run.batch, run.context, k, latency_ns)
        run.start_ns += took_ns
        for request in core.engine.running:
            leg = self._legs[request.id]
            leg.up_ns = run.start_ns + latency_ns
            leg.token_times.add_stretch(stretch)
        advance(core.engine, k)
        run.context += k * run.batch
        run.k -= k
        run.most -= k

    def note_tokens(self, leg: Leg) -> None:
        """Note on `leg` what has been sent by now, for one that will not hear its end."""
        if leg.engine_id == self.engine_id:
            self._catch_up(self._events.now_ns)

    def _run_done(self, engine_id: str, run: Run, version: int) -> None:
        if engine_id != self.engine_id or run is not self._run or version != run.version:
            return
        assert self.core is not None
        self._catch_up(self._events.now_ns)
        self._run = None
        step = self.core.engine.step
        assert step is not None
        self._step_done(engine_id, step, True)

    def _digested(self, engine_id: str, effect: Digest) -> None:
        if engine_id != self.engine_id:
            return
        checksums = (0,) * len(effect.blocks)
        if self.contents is not None:
            checksums = self.contents.checksums(effect.blocks)
        self.feed(engine_id, Digested(effect.request_id, checksums))

    # ------------------------------------------------------------------ answers

    def _token(self, token: Token) -> None:
        leg = self._legs[token.request_id]
        if token.phases is not None:
            leg.phases = token.phases
            leg.worker_ns = self._events.now_ns - leg.received_ns
            if leg.kind == "decode":
                self._network.up(leg, DecodeStarted(leg.request_id, leg.generation))
        if leg.kind == "decode" and not leg.cut:
            # Only the first token is an event at the gateway; the others flow by, in order.
            leg.up_ns = max(leg.up_ns, self._events.now_ns + self._network.leg_latency_ns)
            leg.token_times.add(leg.up_ns)

    def _ended(self, ended: Ended) -> None:
        leg = self._legs.pop(ended.request_id)
        leg.ended = ended
        if self.contents is not None:
            self.contents.forget(ended.request_id)
        if ended.outcome != "finished":
            self._network.up(leg, leg.failed(ended))
        elif leg.kind == "prefill":
            leg.handle = KVHandle(
                engine_id=self.engine_id,
                host=self.name,
                port=0,
                request_id=ended.request_id,
                generation=leg.generation,
                n_tokens=ended.n_prompt,
            )
            self._network.up(leg, PrefillDone(leg.request_id, leg.generation))
        else:
            self._network.up(leg, LegEnded(leg.request_id, leg.generation, ended.n_output))
