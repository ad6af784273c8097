"""What the router learns of its workers from its own messages: rates and step times, in integers.

Every sum fades as it grows, so that the last handful of samples counts most and a worker that
becomes slow is seen to be. Whole numbers keep a replay exact on any machine.
"""

from __future__ import annotations

from typing import Final

from twofold.types import NS_PER_S

_FADE_BITS: Final = 4  # a sample weighs 15/16 of the one after it
_SCALE_BITS: Final = 10  # sums are kept finer than samples, so that fading does not stick


class Rate:
    """Work per second, as a ratio of faded sums: work done by time spent.

    A ratio of sums is right also when several things end at once, the last of them in no time.
    """

    __slots__ = ("_amount", "_ns", "per_s")

    def __init__(self) -> None:
        self._amount = 0
        self._ns = 0
        self.per_s = 0
        """Whole units per second, at least 1; 0 while nothing is known."""

    def add(self, amount: int, ns: int) -> None:
        """`amount` was done in `ns`."""
        self._amount += (amount << _SCALE_BITS) - (self._amount >> _FADE_BITS)
        self._ns += (ns << _SCALE_BITS) - (self._ns >> _FADE_BITS)
        if self._ns and self._amount:
            self.per_s = max(1, self._amount * NS_PER_S // self._ns)


class Line:
    """Step time against sequences in it, as the least-squares line through faded samples."""

    __slots__ = ("_n", "_nn", "_ns", "_nt", "_t")

    def __init__(self) -> None:
        self._n = self._nn = self._t = self._nt = self._ns = 0

    @property
    def known(self) -> bool:
        """Whether there has been a sample."""
        return self._n > 0

    def add(self, sequences: int, ns: int) -> None:
        """A step of `sequences` took `ns`."""
        one = 1 << _SCALE_BITS
        self._n += one - (self._n >> _FADE_BITS)
        self._t += sequences * one - (self._t >> _FADE_BITS)
        self._nn += sequences * sequences * one - (self._nn >> _FADE_BITS)
        self._ns += ns * one - (self._ns >> _FADE_BITS)
        self._nt += sequences * ns * one - (self._nt >> _FADE_BITS)

    def at(self, sequences: int) -> tuple[int, int]:
        """(step time in ns with `sequences`, what one more adds); zeros while nothing is known.

        Neither is ever below 0: where the samples fall, their mean is the answer.
        """
        if not self.known:
            return 0, 0
        spread = self._n * self._nn - self._t * self._t
        slope = self._n * self._nt - self._t * self._ns
        mean_ns = self._ns // self._n
        if spread <= 0 or slope <= 0:
            return mean_ns, 0
        away = sequences * self._n - self._t  # from the samples' mean, times _n
        return max(0, mean_ns + slope * away // (spread * self._n)), slope // spread
