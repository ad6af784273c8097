"""How many prompt tokens go into a step beside the sequences that decode in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias


class StepView(NamedTuple):
    """A step so far: `budget_left` tokens may be added to `n_decoding` sequences.

    `decode_ns` is what the step takes without a prompt, `token_ps` what a prompt token adds, in
    picoseconds (a fast device reads many in a ns). `goal_ns` is the TPOT wanted, `cap_tokens`
    the most of prompts in a step, `least_tokens` what a prompt gets in any case.
    """

    budget_left: int
    n_decoding: int = 0
    decode_ns: int = 0
    token_ps: int = 0
    goal_ns: int = 0
    cap_tokens: int = 0
    least_tokens: int = 1


ChunkBudget: TypeAlias = Callable[[StepView], int]

_PS_PER_NS: Final = 1000


def fixed(view: StepView) -> int:
    """All that is left of the step's budget."""
    return view.budget_left


def capped(view: StepView) -> int:
    """At most `cap_tokens`, as Splitwise bounds a prompt batch at 2,048."""
    return min(view.budget_left, view.cap_tokens) if view.cap_tokens else view.budget_left


def tpot_goal(view: StepView) -> int:
    """As many as keep the step within the TPOT goal, and all when nobody decodes.

    A prompt always gets `least_tokens`: sequences that miss their goal by themselves must not
    keep prompts waiting for ever.
    """
    if not (view.n_decoding and view.goal_ns and view.token_ps):
        return view.budget_left
    within = (view.goal_ns - view.decode_ns) * _PS_PER_NS // view.token_ps
    return min(view.budget_left, max(within, view.least_tokens))


CHUNK_BUDGETS: Final[dict[str, ChunkBudget]] = {
    "fixed": fixed,
    "capped": capped,
    "tpot_goal": tpot_goal,
}
