"""Step times from published coefficients."""

from __future__ import annotations

from collections.abc import Sequence

from twofold.cost.errors import OutOfRange
from twofold.cost.linear import Pieces
from twofold.cost.profile import Polynomial
from twofold.cost.step import DecodeRuns, PrefillPart, work
from twofold.types import NS_PER_MS


class PolynomialStep(DecodeRuns):
    """DistServe's form: prefill a + b sum(n) + c sum(n^2), decode a + b sum(context) + c batch.

    Beyond what was published: new tokens after a context cost c (n^2 + 2 n context), the pairs
    they meet, so that chunks of a prompt add up to its pairs; and a mixed step pays the larger of
    both constants once, as the weights are read once. Raises OutOfRange above the formula's bound.
    """

    def __init__(
        self, formula: Polynomial, title: str, *, measured: bool, extrapolate: bool = False
    ) -> None:
        super().__init__(title, self._pieces)
        self.estimate = not measured
        self._formula = formula
        self._bound = None if extrapolate else formula.max_prefill_tokens

    def _coefficients(self, batch: int) -> tuple[float, float, float]:
        formula = self._formula
        return formula.decode_small if batch < formula.threshold else formula.decode_large

    def _pieces(self, batch: int) -> tuple[Pieces, int | None]:
        constant, per_token, per_seq = self._coefficients(batch)
        return Pieces(
            (0,), ((constant + per_seq * batch) * NS_PER_MS,), per_token * NS_PER_MS
        ), None

    def step_ns(self, prefill: Sequence[PrefillPart], batch: int, context: int) -> int:
        """See StepTime."""
        if not prefill:
            return self.decode_ns(batch, context) if batch else 0
        new, pairs = work(prefill)
        if self._bound is not None and new > self._bound:
            raise OutOfRange(
                f"{self.name}: a step of {new} prompt tokens is above the {self._bound} up to "
                "which the fit rises; another profile or extrapolation is needed"
            )
        constant, per_token, per_square = self._formula.prefill
        ms = per_token * new + per_square * 2.0 * pairs
        if batch:
            start, per_context, per_seq = self._coefficients(batch)
            constant = max(constant, start)
            ms += per_context * context + per_seq * batch
        return max(round((constant + ms) * NS_PER_MS), 1)
