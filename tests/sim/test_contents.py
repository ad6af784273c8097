"""KV of simulated blocks differs by layers: what is computed, copied or damaged in some is seen."""

from __future__ import annotations

import pytest

from tests.sim.support import SETTINGS
from twofold.core.blocks import BlockPool, Hold
from twofold.core.worker import WorkerCore
from twofold.messages import RunStep, Submit
from twofold.sim.contents import Contents

LAYERS = 4


def computing() -> tuple[WorkerCore, RunStep, Contents]:
    """A worker in the middle of a step over one prompt."""
    core = WorkerCore(**SETTINGS)
    size = core.pool.block_size
    submit = Submit(request_id=0, tokens=tuple(range(2 * size)), max_tokens=2)
    step = next(e for e in core.handle(submit, 0) if isinstance(e, RunStep))
    return core, step, Contents(core.pool, LAYERS)


def receiving(n: int, size: int) -> Contents:
    """Blocks that a handoff holds."""
    pool = BlockPool(n, size)
    blocks = pool.allocate(n)
    pool.hold(Hold(owner=1, generation=0, peer="p", expiry_ns=1, blocks=tuple(blocks)))
    return Contents(pool, LAYERS)


def test_layers_come_one_after_another_and_make_the_same_in_the_end() -> None:
    core, step, slow = computing()
    blocks = core.engine.row(0).blocks
    seen = [slow.checksums(blocks)]
    for end in range(1, LAYERS):
        slow.write_layers(core.engine, step, end)
        seen.append(slow.checksums(blocks))
        with pytest.raises(AssertionError, match="wrong KV"):
            slow._compare(core.engine, 0, 1)
    slow.write(core.engine, step)
    seen.append(slow.checksums(blocks))
    assert len(set(seen)) == LAYERS + 1, "a layer more makes no difference"
    at_once = Contents(core.pool, LAYERS)
    at_once.write(core.engine, step)
    assert at_once.checksums(blocks) == seen[-1]


def test_a_copy_of_some_layers_leaves_the_others() -> None:
    core, step, source = computing()
    source.write(core.engine, step)
    theirs = core.engine.row(0).blocks[0]
    target = receiving(2, core.pool.block_size)
    (right,) = source.checksums([theirs])
    (first,) = target.copy(source, [(theirs, 0)], (0, 3))
    assert first != right
    assert target.checksums([1]) == receiving(2, core.pool.block_size).checksums([1])
    assert target.copy(source, [(theirs, 0)], (3, LAYERS)) == (right,)
    assert target.copy(source, [(theirs, 1)]) == (right,)


def test_a_layer_that_is_sent_too_early_is_not_there() -> None:
    core, step, source = computing()
    theirs = core.engine.row(0).blocks[0]
    target = receiving(1, core.pool.block_size)
    source.write_layers(core.engine, step, 1)
    target.copy(source, [(theirs, 0)], (0, 2))
    source.write(core.engine, step)
    copied = target.copy(source, [(theirs, 0)], (2, LAYERS))
    assert copied != source.checksums([theirs])
    assert target.copy(source, [(theirs, 0)], (1, 2)) == source.checksums([theirs])


@pytest.mark.parametrize("layer", range(LAYERS))
def test_damage_to_any_layer_is_seen(layer: int) -> None:
    core, step, source = computing()
    source.write(core.engine, step)
    block = core.engine.row(0).blocks[0]
    (right,) = source.checksums([block])
    assert source.flip(block, layer) != right
    with pytest.raises(AssertionError, match="wrong KV"):
        source.verify(core.engine, RunStep(2, ((0, 1, 1),)))
    assert source.flip(block, layer) == right
    source.verify(core.engine, RunStep(2, ((0, 1, 1),)))


def test_nothing_lands_where_no_handoff_waits() -> None:
    core, step, source = computing()
    source.write(core.engine, step)
    target = Contents(BlockPool(1, core.pool.block_size), LAYERS)
    with pytest.raises(AssertionError, match="which no handoff holds"):
        target.copy(source, [(core.engine.row(0).blocks[0], 0)], (1, 2))
