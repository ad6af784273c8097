"""What may go wrong in a simulated run: fates of single messages, and troubles at set times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol, TypeAlias
from zlib import crc32

import msgspec

from twofold.messages import Heartbeat, Read, RunStep, ToPeer, Write
from twofold.trace.hashing import hash64, uniform

Fate = tuple[int, ...]
"""Extra delays in ns, one for each copy that arrives. () is lost, (0,) is as it should be.

Of a Read or Write there is one copy: a second number instead flips bits of the block with that
index among those moved, counted around.
"""

AS_SENT: Final[Fate] = (0,)


class Faults(Protocol):
    """Decides the fate of everything that crosses the simulated network or device."""

    def fate(self, sequence: int, message: object) -> Fate:
        """The fate of the `sequence`-th message of the run.

        `message` is an effect or a router message. What being lost means depends on it:
        ToPeer       not delivered; further copies are duplicates
        Read, Write  it fails
        CancelRead, CancelWrite   it goes on to its end
        RunStep      the step fails
        CancelLeg, ReleaseHeld   not delivered
        any other    a message of a leg: its connection breaks, and both ends see that
        """


class Crash(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Worker `worker` dies at `at_ns` and is back `down_ns` later, empty, or never (None)."""

    worker: str
    at_ns: int
    down_ns: int | None = None


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Worker `worker` handles nothing for `for_ns`, then all that has come meanwhile, in order."""

    worker: str
    at_ns: int
    for_ns: int


class Jump(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The clock of worker `worker` jumps forward by `by_ns`."""

    worker: str
    at_ns: int
    by_ns: int


class Sever(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The connection between two living workers breaks; what was under way on it is lost."""

    worker: str
    other: str
    at_ns: int


class Again(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Some remote decode leg, chosen by `pick`, reaches `worker` as well, a second time.

    `stale` is what its generation is too low by.
    """

    worker: str
    at_ns: int
    pick: int
    stale: int = 0


class Stray(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An Abort, or a Release of `generation`, of the worker's own request `request_id` comes."""

    worker: str
    at_ns: int
    request_id: int
    release: bool
    generation: int = 0


Trouble: TypeAlias = Crash | Pause | Jump | Sever | Again | Stray


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
    flip: float = 0.0

    def fate(self, sequence: int, message: object) -> Fate:
        """See `Faults`. Depends on the arguments alone."""
        if isinstance(message, RunStep):
            return self._lost_or(AS_SENT, self.fail_step, sequence)
        if isinstance(message, ToPeer):
            again = self.duplicate and uniform(self.seed, sequence, 1) < self.duplicate
            copies = 2 if again else 1
            fate = tuple(self._delay_ns(sequence, copy) for copy in range(copies))
            return self._lost_or(fate, self.drop, sequence)
        fate = (self._delay_ns(sequence, 0),)
        moves = isinstance(message, Read | Write)
        if moves and self.flip and uniform(self.seed, sequence, 6) < self.flip:
            fate += (hash64(self.seed, sequence, 7) % 1024,)
        return self._lost_or(fate, self.fail_read if moves else self.cut_leg, sequence)

    def _lost_or(self, fate: Fate, rate: float, sequence: int) -> Fate:
        return () if rate and uniform(self.seed, sequence, 0) < rate else fate

    def _delay_ns(self, sequence: int, copy: int) -> int:
        if not self.delay or uniform(self.seed, sequence, 2 + 2 * copy) >= self.delay:
            return 0
        return hash64(self.seed, sequence, 3 + 2 * copy) % (self.most_ns + 1)


class Names:
    """Names the messages of one run so that leaving out one request renames few of the others.

    A name says what a message is, of which request, and the how-manyth of those it is.
    """

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def name(self, message: object) -> str:
        """The name of the run's next message."""
        inner = message.message if isinstance(message, ToPeer) else message
        if isinstance(inner, Heartbeat | RunStep):
            stem = type(inner).__name__
        else:
            request_id = getattr(inner, "request_id", "")
            stem = f"{type(inner).__name__}:{request_id}:{getattr(inner, 'generation', 0)}"
        count = self._seen[stem] = self._seen.get(stem, 0) + 1
        return f"{stem}:{count}"


class RecordedFaults:
    """Faults at the rates of `seeded`, each a hash of the message's name; `fates` keeps them."""

    def __init__(self, seeded: SeededFaults) -> None:
        self.fates: dict[str, Fate] = {}
        self._seeded = seeded
        self._names = Names()

    def fate(self, sequence: int, message: object) -> Fate:
        """See `Faults`."""
        name = self._names.name(message)
        fate = self._seeded.fate(_number(name), message)
        if fate != AS_SENT:
            self.fates[name] = fate
        return fate


class ListedFaults:
    """The fates of `fates`, by the messages' names; all else is as sent."""

    def __init__(self, fates: Mapping[str, Fate]) -> None:
        self._fates = fates
        self._names = Names()

    def fate(self, sequence: int, message: object) -> Fate:
        """See `Faults`."""
        return self._fates.get(self._names.name(message), AS_SENT)


def _number(name: str) -> int:
    """A number that stands for `name` in a hash."""
    data = name.encode()
    return crc32(data) << 32 | crc32(data, 1)
