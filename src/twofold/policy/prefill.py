"""Which worker reads a prompt.

Each policy leaves out workers that are down or whose queue would go over its budget, and takes
one of the rest. More queue never makes a worker more attractive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from twofold.policy.choice import Choice, least, mix
from twofold.policy.views import Incoming, PrefillView, projected_ttft_ns, work_ns

PrefillChoice: TypeAlias = Callable[[Sequence[PrefillView], Incoming], Choice]

REUSE_WEIGHT: Final = 1
"""How many later requests are taken to wait while a prompt is read that was cached elsewhere."""


def usable(views: Sequence[PrefillView]) -> list[PrefillView]:
    """Workers that are up and within their budget with this prompt added."""
    return [
        view
        for view in views
        if view.up and not 0 < view.budget_tokens < view.queued_tokens + view.uncached_tokens
    ]


def _none(views: Sequence[PrefillView]) -> Choice:
    if any(view.up for view in views):
        return Choice("", "every prefill queue is over its budget")
    return Choice("", "no prefill worker is up")


def least_tokens(views: Sequence[PrefillView], incoming: Incoming) -> Choice:
    """Fewest tokens queued; ties go to fewer requests, then by name.

    Counting requests alone would take 200 tokens and 200,000 for the same work.
    """
    fit = usable(views)
    if not fit:
        return _none(views)
    return least(
        fit, lambda v: v.queued_tokens, lambda v: (v.requests,), "fewest queued tokens", "tokens"
    )


def jsq(views: Sequence[PrefillView], incoming: Incoming) -> Choice:
    """Join the shortest queue, counted in requests; ties go to fewer tokens, then by name."""
    fit = usable(views)
    if not fit:
        return _none(views)
    return least(
        fit, lambda v: v.requests, lambda v: (v.queued_tokens,), "shortest queue", "requests"
    )


def round_robin(views: Sequence[PrefillView], incoming: Incoming) -> Choice:
    """Each in turn, by name, whatever it has to do."""
    fit = sorted(usable(views))
    if not fit:
        return _none(views)
    return Choice(fit[incoming.number % len(fit)].name, "its turn")


def power_of_two(views: Sequence[PrefillView], incoming: Incoming) -> Choice:
    """The one with fewer tokens queued of two drawn by a hash of (seed, number)."""
    fit = sorted(usable(views))
    if not fit:
        return _none(views)
    if len(fit) > 1:
        bits = mix(incoming.seed, incoming.number)
        first, second = (bits >> 32) % len(fit), (bits & 0xFFFFFFFF) % (len(fit) - 1)
        fit = [fit[first], fit[second + (second >= first)]]
    return least(
        fit,
        lambda v: v.queued_tokens,
        lambda v: (v.requests,),
        "fewer queued tokens of two drawn",
        "tokens",
    )


def projected_ttft(views: Sequence[PrefillView], incoming: Incoming) -> Choice:
    """Soonest first token: (queued + uncached tokens) / rate + transfer, in ns."""
    fit = usable(views)
    if not fit:
        return _none(views)
    return least(fit, projected_ttft_ns, lambda v: (v.requests,), "least projected TTFT", "ns")


def prefix_aware(views: Sequence[PrefillView], incoming: Incoming) -> Choice:
    """Soonest first token, reading again what is cached elsewhere counted as a loss to others too.

    Saved compute and waiting are on one scale, worker by worker: a hit is worth `REUSE_WEIGHT`
    times more than the time it saves this request, and no more, so it never pins traffic to a
    long queue, and one hot worker changes nothing for the others. Only among equals does a miss
    go where least is cached.
    """
    fit = usable(views)
    if not fit:
        return _none(views)
    return least(
        fit,
        lambda v: projected_ttft_ns(v) + REUSE_WEIGHT * work_ns(v.uncached_tokens, v.tokens_per_s),
        lambda v: (v.kept_keys, v.requests),
        "least TTFT and prompt read again",
        "ns",
    )


PREFILL_CHOICES: Final[dict[str, PrefillChoice]] = {
    "least_tokens": least_tokens,
    "projected_ttft": projected_ttft,
    "prefix_aware": prefix_aware,
    "jsq": jsq,
    "round_robin": round_robin,
    "power_of_two": power_of_two,
}

READ_PREFIXES: Final = ("projected_ttft", "prefix_aware")
"""Those that need `uncached_tokens` per worker."""
