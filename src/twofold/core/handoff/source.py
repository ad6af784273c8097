"""What both kinds of source share: the interface, and counts of what became of held KV."""

from __future__ import annotations

import msgspec

from twofold.core.request import Request
from twofold.messages import LayersDone, PeerMessage, Release, RunStep, WorkerEffect, WriteDone
from twofold.types import RequestId

Effects = list[WorkerEffect]


class HandoffCounts(msgspec.Struct):
    """What became of the requests whose KV was held: the four sum to those ever held."""

    in_hand: int = 0
    received: int = 0
    expired: int = 0
    released: int = 0


class Source:
    """Hands KV of prompts that were read here to decode workers. Subclasses say how."""

    def __init__(self) -> None:
        self.counts = HandoffCounts()

    def holds(self, request_id: RequestId) -> bool:
        """Whether this request's KV is still here for a peer."""
        raise AssertionError("a mode defines this")

    def takes(self, request: Request) -> bool:
        """Whether the name of such a request's KV is free."""
        return True

    def may_start(self, request: Request) -> bool:
        """Whether a prompt that waits may be read now."""
        return True

    def expect(self, request: Request, now_ns: int, out: Effects) -> None:
        """A request has come whose KV will be wanted."""

    def progress(self, request: Request, now_ns: int, out: Effects) -> None:
        """A step has computed more of the prompt of such a request."""

    def layers_done(self, message: LayersDone, step: RunStep, out: Effects) -> None:
        """Part of the layers of the step in flight have been computed."""

    def keep(self, request: Request, now_ns: int, out: Effects) -> None:
        """Such a request has finished: take over its blocks."""
        raise AssertionError("a mode defines this")

    def gave_up(self, request: Request, reason: str, out: Effects) -> None:
        """Such a request has ended without finishing."""

    def write_done(self, message: WriteDone, now_ns: int, out: Effects) -> None:
        """A write has ended."""

    def digested(self, request_id: RequestId, checksums: tuple[int, ...], now_ns: int) -> Effects:
        """Checksums of held blocks are known."""
        raise AssertionError("a mode defines this")

    def from_peer(self, peer: str, message: PeerMessage, now_ns: int) -> Effects:
        """Answer a decode worker."""
        raise AssertionError("a mode defines this")

    def release(self, message: Release) -> Effects:
        """The gateway knows that nobody will come for this one."""
        raise AssertionError("a mode defines this")

    def peer_lost(self, peer: str, now_ns: int, out: Effects) -> None:
        """A decode worker's connection broke: dead, or back in a moment."""
        raise AssertionError("a mode defines this")

    def lease_over(self, transfer: int) -> Effects:
        """Nobody renewed a lease."""
        raise AssertionError("a mode defines this")
