"""Splitwise's mixed pool: workers of either pool do both kinds of work while load asks for it.

Nothing is remembered. A worker is in the mixed pool exactly while it holds work of the kind it
was not started for, so it goes home by finishing that work.
"""

from __future__ import annotations

from collections.abc import Sequence

from twofold.policy.choice import Choice, least
from twofold.policy.views import Role, SplitView, WholeView, has_room


def role_now(view: WholeView) -> Role:
    """What the worker is used as, by what it holds."""
    foreign = view.sequences if view.home == "prefill" else view.queued_tokens
    return "mixed" if foreign and view.home != "mixed" else view.home


def roles_now(whole: Sequence[WholeView]) -> tuple[tuple[str, Role], ...]:
    """What each worker that is up is used as, in the order given."""
    return tuple([(view.name, role_now(view)) for view in whole if view.up])


def mixed_pool(view: SplitView) -> Choice:
    """Two legs while the prefill queue chosen is within `mixed_above_tokens` and decode has room.

    Else one leg: at a worker in the mixed pool that is within that limit, else at one drawn from
    decode's pool, else, decode being full, from prefill's. When all are over the limit, all are
    mixed and the least loaded takes it.
    """
    need, limit = view.incoming.need_blocks, view.mixed_above_tokens
    up = [worker for worker in view.whole if worker.up]
    decode_has_room = any(w.home == "decode" and has_room(w, need) for w in up)
    if view.remote is not None and decode_has_room and view.remote.queued_tokens <= limit:
        return Choice("", "two legs, the prefill queue is within its limit")
    by_role = dict(roles_now(up))
    able = [w for w in up if has_room(w, need) and w.queued_tokens <= limit]
    pools: tuple[tuple[Role, str], ...] = (
        ("mixed", "one leg in the mixed pool"),
        ("decode", "one leg, a decode worker joins the mixed pool"),
        ("prefill", "one leg, a prefill worker joins the mixed pool"),
    )
    for role, reason in pools:
        found = [worker for worker in able if by_role[worker.name] == role]
        if found:
            return _least_queued(found, reason)
    if not up:
        return Choice("", "no worker is up")
    return _least_queued(up, "one leg, every queue is over its limit")


def _least_queued(workers: Sequence[WholeView], reason: str) -> Choice:
    return least(
        workers, lambda v: v.queued_tokens, lambda v: (v.sequences, v.tokens), reason, "tokens"
    )
