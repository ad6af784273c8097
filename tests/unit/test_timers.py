"""Timers: many deadlines behind one wake."""

from __future__ import annotations

from copy import deepcopy

from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.core.timers import Timers

keys = st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 3))
operations = st.lists(
    st.one_of(
        st.tuples(st.just("set"), keys, st.integers(0, 50)),
        st.tuples(st.just("cancel"), keys, st.just(0)),
        st.tuples(st.just("pass"), keys, st.integers(0, 20)),
        st.tuples(st.just("early"), keys, st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(operations)
def test_each_deadline_is_told_once_and_in_time(
    steps: list[tuple[str, tuple[str, int], int]],
) -> None:
    timers, model = Timers(), dict[tuple[str, int], int]()
    now, wake = 0, None
    for what, key, value in steps:
        if what == "set":
            timers.set(key, now + value)
            model[key] = now + value
        elif what == "cancel":
            timers.cancel(key)
            model.pop(key, None)
        else:
            now += value
            # A driver's clock may be a hair early, so a wake may come before its time.
            if wake is not None and (wake <= now or what == "early"):
                wake = None
                again = deepcopy(timers)
                rearmed = again.rearm(now)
                due = timers.due(now)
                late = sorted((at, k) for k, at in model.items() if at <= now)
                assert due == [k for _, k in late]
                for k in due:
                    del model[k]
                # Nothing due: the short way does what the long one does, and else nothing.
                after = deepcopy(timers)
                assert rearmed == (None if due else after.arm())
                if rearmed is None:
                    assert again.due(now) == due
                assert again.arm() == after.arm()
        at = timers.arm()
        wake = at if at is not None else wake
        assert len(timers) == len(model)
        if model:
            assert wake is not None, "nothing will wake the core"
            assert wake <= max(now, min(model.values()))


def test_ties_leave_by_key() -> None:
    timers = Timers()
    for key in (("b", 1), ("a", 2), ("a", 1)):
        timers.set(key, 5)
    assert timers.due(5) == [("a", 1), ("a", 2), ("b", 1)]


def test_wake_that_comes_early_is_armed_again() -> None:
    timers = Timers()
    timers.set(("a", 1), 10)
    assert timers.arm() == 10
    assert timers.due(9) == []
    assert timers.arm() == 10


def test_pushing_a_deadline_back_costs_no_wake() -> None:
    timers = Timers()
    timers.set(("a", 1), 10)
    assert timers.arm() == 10
    timers.set(("a", 1), 20)
    assert timers.arm() is None
    assert timers.due(10) == []
    assert timers.arm() == 20
    assert timers.due(20) == [("a", 1)]
    assert timers.arm() is None


def test_moved_timers_do_not_pile_up() -> None:
    timers = Timers()
    for i in range(10_000):
        timers.set(("lease", i % 3), i)
    assert len(timers) == 3
    assert len(timers._heap) <= 65
    assert timers.due(10_000) == [("lease", 1), ("lease", 2), ("lease", 0)]
