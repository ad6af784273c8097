"""What every message is: a tagged, frozen struct of plain data; and the two about time."""

from __future__ import annotations

import msgspec


class Plain(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Base of messages whose fields hold no containers that could form a cycle."""


class Wake(Plain, frozen=True):
    """A timer asked for with `WakeAt` has run out."""


class WakeAt(Plain, frozen=True):
    """Send `Wake` at `at_ns`. Only the latest one counts."""

    at_ns: int
