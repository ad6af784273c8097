"""Which worker writes an answer.

Each policy leaves out workers that are down, and takes one that has a slot and the blocks before
one that has not: a request that must wait there holds its KV on the prefill worker meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from twofold.policy.choice import Choice, least
from twofold.policy.lengths import bucket
from twofold.policy.views import DecodeView, Incoming, has_room

DecodeChoice: TypeAlias = Callable[[Sequence[DecodeView], Incoming], Choice]

_NONE: Final = Choice("", "no decode worker is up")
_WHOLE: Final = 1_000_000


def _roomy(views: Sequence[DecodeView], incoming: Incoming) -> list[DecodeView]:
    """Workers that are up: those with room, or all of them when none has."""
    up = [view for view in views if view.up]
    return [view for view in up if has_room(view, incoming.need_blocks)] or up


def least_requests(views: Sequence[DecodeView], incoming: Incoming) -> Choice:
    """Fewest sequences; ties go to fewer tokens, then by name. Room is not looked at.

    A decode step costs by the sequences in it, so sequences are what is balanced.
    """
    up = [view for view in views if view.up]
    if not up:
        return _NONE
    return least(up, lambda v: v.sequences, lambda v: (v.tokens,), "fewest sequences", "sequences")


def active_sequences(views: Sequence[DecodeView], incoming: Incoming) -> Choice:
    """Smallest share of its slots taken, so that a large worker holds more than a small one."""
    fit = _roomy(views, incoming)
    if not fit:
        return _NONE
    return least(
        fit,
        lambda v: (v.sequences + 1) * _WHOLE // (v.slots or 1),
        lambda v: (v.output_left, v.tokens),
        "smallest share of slots taken",
        "millionths",
    )


def free_blocks(views: Sequence[DecodeView], incoming: Incoming) -> Choice:
    """Most blocks left for growth, after all that it has been sent; ties go to fewer sequences."""
    fit = _roomy(views, incoming)
    if not fit:
        return _NONE
    return least(
        fit,
        lambda v: v.used_blocks + incoming.need_blocks - v.total_blocks,
        lambda v: (v.sequences, v.output_left),
        "most free blocks",
        "blocks over",
    )


def projected_tpot(views: Sequence[DecodeView], incoming: Incoming) -> Choice:
    """Shortest step with this sequence in it; ties go to fewer sequences, then less output left."""
    fit = _roomy(views, incoming)
    if not fit:
        return _NONE
    return least(
        fit,
        lambda v: v.tpot_ns + v.tpot_rise_ns,
        lambda v: (v.sequences, v.output_left, v.used_blocks - v.total_blocks),
        "least projected TPOT",
        "ns",
    )


def length_buckets(views: Sequence[DecodeView], incoming: Incoming) -> Choice:
    """Fewest sequences of this one's predicted length, as TetriInfer spreads heavy decodes.

    Long answers that meet on one worker fill its blocks together; each length is spread alone.
    """
    fit = _roomy(views, incoming)
    if not fit:
        return _NONE
    which = bucket(incoming.predicted_tokens)
    return least(
        fit,
        lambda v: v.by_length[which] if which < len(v.by_length) else 0,
        lambda v: (v.sequences, v.output_left),
        "fewest sequences of this predicted length",
        "sequences",
    )


DECODE_CHOICES: Final[dict[str, DecodeChoice]] = {
    "least_requests": least_requests,
    "active_sequences": active_sequences,
    "free_blocks": free_blocks,
    "projected_tpot": projected_tpot,
    "length_buckets": length_buckets,
}
