"""Buckets of predicted answer lengths. Who predicts is not this module's concern."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

EDGES_TOKENS: Final = (128, 512, 2048)
"""Longest answer of each bucket but the last. TetriInfer calls what is above 128 heavy."""

N_BUCKETS: Final = len(EDGES_TOKENS) + 1


def bucket(predicted_tokens: int) -> int:
    """Bucket of an answer predicted to have `predicted_tokens`, 0 <= bucket < N_BUCKETS."""
    return bisect_left(EDGES_TOKENS, predicted_tokens)


def reserve_tokens(predicted_tokens: int, max_tokens: int) -> int:
    """Answer tokens to set aside: its bucket's longest where predicted, never over `max_tokens`.

    A bucket is predicted more surely than a length, so its upper edge is what is trusted.
    """
    if not predicted_tokens:
        return max_tokens
    which = bucket(predicted_tokens)
    longest = EDGES_TOKENS[which] if which < len(EDGES_TOKENS) else predicted_tokens
    return min(longest, max_tokens) if max_tokens else longest
