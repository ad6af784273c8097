"""What a transfer engine of the field's own has to offer, so that blocks can be read through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from twofold.transport.segment import EngineSegment


class EngineError(Exception):
    """An engine cannot be loaded, or has failed at something; the message says what."""


class Link(Protocol):
    """A way to read one peer's memory. Used from one thread at a time."""

    reconnects: bool
    """Whether it is of use again after a copy has failed."""

    def start(self, own: int, peer: int, n_bytes: int) -> Any:
        """Start copying `n_bytes` from address `peer` there to `own` here; raises EngineError."""

    def is_done(self, copy: Any) -> bool:
        """Whether a copy has ended; raises EngineError when it failed."""

    def close(self) -> None:
        """End everything. Once this returns, no copy puts anything into our memory any more."""


class Engine(Protocol):
    """One of the field's transfer engines."""

    segment: type[EngineSegment]

    def serve(self, address: int, n_bytes: int) -> str:
        """Let peers read memory; gives what they need to find us. Raises EngineError."""

    def link(self, endpoint: str, into: Sequence[tuple[int, int]]) -> Link:
        """A link to a peer, for copies into memory of ours: addresses and bytes there.

        Raises EngineError.
        """

    def close(self) -> None:
        """Serve no more."""
