"""What can happen next in a global state of the exhaustive search: one prefill, one decode worker.

Each method that begins with `_` and a verb gives the world after one thing has happened.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from twofold.core.handoff import MODES
from twofold.core.router import Router
from twofold.core.worker import WorkerCore
from twofold.messages import (
    Abort,
    Arrive,
    CancelLeg,
    CancelRead,
    CancelWrite,
    DecodeStarted,
    Digest,
    Ended,
    Fence,
    FromPeer,
    LegEnded,
    LegFailed,
    PrefillDone,
    Read,
    Release,
    ReleaseHeld,
    RunStep,
    SendDecode,
    SendPrefill,
    Submit,
    Terminal,
    Token,
    ToPeer,
    WorkerGone,
    WorkerSeen,
    Write,
)
from twofold.sim.explore_contents import BLOCK_SIZE, land, verify
from twofold.sim.explore_state import Cores, Taken
from twofold.sim.explore_world import (
    LAYERS,
    NAMES,
    Block,
    D,
    Digesting,
    Fencing,
    Leg,
    Lost,
    Moving,
    P,
    Sent,
    Step,
    World,
    put,
    with_work,
)
from twofold.sim.observer import Core
from twofold.types import PROTOCOL_VERSION, KVHandle, KVLayout

_DEADLINE_NS: Final = 1000
_LAYOUT: Final = KVLayout(
    protocol=PROTOCOL_VERSION,
    engine="twofold",
    model_digest="00",
    tokenizer_digest="00",
    dtype="float16",
    block_size=BLOCK_SIZE,
    layers=LAYERS,
    kv_heads=1,
    head_dim=1,
    rope="",
)


def _worker(handoff: str, n_blocks: int, caching: bool) -> WorkerCore:
    """A small worker whose times have a common measure, so that few of their sums differ."""
    return WorkerCore(
        layout=_LAYOUT,
        n_blocks=n_blocks,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=32,
        max_waiting=4,
        handoff=handoff,
        prefix_caching=caching,
        min_layerwise_tokens=0,
        lease_ns=8,
        heartbeat_ns=4,
        lost_grace_ns=4,
        claim_timeout_ns=8,
        verify_timeout_ns=8,
        repeat_ns=4,
    )


def _check(core: Core) -> None:
    assert isinstance(core, WorkerCore)
    core.check()


class Model:
    """The deployment: its cores, its clients' `prompts`, and what messages do to a world.

    Every answer has `max_tokens` tokens. Without `deadlines` only the handoff's timers end waits.
    Handling a message raises AssertionError when an invariant breaks.
    """

    def __init__(
        self,
        handoff: str,
        prompts: tuple[tuple[int, ...], ...],
        *,
        max_tokens: int = 1,
        n_blocks: int = 6,
        caching: bool = False,
        instant_legs: bool = False,
        deadlines: bool = True,
    ) -> None:
        self.instant_legs = instant_legs
        self._time_left_ns = _DEADLINE_NS if deadlines else 0
        self.mode = MODES[handoff]
        self.prompts = prompts
        self.max_tokens = max_tokens
        self.empty: tuple[Block, ...] = ((0,) * BLOCK_SIZE,) * n_blocks
        self.workers = Cores(lambda: _worker(handoff, n_blocks, caching), _check)
        self.routers = Cores(lambda: Router(max_inflight=8, handoff=handoff), lambda core: None)

    def start(self, faults: int) -> World:
        """Nothing has come yet, and the router has seen both workers."""
        world = World(
            router=self.routers.born(),
            cores=(self.workers.born(), self.workers.born()),
            lives=(0, 0),
            submitted=(0, 0),
            contents=(self.empty, self.empty),
            legs=(None,) * (2 * len(self.prompts)),
            inboxes=((), ()),
            work=(),
            arrived=0,
            ended=(False,) * len(self.prompts),
            faults=faults,
        )
        for who in (P, D):
            world = self.see(world, who, 0)
        return world

    # ------------------------------------------------------------------- router

    def to_router(self, world: World, message: Any) -> World:
        """The router handles `message`."""
        taken = self.routers.take(world.router, message)
        world = replace(world, router=taken.state)
        for effect in taken.effects:
            if isinstance(effect, SendPrefill | SendDecode):
                world = self._send(world, effect)
            elif isinstance(effect, CancelLeg | ReleaseHeld):
                of_prefill = isinstance(effect, ReleaseHeld) or effect.leg == "prefill"
                world = self._cancel(world, 2 * effect.request_id + (P if of_prefill else D))
            elif isinstance(effect, Terminal):
                assert not world.ended[effect.request_id], f"{effect} is a second end"
                world = replace(world, ended=put(world.ended, effect.request_id, True))
                for slot in (2 * effect.request_id, 2 * effect.request_id + 1):
                    leg = world.legs[slot]
                    if leg is not None:  # what still comes concerns nobody
                        leg = replace(leg, up=(), over=True)
                        world = replace(world, legs=put(world.legs, slot, leg))
        return world

    def see(self, world: World, who: int, life: int) -> World:
        """The router sees that a worker lives, or (`life` -1) that it does not."""
        if life < 0:
            return self.to_router(world, WorkerGone(NAMES[who]))
        return self.to_router(world, self.seen(who, life))

    @staticmethod
    def seen(who: int, life: int) -> WorkerSeen:
        """What the router hears of a worker that lives."""
        return WorkerSeen(
            worker=NAMES[who],
            role="decode" if who else "prefill",
            engine_id=f"{NAMES[who]}.{life}",
            layout=_LAYOUT,
        )

    def arrive(self, world: World) -> World:
        """The next client's request comes."""
        number = world.arrived
        return self.to_router(replace(world, arrived=number + 1), self.arrival(number))

    def arrival(self, number: int) -> Arrive:
        """What the router hears of a client's request."""
        weight = len(self.prompts[number])
        return Arrive(request_id=number, weight=weight, time_left_ns=self._time_left_ns)

    def _send(self, world: World, effect: SendPrefill | SendDecode) -> World:
        who = D if isinstance(effect, SendDecode) else P
        slot = 2 * effect.request_id + who
        source = (-1, -1)
        prefill = world.legs[2 * effect.request_id]
        if who == D and prefill is not None:
            name = 16 * (effect.request_id + 1) if self.mode.at_once else prefill.worker_id
            source = (prefill.life, name)
        life = world.lives[who] if world.cores[who] >= 0 else -1
        leg = Leg(life=life, down=("submit",), source=source)
        return replace(world, legs=put(world.legs, slot, leg))

    def _cancel(self, world: World, slot: int) -> World:
        leg, who = world.legs[slot], slot % 2
        if leg is None or leg.life != world.lives[who] or world.cores[who] < 0:
            return world
        return replace(world, legs=put(world.legs, slot, replace(leg, down=(*leg.down, "cancel"))))

    def up(self, world: World, slot: int, message: Any, *, last: bool = True) -> World:
        """A worker, or what is left of a connection to it, answers on a leg."""
        leg = world.legs[slot]
        assert leg is not None
        if leg.over:
            return world
        leg = replace(leg, up=(*leg.up, message), over=last)
        return replace(world, legs=put(world.legs, slot, leg))

    def break_leg(self, world: World, slot: int, *, lost: bool) -> World:
        """The gateway will find the leg's connection broken; nothing else comes on it."""
        leg = world.legs[slot]
        assert leg is not None
        kind = "decode" if slot % 2 else "prefill"
        failed = LegFailed(slot // 2, 0, kind, 0, "connection lost", lost)  # type: ignore[arg-type]
        return self.up(world, slot, failed)

    def tidy(self, world: World) -> World:
        """`world` without legs of which nothing is to come: their request is over at both ends."""
        for slot, leg in enumerate(world.legs):
            if leg is None or leg.down or not world.ended[slot // 2]:
                continue
            who = slot % 2
            core = world.cores[who]
            alive = core >= 0 and leg.life == world.lives[who]
            if not (alive and leg.worker_id in self.workers.facts(core).requests):
                world = replace(world, legs=put(world.legs, slot, None))
        return world

    # ------------------------------------------------------------------ workers

    def to_worker(self, world: World, who: int, message: Any) -> World:
        """A worker that lives handles `message`."""
        taken = self.workers.take(world.cores[who], message)
        blocks = list(world.contents[who])
        for block in self.workers.facts(taken.state).idle:
            blocks[block] = self.empty[block]
        world = replace(
            world,
            cores=put(world.cores, who, taken.state),
            contents=put(world.contents, who, tuple(blocks)),
        )
        for effect in taken.effects:
            world = self._carry_out(world, who, effect, taken)
        return world

    def submit(self, world: World, slot: int) -> World:
        """A leg's request reaches its worker."""
        leg, who = world.legs[slot], slot % 2
        assert leg is not None
        prompt = self.prompts[slot // 2]
        number = world.submitted[who]
        world = replace(
            world,
            submitted=put(world.submitted, who, number + 1),
            legs=put(world.legs, slot, replace(leg, worker_id=number, source=(-1, -1))),
        )
        source = None
        if who == D:
            life, name = leg.source
            source = KVHandle(
                engine_id=f"P.{life}",
                host="",
                port=0,
                request_id=name,
                generation=0,
                n_tokens=len(prompt),
            )
        submit = Submit(
            request_id=number,
            tokens=prompt if who == P or self.mode.at_once else (),
            max_tokens=1 if who == P else self.max_tokens,
            hold=who == P,
            source=source,
            transfer=16 * (slot // 2 + 1) if who == P and self.mode.at_once else 0,
        )
        return self.to_worker(world, who, submit)

    def held(self, world: World) -> tuple[int, ...]:
        """Blocks of the decode worker that a handoff holds."""
        return self.workers.facts(world.cores[D]).held

    def hang_up(self, world: World, slot: int) -> World:
        """The gateway's wish to end a leg reaches its worker."""
        leg = world.legs[slot]
        assert leg is not None
        if leg.worker_id < 0:
            return world
        if slot % 2 == P:
            return self.to_worker(world, P, Release(leg.worker_id, 0))
        return self.to_worker(world, D, Abort(leg.worker_id))

    def _slot(self, world: World, who: int, worker_id: int) -> int:
        for slot in range(who, len(world.legs), 2):
            leg = world.legs[slot]
            if leg is not None and (leg.life, leg.worker_id) == (world.lives[who], worker_id):
                return slot
        raise AssertionError(f"{NAMES[who]} speaks of request {worker_id}, which it was not sent")

    def _carry_out(self, world: World, who: int, effect: Any, taken: Taken) -> World:
        add: Any = None
        if isinstance(effect, RunStep):
            add = Step(who, taken.rows)
            verify(world, add)
        elif isinstance(effect, Digest):
            add = Digesting(who, effect.request_id, effect.blocks)
        elif isinstance(effect, Read):
            life = self._life(effect.peer)
            add = Moving(D, effect.request_id, 0, effect.pairs, life)
            if world.cores[P] < 0 or life != world.lives[P]:
                add = replace(add, state="over")
        elif isinstance(effect, Write):
            life = self._life(effect.peer)
            add = Moving(P, effect.request_id, effect.number, effect.pairs, life, effect.layers)
            dead = world.cores[D] < 0 or life != world.lives[D]
            if dead or Lost(life) in world.inboxes[P]:
                add = replace(add, state="over")
        elif isinstance(effect, Fence):
            world = self._fence(world)
            add = Fencing(effect.request_id)
        elif isinstance(effect, CancelRead | CancelWrite):
            return self._stop(world, who, effect.request_id)
        elif isinstance(effect, ToPeer):
            return self._tell(world, who, effect)
        elif isinstance(effect, Token | Ended):
            return self._answer(world, who, effect)
        if add is None:
            return world
        return replace(world, work=with_work(world.work, add))

    @staticmethod
    def _life(engine_id: str) -> int:
        return int(engine_id.partition(".")[2])

    def _tell(self, world: World, who: int, effect: ToPeer) -> World:
        other, life = 1 - who, self._life(effect.peer)
        if Lost(life) in world.inboxes[who]:
            return world  # on a connection that has broken, which the sender is yet to hear
        if world.cores[other] < 0 or life != world.lives[other]:
            inbox = (*world.inboxes[who], Lost(life))
            return replace(world, inboxes=put(world.inboxes, who, inbox))
        sent = Sent(world.lives[who], effect.message)
        return replace(world, inboxes=put(world.inboxes, other, (*world.inboxes[other], sent)))

    def hear(self, world: World, who: int, item: Sent) -> World:
        """A peer's message is handled."""
        return self.to_worker(world, who, FromPeer(f"{NAMES[1 - who]}.{item.life}", item.message))

    @staticmethod
    def _stop(world: World, who: int, request_id: int) -> World:
        work: list[Any] = []
        for item in world.work:
            if not isinstance(item, Moving) or (item.who, item.request_id) != (who, request_id):
                work.append(item)
            else:
                work.append(item if item.state else replace(item, state="cancelled"))
        return replace(world, work=tuple(work))

    def _fence(self, world: World) -> World:
        """What the prefill worker writes breaks off: it has landed by now, or never will."""
        work: list[Any] = []
        for item in world.work:
            if isinstance(item, Moving) and item.who == P and item.state != "over":
                world = land(world, item, self.held(world))
                item = replace(item, state="over")
            work.append(item)
        return replace(world, work=tuple(work))

    def _answer(self, world: World, who: int, effect: Token | Ended) -> World:
        slot = self._slot(world, who, effect.request_id)
        request_id = slot // 2
        if isinstance(effect, Token):
            if who == D and effect.index == 0:
                return self.up(world, slot, DecodeStarted(request_id, 0), last=False)
            return world
        if effect.outcome != "finished":
            status = 400 if effect.outcome == "refused" else 500
            kind: Any = "decode" if who else "prefill"
            return self.up(world, slot, LegFailed(request_id, 0, kind, status, effect.reason))
        if who == P:
            return self.up(world, slot, PrefillDone(request_id, 0))
        return self.up(world, slot, LegEnded(request_id, 0, effect.n_output))
