"""Cores as plain data: a canonical form to tell states apart, and their steps, each taken once.

Two states of a core are the same when nothing that it will ever do differs but for the order of
what it does at one moment and the names of free blocks. So times count from now, what is only
counted or measured is left out, and mappings and free blocks are sorted; all the rest is walked
through as it is, so that a new field makes more states rather than wrong ones.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, Final, NamedTuple

import msgspec

from twofold.core.engine import Engine
from twofold.core.router import Router
from twofold.core.timers import Timers
from twofold.core.worker import WorkerCore
from twofold.messages import Grant, RunStep, Token, ToPeer, Wake, WakeAt, Written
from twofold.messages.base import Plain
from twofold.sim.observer import Core, Message
from twofold.types import KVHandle, KVLayout

_MEASURED: Final = frozenset(
    {
        "arrived_ns", "choices", "compute_ns", "counts", "finished_ns", "first_step_ns",
        "handing", "idle_since_ns", "n_bytes", "n_evicted", "n_failed", "n_inserted",
        "n_preemptions", "n_received", "n_released", "n_steps", "number", "placed_ns", "pushed",
        "queue_ns", "reading", "ready_ns", "sent_ns", "started_ns", "steps",
        "_n_enqueued", "_tried", "_handing", "_pairs", "_prefixes", "_reading", "_steps",
    }
)  # fmt: skip


_Names = dict[type, tuple[str, ...]]


def canonical(core: Core, now_ns: int, names: _Names | None = None) -> Hashable:
    """Equal for two states of a core that are the same, seen from each one's now.

    `names` remembers the fields of each class from one call to the next.
    """
    return _Walk(now_ns, {} if names is None else names).of(core)


_PLAIN: Final = frozenset({int, bool, float, str, bytes, type(None)})


class _Walk:
    """One walk through the objects of a core; an object met again is a reference."""

    def __init__(self, now_ns: int, names: _Names) -> None:
        self._now_ns = now_ns
        self._names = names
        self._met: dict[int, int] = {}

    def of(self, value: Any) -> Hashable:
        kind = value.__class__
        if kind in _PLAIN:
            return value  # type: ignore[no-any-return]
        if kind is dict or kind is OrderedDict:
            return tuple([(self.of(key), self.of(value[key])) for key in sorted(value)])
        if kind is list or kind is tuple:
            return tuple([item if item.__class__ is int else self.of(item) for item in value])
        if isinstance(value, RunStep):
            return value.work
        if isinstance(value, dict | list | tuple):
            raise TypeError(f"states cannot be told apart by a {kind.__name__}")
        if isinstance(value, int | Plain | KVLayout | KVHandle):
            return value
        if callable(value):
            return None
        number = self._met.get(id(value))
        if number is not None:
            return ("again", number)
        self._met[id(value)] = len(self._met)
        if isinstance(value, Timers):
            armed = value._armed_ns
            at = sorted((at - self._now_ns, key) for key, at in value._at.items())
            return (tuple(at), None if armed is None else armed - self._now_ns)
        return (kind.__name__, *self._fields(value))

    def _fields(self, value: object) -> list[Hashable]:
        found: list[Hashable] = []
        names = self._names.get(value.__class__)
        if names is None:
            names = self._names[value.__class__] = _field_names(value)
        for name in names:
            field = getattr(value, name)
            if name == "expiry_ns":
                # A reader's hold says it for the record only, and may be past.
                found.append(max(0, field - self._now_ns))
            elif field.__class__ in _PLAIN:
                found.append(field)
            elif name == "_free":
                found.append(tuple(sorted(field)))
            elif name == "_lru":  # in order of use, unlike other mappings
                found.append(tuple(field))
            else:
                found.append(self.of(field))
        if isinstance(value, Engine):  # whether it will try to place what waits
            found.append(value._tried == value._changes())
        return found


def _field_names(value: object) -> tuple[str, ...]:
    """Those that count: not what is measured, nor functions, which stay what they are."""
    names = getattr(value, "__struct_fields__", None) or getattr(value, "__slots__", None)
    if names is None:
        names = vars(value)
    return tuple([n for n in names if n not in _MEASURED and not callable(getattr(value, n))])


class Row(NamedTuple):
    """One request of a step: computes tokens `start` to `start + n` of `tokens` in `blocks`."""

    request_id: int
    start: int
    n: int
    blocks: tuple[int, ...]
    tokens: tuple[int, ...]


class Taken(NamedTuple):
    """What handling a message led to: the state's number after it, and effects without times.

    `rows` are of the step that was started, if one was.
    """

    state: int
    effects: tuple[Any, ...]
    rows: tuple[Row, ...]


class Facts(NamedTuple):
    """Of a worker's core. `held`: blocks held for a handoff, `idle`: those whose content is of no
    use to anybody. `requests` has not ended, of `known` something may still be done. `awaited`:
    (life of the peer, name) of the KV that is waited for.
    """

    at_rest: bool
    held: tuple[int, ...] = ()
    idle: tuple[int, ...] = ()
    requests: frozenset[int] = frozenset()
    known: frozenset[int] = frozenset()
    awaited: frozenset[tuple[int, int]] = frozenset()


class _Known(NamedTuple):
    pickled: bytes
    now_ns: int
    wake_ns: int | None


class _Shared:
    """Objects that cannot change, by number: copies of a core have them in common."""

    def __init__(self) -> None:
        self._number_of: dict[Any, int] = {}
        self.by_number: list[Any] = []

    def number(self, obj: Any) -> int:
        number = self._number_of.setdefault(obj, len(self.by_number))
        if number == len(self.by_number):
            self.by_number.append(obj)
        return number


class _Pickler(pickle.Pickler):
    """Functions are shared since some have no name to be found by."""

    def __init__(self, file: io.BytesIO, shared: _Shared) -> None:
        super().__init__(file, 5)
        self._shared = shared

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, FunctionType | Plain | KVLayout | KVHandle):
            return self._shared.number(obj)
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, shared: _Shared) -> None:
        super().__init__(io.BytesIO(data))
        self._shared = shared

    def persistent_load(self, pid: int) -> Any:
        return self._shared.by_number[pid]


class Cores:
    """Numbers the states of one kind of core, and takes each step from each state only once.

    After each step `check(core)` may raise AssertionError.
    """

    def __init__(self, make: Callable[[], Core], check: Callable[[Core], None]) -> None:
        self._make = make
        self._shared = _Shared()
        self._names: _Names = {}
        self._check = check
        self._number_of: dict[Hashable, int] = {}
        self._known: list[_Known] = []
        self._facts: list[Facts] = []
        self._taken: dict[tuple[int, Hashable], Taken] = {}

    def __len__(self) -> int:
        return len(self._known)

    def born(self) -> int:
        """The state of a core that has just been made."""
        return self._number(self._make(), 0, None)

    def will_wake(self, state: int) -> bool:
        """Whether a timer is set."""
        return self._known[state].wake_ns is not None

    def at_rest(self, state: int) -> bool:
        """Whether nothing is known of any request and no block is used."""
        return self._facts[state].at_rest

    def facts(self, state: int) -> Facts:
        """What else a driver has to know of it."""
        return self._facts[state]

    def take(self, state: int, message: Message) -> Taken:
        """Handle `message`; the number of a step in it is put right. Time stands still but for
        Wake, before which it goes on to when that is due."""
        key = (state, message)
        taken = self._taken.get(key)
        if taken is None:
            taken = self._taken[key] = self._take(self._known[state], message)
        return taken

    def _take(self, known: _Known, message: Message) -> Taken:
        core: Core = _Unpickler(known.pickled, self._shared).load()
        now_ns, wake_ns = known.now_ns, known.wake_ns
        if isinstance(message, Wake):
            assert wake_ns is not None
            now_ns, wake_ns = max(now_ns, wake_ns), None
        if hasattr(message, "step") and isinstance(core, WorkerCore):
            assert core.engine.step is not None
            message = msgspec.structs.replace(message, step=core.engine.step.step)
        effects: list[Any] = []
        rows: tuple[Row, ...] = ()
        for effect in core.handle(message, now_ns):  # type: ignore[arg-type]
            if isinstance(effect, WakeAt):
                wake_ns = effect.at_ns
            else:
                effects.append(_timeless(effect))
            if isinstance(effect, RunStep) and isinstance(core, WorkerCore):
                rows = tuple([_row(core, *work) for work in effect.work])
        self._check(core)
        return Taken(self._number(core, now_ns, wake_ns), tuple(effects), rows)

    def _number(self, core: Core, now_ns: int, wake_ns: int | None) -> int:
        left = None if wake_ns is None else wake_ns - now_ns
        key = (canonical(core, now_ns, self._names), left)
        number = self._number_of.get(key)
        if number is None:
            number = self._number_of[key] = len(self._known)
            file = io.BytesIO()
            _Pickler(file, self._shared).dump(core)
            self._known.append(_Known(file.getvalue(), now_ns, wake_ns))
            self._facts.append(_facts(core))
        return number


def _row(core: WorkerCore, request_id: int, start: int, n: int) -> Row:
    request = core.engine.row(request_id)
    return Row(request_id, start, n, tuple(request.blocks), tuple(request.ids()))


def _facts(core: Core) -> Facts:
    if isinstance(core, Router):
        return Facts(not core.requests)
    engine, source, reader = core.engine, core.source, core.reader
    counts = core.pool.counts()
    rest = not engine.requests and counts.active == counts.held == engine.n_placed == 0
    held = [block for hold in core.pool.holds.values() for block in hold.blocks]
    ours = getattr(source, "_transfer_of", None) or getattr(source, "_held", {})
    theirs = [*reader._of, *getattr(reader, "_draining", {})]
    return Facts(
        at_rest=rest and source.counts.in_hand == 0,
        held=tuple(held),
        idle=tuple(sorted(core.pool._free)),
        requests=frozenset(engine.requests),
        known=frozenset([*engine.requests, *ours]),
        awaited=frozenset([(int(peer.partition(".")[2]), name) for peer, name, _ in theirs]),
    )


def _timeless(effect: Any) -> Any:
    """`effect` without what only tells how long something took."""
    if isinstance(effect, RunStep):
        return msgspec.structs.replace(effect, step=0)
    if isinstance(effect, Token):
        return msgspec.structs.replace(effect, phases=None)
    if isinstance(effect, ToPeer):
        inner = effect.message
        if isinstance(inner, Grant):
            inner = msgspec.structs.replace(inner, lease_left_ns=0)
        elif isinstance(inner, Written):
            inner = msgspec.structs.replace(inner, queue_ns=0, compute_ns=0, write_ns=0, n_bytes=0)
        return msgspec.structs.replace(effect, message=inner)
    return effect
