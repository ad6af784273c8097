"""What may go wrong in a simulated run, as pure functions of a seed."""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from twofold.messages import Read, RunStep, ToPeer
from twofold.trace.hashing import hash64, uniform

Fate = tuple[int, ...]
"""Extra delays in ns, one for each copy that arrives. () is lost, (0,) is as it should be."""

AS_SENT: Final[Fate] = (0,)


class Faults(Protocol):
    """Decides the fate of everything that crosses the simulated network or device."""

    def fate(self, sequence: int, message: object) -> Fate:
        """The fate of the `sequence`-th message of the run. Must depend on the arguments alone.

        `message` is an effect or a router message. What being lost means depends on it:
        ToPeer       not delivered; further copies are duplicates
        Read         the read fails
        CancelRead   the read goes on to its end
        RunStep      the step fails
        CancelLeg, ReleaseHeld   not delivered
        any other    a message of a leg: its connection breaks, and both ends see that
        """


class Crash(msgspec.Struct, frozen=True, kw_only=True):
    """Worker `worker` dies at `at_ns` and is back `down_ns` later, empty, or never (None)."""

    worker: str
    at_ns: int
    down_ns: int | None = None


class SeededFaults(msgspec.Struct, frozen=True, kw_only=True):
    """Independent faults at given rates, from 0 to 1, each a hash of (seed, sequence).

    Delays are uniform up to `most_ns`; legs and reads are delayed at the rate of messages.
    """

    seed: int
    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    most_ns: int = 0
    cut_leg: float = 0.0
    fail_read: float = 0.0
    fail_step: float = 0.0

    def fate(self, sequence: int, message: object) -> Fate:
        """See `Faults`."""
        if isinstance(message, RunStep):
            return self._lost_or(AS_SENT, self.fail_step, sequence)
        if isinstance(message, ToPeer):
            copies = 2 if uniform(self.seed, sequence, 1) < self.duplicate else 1
            fate = tuple(self._delay_ns(sequence, copy) for copy in range(copies))
            return self._lost_or(fate, self.drop, sequence)
        rate = self.fail_read if isinstance(message, Read) else self.cut_leg
        return self._lost_or((self._delay_ns(sequence, 0),), rate, sequence)

    def _lost_or(self, fate: Fate, rate: float, sequence: int) -> Fate:
        return () if uniform(self.seed, sequence, 0) < rate else fate

    def _delay_ns(self, sequence: int, copy: int) -> int:
        if uniform(self.seed, sequence, 2 + 2 * copy) >= self.delay:
            return 0
        return hash64(self.seed, sequence, 3 + 2 * copy) % (self.most_ns + 1)
