"""Integer arithmetic for step times that are linear in pieces, so that sums are exact."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

SHIFT: Final = 16
"""Times are kept as integers of 2**-SHIFT ns; slopes are then right to 2**-17 ns a token."""

ONE: Final = 1 << SHIFT
_HALF: Final = ONE >> 1
_MASK: Final = ONE - 1


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Sum over i in [0, n) of floor((a * i + b) / m), exactly, in O(log m) steps.

    Any integers a and b; n >= 0, m > 0.
    """
    total = 0
    if a < 0:
        total -= n * (n - 1) // 2 * ((a % m - a) // m)
        a %= m
    if b < 0:
        total -= n * ((b % m - b) // m)
        b %= m
    while True:
        if a >= m:
            total += n * (n - 1) // 2 * (a // m)
            a %= m
        if b >= m:
            total += n * (b // m)
            b %= m
        top = a * n + b
        if top < m:
            return total
        n, b = divmod(top, m)
        m, a = a, m


class Pieces:
    """A function of a whole number x that is linear between knots, in whole ns.

    Below the first knot the first value holds; above the last the last slope goes on. Values are
    rounded to the nearest ns. `xs` are rising whole numbers, `ys_ns` the values there.
    `last_slope` (ns per unit) is the slope after the last knot; without it that of the last piece.
    """

    __slots__ = ("_slopes", "_xs", "_ys", "start")

    def __init__(
        self, xs: Sequence[int], ys_ns: Sequence[float], last_slope: float | None = None
    ) -> None:
        if not xs or len(xs) != len(ys_ns) or any(a >= b for a, b in pairwise(xs)):
            raise ValueError("knots must rise and each needs a value")
        ys = [round(y * ONE) for y in ys_ns]
        # Toward zero, so that a piece never passes the value of the knot that it leads to.
        slopes = [
            _toward_zero(y1 - y0, x1 - x0)
            for x0, x1, y0, y1 in zip(xs, xs[1:], ys, ys[1:], strict=False)
        ]
        if last_slope is not None:
            slopes.append(round(last_slope * ONE))
        else:
            slopes.append(slopes[-1] if slopes else 0)
        self.start = xs[0]
        self._xs = list(xs)
        self._ys = [y + _HALF for y in ys]
        self._slopes = slopes

    def at(self, x: int) -> int:
        """The value at x, never below 0."""
        i = bisect_right(self._xs, x) - 1
        if i < 0:
            return self._ys[0] >> SHIFT
        value = (self._ys[i] + self._slopes[i] * (x - self._xs[i])) >> SHIFT
        return value if value > 0 else 0

    def run(self, x: int, step: int, n: int) -> int:
        """Exactly at(x) + at(x + step) + ... over n values; step >= 1, n >= 0."""
        xs, total = self._xs, 0
        while n > 0:
            i = bisect_right(xs, x) - 1
            # Values of this piece: those before the next knot.
            here = n
            if i + 1 < len(xs):
                here = min(n, -(-(xs[i + 1] - x) // step))
            total += self._piece(i, x, step, here)
            n -= here
            x += here * step
        return total

    def many(self, x: int, step: int, n: int) -> npt.NDArray[np.int64]:
        """at(x), at(x + step), ... as n values; step >= 1, n >= 0."""
        xs, parts = self._xs, []
        while n > 0:
            i = bisect_right(xs, x) - 1
            here = n
            if i + 1 < len(xs):
                here = min(n, -(-(xs[i + 1] - x) // step))
            if i < 0:
                parts.append(np.full(here, self._ys[0] >> SHIFT, dtype=np.int64))
            else:
                first = self._ys[i] + self._slopes[i] * (x - xs[i])
                rise = self._slopes[i] * step
                if rise:
                    values = np.arange(first, first + rise * here, rise, dtype=np.int64)
                else:
                    values = np.full(here, first, dtype=np.int64)
                values >>= SHIFT
                if first < 0 or first + rise * here < 0:
                    np.maximum(values, 0, out=values)
                parts.append(values)
            n -= here
            x += here * step
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _piece(self, i: int, x: int, step: int, n: int) -> int:
        if i < 0:
            return n * (self._ys[0] >> SHIFT)
        slope = self._slopes[i]
        first = self._ys[i] + slope * (x - self._xs[i])
        rise = slope * step
        if n == 1:
            return max(first >> SHIFT, 0)
        if first + rise * (n - 1) < 0 or first < 0:
            # Extrapolated below zero: only then is the clamp of `at` in play.
            return sum(max((first + rise * j) >> SHIFT, 0) for j in range(n))
        if rise == 0:
            return n * (first >> SHIFT)
        return floor_sum(n, ONE, rise, first)


def _toward_zero(a: int, b: int) -> int:
    return a // b if a >= 0 else -(-a // b)
