"""One simulated worker: a `WorkerCore`, its device and its end of the legs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from twofold.core.abridged import Ids
from twofold.core.handoff import MODES
from twofold.core.stretch import advance, steps_ahead
from twofold.core.worker import WorkerCore
from twofold.cost.pipeline import Pipeline
from twofold.cost.step import StepTime
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
    WorkerMessage,
    Write,
)
from twofold.sim.clock import WorkerClock
from twofold.sim.contents import Contents
from twofold.sim.events import Events, Kind
from twofold.sim.leg import Leg
from twofold.sim.network import Network
from twofold.sim.observer import Observer
from twofold.sim.prepare import Preparation
from twofold.sim.prompts import sampled_token
from twofold.sim.run import FOREVER_NS, Run, looks_at_the_batch
from twofold.sim.stages import Stages, layer_marks, parts_of
from twofold.sim.times import Stretch
from twofold.types import KVLayout, RequestId


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
        pipeline: Pipeline,
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
        self._events = events
        self._network = network
        self._observers = observers
        self._track_contents = track_contents
        self._mode = MODES[settings.get("handoff", "pull")]
        self._layer_groups = layer_groups
        self._pipeline = pipeline
        self._fast = fast
        self._run: Run | None = None
        self._lives = 0
        self._legs: dict[RequestId, Leg] = {}
        self._next_id = 0
        self.clock = WorkerClock(events, number, self._wake)
        self._paused = False
        self._kept: list[WorkerMessage] = []
        self.core: WorkerCore | None = None
        self._on: dict[type, Callable[[Any], None]] = {
            Token: self._token,
            RunStep: self._run_step,
            Ended: self._ended,
            ToPeer: partial(network.to_peer, self),
            Read: self._read,
            Write: self._write,
            **dict.fromkeys((CancelRead, CancelWrite), partial(network.cancel, self)),
            Fence: partial(network.fence, self),
            Digest: lambda effect: events.after(
                digest_ns, Kind.RESULT, number, self._digested, self.engine_id, effect
            ),
            WakeAt: lambda effect: self.clock.set(self.engine_id, effect.at_ns),
        }

    # -------------------------------------------------------------------- lives

    def start(self) -> None:
        """Begin a new life, with an engine id of its own and nothing in memory."""
        assert self.core is None, f"{self.name} is alive"
        self.core = WorkerCore(**self._settings)
        self._prepare = Preparation(self._network.link)
        self._stages = Stages(self._pipeline)
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
        self.peers, self._legs, self._kept = {}, {}, []
        self._run, self._paused = None, False

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

    def submit(self, leg: Leg, tokens: Ids, max_tokens: int, deadline_ns: int) -> None:
        """The gateway's request has arrived; `deadline_ns` 0 is none."""
        if not leg.cut:
            self._submit(leg, tokens, max_tokens, deadline_ns)

    def again(self, leg: Leg, tokens: Ids, max_tokens: int, deadline_ns: int) -> None:
        """A leg that nobody at the gateway knows of any more has arrived."""
        if self.core is not None:
            leg.cut = True
            self._submit(leg, tokens, max_tokens, deadline_ns)

    def _submit(self, leg: Leg, tokens: Ids, most: int, deadline_ns: int) -> None:
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
            tokens=tokens,  # type: ignore[arg-type]  # abridged ones are never encoded
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
        running = self._run
        if running is not None:
            if looks_at_the_batch(message):
                self._catch_up(self._events.now_ns)
            else:
                running = None
        effects = core.handle(message, self.clock.now_ns)
        for observer in self._observers:
            observer.handled(engine_id, core, self._events.now_ns, message, effects)
        for effect in effects:
            self._on[type(effect)](effect)
        if running is not None and running is self._run:
            self._plan(running, steps_ahead(core.engine))

    def _read(self, effect: Read) -> None:
        in_ns = self._prepare.read_in(self._events.now_ns, self._run, self._step)
        self._network.read(self, effect, in_ns)

    def _write(self, effect: Write) -> None:
        in_ns = self._prepare.write_in(effect.request_id, effect.number, self._events.now_ns)
        self._network.write(self, effect, self.layout.layers, in_ns)

    def _wake(self, engine_id: str) -> None:
        # Most wakes find nothing due: a timer is armed early and its reason gone by then.
        if self._fast and self.core is not None and engine_id == self.engine_id:
            next_ns = self.core.timers.rearm(self.clock.now_ns)
            if next_ns is not None:
                self.clock.set(engine_id, next_ns)
                return
        self.feed(engine_id, Wake())

    # ------------------------------------------------------------------- device

    def _run_step(self, step: RunStep) -> None:
        core, now_ns = self.core, self._events.now_ns
        assert core is not None
        prefill, batch, context = parts_of(step)
        # Of several steps in flight one may read what another is yet to write.
        if self.contents is not None and core.engine.max_steps == 1:
            self.contents.verify(core.engine, step)
        ok = bool(self._network.fate(step))
        start_ns = self._prepare.begin(now_ns)
        most = steps_ahead(core.engine) if self._fast and not prefill else 1
        if most > 1:
            self._run = Run(start_ns, batch, context)
            self._plan(self._run, most)
            return
        took_ns = self._step.step_ns(prefill, batch, context)
        ends_ns = self._stages.ends_ns(start_ns, took_ns, step)
        self._prepare.step_end_ns = ends_ns[0]
        if self._mode.by_layer and prefill:
            self._layers(core, step, ends_ns)
        done = self._step_done
        self._events.at(ends_ns[-1], Kind.STEP, self.number, done, self.engine_id, step, ok)

    def _layers(self, core: WorkerCore, step: RunStep, ends_ns: list[int]) -> None:
        """Say when groups of layers have been computed, the last one excepted."""
        now_ns, say = self._events.now_ns, self._events.at
        for n, at_ns in layer_marks(self.layout.layers, self._layer_groups, now_ns, ends_ns):
            if self.contents is not None:
                write = self.contents.write_layers
                say(at_ns, Kind.RESULT, self.number, write, core.engine, step, n)
            done = LayersDone(step.step, n)
            say(at_ns, Kind.RESULT, self.number, self.feed, self.engine_id, done)

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
                token = 0  # of an abridged request, nobody asks which
                if not self._fast:
                    leg = self._legs.get(request_id)
                    key = -1 if leg is None else leg.request_id  # ended in the middle of the step
                    token = sampled_token(key, start + n - request.n_prompt)
                tokens.append((request_id, token))
        self.feed(engine_id, StepDone(step.step, tuple(tokens)))

    # ------------------------------------------------------- many steps at once

    def _plan(self, run: Run, most: int) -> None:
        """Set the event at which the run ends: the last of the `most` steps that are foreseen."""
        # What is being prepared comes between the step in flight and the next.
        if self._prepare.loop_free_ns > run.start_ns:
            most = 1
        if most == run.most:
            return
        run.most = most
        k, took_ns = self._step.decode_steps_within(run.batch, run.context, FOREVER_NS, most)
        if k == 0:  # let the step itself say what is wrong
            k, took_ns = 1, self._step.step_ns((), run.batch, run.context)
        run.k = k
        run.version += 1
        run.end_ns = run.start_ns + took_ns
        done, of = self._run_done, (self.engine_id, run, run.version)
        self._events.at(run.end_ns, Kind.STEP, self.number, done, *of)

    def _catch_up(self, now_ns: int) -> None:
        """Bring core and legs to where the run's steps have got by `now_ns`, the last excluded."""
        run, core = self._run, self.core
        if run is None or core is None:
            return
        k, took_ns = run.over(self._step, now_ns)
        if k == 0:
            return
        latency_ns = self._network.leg_latency_ns
        stretch = Stretch(self._step, run.start_ns, run.batch, run.context, k, latency_ns)
        run.start_ns += took_ns
        for request in core.engine.running:
            leg = self._legs[request.id]
            leg.up_ns = run.start_ns + latency_ns
            leg.token_times.add_stretch(stretch)
        advance(core.engine, k, run.start_ns + self.clock.now_ns - self._events.now_ns)
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
        blocks, contents = effect.blocks, self.contents
        checksums = contents.checksums(blocks) if contents is not None else (0,) * len(blocks)
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
            leg.handle = leg.held(self.engine_id, self.name, ended.n_prompt)
            self._network.up(leg, PrefillDone(leg.request_id, leg.generation))
        else:
            self._network.up(leg, LegEnded(leg.request_id, leg.generation, ended.n_output))
