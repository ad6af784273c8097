"""When to start a process again that has ended."""

from __future__ import annotations

from typing import Final

import msgspec

from twofold.types import NS_PER_S


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """At once the first time, then after waits that double, until it has been well for a while.

    `give_up_after`: failures in a row, of a process that has never been ready, after which
    another try is of no use.
    """

    first_ns: int = NS_PER_S // 2
    most_ns: int = 10 * NS_PER_S
    healthy_ns: int = 30 * NS_PER_S
    give_up_after: int = 3

    def count(self, failures: int, ready_for_ns: int) -> int:
        """Failures in a row, once a process has ended that had been ready for that long."""
        return 1 if ready_for_ns >= self.healthy_ns else failures + 1

    def wait_ns(self, failures: int) -> int:
        """How long to wait after that many failures in a row, 1 or more."""
        if failures <= 1:
            return 0
        return min(self.most_ns, self.first_ns << min(failures - 2, _MOST_DOUBLINGS))


_MOST_DOUBLINGS: Final = 30
