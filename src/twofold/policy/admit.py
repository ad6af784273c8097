"""Whether to take a request on when it arrives, looking at both pools.

What cannot be in time is refused before any work is done on it, with a time after which trying
again makes sense. A prompt that was read for a decode worker with no room is work lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from twofold.policy.views import AdmitView, DecodeView, has_room
from twofold.types import NS_PER_S, ceil_div, ns_to_ms


class Verdict(NamedTuple):
    """`reason` and `retry_after_s` (at least 1) go with a refusal."""

    admitted: bool
    reason: str = ""
    retry_after_s: int = 0


Admission: TypeAlias = Callable[[AdmitView], Verdict]

_YES: Final = Verdict(True)


def everything(view: AdmitView) -> Verdict:
    """All that workers and the bound on requests in flight let in."""
    return _YES


def ttft(view: AdmitView) -> Verdict:
    """What gets its first token in time. Decode's room is not looked at."""
    if not view.limit_ns or view.ttft_ns <= view.limit_ns:
        return _YES
    over_ns = view.ttft_ns - view.limit_ns
    return Verdict(
        False,
        f"the first token is projected after {ns_to_ms(view.ttft_ns):.0f} ms, "
        f"{ns_to_ms(view.limit_ns):.0f} ms is the limit",
        ceil_div(over_ns, NS_PER_S),
    )


def joint(view: AdmitView) -> Verdict:
    """What is in time, if decode has room now for it and for all that is being read already.

    Without those, a burst would be let in whole before the first of it reaches decode.
    """
    return _both(view, 0)


def joint_predicted(view: AdmitView) -> Verdict:
    """What is in time, if decode will have that room when the prompt has been read.

    By the room there is now, requests are refused that would have met answers ended meanwhile.
    """
    return _both(view, view.prefill_ns)


def after(view: DecodeView, wait_ns: int) -> DecodeView:
    """`view` after `wait_ns`, as answers end at an even pace and nothing new is sent there.

    A sequence has output_left / sequences tokens to go on average, at `tpot_ns` each; so many
    end in `wait_ns`, and their blocks are free.
    """
    n = view.sequences
    if not (wait_ns and view.tpot_ns and n):
        return view
    ends = min(n, n * n * wait_ns // (max(1, view.output_left) * view.tpot_ns))
    left = n - ends
    return view._replace(
        sequences=left,
        output_left=view.output_left * left // n,
        used_blocks=ceil_div(view.used_blocks * left, n),
        tpot_ns=max(0, view.tpot_ns - ends * view.tpot_rise_ns),
    )


def _both(view: AdmitView, wait_ns: int) -> Verdict:
    verdict = ttft(view)
    if not verdict.admitted:
        return verdict
    then = [after(worker, wait_ns) for worker in view.decode if worker.up]
    # One that fits no pool is the worker's to refuse, for good: trying again would not help it.
    need = view.incoming.need_blocks
    roomy = [w for w in then if has_room(w, min(need, w.total_blocks or need))]
    if not roomy:
        return Verdict(False, "no decode worker has room", 1)
    if not _pool_has_room(view, then):
        return Verdict(False, "decode has no room beside what is being read for it", 1)
    goal_ns = view.tpot_goal_ns
    if goal_ns and all(w.sequences and w.tpot_ns + w.tpot_rise_ns > goal_ns for w in roomy):
        best_ns = min([w.tpot_ns + w.tpot_rise_ns for w in roomy])
        return Verdict(
            False,
            f"TPOT is projected at {ns_to_ms(best_ns):.1f} ms, "
            f"{ns_to_ms(goal_ns):.1f} ms is the goal",
            1,
        )
    return _YES


def _pool_has_room(view: AdmitView, workers: Sequence[DecodeView]) -> bool:
    """Whether the pool takes this request on top of all that is coming. Unknown bounds do not bind.

    With nothing coming, a single worker's room has been checked already.
    """
    if not view.coming:
        return True
    if all(w.slots for w in workers):
        slots = sum([max(0, w.slots - w.sequences) for w in workers])
        if slots <= view.coming:
            return False
    if all(w.total_blocks for w in workers):
        blocks = sum([max(0, w.total_blocks - w.used_blocks) for w in workers])
        return blocks >= view.coming_blocks + view.incoming.need_blocks
    return True


ADMISSIONS: Final[dict[str, Admission]] = {
    "none": everything,
    "ttft": ttft,
    "joint": joint,
    "joint_predicted": joint_predicted,
}
