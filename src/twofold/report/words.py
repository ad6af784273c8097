"""Figures and set-ups as people read them in a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

NONE: Final = "-"
NEVER: Final = "never"


def number(value: float | None) -> str:
    """Three significant digits, all digits before the point kept: "0.0123", "4.2", "12,346"."""
    if value is None:
        return NONE
    size = abs(value)
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}"
    if size < 1:
        return f"{value:.3g}"
    return f"{value:.{2 if size < 10 else 1 if size < 100 else 0}f}"


def percent(share: float | None) -> str:
    """A share of 1 in percent: "97.3 %". Only a whole share is 100 %, only an empty one 0 %."""
    if share is None:
        return NONE
    value = share * 100
    if 0 < value < 0.1:
        return "< 0.1 %"
    if 99.9 < value < 100:
        return "99.9 %"
    return f"{value:.0f} %" if value in (0, 100) else f"{value:.1f} %"


def milliseconds(value: float | None) -> str:
    """A time with the unit that suits it: "0.42 ms", "83.1 ms", "2.4 s"."""
    if value is None:
        return NONE
    if value >= 60_000:
        return f"{number(value / 60_000)} min"
    return f"{number(value / 1000)} s" if value >= 1000 else f"{number(value)} ms"


def whole_percent(share: float) -> str:
    """A share that someone chose, in percent without needless digits: "90 %", "99.5 %"."""
    return f"{share * 100:.6g} %"


def scale(value: float) -> str:
    """A factor on the trace's rate: "1.5x"."""
    return f"{value:.6g}x"


def count(n: int, noun: str) -> str:
    """A number and its noun: "1 run", "2 runs"."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def joined(words: Sequence[str]) -> str:
    """Words as a list in a sentence: "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def shorten(name: str, most: int) -> str:
    """`name` in at most `most` characters: what tells names apart is often at their ends."""
    if len(name) <= most:
        return name
    tail = (most - 3) // 2
    return f"{name[: most - 3 - tail]}...{name[-tail:]}"


def spoken(phase: str) -> str:
    """A phase's name in words: "prefill queue"."""
    return phase.replace("_", " ")
