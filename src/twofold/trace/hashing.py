"""Numbers that look random but are a hash of (seed, index, draw): the same on every machine."""

from __future__ import annotations

import math
from typing import Final

_MASK: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit integers that leaves no visible pattern."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def hash64(seed: int, index: int, draw: int = 0) -> int:
    """64 bits that depend on all three numbers, each taken modulo 2**64."""
    x = mix64((seed + _STEP) & _MASK)
    x = mix64((x + (index + 1) * _STEP) & _MASK)
    return mix64((x + (draw + 1) * _STEP) & _MASK)


def uniform(seed: int, index: int, draw: int = 0) -> float:
    """A number in the open interval (0, 1), in steps of 2**-53."""
    return ((hash64(seed, index, draw) >> 11) + 0.5) * 2.0**-53


def normal(seed: int, index: int, draw: int = 0) -> float:
    """A standard normal number, by Box and Muller; uses draws `draw` and `draw + 1`."""
    radius = math.sqrt(-2.0 * math.log(uniform(seed, index, draw)))
    return radius * math.cos(2.0 * math.pi * uniform(seed, index, draw + 1))


def exponential(seed: int, index: int, draw: int = 0) -> float:
    """An exponential number of mean 1."""
    return -math.log(uniform(seed, index, draw))


def gamma(shape: float, seed: int, index: int) -> float:
    """A Gamma number of the given shape > 0 and scale 1 (Marsaglia and Tsang's method)."""
    boost = 1.0
    if shape < 1.0:
        boost = uniform(seed, index, 0) ** (1.0 / shape)
        shape += 1.0
    d = shape - 1.0 / 3.0
    c = 1.0 / math.sqrt(9.0 * d)
    draw = 1
    while True:
        x = normal(seed, index, draw)
        v = (1.0 + c * x) ** 3
        u = uniform(seed, index, draw + 2)
        if v > 0.0 and math.log(u) < 0.5 * x * x + d - d * v + d * math.log(v):
            return d * v * boost
        draw += 3
