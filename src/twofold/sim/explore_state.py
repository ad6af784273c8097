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
from twofold.sim.observer import Core, Message

_MEASURED: Final = frozenset(
    {
        "arrived_ns", "choices", "compute_ns", "counts", "finished_ns", "first_step_ns",
        "handing", "idle_since_ns", "n_bytes", "n_evicted", "n_failed", "n_inserted",
        "n_preemptions", "n_received", "n_released", "n_steps", "number", "placed_ns", "pushed",
        "queue_ns", "reading", "ready_ns", "sent_ns", "started_ns", "steps",
        "_n_enqueued", "_tried", "_handing", "_pairs", "_prefixes", "_reading", "_steps",
    }
)  # fmt: skip


def canonical(core: Core, now_ns: int) -> Hashable:
    """Equal for two states of a core that are the same, seen from each one's now."""
    return _Walk(now_ns).of(core)


class _Walk:
    """One walk through the objects of a core; an object met again is a reference."""

    def __init__(self, now_ns: int) -> None:
        self._now_ns = now_ns
        self._met: dict[int, int] = {}

    def of(self, value: Any) -> Hashable:
        if value is None or isinstance(value, int | str | bytes | float):
            return value
        if isinstance(value, RunStep):
            return value.work
        if isinstance(value, dict | OrderedDict):
            return tuple([(self.of(key), self.of(value[key])) for key in sorted(value)])
        if isinstance(value, list | tuple):
            return tuple([self.of(item) for item in value])
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
        return (type(value).__name__, *self._fields(value))

    def _fields(self, value: object) -> list[Hashable]:
        found: list[Hashable] = []
        for name in _field_names(value):
            if name == "expiry_ns":
                # A reader's hold says it for the record only, and may be past.
                found.append(max(0, getattr(value, name) - self._now_ns))
            elif name == "_free":
                found.append(tuple(sorted(getattr(value, name))))
            elif name == "_lru":  # in order of use, unlike other mappings
                found.append(tuple(getattr(value, name)))
            elif name not in _MEASURED:
                found.append(self.of(getattr(value, name)))
        if isinstance(value, Engine):  # whether it will try to place what waits
            found.append(value._tried == value._changes())
        return found


def _field_names(value: object) -> tuple[str, ...]:
    if isinstance(value, msgspec.Struct):
        return value.__struct_fields__
    slots = getattr(value, "__slots__", None)
    return tuple(slots) if slots is not None else tuple(vars(value))


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


class _Copies:
    """Cores as bytes. Functions stay what they are: some have no name to be found by."""

    def __init__(self) -> None:
        self._functions: list[Any] = []

    def dumps(self, core: Core) -> bytes:
        functions = self._functions

        class Pickler(pickle.Pickler):
            def persistent_id(self, obj: Any) -> int | None:
                if not isinstance(obj, FunctionType):
                    return None
                if obj not in functions:
                    functions.append(obj)
                return functions.index(obj)

        file = io.BytesIO()
        Pickler(file, 5).dump(core)
        return file.getvalue()

    def loads(self, data: bytes) -> Core:
        functions = self._functions

        class Unpickler(pickle.Unpickler):
            def persistent_load(self, pid: int) -> Any:
                return functions[pid]

        core: Core = Unpickler(io.BytesIO(data)).load()
        return core


class Cores:
    """Numbers the states of one kind of core, and takes each step from each state only once.

    After each step `check(core)` may raise AssertionError.
    """

    def __init__(self, make: Callable[[], Core], check: Callable[[Core], None]) -> None:
        self._make = make
        self._copies = _Copies()
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
        core = self._copies.loads(known.pickled)
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
        key = (canonical(core, now_ns), left)
        number = self._number_of.get(key)
        if number is None:
            number = self._number_of[key] = len(self._known)
            self._known.append(_Known(self._copies.dumps(core), now_ns, wake_ns))
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
