"""What transformers itself answers, and the same from a Runner, for comparison."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.tiny import VOCAB_SIZE, cached_model
from twofold.device.runner import Row, Runner, Sampled
from twofold.device.weights import LoadedModel, load_model, quiet
from twofold.types import SamplingParams, ceil_div

BLOCK_SIZE = 8
N_OUTPUT = 10
N_TOP = 5
LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 3 * BLOCK_SIZE + 5)
GREEDY = SamplingParams(temperature=0.0, logprobs=N_TOP)


class Answer(NamedTuple):
    """Greedy tokens, and for each the largest log-probabilities as {token: value}."""

    tokens: list[int]
    top: list[dict[int, float]]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}:{i}").randrange(3, VOCAB_SIZE) for i in range(length)]


@functools.cache
def loaded(family: str) -> LoadedModel:
    return load_model(cached_model(family))


@functools.cache
def _reference_model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    with quiet():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@functools.cache
def expected(family: str, length: int, seed: int = 0, n_output: int = N_OUTPUT) -> Answer:
    """The answer of transformers' own `generate`, with its own attention and cache."""
    return expected_at(cached_model(family), prompt_of(length, seed), n_output)


def expected_at(path: Path, prompt: list[int], n_output: int = N_OUTPUT) -> Answer:
    with quiet():
        output = _reference_model(path).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=n_output,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    top = []
    for logits in output.logits:
        best = logits[0].log_softmax(-1).topk(N_TOP)
        top.append(dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
    return Answer(output.sequences[0, len(prompt) :].tolist(), top)


class Generation:
    """One request as a core would run it: its ids, its block table, how far it is computed."""

    def __init__(
        self, prompt: Sequence[int], blocks: Sequence[int], params: SamplingParams
    ) -> None:
        self.ids = list(prompt)
        self.n_prompt = len(self.ids)
        self.blocks = list(blocks)
        self.params = params
        self.computed = 0
        self.sampled: list[Sampled] = []

    def row(self, most: int) -> Row:
        end = min(len(self.ids), self.computed + most)
        return Row(
            tokens=self.ids[self.computed : end],
            start=self.computed,
            blocks=self.blocks,
            sample=end == len(self.ids),
            params=self.params,
            history=self.ids,
            n_prompt=self.n_prompt,
        )

    def take(self, row: Row, sampled: Sampled | None) -> None:
        self.computed += len(row.tokens)
        assert (sampled is not None) == row.sample
        if sampled is not None:
            self.ids.append(sampled.token)
            self.sampled.append(sampled)

    def answer(self) -> Answer:
        return Answer([s.token for s in self.sampled], [dict(s.top) for s in self.sampled])


def shuffled_blocks(count: int, seed: int = 0) -> list[int]:
    """Block ids in no order, so that nothing works by blocks lying side by side."""
    blocks = list(range(count))
    random.Random(seed).shuffle(blocks)
    return blocks


def make_sequence(
    prompt: Sequence[int],
    free: list[int],
    params: SamplingParams = GREEDY,
    n_output: int = N_OUTPUT,
) -> Generation:
    """A sequence with blocks taken off `free` for its prompt and `n_output` tokens."""
    need = ceil_div(len(prompt) + n_output, BLOCK_SIZE)
    taken, free[:need] = free[:need], []
    return Generation(prompt, taken, params)


def generate(
    runner: Runner, sequences: list[Generation], n_output: int = N_OUTPUT, chunk: int = 10_000
) -> None:
    """Run all until each has `n_output` tokens, each step as one batch of whatever is left."""
    while live := [s for s in sequences if len(s.sampled) < n_output]:
        rows = [sequence.row(chunk) for sequence in live]
        for sequence, row, sampled in zip(live, rows, runner.run(rows), strict=True):
            sequence.take(row, sampled)


def assert_same(got: Answer, want: Answer) -> None:
    assert got.tokens == want.tokens
    for step, (mine, theirs) in enumerate(zip(got.top, want.top, strict=True)):
        assert set(mine) == set(theirs), f"step {step}"
        worst = max(abs(mine[token] - theirs[token]) for token in mine)
        assert worst < 1e-4, f"step {step}: logprobs differ by {worst}"
