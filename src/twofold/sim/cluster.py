"""A whole deployment under virtual time: one gateway, its workers and the network between them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from twofold.core.handoff import MODES
from twofold.cost.link import Link
from twofold.cost.pipeline import Pipeline
from twofold.messages import Abort, Release
from twofold.metrics.record import RequestRecord
from twofold.sim.events import Events, Kind
from twofold.sim.faults import Again, Crash, Faults, Jump, Pause, Sever, Stray, Trouble
from twofold.sim.gateway import SimGateway
from twofold.sim.network import Network
from twofold.sim.nics import Nics
from twofold.sim.observer import Observer
from twofold.sim.pools import WorkerPlan
from twofold.sim.prompts import AbridgedPrompts, Prompts, PromptSource
from twofold.sim.worker import SimWorker
from twofold.trace import TraceRequest
from twofold.types import NS_PER_S, NS_PER_US, RequestId


class Cluster:
    """A deployment to run once. Latencies are one way, all times in ns.

    `router` are further settings of the router, `layer_groups` how often a device says how far
    it is within a step (for layer-wise handoff). `time_left_ns` is every request's deadline, 0
    for none. `prepare_ns` is what each handoff takes of decode's step loop in pull, and beside
    the loops otherwise; `bounce_bytes_per_s` of each copy to or from host memory, 0 where KV does
    not pass through it. A pair of workers shares a link, or with `share_nics` all transfers of a
    worker share its own. `gone_after_ns(request_id)` says when its client closes the connection,
    counted from its arrival, 0 for never. `crashes` are troubles of all kinds. `observers` see all
    messages. Without observers, faults and contents, steps that are alike are crossed at once
    unless `singly`; the records are the same.
    Nothing here depends on the wall clock, on chance or on hash order.
    """

    def __init__(
        self,
        workers: Sequence[WorkerPlan],
        *,
        leg_latency_ns: int = 100 * NS_PER_US,
        peer_latency_ns: int = 50 * NS_PER_US,
        read_latency_ns: int = 50 * NS_PER_US,
        link_bytes_per_s: int = 10_000_000_000,
        prepare_ns: int = 0,
        bounce_bytes_per_s: int = 0,
        share_nics: bool = False,
        digest_ns: int = 0,
        max_inflight: int = 1_000_000,
        router: Mapping[str, Any] | None = None,
        layer_groups: int = 4,
        time_left_ns: int = 0,
        probe_ns: int = NS_PER_S,
        gone_after_ns: Callable[[RequestId], int] | None = None,
        faults: Faults | None = None,
        crashes: Sequence[Trouble] = (),
        observers: Sequence[Observer] = (),
        track_contents: bool = False,
        singly: bool = False,
    ) -> None:
        self.events = Events()
        self._notice_ns, self._gone_after_ns = leg_latency_ns, gone_after_ns
        self._troubles = crashes
        self._records: dict[RequestId, RequestRecord] = {}
        watched = bool(observers) or track_contents or faults is not None  # sees every token
        sizes = {plan.settings["layout"].block_size for plan in workers}
        abridge = not watched and len(sizes) == 1  # blocks have names only among their equals
        handoff = _handoff_of(workers)
        self.network = network = Network(
            self.events,
            leg_latency_ns=leg_latency_ns,
            peer_latency_ns=peer_latency_ns,
            link=_link(handoff, link_bytes_per_s, read_latency_ns, prepare_ns, bounce_bytes_per_s),
            nics=_nics(self.events, workers, link_bytes_per_s) if share_nics else None,
            faults=faults,
        )
        rest = (digest_ns, self.events, network, observers, track_contents)
        fast = abridge and not singly
        self.workers = {
            plan.name: _worker(plan, number, *rest, fast=fast, layer_groups=layer_groups)
            for number, plan in enumerate(workers, start=1)
        }
        self.gateway = SimGateway(
            self.workers,
            router={"max_inflight": max_inflight, "handoff": handoff, **(router or {})},
            time_left_ns=time_left_ns,
            probe_ns=probe_ns,
            events=self.events,
            network=network,
            observers=observers,
            on_record=self._keep,
            keep_prompts=any(isinstance(trouble, Again) for trouble in crashes),
        )
        self._prompts: PromptSource = AbridgedPrompts(sizes.pop()) if abridge else Prompts()

    def run(
        self, requests: Iterable[TraceRequest], most_events: int | None = None
    ) -> list[RequestRecord]:
        """Records of all `requests`, which come in order of arrival, in that order.

        Raises StuckError after `most_events` events.
        """
        for name, worker in self.workers.items():
            worker.start()
            self.gateway.see(name)
        for trouble in self._troubles:
            self.events.at(trouble.at_ns, Kind.FAULT, 0, self._trouble, trouble)
        self._next(iter(requests), 0)
        with _no_collector():
            self.events.run(most_events)
        return [self._records[request_id] for request_id in sorted(self._records)]

    def _next(self, requests: Iterator[TraceRequest], request_id: RequestId) -> None:
        request = next(requests, None)
        if request is not None:
            self.events.at(
                request.arrival_ns, Kind.ARRIVAL, 0, self._arrive, request_id, request, requests
            )

    def _arrive(
        self, request_id: RequestId, request: TraceRequest, requests: Iterator[TraceRequest]
    ) -> None:
        # One arrival is in the heap at a time, so that a long trace is read as it is needed.
        self._next(requests, request_id + 1)
        self.gateway.arrive(request_id, request, self._prompts.tokens(request))
        gone_ns = self._gone_after_ns(request_id) if self._gone_after_ns is not None else 0
        if gone_ns:
            self.events.after(gone_ns, Kind.ARRIVAL, 0, self.gateway.client_gone, request_id)

    def _keep(self, record: RequestRecord) -> None:
        self._records[record.request_id] = record

    def _trouble(self, trouble: Trouble) -> None:
        worker = self.workers[trouble.worker]
        if worker.core is None:
            return
        if isinstance(trouble, Crash):
            self._crash(trouble)
        elif isinstance(trouble, Pause):
            worker.pause()
            self.events.after(trouble.for_ns, Kind.FAULT, 0, worker.resume, worker.engine_id)
        elif isinstance(trouble, Jump):
            worker.clock.jump(trouble.by_ns)
        elif isinstance(trouble, Sever):
            other = self.workers[trouble.other]
            if other.core is not None:
                self.network.sever(worker, other)
        elif isinstance(trouble, Again):
            self.gateway.send_again(trouble)
        else:
            worker.feed(worker.engine_id, _stray(trouble))

    def _crash(self, crash: Crash) -> None:
        self.workers[crash.worker].kill()
        self.events.after(self._notice_ns, Kind.LEG, 0, self._missed, crash.worker)
        if crash.down_ns is not None:
            self.events.after(crash.down_ns, Kind.FAULT, 0, self._restart, crash.worker)

    def _missed(self, name: str) -> None:
        if self.workers[name].core is None:  # it may be back already
            self.gateway.miss(name)

    def _restart(self, name: str) -> None:
        self.workers[name].start()
        self.events.after(self._notice_ns, Kind.LEG, 0, self.gateway.see, name)


def _stray(stray: Stray) -> Abort | Release:
    if stray.release:
        return Release(stray.request_id, stray.generation)
    return Abort(stray.request_id)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Nothing here makes cycles: looking for them among a million records finds none."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _link(handoff: str, bytes_per_s: int, latency_ns: int, prepare_ns: int, bounce: int) -> Link:
    return Link(
        bytes_per_s=bytes_per_s,
        latency_ns=latency_ns,
        prepare_ns=prepare_ns,
        prepare_on_loop=not MODES[handoff].at_once,
        bounce="serial" if bounce else "none",
        bounce_bytes_per_s=bounce,
    )


def _nics(events: Events, workers: Sequence[WorkerPlan], bytes_per_s: int) -> Nics:
    return Nics(events, {plan.name: plan.nic_bytes_per_s or bytes_per_s for plan in workers})


def _handoff_of(workers: Sequence[WorkerPlan]) -> str:
    """The mode of a deployment, which is that of all its workers."""
    modes = {plan.settings.get("handoff", "pull"): None for plan in workers}
    assert len(modes) == 1, f"workers of one deployment hand over alike, not by {list(modes)}"
    return next(iter(modes), "pull")


def _worker(
    plan: WorkerPlan,
    number: int,
    digest_ns: int,
    events: Events,
    network: Network,
    observers: Sequence[Observer],
    track_contents: bool,
    *,
    fast: bool,
    layer_groups: int,
) -> SimWorker:
    stages = plan.settings.get("pipeline_stages", 1)
    pipeline = plan.pipeline or Pipeline(stages=stages)
    assert pipeline.stages == stages, f"{plan.name}: its core and its device differ in stages"
    return SimWorker(
        plan.name,
        number,
        plan.role,
        settings=plan.settings,
        step=plan.step,
        digest_ns=digest_ns,
        events=events,
        network=network,
        observers=observers,
        track_contents=track_contents,
        fast=fast,
        layer_groups=layer_groups,
        pipeline=pipeline,
    )
