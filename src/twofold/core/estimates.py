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
    """Step time against sequences in it: the least-squares line through faded samples.

    Kept as means, variance and covariance, so that samples of one batch size have a variance of
    exactly 0 and are not taken for a slope.
    """

    __slots__ = ("_cov", "_mean_n", "_mean_ns", "_var", "known")

    def __init__(self) -> None:
        self.known = False
        """Whether there has been a sample."""
        self._mean_n = self._mean_ns = self._var = self._cov = 0

    def add(self, sequences: int, ns: int) -> None:
        """A step of `sequences` took `ns`."""
        n, ns = sequences << _SCALE_BITS, ns << _SCALE_BITS
        if not self.known:
            self.known = True
            self._mean_n, self._mean_ns = n, ns
            return
        off_n, off_ns = n - self._mean_n, ns - self._mean_ns
        self._mean_n += off_n >> _FADE_BITS
        self._mean_ns += off_ns >> _FADE_BITS
        self._var += (off_n * off_n - self._var) >> _FADE_BITS
        self._cov += (off_n * off_ns - self._cov) >> _FADE_BITS

    def at(self, sequences: int) -> tuple[int, int]:
        """(step time in ns with `sequences`, what one more adds); zeros while nothing is known.

        A step takes no less for more sequences, and at most in proportion more: what samples say
        beyond that is noise.
        """
        mean_ns = self._mean_ns >> _SCALE_BITS
        rise, per = max(0, self._cov), self._var
        if not per or rise * self._mean_n > self._mean_ns * per:
            rise, per = (self._mean_ns, self._mean_n) if per else (0, 1)
        away = (sequences << _SCALE_BITS) - self._mean_n
        return max(0, mean_ns + (rise * away // per >> _SCALE_BITS)), rise // per
