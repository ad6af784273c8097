"""Sampling against straightforward references in numpy and plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.device.sampling import (
    draw_tokens,
    keep_min_p_,
    keep_top_k_,
    keep_top_p_,
    penalise_,
    sample,
    uniform,
)
from twofold.types import SamplingParams


@dataclass(frozen=True)
class Asked:
    params: SamplingParams
    history: Sequence[int] = ()
    n_prompt: int = 0
    forbid: Sequence[int] = ()


GREEDY = SamplingParams(temperature=0.0)
# Multiples of 1/4 make ties common; each is exact in float32.
logit_rows = st.lists(st.integers(-40, 40).map(lambda i: i / 4), min_size=2, max_size=24)


def softmax(row: Sequence[float]) -> np.ndarray:
    weights = np.exp(np.asarray(row, dtype=np.float64) - max(row))
    return np.asarray(weights / weights.sum())


def kept(logits: torch.Tensor) -> set[int]:
    return {i for i, value in enumerate(logits.tolist()) if value > -math.inf}


# ------------------------------------------------------------------------------------ filters


@given(logit_rows, st.integers(0, 30))
@settings(max_examples=150, deadline=None)
def test_top_k_keeps_the_largest_and_their_ties(row: list[float], k: int) -> None:
    logits = torch.tensor([row, row])
    keep_top_k_(logits, torch.tensor([k, 0]))
    edge = sorted(row, reverse=True)[k - 1] if 0 < k <= len(row) else -math.inf
    assert kept(logits[0]) == {i for i, value in enumerate(row) if value >= edge}
    assert kept(logits[1]) == set(range(len(row))), "0 switches the filter off"


@given(logit_rows, st.floats(0.01, 0.999))
@settings(max_examples=150, deadline=None)
def test_top_p_keeps_the_fewest_that_reach_it(row: list[float], p: float) -> None:
    logits = torch.tensor([row, row])
    keep_top_p_(logits, torch.tensor([p, 1.0]))
    got, probabilities = kept(logits[0]), softmax(row)
    edge = min(row[i] for i in got)
    assert got == {i for i, value in enumerate(row) if value >= edge}, "largest, and ties"
    assert sum(probabilities[i] for i in got) >= p - 1e-5
    assert sum(probabilities[i] for i in got if row[i] > edge) < p + 1e-5, "no more than needed"
    assert kept(logits[1]) == set(range(len(row))), "1 switches the filter off"


def test_top_p_over_a_vocabulary_larger_than_what_is_looked_at_first() -> None:
    flat = torch.zeros(2, 5000)
    flat[:, :3000] = torch.linspace(1.0, 0.5, 3000)
    keep_top_p_(flat, torch.tensor([0.5, 0.001]))
    probabilities = softmax([*torch.linspace(1.0, 0.5, 3000).tolist(), *[0.0] * 2000])
    want = int(np.searchsorted(np.cumsum(probabilities), 0.5)) + 1
    assert abs(len(kept(flat[0])) - want) <= 1
    assert want > 1024
    assert 0 < len(kept(flat[1])) < 10


@given(logit_rows, st.floats(0.0, 1.0))
@settings(max_examples=150, deadline=None)
def test_min_p_is_relative_to_the_likeliest(row: list[float], p: float) -> None:
    logits = torch.tensor([row])
    keep_min_p_(logits, torch.tensor([p]))
    probabilities = softmax(row)
    for i, share in enumerate(probabilities / probabilities.max()):
        if abs(share - p) > 1e-5:
            assert (i in kept(logits[0])) == (share >= p)


# ---------------------------------------------------------------------------------- penalties


@given(
    logit_rows,
    st.lists(st.integers(0, 23), max_size=30),
    st.integers(0, 30),
    st.sampled_from([1.0, 1.5, 0.5]),
    st.sampled_from([0.0, 0.75, -0.5]),
    st.sampled_from([0.0, 0.25, -0.25]),
)
@settings(max_examples=150, deadline=None)
def test_penalties(
    row: list[float],
    history: list[int],
    n_prompt: int,
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    history = [token % len(row) for token in history]
    params = SamplingParams(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
    )
    logits = torch.tensor(row)
    penalise_(logits, Asked(params, history, n_prompt))
    output = history[n_prompt:]
    for token, value in enumerate(row):
        want = value
        if token in history:
            want = want / repetition if want > 0 else want * repetition
        if token in output:
            want -= presence + frequency * output.count(token)
        assert logits[token].item() == pytest.approx(want, abs=1e-5)


# --------------------------------------------------------------------------------- the choice


def test_greedy_takes_the_largest_and_the_lowest_id_on_a_tie() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [-1.0, -1.0, -1.0, -1.0]])
    assert [s.token for s in sample(logits, [Asked(GREEDY)] * 2)] == [1, 0]


def test_forbidden_tokens_and_raw_logprobs() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    before = logits.clone()
    params = SamplingParams(temperature=0.0, logprobs=2, repetition_penalty=3.0)
    (got,) = sample(logits, [Asked(params, history=(0, 1), n_prompt=2, forbid=(0,))])
    raw = np.log(softmax(logits[0].tolist()))
    assert got.token == 1
    assert got.logprob == pytest.approx(raw[1], abs=1e-6)
    assert [token for token, _ in got.top] == [0, 1]
    assert [value for _, value in got.top] == pytest.approx(raw[:2].tolist(), abs=1e-6)
    assert torch.equal(logits, before), "the caller's logits stay as they are"


def test_logprobs_zero_gives_the_chosen_one_only_and_none_nothing() -> None:
    logits = torch.tensor([[2.0, 1.0], [2.0, 1.0]])
    zero, none = sample(logits, [Asked(SamplingParams(temperature=0.0, logprobs=0)), Asked(GREEDY)])
    assert zero.logprob is not None
    assert zero.top == ()
    assert none.logprob is None


def test_more_alternatives_than_there_are_tokens() -> None:
    params = SamplingParams(temperature=0.0, logprobs=20)
    (got,) = sample(torch.tensor([[1.0, 1.0, 2.0]]), [Asked(params)])
    assert [token for token, _ in got.top] == [2, 0, 1]


@given(
    st.lists(logit_rows, min_size=1, max_size=4),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 5),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([1.0, 0.9, 0.3]),
    st.sampled_from([0.0, 0.2]),
)
@settings(max_examples=150, deadline=None)
def test_a_token_is_the_same_alone_and_in_any_batch(
    rows: list[list[float]],
    seed: int,
    n_output: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    width = max(len(row) for row in rows)
    logits = torch.tensor([row + [-50.0] * (width - len(row)) for row in rows])
    asked = [
        Asked(
            SamplingParams(
                temperature=temperature, seed=seed, top_k=top_k, top_p=top_p, min_p=min_p
            ),
            history=(0,) * (n_output + i),
        )
        for i in range(len(rows))
    ]
    together = [s.token for s in sample(logits, asked)]
    alone = [sample(logits[i : i + 1], asked[i : i + 1])[0].token for i in range(len(rows))]
    other = Asked(SamplingParams(seed=1), history=(1, 2, 3))
    padded = sample(
        torch.cat([torch.zeros(1, width), logits, torch.ones(1, width)]), [other, *asked, other]
    )
    assert together == alone == [s.token for s in padded[1:-1]]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_distribution(temperature: float) -> None:
    row, count = [2.0, 1.0, 0.0, -1.0, -math.inf], 4000
    params = SamplingParams(temperature=temperature, seed=5)
    asked = [Asked(params, history=(0,) * i) for i in range(count)]
    tokens = draw_tokens(torch.tensor([row]).expand(count, -1), asked).tolist()
    want = softmax([value / temperature for value in row[:4]])
    got = np.bincount(tokens, minlength=5) / count
    assert got[4] == 0
    assert np.abs(got[:4] - want).max() < 0.025


def test_temperature_near_zero_is_greedy_and_finite() -> None:
    logits = torch.tensor([[100.0, 99.0, -100.0]] * 3)
    heats = (1e-3, 1e-12, 1e-320)
    asked = [Asked(SamplingParams(temperature=heat, seed=9)) for heat in heats]
    assert [s.token for s in sample(logits, asked)] == [0, 0, 0]


def test_numbers_are_uniform_and_depend_on_seed_and_index() -> None:
    numbers = np.array([[uniform(seed, i) for i in range(200)] for seed in range(-20, 20)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert len(np.unique(numbers)) == numbers.size
    counts = np.histogram(numbers, bins=10, range=(0, 1))[0]
    assert abs(counts / numbers.size - 0.1).max() < 0.012
    assert abs(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.03


def test_logits_that_are_no_numbers_are_an_error() -> None:
    with pytest.raises(ArithmeticError, match="not finite"):
        sample(torch.tensor([[0.0, math.nan]]), [Asked(GREEDY)])


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 8), []) == []
