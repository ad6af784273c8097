"""Fewer orders that lead to the same: what is explored of a state instead of all that can happen.

A step of the search is one event at one place: the router (R), the prefill or the decode worker
(P, D). Where `Reduction.of` finds a set T of next events, nothing else is explored from that state.

Why that is sound. T is such that whatever can happen without any event of T commutes with each
event of T that follows it, and one event of T, call it a, costs no fault. (T is a persistent set.)
Take any sequence w of events from the state. Either w has a first event x of T: then it can be
moved to the front, and x is explored. Or w has none: then a commutes with all of w, and w after a
is explored, as far as it goes. So each sequence of events, with some more a's at its end, is
explored in an order that differs in commuting neighbours only. From this follows:

- A violation is an event that raises. What commutes changes nothing that the other reads, so an
  event that raises does so in the other order, too.
- A state from which the requests cannot end stays such after some more events, and those are
  explored; and a way to the end from an explored state is there in another order: every a on
  the way is pending, and an end has nothing pending.
- Nothing is put off for ever. Going round in a circle takes a timer, and timers run out for nothing
  only when nothing is pending, which is when no T is found. Each event of T takes away a pending
  message, and adds none that could belong to a T of the same kind.

What is in T, and why it commutes:

1. A cancellation that reaches a worker which no longer knows the request, or is dead, or was never
   sent it: nothing happens, and never will, since worker ids are not used again. Its being lost
   or cleared by a death leaves the same state.
2. A peer's answer of a transfer that decode no longer waits for and will not be sent again.
   Repeating or losing it leaves the same state with a fault less, of which nothing new can come.
3. A message x on its way up to the router, alone or, where a client's leaving is what it does not
   commute with, with that: T is then {next message on each leg of request r, client r leaves}.
   Events at P and D, and faults there, touch the router's state nowhere and queues at the other
   end, so only what the router hears counts. All of that is tried: from the router's state, with
   every message that may come before x, in any order and number, x must lead to the same state
   of the router and the same effects before and after each. What may come is taken too large:
   for each leg that is not over every kind of answer or failure, and with faults left
   every client's leaving and workers that die or are back. Also with faults left, x must not send
   a leg (its way depends on who lives), nor end r while a leg of it could still be cut.

The tests compare both searches: same ends, same verdicts on planted bugs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from msgspec.structs import replace

from twofold.messages import (
    Arrive,
    CancelLeg,
    ClientGone,
    DecodeStarted,
    FromPeer,
    Heartbeat,
    LegEnded,
    LegFailed,
    PrefillDone,
    ReleaseHeld,
    SendDecode,
    SendPrefill,
    Terminal,
    WorkerGone,
)
from twofold.sim.explore_model import Model
from twofold.sim.explore_world import NAMES, D, Leg, P, Sent, World, put

Next = tuple[str, World]

_FAILURES: Final = ((0, True), (0, False), (400, False))
"""(status, lost) of a leg that fails: to the router a status is a worker's own refusal or none."""


