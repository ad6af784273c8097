"""Values of the flags that `replay` and `plan` share, read from text."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, Final, TypeVar

from twofold.cli.command import CommandError
from twofold.core.recovery import FAILURE_POLICIES, MOST_RETRIES
from twofold.plan.sweep import rates
from twofold.policy.admit import ADMISSIONS
from twofold.policy.chunk import CHUNK_BUDGETS
from twofold.policy.decode import DECODE_CHOICES
from twofold.policy.prefill import PREFILL_CHOICES
from twofold.policy.split import SPLIT_CHOICES
from twofold.sim import Crash
from twofold.types import seconds_to_ns

GB: Final = 10**9
DEFAULT_FAULT_RATE: Final = 0.001
_MOST: Final = 10**12
_TABLES: Final[dict[str, dict[str, Any]]] = {
    "prefill": PREFILL_CHOICES,
    "decode": DECODE_CHOICES,
    "split": SPLIT_CHOICES,
    "admission": ADMISSIONS,
    "failure": dict.fromkeys(FAILURE_POLICIES),
    "chunk": CHUNK_BUDGETS,
}

V = TypeVar("V")


def given(args: argparse.Namespace, flag: str) -> list[str]:
    """What was given for a flag that may be repeated, in order."""
    value = getattr(args, flag.removeprefix("--").replace("-", "_"))
    return value if isinstance(value, list) else [] if value is None else [value]


def one(args: argparse.Namespace, flag: str, read: Callable[[str], V], default: V) -> V:
    """The value of `flag`. Raises CommandError that begins with it."""
    texts = given(args, flag)
    return many(args, flag, read, (default,))[-1] if texts else default


def many(
    args: argparse.Namespace, flag: str, read: Callable[[str], V], default: tuple[V, ...]
) -> tuple[V, ...]:
    """The values of a flag that may be repeated, each once. Raises CommandError."""
    found: dict[V, None] = {}
    for text in given(args, flag):
        try:
            found[read(text)] = None
        except ValueError as error:
            raise CommandError(f"{flag} {text}: {error}") from None
    return tuple(found) or tuple(default)


def whole(text: str) -> int:
    """A whole number above 0. Raises ValueError with what would be right."""
    if not text.isdecimal() or not 1 <= int(text[:20]) <= _MOST:
        raise ValueError(f"must be a whole number from 1 to {_MOST:,}")
    return int(text)


def from_zero(text: str) -> int:
    """A whole number from 0 on. Raises ValueError."""
    return 0 if text.isdecimal() and int(text[:20]) == 0 else whole(text)


def positive(text: str) -> float:
    """A number above 0. Raises ValueError."""
    value = _number(text)
    if not 0 < value <= _MOST:
        raise ValueError("must be a number above 0")
    return value


def not_negative(text: str) -> float:
    """A number from 0 on. Raises ValueError."""
    value = _number(text)
    if not 0 <= value <= _MOST:
        raise ValueError("must be a number from 0 on")
    return value


def share(text: str) -> float:
    """A share above 0, at most 1. Raises ValueError."""
    value = _number(text)
    if not 0 < value <= 1:
        raise ValueError("must be above 0 and at most 1")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def link(text: str) -> int:
    """Gigabytes per second as bytes per second. Raises ValueError."""
    return max(1, round(positive(text) * GB))


def span(text: str) -> tuple[float, float]:
    """A:B in seconds, either left out. Raises ValueError."""
    start, colon, end = text.partition(":")
    low = _number(start) if start else 0.0
    high = _number(end) if end else math.inf
    if not colon or not 0 <= low < high:
        raise ValueError("must be A:B in seconds with A below B, such as 600:1200 or 600:")
    return low, high


def scales(text: str) -> tuple[float, ...]:
    """One rate scale or A:B:STEP. Raises ValueError."""
    return rates(text)


def price(text: str) -> tuple[str, float]:
    """NAME=USD. Raises ValueError."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError("must be NAME=X, such as h200=4.5")
    return name.lower(), positive(value)


def policy(text: str) -> tuple[tuple[str, str], ...]:
    """KIND=NAME and more with commas; a bare name that one kind alone has. Raises ValueError."""
    found: dict[str, str] = {}
    for part in text.split(","):
        kind, equals, name = part.strip().partition("=")
        if not equals:
            name = kind
            kinds = [k for k, table in _TABLES.items() if name in table]
            if len(kinds) > 1:
                raise ValueError(
                    f"{name} is a policy of {' and '.join(kinds)}; say {kinds[0]}={name}"
                )
            kind = kinds[0] if kinds else ""
        if name not in _TABLES.get(kind, {}):
            names = "; ".join(f"{k}={', '.join(table)}" for k, table in _TABLES.items())
            raise ValueError(f"no such policy; there are {names}")
        if found.setdefault(kind, name) != name:
            raise ValueError(f"two policies for {kind}; repeat the flag to compare them")
    return tuple(sorted(found.items()))


def failure_policy(text: str) -> str:
    """The name of a failure policy. Raises ValueError."""
    if text not in FAILURE_POLICIES:
        raise ValueError(f"must be one of {', '.join(FAILURE_POLICIES)}")
    return text


def retries(text: str) -> int:
    """How often a request may be retried. Raises ValueError."""
    if not text.isdecimal() or not 1 <= int(text[:20]) <= MOST_RETRIES:
        raise ValueError(f"must be a whole number from 1 to {MOST_RETRIES}")
    return int(text)


def faults(text: str) -> tuple[int, float]:
    """SEED or SEED:RATE. Raises ValueError."""
    seed, colon, rate = text.partition(":")
    chance = _number(rate) if colon else DEFAULT_FAULT_RATE
    if not (seed.isdecimal() and int(seed[:20]) <= _MOST and 0 <= chance <= 1):
        raise ValueError("must be SEED or SEED:RATE with a rate from 0 to 1, such as 7:0.001")
    return int(seed), chance


def crash(text: str) -> Crash:
    """WORKER@S or WORKER@S:DOWN_S. Raises ValueError."""
    worker, at, times = text.partition("@")
    at_s, colon, down = times.partition(":")
    start, length = _number(at_s), _number(down) if colon else 0.0
    if not worker or not at or not start >= 0 or not length >= 0:
        raise ValueError("must be WORKER@S or WORKER@S:DOWN_S, such as decode-0@60:10")
    return Crash(
        worker=worker,
        at_ns=seconds_to_ns(start),
        down_ns=seconds_to_ns(length) if colon else None,
    )
