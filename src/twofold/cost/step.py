"""How long one step of an engine takes, and how long k decode steps in a row take.

A step computes `new` tokens of some prompts, each after `before` tokens of its context that are
in the KV cache already (a cached prefix or earlier chunks), and one token for each of `batch`
sequences whose contexts add up to `context` tokens, the token being computed included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twofold.cost.errors import CostError, OutOfRange
from twofold.cost.linear import Pieces

PrefillPart = tuple[int, int]
"""(new tokens, tokens of context before them), new >= 1, before >= 0."""


class StepTime(Protocol):
    """A model of step times. All answers are whole ns and depend on the arguments alone."""

    @property
    def name(self) -> str:
        """What the model is, in a few words, with "estimate" where it is one."""

    @property
    def estimate(self) -> bool:
        """True where times were computed and not measured."""

    def step_ns(self, prefill: Sequence[PrefillPart], batch: int, context: int) -> int:
        """Time of one step. 0 for an empty one. Raises OutOfRange outside what was measured."""

    def decode_run_ns(self, batch: int, context: int, k: int) -> int:
        """Time of k decode steps, every context one token longer each time.

        Exactly the sum of step_ns((), batch, context + i * batch) over i in [0, k).
        """

    def decode_steps_ns(self, batch: int, context: int, k: int) -> npt.NDArray[np.int64]:
        """The k times that `decode_run_ns` adds up."""

    def decode_steps_within(
        self, batch: int, context: int, budget_ns: int, most: int
    ) -> tuple[int, int]:
        """The largest k <= most with decode_run_ns(batch, context, k) <= budget_ns, and that time.

        k also ends where the profile does: the step after that raises OutOfRange.
        """


class DecodeRuns:
    """Decode steps of a model whose time, for a fixed batch, is linear in pieces in the context.

    `make_pieces` gives them for a batch (kept from then on), and `longest` the greatest sum of
    contexts that may be asked for, or None. Subclasses add prefill.
    """

    def __init__(self, name: str, make_pieces: Callable[[int], tuple[Pieces, int | None]]) -> None:
        self.name = name
        self._make = make_pieces
        self._kept: dict[int, tuple[Pieces, int | None]] = {}

    def _decode(self, batch: int, context: int) -> Pieces:
        """Pieces for a batch, `context` being the greatest sum of contexts about to be asked."""
        kept = self._kept.get(batch)
        if kept is None:
            if batch < 1:
                raise CostError(f"a decode step has 1 sequence or more, not {batch}")
            kept = self._kept[batch] = self._make(batch)
        pieces, longest = kept
        if longest is not None and context > longest:
            raise OutOfRange(
                f"{self.name}: decode of {batch} sequences with {context // batch} tokens of "
                f"context each is outside the profile, which ends at {longest // batch}; "
                "a wider profile or extrapolation is needed"
            )
        return pieces

    def decode_ns(self, batch: int, context: int) -> int:
        """Time of one decode step."""
        return self._decode(batch, context).at(context)

    def decode_run_ns(self, batch: int, context: int, k: int) -> int:
        """See StepTime."""
        if k <= 0:
            return 0
        return self._decode(batch, context + (k - 1) * batch).run(context, batch, k)

    def decode_steps_ns(self, batch: int, context: int, k: int) -> npt.NDArray[np.int64]:
        """See StepTime."""
        if k <= 0:
            return np.empty(0, dtype=np.int64)
        return self._decode(batch, context + (k - 1) * batch).many(context, batch, k)

    def decode_steps_within(
        self, batch: int, context: int, budget_ns: int, most: int
    ) -> tuple[int, int]:
        """See StepTime."""
        if most <= 0:
            return 0, 0
        pieces = self._decode(batch, context)
        longest = self._kept[batch][1]
        if longest is not None:
            most = min(most, (longest - context) // batch + 1)
        first_ns = pieces.at(context)
        if first_ns > budget_ns:
            return 0, 0
        total = pieces.run(context, batch, most)
        if total <= budget_ns:
            return most, total
        return _search(pieces, batch, context, budget_ns, most, first_ns, total)


def _search(
    pieces: Pieces, batch: int, context: int, budget_ns: int, most: int, first_ns: int, total: int
) -> tuple[int, int]:
    """Narrows (1, most) to the largest k whose run fits, guessing as if times rose linearly."""
    low, low_ns = 1, first_ns
    high, high_ns = most, total
    bisect = False
    while high - low > 1:
        # Run times between low and high, as a parabola through both and the step after low.
        step_ns = pieces.at(context + low * batch)
        width, left = high - low, budget_ns - low_ns
        bend = ((high_ns - low_ns) - step_ns * width) / (width * (width - 1))
        root = step_ns - bend
        under = root * root + 4.0 * bend * left
        guess = width / 2
        if not bisect and root > 0 and under >= 0:
            guess = 2.0 * left / (root + math.sqrt(under))
        # Every other time halve, so that no shape of curve makes this long.
        bisect = not bisect
        k = min(max(low + int(guess), low + 1), high - 1)
        ns = low_ns + pieces.run(context + low * batch, batch, k - low)
        if ns <= budget_ns:
            low, low_ns = k, ns
            # The guess is near: settle by single steps before guessing again.
            ns += pieces.at(context + low * batch)
            if ns > budget_ns:
                break
            low, low_ns = low + 1, ns
        else:
            high, high_ns = k, ns
            ns -= pieces.at(context + (k - 1) * batch)
            if ns <= budget_ns:
                return k - 1, ns
    return low, low_ns


class LinearStep(DecodeRuns):
    """base + prefill_token * new + pair * new * (before + new / 2) + seq * batch + context * sum.

    All times in ns, `context` and `pair` may be fractions. For tests and for first guesses.
    """

    def __init__(
        self,
        base_ns: int,
        prefill_token_ns: float,
        decode_seq_ns: float = 0.0,
        context_token_ns: float = 0.0,
        pair_ns: float = 0.0,
    ) -> None:
        super().__init__("linear formula, an estimate", self._pieces)
        self.estimate = True
        self._base = base_ns
        self._token = prefill_token_ns
        self._seq = decode_seq_ns
        self._context = context_token_ns
        self._pair = pair_ns

    def _pieces(self, batch: int) -> tuple[Pieces, int | None]:
        return Pieces((0,), (self._base + self._seq * batch,), self._context), None

    def step_ns(self, prefill: Sequence[PrefillPart], batch: int, context: int) -> int:
        """See StepTime."""
        if not prefill:
            return self.decode_ns(batch, context) if batch else 0
        new, pairs = work(prefill)
        decode = self._seq * batch + self._context * context if batch else 0.0
        return round(self._base + self._token * new + self._pair * pairs + decode)


def work(prefill: Sequence[PrefillPart]) -> tuple[int, float]:
    """(new tokens, query-key pairs): each new token meets all before it and, on average, half
    of the new ones. Chunks of one prompt add up to the pairs of the whole.
    """
    new = 0
    twice = 0
    for tokens, before in prefill:
        new += tokens
        twice += tokens * (2 * before + tokens)
    return new, twice / 2
