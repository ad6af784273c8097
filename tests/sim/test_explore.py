"""Every order of events in the small: it ends, breaks nothing, and always has a way to the end."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.sim.support import SETTINGS
from twofold.core.engine import Engine
from twofold.core.router import Router
from twofold.core.worker import WorkerCore
from twofold.messages import Closed, DecodeStarted, RunStep, StepDone, Submit, Wake, WakeAt
from twofold.sim import explore as command
from twofold.sim.explore import PROMPTS, explore
from twofold.sim.explore_model import Model
from twofold.sim.explore_moves import at_end, moves
from twofold.sim.explore_reduce import Reduction
from twofold.sim.explore_state import Cores, canonical
from twofold.sim.explore_world import Leg, Sent, put
from twofold.sim.swarm_schedule import ALL_MODES


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("number", [0, 1])
def test_one_request_with_a_fault_anywhere(mode: str, number: int, caching: bool) -> None:
    """Leaving out orders that lead to the same leaves out no end."""
    model = Model(mode, PROMPTS[number : number + 1], caching=caching)
    full, reduced = explore(model, 1, reduced=False), explore(model, 1)
    assert full.is_clean, full
    assert reduced.is_clean, reduced
    assert full.n_states > 400
    assert reduced.n_states < full.n_states
    assert len(full.ends) > 15
    assert reduced.ends == full.ends


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_one_request_with_two_faults_anywhere(mode: str) -> None:
    found = explore(Model(mode, PROMPTS[:1]), 2)
    assert found.is_clean, found
    assert found.n_states > 1_500
    assert len(found.n_by_faults) == 3


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_two_requests_on_instant_legs_with_a_fault_anywhere(mode: str) -> None:
    """Which leaves out orders that differ at the gateway alone."""
    found = explore(Model(mode, PROMPTS, instant_legs=True), 1)
    assert found.is_clean, found
    assert found.n_states > 3_000


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_two_requests_in_every_order(mode: str) -> None:
    model = Model(mode, PROMPTS)
    full, reduced = explore(model, 0, reduced=False), explore(model, 0)
    assert full.is_clean, full
    assert reduced.is_clean, reduced
    assert len(full.ends) == 8
    assert reduced.ends == full.ends
    assert reduced.n_states < full.n_states


def test_two_requests_layer_by_layer() -> None:
    found = explore(Model("layerwise", PROMPTS), 0)
    assert found.is_clean, found
    assert len(found.ends) == 8


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_planted_wedge_is_found(
    mode: str, reduced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker never reads the long prompt when it comes second: nothing breaks, but nothing
    comes of it."""
    schedule = Engine.schedule

    def forgetful(engine: Engine, now_ns: int, out: Any) -> None:
        if not any((r.id, r.n_prompt, r.hold) == (1, 5, True) for r in engine.waiting):
            schedule(engine, now_ns, out)

    monkeypatch.setattr(Engine, "schedule", forgetful)
    found = explore(Model(mode, PROMPTS, deadlines=False), 0, reduced=reduced)
    assert found.violation == ""
    assert 0 < found.n_stuck < found.n_states
    assert found.ends
    assert found.path
    assert not found.is_clean


def test_an_answer_that_may_still_be_waited_for_is_not_passed_over() -> None:
    model = Model("push", PROMPTS[:1])
    world = model.arrive(model.start(1))
    name = world.legs[1].source[1] if world.legs[1] else -1
    early = replace(world, inboxes=((), (Sent(0, Closed(name, 0, valid=False)),)))
    assert Reduction(model).of(early) is None, "its request is still on the way"
    there = model.submit(replace(early, legs=put(early.legs, 1, Leg(0, source=(0, name)))), 1)
    assert Reduction(model).of(there) is None, "it is waited for"
    over = replace(early, legs=(early.legs[0], None), ended=(True,))
    chosen = Reduction(model).of(over)
    assert chosen is not None
    assert [(what, then.inboxes) for what, then in chosen] == [
        (f"D does not wait for {early.inboxes[1][0]}", ((), ()))
    ]


def test_what_the_router_hears_goes_first_only_if_that_makes_no_difference() -> None:
    model = Model("push", PROMPTS[:1])
    world = model.arrive(model.start(0))
    pending = Leg(0, 0, up=(DecodeStarted(0, 0),))
    started = replace(world, legs=(Leg(0, 0), pending))
    assert Reduction(model).of(started) is None, "the other leg may fail before"
    over = replace(world, legs=(Leg(0, 0, over=True), pending))
    chosen = Reduction(model).of(over)
    assert chosen is not None
    assert len(chosen) == 1
    assert Reduction(model).of(replace(over, faults=1)) is None, "the leg may be cut"
    both = replace(over, faults=1, legs=(over.legs[0], replace(pending, over=True)))
    chosen = Reduction(model).of(both)
    assert chosen is not None
    assert [then.faults for _, then in chosen] == [1, 0], "or the client may leave first"


def test_longer_answers_and_a_full_pool() -> None:
    """Three blocks: the second request has to wait for the first one's."""
    found = explore(Model("pull", PROMPTS, max_tokens=2, n_blocks=3, instant_legs=True), 0)
    assert found.is_clean, found


def test_a_search_that_is_too_large_says_so() -> None:
    found = explore(Model("pull", PROMPTS), 1, most_states=500)
    assert not found.complete
    assert not found.is_clean


def test_the_end_is_reached_by_taking_any_way() -> None:
    """The first way at each turn, without faults, ends after few steps."""
    model = Model("pull", PROMPTS[:1])
    world = model.start(0)
    for _ in range(60):
        if at_end(model, world):
            break
        world = next(then for _, then in moves(model, world))
    assert at_end(model, world)
    assert world.ended == (True,)


def _worker() -> WorkerCore:
    return WorkerCore(**SETTINGS)


def test_states_differ_by_what_will_be_and_not_by_what_was() -> None:
    early, late = _worker(), _worker()
    submit = Submit(request_id=0, tokens=(1, 2), max_tokens=1, time_left_ns=50)
    early.handle(submit, 0)
    late.handle(submit, 1000)
    assert canonical(early, 0) == canonical(late, 1000)
    assert canonical(early, 0) != canonical(late, 1001), "its deadline is nearer"
    early.handle(StepDone(1, ((0, 5),)), 10)
    assert canonical(early, 10) != canonical(late, 1010)
    assert canonical(Router(max_inflight=2), 0) == canonical(Router(max_inflight=2), 7)


def test_a_step_is_taken_once_and_time_goes_on_with_timers_only() -> None:
    cores = Cores(_worker, lambda core: None)
    born = cores.born()
    submit = Submit(request_id=0, tokens=(1, 2), max_tokens=1, time_left_ns=50)
    taken = cores.take(born, submit)
    assert cores.take(born, submit) is taken
    assert taken.effects == (RunStep(0, ((0, 0, 2),)),), "without its number, and without WakeAt"
    assert not any(isinstance(effect, WakeAt) for effect in taken.effects)
    assert cores.will_wake(taken.state)
    assert not cores.at_rest(taken.state)
    late = cores.take(taken.state, Wake())
    assert [type(effect).__name__ for effect in late.effects] == ["Ended"]
    ended = cores.take(late.state, StepDone(0, ((0, 5),)))
    assert cores.at_rest(ended.state)


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--requests", "1", "--faults", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(ALL_MODES)
    assert all("0 states without a way to the end, no violation" in line for line in lines)
    assert command.main(["--mode", "pull", "--most-states", "9"]) == 1
    assert "NOT COMPLETE" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        command.main(["--blocks", "2"])
    assert ended.value.code == 2
