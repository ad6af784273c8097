"""Where one request's time went, from its arrival to the first byte of its answer. Pure.

Each process times its own phases with its own clock and sends durations, never points in time.
What a leg took beyond what its worker says is `relay`: network, gateway, connection. What a
worker says in total beyond its named phases is `unattributed`. So the phases always sum to the
TTFT that the gateway saw.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

import msgspec

from twofold.types import NS_PER_MS, ns_to_ms

PHASES: Final = (
    "queue",
    "recovery",
    "tokenise",
    "prefill_queue",
    "prefill",
    "handoff_wait",
    "transfer",
    "decode_queue",
    "first_step",
    "decode",
    "relay",
    "unattributed",
)
"""In the order in which they happen. `recovery` is what attempts took that failed, named only
where there were some; the phases after it are of the attempt that answered. `decode` is above 0
only for answers that are not streamed: their first byte leaves when the whole answer is there."""

WORKER_PHASES: Final = PHASES[2:10]
"""What a worker may say of its leg."""

_ENTRY: Final = re.compile(r"\s*([A-Za-z0-9_!#$%&'*+.^`|~-]+)((?:\s*;[^;]*)*)\s*")
_DUR: Final = re.compile(r";\s*dur\s*=\s*\"?([0-9.eE+-]+)\"?\s*(?:;|$)")


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """One request's phases, all in nanoseconds; `ttft_ns` is their sum."""

    queue_ns: int = 0
    recovery_ns: int = 0
    tokenise_ns: int = 0
    prefill_queue_ns: int = 0
    prefill_ns: int = 0
    handoff_wait_ns: int = 0
    transfer_ns: int = 0
    decode_queue_ns: int = 0
    first_step_ns: int = 0
    decode_ns: int = 0
    relay_ns: int = 0
    unattributed_ns: int = 0

    @property
    def ttft_ns(self) -> int:
        """From arrival to the first byte of the answer."""
        return sum(self.as_ns().values())

    def as_ns(self) -> dict[str, int]:
        """The phases by name, in order."""
        phases = dict(zip(PHASES, _ALL_NS(self), strict=True))
        if not self.recovery_ns:
            del phases["recovery"]
        return phases

    def as_ms(self) -> dict[str, float]:
        """The phases by name in milliseconds, to the microsecond."""
        return {name: round(ns_to_ms(ns), 3) for name, ns in self.as_ns().items()}


_ALL_NS: Final = attrgetter(*[f"{name}_ns" for name in PHASES])
_FIELDS: Final = {name: f"{name}_ns" for name in WORKER_PHASES}


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    """One leg as the gateway saw it: `elapsed_ns` from its sending to its head, and what the
    worker said (`phases_ns` by name, with "total" if it said so)."""

    elapsed_ns: int
    phases_ns: dict[str, int]


def balance(ttft_ns: int, queue_ns: int, legs: Sequence[Leg], recovery_ns: int = 0) -> Ledger:
    """The ledger of a request whose first leg left `queue_ns` after its arrival.

    `legs` are those of the attempt that answered, which began `recovery_ns` after the first one.
    A worker that says nothing of its total is taken to account for the whole leg; one that
    claims more than the leg took is cut to that. Phases of equal name are added up.
    """
    named = dict.fromkeys(_FIELDS.values(), 0)
    worker_ns = 0
    unattributed_ns = 0
    for leg in legs:
        total_ns = min(leg.phases_ns.get("total", leg.elapsed_ns), leg.elapsed_ns)
        known_ns = 0
        for name, ns in leg.phases_ns.items():
            field = _FIELDS.get(name)
            if field is not None:
                named[field] += ns
                known_ns += ns
        worker_ns += total_ns
        unattributed_ns += total_ns - known_ns
    return Ledger(
        queue_ns=queue_ns,
        recovery_ns=recovery_ns,
        **named,
        relay_ns=ttft_ns - queue_ns - recovery_ns - worker_ns,
        unattributed_ns=unattributed_ns,
    )


def format_server_timing(phases_ns: dict[str, int]) -> str:
    """A Server-Timing value: `name;dur=1.234` in milliseconds, joined by commas."""
    return ", ".join([f"{name};dur={ns / NS_PER_MS:.3f}" for name, ns in phases_ns.items()])


def parse_server_timing(value: str) -> dict[str, int]:
    """Durations in nanoseconds by name. Entries without a sane duration are left out."""
    found: dict[str, int] = {}
    for entry in value.split(","):
        match = _ENTRY.fullmatch(entry)
        duration = _DUR.search(match[2]) if match else None
        if not match or not duration:
            continue
        try:
            ms = float(duration[1])
        except ValueError:
            continue
        if math.isfinite(ms) and 0 <= ms < 1e12:
            found[match[1]] = round(ms * NS_PER_MS)
    return found
