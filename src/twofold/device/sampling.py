"""Choosing tokens from logits: penalties, filters, seeded draws and log-probabilities.

In this order: log-probabilities of the raw distribution are set aside (as vLLM reports them:
before anything below); forbidden ids; repetition, presence and frequency penalties; temperature;
min-p; top-k; top-p over what is left, renormalised; the draw. Temperature 0 takes the largest
logit, the lowest id on a tie. The filters keep ties at their edge, so that no outcome hangs on
how equal logits were sorted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch

from twofold.types import SamplingParams

_MASK64: Final = (1 << 64) - 1
_COLDEST: Final = 1e-9
"""Lowest temperature that is told apart from others: float32 cannot divide by much less."""

_HEAD: Final = 1024
"""Largest tokens that top-p looks at before it sorts the whole vocabulary."""


class Sampled(NamedTuple):
    """One token. `logprob` is None unless asked for; `top` has (token, logprob), best first."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Draw(Protocol):
    """What sampling reads of a row: see `Row`."""

    @property
    def params(self) -> SamplingParams: ...  # noqa: D102
    @property
    def history(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def n_prompt(self) -> int: ...  # noqa: D102
    @property
    def forbid(self) -> Sequence[int]: ...  # noqa: D102


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on `seed` and `index` alone (splitmix64, two rounds)."""
    state = _mix(seed & _MASK64)
    return (_mix((state + index) & _MASK64) >> 12) * 2.0**-52


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def penalise_(logits: torch.Tensor, draw: Draw) -> None:
    """Apply one row's penalties to its logits `[V]`, in place.

    Repetition counts prompt and output: positive logits are divided by it, others multiplied.
    Presence is taken off once and frequency once per occurrence, for tokens of the output.
    """
    params = draw.params
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.asarray(draw.history, dtype=np.int64)))
        seen = seen.to(logits.device)
        old, by = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(old > 0, old / by, old * by)
    if params.presence_penalty or params.frequency_penalty:
        output = np.asarray(draw.history[draw.n_prompt :], dtype=np.int64)
        ids, counts = np.unique(output, return_counts=True)
        off = params.presence_penalty + params.frequency_penalty * counts
        taken = torch.from_numpy(off).to(logits.device, logits.dtype)
        logits[torch.from_numpy(ids).to(logits.device)] -= taken


def keep_min_p_(logits: torch.Tensor, min_p: torch.Tensor) -> None:
    """Drop, in each row of `[N, V]`, tokens less likely than `min_p` times the likeliest."""
    floor = logits.amax(-1, keepdim=True) + min_p.log()[:, None]
    logits.masked_fill_(logits < floor, -math.inf)


def keep_top_k_(logits: torch.Tensor, top_k: torch.Tensor) -> None:
    """Keep the `top_k` largest of each row of `[N, V]` and ties with the last; 0 keeps all."""
    vocabulary = logits.shape[-1]
    k = torch.where(top_k <= 0, vocabulary, top_k).clamp_(max=vocabulary)
    widest = int(torch.where(k == vocabulary, 1, k).max())
    values = logits.topk(widest, -1).values
    floor = values.gather(-1, (k.clamp(max=widest) - 1)[:, None])
    floor.masked_fill_((k == vocabulary)[:, None], -math.inf)
    logits.masked_fill_(logits < floor, -math.inf)


def keep_top_p_(logits: torch.Tensor, top_p: torch.Tensor) -> None:
    """Keep the fewest largest of each row of `[N, V]` that reach `top_p`, and ties; 1 keeps all."""
    total = logits.logsumexp(-1, keepdim=True)
    for width in (min(_HEAD, logits.shape[-1]), logits.shape[-1]):
        values = logits.topk(width, -1).values
        probabilities = (values - total).exp()
        sums = probabilities.cumsum(-1)
        if width == logits.shape[-1] or bool((sums[:, -1] >= top_p).logical_or(top_p >= 1).all()):
            break
    kept = (sums - probabilities < top_p[:, None]).sum(-1, keepdim=True).clamp_(min=1)
    floor = values.gather(-1, kept - 1).masked_fill_((top_p >= 1)[:, None], -math.inf)
    logits.masked_fill_(logits < floor, -math.inf)


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)


def draw_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Draw one token per row of `[N, V]`, `[N]` int64: filters, then inverse transform by id."""
    params = [draw.params for draw in draws]
    heat = _column([max(p.temperature, _COLDEST) for p in params], logits)[:, None]
    # With the largest at zero, no temperature overflows.
    logits = (logits - logits.amax(-1, keepdim=True)) / heat
    if any(p.min_p > 0 for p in params):
        keep_min_p_(logits, _column([p.min_p for p in params], logits))
    if any(p.top_k > 0 for p in params):
        keep_top_k_(logits, torch.tensor([p.top_k for p in params], device=logits.device))
    if any(p.top_p < 1 for p in params):
        keep_top_p_(logits, _column([p.top_p for p in params], logits))
    sums = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
    numbers = [uniform(d.params.seed, len(d.history) - d.n_prompt) for d in draws]
    at = torch.tensor(numbers, dtype=torch.float64, device=logits.device)[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, at, right=True)[:, 0]


def _logprobs(
    raw: torch.Tensor, tokens: list[int], counts: list[int]
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Each row's log-probability of its token, and its `counts[i]` largest with their ids."""
    raw = raw.log_softmax(-1)
    chosen = raw.gather(-1, torch.tensor(tokens, device=raw.device)[:, None])[:, 0].tolist()
    best = raw.topk(min(max(counts), raw.shape[-1]), -1)
    answer = []
    for own, values, ids, count in zip(
        chosen, best.values.tolist(), best.indices.tolist(), counts, strict=True
    ):
        pairs = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
        answer.append((own, tuple(pairs[:count])))
    return answer


@torch.inference_mode()
def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """One token per row of `logits` `[N, V]`, which are left as they are.

    Raises ArithmeticError when a row's logits are not numbers.
    """
    if not draws:
        return []
    logits = logits.float()
    if not bool(logits.amax(-1).isfinite().all()):
        raise ArithmeticError("the model's logits are not finite")
    work = logits
    if any(d.forbid or _penalised(d.params) for d in draws):
        work = logits.clone()
        for row, draw in enumerate(draws):
            if draw.forbid:
                work[row, torch.tensor(tuple(draw.forbid), device=work.device)] = -math.inf
            penalise_(work[row], draw)
    tokens = work.argmax(-1)
    hot = [row for row, draw in enumerate(draws) if draw.params.temperature > 0]
    if hot:
        index = torch.tensor(hot, device=work.device)
        tokens[index] = draw_tokens(work[index], [draws[row] for row in hot])
    ids: list[int] = tokens.tolist()
    answer = [Sampled(token) for token in ids]
    told = [row for row, draw in enumerate(draws) if draw.params.logprobs is not None]
    if told:
        raw = logits[torch.tensor(told, device=logits.device)]
        counts = [draws[row].params.logprobs or 0 for row in told]
        for row, (own, top) in zip(
            told, _logprobs(raw, [ids[r] for r in told], counts), strict=True
        ):
            answer[row] = Sampled(ids[row], own, top)
    return answer


def _penalised(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )
