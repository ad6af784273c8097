"""Tokens and logprobs of the Runner equal transformers' own, however the work is cut up."""

from __future__ import annotations

import numpy as np
import pytest

from tests.device.reference import (
    BLOCK_SIZE,
    GREEDY,
    LENGTHS,
    N_OUTPUT,
    Generation,
    assert_same,
    expected,
    generate,
    loaded,
    make_sequence,
    prompt_of,
    shuffled_blocks,
)
from tests.tiny import FAMILIES
from twofold.device.runner import Row, Runner
from twofold.types import SamplingParams

N_BLOCKS = 64


def runner_of(family: str, buffer: memoryview | None = None) -> Runner:
    return Runner(
        loaded(family), num_blocks=N_BLOCKS, block_size=BLOCK_SIZE, buffer=buffer, threads=1
    )


def nan_buffer(family: str) -> memoryview:
    """A pool's memory as the worst broken transfer may leave it."""
    size = N_BLOCKS * runner_of(family).bytes_per_block
    return memoryview(bytearray(b"\xff" * size))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_in_one_go(family: str, length: int) -> None:
    sequence = make_sequence(prompt_of(length), shuffled_blocks(N_BLOCKS))
    generate(runner_of(family), [sequence])
    assert_same(sequence.answer(), expected(family, length))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 5, BLOCK_SIZE, 13])
def test_prefill_in_chunks(family: str, chunk: int) -> None:
    length = 6 * BLOCK_SIZE + 5
    sequence = make_sequence(prompt_of(length), shuffled_blocks(N_BLOCKS))
    generate(runner_of(family), [sequence], chunk=chunk)
    assert_same(sequence.answer(), expected(family, length))


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_in_a_pool_full_of_nan(family: str) -> None:
    """Sequences join one by one, so that steps mix whole prompts, chunks and decoding."""
    runner, free = runner_of(family, nan_buffer(family)), shuffled_blocks(N_BLOCKS)
    lengths = (29, 1, 8, 53, 16, 7)
    sequences = [make_sequence(prompt_of(n, seed=n), free) for n in lengths]
    joined: list[Generation] = []
    for sequence in sequences:
        joined.append(sequence)
        for _ in range(2):
            live = [s for s in joined if len(s.sampled) < N_OUTPUT]
            rows = [s.row(17) for s in live]
            for one, row, sampled in zip(live, rows, runner.run(rows), strict=True):
                one.take(row, sampled)
    generate(runner, sequences, chunk=17)
    for length, sequence in zip(lengths, sequences, strict=True):
        assert_same(sequence.answer(), expected(family, length, seed=length))


def test_decode_rows_of_very_different_contexts() -> None:
    """Contexts from 1 to 300 tokens are read in several groups; the answers go back in order."""
    family, lengths = "llama", (3, 300, 9, 150, 1, 40)
    runner = Runner(loaded(family), num_blocks=128, block_size=BLOCK_SIZE, threads=1)
    free = shuffled_blocks(128)
    sequences = [make_sequence(prompt_of(n), free) for n in lengths]
    generate(runner, sequences)
    for length, sequence in zip(lengths, sequences, strict=True):
        assert_same(sequence.answer(), expected(family, length))


@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
def test_prefix_computed_by_another_sequence(family: str) -> None:
    """A sequence starts in the middle, on full blocks that another one wrote."""
    runner, free, length = runner_of(family), shuffled_blocks(N_BLOCKS), 5 * BLOCK_SIZE + 3
    first = make_sequence(prompt_of(length), free)
    generate(runner, [first])
    second = make_sequence(prompt_of(length), free)
    second.blocks[:5] = first.blocks[:5]
    second.computed = 5 * BLOCK_SIZE
    generate(runner, [second])
    assert_same(second.answer(), expected(family, length))


@pytest.mark.parametrize("family", FAMILIES)
def test_handed_over_blocks_give_the_same_answer(family: str) -> None:
    """Blocks are copied as bytes, to other ids of another pool; decode computes the last token."""
    length = 3 * BLOCK_SIZE + 5
    size = N_BLOCKS * runner_of(family).bytes_per_block
    source, target = bytearray(size), bytearray(b"\xff" * size)
    prefill = Runner(
        loaded(family), num_blocks=N_BLOCKS, block_size=BLOCK_SIZE, buffer=memoryview(source)
    )
    decode = Runner(
        loaded(family),
        num_blocks=N_BLOCKS,
        block_size=BLOCK_SIZE,
        buffer=memoryview(target),
        staged=True,
    )
    first = make_sequence(prompt_of(length), shuffled_blocks(N_BLOCKS, seed=1))
    prefill.run([first.row(length)])
    second = make_sequence(prompt_of(length), shuffled_blocks(N_BLOCKS, seed=2))
    step = prefill.bytes_per_block
    for theirs, ours in zip(first.blocks[:4], second.blocks[:4], strict=True):
        target[ours * step : (ours + 1) * step] = source[theirs * step : (theirs + 1) * step]
    decode.import_blocks(second.blocks[:4])
    second.computed = length - 1
    generate(decode, [second])
    assert_same(second.answer(), expected(family, length))
    decode.export_blocks(second.blocks[:1])
    ours, theirs = second.blocks[0], first.blocks[0]
    assert target[ours * step :][:step] == source[theirs * step :][:step]


