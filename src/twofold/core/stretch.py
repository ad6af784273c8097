"""Crossing many decode steps at once, exactly.

As long as every step is the same decode step (nobody ends, arrives, is placed or lacks a block),
what k of them do to an engine is known without running them. A simulator asks `steps_ahead` how
far that holds, and `advance`s whenever something is about to look at the engine.
"""

from __future__ import annotations

from twofold.core.abridged import Abridged
from twofold.core.engine import Engine
from twofold.core.request import Request
from twofold.messages import RunStep
from twofold.types import ceil_div


def steps_ahead(engine: Engine) -> int:
    """How many steps, the one in flight included, only decode the same requests.

    In the last of them a request may end; 1 when nothing can be said beyond the step in flight.
    """
    step, running = engine.step, engine.running
    if step is None or len(step.work) != len(running) or not engine.is_settled:
        return 1
    if engine.max_steps > 1:  # a pipeline's steps are not alike: the batch is spread over them
        return 1
    size = engine.pool.block_size
    most = 1 << 62
    for request in running:
        done = request.n_known - request.n_prompt
        if request.n_known - request.computed != 1 or done < 1 or request.stop_token_ids:
            return 1
        left = request.max_tokens - done
        if left < most:
            most = left
    if most > 1 and not _has_blocks(running, most, engine.pool.available, size):
        low = 1  # the largest number of steps for which there are blocks
        while most - low > 1:
            middle = (low + most) // 2
            if _has_blocks(running, middle, engine.pool.available, size):
                low = middle
            else:
                most = middle
        return low
    return most


def _has_blocks(running: list[Request], steps: int, available: int, size: int) -> bool:
    for request in running:
        available -= ceil_div(request.computed + steps, size) - len(request.blocks)
    return available >= 0


def advance(engine: Engine, k: int, start_ns: int) -> None:
    """Leave the engine as `k` results would, fewer than `steps_ahead`, the next step in flight.

    `start_ns` is when that one began, by the engine's clock.
    Blocks are taken in the order in which single steps take them, because eviction follows it.
    The tokens' ids are of no consequence: only abridged requests can be advanced.
    """
    assert engine.step is not None
    size = engine.pool.block_size
    crossings: list[tuple[int, int, int, Request]] = []
    for order, request in enumerate(engine.running):
        old = request.computed
        first = size - old % size
        for i in range(first, k + 1, size):
            crossings.append((i, 0, order, request))
            if (old + i) // size >= len(request.blocks):
                crossings.append((i, 1, order, request))
        assert isinstance(request.tokens, Abridged)
        request.tokens.grow(k)
        request.n_known += k
    if crossings:
        crossings.sort(key=_step_order)
        _cross(engine, crossings, size)
    work = []
    for request in engine.running:
        request.computed += k
        work.append((request.id, request.computed, 1))
    engine.n_steps += k
    engine.in_flight[0] = RunStep(engine.n_steps, tuple(work))
    if engine.chunks is not None:
        engine.chunks.went_on(start_ns)


def _step_order(crossing: tuple[int, int, int, Request]) -> tuple[int, int, int]:
    return crossing[:3]


def _cross(engine: Engine, crossings: list[tuple[int, int, int, Request]], size: int) -> None:
    """Per step: remember the blocks that became full, then take those that follow them."""
    for i, takes, _, request in crossings:
        if takes:
            request.blocks += engine.pool.allocate(1)
        else:
            index = (request.computed + i) // size - 1
            engine.pool.remember(
                request.blocks, index, index + 1, request.tokens, request.salt, request.links
            )
