"""The live clock: never early, on either event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from twofold.live.clock import LoopClock
from twofold.types import NS_PER_MS, NS_PER_US

LOOPS = pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])


@LOOPS
def test_calls_come_in_order_and_never_early(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    clock = LoopClock()
    early_ns: list[int] = []
    order: list[int] = []

    async def run() -> None:
        done = asyncio.Event()
        start_ns = clock.now_ns() + NS_PER_MS

        def due(i: int, at_ns: int) -> Callable[[], None]:
            def call() -> None:
                early_ns.append(at_ns - clock.now_ns())
                order.append(i)
                if len(order) == 20:
                    done.set()

            return call

        for i in reversed(range(20)):
            at_ns = start_ns + i * 2_300 * NS_PER_US
            clock.call_at(at_ns, due(i, at_ns))
        await done.wait()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())
    assert order == list(range(20))
    assert max(early_ns) <= 0


@LOOPS
def test_sleep_lasts_until_the_time_and_a_cancelled_call_is_not_made(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    clock = LoopClock()
    called: list[str] = []

    async def run() -> None:
        at_ns = clock.now_ns() + 3_400 * NS_PER_US
        clock.call_at(clock.now_ns() + NS_PER_MS, lambda: called.append("cancelled")).cancel()
        clock.call_at(clock.now_ns() + NS_PER_MS, lambda: called.append("kept"))
        await clock.sleep_until(at_ns)
        assert clock.now_ns() >= at_ns
        await clock.sleep_until(0)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())
    assert called == ["kept"]
