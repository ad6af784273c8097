"""What goes into a step, and who makes room: the engine's decisions as pure functions.

A step has a budget of tokens. Running requests that miss one token (they decode) go first, then
prefill chunks of running requests, then waiting ones, always oldest first. Ages are request ids:
a worker hands them out in order of arrival.

A waiting request that does not fit is passed over, so that it never stops one behind it that
does. It cannot starve either: passed over `PREEMPT_AFTER` times, it may push younger requests
out of the batch; passed over `RESERVE_AFTER` times, nothing younger is placed before it. It does
fit an empty pool (else it was refused at arrival), so one of the two places it.
"""

from __future__ import annotations

from typing import Final

PREEMPT_AFTER: Final = 8
RESERVE_AFTER: Final = 64


def chunk_tokens(missing: int, budget_left: int) -> int:
    """Tokens of a prompt with `missing` tokens to compute that go into this step."""
    return min(missing, budget_left)


def decodes_at_most(n_running: int, max_steps: int) -> int:
    """Sequences that one of `max_steps` steps in flight may decode: an even share of those running,
    as a pipeline of which one stage has them all leaves the others idle."""
    return n_running if max_steps == 1 else -(-n_running // max_steps)


def spare_blocks(n_running: int, n_blocks: int) -> int:
    """Blocks that placing a request must leave, so that running ones can grow a while.

    At most 1 % of the pool; none when nothing runs, so that the largest request fits too.
    """
    return min(n_running, n_blocks // 100)


def may_preempt(bypassed: int) -> bool:
    """Whether a request passed over `bypassed` times may push younger ones out."""
    return bypassed >= PREEMPT_AFTER


def reserves(bypassed: int) -> bool:
    """Whether a request passed over `bypassed` times bars younger ones from being placed."""
    return bypassed >= RESERVE_AFTER
