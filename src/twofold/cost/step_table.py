"""Step times from a profile's tables, interpolated and never guessed outside them unasked."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from twofold.cost.errors import CostError, OutOfRange
from twofold.cost.linear import Pieces
from twofold.cost.profile import DecodeRow, PrefillRow, Profile
from twofold.cost.step import DecodeRuns, PrefillPart, work
from twofold.types import NS_PER_MS


class Curve:
    """Linear in pieces through rising points; held below the first, extended above the last."""

    __slots__ = ("_slopes", "xs", "ys")

    def __init__(self, points: Sequence[tuple[float, float]], *, hold_below: bool = True) -> None:
        self.xs = [x for x, _ in points]
        self.ys = [y for _, y in points]
        slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(points)]
        below = 0.0 if hold_below or not slopes else slopes[0]
        self._slopes = [below, *slopes, slopes[-1] if slopes else 0.0]

    def at(self, x: float) -> float:
        """The value at x."""
        i = bisect_right(self.xs, x)
        j = i - 1 if i else 0
        return self.ys[j] + self._slopes[i] * (x - self.xs[j])


class TableStep(DecodeRuns):
    """Interpolates a profile over batch and context.

    Decode: linear between batches at each measured context, then linear in context at that batch;
    exact at every row. Below the smallest context its value holds.

    Prefill: a step is taken as one prompt of as many tokens, g(tokens), plus what its query-key
    pairs differ by, at the price that rows with cached tokens show; exact at rows of one prompt,
    with or without cached tokens. That covers cached prefixes, chunks that read earlier ones
    again, and several prompts in a step. Without such rows the price is g's curvature.

    Mixed: g of all tokens, pairs of the prompts' alone, and what the decoding sequences' contexts
    cost in a decode step; with `mixed_factor`, that times g of all tokens.

    Raises OutOfRange outside the rows unless `extrapolate`, which goes on along the last slope.
    """

    def __init__(self, profile: Profile, *, extrapolate: bool = False) -> None:
        super().__init__(profile.title, self._pieces)
        self.estimate = not profile.measured
        self._extrapolate = extrapolate
        self._factor = profile.mixed_factor
        self._rows = _by_context(profile.decode)
        self._any_context = bool(profile.decode) and profile.decode[0].context_tokens is None
        self._base_ns: dict[int, int] = {}
        self._has_prefill = _add_prefill(self, profile.prefill, self._rows)

    _g: Curve
    _price: list[Curve]
    _price_at: list[int]
    _read_ms: float
    _most_cached: int
    _most_new: int

    def _pieces(self, batch: int) -> tuple[Pieces, int | None]:
        """Knots in the sum of contexts for one batch, and the greatest sum inside the table."""
        rows = self._rows
        if not rows:
            raise CostError(f"{self.name}: the profile has no decode rows")
        top = max(curve.xs[-1] for _, curve in rows)
        covering = [(c, curve) for c, curve in rows if curve.xs[0] <= batch <= curve.xs[-1]]
        if not covering:
            if not self._extrapolate:
                low = min(curve.xs[0] for _, curve in rows)
                raise OutOfRange(
                    f"{self.name}: a decode batch of {batch} is outside the profile's {low:.0f} "
                    f"to {top:.0f}; a wider profile or extrapolation is needed"
                )
            covering = [(c, curve) for c, curve in rows if batch < top or curve.xs[-1] == top]
        if self._any_context:
            return Pieces((0,), (covering[0][1].at(batch) * NS_PER_MS,)), None
        xs = [batch * context for context, _ in covering]
        ys = [curve.at(batch) * NS_PER_MS for _, curve in covering]
        slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]) if len(xs) > 1 else 0.0
        pieces = Pieces(xs, ys, max(slope, 0.0))
        return pieces, None if self._extrapolate else xs[-1]

    def step_ns(self, prefill: Sequence[PrefillPart], batch: int, context: int) -> int:
        """See StepTime."""
        if not prefill:
            return self._decode(batch, context).at(context) if batch else 0
        new, pairs = work(prefill)
        total = new + batch
        if total > self._most_new or not self._has_prefill:
            self._check_new(total)
        if self._factor is not None:
            factor = self._factor if batch else 1.0
            return round(self._g.at(total) * factor * NS_PER_MS)
        if not self._extrapolate:
            self._check_cached(prefill)
        ms = self._g.at(total) + self._pairs_ms(total, pairs - total * total / 2, prefill)
        ns = max(round(ms * NS_PER_MS), 1)
        return ns + self._contexts_ns(batch, context) if batch else ns

    def _pairs_ms(self, total: int, extra: float, prefill: Sequence[PrefillPart]) -> float:
        """Cost of `extra` query-key pairs above (or below) those of one prompt of `total`."""
        before = extra / total
        at = self._price_at
        i = bisect_right(at, total)
        if i == 0:
            ms = self._price[0].at(before) * total
            # However few the new tokens, their context is read once, as in a decode step.
            return max(ms, self._read_ms * sum(part[1] for part in prefill))
        if i == len(at):
            return self._price[-1].at(before) * total
        low, high = self._price[i - 1].at(before), self._price[i].at(before)
        return (low + (high - low) * (total - at[i - 1]) / (at[i] - at[i - 1])) * total

    def _contexts_ns(self, batch: int, context: int) -> int:
        """What the contexts of decoding sequences add to a step: a decode step less its base."""
        pieces = self._decode(batch, context)
        base = self._base_ns.get(batch)
        if base is None:
            x0 = pieces.start
            rise = pieces.at(2 * x0) - pieces.at(x0) if x0 else 0
            base = self._base_ns[batch] = pieces.at(x0) - max(rise, 0)
        return max(pieces.at(context) - base, 0)

    def _check_new(self, total: int) -> None:
        if not self._has_prefill:
            raise CostError(f"{self.name}: the profile has no prefill rows of one prompt")
        if not self._extrapolate:
            raise OutOfRange(
                f"{self.name}: a step of {total} tokens is outside the profile's "
                f"{self._most_new}; a wider profile or extrapolation is needed"
            )

    def _check_cached(self, prefill: Sequence[PrefillPart]) -> None:
        for new, before in prefill:
            if before > self._most_cached and new + before > self._most_new:
                raise OutOfRange(
                    f"{self.name}: {new} tokens after {before} are outside the profile, which has "
                    f"{self._most_cached} cached tokens and prompts of {self._most_new}; "
                    "a wider profile or extrapolation is needed"
                )


def _by_context(rows: Sequence[DecodeRow]) -> list[tuple[int, Curve]]:
    """(context, ms over batch) by rising context; 0 stands for "any"."""
    grouped: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        grouped.setdefault(row.context_tokens or 0, []).append((row.batch, row.ms))
    return [(context, Curve(sorted(grouped[context]))) for context in sorted(grouped)]


def _add_prefill(
    step: TableStep, rows: Sequence[PrefillRow], decode: Sequence[tuple[int, Curve]]
) -> bool:
    """Sets the prefill curves of a table; False if there are no rows of one prompt."""
    single = sorted((r.new_tokens, r.ms) for r in rows if r.batch == 1 and r.cached_tokens == 0)
    step._most_new = step._most_cached = 0
    step._price, step._price_at, step._read_ms = [], [], 0.0
    if not single:
        return False
    step._g = Curve(single)
    step._most_new = single[-1][0]
    cached: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        if row.batch == 1 and row.cached_tokens:
            extra = (row.ms - step._g.at(row.new_tokens)) / row.new_tokens
            cached.setdefault(row.new_tokens, [(0.0, 0.0)]).append((row.cached_tokens, extra))
            step._most_cached = max(step._most_cached, row.cached_tokens)
    if not cached:
        cached = {single[0][0]: [(0.0, 0.0), (1.0, _curvature(single))]}
    step._price_at = sorted(cached)
    step._price = [Curve(sorted(cached[n]), hold_below=False) for n in step._price_at]
    alone = [(context, curve.at(1)) for context, curve in decode if curve.xs[0] <= 1]
    if len(alone) > 1:
        (c0, y0), (c1, y1) = alone[0], alone[-1]
        step._read_ms = max((y1 - y0) / (c1 - c0), 0.0)
    return True


def _curvature(points: Sequence[tuple[int, float]]) -> float:
    """2c of the least-squares a + bn + cn^2 (ms per query-key pair), at least 0."""
    if len(points) < 3:
        return 0.0
    scale = points[-1][0]
    sums = [sum((n / scale) ** k for n, _ in points) for k in range(5)]
    right = [sum(ms * (n / scale) ** k for n, ms in points) for k in range(3)]
    m = [[sums[i + j] for j in range(3)] + [right[i]] for i in range(3)]
    for i in range(3):
        for j in range(i + 1, 3):
            ratio = m[j][i] / m[i][i]
            m[j] = [b - ratio * a for a, b in zip(m[i], m[j], strict=True)]
    return max(2.0 * m[2][3] / m[2][2] / scale**2, 0.0)