def test_rows_that_do_not_sample_answer_none_and_no_rows_nothing() -> None:
    runner = runner_of("llama")
    assert runner.run([]) == []
    quiet_row = Row(tokens=(5, 6), start=0, blocks=(3,), sample=False)
    assert runner.run([quiet_row]) == [None]
    asked = Row((7,), 0, (4,), True, GREEDY, (7,), 1)
    answers = runner.run([quiet_row, asked, quiet_row])
    assert answers[0] is None is answers[2]
    assert answers[1] is not None


def test_forbidden_ids_are_not_sampled() -> None:
    runner, want = runner_of("llama"), expected("llama", 8).tokens[0]
    prompt = prompt_of(8)
    row = Row(prompt, 0, (0,), True, GREEDY, prompt, 8)
    free, barred = runner.run([row])[0], runner.run([row._replace(forbid=(want,))])[0]
    assert free is not None
    assert barred is not None
    assert free.token == want != barred.token
    assert barred.top == free.top, "logprobs are of the raw distribution"


def test_seeded_sampling_does_not_depend_on_the_batch() -> None:
    runner, free = runner_of("qwen3"), shuffled_blocks(N_BLOCKS)
    params = SamplingParams(temperature=1.3, seed=11, top_p=0.95)
    alone = make_sequence(prompt_of(20), free, params)
    generate(runner, [alone])
    others = [
        make_sequence(prompt_of(9 + i, seed=i), free, SamplingParams(seed=i)) for i in range(4)
    ]
    together = make_sequence(prompt_of(20), free, params)
    generate(runner, [*others[:2], together, *others[2:]], chunk=6)
    assert [s.token for s in together.sampled] == [s.token for s in alone.sampled]
    other_seed = make_sequence(prompt_of(20), free, SamplingParams(temperature=1.3, seed=12))
    generate(runner, [other_seed])
    assert [s.token for s in other_seed.sampled] != [s.token for s in alone.sampled]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row((), 0, (1,), False), "row of 0 tokens from 0"),
        (Row((1,), -1, (1,), False), "row of 1 tokens from -1"),
        (Row((1,) * 9, 0, (1,), False), "1 blocks of 8 cannot hold 9 tokens"),
        (Row((1,), 0, (N_BLOCKS,), False), "block ids must be from 0 to 63"),
        (Row((1,), 0, (-1,), False), "block ids must be from 0 to 63"),
        (Row((640,), 0, (1,), False), "token ids must be from 0 to 639"),
        (Row((-1,), 0, (1,), False), "token ids must be from 0 to 639"),
    ],
)
def test_bad_rows_are_refused_and_the_runner_lives_on(row: Row, message: str) -> None:
    runner = runner_of("llama")
    with pytest.raises(ValueError, match=message):
        runner.run([row])
    sequence = make_sequence(prompt_of(8), shuffled_blocks(N_BLOCKS))
    generate(runner, [sequence])
    assert_same(sequence.answer(), expected("llama", 8))


def test_threads_are_set() -> None:
    import torch

    before = torch.get_num_threads()
    try:
        Runner(loaded("llama"), num_blocks=1, block_size=8, threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_close_lets_go_of_the_buffer() -> None:
    memory = bytearray(4 * runner_of("llama").bytes_per_block)
    with memoryview(memory) as view:
        runner = Runner(loaded("llama"), num_blocks=4, block_size=BLOCK_SIZE, buffer=view)
        runner.run([Row((5, 6, 7), 0, (2,), False)])
        step = runner.bytes_per_block
        written = np.frombuffer(memory, dtype=np.float32).reshape(4, -1).any(axis=1)
        assert written.tolist() == [False, False, True, False]
        assert view.nbytes == 4 * step
        del written
        runner.close()
    memory.append(0)  # a BufferError while anything still looks into it