class Reduction:
    """Finds persistent sets of next events in worlds of `model`; what it has tried is kept."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._commutes: dict[Any, bool] = {}

    def of(self, world: World) -> list[Next] | None:
        """The events to explore instead of all, or None where all have to be."""
        idle = self._cancellation(world)
        if idle is None and world.inboxes[D]:
            idle = self._answer(world)
        chosen = None if idle is None else [idle]
        for slot, leg in enumerate(world.legs) if chosen is None else ():
            if leg is not None and leg.up:
                chosen = self._heard(world, slot, leg)
                if chosen is not None:
                    break
        if chosen is None:
            return None
        return [(what, self._model.tidy(then)) for what, then in chosen]

    # ------------------------------------------------------- 1, 2: without effect

    def _cancellation(self, world: World) -> Next | None:
        for slot, leg in enumerate(world.legs):
            if leg is not None and leg.down and leg.down[0] == "cancel":
                who = slot % 2
                core = world.cores[who]
                alive = core >= 0 and leg.life == world.lives[who] and leg.worker_id >= 0
                facts = self._model.workers.facts(core) if alive else None
                if facts is None or leg.worker_id not in facts.known:
                    after = replace(
                        world, legs=put(world.legs, slot, replace(leg, down=leg.down[1:]))
                    )
                    return f"cancel on leg {slot} concerns nobody", after
        return None

    def _answer(self, world: World) -> Next | None:
        item, *rest = world.inboxes[D]
        if not isinstance(item, Sent) or isinstance(item.message, Heartbeat):
            return None
        name, core = item.message.request_id, world.cores[D]
        if (item.life, name) in self._model.workers.facts(core).awaited:
            return None
        if self._may_submit(world, name):
            return None
        taken = self._model.workers.take(core, FromPeer(f"P.{item.life}", item.message))
        if taken.state != core or taken.effects:
            return None
        after = replace(world, inboxes=put(world.inboxes, D, tuple(rest)))
        return f"D does not wait for {item}", after

    def _may_submit(self, world: World, name: int) -> bool:
        """Whether decode may yet be sent a request whose KV is named so."""
        requests = range(len(world.ended))
        if self._model.mode.at_once:  # the name is the gateway's
            requests = range(name // 16 - 1, name // 16)
        return any(
            not world.ended[number]
            if (leg := world.legs[2 * number + D]) is None
            else "submit" in leg.down
            for number in requests
        )

    # ------------------------------------------------------------ 3: at the router

    def _heard(self, world: World, slot: int, leg: Leg) -> list[Next] | None:
        request_id, other = slot // 2, world.legs[slot ^ 1]
        over = leg.over and (other is None or other.over)
        beside = self._may_come(world, request_id)
        own: list[Any] = []
        if other is not None:
            own += other.up if other.over else _answers(request_id, (slot ^ 1) % 2)
        if world.faults:
            own.append(ClientGone(request_id))
        may_end = over or not world.faults
        if self._commute(world, (leg.up[0],), (*beside, *own), may_end=may_end):
            return [self._hear(world, slot)]
        slots = [s for s in (slot, slot ^ 1) if (at := world.legs[s]) is not None and at.up]
        events = [at.up[0] for s in slots if (at := world.legs[s]) is not None]
        if not (world.faults and over):
            return None
        if not self._commute(world, (*events, ClientGone(request_id)), beside, may_end=True):
            return None
        gone = replace(world, faults=world.faults - 1)
        leaves = self._model.to_router(gone, ClientGone(request_id))
        return [
            *[self._hear(world, s) for s in slots],
            (f"FAULT: client {request_id} leaves", leaves),
        ]

    def _hear(self, world: World, slot: int) -> Next:
        leg = world.legs[slot]
        assert leg is not None
        message, *later = leg.up
        after = replace(world, legs=put(world.legs, slot, replace(leg, up=tuple(later))))
        return f"the router hears {message}", self._model.to_router(after, message)

    def _may_come(self, world: World, but: int) -> tuple[Any, ...]:
        """All that the router may hear that does not concern request `but`."""
        found: list[Any] = []
        for number, ended in enumerate(world.ended):
            if number == but or ended:
                continue
            if number >= world.arrived:
                found.append(self._model.arrival(number))
            for who in (P, D):
                leg = world.legs[2 * number + who]
                found += _answers(number, who) if leg is None or not leg.over else leg.up
            if world.faults:
                found.append(ClientGone(number))
        for who in (P, D) if world.faults else ():
            found.append(WorkerGone(NAMES[who]))
            # In one new life: to the router all that were not there before are alike.
            found.append(self._model.seen(who, world.lives[who] + 1))
        return tuple(found)

    def _commute(
        self, world: World, events: tuple[Any, ...], others: tuple[Any, ...], *, may_end: bool
    ) -> bool:
        key = (world.router, events, others, may_end, world.faults > 0)
        known = self._commutes.get(key)
        if known is None:
            try:
                known = all(
                    self._may_go_first(world, at, events, left, may_end=may_end)
                    for at, left in self._reached(world.router, others)
                )
            except AssertionError:  # nothing that can come in truth, or it will show in the search
                known = False
            self._commutes[key] = known
        return known

    def _reached(self, router: int, others: tuple[Any, ...]) -> Iterator[tuple[int, Any]]:
        """States of the router after any of `others`, in any order and number, and what may
        come then: a request arrives only once."""
        front, met = [(router, others)], {(router, others)}
        while front:
            at, left = front.pop()
            yield at, left
            for other in left:
                then = (self._model.routers.take(at, other).state, left)
                if isinstance(other, Arrive):
                    then = (then[0], tuple([o for o in left if o is not other]))
                if then not in met:
                    met.add(then)
                    front.append(then)

    def _may_go_first(
        self, world: World, at: int, events: Any, others: Any, *, may_end: bool
    ) -> bool:
        take = self._model.routers.take
        for event in events:
            first = take(at, event)
            effects = _shown(first.effects)
            if world.faults and any(what == "send" for what, *_ in effects):
                return False
            if not may_end and any(what == "end" for what, *_ in effects):
                return False
            for other in others:
                instead = take(at, other)
                here, there = take(first.state, other), take(instead.state, event)
                if (here.state, effects, _shown(here.effects)) != (
                    there.state,
                    _shown(there.effects),
                    _shown(instead.effects),
                ):
                    return False
        return True


def _answers(request_id: int, who: int) -> Iterator[Any]:
    """All that may come up a leg."""
    kind: Any = "decode" if who else "prefill"
    if who == P:
        yield PrefillDone(request_id, 0)
    else:
        yield DecodeStarted(request_id, 0)
        yield LegEnded(request_id, 0, 1)
    for status, lost in _FAILURES:
        yield LegFailed(request_id, 0, kind, status, "", lost)


def _shown(effects: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """What of `effects` can be seen outside the router, in one order."""
    found: list[tuple[Any, ...]] = []
    for effect in effects:
        if isinstance(effect, SendPrefill | SendDecode):
            found.append(("send", effect.request_id, effect.worker))
        elif isinstance(effect, ReleaseHeld):
            found.append(("cancel", effect.request_id, "prefill"))
        elif isinstance(effect, CancelLeg):
            found.append(("cancel", effect.request_id, effect.leg))
        elif isinstance(effect, Terminal):
            found.append(("end", effect.request_id, ""))
    return sorted(found)
