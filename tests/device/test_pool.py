from __future__ import annotations

from typing import Any

import pytest
import torch

from twofold.device.pool import KVPool

SHAPE: dict[str, Any] = {
    "num_blocks": 5,
    "layers": 3,
    "block_size": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "dtype": torch.float32,
    "device": torch.device("cpu"),
}
BLOCK_BYTES = 3 * 2 * 4 * 2 * 8 * 4


def test_a_block_is_one_run_of_the_buffers_bytes() -> None:
    memory = bytearray(5 * BLOCK_BYTES)
    pool = KVPool(**SHAPE, buffer=memoryview(memory))
    assert pool.bytes_per_block == BLOCK_BYTES
    pool.blocks[3] = 1.0
    whole = [any(memory[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]) for i in range(5)]
    assert whole == [False, False, False, True, False]
    assert bytes(memory[3 * BLOCK_BYTES : 4 * BLOCK_BYTES]) == pool.blocks[3].numpy().tobytes()


def test_rows_and_slots_are_views_in_the_order_documented() -> None:
    pool = KVPool(**SHAPE)
    block, layer, value, offset = 2, 1, 1, 3
    pool.slots[((block * 3 + layer) * 2 + value) * 4 + offset] = 7.0
    assert bool((pool.blocks[block, layer, value, offset] == 7.0).all())
    assert float(pool.blocks.sum()) == 7.0 * 16
    assert float(pool.rows[(block * 3 + layer) * 2 + value].sum()) == 7.0 * 16


def test_unstaged_export_and_import_do_nothing() -> None:
    pool = KVPool(**SHAPE, buffer=memoryview(bytearray(5 * BLOCK_BYTES)))
    pool.blocks[1] = 2.0
    pool.export_blocks([1])
    pool.import_blocks([1])
    assert bool((pool.blocks[1] == 2.0).all())


def test_staged_blocks_pass_only_when_told() -> None:
    memory = bytearray(5 * BLOCK_BYTES)
    pool = KVPool(**SHAPE, buffer=memoryview(memory), staged=True)
    pool.blocks[1], pool.blocks[4] = 1.5, 2.5
    assert not any(memory)
    pool.export_blocks([4])
    assert not any(memory[: 4 * BLOCK_BYTES])
    assert bytes(memory[4 * BLOCK_BYTES :]) == pool.blocks[4].numpy().tobytes()
    memory[: 2 * BLOCK_BYTES] = memory[3 * BLOCK_BYTES :]
    pool.import_blocks([1])
    assert bool((pool.blocks[1] == 2.5).all())
    assert not pool.blocks[0].any()


def test_without_a_buffer_there_is_nothing_to_export_to() -> None:
    pool = KVPool(**SHAPE, staged=True)
    pool.export_blocks([0])
    pool.import_blocks([0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buffer": memoryview(bytes(5 * BLOCK_BYTES))}, "read-only"),
        ({"buffer": memoryview(bytearray(5 * BLOCK_BYTES - 1))}, "the pool needs 7680"),
        ({"num_blocks": 0}, "at least 1"),
    ],
)
def test_bad_buffers_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVPool(**{**SHAPE, **change})


def test_too_little_memory_on_the_device_is_told_with_the_bytes() -> None:
    with pytest.raises(MemoryError, match=rf"needs {2**40 * BLOCK_BYTES} bytes of memory on cpu: "):
        KVPool(**SHAPE | {"num_blocks": 2**40})
