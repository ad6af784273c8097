"""How many prompt tokens a step may have: a chunk policy, and what it wants to know of step times.

Step times are learned from the steps themselves: the last one that only decoded, and what prompt
tokens added to it since. Only the last decode step counts, so that alike steps that a simulator
crosses at once teach what they would have taught one by one.
"""

from __future__ import annotations

from typing import Final

from twofold.core.estimates import Rate
from twofold.messages import RunStep
from twofold.policy.choice import lookup
from twofold.policy.chunk import CHUNK_BUDGETS, ChunkBudget, StepView, fixed
from twofold.types import NS_PER_S

_PS_PER_S: Final = 1000 * NS_PER_S


class Chunks:
    """The prompt tokens of each step of one engine. Times are the caller's, in nanoseconds.

    At least `least_tokens` go to prompts in any step; a capped one has at most `cap_tokens`, and
    one with a goal is kept within `goal_ns`.
    """

    def __init__(self, policy: str, cap_tokens: int, goal_ns: int, least_tokens: int) -> None:
        self._budget: ChunkBudget = lookup(CHUNK_BUDGETS, policy, "chunk_policy")
        if policy == "capped" and cap_tokens < 1:
            raise ValueError("chunk_policy capped needs a chunk_cap_tokens of 1 or more")
        if policy == "tpot_goal" and goal_ns < 1:
            raise ValueError("chunk_policy tpot_goal needs a goal for a step's time")
        self._cap_tokens = cap_tokens
        self._goal_ns = goal_ns
        self._least_tokens = least_tokens
        self._began_ns: list[int] = []  # of steps in flight, oldest first
        self._decode_ns = 0
        self._beside = Rate()  # prompt tokens, by the time they added to sequences that decode
        self._alone = Rate()  # by the whole step's: all that is known until then

    def tokens(self, budget_left: int, n_decoding: int) -> int:
        """Prompt tokens that the next step may have, at most `budget_left`."""
        per_s = self._beside.per_s or self._alone.per_s
        return self._budget(
            StepView(
                budget_left,
                n_decoding,
                self._decode_ns,
                _PS_PER_S // per_s if per_s else 0,
                self._goal_ns,
                self._cap_tokens,
                self._least_tokens,
            )
        )

    def began(self, now_ns: int) -> None:
        """One more step has begun."""
        self._began_ns.append(now_ns)

    def went_on(self, now_ns: int) -> None:
        """Steps were crossed: the one in flight is the last of several alike, and began now."""
        self._began_ns[0] = now_ns

    def failed(self) -> None:
        """The step that began first came to nothing."""
        del self._began_ns[0]

    def ended(self, step: RunStep, now_ns: int) -> None:
        """The step that began first has been computed."""
        took_ns = now_ns - self._began_ns.pop(0)
        prompts = [n for _, _, n in step.work if n > 1]
        if not prompts:
            self._decode_ns = took_ns
        elif len(prompts) < len(step.work):
            self._beside.add(sum(prompts), max(0, took_ns - self._decode_ns))
        else:
            self._alone.add(sum(prompts), took_ns)


def make_chunks(policy: str, cap_tokens: int, goal_ns: int, least_tokens: int) -> Chunks | None:
    """What an engine asks; None for a policy that gives all there is, which needs no asking.

    Raises ValueError for an unknown policy, or one without the limit that it keeps to.
    """
    if CHUNK_BUDGETS.get(policy) is fixed:
        return None
    return Chunks(policy, cap_tokens, goal_ns, least_tokens)
