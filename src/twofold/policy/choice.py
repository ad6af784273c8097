"""What a policy answers: a worker, the scores of all that were looked at, and the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from twofold.types import NS_PER_MS

_MASK: Final = (1 << 64) - 1


class Choice(NamedTuple):
    """`worker` is "" for none. Lower `scores` are better; they are in `unit`, one per worker."""

    worker: str
    reason: str
    unit: str = ""
    scores: tuple[tuple[str, int], ...] = ()


class Named(Protocol):
    """A view of a worker."""

    @property
    def name(self) -> str:
        """The worker's name."""


_View = TypeVar("_View", bound=Named)


def least(
    views: Sequence[_View],
    score: Callable[[_View], int],
    ties: Callable[[_View], tuple[int, ...]],
    reason: str,
    unit: str,
) -> Choice:
    """The worker with the lowest score; ties go to the lower `ties`, then by name."""
    ranked = [(score(view), ties(view), view.name) for view in views]
    shown = tuple([(name, n) for n, _, name in ranked])
    return Choice(min(ranked)[2], reason, unit, shown)


def mix(seed: int, number: int) -> int:
    """64 evenly spread bits from `seed` and `number` (SplitMix64's finish): chance, repeatable."""
    z = (seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def describe(choice: Choice) -> str:
    """One line for a person, such as "least projected TTFT: a 12.0 ms, b 13.5 ms"."""
    if not choice.scores:
        return choice.reason
    shown = ", ".join(f"{name} {_shown(n, choice.unit)}" for name, n in choice.scores)
    return f"{choice.reason}: {shown}"


def _shown(score: int, unit: str) -> str:
    if unit == "ns":
        return f"{score / NS_PER_MS:.1f} ms"
    return f"{score} {unit}".rstrip()


def lookup(table: dict[str, Any], name: str, what: str) -> Any:
    """The entry `name`. Raises ValueError naming the choices when there is none."""
    if name not in table:
        raise ValueError(f"{what} {name!r}: {', '.join(table)} are the choices")
    return table[name]
