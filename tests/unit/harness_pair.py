"""A prefill and a decode worker on a network that tests deliver, lose and reorder by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from tests.unit.harness import FakeWorker
from twofold.messages import (
    FromPeer,
    PeerLost,
    PeerMessage,
    ReadDone,
    Release,
    Submit,
    Wake,
    WorkerMessage,
)
from twofold.types import KVHandle, RequestId


class Packet(NamedTuple):
    """A handoff message under way."""

    source: str
    to: str
    message: PeerMessage


class Pair:
    """A prefill worker "P", a decode worker "D", the network between them and their gateway."""

    def __init__(self, p: dict[str, Any] | None = None, d: dict[str, Any] | None = None) -> None:
        self.now_ns = 0
        self.p = FakeWorker("P", **{"seed": 1000, **(p or {})})
        self.d = FakeWorker("D", **{"seed": 2000, **(d or {})})
        self.workers = {"P": self.p, "D": self.d}
        self.net: list[Packet] = []
        self.handles: list[KVHandle] = []  # with the gateway: prefilled, not dispatched
        self.prompt_of: dict[RequestId, Submit] = {}  # of D's requests: what P was asked
        self.lose: Callable[[Packet], bool] = lambda _: False
        self.flips = 0  # added to the first number of the next block that lands
        self._n_requests = 0

    def send(self, worker: FakeWorker, message: WorkerMessage) -> None:
        """Deliver `message` to `worker`, and take up what it says to its peer and gateway."""
        before = set(worker.ended)
        worker.send(message, self.now_ns)
        self._collect(worker, before)

    def _collect(self, worker: FakeWorker, before: set[RequestId]) -> None:
        for effect in worker.outbox:
            packet = Packet(worker.name, effect.peer, effect.message)
            if not self.lose(packet):
                self.net.append(packet)
        worker.outbox.clear()
        for request_id, ended in worker.ended.items():
            if request_id not in before and ended.held:
                self.handles.append(self.handle(request_id))

    def handle(self, request_id: RequestId, generation: int | None = None) -> KVHandle:
        """The handle that P's answer to `request_id` carries."""
        submit = self.p.submitted[request_id]
        return KVHandle(
            engine_id="P",
            host="p",
            port=1,
            request_id=request_id,
            generation=submit.generation if generation is None else generation,
            n_tokens=len(submit.tokens),
        )

    # ------------------------------------------------------------------ requests

    def prefill(self, tokens: Sequence[int], *, generation: int = 0, salt: str = "") -> RequestId:
        """Submit a prompt to P, to be held for D; returns P's id for it."""
        self._n_requests += 1
        submit = Submit(
            request_id=self._n_requests,
            tokens=tuple(tokens),
            max_tokens=1,
            salt=salt,
            hold=True,
            generation=generation,
        )
        self.send(self.p, submit)
        return submit.request_id

    def decode(self, handle: KVHandle, *, max_tokens: int = 3, time_left_ns: int = 0) -> RequestId:
        """Submit the decode leg to D; returns D's id for it."""
        self._n_requests += 1
        asked = self.p.submitted.get(handle.request_id)
        submit = Submit(
            request_id=self._n_requests + 500,
            tokens=(),
            max_tokens=max_tokens,
            source=handle,
            generation=handle.generation,
            salt=asked.salt if asked else "",
            time_left_ns=time_left_ns,
        )
        if asked is not None:
            self.prompt_of[submit.request_id] = Submit(
                request_id=submit.request_id,
                tokens=asked.tokens,
                max_tokens=max_tokens,
                salt=asked.salt,
            )
        self.send(self.d, submit)
        return submit.request_id

    def prefilled(self, tokens: Sequence[int], **kwargs: Any) -> KVHandle:
        """Prefill a prompt to its end, checksums known; returns its handle."""
        request_id = self.prefill(tokens, **kwargs)
        while self.p.step is not None:
            self.finish_step(self.p)
        while self.p.digests:
            self.digest(self.p)
        return next(h for h in self.handles if h.request_id == request_id)

    # ------------------------------------------------------------------ events

    def deliver(self, index: int = 0) -> None:
        """One message of the network arrives."""
        packet = self.net.pop(index)
        worker = self.workers.get(packet.to)
        if worker is not None:
            self.send(worker, FromPeer(packet.source, packet.message))

    def finish_step(self, worker: FakeWorker) -> None:
        """The device of `worker` is done with its step."""
        before = set(worker.ended)
        worker.finish_step(self.now_ns)
        self._collect(worker, before)

    def fail_step(self, worker: FakeWorker) -> None:
        """The device of `worker` fails its step."""
        before = set(worker.ended)
        worker.fail_step(self.now_ns)
        self._collect(worker, before)

    def digest(self, worker: FakeWorker, index: int = 0) -> None:
        """`worker` has computed the checksums of one held request."""
        before = set(worker.ended)
        worker.digest(index, self.now_ns)
        self._collect(worker, before)

    def land(self, request_id: RequestId, flip: int = 0) -> None:
        """One more block of a read is copied, with `flip` added to its first number."""
        reading = self.d.reads[request_id]
        theirs, ours = reading.effect.pairs[len(reading.landed)]
        cells = list(self.p.memory.cells[theirs])
        cells[0] += flip + self.flips
        self.flips = 0
        self.d.memory.cells[ours] = cells
        reading.landed.append(self.d.memory.checksum(ours))

    def end_read(self, request_id: RequestId, *, ok: bool = True) -> None:
        """A read is over: nothing of it is written any more."""
        reading = self.d.reads.pop(request_id)
        done = ReadDone(request_id, False, "cut")
        if ok and not reading.cancelled:
            sums = tuple(reading.landed)
            done = ReadDone(request_id, True, "", 64 * len(sums), sums)
        self.send(self.d, done)

    def go_on_reading(self, request_id: RequestId) -> None:
        """The next block lands, or the read ends since all have."""
        reading = self.d.reads[request_id]
        if len(reading.landed) < len(reading.effect.pairs):
            self.land(request_id)
        else:
            self.end_read(request_id)

    def complete_read(self, request_id: RequestId, flip: int = 0) -> None:
        """Copy what is left of a read and end it."""
        reading = self.d.reads[request_id]
        while len(reading.landed) < len(reading.effect.pairs):
            self.land(request_id, flip)
        self.end_read(request_id)

    def advance(self, by_ns: int) -> None:
        """Let time pass; timers that ran out are told once, late as it may be."""
        self.now_ns += by_ns
        for worker in self.workers.values():
            if worker.wake_ns is not None and worker.wake_ns <= self.now_ns:
                worker.wake_ns = None
                self.send(worker, Wake())

    def cut(self, *ends: Literal["P", "D"]) -> None:
        """The connection breaks: what is under way is lost, and `ends` are told."""
        self.net.clear()
        for end in ends:
            self.send(self.workers[end], PeerLost("D" if end == "P" else "P", "reset"))

    def release(self, handle: KVHandle) -> None:
        """The gateway gives up a held request."""
        self.send(self.p, Release(handle.request_id, handle.generation))

    def busy(self) -> bool:
        """Do one thing that needs no time to pass; False when there is none."""
        if self.net:
            self.deliver()
        elif self.p.digests:
            self.digest(self.p)
        elif self.d.reads:
            # Cancelled ones last: the longer they write, the more they could spoil.
            reads = self.d.reads
            self.go_on_reading(min(reads, key=lambda request_id: reads[request_id].cancelled))
        elif self.p.step is not None:
            self.finish_step(self.p)
        elif self.d.step is not None:
            self.finish_step(self.d)
        else:
            return False
        return True

    def quiesce(self) -> None:
        """Let everything happen that will, without further faults, and all timers run out."""
        for _ in range(20_000):
            if self.busy():
                continue
            times = [w.wake_ns for w in self.workers.values() if w.wake_ns is not None]
            if not times:
                return
            self.advance(max(0, min(times) - self.now_ns))
        raise AssertionError("it never comes to rest")

    def settle(self) -> None:
        """Everything that needs no time to pass happens."""
        while self.busy():
            pass

    def verify_end(self) -> None:
        """After `quiesce`: one end each, nothing held, and only right text."""
        self.p.verify_idle()
        self.d.verify_idle()
        for request_id in self.p.ended:
            self.p.verify_output(request_id)
        for request_id, prompt in self.prompt_of.items():
            self.d.verify_output(request_id, prompt)
        counts = self.p.core.source.counts
        held = sum(1 for ended in self.p.ended.values() if ended.held)
        assert counts.received + counts.expired + counts.released == held
