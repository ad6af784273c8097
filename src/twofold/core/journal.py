"""Journals: what went into a core and what came out, so that a run can be replayed to the letter.

A journal is a sequence of frames, each a length (4 bytes, big endian) and that many bytes of
msgpack. The first frame says which core it was and how it was made; each further one is
(now_ns, message, effects) of one call of `handle`. Reading and writing files is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec

from twofold.core.router import Router
from twofold.core.worker import WorkerCore
from twofold.messages import RouterEffect, RouterMessage, WorkerEffect, WorkerMessage
from twofold.types import KVLayout

Kind = Literal["worker", "router"]
Core: TypeAlias = WorkerCore | Router

JOURNAL_VERSION: Final = 1
_LENGTH_BYTES: Final = 4
_SHOWN: Final = 400  # characters of a message or an effect in a difference


class JournalError(ValueError):
    """Bytes that are no journal, in one line."""


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """What replaying found.

    `difference` names the first effect that is not as recorded, in words; the replay stops
    there. `truncated_bytes` belong to a last frame that is not whole: its writer was killed.
    """

    n_messages: int
    n_effects: int
    difference: str | None
    truncated_bytes: int = 0


class _Header(msgspec.Struct, kw_only=True):
    journal: int
    kind: Kind
    settings: dict[str, Any]


class _WorkerEntry(msgspec.Struct, array_like=True):
    now_ns: int
    message: WorkerMessage
    effects: list[WorkerEffect]


class _RouterEntry(msgspec.Struct, array_like=True):
    now_ns: int
    message: RouterMessage
    effects: list[RouterEffect]


_ENTRY: Final[Mapping[Kind, type[_WorkerEntry] | type[_RouterEntry]]] = {
    "worker": _WorkerEntry,
    "router": _RouterEntry,
}


def header(kind: Kind, settings: Mapping[str, object]) -> bytes:
    """The first frame. `settings` are the keyword arguments that the core was made with."""
    return _frame(_Header(journal=JOURNAL_VERSION, kind=kind, settings=dict(settings)))


def entry(
    now_ns: int,
    message: WorkerMessage | RouterMessage,
    effects: Sequence[WorkerEffect] | Sequence[RouterEffect],
) -> bytes:
    """The frame of one call: `effects` is what `handle(message, now_ns)` returned."""
    return _frame((now_ns, message, effects))


def _frame(content: object) -> bytes:
    body = msgspec.msgpack.encode(content)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def replay(data: bytes) -> Replay:
    """Feed the journal's messages to a fresh core and compare its effects with the recorded ones.

    Raises JournalError for bytes that are no journal, or not one of this version.
    """
    frames = _frames(data)
    first = next(frames, b"")
    if not first:
        raise JournalError("a journal begins with a whole header frame; this one does not")
    head = _decode(first, _Header, "the header")
    if head.journal != JOURNAL_VERSION:
        raise JournalError(f"journal version {head.journal}; {JOURNAL_VERSION} can be read")
    core = _core(head)
    n_messages = n_effects = 0
    read = _LENGTH_BYTES + len(first)
    difference: str | None = None
    for number, body in enumerate(frames, start=1):
        recorded = _decode(body, _ENTRY[head.kind], f"entry {number}")
        read += _LENGTH_BYTES + len(body)
        difference = _difference(core, recorded, number)
        n_messages += 1
        if difference is not None:
            return Replay(n_messages=n_messages, n_effects=n_effects, difference=difference)
        n_effects += len(recorded.effects)
    return Replay(
        n_messages=n_messages,
        n_effects=n_effects,
        difference=None,
        truncated_bytes=len(data) - read,
    )


def worker_entries(
    data: bytes,
) -> Iterator[tuple[int, WorkerMessage, list[WorkerEffect]]]:
    """What a worker's journal holds, in order: (now_ns, message, effects).

    Raises JournalError for bytes that are no journal of a worker's core.
    """
    frames = _frames(data)
    head = _decode(next(frames, b""), _Header, "the header")
    if (head.journal, head.kind) != (JOURNAL_VERSION, "worker"):
        raise JournalError(f"a {head.kind}'s journal of version {head.journal}")
    for number, body in enumerate(frames, start=1):
        read = _decode(body, _WorkerEntry, f"entry {number}")
        yield read.now_ns, read.message, read.effects


def _frames(data: bytes) -> Iterator[memoryview]:
    """Bodies of the whole frames, in order."""
    view = memoryview(data)
    at = 0
    while len(view) - at >= _LENGTH_BYTES:
        end = at + _LENGTH_BYTES + int.from_bytes(view[at : at + _LENGTH_BYTES], "big")
        if end > len(view):
            return
        yield view[at + _LENGTH_BYTES : end]
        at = end


def _decode(body: bytes | memoryview, kind: type[Any], where: str) -> Any:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise JournalError(f"{where} of the journal cannot be read: {error}") from None


def _core(head: _Header) -> Core:
    settings = dict(head.settings)
    try:
        if head.kind == "router":
            return Router(**settings)
        settings["layout"] = msgspec.convert(settings.get("layout"), KVLayout)
        return WorkerCore(**settings)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise JournalError(f"no {head.kind} can be made as the header says: {error}") from None


def _difference(core: Core, recorded: Any, number: int) -> str | None:
    where = f"entry {number} ({_short(recorded.message)} at {recorded.now_ns} ns)"
    try:
        effects = core.handle(recorded.message, recorded.now_ns)
    # Whatever a core raises on a recorded message is a finding, not an error of the reader.
    except Exception as error:
        return f"{where}: the core raised {type(error).__name__}: {error}"
    for index, (expected, got) in enumerate(zip(recorded.effects, effects, strict=False), start=1):
        if expected != got:
            return f"{where}, effect {index}: expected {_short(expected)}, got {_short(got)}"
    if len(recorded.effects) > len(effects):
        missing = recorded.effects[len(effects)]
        return f"{where}, effect {len(effects) + 1}: expected {_short(missing)}, got nothing"
    if len(recorded.effects) < len(effects):
        extra = effects[len(recorded.effects)]
        index = len(recorded.effects) + 1
        return f"{where}, effect {index}: expected nothing, got {_short(extra)}"
    return None


def _short(item: object) -> str:
    text = repr(item)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
