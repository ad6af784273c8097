"""Journals of simulated runs: replayed to the letter, and tampering is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from tests.sim.support import LAYOUT, MS, cluster, mixture
from twofold.core import journal
from twofold.core.router import Router
from twofold.sim import Crash, SeededFaults
from twofold.sim.observer import Core, Effects, Message


class Recorder:
    """Keeps the journal of every life of every core."""

    def __init__(self) -> None:
        self.journals: dict[str, bytearray] = {}

    def born(self, name: str, core: Core, settings: Mapping[str, Any]) -> None:
        kind: journal.Kind = "router" if isinstance(core, Router) else "worker"
        self.journals[name] = bytearray(journal.header(kind, settings))

    def handled(
        self, name: str, core: Core, now_ns: int, message: Message, effects: Effects
    ) -> None:
        self.journals[name] += journal.entry(now_ns, message, effects)

    def died(self, name: str) -> None:
        pass


@pytest.fixture(scope="module")
def recorded() -> dict[str, bytes]:
    """Journals of a run with faults, a restart and a pool small enough to preempt."""
    recorder = Recorder()
    cluster(
        "1P1D1M",
        observers=[recorder],
        faults=SeededFaults(seed=3, drop=0.02, duplicate=0.1, delay=0.1, most_ns=20 * MS),
        crashes=[Crash(worker="prefill-0", at_ns=60 * MS, down_ns=5 * MS)],
        settings={"n_blocks": 16},
        time_left_ns=4000 * MS,
    ).run(mixture(60, 6, gap_ns=2 * MS))
    return {name: bytes(data) for name, data in recorder.journals.items()}


def frames(data: bytes) -> list[Any]:
    """The frames as plain lists and dicts."""
    found: list[Any] = []
    while data:
        end = 4 + int.from_bytes(data[:4], "big")
        found.append(msgspec.msgpack.decode(data[4:end]))
        data = data[end:]
    return found


def joined(found: list[Any]) -> bytes:
    """The inverse of `frames`."""
    bodies = [msgspec.msgpack.encode(frame) for frame in found]
    return b"".join(len(body).to_bytes(4, "big") + body for body in bodies)


def test_every_core_replays_to_the_letter(recorded: dict[str, bytes]) -> None:
    assert sorted(recorded) == ["decode-0.0", "mixed-0.0", "prefill-0.0", "prefill-0.1", "router"]
    for name, data in recorded.items():
        entries = frames(data)[1:]
        found = journal.replay(data)
        assert found.difference is None, f"{name}: {found.difference}"
        assert found.n_messages == len(entries)
        assert found.n_effects == sum(len(effects) for _, _, effects in entries)
        assert found.truncated_bytes == 0
    assert journal.replay(recorded["decode-0.0"]).n_messages > 300


def _first(entries: list[Any], wanted: Callable[[Any], bool]) -> int:
    return next(i for i, entry in enumerate(entries) if i and wanted(entry))


def test_a_changed_effect_is_named(recorded: dict[str, bytes]) -> None:
    entries = frames(recorded["decode-0.0"])
    number = _first(entries, lambda e: any(x["type"] == "Token" for x in e[2]))
    index = next(i for i, x in enumerate(entries[number][2]) if x["type"] == "Token")
    right = entries[number][2][index]["token"]
    entries[number][2][index]["token"] = right + 1
    found = journal.replay(joined(entries))
    assert found.n_messages == number
    assert found.difference is not None
    assert found.difference.startswith(f"entry {number} (StepDone(")
    assert f"effect {index + 1}: expected Token(" in found.difference
    expected, got = found.difference.split(" got ")
    assert f"token={right + 1}" in expected
    assert f"token={right}," in got


def test_a_changed_message_is_named(recorded: dict[str, bytes]) -> None:
    entries = frames(recorded["prefill-0.0"])
    number = _first(entries, lambda e: e[1]["type"] == "Submit")
    entries[number][1]["tokens"] += [1, 2, 3]
    difference = journal.replay(joined(entries)).difference
    assert difference is not None
    assert difference.startswith(f"entry {number} (Submit(")
    assert "expected RunStep(" in difference
    assert "got RunStep(" in difference


def test_missing_and_extra_effects_are_named(recorded: dict[str, bytes]) -> None:
    entries = frames(recorded["router"])
    number = _first(entries, lambda e: bool(e[2]))
    n = len(entries[number][2])
    entries[number][2].append(entries[number][2][0])
    difference = journal.replay(joined(entries)).difference
    assert difference is not None
    assert f"effect {n + 1}: expected SendPrefill(" in difference
    assert difference.endswith("got nothing")
    del entries[number][2][:]
    difference = journal.replay(joined(entries)).difference
    assert difference is not None
    assert "effect 1: expected nothing, got SendPrefill(" in difference


def test_a_message_that_breaks_the_core_is_named(recorded: dict[str, bytes]) -> None:
    entries = frames(recorded["decode-0.0"])
    number = _first(entries, lambda e: e[1]["type"] == "StepDone")
    entries[number][1]["step"] += 5
    difference = journal.replay(joined(entries)).difference
    assert difference is not None
    assert difference.startswith(f"entry {number} (StepDone(")
    assert "AssertionError" in difference


def test_a_journal_cut_off_anywhere_is_read_up_to_there(recorded: dict[str, bytes]) -> None:
    data = recorded["router"]
    whole = journal.replay(data)
    cut = journal.replay(data[:-3])
    assert cut.difference is None
    assert cut.n_messages == whole.n_messages - 1
    last = len(joined(frames(data)[-1:]))
    assert cut.truncated_bytes == last - 3
    assert journal.replay(data[: len(data) - last + 2]).truncated_bytes == 2


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "header"),
        (b"\x00\x00", "header"),
        (b"\x00\x00\x00\x09abc", "header"),
        (b"\x00\x00\x00\x00", "header"),
        (b"\x00\x00\x00\x03abc", "the header of the journal cannot be read"),
        (joined([{"journal": 2, "kind": "router", "settings": {}}]), "version 2"),
        (joined([{"journal": 1, "kind": "planner", "settings": {}}]), "kind"),
        (joined([{"journal": 1, "kind": "router", "settings": {}}]), "max_inflight"),
        (joined([{"journal": 1, "kind": "worker", "settings": {}}]), "no worker can be made"),
        (journal.header("worker", {"layout": LAYOUT, "n_blocks": 3}), "missing"),
        (journal.header("router", {"max_inflight": 3, "x": 1}), "unexpected"),
        (journal.header("router", {"max_inflight": 3}) + joined([[1, 2, 3]]), "entry 1"),
        (journal.header("router", {"max_inflight": 3}) + joined([[1]]), "entry 1"),
        (
            journal.header("router", {"max_inflight": 3})
            + joined([[1, {"type": "Wake"}, []], [1, {"type": "StepDone"}, []]]),
            "entry 2",
        ),
    ],
)
def test_bad_data_is_refused_in_one_line(data: bytes, says: str) -> None:
    with pytest.raises(journal.JournalError) as caught:
        journal.replay(data)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
