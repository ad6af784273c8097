"""What policies look at: one request and the workers it could go to, as integers.

Whoever asks (the router, live or simulated) fills these in; the policies change nothing. A
number that is not known is 0, unless its line says otherwise.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from twofold.types import NS_PER_S, ceil_div

Role = Literal["prefill", "decode", "mixed"]


class Incoming(NamedTuple):
    """The request to place.

    `number` counts requests and `seed` is the deployment's: together they stand in for chance.
    `need_blocks` is what prompt and expected answer will take on a decode worker, and
    `predicted_tokens` the answer's length as somebody predicted it.
    """

    number: int
    seed: int = 0
    prompt_tokens: int = 0
    need_blocks: int = 0
    predicted_tokens: int = 0


class PrefillView(NamedTuple):
    """A worker that could read the prompt.

    `queued_tokens` were sent there and are not computed yet; `uncached_tokens` are what this
    prompt adds. `tokens_per_s` is at least 1. `transfer_ns`: from KV made here to the first
    token there. `budget_tokens` bounds queued and added tokens together. `kept_keys` is how many
    prefix blocks are thought to be cached.
    """

    name: str
    up: bool = True
    requests: int = 0
    queued_tokens: int = 0
    uncached_tokens: int = 0
    tokens_per_s: int = 1
    transfer_ns: int = 0
    budget_tokens: int = 0
    kept_keys: int = 0


class DecodeView(NamedTuple):
    """A worker that could write the answer.

    `sequences` are all those sent there and not ended, `tokens` their prompts', `output_left`
    the answer tokens they may still take, `used_blocks` what they will hold, of `total_blocks`;
    `slots` is how many may run at once. `tpot_ns` is a step's time now, `tpot_rise_ns` what one
    sequence more adds to it. `by_length` counts the sequences by bucket of predicted length.
    """

    name: str
    up: bool = True
    sequences: int = 0
    tokens: int = 0
    output_left: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    slots: int = 0
    tpot_ns: int = 0
    tpot_rise_ns: int = 0
    by_length: tuple[int, ...] = ()


class WholeView(NamedTuple):
    """A worker that could read the prompt and write the answer, with no handoff.

    `home` is the pool it was started for. The rest is as in the other two views.
    """

    name: str
    home: Role
    up: bool = True
    queued_tokens: int = 0
    uncached_tokens: int = 0
    tokens_per_s: int = 1
    sequences: int = 0
    tokens: int = 0
    requests: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    slots: int = 0


class SplitView(NamedTuple):
    """Two legs or one: `remote` is the prefill worker chosen for two, None when none can be.

    `local_below_tokens` and `mixed_above_tokens` are the limits of the policies that have one.
    """

    incoming: Incoming
    remote: PrefillView | None
    whole: tuple[WholeView, ...]
    local_below_tokens: int = 0
    mixed_above_tokens: int = 0


class AdmitView(NamedTuple):
    """Whether to take a request on: `ttft_ns` as projected, `limit_ns` as wanted (0: whatever).

    `decode` are the workers that could write its answer; `prefill_ns` passes until one of them
    is needed. `coming` requests are with prefill workers and will need `coming_blocks` there.
    """

    incoming: Incoming
    ttft_ns: int
    prefill_ns: int
    limit_ns: int
    decode: tuple[DecodeView, ...]
    coming: int = 0
    coming_blocks: int = 0
    tpot_goal_ns: int = 0


def work_ns(tokens: int, tokens_per_s: int) -> int:
    """Time to read `tokens` at `tokens_per_s`, rounded up to a whole ns."""
    return ceil_div(tokens * NS_PER_S, tokens_per_s)


def projected_ttft_ns(view: PrefillView) -> int:
    """Time to the first token: what waits there, this prompt's own work, and the handoff."""
    return work_ns(view.queued_tokens + view.uncached_tokens, view.tokens_per_s) + view.transfer_ns


def has_room(view: DecodeView | WholeView, need_blocks: int) -> bool:
    """Whether a slot and `need_blocks` are to be had. Where neither bound is known, they are."""
    fits = not view.total_blocks or view.used_blocks + need_blocks <= view.total_blocks
    return fits and (not view.slots or view.sequences < view.slots)
