"""Two legs or one: whether a prompt is read where its answer is written.

A policy answers with the one worker that does both, or with worker "" for two legs. Falling back
to one leg because no pair can be made is a policy too: all do it, at workers started as mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from twofold.policy.choice import Choice, least
from twofold.policy.mixed import mixed_pool
from twofold.policy.views import SplitView, WholeView, has_room, projected_ttft_ns, work_ns

SplitChoice: TypeAlias = Callable[[SplitView], Choice]

TWO_LEGS: Final = "two legs"


def local_cost_ns(view: WholeView) -> int:
    """What reading the prompt on a decoding worker costs: this request's wait and work, and the
    work once more for each sequence that it interrupts.
    """
    own = work_ns(view.queued_tokens + view.uncached_tokens, view.tokens_per_s)
    return own + view.sequences * work_ns(view.uncached_tokens, view.tokens_per_s)


def _mixed(whole: Sequence[WholeView]) -> list[WholeView]:
    return [view for view in whole if view.up and view.home == "mixed"]


def _not_prefill(whole: Sequence[WholeView]) -> list[WholeView]:
    return [view for view in whole if view.up and view.home != "prefill"]


def _least_loaded(whole: Sequence[WholeView]) -> Choice:
    """As `least_tokens` among prefill workers, over all that a worker has not answered."""
    if not whole:
        return Choice("", "no worker is up for both legs")
    return least(
        whole, lambda v: v.tokens, lambda v: (v.requests,), "one leg, fewest tokens", "tokens"
    )


def _cheapest(view: SplitView) -> Choice:
    able = _not_prefill(view.whole)
    need = view.incoming.need_blocks
    able = [worker for worker in able if has_room(worker, need)] or able
    if not able:
        return _least_loaded(able)
    return least(able, local_cost_ns, lambda v: (v.sequences,), "one leg, least cost in time", "ns")


def always(view: SplitView) -> Choice:
    """Two legs whenever a pair can be made, else one at a worker started as mixed."""
    return Choice("", TWO_LEGS) if view.remote else _least_loaded(_mixed(view.whole))


def never(view: SplitView) -> Choice:
    """One leg, at a worker started as mixed, else at a decode worker. Two if there is neither."""
    chosen = _least_loaded(_mixed(view.whole) or _not_prefill(view.whole))
    return Choice("", TWO_LEGS) if view.remote and not chosen.worker else chosen


def projected(view: SplitView) -> Choice:
    """Whichever takes less time: the remote queue, work and transfer, or the work on decode's own
    worker with the delay of those it interrupts. Equal times keep the pools apart.
    """
    local = _cheapest(view)
    if view.remote is None:
        return local if local.worker else _least_loaded(_mixed(view.whole))
    remote_ns = projected_ttft_ns(view.remote)
    scores = (*local.scores, (f"{view.remote.name} and handoff", remote_ns))
    local_ns = min([ns for name, ns in local.scores if name == local.worker], default=remote_ns)
    if local_ns < remote_ns:
        return Choice(local.worker, "one leg takes less time", "ns", scores)
    return Choice("", "two legs take less time", "ns", scores)


def threshold(view: SplitView) -> Choice:
    """One leg for prompts of fewer than `local_below_tokens` uncached tokens: a baseline.

    This is what conditional splitting by a fixed length does. It knows no load.
    """
    if view.remote is None:
        return _least_loaded(_mixed(view.whole))
    able = _not_prefill(view.whole)
    if not able:
        return Choice("", TWO_LEGS)
    chosen = least(
        able,
        lambda v: v.uncached_tokens,
        lambda v: (v.sequences, v.tokens),
        f"one leg below {view.local_below_tokens} uncached tokens",
        "tokens",
    )
    fewest = min([n for _, n in chosen.scores])
    return chosen if fewest < view.local_below_tokens else Choice("", TWO_LEGS)


SPLIT_CHOICES: Final[dict[str, SplitChoice]] = {
    "always": always,
    "never": never,
    "projected": projected,
    "threshold": threshold,
    "mixed_pool": mixed_pool,
}

READ_PREFIXES: Final = ("projected", "threshold")
"""Those that need `uncached_tokens` per worker."""

LOOK_AT_PAIRS_FIRST: Final = ("always",)
"""Those that look at `whole` only when `remote` is None."""
