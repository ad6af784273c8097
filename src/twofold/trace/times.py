"""Arrival times: numbers in several units, epoch or relative, and ISO dates, exact to the ns."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Final, Literal

from twofold.trace.request import RowError

TimeUnit = Literal["s", "ms", "us", "ns"]
RawTime = int | Decimal | str

NS_PER: Final[dict[TimeUnit, int]] = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}

_MAX_NS: Final = 2**63 - 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_ISO: Final = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9})\d*)?(Z|[+-]\d\d:?\d\d)?"
)
# Smallest absolute value taken for an epoch time of each unit: March 1973 in every one of them.
_EPOCH_FLOOR: Final[tuple[tuple[int, TimeUnit], ...]] = (
    (10**17, "ns"),
    (10**14, "us"),
    (10**11, "ms"),
    (10**8, "s"),
)


class TimeReader:
    """Turns the raw times of one file into integer nanoseconds, all in one way.

    How is settled by the column's unit if it has one, else by the first value: an ISO date, or a
    number so large that it can only be an epoch time in one unit, or a relative number, which is
    taken for seconds and said to be (`assumed`).
    """

    def __init__(self, column: str, unit: TimeUnit | None) -> None:
        self.column = column
        self.kind = "none yet"
        self._unit = unit
        self._read: Callable[[RawTime], int] | None = None
        self._scale = 1
        self._day = ""
        self._day_ns = 0

    def ns(self, raw: RawTime | None) -> int:
        """Nanoseconds of `raw`. Raises RowError if it is missing or not such a time."""
        if raw is None or raw == "":
            raise RowError(self.column, "the time is missing; every row needs one")
        if self._read is None:
            self._settle(raw)
        assert self._read is not None
        ns = self._read(raw)
        if ns > _MAX_NS:
            raise RowError(self.column, f"{raw} is out of range; is the unit right?")
        return ns

    def _settle(self, raw: RawTime) -> None:
        if isinstance(raw, str) and _ISO.fullmatch(raw.strip()):
            if self._unit is not None:
                raise RowError(
                    self.column, f"{raw!r} is a date; a number of {self._unit} was expected"
                )
            self.kind = "ISO dates, exact to the ns"
            self._read = self._iso
            return
        value = self._value(raw, "a number or a date such as 2023-11-16 18:15:46.680")
        found = next((unit for floor, unit in _EPOCH_FLOOR if value >= floor), None)
        unit: TimeUnit = self._unit or found or "s"
        epoch = value * NS_PER[unit] >= 10**17
        assumed = "" if self._unit or found else " (assumed)"
        self.kind = f"{'epoch' if epoch else 'relative'}, {unit}{assumed}"
        self._scale = NS_PER[unit]
        self._read = self._number

    def _number(self, raw: RawTime) -> int:
        if type(raw) is int:
            if raw < 0:
                raise RowError(self.column, f"{raw} is negative; times start at 0")
            return raw * self._scale
        return round(
            self._value(raw, f"a number, as in the rows above ({self.kind})") * self._scale
        )

    def _value(self, raw: RawTime, right: str) -> Decimal:
        try:
            value = Decimal(raw)
        except InvalidOperation:
            raise RowError(self.column, f"{raw!r} is not a time; {right} is") from None
        if not value.is_finite() or value < 0:
            raise RowError(self.column, f"{raw} is not a time; a finite number from 0 on is")
        return value

    def _iso(self, raw: RawTime) -> int:
        match = _ISO.fullmatch(raw.strip()) if isinstance(raw, str) else None
        if match is None:
            raise RowError(
                self.column, f"{raw!r} is not a date; the rows above have 2023-11-16 18:15:46.680"
            )
        year, month, day, hour, minute, second, fraction, zone = match.groups()
        key = f"{year}-{month}-{day}{zone}"
        if key != self._day:
            self._day_ns = self._midnight_ns(int(year), int(month), int(day), zone)
            self._day = key
        if int(hour) > 23 or int(minute) > 59 or int(second) > 60:
            raise RowError(self.column, f"{raw!r} is not a time of day; 23:59:59 is the last")
        seconds = int(hour) * 3600 + int(minute) * 60 + int(second)
        return self._day_ns + seconds * 10**9 + (int(fraction.ljust(9, "0")) if fraction else 0)

    def _midnight_ns(self, year: int, month: int, day: int, zone: str | None) -> int:
        offset = timedelta(0)
        if zone and zone != "Z":
            digits = zone[1:].replace(":", "")
            offset = timedelta(hours=int(digits[:2]), minutes=int(digits[2:]))
            offset = -offset if zone[0] == "-" else offset
        try:
            midnight = datetime(year, month, day, tzinfo=UTC)
        except ValueError:
            raise RowError(
                self.column, f"{year}-{month}-{day} is not a date; year-month-day is"
            ) from None
        since = midnight - offset - _EPOCH
        if since < timedelta(0):
            raise RowError(self.column, f"{year}-{month}-{day} is before 1970")
        return (since.days * 86400 + since.seconds) * 10**9
