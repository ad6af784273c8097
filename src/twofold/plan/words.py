"""Figures as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Final

_KIB: Final = 1024
_GIB: Final = 1024**3
_DECIMAL: Final = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def figure(value: float) -> str:
    """A number to three significant digits, halves up, all digits before the point kept."""
    size = abs(value)
    if size < 1:
        return f"{value:.3g}"
    step = "0.01" if size < 10 else "0.1" if size < 100 else "1"
    return f"{Decimal(str(value)).quantize(Decimal(step), ROUND_HALF_UP):,}"


def plain(value: float) -> str:
    """A number as it was given: "8", "14.7", "16,000"."""
    value = round(value, 9)
    return f"{int(value):,}" if value == int(value) else f"{value:,}"


def percent(share: float) -> str:
    """A share of 1 in percent, with one digit after the point where that says something."""
    value = round(share * 100, 6)
    if value >= 100 or value == int(value):
        return f"{value:,.0f} %"
    return f"{value:.1f} %" if value >= 1 else f"{value:.2g} %"


def decimal_bytes(value: float) -> str:
    """Bytes in powers of 1000: "4.19 GB"."""
    for unit, name in _DECIMAL:
        if value >= unit:
            return f"{figure(value / unit)} {name}"
    return f"{figure(value)} B"


def binary_bytes(value: float) -> str:
    """Bytes in powers of 1024: "256 KiB"; exact where it can be."""
    for unit, name in ((_GIB, "GiB"), (_KIB**2, "MiB"), (_KIB, "KiB")):
        if value >= unit:
            amount = value / unit
            return (
                f"{int(amount):,} {name}" if amount == int(amount) else f"{figure(amount)} {name}"
            )
    return f"{figure(value)} B"


def count(number: int, noun: str) -> str:
    """A number and its noun: "1 worker", "2 workers"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def joined(words: Sequence[str], last: str = "and") -> str:
    """Words as a list in a sentence: "a, b and c"."""
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
