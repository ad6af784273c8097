"""Generated arrivals and generated lengths, each a function of a seed and an index alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal

import msgspec

from twofold.trace.hashing import exponential, gamma, hash64, normal, uniform
from twofold.trace.request import MAX_TOKENS, HasLengths, Lengths, TraceRequest
from twofold.types import NS_PER_S, ceil_div

# Draws of one request's index, so that no two of its properties share a hash.
_WHICH_CLASS: Final = 10
_INPUT: Final = 20
_OUTPUT: Final = 30
_PREFIX: Final = 40
_OWN_BLOCKS: Final = 1000


def poisson(lengths: Iterable[HasLengths], rate_rps: float, seed: int) -> Iterator[TraceRequest]:
    """Poisson arrivals of `rate_rps` over given lengths; times they may have are replaced.

    Gap i is exponential, drawn from a hash of (seed, i). Raises ValueError unless rate > 0.
    """
    _check_rate(rate_rps)
    return _arrivals(lengths, lambda i: exponential(seed, i) / rate_rps)


def gamma_arrivals(
    lengths: Iterable[HasLengths], rate_rps: float, cv: float, seed: int
) -> Iterator[TraceRequest]:
    """Gamma-distributed gaps of mean 1 / rate and coefficient of variation `cv`.

    cv 1 has Poisson's law, above 1 is burstier, below 1 more even. Raises ValueError unless both
    are > 0.
    """
    _check_rate(rate_rps)
    if not (cv > 0 and math.isfinite(cv)):
        raise ValueError(f"a coefficient of variation is a number above 0, not {cv}")
    shape = 1.0 / (cv * cv)
    return _arrivals(lengths, lambda i: gamma(shape, seed, i) / (shape * rate_rps))


def _check_rate(rate_rps: float) -> None:
    if not (rate_rps > 0 and math.isfinite(rate_rps)):
        raise ValueError(f"a rate is a number of requests/s above 0, not {rate_rps}")


def _arrivals(
    lengths: Iterable[HasLengths], gap_s: Callable[[int], float]
) -> Iterator[TraceRequest]:
    now = 0
    for index, row in enumerate(lengths):
        # Gaps are rounded one by one, so that sums are of integers and order-free of float error.
        now += round(gap_s(index) * NS_PER_S)
        yield TraceRequest(
            now, row.input_tokens, row.output_tokens, row.hash_ids, row.block_tokens, row.klass
        )


class Tokens(msgspec.Struct, frozen=True):
    """How many tokens: `fixed` is `low`; `uniform` is `low`..`high`, both ends included;
    `lognormal` has median `low` and 99th percentile `high`.
    """

    kind: Literal["fixed", "uniform", "lognormal"]
    low: int
    high: int = 0

    def __post_init__(self) -> None:
        if self.low < 1 or (self.kind != "fixed" and self.high < self.low):
            raise ValueError(
                f"{self.kind} lengths from {self.low} to {self.high}; 1 <= low <= high"
            )

    def draw(self, seed: int, index: int, draw: int) -> int:
        """The count for one request, at least 1."""
        if self.kind == "fixed":
            return self.low
        if self.kind == "uniform":
            return self.low + hash64(seed, index, draw) % (self.high - self.low + 1)
        sigma = math.log(self.high / self.low) / 2.3263478740408408
        tokens = round(self.low * math.exp(sigma * normal(seed, index, draw)))
        return min(max(1, tokens), MAX_TOKENS)


class RequestClass(msgspec.Struct, frozen=True, kw_only=True):
    """One class of a synthetic mix, drawn in proportion to `weight`.

    With `prefixes` > 0 each request starts with one of that many shared prefixes of
    `prefix_tokens` tokens, which come on top of `input`, and carries block hashes.
    """

    klass: str
    weight: float
    input: Tokens
    output: Tokens
    prefixes: int = 0
    prefix_tokens: int = 0


def synthetic(
    classes: Sequence[RequestClass], n: int, seed: int, block_tokens: int = 16
) -> Iterator[Lengths]:
    """`n` requests of a mix, without times (see `poisson`).

    Block hashes name blocks of `block_tokens` tokens, whole blocks of a shared prefix alike in all
    who share it. Raises ValueError for an empty mix, a weight below 0 or no weight at all.
    """
    total = sum(entry.weight for entry in classes)
    if not classes or not (total > 0 and math.isfinite(total)):
        raise ValueError("a mix needs classes whose weights add up to a number above 0")
    if min(entry.weight for entry in classes) < 0:
        raise ValueError("a weight is a number from 0 on")
    return (_one(classes, total, seed, index, block_tokens) for index in range(n))


def _one(
    classes: Sequence[RequestClass], total: float, seed: int, index: int, block_tokens: int
) -> Lengths:
    point = uniform(seed, index, _WHICH_CLASS) * total
    number = 0
    while number < len(classes) - 1 and point >= classes[number].weight:
        point -= classes[number].weight
        number += 1
    entry = classes[number]
    tokens = entry.input.draw(seed, index, _INPUT)
    output = entry.output.draw(seed, index, _OUTPUT)
    if entry.prefixes < 1:
        return Lengths(tokens, output, None, 0, entry.klass)
    tokens = min(tokens + entry.prefix_tokens, MAX_TOKENS)
    prefix = hash64(seed, index, _PREFIX) % entry.prefixes
    shared = entry.prefix_tokens // block_tokens
    hashes = tuple(
        hash64(number, prefix, block)
        if block < shared
        else hash64(seed, index, _OWN_BLOCKS + block)
        for block in range(ceil_div(tokens, block_tokens))
    )
    return Lengths(tokens, output, hashes, block_tokens, entry.klass)
