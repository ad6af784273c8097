"""One global state of the exhaustive search: three cores, and all that is on its way between them.

    legs     one for each leg of each request: what goes down and up it, in order
    peers    the connection between the workers, in order in each direction
    moving   blocks on their way, checksums and steps being computed, fences being set

Everything is frozen, so that states can be compared and share what is alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from twofold.messages import PeerMessage
from twofold.sim.explore_state import Row

P: Final = 0  # the prefill worker's place in pairs
D: Final = 1
NAMES: Final = ("P", "D")

LAYERS: Final = 2

Block = tuple[Any, ...]
"""What is in the slots of one KV block; where its layers differ, a tuple of that of each."""


class Leg(msgspec.Struct, frozen=True):
    """One leg: the life of the worker that it goes to, and what is on its way.

    `down` holds "submit" and "cancel", `up` messages to the router. `worker_id` is -1 until the
    worker has it. `source` is the prefill worker's life and its name of the KV. `over`: nothing
    more will come up it, and it cannot break any more.
    """

    life: int
    worker_id: int = -1
    down: tuple[str, ...] = ()
    up: tuple[Any, ...] = ()
    over: bool = False
    source: tuple[int, int] = (-1, -1)


class Step(msgspec.Struct, frozen=True, order=True):
    """A step that worker `who` computes; `layers` is how many are said to be done."""

    who: int
    rows: tuple[Row, ...]
    layers: int = 0


class Digesting(msgspec.Struct, frozen=True, order=True):
    """Checksums that worker `who` computes."""

    who: int
    request_id: int
    blocks: tuple[int, ...]


class Moving(msgspec.Struct, frozen=True, order=True):
    """Blocks that `who` reads (D) or writes (P), as (prefill's, decode's). `life` is the peer's.

    Of these only layers `layers[0]` to `layers[1]`.
    `state`: "" on its way, "cancelled" so, or "over": only the answer is to come, a failure.
    """

    who: int
    request_id: int
    number: int
    pairs: tuple[tuple[int, int], ...]
    life: int
    layers: tuple[int, int] = (0, LAYERS)
    state: Literal["", "cancelled", "over"] = ""


class Fencing(msgspec.Struct, frozen=True, order=True):
    """A fence that the decode worker sets."""

    request_id: int


class Lost(msgspec.Struct, frozen=True):
    """In place of a peer's message: the connection to that life of the peer is lost."""

    life: int


class Sent(msgspec.Struct, frozen=True):
    """A peer's message, from its life `life`."""

    life: int
    message: PeerMessage


Work = Step | Digesting | Moving | Fencing


class World(msgspec.Struct, frozen=True):
    """A global state. Pairs are (prefill, decode). A dead worker's core is -1."""

    router: int
    cores: tuple[int, int]
    lives: tuple[int, int]
    submitted: tuple[int, int]  # in these lives
    contents: tuple[tuple[Block, ...], tuple[Block, ...]]
    legs: tuple[Leg | None, ...]  # request r: 2r is prefill's, 2r + 1 decode's
    inboxes: tuple[tuple[Sent | Lost, ...], tuple[Sent | Lost, ...]]  # from the peer
    work: tuple[Work, ...]
    arrived: int
    ended: tuple[bool, ...]
    faults: int  # that may still happen

    def key(self) -> int:
        """Of 64 bits, alike for states that differ at most in the faults that may still happen."""
        return hash(
            (
                self.router,
                self.cores,
                self.lives,
                self.submitted,
                self.contents,
                self.legs,
                self.inboxes,
                self.work,
                self.arrived,
                self.ended,
            )
        )


def put(pair: Sequence[Any], at: int, value: Any) -> tuple[Any, ...]:
    """`pair` with another value at one place."""
    return (*pair[:at], value, *pair[at + 1 :])


def without(items: Sequence[Any], item: Any) -> tuple[Any, ...]:
    """`items` without the first that equals `item`."""
    at = items.index(item)
    return (*items[:at], *items[at + 1 :])


_ORDER: Final = {Step: 0, Digesting: 1, Moving: 2, Fencing: 3}


def _order(item: Work) -> tuple[int, Work]:
    return _ORDER[type(item)], item


def with_work(work: tuple[Work, ...], item: Work) -> tuple[Work, ...]:
    """`work` and `item`; in one order whatever came first, since nobody can tell."""
    return tuple(sorted((*work, item), key=_order)) if work else (item,)


def is_quiet(world: World) -> bool:
    """Whether nothing is on its way, so that only a timer or a client can do something."""
    return not (
        world.work
        or world.inboxes[P]
        or world.inboxes[D]
        or any(leg is not None and (leg.down or leg.up) for leg in world.legs)
    )
