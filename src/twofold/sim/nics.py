"""Workers' network links, each shared by all transfers of its worker, as events."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from twofold.cost.errors import CostError
from twofold.sim.events import Events, Kind
from twofold.types import NS_PER_S, ceil_div

_SCALE = NS_PER_S
"""Progress is kept in 1/_SCALE of a byte, so that bytes/s times ns is whole."""


class _Flow:
    """A transfer: scaled bytes `left` at `at_ns`, of which it moves `rate` / `sharers` a ns."""

    __slots__ = ("at_ns", "finish", "left", "number", "rate", "sharers", "source", "target")

    def __init__(
        self,
        number: int,
        source: str,
        target: str,
        left: int,
        at_ns: int,
        finish: Callable[[], None],
    ) -> None:
        self.number = number
        self.source = source
        self.target = target
        self.left = left
        self.at_ns = at_ns
        self.finish = finish
        self.rate = self.sharers = 1

    def settle(self, now_ns: int) -> None:
        """Bring `left` to now."""
        self.left -= self.rate * (now_ns - self.at_ns) // self.sharers
        self.at_ns = now_ns

    def end_ns(self) -> int:
        """When it ends if nothing changes."""
        return self.at_ns + ceil_div(max(self.left, 0) * self.sharers, self.rate)


class Nics:
    """One link of each worker, `bytes_per_s` by its name, in and out apart.

    Of k transfers into (or out of) a worker each has 1/k of its link, and moves at the lesser of
    its shares at both ends. What it cannot use of the other share is left unused: transports that
    pace each stream by itself do no better for long, and so a link is never taken for faster than
    it is. Where workers come in single pairs this is `Lane`, to the ns.
    """

    def __init__(self, events: Events, bytes_per_s: Mapping[str, int]) -> None:
        for name, rate in bytes_per_s.items():
            if rate < 1:
                raise CostError(f"{name}: a link of {rate} bytes/s; 1 or more is right")
        self._events = events
        self._bytes_per_s = dict(bytes_per_s)
        self._flows: dict[int, _Flow] = {}
        self._out: dict[str, dict[int, _Flow]] = {name: {} for name in bytes_per_s}
        self._in: dict[str, dict[int, _Flow]] = {name: {} for name in bytes_per_s}
        self._armed = dict.fromkeys(bytes_per_s, 0)
        self._origin: dict[str, int] = {}
        self._next = 0

    def start(
        self, source: str, target: str, origin: int, n_bytes: int, finish: Callable[[], None]
    ) -> int:
        """Begin to move `n_bytes`; `finish` is called when they are over. Returns its number.

        `origin` is the number of the target, whose events these are.
        """
        self._next += 1
        self._origin[target] = origin
        now_ns = self._events.now_ns
        flow = _Flow(self._next, source, target, n_bytes * _SCALE, now_ns, finish)
        self._flows[flow.number] = self._out[source][flow.number] = flow
        self._in[target][flow.number] = flow
        self._share({source: None}, {target: None})
        return flow.number

    def stop(self, number: int) -> None:
        """Take a transfer off, unless its bytes are over. The others get faster."""
        flow = self._flows.get(number)
        if flow is not None:
            self._remove(flow)
            self._share({flow.source: None}, {flow.target: None})

    def _remove(self, flow: _Flow) -> None:
        del self._flows[flow.number]
        del self._out[flow.source][flow.number]
        del self._in[flow.target][flow.number]

    def _share(self, sources: dict[str, None], targets: dict[str, None]) -> None:
        """New rates, where transfers have come or gone, and new ends at all targets concerned."""
        now_ns = self._events.now_ns
        for flow in self._among(sources, targets):
            flow.settle(now_ns)
            out, inward = len(self._out[flow.source]), len(self._in[flow.target])
            sent, taken = self._bytes_per_s[flow.source], self._bytes_per_s[flow.target]
            if sent * inward <= taken * out:
                flow.rate, flow.sharers = sent, out
            else:
                flow.rate, flow.sharers = taken, inward
            targets[flow.target] = None
        for target in targets:
            self._arm(target, now_ns)

    def _among(self, sources: dict[str, None], targets: dict[str, None]) -> list[_Flow]:
        found = {number: flow for name in targets for number, flow in self._in[name].items()}
        for name in sources:
            found |= self._out[name]
        return list(found.values())

    def _arm(self, target: str, now_ns: int) -> None:
        self._armed[target] += 1
        ends = [flow.end_ns() for flow in self._in[target].values()]
        if ends:
            at_ns, armed = max(min(ends), now_ns), self._armed[target]
            self._events.at(at_ns, Kind.RESULT, self._origin[target], self._wake, target, armed)

    def _wake(self, target: str, armed: int) -> None:
        if armed != self._armed[target]:
            return  # the transfers have changed since
        now_ns = self._events.now_ns
        done = [flow for flow in self._in[target].values() if flow.end_ns() <= now_ns]
        for flow in done:
            flow.settle(now_ns)
        done.sort(key=lambda flow: (flow.left, flow.number))
        for flow in done:
            self._remove(flow)
        self._share(dict.fromkeys(flow.source for flow in done), {target: None})
        for flow in done:
            flow.finish()
