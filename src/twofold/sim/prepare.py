"""What preparing handoffs (descriptors, metadata) takes: of a worker's step loop, or beside it."""

from __future__ import annotations

from twofold.cost.link import Link
from twofold.cost.step import StepTime
from twofold.sim.run import Run
from twofold.types import RequestId


class Preparation:
    """Preparations of one worker in one life, each as `link` says.

    On the loop they run between steps, one after another, and the next step waits for them; else
    each runs by itself. Times are the simulation's, in nanoseconds.
    """

    def __init__(self, link: Link) -> None:
        self._prepare_ns = link.prepare_ns
        self._on_loop = link.prepare_on_loop
        self.loop_free_ns = 0
        """When the loop has prepared all that it was asked for."""
        self.step_end_ns = 0
        """When the step in flight ends; past if there is none."""
        self._ready_ns: dict[RequestId, int] = {}

    def begin(self, now_ns: int) -> int:
        """When a step that is asked for now begins."""
        return max(now_ns, self.loop_free_ns)

    def read_in(self, now_ns: int, run: Run | None, step: StepTime) -> int:
        """How long from now until a read that is asked for now may begin.

        `run`: the steps under way, brought up to now, where there are many that are alike.
        """
        if not self._prepare_ns:
            return 0
        if not self._on_loop:
            return self._prepare_ns
        if run is not None:
            self.step_end_ns = run.start_ns + step.step_ns((), run.batch, run.context)
        self.loop_free_ns = max(self.loop_free_ns, self.step_end_ns, now_ns) + self._prepare_ns
        return self.loop_free_ns - now_ns

    def write_in(self, request_id: RequestId, number: int, now_ns: int) -> int:
        """The same of write `number`, from 1 on, of a request: only the first is prepared for."""
        if not self._prepare_ns:
            return 0
        ready = self._ready_ns
        # In order of time, as all take as long: what is past needs no remembering.
        while ready and (first := next(iter(ready))) is not None and ready[first] <= now_ns:
            del ready[first]
        if number == 1:
            ready.pop(request_id, None)
            ready[request_id] = now_ns + self._prepare_ns
        return max(0, ready.get(request_id, now_ns) - now_ns)
