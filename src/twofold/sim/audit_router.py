"""What a gateway has told workers, kept apart from the router, and what must hold of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twofold.core.router import Router
from twofold.messages import (
    Arrive,
    CancelLeg,
    Cut,
    DecodeStarted,
    LegEnded,
    LegFailed,
    PrefillDone,
    Recovery,
    RecoveryResult,
    ReleaseHeld,
    RouterEffect,
    RouterMessage,
    SendDecode,
    SendPrefill,
    Terminal,
)
from twofold.types import NS_PER_S, RequestId


class _Entry:
    """One request: its attempt, the workers of its open legs, and who holds KV for it."""

    __slots__ = ("begun", "generation", "held", "legs", "weight")

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.generation = 0
        self.legs: dict[str, str] = {}
        self.held = ""
        self.begun = False


class RouterBook:
    """Raises AssertionError for an effect that leaves something behind, or is not due.

    An attempt begins once its request's last one has no leg and no KV left anywhere, under the next
    generation, before the answer has begun, and as often as `settings` (those of the router)
    allow. Recomputed prompts keep to their budget over every stretch of time.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        policy = settings.get("failure_policy", "fail")
        retries = settings.get("retries", 1)
        self._most = {"fail": 0, "retry-pair": retries}.get(policy, 1)
        self._per_s: int = settings.get("recompute_tokens_per_s", 2_000)
        self._open: dict[RequestId, _Entry] = {}
        self._recomputed: list[tuple[int, int]] = []
        self.results: dict[RecoveryResult, int] = {}

    def handled(
        self, router: Router, now_ns: int, message: RouterMessage, effects: Sequence[RouterEffect]
    ) -> None:
        """`router` made `effects` of `message`."""
        if isinstance(message, Arrive):
            self._open[message.request_id] = _Entry(message.weight)
        elif isinstance(message, PrefillDone | DecodeStarted | LegEnded | LegFailed):
            self._heard(message)
        for effect in effects:
            if isinstance(effect, Recovery):
                self._recovery(effect, now_ns)
            elif isinstance(effect, SendPrefill | SendDecode | CancelLeg | ReleaseHeld):
                self._told(effect)
            elif isinstance(effect, Cut):
                assert self._open[effect.request_id].begun, f"{effect} of an answer not begun"
            elif isinstance(effect, Terminal):
                self._ended(effect)
        for result, n in self.results.items():
            assert getattr(router.counts, result) == n, f"{result} is not counted"

    def _heard(self, message: PrefillDone | DecodeStarted | LegEnded | LegFailed) -> None:
        entry = self._open.get(message.request_id)
        if entry is None or entry.generation != message.generation:
            return  # late
        if isinstance(message, LegFailed):
            entry.legs.pop(message.leg, None)
        elif isinstance(message, PrefillDone):
            worker = entry.legs.pop("prefill", "")
            entry.held = entry.held if entry.begun else worker or entry.held
        elif isinstance(message, LegEnded):
            if entry.begun:
                entry.legs.pop("decode", None)
        elif "decode" in entry.legs:
            entry.begun, entry.held = True, ""

    def _told(self, effect: SendPrefill | SendDecode | CancelLeg | ReleaseHeld) -> None:
        entry = self._open[effect.request_id]
        assert effect.generation == entry.generation, f"{effect} in attempt {entry.generation}"
        if isinstance(effect, ReleaseHeld):
            assert effect.worker == entry.held, f"{effect}, but {entry.held or 'nobody'} holds it"
            entry.held = ""
        elif isinstance(effect, CancelLeg):
            assert entry.legs.pop(effect.leg, "") == effect.worker, f"{effect}: no such leg"
        else:
            leg = "prefill" if isinstance(effect, SendPrefill) else "decode"
            assert leg not in entry.legs, f"{effect}: a second one"
            entry.legs[leg] = effect.worker

    def _recovery(self, effect: Recovery, now_ns: int) -> None:
        entry = self._open[effect.request_id]
        self.results[effect.result] = self.results.get(effect.result, 0) + 1
        assert effect.generation == entry.generation, f"{effect} in attempt {entry.generation}"
        assert not entry.begun, f"{effect}: its answer has begun"
        assert not entry.legs, f"{effect}: legs {entry.legs} are still open"
        assert not entry.held, f"{effect}: {entry.held} still holds its KV"
        if not effect.sent_again:
            return
        entry.generation += 1
        assert entry.generation <= self._most, f"{effect}: at most {self._most} are allowed"
        if effect.result == "recomputed":
            self._charge(entry.weight, now_ns)

    def _charge(self, tokens: int, now_ns: int) -> None:
        """Since any moment: no more than what came in, one second's worth, and one large prompt."""
        before = 0
        for at_ns, n in [(now_ns, 0), *reversed(self._recomputed)]:
            before += n
            have = self._per_s * (NS_PER_S + now_ns - at_ns)
            need = (before + min(tokens, self._per_s)) * NS_PER_S
            assert need <= have, f"{before + tokens} tokens recomputed in {now_ns - at_ns} ns"
        self._recomputed.append((now_ns, tokens))

    def _ended(self, effect: Terminal) -> None:
        entry = self._open.pop(effect.request_id)
        assert not entry.held, f"{effect}: {entry.held} still holds its KV"
        # Once its answer has begun, what is left of a prefill leg ends by itself.
        left = [leg for leg in entry.legs if not (entry.begun and leg == "prefill")]
        assert not left, f"{effect}: legs {left} are still open"
