"""One row of the table: what was published, what we get, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

CLOSE_PCT: Final = 15.0
"""Simulated figures are held to this."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """`published` and `ours` are as shown; `error_pct` is None where there is no ratio.

    `verdict` is "exact", "within 15 %", "holds" (a bound, an order, a winner), "differs" or "not
    checked"; `reason` says why for the last two and may explain the others.
    """

    source: str
    what: str
    published: str
    ours: str
    error_pct: float | None
    conditions: str
    verdict: str
    reason: str = ""


def shown(value: float, unit: str = "") -> str:
    """A number as people write it: up to four digits."""
    if not math.isfinite(value):
        text = "never" if value > 0 else "none"
    elif value == round(value) and abs(value) < 1e6:
        text = f"{value:,.0f}"
    else:
        text = f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{text} {unit}".rstrip()


def exact(
    source: str,
    what: str,
    published: str,
    ours: float,
    *,
    unit: str = "",
    conditions: str,
    step: float = 0.0,
    printed_unit: str = "",
) -> Row:
    """A row of arithmetic: ours, rounded as the published number is, must be that number.

    `published` is the number as printed ("4.2", "1,024"), without its unit; `step` is what it
    was rounded to where that is not its last digit, `printed_unit` its unit where that is another.
    """
    digits = published.replace(",", "")
    step = step or 10.0 ** -len(digits.partition(".")[2])
    same = abs(ours - float(digits)) <= step / 2 * (1 + 1e-9)
    return Row(
        source=source,
        what=what,
        published=f"{published} {printed_unit or unit}".rstrip(),
        ours=shown(ours, unit),
        error_pct=_error(float(digits), ours),
        conditions=conditions,
        verdict="exact" if same else "differs",
        reason="" if same else "the arithmetic does not give the printed number",
    )


def close(
    source: str,
    what: str,
    published: float,
    ours: float,
    *,
    unit: str = "",
    conditions: str,
    why: str = "",
) -> Row:
    """A simulated figure; `why` is the reason found, shown only where it is off by more."""
    error = _error(published, ours)
    good = error is not None and abs(error) <= CLOSE_PCT
    return Row(
        source=source,
        what=what,
        published=shown(published, unit),
        ours=shown(ours, unit),
        error_pct=error,
        conditions=conditions,
        verdict="within 15 %" if good else "differs",
        reason="" if good else why or "reason not found",
    )


def holds(
    source: str, what: str, published: str, ours: str, ok: bool, *, conditions: str, why: str = ""
) -> Row:
    """A bound, an order or a winner; `why` is the reason found where it does not hold."""
    return Row(
        source=source,
        what=what,
        published=published,
        ours=ours,
        error_pct=None,
        conditions=conditions,
        verdict="holds" if ok else "differs",
        reason="" if ok else why or "reason not found",
    )


def unchecked(source: str, what: str, published: str, why: str) -> Row:
    """A published result that nothing here can check."""
    return Row(
        source=source,
        what=what,
        published=published,
        ours="",
        error_pct=None,
        conditions="",
        verdict="not checked",
        reason=why,
    )


def _error(published: float, ours: float) -> float | None:
    if not published or not math.isfinite(ours):
        return None
    return 100.0 * (ours - published) / published


def with_note(row: Row, note: str) -> Row:
    """The row, with `note` beside its reason whatever its verdict is."""
    return msgspec.structs.replace(row, reason="; ".join(filter(None, (row.reason, note))))


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """Rows by verdict."""
    found: dict[str, int] = {}
    for row in rows:
        found[row.verdict] = found.get(row.verdict, 0) + 1
    return found
