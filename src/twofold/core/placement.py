"""Where a request goes: the policies, asked with what the fleet looks like now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from twofold.core.fleet import Fleet, Load
from twofold.policy.admit import ADMISSIONS, Admission
from twofold.policy.choice import Choice, Named, lookup
from twofold.policy.decode import DECODE_CHOICES, DecodeChoice
from twofold.policy.prefill import PREFILL_CHOICES, PrefillChoice
from twofold.policy.prefill import READ_PREFIXES as PREFILL_READS
from twofold.policy.split import LOOK_AT_PAIRS_FIRST, SPLIT_CHOICES, SplitChoice
from twofold.policy.split import READ_PREFIXES as SPLIT_READS
from twofold.policy.views import (
    AdmitView,
    Incoming,
    PrefillView,
    SplitView,
    projected_ttft_ns,
    work_ns,
)

_View = TypeVar("_View", bound=Named)


class Refusal(NamedTuple):
    """Why a request is not taken on. All can be tried again."""

    status: int
    code: str
    reason: str
    retry_after_s: int


class Placement(NamedTuple):
    """`worker` gets the first leg, or with `whole` the only one.

    `fallback`: it is the only one because no pair can be used. `choices` led to it.
    """

    worker: str
    whole: bool
    fallback: bool
    choices: tuple[Choice, ...]


class Placer:
    """Asks the policies. Raises ValueError for a name that no policy has.

    Arguments are as for `twofold.core.router.Router`.
    """

    def __init__(
        self,
        *,
        prefill_policy: str,
        decode_policy: str,
        split_policy: str,
        admission: str,
        seed: int,
        ttft_goal_ns: int,
        tpot_goal_ns: int,
        prefill_budget_tokens: int,
        local_below_tokens: int,
        mixed_above_tokens: int,
        prefix_keys: int,
    ) -> None:
        self._prefill: PrefillChoice = lookup(PREFILL_CHOICES, prefill_policy, "prefill_policy")
        self._decode: DecodeChoice = lookup(DECODE_CHOICES, decode_policy, "decode_policy")
        self._split: SplitChoice = lookup(SPLIT_CHOICES, split_policy, "split_policy")
        self._admit: Admission = lookup(ADMISSIONS, admission, "admission")
        self._looks_at_all = split_policy not in LOOK_AT_PAIRS_FIRST
        self._admits_all = admission == "none"
        self._seed = seed
        self._ttft_goal_ns = ttft_goal_ns
        self._tpot_goal_ns = tpot_goal_ns
        self._local_below_tokens = local_below_tokens
        self._mixed_above_tokens = mixed_above_tokens
        self.fleet = Fleet(
            track_prefixes=prefill_policy in PREFILL_READS or split_policy in SPLIT_READS,
            budget_tokens=prefill_budget_tokens,
            most_keys=prefix_keys,
        )

    def unready(self) -> str | None:
        """Why no request could be placed now, or None."""
        return None if self.fleet.up("mixed") else self.fleet.pair_fault()

    def place(
        self, load: Load, time_left_ns: int, avoid: Sequence[str] = ()
    ) -> Placement | Refusal:
        """Where the request goes first; the one that writes its answer may be chosen later.

        Workers to `avoid` are taken only where there are no others.
        """
        incoming = self._incoming(load)
        views = _others(self.fleet.prefill_views(load), avoid)
        chosen = self._prefill(views, incoming)
        remote = next((view for view in views if view.name == chosen.worker), None)
        all_of_them = self._looks_at_all or remote is None
        whole = self._split(
            SplitView(
                incoming,
                remote,
                tuple(_others(self.fleet.whole_views(load), avoid)) if all_of_them else (),
                self._local_below_tokens,
                self._mixed_above_tokens,
            )
        )
        if not whole.worker and remote is None:
            reason = self.unready() or self.fleet.unserved(load)
            if reason is None:  # workers are up, but none may be given more
                return Refusal(429, "over_capacity", chosen.reason, 1)
            return Refusal(503, "not_ready", reason, 1)
        refusal = None
        if not self._admits_all:
            refusal = self._refusal(load, incoming, whole, remote, time_left_ns)
        if refusal is not None:
            return refusal
        if not whole.worker:
            return Placement(chosen.worker, False, False, (whole, chosen))
        fallback = remote is None and any(
            worker.seen.role != "mixed" for worker in self.fleet.workers.values()
        )
        return Placement(whole.worker, True, fallback, (whole,))

    def place_answer(self, load: Load, prefill: str, avoid: Sequence[str] = ()) -> Choice:
        """Which decode worker takes over from `prefill`, by the loads of this moment."""
        views = self.fleet.decode_views(self.fleet.partners(prefill))
        return self._decode(_others(views, avoid), self._incoming(load))

    def _incoming(self, load: Load) -> Incoming:
        return Incoming(
            load.number, self._seed, load.weight, load.need_blocks, load.predicted_tokens
        )

    def _refusal(
        self,
        load: Load,
        incoming: Incoming,
        whole: Choice,
        remote: PrefillView | None,
        time_left_ns: int,
    ) -> Refusal | None:
        if whole.worker or remote is None:
            writers = [whole.worker]
            prefill_ns = ttft_ns = self.fleet.reading_ns(whole.worker, load)
        else:
            writers = self.fleet.partners(remote.name)
            ttft_ns = projected_ttft_ns(remote)
            prefill_ns = work_ns(remote.queued_tokens + remote.uncached_tokens, remote.tokens_per_s)
        limits = [ns for ns in (self._ttft_goal_ns, time_left_ns) if ns]
        verdict = self._admit(
            AdmitView(
                incoming,
                ttft_ns,
                prefill_ns,
                min(limits, default=0),
                tuple(self.fleet.decode_views(writers)),
                self.fleet.coming,
                self.fleet.coming_blocks,
                self._tpot_goal_ns,
            )
        )
        if verdict.admitted:
            return None
        return Refusal(429, "over_capacity", verdict.reason, verdict.retry_after_s)


def _others(views: Sequence[_View], avoid: Sequence[str]) -> Sequence[_View]:
    """Those not to be avoided, or all where that is none."""
    if not avoid:
        return views
    return [view for view in views if view.name not in avoid] or views
