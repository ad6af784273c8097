"""Decode steps of a simulated worker that are all alike, crossed at once."""

from __future__ import annotations

from typing import Final

from twofold.core.abridged import ids_of
from twofold.cost.step import StepTime
from twofold.messages import (
    Claim,
    FromPeer,
    Heartbeat,
    ReadDone,
    Submit,
    WorkerMessage,
    Written,
)

FOREVER_NS: Final = 1 << 62
_ASIDE: Final = (Claim, Heartbeat, Written)


class Run:
    """Decode steps under way that are all alike: the first of them began at `start_ns`.

    `most` is how many the engine foresees, `k` how many of them the event in the heap is for.
    """

    __slots__ = ("batch", "context", "end_ns", "k", "most", "start_ns", "version")

    def __init__(self, start_ns: int, batch: int, context: int) -> None:
        self.start_ns = start_ns
        self.end_ns = -1  # of the step that the event in the heap is for
        self.batch = batch
        self.context = context
        self.most = 0
        self.k = 0
        self.version = 0

    def over(self, step: StepTime, now_ns: int) -> tuple[int, int]:
        """How many steps are over by `now_ns`, the last excluded, and how long they took."""
        k = self.k - 1
        if now_ns != self.end_ns or k == 0:
            return step.decode_steps_within(self.batch, self.context, now_ns - self.start_ns, k)
        last_ns = step.step_ns((), self.batch, self.context + k * self.batch)
        return k, now_ns - last_ns - self.start_ns


def looks_at_the_batch(message: WorkerMessage) -> bool:
    """Whether handling `message` may depend on, or change, what runs or which blocks are free.

    A request that waits for a peer's KV, a read that went well, a claim: these touch neither.
    """
    if isinstance(message, FromPeer):
        return type(message.message) not in _ASIDE
    if isinstance(message, Submit):
        return message.source is None or len(ids_of(message)) > 0
    if isinstance(message, ReadDone):
        return not message.ok
    return True
