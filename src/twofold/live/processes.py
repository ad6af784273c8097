"""The processes of peers on this host: when one of them is certainly no more."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from typing import Final

from twofold.live.clock import Clock, Timer
from twofold.types import NS_PER_MS

_POLL_NS: Final = 20 * NS_PER_MS


class Processes:
    """Knows each peer's process from when it was met, so that no later one is taken for it.

    Each process is held by a descriptor, which is let go of once the process is gone.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, int] = {}
        self._waiting: dict[str, Callable[[], None]] = {}
        self._timer: Timer | None = None

    def met(self, peer: str, pid: int) -> None:
        """`peer` is process `pid`, and lives."""
        self._forget_the_dead()
        if peer in self._known or not pid:
            return
        try:
            self._known[peer] = os.pidfd_open(pid)
        except ProcessLookupError:
            return  # gone again already

    def when_gone(self, peer: str, then: Callable[[], None]) -> None:
        """Call `then` once every thread of `peer` has ended; soon if it was never met.

        One call for each peer: the latest counts.
        """
        self._waiting[peer] = then
        if self._timer is None:
            self._timer = self._clock.call_at(self._clock.now_ns(), self._look)

    def close(self) -> None:
        """Let go of all descriptors; nothing is called any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.clear()
        for number in self._known.values():
            os.close(number)
        self._known.clear()

    def _look(self) -> None:
        self._timer = None
        self._forget_the_dead()
        ended = [self._waiting.pop(p) for p in list(self._waiting) if p not in self._known]
        if self._waiting:
            self._timer = self._clock.call_at(self._clock.now_ns() + _POLL_NS, self._look)
        for then in ended:
            then()

    def _forget_the_dead(self) -> None:
        for peer, number in list(self._known.items()):
            watch = select.poll()
            watch.register(number, select.POLLIN)
            if watch.poll(0):
                os.close(self._known.pop(peer))
