"""Transports by an engine of the field's own: choosing one, and what outlives a silent peer.

What all transports must hold is in the conformance test. Tests with a real engine are skipped
where its package is not installed.
"""

from __future__ import annotations

import importlib.util
import signal
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest

from tests.unit.transport_support import FOREIGN, Child, Side, wait_until
from twofold.transport import foreign_peer
from twofold.transport.choose import make_transport, unusable
from twofold.transport.foreign import ForeignTransport
from twofold.transport.foreign_link import EngineError
from twofold.transport.memory import PoolMemory
from twofold.transport.segment import EngineSegment, NixlSegment

LARGE = {"n_blocks": 64, "block_bytes": 1 << 20}


@pytest.mark.parametrize("kind", FOREIGN)
def test_after_a_silent_peer_is_given_up_nothing_of_it_lands(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Side(kind, timeout_s=0.5, **LARGE)) as own, Child(kind, **LARGE) as child:
        assert own.read(1, child.segment, [(0, 0)], timeout_s=30).ok
        own.memory.buffer[:] = bytes(own.memory.n_bytes)
        start = foreign_peer._start

        def stopped_first(*args: Any) -> Any:
            # Amid the read: its header has come, its blocks are asked for and do not come.
            child.process.send_signal(signal.SIGSTOP)
            return start(*args)

        monkeypatch.setattr(foreign_peer, "_start", stopped_first)
        done = own.read(2, child.segment, [(i, i) for i in range(64)], timeout_s=30)
        monkeypatch.undo()
        assert (done.ok, done.reason) == (False, "the peer has sent nothing for 0.5 s")
        before = bytes(own.memory.buffer)
        child.process.send_signal(signal.SIGCONT)
        # Whatever the peer had to say it now sends. That it has: it serves again, or is gone.
        own.read(3, child.segment, [], timeout_s=30)
        until = time.monotonic() + 0.5
        wait_until(lambda: own.memory.buffer != before or time.monotonic() > until, "end of wait")
        assert own.memory.buffer == before


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_peer_that_answers_nothing_at_first_is_given_up_too(kind: str) -> None:
    with closing(Side(kind, timeout_s=0.5, **LARGE)) as own, Child(kind, **LARGE) as child:
        child.process.send_signal(signal.SIGSTOP)
        done = own.read(1, child.segment, [(0, 0)], timeout_s=30)
        assert not done.ok
        child.kill()


# --------------------------------------------------------------- with an engine of our own


class FakeLink:
    reconnects = False

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        engine.open_links += 1

    def start(self, own: int, peer: int, n_bytes: int) -> Any:
        raise EngineError("no such peer")

    def is_done(self, copy: Any) -> bool:
        raise AssertionError("nothing was started")

    def close(self) -> None:
        self._engine.open_links -= 1


class FakeEngine:
    segment: type[EngineSegment] = NixlSegment

    def __init__(self) -> None:
        self.open_links = 0
        self.closed = False

    def serve(self, address: int, n_bytes: int) -> str:
        return "here"

    def link(self, endpoint: str, into: Sequence[tuple[int, int]]) -> FakeLink:
        return FakeLink(self)

    def close(self) -> None:
        self.closed = True


def test_links_to_peers_are_bounded_and_none_is_left_open() -> None:
    engine = FakeEngine()
    with closing(PoolMemory(4, 100, bytes(15) + b"\1")) as memory:
        transport = ForeignTransport(lambda: None, engine, max_peers=2)
        segment = transport.register(memory)
        for number in range(6):
            transport.read(number, segment.replace("here", f"there-{number}"), [(0, 0)])
            wait_until(lambda: bool(transport._ledger._done), "completion")
            (done,) = transport.poll()
            assert (done.ok, done.reason) == (False, "no such peer")
            assert len(transport._peers) <= 2
        transport.close()
        assert engine.closed
        assert engine.open_links == 0


# --------------------------------------------------------------------------- choosing one


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("handoff", ["push", "layerwise"])
def test_what_cannot_be_fenced_is_not_pushed(kind: str, handoff: str) -> None:
    line = unusable(kind, handoff)
    assert line.startswith(f"--handoff {handoff}: not with --transport {kind}")
    assert "\n" not in line


@pytest.mark.parametrize("kind", FOREIGN)
def test_an_engine_that_is_not_installed_is_named(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = unusable(kind, "pull")
    assert line == f"--transport {kind}: is not installed; try pip install 'twofold[{kind}]'"


@pytest.mark.parametrize("handoff", ["pull", "push", "layerwise"])
def test_our_own_transports_need_nothing(handoff: str) -> None:
    assert unusable("shm", handoff) == unusable("tcp", handoff) == ""


@pytest.mark.parametrize(("kind", "module"), [("mooncake", "mooncake"), ("nixl", "nixl")])
def test_an_engine_that_cannot_be_loaded_is_one_line(
    kind: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"^--transport {kind}: {kind} cannot be loaded: "):
        make_transport(kind, lambda: None, host="127.0.0.1", checksums=True)
