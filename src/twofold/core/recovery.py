"""Failure policies: what becomes of a request whose leg fails before its answer has begun.

    policy               it is sent again                              at most     may come to
    fail                 never
    retry-pair           as if it had just arrived                     `retries`   retried
    recompute-on-decode  as one leg, to a decode or a mixed worker     once        recomputed
    mixed-pool           as one leg, to a mixed worker                 once        moved

    Or else: exhausted (that often already), no_place (nobody may take it), over_budget.

Only a worker's own fault counts: a connection that breaks, an answer that cannot be used, a status
of 5xx. A worker's 4xx is about the request, and 504 or a deadline that has passed leaves no time.
Workers that have failed a request are avoided wherever there are others.

Recomputing loads decode with prefill work, the more the more handoffs fail: it draws on a budget
of prompt tokens per second, and what the budget does not hold fails at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from twofold.core.placement import Placement, Placer, Refusal
from twofold.core.routed import Routed
from twofold.messages import RecoveryResult
from twofold.policy.choice import Choice, least
from twofold.policy.views import WholeView, has_room
from twofold.types import NS_PER_S

FAIL: Final = "fail"
RETRY_PAIR: Final = "retry-pair"
RECOMPUTE: Final = "recompute-on-decode"
MIXED_POOL: Final = "mixed-pool"
FAILURE_POLICIES: Final = (FAIL, RETRY_PAIR, RECOMPUTE, MIXED_POOL)

MOST_RETRIES: Final = 8
"""Attempts are told apart by 4 bits in the names of pushed transfers."""

_DONE: Final[dict[str, RecoveryResult]] = {
    RETRY_PAIR: "retried",
    RECOMPUTE: "recomputed",
    MIXED_POOL: "moved",
}


class Unplaced(NamedTuple):
    """A request that cannot be sent again, and why not."""

    result: RecoveryResult
    reason: str


Rescue: TypeAlias = Placement | Unplaced


class Budget:
    """Prompt tokens per second, of which one second's worth can be saved up. Integers only.

    A prompt larger than that is let through when the budget is full, and is paid back after.
    """

    def __init__(self, tokens_per_s: int) -> None:
        self._per_s = tokens_per_s
        self._most = tokens_per_s * NS_PER_S
        self._level = self._most  # in tokens times ns, so that no part of a token is lost
        self._at_ns = 0

    def take(self, tokens: int, now_ns: int) -> bool:
        """Charge `tokens` at `now_ns`, or leave all as it is and return False."""
        since_ns = max(0, now_ns - self._at_ns)
        self._level = min(self._most, self._level + since_ns * self._per_s)
        self._at_ns = max(self._at_ns, now_ns)
        cost = tokens * NS_PER_S
        if self._level < min(cost, self._most):
            return False
        self._level -= cost
        return True


def may_recover(request: Routed, status: int, now_ns: int) -> bool:
    """Whether a leg's failure with `status` (0: no status) leaves something to be done."""
    in_time = not request.deadline_ns or now_ns < request.deadline_ns
    return in_time and not 400 <= status < 500 and status != 504


class Rescuer:
    """Applies one failure policy. Raises ValueError for an unknown one, or too many retries."""

    def __init__(
        self, placer: Placer, *, policy: str, retries: int, recompute_tokens_per_s: int
    ) -> None:
        if policy not in FAILURE_POLICIES:
            names = ", ".join(FAILURE_POLICIES)
            raise ValueError(f"failure_policy {policy!r}: {names} are the choices")
        if not 0 <= retries <= MOST_RETRIES:
            raise ValueError(f"retries {retries}: from 0 to {MOST_RETRIES} are right")
        self.policy = policy
        self._placer = placer
        self._most = retries if policy == RETRY_PAIR else 1
        self._budget = Budget(recompute_tokens_per_s)

    def rescue(self, request: Routed, now_ns: int) -> Rescue:
        """Where the request goes now, which no worker is charged with any more."""
        if request.generation >= self._most:
            return Unplaced("exhausted", f"sent again {request.generation} of {self._most} times")
        if self.policy == RETRY_PAIR:
            left_ns = max(1, request.deadline_ns - now_ns) if request.deadline_ns else 0
            placed = self._placer.place(request, left_ns, request.avoid)
            return Unplaced("no_place", placed.reason) if isinstance(placed, Refusal) else placed
        roles = ("mixed",) if self.policy == MIXED_POOL else ("decode", "mixed")
        views = self._placer.fleet.whole_views(request)
        chosen = _whole(views, roles, request)
        if not chosen.worker:
            return Unplaced("no_place", chosen.reason)
        if self.policy == RECOMPUTE and not self._budget.take(request.weight, now_ns):
            return Unplaced("over_budget", "the budget for recomputed prompts is used up")
        return Placement(chosen.worker, True, False, (chosen,))

    def result(self) -> RecoveryResult:
        """What it is called when a request was sent again."""
        return _DONE[self.policy]


def _whole(views: Sequence[WholeView], roles: tuple[str, ...], request: Routed) -> Choice:
    """The least loaded worker of `roles`; those with room and that have not failed it first."""
    able = [view for view in views if view.up and view.home in roles]
    able = [view for view in able if view.name not in request.avoid] or able
    able = [view for view in able if has_room(view, request.need_blocks)] or able
    if not able:
        return Choice("", f"no {' or '.join(roles)} worker is up")
    reason = "one leg, fewest tokens"
    return least(able, lambda v: v.tokens, lambda v: (v.requests,), reason, "tokens")
