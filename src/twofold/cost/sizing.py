"""The arithmetic of sizing a split deployment, before any simulation."""

from __future__ import annotations

import math
from fractions import Fraction

from twofold.cost.errors import CostError


def transfer_ms(kv_bytes: int, link_bytes_per_s: float, cards: int = 1) -> float:
    """Milliseconds to move a cache over `cards` links of that many bytes/s each."""
    return kv_bytes / (_positive("link speed", link_bytes_per_s) * cards) * 1e3


def decode_slots(rate_rps: float, output_tokens: float, ms_per_token: float) -> float:
    """Sequences in decode on average, by Little's law: arrivals/s x seconds that each stays."""
    return rate_rps * output_tokens * ms_per_token / 1e3


def loop_time_lost(rate_rps: float, prepare_ms: float) -> float:
    """Share of decode's loop that preparing handoffs on it takes; 1 and above cannot keep up."""
    return rate_rps * prepare_ms / 1e3


def workers(
    rate_rps: float, tokens: float, tokens_per_s: float, target_utilisation: float = 0.8
) -> int:
    """Workers that `rate_rps` requests of `tokens` tokens need, rounded up; 0 for no load."""
    if not 0 < target_utilisation <= 1:
        raise CostError(f"a target utilisation is above 0 and up to 1, not {target_utilisation}")
    # In exact decimals, so that a load that fits exactly does not ask for one worker more.
    load = _exact(rate_rps) * _exact(tokens)
    each = _exact(_positive("tokens/s", tokens_per_s)) * _exact(target_utilisation)
    return math.ceil(load / each)


def chunk_reads(prompt_tokens: int, chunk_tokens: int) -> int:
    """Tokens of context read again because a prompt is computed in chunks: each chunk reads all
    before it, so that N chunks read in proportion to N squared.
    """
    if chunk_tokens < 1:
        raise CostError(f"a chunk has 1 token or more, not {chunk_tokens}")
    return sum(range(chunk_tokens, prompt_tokens, chunk_tokens))


def _exact(value: float) -> Fraction:
    return Fraction(str(value))


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise CostError(f"{name} must be above 0, not {value}")
    return value
