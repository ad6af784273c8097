"""The rules of the verdict that need no simulation.

Each is a reason not to split, or not to hand over in one way, judged by times, shares and counts.
None knows a number of tokens above which splitting pays: a prompt is short when its prefill takes
little time next to what that would disturb or what handing over would cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from twofold.cost import sizing
from twofold.plan.facts import Facts
from twofold.plan.words import count, figure, percent

MOST_SLOTS_USED: Final = 0.8
"""Above this share of its slots a decode pool queues at every burst."""
MOST_LOAD_CHANGED: Final = 0.5
"""Above this share of sequences come or gone, a choice by decode's load at arrival is stale."""
_STEP: Final = "ms_per_token"
Against = Literal["split", "push", "pull"]
Missing = tuple[tuple[str, ...], ...]
_STALLS: Final = "handoff preparation stalls decode"
_CHOSEN_LATE: Final = "decode must be chosen after prefill"
AGAINST: Final[dict[str, Against]] = {_STALLS: "pull", _CHOSEN_LATE: "push"}
"""What a rule speaks against where it holds, by its name; any other against a split at all."""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule, judged.

    `holds` is None where it cannot be; then `missing` names the facts that would be needed: all
    of them, any of the alternatives in each.
    """

    rule: str
    holds: bool | None
    because: str
    missing: Missing = ()


def one_gpu(facts: Facts) -> Rule:
    """Fewer GPUs than two workers take."""
    if facts.gpus is None:
        return _unknown("one GPU", (("gpus",),))
    have = facts.gpus // facts.worker_gpus
    because = f"{count(facts.gpus, 'GPU')} at {facts.degree} {_make(facts.gpus)} "
    because += f"{count(have, 'worker')}; a split needs two"
    return Rule(rule="one GPU", holds=have < 2, because=because)


def too_few_gpus(facts: Facts) -> Rule:
    """Both pools together do not fit the GPUs."""
    name = "too few GPUs for both pools"
    if facts.gpus is None or facts.prefill_workers is None or facts.decode_workers is None:
        needs = ("gpus", "prefill_workers", "decode_workers")
        return _unknown(name, _absent(facts, *needs))
    need = facts.split_gpus
    degree = ""
    if need is None:
        need = (facts.prefill_workers + facts.decode_workers) * facts.worker_gpus
        degree = f" at {facts.degree}"
    because = (
        f"{facts.prefill_workers} prefill and {count(facts.decode_workers, 'decode worker')}"
        f"{degree} take {count(need, 'GPU')}; there {_are(facts.gpus)}"
    )
    return Rule(rule=name, holds=need > facts.gpus, because=because)


def one_node(facts: Facts) -> Rule:
    """All GPUs in one machine."""
    nodes = 1 if facts.gpus == 1 else facts.nodes
    if nodes is None:
        return _unknown("one node", (("nodes",),))
    because = f"{nodes} nodes"
    if nodes == 1:
        because = "both pools would share one host, and one fault would take both"
        if facts.gpus is not None:
            ratios = max(facts.gpus // facts.worker_gpus - 1, 0)
            because += f"; {count(ratios, 'ratio')} of prefill to decode to choose from"
    return Rule(rule="one node", holds=nodes == 1, because=because)


def no_latency_goal(facts: Facts) -> Rule:
    """Nobody waits for the answers."""
    goals = [
        f"{name} {figure(value)} ms"
        for name, value in (("TTFT", facts.slo_ttft_ms), ("TPOT", facts.slo_tpot_ms))
        if value is not None
    ]
    if not goals and not facts.no_goal:
        needs = (("slo_ttft_ms", "slo_tpot_ms", "no_goal"),)
        return _unknown("no latency goal", needs)
    because = "asked for: " + " and ".join(goals)
    if not goals:
        because = "splitting buys steady latency, not throughput, and no latency is asked for"
    return Rule(rule="no latency goal", holds=not goals, because=because)


def short_prompts(facts: Facts) -> Rule:
    """Prefills so quick that running them beside decode disturbs little, or that handing over
    takes longer. Judged on the longest prompt: long ones are what disturbs.
    """
    if not facts.prompts or (last := facts.prompts[-1]).prefill_ms is None:
        return _unknown("short prompts", (("prefill_ms",), *_absent(facts, _STEP)))
    first = facts.prompts[0]
    typical_ms = last.prefill_ms if first.prefill_ms is None else first.prefill_ms
    judged = _quick(facts, last.prefill_ms, last.transfer_ms, typical_ms)
    if judged is None:
        return _unknown("short prompts", _absent(facts, _STEP))
    holds, because = judged
    because = f"{last.label} ({count(last.tokens, 'token')}): {because}"
    if not holds and len(facts.prompts) > 1 and first.prefill_ms is not None:
        also = _quick(facts, first.prefill_ms, first.transfer_ms, typical_ms)
        if also is not None and also[0]:
            because += f". But {first.label}: {also[1]}; those can be prefilled on decode"
    return Rule(rule="short prompts", holds=holds, because=because)


def strong_prefix_reuse(facts: Facts) -> Rule:
    """So much of the prompt is cached where it decodes that what is left is a short prompt."""
    name = "strong prefix reuse"
    hit = facts.prefix_hit_share
    first = facts.prompts[0] if facts.prompts else None
    if hit == 0:
        return Rule(rule=name, holds=False, because="no prefix is reused")
    if hit is None or first is None or first.prefill_ms is None:
        needs = _absent(facts, "prefix_hit_share")
        if first is None or first.prefill_ms is None:
            needs += (("prefill_ms",),)
        return _unknown(name, (*needs, *_absent(facts, _STEP)))
    left_ms, moved_ms = first.prefill_ms * (1 - hit), None
    if first.transfer_ms is not None:
        moved_ms = first.transfer_ms * (1 - hit)
    whole = _quick(facts, first.prefill_ms, first.transfer_ms, first.prefill_ms)
    judged = _quick(facts, left_ms, moved_ms, left_ms)
    if judged is None:
        return _unknown(name, _absent(facts, _STEP))
    if whole is not None and whole[0]:
        because = "the whole prompt is short already; reuse is not what decides"
        return Rule(rule=name, holds=False, because=because)
    because = f"{percent(1 - hit)} of the prompt is left where decode has the rest: {judged[1]}"
    return Rule(rule=name, holds=judged[0], because=because)


def link_too_slow(facts: Facts) -> Rule:
    """The link moves a cache no faster than prefill makes it, or less than all arrivals need."""
    name = "link too slow to hide the bytes"
    first = facts.prompts[0] if facts.prompts else None
    prefill_ms = first.prefill_ms if first else None
    transfer_ms = first.transfer_ms if first else None
    if transfer_ms is not None and facts.rate_rps is not None:
        pairs = min(facts.prefill_workers or 1, facts.decode_workers or 1)
        busy = facts.rate_rps * transfer_ms / 1e3 / pairs
        if busy >= 1:
            because = (
                f"{figure(facts.rate_rps)} req/s x {figure(transfer_ms)} ms over "
                f"{count(pairs, 'pair')} of workers keep{'s' * (pairs == 1)} the link busy "
                f"{percent(busy)} of the time: transfers queue without end"
            )
            return Rule(rule=name, holds=True, because=because)
    if transfer_ms is None or prefill_ms is None:
        found = (("transfer_ms", transfer_ms), ("prefill_ms", prefill_ms))
        return _unknown(name, tuple((key,) for key, value in found if value is None))
    because = f"{figure(transfer_ms)} ms of transfer against {figure(prefill_ms)} ms of prefill"
    if holds := transfer_ms > prefill_ms:
        because += ": sent layer by layer, some still comes after the prefill"
    else:
        because += f" ({percent(transfer_ms / prefill_ms)}): hidden layer by layer; "
        whole_ms = prefill_ms + transfer_ms + (facts.prepare_ms or 0.0)
        because += f"read after prefill, TTFT is {figure(whole_ms)} ms or more"
        if facts.slo_ttft_ms is not None:
            because += f", goal {figure(facts.slo_ttft_ms)} ms"
    return Rule(rule=name, holds=holds, because=because)


def decode_pool_full(facts: Facts) -> Rule:
    """Decode holds more than 80 % of its slots."""
    held, slots = facts.slots_held, facts.slots
    if held is None or slots is None:
        needs = ("rate_rps", "output_tokens", _STEP, "slots")
        return _unknown("decode pool already full", _absent(facts, *needs))
    holds = not _fits(held, slots)
    because = f"{figure(held)} of {count(slots, 'slot')} held, {percent(held / slots)}, "
    because += f"{'over' if holds else 'within'} the {percent(MOST_SLOTS_USED)} rule"
    if holds:
        because += f": {count(slots_needed(held), 'slot')} would do, at a cost in KV memory"
    return Rule(rule="decode pool already full", holds=holds, because=because)


def low_concurrency(facts: Facts) -> Rule:
    """So few sequences decode at once that a prefill seldom disturbs any."""
    held, workers = facts.slots_held, facts.unsplit_workers
    if held is not None and held < 1 and not workers:
        workers = 1
    if held is None or not workers:
        needs = _absent(facts, "rate_rps", "output_tokens", _STEP)
        return _unknown("low concurrency", (*needs, *((("gpus",),) * (not workers))))
    each = held / workers
    because = (
        f"{figure(held)} sequences in decode over {count(workers, 'unsplit worker')}: "
        f"{percent(math.exp(-each))} of prefills would meet none"
    )
    return Rule(rule="low concurrency", holds=each < 1, because=because)


def handoff_stalls_decode(facts: Facts) -> Rule:
    """Preparing handoffs on decode's loop, as pull does, costs a goal or the slots' headroom."""
    name = _STALLS
    if facts.prepare_ms == 0:
        return Rule(rule=name, holds=False, because="nothing runs on the loop")
    if facts.rate_rps is None or facts.prepare_ms is None:
        return _unknown(name, _absent(facts, "rate_rps", "prepare_ms"))
    workers = facts.decode_workers or 1
    lost = sizing.loop_time_lost(facts.rate_rps / workers, facts.prepare_ms)
    on = f"each of {workers} decode workers" if workers > 1 else "the decode worker"
    because = f"{percent(lost)} of the loop is lost on {on}"
    because += " if one takes all" * (facts.decode_workers is None)
    if lost >= 1:
        because += ": it cannot keep up"
        return Rule(rule=name, holds=True, because=because)
    breaks: list[bool] = []
    if facts.ms_per_token is not None:
        slower_ms = facts.ms_per_token / (1 - lost)
        because += f": {figure(facts.ms_per_token)} -> {figure(slower_ms)} ms a token"
        if facts.slo_tpot_ms is not None:
            breaks.append(slower_ms > facts.slo_tpot_ms)
            because += f", goal {figure(facts.slo_tpot_ms)} ms"
    held, slots = facts.slots_held, facts.slots
    if held is not None and slots is not None:
        more = held / (1 - lost)
        breaks.append(not _fits(more, slots))
        because += f", {figure(held)} -> {figure(more)} of {count(slots, 'slot')} "
        because += f"({percent(more / slots)}, at most {percent(MOST_SLOTS_USED)})"
    if not breaks:
        either = ("slots" if slots is None else "output_tokens", "slo_tpot_ms")
        needs = (either,) if facts.slo_tpot_ms is None else ()
        return _unknown(name, (*_absent(facts, _STEP), *needs))
    return Rule(rule=name, holds=any(breaks), because=because)


def decode_chosen_late(facts: Facts) -> Rule:
    """Decode's load changes so much during a prefill that decode must be chosen after it, which
    push, that reserves on arrival, cannot do.
    """
    name = _CHOSEN_LATE
    if facts.decode_workers == 1:
        because = "1 decode worker: nothing to choose"
        return Rule(rule=name, holds=False, because=because)
    prefill_ms = facts.prompts[0].prefill_ms if facts.prompts else None
    output, step = facts.output_tokens, facts.ms_per_token
    if facts.decode_workers is None or prefill_ms is None or output is None or step is None:
        needs = _absent(facts, "decode_workers", "output_tokens", _STEP)
        return _unknown(name, (*needs, *((("prefill_ms",),) * (prefill_ms is None))))
    stay_ms = output * step
    changed = min(prefill_ms / stay_ms, 1.0)
    because = (
        f"prefill takes {figure(prefill_ms)} ms, a stay in decode {figure(stay_ms)} ms: "
        f"{percent(changed)} of decode's sequences change meanwhile"
    )
    holds = changed > MOST_LOAD_CHANGED
    return Rule(rule=name, holds=holds, because=because)


RULES: Final[tuple[Callable[[Facts], Rule], ...]] = (
    one_gpu,
    too_few_gpus,
    one_node,
    no_latency_goal,
    short_prompts,
    strong_prefix_reuse,
    link_too_slow,
    decode_pool_full,
    low_concurrency,
    handoff_stalls_decode,
    decode_chosen_late,
)


def judge(facts: Facts) -> tuple[Rule, ...]:
    """Every rule of `RULES` on `facts`, in that order."""
    return tuple(rule(facts) for rule in RULES)


def slots_needed(held: float) -> int:
    """Slots that `held` sequences are at most 80 % of."""
    # Rounded first, so that a binary fraction just above a whole number asks for no slot more.
    return math.ceil(round(held / MOST_SLOTS_USED, 9))


def _quick(
    facts: Facts, prefill_ms: float, transfer_ms: float | None, typical_ms: float
) -> tuple[bool, str] | None:
    """Whether a prefill of `prefill_ms` is better left beside decode, and why; None: not known.

    `typical_ms` is what prefills take on average.
    """
    took = f"prefill takes {figure(prefill_ms)} ms"
    step_ms, goal_ms = facts.ms_per_token, facts.slo_tpot_ms
    too_many = _too_many_prefills(facts, typical_ms)
    if step_ms is not None and prefill_ms <= step_ms and not too_many:
        return True, f"{took}, no longer than a decode step of {figure(step_ms)} ms"
    # Where the bytes alone take longer, the link is too slow at any length; its own rule says so.
    if transfer_ms is not None and transfer_ms <= prefill_ms:
        handoff_ms = transfer_ms + (facts.prepare_ms or 0.0)
        if prefill_ms <= handoff_ms and not too_many:
            return True, f"{took}, no longer than its handoff of {figure(handoff_ms)} ms"
    if step_ms is None:
        return None
    gap_ms = step_ms + prefill_ms
    gap = f"{took}: a gap of {figure(gap_ms)} ms between tokens instead of {figure(step_ms)} "
    gap += "if decode waits"
    if goal_ms is None:
        return False, gap
    is_within = gap_ms <= goal_ms
    gap += f", {'within' if is_within else 'over'} the TPOT goal of {figure(goal_ms)} ms"
    return is_within and not too_many, gap + too_many


def _too_many_prefills(facts: Facts, typical_ms: float) -> str:
    """Says so if prefills come so often that decode, waiting for each, misses its TPOT goal on
    average; nothing if it does not or that is not known.
    """
    step_ms, goal_ms, workers = facts.ms_per_token, facts.slo_tpot_ms, facts.unsplit_workers
    if step_ms is None or goal_ms is None or not workers or facts.rate_rps is None:
        return ""
    share = facts.rate_rps * typical_ms / 1e3 / workers
    if share < 1 and step_ms / (1 - share) <= goal_ms:
        return ""
    slower = f", {figure(step_ms / (1 - share))} ms a token on average" if share < 1 else ""
    return f"; prefills take {percent(share)} of {count(workers, 'unsplit worker')}{slower}"


def _fits(held: float, slots: int) -> bool:
    return slots_needed(held) <= slots


def _absent(facts: Facts, *names: str) -> Missing:
    return tuple((name,) for name in names if getattr(facts, name) is None)


def _unknown(rule: str, missing: Missing) -> Rule:
    words = ", ".join(" or ".join(either) for either in missing)
    because = f"cannot be judged without {words}"
    return Rule(rule=rule, holds=None, because=because, missing=missing)


def _make(number: int) -> str:
    return "makes" if number == 1 else "make"


def _are(number: int) -> str:
    return f"is {number}" if number == 1 else f"are {number:,}"
