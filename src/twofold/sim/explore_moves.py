"""Everything that can happen next in a global state of the exhaustive search, faults included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from twofold.messages import (
    ClientGone,
    Digested,
    Fenced,
    LayersDone,
    LegFailed,
    PeerLost,
    ReadDone,
    StepDone,
    StepFailed,
    Wake,
    WriteDone,
)
from twofold.sim.explore_contents import compute, land, verify
from twofold.sim.explore_model import Model
from twofold.sim.explore_world import (
    LAYERS,
    NAMES,
    D,
    Digesting,
    Fencing,
    Lost,
    Moving,
    P,
    Sent,
    Step,
    World,
    is_quiet,
    put,
    with_work,
    without,
)

Next = tuple[str, World]


def moves(model: Model, world: World) -> Iterator[Next]:
    """All that can happen next: what in words, and the world after it.

    Timers run out for nothing when nothing else is on its way, and cost a fault otherwise.
    Where the model's legs are instant, all that is said on them arrives within the same move; of
    two legs that leave at once either may be first.
    """
    yield from free_moves(model, world)
    yield from fault_moves(model, world)


def free_moves(model: Model, world: World) -> Iterator[Next]:
    """Those of `moves` that are no faults."""
    return _settled(model, _free(model, world))


def fault_moves(model: Model, world: World) -> Iterator[Next]:
    """Those of `moves` that are faults: none when none are left."""
    if not world.faults:
        return iter(())
    return _settled(model, _faults(model, replace(world, faults=world.faults - 1)))


def _settled(model: Model, found: Iterator[Next]) -> Iterator[Next]:
    """The same, tidy; and with instant legs once nothing is on its way on them."""
    for what, then in found:
        if not model.instant_legs:
            yield what, model.tidy(then)
            continue
        yield what, model.tidy(_drained(model, then, 1))
        if sum(leg is not None and bool(leg.down) for leg in then.legs) > 1:
            yield f"{what}, decode first", model.tidy(_drained(model, then, -1))


def _drained(model: Model, world: World, order: int) -> World:
    """The world once nothing is on its way on any leg."""
    while True:
        following = next(_legs(model, world, order), None)
        if following is None:
            return world
        world = following[1]


def _free(model: Model, world: World) -> Iterator[Next]:
    if world.arrived < len(model.prompts):
        yield f"request {world.arrived} arrives", model.arrive(world)
    yield from _inboxes(model, world)
    yield from _legs(model, world)
    for item in dict.fromkeys(world.work):
        yield from _ends(model, replace(world, work=without(world.work, item)), item)
    if is_quiet(world):
        yield from _timers(model, world)


def at_end(model: Model, world: World) -> bool:
    """Whether all requests have come and ended, everywhere, and every block is back."""
    return (
        world.arrived == len(model.prompts)
        and all(world.ended)
        and is_quiet(world)
        and model.routers.at_rest(world.router)
        and all(model.workers.at_rest(core) for core in world.cores if core >= 0)
    )


# ----------------------------------------------------------------------- messages


def _inboxes(model: Model, world: World) -> Iterator[Next]:
    for who in (P, D):
        if world.inboxes[who]:
            item, *rest = world.inboxes[who]
            after = replace(world, inboxes=put(world.inboxes, who, tuple(rest)))
            yield f"{NAMES[who]} hears {item}", _hear(model, after, who, item)


def _hear(model: Model, world: World, who: int, item: Sent | Lost) -> World:
    if isinstance(item, Sent):
        return model.hear(world, who, item)
    return model.to_worker(world, who, PeerLost(f"{NAMES[1 - who]}.{item.life}"))


def _legs(model: Model, world: World, order: int = 1) -> Iterator[Next]:
    for slot, leg in list(enumerate(world.legs))[::order]:
        if leg is None:
            continue
        if leg.down:
            what, *rest = leg.down
            after = replace(world, legs=put(world.legs, slot, replace(leg, down=tuple(rest))))
            alive = world.cores[slot % 2] >= 0 and leg.life == world.lives[slot % 2]
            if alive:
                after = (model.submit if what == "submit" else model.hang_up)(after, slot)
            elif what == "submit":
                after = model.break_leg(after, slot, lost=True)
            yield f"{what} on leg {slot}", after
        if leg.up:
            message, *later = leg.up
            after = replace(world, legs=put(world.legs, slot, replace(leg, up=tuple(later))))
            yield f"the router hears {message}", model.to_router(after, message)


# --------------------------------------------------------------------------- work


def _ends(model: Model, world: World, item: Any) -> Iterator[Next]:
    """What is under way comes to an end; `world` is without it already."""
    if isinstance(item, Step):
        yield f"{NAMES[item.who]} has computed a step", computed(model, world, item)
        if model.mode.by_layer and not item.layers and any(row.n > 1 for row in item.rows):
            half = compute(world, item, 0, 1)
            half = replace(half, work=with_work(world.work, replace(item, layers=1)))
            then = model.to_worker(half, item.who, LayersDone(0, 1))
            yield f"{NAMES[item.who]} has computed half of the layers", then
    elif isinstance(item, Digesting):
        sums = tuple([hash(world.contents[item.who][block]) for block in item.blocks])
        then = model.to_worker(world, item.who, Digested(item.request_id, sums))
        yield f"{NAMES[item.who]} has checksums", then
    elif isinstance(item, Fencing):
        yield "D is fenced off", model.to_worker(world, D, Fenced(item.request_id))
    else:
        if item.state != "over":
            yield f"{item} lands", moved(model, land(world, item, model.held(world)), item, ok=True)
        if item.state == "cancelled":
            yield (
                f"{item} breaks off",
                moved(model, land(world, item, model.held(world)), item, ok=False),
            )
        if item.state == "over":
            yield f"{item} has failed", moved(model, world, item, ok=False)


def computed(model: Model, world: World, step: Step) -> World:
    """The results of a step: KV in its blocks, and tokens."""
    tokens = [
        (row.request_id, 100 + len(row.tokens))
        for row in step.rows
        if row.start + row.n == len(row.tokens)
    ]
    world = compute(world, step, step.layers, LAYERS)
    verify(world, step)
    return model.to_worker(world, step.who, StepDone(0, tuple(tokens)))


def moved(model: Model, world: World, item: Moving, *, ok: bool) -> World:
    """Who moved blocks is told the end of it."""
    if item.who == P:
        return model.to_worker(world, P, WriteDone(item.request_id, item.number, ok))
    sums = [hash(world.contents[D][ours]) for _, ours in item.pairs] if ok else []
    return model.to_worker(world, D, ReadDone(item.request_id, ok, "", 0, tuple(sums)))


def _timers(model: Model, world: World) -> Iterator[Next]:
    if model.routers.will_wake(world.router):
        yield "a deadline passes at the router", model.to_router(world, Wake())
    yield from _worker_timers(model, world)


def _worker_timers(model: Model, world: World) -> Iterator[Next]:
    for who in (P, D):
        if world.cores[who] >= 0 and model.workers.will_wake(world.cores[who]):
            yield f"a timer runs out at {NAMES[who]}", model.to_worker(world, who, Wake())


# ------------------------------------------------------------------------- faults


def _faults(model: Model, world: World) -> Iterator[Next]:
    """One thing goes wrong; `world` has one fault less already."""
    for who in (P, D):
        if world.inboxes[who] and isinstance(world.inboxes[who][0], Sent):
            sent, *rest = world.inboxes[who]
            lost = replace(world, inboxes=put(world.inboxes, who, tuple(rest)))
            yield f"FAULT: {sent} is lost", lost
            yield f"FAULT: {sent} comes twice", _hear(model, world, who, sent)
    for slot in range(len(world.legs)):
        yield from _leg_faults(model, world, slot)
    for number in range(world.arrived):
        if not world.ended[number]:
            gone = model.to_router(world, ClientGone(number))
            yield f"FAULT: client {number} leaves", gone
    for item in dict.fromkeys(world.work):
        yield from _work_faults(model, replace(world, work=without(world.work, item)), item)
    for who in (P, D):
        if world.cores[who] >= 0:
            dead = _kill(model, world, who)
            yield f"FAULT: {NAMES[who]} is killed", model.see(dead, who, -1)
            back = _restart(model, dead, who)
            again = model.see(back, who, back.lives[who])
            yield f"FAULT: {NAMES[who]} is killed and back at once", again
    if min(world.cores) >= 0 and not _is_severed(world):
        (p, d), inboxes = world.lives, ((Lost(world.lives[D]),), (Lost(world.lives[P]),))
        yield f"FAULT: P.{p} and D.{d} lose each other", replace(world, inboxes=inboxes)
    if not is_quiet(world):
        for what, then in _worker_timers(model, world):
            yield f"FAULT: early, {what}", then


def _is_severed(world: World) -> bool:
    return any(isinstance(item, Lost) for inbox in world.inboxes for item in inbox)


def _leg_faults(model: Model, world: World, slot: int) -> Iterator[Next]:
    leg = world.legs[slot]
    if leg is None or leg.over:
        return
    if leg.down[:1] == ("submit",):
        refused = replace(leg, down=leg.down[1:])
        kind: Any = "decode" if slot % 2 else "prefill"
        message = LegFailed(slot // 2, 0, kind, 429, "queue_full")
        after = model.up(replace(world, legs=put(world.legs, slot, refused)), slot, message)
        yield f"FAULT: leg {slot} is refused", after
    cut = replace(leg, down=(*leg.down, "cancel"))
    after = model.break_leg(replace(world, legs=put(world.legs, slot, cut)), slot, lost=False)
    yield f"FAULT: leg {slot} is cut", after


def _work_faults(model: Model, world: World, item: Any) -> Iterator[Next]:
    if isinstance(item, Step):
        then = model.to_worker(world, item.who, StepFailed(0, "device"))
        yield f"FAULT: the step of {NAMES[item.who]} fails", then
    elif isinstance(item, Moving) and not item.state:
        yield (
            f"FAULT: {item} fails",
            moved(model, land(world, item, model.held(world)), item, ok=False),
        )
        damaged = land(world, item, model.held(world), flip=True)
        yield f"FAULT: {item} is damaged", moved(model, damaged, item, ok=True)


def _kill(model: Model, world: World, who: int) -> World:
    """A worker dies: what it does ends, its peer and the gateway will notice."""
    life = world.lives[who]
    for slot in range(who, len(world.legs), 2):
        leg = world.legs[slot]
        if leg is not None and leg.life == life:
            world = replace(world, legs=put(world.legs, slot, replace(leg, down=())))
            world = model.break_leg(world, slot, lost=True)
    inboxes: tuple[Any, ...] = put(((), ()), 1 - who, (*world.inboxes[1 - who], Lost(life)))
    return replace(
        world,
        cores=put(world.cores, who, -1),
        contents=put(world.contents, who, model.empty),
        inboxes=inboxes if world.cores[1 - who] >= 0 else ((), ()),
        work=_bereft(world.work, who),
    )


def _bereft(work: Sequence[Any], who: int) -> tuple[Any, ...]:
    """What is under way without `who`: its own ends, and what is moved to or from it fails."""
    left: list[Any] = []
    for item in work:
        whose = D if isinstance(item, Fencing) else item.who
        if whose != who:
            left.append(replace(item, state="over") if isinstance(item, Moving) else item)
    return tuple(left)


def _restart(model: Model, world: World, who: int) -> World:
    life = world.lives[who] + 1
    return replace(
        world,
        cores=put(world.cores, who, model.workers.born()),
        lives=put(world.lives, who, life),
        submitted=put(world.submitted, who, 0),
    )
