"""Which worker a leg goes to: filter, score, pick, as pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Load(NamedTuple):
    """What the router has sent to a worker and not heard the end of.

    `tokens` estimates prompt tokens (on a prefill worker, those still to be read).
    """

    worker: str
    tokens: int
    requests: int


def least_tokens(loads: Sequence[Load]) -> str | None:
    """The worker with the fewest outstanding tokens; ties go to fewer requests, then by name.

    Counting requests alone would take 200 tokens and 200,000 for the same work.
    """
    if not loads:
        return None
    return min(loads, key=lambda load: (load.tokens, load.requests, load.worker)).worker


def least_requests(loads: Sequence[Load]) -> str | None:
    """The worker with the fewest outstanding requests; ties go to fewer tokens, then by name.

    A decode step costs by the sequences in it, so sequences are what is balanced.
    """
    if not loads:
        return None
    return min(loads, key=lambda load: (load.requests, load.tokens, load.worker)).worker
